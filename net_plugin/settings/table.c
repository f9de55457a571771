#include "settings/table.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "settings/values.h"

const struct r2_setting_row r2_setting_rows[] = {
#define R2_SETTING(field, name, type, def, unit, allowed, doc)                                     \
    {name, R2_TYPE_##type, offsetof(struct r2_settings, field), def, unit, allowed, doc, false},
#define R2_FOREIGN(field, name, doc)                                                               \
    {name, R2_TYPE_STRING, offsetof(struct r2_settings, field), "", "", "", doc, true},
#include "settings/settings.def"
};

const int r2_setting_row_count = sizeof(r2_setting_rows) / sizeof(r2_setting_rows[0]);

const struct r2_setting_alias r2_setting_aliases[] = {
#define R2_ALIAS(alias, name) {alias, name},
#include "settings/settings.def"
    {NULL, NULL},
};

/* Room for any type, so that a value is checked before the settings change. */
union r2_setting_value {
    bool boolean;
    int number;
    uint64_t wide;
    struct r2_port_range ports;
    cpu_set_t cpus;
};

static int r2_setting_wide(const struct r2_setting_row *row, const char *text, uint64_t *out)
{
    int number;
    int rc;

    switch (row->type) {
    case R2_TYPE_SIZE:
        return r2_value_size(text, out);
    case R2_TYPE_DURATION:
        return r2_value_duration(text, row->unit, out);
    default:
        rc = r2_value_int(text, &number);
        if (rc == 0 && number < 0) {
            rc = -EINVAL;
        }
        if (rc == 0) {
            *out = (uint64_t)number;
        }
        return rc;
    }
}

/* Reads a number of any scale and holds it against "lowest..highest". */
static int r2_setting_ranged(const struct r2_setting_row *row, const char *text, uint64_t *out)
{
    const char *dots = strstr(row->allowed, "..");
    char low_text[32];
    uint64_t low;
    uint64_t high;
    int rc = r2_setting_wide(row, text, out);

    if (rc || !dots) {
        return rc;
    }
    snprintf(low_text, sizeof(low_text), "%.*s", (int)(dots - row->allowed), row->allowed);
    if (r2_setting_wide(row, low_text, &low) || r2_setting_wide(row, dots + 2, &high)) {
        return -EINVAL;
    }
    return *out < low || *out > high ? -EINVAL : 0;
}

static int r2_setting_store(const struct r2_setting_row *row, const char *text, void *place)
{
    union r2_setting_value value;
    int rc;

    switch (row->type) {
    case R2_TYPE_BOOL:
        return r2_value_bool(text, place);
    case R2_TYPE_ENUM:
        return r2_value_enum(text, row->allowed, place);
    case R2_TYPE_PORTS:
        return r2_value_ports(text, place);
    case R2_TYPE_INT:
        rc = r2_setting_ranged(row, text, &value.wide);
        if (rc == 0) {
            *(int *)place = (int)value.wide;
        }
        return rc;
    case R2_TYPE_SIZE:
    case R2_TYPE_DURATION:
        rc = r2_setting_ranged(row, text, &value.wide);
        if (rc == 0) {
            *(uint64_t *)place = value.wide;
        }
        return rc;
    case R2_TYPE_CPUS:
        rc = r2_value_cpus(text, &value.cpus);
        if (rc) {
            return rc;
        }
        break;
    case R2_TYPE_STRING:
        if (row->allowed[0] && strlen(text) > strtoul(row->allowed, NULL, 10)) {
            return -EINVAL;
        }
        break;
    }
    if (strlen(text) >= R2_SETTING_TEXT) {
        return -EINVAL;
    }
    memcpy(place, text, strlen(text) + 1);
    return 0;
}

static void r2_setting_choices_text(const char *choices, char *out, size_t outlen)
{
    size_t at = 0;

    for (int i = 0; at < outlen; i++) {
        char name[64];

        r2_value_enum_name(choices, i, name, sizeof(name));
        if (name[0] == '\0') {
            break;
        }
        at += (size_t)snprintf(out + at, outlen - at, "%s%s", i ? ", " : "one of ", name);
    }
}

void r2_setting_allowed_text(const struct r2_setting_row *row, char *out, size_t outlen)
{
    switch (row->type) {
    case R2_TYPE_BOOL:
        snprintf(out, outlen, "0 or 1");
        break;
    case R2_TYPE_ENUM:
        r2_setting_choices_text(row->allowed, out, outlen);
        break;
    case R2_TYPE_INT:
        snprintf(out, outlen, "a number, %s", row->allowed);
        break;
    case R2_TYPE_SIZE:
        snprintf(out, outlen, "%s bytes, with K, M or G if you like", row->allowed);
        break;
    case R2_TYPE_DURATION:
        snprintf(out, outlen, "%s, such as 100ms or 60s (a plain number is in %s)", row->allowed,
                 row->unit);
        break;
    case R2_TYPE_PORTS:
        snprintf(out, outlen, "LOW-HIGH between 1 and 65535");
        break;
    case R2_TYPE_CPUS:
        snprintf(out, outlen, "a list of cores such as 0-3,8");
        break;
    case R2_TYPE_STRING:
        if (row->allowed[0]) {
            snprintf(out, outlen, "a text of at most %s bytes", row->allowed);
            break;
        }
        snprintf(out, outlen, "a text of less than %d characters", R2_SETTING_TEXT);
        break;
    }
}

void r2_setting_default_text(const struct r2_setting_row *row, char *out, size_t outlen)
{
    uint64_t ns;

    /* As a value is shown: 600 s is 10min in both. */
    if (row->type == R2_TYPE_DURATION && r2_setting_store(row, row->def, &ns) == 0)
        r2_value_duration_text(ns, out, outlen);
    else
        snprintf(out, outlen, "%s", row->def);
}

int r2_setting_read(const struct r2_setting_row *row, const char *name, const char *text,
                    struct r2_settings *out, char *err, size_t errlen)
{
    char allowed[256], otherwise[80];
    int rc = r2_setting_store(row, text, (char *)out + row->offset);

    if (rc) {
        r2_setting_allowed_text(row, allowed, sizeof(allowed));
        r2_setting_default_text(row, otherwise, sizeof(otherwise));
        snprintf(err, errlen, "%s=%.200s is not valid: allowed is %s; the default holds (%s)", name,
                 text, allowed, otherwise[0] ? otherwise : "empty");
    }
    return rc;
}

const char *r2_setting_user_text(const struct r2_setting_row *row, r2_getenv_fn getenv_fn,
                                 const char **found_as)
{
    const char *text = getenv_fn(row->name);

    *found_as = row->name;
    for (const struct r2_setting_alias *a = r2_setting_aliases; a->alias && (!text || !*text);
         a++) {
        if (strcmp(a->name, row->name) == 0) {
            text = getenv_fn(a->alias);
            *found_as = a->alias;
        }
    }
    return text && *text ? text : NULL;
}
