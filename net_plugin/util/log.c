#define _GNU_SOURCE
#include "util/log.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#include "util/clock.h"
#include "util/exit.h"
#include "util/lock.h"
#include "util/thread.h"

#define LOG_LINE 1024
#define LOG_QUEUE 64 /* half of them for warnings alone */
#define LAST_WORDS_NS (200 * R2_NS_PER_MS)
#define LOG_PREFIX "NET/R2CCL: "
#define LIMIT_LINES 5
#define LIMIT_WINDOW_NS (5 * R2_NS_PER_S)

/* NCCL's subsystem bits. */
#define SUBSYS_INIT 1UL
#define SUBSYS_NET 16UL
#define SUBSYS_ALL (~0UL)

#define VERBOSITY_UNREAD (-1)

struct r2_log_line {
    enum r2_log_level level;
    bool tell;
    int line;
    const char *file; /* __FILE__ */
    char text[LOG_LINE];
};

static r2_log_fn logger;
static int verbosity = VERBOSITY_UNREAD;
static int nccl_trace = VERBOSITY_UNREAD;

void r2_log_set(r2_log_fn fn)
{
    /* Relaxed: the pointer leads to code only, nothing else is published with it. */
    __atomic_store_n(&logger, fn, __ATOMIC_RELAXED);
}

void r2_log_set_verbosity(int level)
{
    __atomic_store_n(&verbosity, level < 0 ? 0 : level, __ATOMIC_RELAXED);
}

static int log_verbosity(void)
{
    int v = __atomic_load_n(&verbosity, __ATOMIC_RELAXED);

    if (v == VERBOSITY_UNREAD) {
        const char *env = getenv("R2CCL_LOG");

        v = env ? atoi(env) : 0;
        v = v < 0 ? 0 : v;
        __atomic_store_n(&verbosity, v, __ATOMIC_RELAXED);
    }
    return v;
}

static bool log_nccl_trace(void)
{
    int v = __atomic_load_n(&nccl_trace, __ATOMIC_RELAXED);

    if (v == VERBOSITY_UNREAD) {
        const char *env = getenv("NCCL_DEBUG");

        v = env && strcasecmp(env, "TRACE") == 0;
        __atomic_store_n(&nccl_trace, v, __ATOMIC_RELAXED);
    }
    return v > 0;
}

bool r2_log_enabled(enum r2_log_level level)
{
    bool has_logger = __atomic_load_n(&logger, __ATOMIC_RELAXED) != NULL;

    switch (level) {
    case R2_LOG_WARN:
        return has_logger || log_verbosity() >= 1;
    case R2_LOG_INFO:
        return has_logger || log_verbosity() >= 2;
    case R2_LOG_TRACE:
        return log_verbosity() >= 3 || (has_logger && log_nccl_trace());
    }
    return false;
}

/* NCCL writes warnings at these levels; without NCCL_DEBUG it is silent. */
static bool log_nccl_warns(void)
{
    static const char *const levels[] = {"WARN", "INFO", "ABORT", "TRACE"};
    const char *env = getenv("NCCL_DEBUG");

    for (size_t i = 0; env && i < sizeof(levels) / sizeof(levels[0]); i++) {
        if (strcasecmp(env, levels[i]) == 0) {
            return true;
        }
    }
    return false;
}

static void log_out(const struct r2_log_line *l)
{
    static const char *const names[] = {"", "", "WARN ", "INFO ", "", "TRACE "};
    r2_log_fn fn = __atomic_load_n(&logger, __ATOMIC_RELAXED);
    unsigned long flags = l->level == R2_LOG_WARN   ? SUBSYS_ALL
                          : l->level == R2_LOG_INFO ? SUBSYS_INIT | SUBSYS_NET
                                                    : SUBSYS_NET;

    if (fn) {
        fn((int)l->level, flags, l->file, l->line, LOG_PREFIX "%s", l->text);
    } else if (r2_log_enabled(l->level)) {
        /* One call, one write: lines of several threads do not mix. */
        fprintf(stderr, "%s" LOG_PREFIX "%s\n", names[l->level], l->text);
    }
    if (l->tell && fn && log_verbosity() >= 1 && !log_nccl_warns())
        fprintf(stderr, "WARN " LOG_PREFIX "%s\n", l->text);
}

/* ---- the thread that writes */

struct r2_log_queue {
    pthread_mutex_t lock; /* a leaf: nothing is called under it */
    pthread_cond_t more, written;
    bool on;   /* relaxed reads outside: who misses it by a moment writes the line itself */
    bool busy; /* a line is being written */
    unsigned first, count, dropped;
    struct r2_log_line *lines;
};

static struct r2_log_queue queue = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *write_lines(void *arg)
{
    struct r2_log_line l;

    (void)arg;
    pthread_setname_np(pthread_self(), "r2ccl-log");
    pthread_mutex_lock(&queue.lock);
    for (;;) {
        while (!queue.count && !queue.dropped)
            pthread_cond_wait(&queue.more, &queue.lock);
        if (queue.count) {
            l = queue.lines[queue.first];
            queue.first = (queue.first + 1) % LOG_QUEUE;
            queue.count--;
        } else {
            l = (struct r2_log_line){.level = R2_LOG_WARN, .file = __FILE__, .line = __LINE__};
            snprintf(l.text, sizeof(l.text),
                     "%u lines of the log were left out: they came faster "
                     "than they could be written",
                     queue.dropped);
            queue.dropped = 0;
        }
        queue.busy = true;
        pthread_mutex_unlock(&queue.lock);
        log_out(&l);
        pthread_mutex_lock(&queue.lock);
        queue.busy = false;
        pthread_cond_broadcast(&queue.written);
    }
    return NULL;
}

