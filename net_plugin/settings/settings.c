#define _GNU_SOURCE
#include "settings/settings.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "settings/envplugin.h"
#include "settings/file.h"
#include "settings/table.h"
#include "settings/values.h"

#define IDLE_INTERVALS 10  /* nobody waits for an idle path: it costs a tenth */
#define MISSES 3           /* TCP's first retransmission, after 200 ms, is in time */
#define DAMP_SUPPRESS 3000 /* the fourth failure in a row */

#define AGREE_TIMEOUT_NS UINT64_C(60000000000) /* as long as R2CCL_NO_PATH_TIMEOUT by default */

static void derive(struct r2_settings *out)
{
    out->help_progress = true;
    out->heartbeat_idle_ns = IDLE_INTERVALS * out->heartbeat_ns;
    out->heartbeat_misses = MISSES;
    out->agree_timeout_ns = AGREE_TIMEOUT_NS;
    out->damp_suppress = out->damp_ns ? DAMP_SUPPRESS : 0;
}

int r2_settings_parse(struct r2_settings *out, r2_getenv_fn getenv_fn, char *err, size_t errlen)
{
    char message[512];
    size_t at = 0;
    int result = 0;

    memset(out, 0, sizeof(*out));
    if (errlen) {
        err[0] = '\0';
    }
    for (int i = 0; i < r2_setting_row_count; i++) {
        const struct r2_setting_row *row = &r2_setting_rows[i];
        const char *name;
        const char *text = r2_setting_user_text(row, getenv_fn, &name);
        int rc = r2_setting_read(row, row->name, row->def, out, message, sizeof(message));

        if (rc == 0 && text) {
            rc = r2_setting_read(row, name, text, out, message, sizeof(message));
            if (rc == 0 && strcmp(name, "R2CC_MODE") == 0)
                out->r2cc_mode = out->mode;
        }
        if (rc) {
            if (at < errlen) {
                at += (size_t)snprintf(err + at, errlen - at, "%s%s", at ? "\n" : "", message);
            }
            result = rc;
        }
    }
    if (out->mode <= R2_MODE_BALANCE) /* nothing that ranks would have to agree on */
        out->plan = R2_PLAN_SETTING_OFF;
    derive(out);
    return result;
}

/* ---- names ---- */

static const char *const r2_other_names[] = {
#define R2_OTHER(name) name,
#include "settings/settings.def"
    NULL,
};

static bool r2_settings_is_known(const char *name)
{
    for (int i = 0; i < r2_setting_row_count; i++) {
        if (strcmp(r2_setting_rows[i].name, name) == 0) {
            return true;
        }
    }
    for (int i = 0; r2_other_names[i]; i++) {
        if (strcmp(r2_other_names[i], name) == 0) {
            return true;
        }
    }
    return false;
}

