#include "engine/nic/faultrules.h"

#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "settings/values.h"

#define WORD 64

static int kind_of(const char *text, struct r2_fault_rule *rule)
{
    rule->recover = strcmp(text, "recover") == 0;
    return rule->recover ? 0 : r2_fault_kind(text, &rule->fault);
}

static int direction_of(const char *text, struct r2_fault *f)
{
    f->tx = strcmp(text, "rx") != 0;
    f->rx = strcmp(text, "tx") != 0;
    return f->tx && f->rx && strcmp(text, "both") != 0 ? -EINVAL : 0;
}

static int count_of(const char *text, uint64_t most, uint64_t *out)
{
    char *end;

    errno = 0;
    *out = strtoull(text, &end, 10);
    return isdigit((unsigned char)*text) && !*end && !errno && *out <= most ? 0 : -EINVAL;
}

/* One KEY=VALUE. */
static int option(const char *key, const char *value, struct r2_fault_rule *rule)
{
    uint64_t rank;

    if (strcmp(key, "direction") == 0)
        return direction_of(value, &rule->fault);
    if (strcmp(key, "after") == 0)
        return r2_value_size(value, &rule->fault.after_bytes);
    if (strcmp(key, "ops") == 0)
        return count_of(value, UINT64_MAX, &rule->fault.after_ops);
    if (strcmp(key, "for") == 0)
        return r2_value_duration(value, "s", &rule->fault.for_ns);
    if (strcmp(key, "at") == 0)
        return r2_value_duration(value, "s", &rule->at_ns);
    if (strcmp(key, "node") == 0 && strlen(value) < sizeof(rule->node)) {
        snprintf(rule->node, sizeof(rule->node), "%s", value);
        return 0;
    }
    if (strcmp(key, "rank") == 0 && count_of(value, INT_MAX, &rank) == 0) {
        rule->rank = (int)rank;
        return 0;
    }
    return -EINVAL;
}

static int word(char *text, int place, struct r2_fault_rule *rule)
{
    char *equals = strchr(text, '=');

    if (place == 0) {
        snprintf(rule->nic, sizeof(rule->nic), "%s", strncmp(text, "nic=", 4) ? text : text + 4);
        return rule->nic[0] ? 0 : -EINVAL;
    }
    if (place == 1)
        return kind_of(strncmp(text, "kind=", 5) ? text : text + 5, rule);
    if (!equals || !equals[1])
        return -EINVAL;
    *equals = '\0';
    return option(text, equals + 1, rule);
}

/* `text` of length `len`: one rule. Words: how many it had; the last one is in `last`. */
static int rule_of(const char *text, size_t len, struct r2_fault_rule *rule, char last[WORD])
{
    int place = 0;

    *rule = (struct r2_fault_rule){.rank = -1, .fault = {.tx = true, .rx = true}};
    for (size_t at = 0; at < len;) {
        char copy[WORD];
        size_t n = 0;

        for (; at < len && isspace((unsigned char)text[at]); at++)
            ;
        for (; at + n < len && !isspace((unsigned char)text[at + n]); n++)
            ;
        if (n == 0)
            break;
        snprintf(last, WORD, "%.*s", (int)(n < WORD ? n : WORD), text + at);
        if (n >= WORD)
            return -EINVAL;
        snprintf(copy, sizeof(copy), "%s", last);
        if (word(copy, place, rule))
            return -EINVAL;
        at += n;
        place++;
    }
    return place;
}

int r2_fault_rules_parse(const char *text, struct r2_fault_rule *out, char *err, size_t errlen)
{
    int n = 0;

    while (*text) {
        size_t len = strcspn(text, ";\n");
        struct r2_fault_rule rule;
        char last[WORD] = "";
        int words = rule_of(text, len, &rule, last);

        if (words < 0 || words == 1) {
            snprintf(err, errlen,
                     "'%.*s': '%s' is not understood; a rule is NIC KIND [direction=tx|rx|both] "
                     "[after=BYTES] [ops=N] [for=TIME] [at=TIME] [node=N] [rank=N], KIND "
                     "%s or recover",
                     (int)(len < 100 ? len : 100), text, last, r2_fault_kinds);
            return -EINVAL;
        }
        if (words && n == R2_FAULT_RULES) {
            snprintf(err, errlen, "more than %d rules", R2_FAULT_RULES);
            return -EINVAL;
        }
        if (words)
            out[n++] = rule;
        text += len + (text[len] != '\0');
    }
    return n;
}
