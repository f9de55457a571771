#define _GNU_SOURCE
#include "comms/trace.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "control/impl.h"
#include "settings/settings.h"
#include "util/log.h"

#define REPLAY "replay:"
#define PATH (R2_SETTING_TEXT + 400)

/* How many communicators of a kind there were. */
struct kind {
    struct kind *next;
    uint64_t name; /* with ordinal 0 */
    uint64_t made;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the rest */
static bool opened;
static enum r2_tracing mode;
static char path[PATH];
static int fd = -1;
static struct r2_trace *trace; /* never freed: communicators point into it */
static struct kind *kinds;

/* ---- the file's name */

static int rank_of_process(int rank)
{
    int launched = r2_control_env_rank();

    return launched >= 0 ? launched : rank;
}

/* False: a pattern that is not known, or too long. */
static bool expand(const char *pattern, int rank)
{
    char host[128] = "";
    bool ranked = false;
    size_t at = 0;

    gethostname(host, sizeof(host) - 1);
    for (const char *p = pattern; *p && at < PATH; p++) {
        if (*p != '%')
            path[at++] = *p;
        else if (*++p == '%')
            path[at++] = '%';
        else if (*p == 'r' && (ranked = true))
            at += (size_t)snprintf(path + at, PATH - at, "%d", rank);
        else if (*p == 'h')
            at += (size_t)snprintf(path + at, PATH - at, "%s", host);
        else
            return false;
    }
    if (!ranked && at < PATH)
        at += (size_t)snprintf(path + at, PATH - at, ".%d", rank);
    if (at >= PATH)
        return false;
    path[at] = '\0';
    return true;
}

/* ---- recording */

static void give_up(const char *what, int error)
{
    char renamed[PATH + 16];

    R2_WARN("R2CCL_PLAN_TRACE: %s %s: %s; no more is recorded, and what there is gets the name "
            "%s.incomplete",
            what, path, strerror(error), path);
    snprintf(renamed, sizeof(renamed), "%s.incomplete", path);
    if (rename(path, renamed))
        unlink(path); /* it must not pass for complete */
    close(fd);
    fd = -1;
    mode = R2_TRACING_OFF;
}

/* Takes the line over. */
static void append(char *line)
{
    size_t len = line ? strlen(line) : 0, at = 0;

    if (!line)
        give_up("cannot write to", ENOMEM);
    while (at < len) {
        ssize_t n = write(fd, line + at, len - at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            give_up("cannot write to", n ? errno : ENOSPC);
            break;
        }
        at += (size_t)n;
    }
    free(line);
}

static void start_recording(void)
{
    fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (fd >= 0 && fd < 3) { /* never in the place of a closed stdin, stdout or stderr */
        int high = fcntl(fd, F_DUPFD_CLOEXEC, 3);

        close(fd);
        fd = high;
    }
    if (fd < 0 && errno == EEXIST) {
        R2_WARN("R2CCL_PLAN_TRACE: %s is there already and is not written over, so nothing is "
                "recorded: move it away, or replay it with R2CCL_PLAN_TRACE=replay:%s",
                path, path);
        return;
    }
    if (fd < 0) {
        R2_WARN("R2CCL_PLAN_TRACE: cannot create %s: %s; nothing is recorded", path,
                strerror(errno));
        return;
    }
    mode = R2_TRACING_RECORD;
    append(r2_trace_put_head());
}

void r2_tracing_put_comm(const struct r2_trace_comm *comm)
{
    pthread_mutex_lock(&lock);
    if (mode == R2_TRACING_RECORD)
        append(r2_trace_put_comm(comm));
    pthread_mutex_unlock(&lock);
}

void r2_tracing_put_plan(uint64_t name, uint64_t from, const struct r2_plan_table *table)
{
    pthread_mutex_lock(&lock);
    if (mode == R2_TRACING_RECORD)
        append(r2_trace_put_plan(name, from, table));
    pthread_mutex_unlock(&lock);
}

/* ---- replaying */

/* The file's bytes, malloc'd, or NULL and errno. */
static char *read_all(size_t *len)
{
    int in = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a pipe is not waited for */
    struct stat st;
    char *text = NULL;

    *len = 0;
    if (in < 0)
        return NULL;
    if (fstat(in, &st) == 0 && !S_ISREG(st.st_mode)) {
        close(in);
        errno = EINVAL;
        return NULL;
    }
    text = malloc(R2_TRACE_BYTES + 1); /* untouched pages cost nothing */
    while (text && *len <= R2_TRACE_BYTES) {
        ssize_t n = read(in, text + *len, R2_TRACE_BYTES + 1 - *len);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            free(text);
            text = NULL;
        }
        if (n <= 0)
            break;
        *len += (size_t)n;
    }
    close(in);
    return text;
}

static void start_replaying(void)
{
    char why[R2_TRACE_WHY];
    size_t len;
    char *text = read_all(&len);

    mode = R2_TRACING_REPLAY;
    if (!text)
        snprintf(why, sizeof(why), "%s", errno == EINVAL ? "it is no file" : strerror(errno));
    if (!text || r2_trace_parse(&trace, text, len, why))
        R2_WARN("R2CCL_PLAN_TRACE: %s cannot be replayed: %s; there are no plans in this run, and "
                "every AllReduce is NCCL's own choice on all ranks",
                path, why);
    free(text);
}

const struct r2_trace_comm *r2_tracing_recorded(uint64_t name)
{
    return trace ? r2_trace_find(trace, name) : NULL; /* set before anybody asks */
}

bool r2_tracing_unusable(void)
{
    return !trace;
}

const char *r2_tracing_path(void)
{
    return path;
}

/* ---- */

enum r2_tracing r2_tracing_mode(int rank)
{
    const char *pattern = r2_settings_get()->plan_trace;
    bool replay = strncmp(pattern, REPLAY, strlen(REPLAY)) == 0;
    enum r2_tracing now;

    if (!*pattern || r2_settings_get()->plan != R2_PLAN_SETTING_ON)
        return R2_TRACING_OFF;
    pthread_mutex_lock(&lock);
    if (!opened) {
        opened = true;
        if (!expand(pattern + (replay ? strlen(REPLAY) : 0), rank_of_process(rank))) {
            snprintf(path, sizeof(path), "%s", pattern);
            mode = replay ? R2_TRACING_REPLAY : R2_TRACING_OFF;
            R2_WARN("R2CCL_PLAN_TRACE=%s: of a file's name, %%r is the rank, %%h the host and %%%% "
                    "a percent sign, and nothing else; nothing is %s",
                    pattern, replay ? "replayed, and there are no plans" : "recorded");
        } else if (replay) {
            start_replaying();
        } else {
            start_recording();
        }
    }
    now = mode;
    pthread_mutex_unlock(&lock);
    return now;
}

uint64_t r2_tracing_root(int nranks, int rank, int device)
{
    uint64_t name = r2_trace_name(0, 0, 0, nranks, rank, device), ordinal = 0;
    struct kind *at;

    pthread_mutex_lock(&lock);
    for (at = kinds; at && at->name != name; at = at->next)
        ;
    if (!at) {
        at = calloc(1, sizeof(*at));
        if (at) {
            *at = (struct kind){.next = kinds, .name = name};
            kinds = at;
        }
    }
    ordinal = at ? ++at->made : UINT64_MAX;
    pthread_mutex_unlock(&lock);
    return r2_trace_name(0, ordinal, 0, nranks, rank, device);
}
