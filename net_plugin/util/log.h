/* Log lines. They go through NCCL's logger once it is known, with the prefix "NET/R2CCL: ".
 *
 * Without a logger, lines go to stderr if the environment has R2CCL_LOG=1 (warnings), 2 (and
 * information) or 3 (and traces). Trace lines also need R2CCL_LOG=3 or NCCL_DEBUG=TRACE when a
 * logger is set. Every function is thread-safe; none fails; errno is preserved.
 *
 * Where lines go may block: a pipe that nobody reads, a logger that waits. Until r2_log_defer the
 * caller writes them itself; after it they are queued, and only the thread that writes them waits.
 */
#ifndef R2_UTIL_LOG_H
#define R2_UTIL_LOG_H

#include <stdbool.h>
#include <stdint.h>

/* The type of NCCL's logger: level and flags as in NCCL's debug interface. */
typedef void (*r2_log_fn)(int level, unsigned long flags, const char *file, int line,
                          const char *fmt, ...);

/* NCCL's numbers. */
enum r2_log_level {
    R2_LOG_WARN = 2,
    R2_LOG_INFO = 3,
    R2_LOG_TRACE = 5,
};

/* Sets the logger of the process; NULL goes back to stderr. The last caller wins. The old logger
 * may still be running in another thread when this returns. */
void r2_log_set(r2_log_fn fn);

/* From here on a thread of its own writes all lines, in the order in which they were said; callers
 * may hold any lock. What does not fit into the queue is left out and counted: 64 lines, of which
 * only R2_LOG_WARN and above may take the second half. 0, or
 * -errno: then callers go on writing themselves. Later calls do nothing. */
int r2_log_defer(void);
/* Waits until everything said so far is written, at most `ns`: false when it is not. Runs at the
 * process's end, too (0.2 s). */
bool r2_log_settle(uint64_t ns);
/* In a forked child, which has no such thread: callers write themselves. Async-signal-safe. */
void r2_log_child(void);

/* Overrides R2CCL_LOG: 0 none, 1 warnings, 2 information, 3 traces. */
void r2_log_set_verbosity(int verbosity);

/* True when a line of this level would go anywhere. */
bool r2_log_enabled(enum r2_log_level level);

__attribute__((format(printf, 4, 5))) void r2_log_write(enum r2_log_level level, const char *file,
                                                        int line, const char *fmt, ...);

/* A warning that nobody may miss: on stderr as well where NCCL hides warnings, unless R2CCL_LOG is
 * none. For what keeps R2CCL from doing as it was asked, once per process. */
__attribute__((format(printf, 3, 4))) void r2_log_tell(const char *file, int line, const char *fmt,
                                                       ...);
#define R2_TELL(...) r2_log_tell(__FILE__, __LINE__, __VA_ARGS__)

/* State of a rate-limited place in the code: zero-initialised. */
struct r2_log_limit {
    uint64_t window_start_ns;
    uint32_t in_window;
    uint32_t dropped;
};

/* At most 5 lines in 5 seconds per place: true when the line may go out; *dropped is then the
 * number of lines swallowed since the last one that did. */
bool r2_log_limit_pass(struct r2_log_limit *limit, uint64_t now_ns, uint32_t *dropped);

__attribute__((format(printf, 5, 6))) void r2_log_write_limited(struct r2_log_limit *limit,
                                                                enum r2_log_level level,
                                                                const char *file, int line,
                                                                const char *fmt, ...);

#define R2_LOG_(level, ...)                                                                        \
    do {                                                                                           \
        if (r2_log_enabled(level)) {                                                               \
            r2_log_write(level, __FILE__, __LINE__, __VA_ARGS__);                                  \
        }                                                                                          \
    } while (0)

#define R2_WARN(...) R2_LOG_(R2_LOG_WARN, __VA_ARGS__)
#define R2_INFO(...) R2_LOG_(R2_LOG_INFO, __VA_ARGS__)
#define R2_TRACE(...) R2_LOG_(R2_LOG_TRACE, __VA_ARGS__)

/* A warning that is written once: `flag` is static. */
#define R2_WARN_ONCE(...)                                                                          \
    do {                                                                                           \
        static char r2_told;                                                                       \
        if (!__atomic_test_and_set(&r2_told, __ATOMIC_RELAXED))                                    \
            R2_WARN(__VA_ARGS__);                                                                  \
    } while (0)

#define R2_WARN_LIMIT(...)                                                                         \
    do {                                                                                           \
        static struct r2_log_limit r2_limit_here;                                                  \
        r2_log_write_limited(&r2_limit_here, R2_LOG_WARN, __FILE__, __LINE__, __VA_ARGS__);        \
    } while (0)

#endif