int r2_log_defer(void)
{
    int rc = 0;

    pthread_mutex_lock(&queue.lock);
    if (!queue.on && !queue.lines) {
        r2_cond_init(&queue.more);
        r2_cond_init(&queue.written);
        queue.lines = calloc(LOG_QUEUE, sizeof(*queue.lines));
        rc = queue.lines ? -r2_thread_start(write_lines, NULL) : -ENOMEM;
        if (rc == 0) {
            __atomic_store_n(&queue.on, true, __ATOMIC_RELAXED);
        } else {
            free(queue.lines);
            queue.lines = NULL;
        }
    }
    pthread_mutex_unlock(&queue.lock);
    return rc;
}

/* Its holder may be what a signal handler that calls exit has interrupted. */
static bool queue_lock_within(uint64_t ns)
{
    const struct timespec nap = {.tv_nsec = 100 * R2_NS_PER_US};
    uint64_t end = r2_now_ns() + ns;

    while (pthread_mutex_trylock(&queue.lock)) {
        if (r2_now_ns() > end) /* which may be long ago: the process may have been stopped */
            return pthread_mutex_trylock(&queue.lock) == 0;
        nanosleep(&nap, NULL);
    }
    return true;
}

bool r2_log_settle(uint64_t ns)
{
    uint64_t end = r2_now_ns() + ns;
    struct timespec ts = {.tv_sec = (time_t)(end / R2_NS_PER_S),
                          .tv_nsec = (long)(end % R2_NS_PER_S)};
    bool done = true;

    if (!__atomic_load_n(&queue.on, __ATOMIC_RELAXED))
        return true;
    if (!queue_lock_within(ns))
        return false;
    while (queue.count || queue.dropped || queue.busy) {
        if (pthread_cond_timedwait(&queue.written, &queue.lock, &ts) == ETIMEDOUT) {
            done = !(queue.count || queue.dropped || queue.busy);
            break;
        }
    }
    pthread_mutex_unlock(&queue.lock);
    return done;
}

void r2_log_child(void)
{
    /* Alone in the child: whoever held the lock is not here. The queue is the parent's to write. */
    __atomic_store_n(&queue.on, false, __ATOMIC_RELAXED);
}

/* What is said in the last moments, and why, must not be lost with the thread that writes it. */
__attribute__((destructor(R2_EXIT_LOG))) static void at_exit(void)
{
    r2_log_settle(LAST_WORDS_NS);
}

/* Its text is there. */
static void log_line(const struct r2_log_line *l)
{
    if (!__atomic_load_n(&queue.on, __ATOMIC_RELAXED)) {
        log_out(l);
        return;
    }
    /* At exit it may be this thread's own (above): then the line is lost, and nothing else. */
    if (!queue_lock_within(LAST_WORDS_NS))
        return;
    if (queue.count < (l->tell || l->level == R2_LOG_WARN ? LOG_QUEUE : LOG_QUEUE / 2))
        queue.lines[(queue.first + queue.count++) % LOG_QUEUE] = *l;
    else
        queue.dropped++;
    pthread_cond_signal(&queue.more);
    pthread_mutex_unlock(&queue.lock);
}

/* `tell`: whatever NCCL does with it, somebody must see it. */
__attribute__((format(printf, 5, 0))) static void log_va(enum r2_log_level level, bool tell,
                                                         const char *file, int line,
                                                         const char *fmt, va_list ap)
{
    int saved = errno;
    struct r2_log_line l = {.level = level, .tell = tell, .file = file, .line = line};

    vsnprintf(l.text, sizeof(l.text), fmt, ap);
    log_line(&l);
    errno = saved;
}

void r2_log_write(enum r2_log_level level, const char *file, int line, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    log_va(level, false, file, line, fmt, ap);
    va_end(ap);
}

void r2_log_tell(const char *file, int line, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    log_va(R2_LOG_WARN, true, file, line, fmt, ap);
    va_end(ap);
}

bool r2_log_limit_pass(struct r2_log_limit *limit, uint64_t now_ns, uint32_t *dropped)
{
    /* Several threads may share a place. Races only blur the count by a line or two: each field is
     * accessed atomically and no memory depends on them. */
    uint64_t start = __atomic_load_n(&limit->window_start_ns, __ATOMIC_RELAXED);

    *dropped = 0;
    if (start == 0 || now_ns - start >= LIMIT_WINDOW_NS) {
        __atomic_store_n(&limit->window_start_ns, now_ns, __ATOMIC_RELAXED);
        __atomic_store_n(&limit->in_window, 0, __ATOMIC_RELAXED);
    }
    if (__atomic_add_fetch(&limit->in_window, 1, __ATOMIC_RELAXED) > LIMIT_LINES) {
        __atomic_add_fetch(&limit->dropped, 1, __ATOMIC_RELAXED);
        return false;
    }
    *dropped = __atomic_exchange_n(&limit->dropped, 0, __ATOMIC_RELAXED);
    return true;
}

void r2_log_write_limited(struct r2_log_limit *limit, enum r2_log_level level, const char *file,
                          int line, const char *fmt, ...)
{
    int saved = errno;
    struct r2_log_line l = {.level = level, .file = file, .line = line};
    uint32_t dropped;
    va_list ap;
    int n;

    if (!r2_log_enabled(level) || !r2_log_limit_pass(limit, r2_now_ns(), &dropped)) {
        errno = saved;
        return;
    }
    va_start(ap, fmt);
    n = vsnprintf(l.text, sizeof(l.text), fmt, ap);
    va_end(ap);
    if (dropped > 0 && n >= 0 && (size_t)n < sizeof(l.text)) {
        snprintf(l.text + n, sizeof(l.text) - (size_t)n, " (and %u more like this)", dropped);
    }
    log_line(&l);
    errno = saved;
}
