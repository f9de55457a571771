/* The table with the values of this process as JSON, for r2ccl-ctl. */
#include <inttypes.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "settings/file.h"
#include "settings/table.h"
#include "settings/values.h"
#include "util/jsontext.h"

static const char *const r2_type_names[] = {"bool", "int",    "size",  "duration",
                                            "enum", "string", "ports", "cpus"};

static void r2_json_member(FILE *f, const char *key, const char *text)
{
    fprintf(f, ", \"%s\": ", key);
    r2_json_string(f, text);
}

static void r2_json_value(FILE *f, const struct r2_setting_row *row, const struct r2_settings *s)
{
    const void *place = (const char *)s + row->offset;
    const struct r2_port_range *ports = place;
    char text[64];

    fputs(", \"value\": ", f);
    switch (row->type) {
    case R2_TYPE_BOOL:
        fputs(*(const bool *)place ? "\"1\"" : "\"0\"", f);
        return;
    case R2_TYPE_INT:
        fprintf(f, "\"%d\"", *(const int *)place);
        return;
    case R2_TYPE_SIZE:
        r2_value_size_text(*(const uint64_t *)place, text, sizeof(text));
        break;
    case R2_TYPE_DURATION:
        r2_value_duration_text(*(const uint64_t *)place, text, sizeof(text));
        break;
    case R2_TYPE_ENUM:
        r2_value_enum_name(row->allowed, *(const int *)place, text, sizeof(text));
        break;
    case R2_TYPE_PORTS:
        snprintf(text, sizeof(text), "%u-%u", ports->low, ports->high);
        text[ports->high ? sizeof(text) - 1 : 0] = '\0';
        break;
    default:
        r2_json_string(f, place);
        return;
    }
    r2_json_string(f, text);
}

static void r2_json_choices(FILE *f, const struct r2_setting_row *row)
{
    char name[64];

    fputs(", \"choices\": [", f);
    for (int i = 0; row->type == R2_TYPE_ENUM; i++) {
        r2_value_enum_name(row->allowed, i, name, sizeof(name));
        if (name[0] == '\0') {
            break;
        }
        fputs(i ? ", " : "", f);
        r2_json_string(f, name);
    }
    fputs("]", f);
}

/* R2CCL_MODE also says what the plan is (r2_settings_parse). */
static bool r2_json_plan_of_mode(const struct r2_setting_row *row, struct r2_settings *s)
{
    static struct r2_settings whole;
    char err[512];
    int own = s->plan;

    if (row->offset != offsetof(struct r2_settings, plan))
        return false;
    (void)r2_settings_parse(&whole, r2_settings_getenv, err, sizeof(err));
    s->plan = whole.plan;
    return s->plan != own;
}

/* Where the user's text comes from: the environment, an alias in it, or a file. */
static const char *r2_json_source(const struct r2_setting_row *row, const char *name)
{
    const char *text = getenv(name), *where = "environment";

    if (strcmp(name, row->name) != 0) {
        return name;
    }
    if (!text || !text[0]) {
        r2_file_get(name, &where);
    }
    return where;
}

static void r2_json_row(FILE *f, const struct r2_setting_row *row, struct r2_settings *s)
{
    char err[512];
    char allowed[256];
    char unit_default[80];
    const char *name;
    const char *text = r2_setting_user_text(row, r2_settings_getenv, &name);
    bool bad, of_mode;

    r2_setting_default_text(row, unit_default, sizeof(unit_default));
    r2_setting_read(row, row->name, row->def, s, err, sizeof(err));
    bad = text && r2_setting_read(row, name, text, s, err, sizeof(err));
    of_mode = r2_json_plan_of_mode(row, s);
    r2_setting_allowed_text(row, allowed, sizeof(allowed));

    fputs("{\"name\": ", f);
    r2_json_string(f, row->name);
    r2_json_member(f, "type", r2_type_names[row->type]);
    r2_json_member(f, "default", unit_default);
    r2_json_member(f, "unit", row->unit);
    r2_json_member(f, "allowed", allowed);
    r2_json_choices(f, row);
    r2_json_value(f, row, s);
    r2_json_member(f, "source",
                   of_mode        ? "R2CCL_MODE"
                   : !text || bad ? "default"
                                  : r2_json_source(row, name));
    fprintf(f, ", \"foreign\": %s", row->foreign ? "true" : "false");
    if (bad) {
        r2_json_member(f, "error", err);
    }
    r2_json_member(f, "doc", row->doc);
    fputs("}", f);
}

static pthread_once_t r2_json_once = PTHREAD_ONCE_INIT;
static char *r2_json_text;

static void r2_json_make(void)
{
    struct r2_settings *s = calloc(1, sizeof(*s));
    char *text = NULL;
    size_t size = 0;
    FILE *f = s ? open_memstream(&text, &size) : NULL;

    if (f) {
        fputs("[", f);
        for (int i = 0; i < r2_setting_row_count; i++) {
            fputs(i ? ",\n " : "", f);
            r2_json_row(f, &r2_setting_rows[i], s);
        }
        fputs("]\n", f);
        if (fclose(f) == 0) {
            r2_json_text = text;
        }
    }
    free(s);
}

const char *r2ccl_settings_json(void)
{
    pthread_once(&r2_json_once, r2_json_make);
    return r2_json_text ? r2_json_text : "[]\n";
}

const char *r2ccl_settings_notes(void)
{
    return r2_settings_warnings();
}
