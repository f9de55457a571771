#define _GNU_SOURCE
#include "settings/values.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static const struct {
    const char *name;
    uint64_t ns;
} r2_time_units[] = {
    {"h", 3600000000000u}, {"min", 60000000000u}, {"s", 1000000000u},
    {"ms", 1000000u},      {"us", 1000u},         {"ns", 1u},
};

#define R2_TIME_UNITS (sizeof(r2_time_units) / sizeof(r2_time_units[0]))

/* Decimal digits at `*text`, at least one; moves `*text` behind them. */
static int r2_value_digits(const char **text, uint64_t *out)
{
    const char *p = *text;
    uint64_t value = 0;

    if (!isdigit((unsigned char)*p)) {
        return -EINVAL;
    }
    for (; isdigit((unsigned char)*p); p++) {
        if (__builtin_mul_overflow(value, 10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*p - '0'), &value)) {
            return -EINVAL;
        }
    }
    *text = p;
    *out = value;
    return 0;
}

int r2_value_decimal(const char **text, double *out)
{
    const char *p = *text;
    double part = 1;
    uint64_t whole;

    if (r2_value_digits(&p, &whole)) {
        return -EINVAL;
    }
    *out = (double)whole;
    if (*p == '.' && isdigit((unsigned char)p[1])) {
        for (p++; isdigit((unsigned char)*p); p++) {
            *out += (*p - '0') * (part /= 10);
        }
    }
    *text = p;
    return 0;
}

int r2_value_bool(const char *text, bool *out)
{
    static const char *const words[][4] = {{"0", "no", "off", "false"}, {"1", "yes", "on", "true"}};

    for (int value = 0; value < 2; value++) {
        for (int i = 0; i < 4; i++) {
            if (strcasecmp(text, words[value][i]) == 0) {
                *out = value != 0;
                return 0;
            }
        }
    }
    return -EINVAL;
}

int64_t r2_value_nccl(const char *text, int64_t otherwise)
{
    long long value;

    if (!text || !text[0]) {
        return otherwise;
    }
    errno = 0;
    value = strtoll(text, NULL, 0);
    return errno ? otherwise : value;
}

int r2_value_int(const char *text, int *out)
{
    bool negative = *text == '-';
    uint64_t value;

    text += negative;
    if (r2_value_digits(&text, &value) || *text || value > INT32_MAX) {
        return -EINVAL;
    }
    *out = negative ? -(int)value : (int)value;
    return 0;
}

int r2_value_size(const char *text, uint64_t *out)
{
    static const char letters[] = "KMG";
    uint64_t value;
    uint64_t scale = 1;

    if (r2_value_digits(&text, &value)) {
        return -EINVAL;
    }
    for (int i = 0; letters[i]; i++) {
        if (toupper((unsigned char)*text) == letters[i]) {
            scale = (uint64_t)1 << (10 * (i + 1));
            text++;
            break;
        }
    }
    if (strcasecmp(text, "B") == 0 || (scale > 1 && strcasecmp(text, "iB") == 0)) {
        text = "";
    }
    if (*text || __builtin_mul_overflow(value, scale, &value)) {
        return -EINVAL;
    }
    *out = value;
    return 0;
}

static uint64_t r2_value_time_unit(const char *name)
{
    for (size_t i = 0; i < R2_TIME_UNITS; i++) {
        if (strcasecmp(name, r2_time_units[i].name) == 0) {
            return r2_time_units[i].ns;
        }
    }
    return 0;
}

int r2_value_duration(const char *text, const char *unit, uint64_t *out_ns)
{
    uint64_t value;
    uint64_t scale;
    const char *fraction = NULL;

    if (r2_value_digits(&text, &value)) {
        return -EINVAL;
    }
    if (*text == '.') {
        fraction = ++text;
        text += strspn(text, "0123456789");
        if (text == fraction) {
            return -EINVAL;
        }
    }
    scale = r2_value_time_unit(*text ? text : unit);
    if (scale == 0 || __builtin_mul_overflow(value, scale, &value)) {
        return -EINVAL;
    }
    for (uint64_t part = scale / 10; fraction && part && isdigit((unsigned char)*fraction);
         part /= 10) {
        if (__builtin_add_overflow(value, part * (uint64_t)(*fraction++ - '0'), &value)) {
            return -EINVAL;
        }
    }
    *out_ns = value;
    return 0;
}

int r2_value_enum(const char *text, const char *choices, int *out)
{
    size_t len = strlen(text);
    int value = 0;

    for (const char *p = choices; *p;) {
        size_t word = strcspn(p, " |");

        if (word == len && len > 0 && strncasecmp(p, text, len) == 0) {
            *out = value;
            return 0;
        }
        p += word;
        value += *p == '|';
        p += *p != '\0';
    }
    return -EINVAL;
}

void r2_value_enum_name(const char *choices, int value, char *out, size_t outlen)
{
    const char *p = choices;

    for (int i = 0; i < value && p; i++) {
        p = strchr(p, '|');
        p = p ? p + 1 : NULL;
    }
    snprintf(out, outlen, "%.*s", p && value >= 0 ? (int)strcspn(p, " |") : 0, p ? p : "");
}

int r2_value_ports(const char *text, struct r2_port_range *out)
{
    uint64_t low;
    uint64_t high;

    if (*text == '\0') {
        *out = (struct r2_port_range){0, 0};
        return 0;
    }
    if (r2_value_digits(&text, &low)) {
        return -EINVAL;
    }
    high = low;
    if (*text == '-') {
        text++;
        if (r2_value_digits(&text, &high)) {
            return -EINVAL;
        }
    }
    if (*text || low == 0 || high > UINT16_MAX || low > high) {
        return -EINVAL;
    }
    *out = (struct r2_port_range){(uint16_t)low, (uint16_t)high};
    return 0;
}

int r2_value_cpus(const char *text, cpu_set_t *out)
{
    cpu_set_t set;

    CPU_ZERO(&set);
    while (*text) {
        uint64_t low;
        uint64_t high;

        if (r2_value_digits(&text, &low)) {
            return -EINVAL;
        }
        high = low;
        if (*text == '-') {
            text++;
            if (r2_value_digits(&text, &high)) {
                return -EINVAL;
            }
        }
        if (low > high || high >= CPU_SETSIZE || (*text && *text != ',') ||
            (*text == ',' && text[1] == '\0')) {
            return -EINVAL;
        }
        for (; low <= high; low++) {
            CPU_SET(low, &set);
        }
        text += *text == ',';
    }
    *out = set;
    return 0;
}

void r2_value_size_text(uint64_t bytes, char *out, size_t outlen)
{
    static const char *const suffixes[] = {"", "K", "M", "G"};
    int i = 0;

    for (; i < 3 && bytes && bytes % 1024 == 0; i++) {
        bytes /= 1024;
    }
    snprintf(out, outlen, "%" PRIu64 "%s", bytes, suffixes[i]);
}

void r2_value_duration_text(uint64_t ns, char *out, size_t outlen)
{
    size_t i = 0;

    /* Minutes and hours only from two on: 60s, as people write it. */
    while (i + 1 < R2_TIME_UNITS &&
           (ns % r2_time_units[i].ns || (i < 2 && ns < 2 * r2_time_units[i].ns))) {
        i++;
    }
    snprintf(out, outlen, "%" PRIu64 "%s", ns / r2_time_units[i].ns, r2_time_units[i].name);
}
