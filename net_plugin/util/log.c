#include "util/log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#include "util/clock.h"

#define LOG_LINE 1024
#define LOG_PREFIX "NET/R2CCL: "
#define LIMIT_LINES 5
#define LIMIT_WINDOW_NS (5 * R2_NS_PER_S)

/* NCCL's subsystem bits. */
#define SUBSYS_INIT 1UL
#define SUBSYS_NET 16UL
#define SUBSYS_ALL (~0UL)

#define VERBOSITY_UNREAD (-1)

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

static void log_out(enum r2_log_level level, const char *file, int line, const char *text)
{
    static const char *const names[] = {"", "", "WARN ", "INFO ", "", "TRACE "};
    r2_log_fn fn = __atomic_load_n(&logger, __ATOMIC_RELAXED);
    unsigned long flags = level == R2_LOG_WARN   ? SUBSYS_ALL
                          : level == R2_LOG_INFO ? SUBSYS_INIT | SUBSYS_NET
                                                 : SUBSYS_NET;

    if (fn) {
        fn((int)level, flags, file, line, LOG_PREFIX "%s", text);
    } else if (r2_log_enabled(level)) {
        /* One call, one write: lines of several threads do not mix. */
        fprintf(stderr, "%s" LOG_PREFIX "%s\n", names[level], text);
    }
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

/* `tell`: whatever NCCL does with it, somebody must see it. */
__attribute__((format(printf, 5, 0))) static void log_va(enum r2_log_level level, bool tell,
                                                         const char *file, int line,
                                                         const char *fmt, va_list ap)
{
    int saved = errno;
    char text[LOG_LINE];

    vsnprintf(text, sizeof(text), fmt, ap);
    log_out(level, file, line, text);
    if (tell && __atomic_load_n(&logger, __ATOMIC_RELAXED) && log_verbosity() >= 1 &&
        !log_nccl_warns()) {
        fprintf(stderr, "WARN " LOG_PREFIX "%s\n", text);
    }
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
    char text[LOG_LINE];
    uint32_t dropped;
    va_list ap;
    int n;

    if (!r2_log_enabled(level) || !r2_log_limit_pass(limit, r2_now_ns(), &dropped)) {
        errno = saved;
        return;
    }
    va_start(ap, fmt);
    n = vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (dropped > 0 && n >= 0 && (size_t)n < sizeof(text)) {
        snprintf(text + n, sizeof(text) - (size_t)n, " (and %u more like this)", dropped);
    }
    log_out(level, file, line, text);
    errno = saved;
}
