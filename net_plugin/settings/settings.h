/* The settings of the process, read once from the environment and from files (settings/file.h);
 * settings.def is the table.
 *
 * Types of settings.def, what they accept, and their C type:
 *   BOOL      0 1 no yes off on false true                    bool
 *   INT       a decimal number in the allowed range           int
 *   SIZE      bytes, with K, M or G (powers of 1024)          uint64_t, bytes
 *   DURATION  a number with ns us ms s min h; plain = unit    uint64_t, nanoseconds
 *   ENUM      one of the choices, in any case                 int, enum r2_setting_*
 *   STRING    shorter than R2_SETTING_TEXT                    char[R2_SETTING_TEXT]
 *   PORTS     LOW-HIGH or one port; empty = any               struct r2_port_range
 *   CPUS      a list such as 0-3,8; empty = any               char[R2_SETTING_TEXT], checked
 *
 * The environment is read, never written. Nothing here logs: the caller prints the error and the
 * warnings, once, where the user sees them.
 */
#ifndef R2_SETTINGS_SETTINGS_H
#define R2_SETTINGS_SETTINGS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define R2_SETTING_TEXT 1024

enum r2_setting_mode {
    R2_MODE_OFF = 0,
    R2_MODE_MIGRATE = 1,
    R2_MODE_BALANCE = 2,
    R2_MODE_ALLREDUCE = 3,
    R2_MODE_OPTIMAL = 4,
    R2_MODE_AUTO = 5,
};

enum r2_setting_gpu_memory { R2_GPU_MEMORY_HOST, R2_GPU_MEMORY_DIRECT };

enum r2_setting_plan { R2_PLAN_SETTING_OFF, R2_PLAN_SETTING_SHADOW, R2_PLAN_SETTING_AUTO };

enum r2_setting_allreduce { R2_ALLREDUCE_STOCK, R2_ALLREDUCE_DIRECT };

enum r2_setting_log {
    R2_LOG_SETTING_NONE,
    R2_LOG_SETTING_WARN,
    R2_LOG_SETTING_INFO,
    R2_LOG_SETTING_TRACE
};

struct r2_port_range {
    uint16_t low, high; /* both 0: any port */
};

#define R2_CTYPE_BOOL(field) bool field;
#define R2_CTYPE_INT(field) int field;
#define R2_CTYPE_SIZE(field) uint64_t field;
#define R2_CTYPE_DURATION(field) uint64_t field;
#define R2_CTYPE_ENUM(field) int field;
#define R2_CTYPE_STRING(field) char field[R2_SETTING_TEXT];
#define R2_CTYPE_PORTS(field) struct r2_port_range field;
#define R2_CTYPE_CPUS(field) char field[R2_SETTING_TEXT];

struct r2_settings {
#define R2_SETTING(field, name, type, def, unit, allowed, doc) R2_CTYPE_##type(field)
#define R2_FOREIGN(field, name, doc) R2_CTYPE_STRING(field)
#include "settings/settings.def"
    /* Not read but set by r2_settings_parse. C tests set other values. */
    int r2cc_mode;              /* the mode, where R2CC_MODE said it, else 0 */
    bool help_progress;         /* NCCL's threads drive progress in isend and test */
    uint64_t heartbeat_idle_ns; /* between heartbeats of a path that nothing is under way on */
    int heartbeat_misses;       /* unanswered ones after which a path counts as failed */
    int damp_suppress;          /* penalty above which a NIC or path is left alone; 0: never */
    uint64_t agree_timeout_ns;  /* shim: how long a rank that has promised a change of plan waits at
                                   its operation to learn whether it was decided */
};

typedef char *(*r2_getenv_fn)(const char *name);

/* Fills `out` from `getenv_fn`. A bad value: -EINVAL, `err` names the setting, the value and what
 * is allowed, one line for each bad one with '\n' between them; these settings have their defaults
 * and the others are still read. */
int r2_settings_parse(struct r2_settings *out, r2_getenv_fn getenv_fn, char *err, size_t errlen);

/* The settings of this process: never NULL, parsed on the first call from any thread, valid and
 * constant for the life of the process. Settings with a bad value have their default; so have those
 * that name a library or a file where the process has rights that its caller may not have. */
const struct r2_settings *r2_settings_get(void);
/* What the user gave for that name: in the environment, else in a file. */
char *r2_settings_getenv(const char *name);
/* NULL, or the lines about bad values. */
const char *r2_settings_error(void);
/* Lines about R2CCL_* variables that are unknown or, in a process of AT_SECURE, not read, and about
 * aliases in use, each ended by '\n'; "" if none. */
const char *r2_settings_warnings(void);

/* One warning line per R2CCL_* variable of `envp` that is not known, with the nearest known name.
 * One per variable that earlier versions knew, with what to do instead, and one per alias in use.
 * Returns the length that the whole text has, as snprintf does. */
size_t r2_settings_check_names(char *const *envp, char *out, size_t outlen);

/* "NAME=value, ...": those that somebody set and only the shim heeds; "" if there is none. */
void r2_settings_of_shim(const struct r2_settings *s, r2_getenv_fn getenv_fn, char *out,
                         size_t outlen);

/* The I/O threads to start for `nics` NICs: R2CCL_IO_THREADS, or its rule for 0 over the cores
 * that the process may use (R2CCL_CPUS included). */
int r2_settings_io_threads(const struct r2_settings *settings, int nics);

/* That rule (docs/decisions.md 10 and 46): three per eight cores, at most eight for one NIC and
 * four for each other, 16 in all; at least 1. */
int r2_settings_default_io_threads(int cores, int nics);

/* A JSON array, one object per row of settings.def in its order: name, type, default, unit, doc,
 * allowed, choices, value, source ("default", "environment", or the alias) and, for a bad value,
 * error. Foreign variables have "foreign": true. Static: the caller does not free it. */
__attribute__((visibility("default"))) const char *r2ccl_settings_json(void);

/* r2_settings_warnings, for r2ccl-ctl. */
__attribute__((visibility("default"))) const char *r2ccl_settings_notes(void);

#endif