/* Edit distance of two names; anything longer than a row counts as far. */
static int r2_settings_distance(const char *a, const char *b)
{
    int row[64];
    int width = (int)strlen(b);

    if (width >= 63 || strlen(a) >= 63) {
        return 64;
    }
    for (int j = 0; j <= width; j++) {
        row[j] = j;
    }
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];

        row[0] = i;
        for (int j = 1; j <= width; j++) {
            int best = diagonal + (a[i - 1] != b[j - 1]);

            best = row[j] + 1 < best ? row[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[width];
}

static const char *r2_settings_nearest(const char *name)
{
    const char *best = r2_setting_rows[0].name;
    int best_distance = 65;

    for (int i = 0; i < r2_setting_row_count; i++) {
        int distance = r2_settings_distance(name, r2_setting_rows[i].name);

        if (!r2_setting_rows[i].foreign && distance < best_distance) {
            best = r2_setting_rows[i].name;
            best_distance = distance;
        }
    }
    return best;
}

static const char *r2_settings_alias_of(const char *name)
{
    for (const struct r2_setting_alias *a = r2_setting_aliases; a->alias; a++) {
        if (strcmp(a->alias, name) == 0) {
            return a->name;
        }
    }
    return NULL;
}

static const char *const r2_gone_names[][2] = {
#define R2_GONE(name, instead) {name, instead},
#include "settings/settings.def"
    {NULL, NULL},
};

static const char *r2_settings_instead_of(const char *name)
{
    for (int i = 0; r2_gone_names[i][0]; i++) {
        if (strcmp(r2_gone_names[i][0], name) == 0) {
            return r2_gone_names[i][1];
        }
    }
    return NULL;
}

/* With a value that is not empty. */
static bool in_environment(char *const *envp, const char *name)
{
    size_t len = strlen(name);

    for (; *envp; envp++) {
        if (strncmp(*envp, name, len) == 0 && (*envp)[len] == '=' && (*envp)[len + 1]) {
            return true;
        }
    }
    return false;
}

size_t r2_settings_check_names(char *const *envp, char *out, size_t outlen)
{
    size_t at = 0;

    if (outlen) {
        out[0] = '\0';
    }
    for (; *envp; envp++) {
        size_t len = strcspn(*envp, "=");
        char name[128];
        char line[400] = "";
        const char *target, *instead;
        int n = 0;

        snprintf(name, sizeof(name), "%.*s", (int)(len < 120 ? len : 120), *envp);
        target = r2_settings_alias_of(name);
        instead = r2_settings_instead_of(name);
        if (target && in_environment(envp, target)) {
            n = snprintf(line, sizeof(line), "%s has no effect: %s is set\n", name, target);
        } else if (target) {
            n = snprintf(line, sizeof(line), "%s is read as an alias of %s\n", name, target);
        } else if (instead) {
            n = snprintf(line, sizeof(line), "%s has no effect: %s\n", name, instead);
        } else if ((strncmp(name, "R2CC_", 5) == 0 || strncmp(name, "NCCL_R2CC_", 10) == 0) &&
                   !r2_settings_is_known(name)) {
            n = snprintf(line, sizeof(line), "%s is not known to R2CCL and has no effect\n", name);
        } else if (strncmp(name, "R2CCL_", 6) == 0 && !r2_settings_is_known(name)) {
            n = snprintf(line, sizeof(line), "%s is not a setting of R2CCL; did you mean %s?\n",
                         name, r2_settings_nearest(name));
        }
        if (n > 0 && at + (size_t)n < outlen) {
            memcpy(out + at, line, (size_t)n + 1);
        }
        at += (size_t)n;
    }
    return at;
}

/* ---- settings without an effect ---- */

#define SHIM_ROW "Shim" /* how the texts of its settings begin (settings.def) */

static bool r2_settings_is_of_shim(const struct r2_setting_row *row, const struct r2_settings *s)
{
    return strncmp(row->doc, SHIM_ROW, strlen(SHIM_ROW)) == 0 ||
           (row->offset == offsetof(struct r2_settings, mode) && s->mode > R2_MODE_BALANCE &&
            s->mode != R2_MODE_AUTO);
}

void r2_settings_of_shim(const struct r2_settings *s, r2_getenv_fn getenv_fn, char *out,
                         size_t outlen)
{
    size_t at = 0;

    out[0] = '\0';
    for (int i = 0; i < r2_setting_row_count; i++) {
        const struct r2_setting_row *row = &r2_setting_rows[i];
        const char *name, *text = r2_setting_user_text(row, getenv_fn, &name);

        if (text && strcmp(text, row->def) != 0 && r2_settings_is_of_shim(row, s) && at < outlen)
            at += (size_t)snprintf(out + at, outlen - at, "%s%s=%s", at ? ", " : "", name, text);
    }
}

/* ---- the settings of the process ---- */

static pthread_once_t r2_settings_once = PTHREAD_ONCE_INIT;
static struct {
    struct r2_settings settings;
    char error[4096];
    char warnings[4096];
} r2_settings_process;

/* What is loaded or written by name. A process with rights that its caller does not have (setuid,
 * file capabilities: AT_SECURE) reads none of it, as ld.so reads no LD_PRELOAD there. */
static const char *const r2_settings_trusted[] = {"R2CCL_REAL_NCCL", "R2CCL_IBVERBS_LIB"};
enum { R2_TRUSTED = sizeof(r2_settings_trusted) / sizeof(r2_settings_trusted[0]) };

static char *r2_settings_environment(const char *name)
{
    for (int i = 0; i < R2_TRUSTED; i++) {
        if (strcmp(name, r2_settings_trusted[i]) == 0) {
            return secure_getenv(name);
        }
    }
    if (strncmp(name, "NCCL_", 5) == 0) {
        return (char *)(uintptr_t)r2_envplugin_get(name);
    }
    return getenv(name);
}

/* The environment has it by another name, which counts before a file. */
static bool r2_settings_has_alias(const char *name)
{
    for (const struct r2_setting_alias *a = r2_setting_aliases; a->alias; a++) {
        const char *text = strcmp(a->name, name) == 0 ? getenv(a->alias) : NULL;

        if (text && text[0]) {
            return true;
        }
    }
    return false;
}

char *r2_settings_getenv(const char *name)
{
    char *text = r2_settings_environment(name);

    if ((text && text[0]) || strncmp(name, "R2CCL_", 6) != 0 || r2_settings_has_alias(name)) {
        return text;
    }
    return r2_file_get(name, NULL);
}

static void r2_settings_say_untrusted(char *out, size_t outlen)
{
    for (int i = 0; i < R2_TRUSTED; i++) {
        const char *name = r2_settings_trusted[i], *text = getenv(name);
        size_t at = strlen(out);

        if (text && text[0] && !secure_getenv(name) && at + 200 < outlen) {
            snprintf(out + at, outlen - at,
                     "%s is not read: this process has rights that its caller may not have "
                     "(setuid, setgid or file capabilities)\n",
                     name);
        }
    }
}

static void r2_settings_say_of_files(char *out, size_t outlen)
{
    size_t at = strlen(out);

    if (at < outlen) {
        at += (size_t)snprintf(out + at, outlen - at, "%s", r2_file_complaints());
    }
    if (at < outlen) {
        r2_settings_check_names(r2_file_lines(), out + at, outlen - at);
    }
}

static void r2_settings_load(void)
{
    static char *no_environment[] = {NULL};
    int rc = r2_settings_parse(&r2_settings_process.settings, r2_settings_getenv,
                               r2_settings_process.error, sizeof(r2_settings_process.error));

    if (rc == 0) {
        r2_settings_process.error[0] = '\0';
    }
    r2_settings_check_names(environ ? environ : no_environment, r2_settings_process.warnings,
                            sizeof(r2_settings_process.warnings));
    r2_settings_say_of_files(r2_settings_process.warnings, sizeof(r2_settings_process.warnings));
    r2_settings_say_untrusted(r2_settings_process.warnings, sizeof(r2_settings_process.warnings));
}

const struct r2_settings *r2_settings_get(void)
{
    pthread_once(&r2_settings_once, r2_settings_load);
    return &r2_settings_process.settings;
}

const char *r2_settings_error(void)
{
    r2_settings_get();
    return r2_settings_process.error[0] ? r2_settings_process.error : NULL;
}

const char *r2_settings_warnings(void)
{
    r2_settings_get();
    return r2_settings_process.warnings;
}

int r2_settings_default_io_threads(int cores, int nics)
{
    int by_cores = cores * 3 / 8;
    int by_nics = nics < 1 ? 1 : nics > 3 ? 16 : 4 + 4 * nics;
    int threads = by_cores < by_nics ? by_cores : by_nics;

    return threads < 1 ? 1 : threads;
}

int r2_settings_io_threads(const struct r2_settings *settings, int nics)
{
    cpu_set_t allowed;
    cpu_set_t wanted;
    int cores = 1;

    if (settings->io_threads > 0) {
        return settings->io_threads;
    }
    if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) {
        if (settings->cpus[0] && r2_value_cpus(settings->cpus, &wanted) == 0) {
            CPU_AND(&allowed, &allowed, &wanted);
        }
        cores = CPU_COUNT(&allowed);
    }
    return r2_settings_default_io_threads(cores, nics);
}
