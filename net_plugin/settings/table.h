/* The rows of settings.def as data, shared by the files of this room. */
#ifndef R2_SETTINGS_TABLE_H
#define R2_SETTINGS_TABLE_H

#include "settings/settings.h"

enum r2_setting_type {
    R2_TYPE_BOOL,
    R2_TYPE_INT,
    R2_TYPE_SIZE,
    R2_TYPE_DURATION,
    R2_TYPE_ENUM,
    R2_TYPE_STRING,
    R2_TYPE_PORTS,
    R2_TYPE_CPUS,
};

struct r2_setting_row {
    const char *name;
    enum r2_setting_type type;
    size_t offset; /* in struct r2_settings */
    const char *def;
    const char *unit;
    const char *allowed;
    const char *doc;
    bool foreign;
};

struct r2_setting_alias {
    const char *alias;
    const char *name;
};

extern const struct r2_setting_row r2_setting_rows[];
extern const int r2_setting_row_count;

/* The aliases; ended by an entry of NULLs. */
extern const struct r2_setting_alias r2_setting_aliases[];

/* Reads `text` into the member of `out` that belongs to `row`. 0, or -EINVAL with a message that
 * names the setting as `name`, the value and what is allowed. */
int r2_setting_read(const struct r2_setting_row *row, const char *name, const char *text,
                    struct r2_settings *out, char *err, size_t errlen);
/* What a value of the row may be, for messages: "0..64K bytes", "home, all or auto". */
void r2_setting_allowed_text(const struct r2_setting_row *row, char *out, size_t outlen);
/* The default as messages show it, with its unit: "100ms"; "" for none. */
void r2_setting_default_text(const struct r2_setting_row *row, char *out, size_t outlen);
/* The user's text for the row and the name that it was found under, or NULL. An empty value
 * counts as unset, as elsewhere in NCCL's world. */
const char *r2_setting_user_text(const struct r2_setting_row *row, r2_getenv_fn getenv_fn,
                                 const char **found_as);

#endif
