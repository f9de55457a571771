/* Logging, environment, clock and waiting of the stand-in for NCCL. */
#ifndef HOSTNCCL_UTIL_H
#define HOSTNCCL_UTIL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nccl.h"

/* How hard the caller is on the plugin (HOSTNCCL_HARSH = off | sparse | full). Sparse: one 128-byte
 * line in every 4 KiB is scribbled and watched; full: every byte. */
enum hn_harsh { HN_HARSH_OFF, HN_HARSH_SPARSE, HN_HARSH_FULL };
enum hn_harsh hn_util_harsh(void);

uint64_t hn_util_now(void); /* monotonic, nanoseconds */
uint64_t hn_util_random(void);
uint64_t hn_util_hash(const void *data, size_t bytes, uint64_t seed);

/* `def` when unset; a value that is no number, or outside lo..hi, is reported and ignored. */
long hn_util_env(const char *name, long def, long lo, long hi);

/* NCCL's logger type; also given to plugins. NCCL_DEBUG chooses the level, NCCL_DEBUG_FILE the
 * file (stderr by default). */
void hn_util_logger(int level, unsigned long flags, const char *file, int line, const char *fmt,
                    ...) __attribute__((format(printf, 5, 6)));
#define HN_INFO(...) hn_util_logger(3, 0x1, __FILE__, __LINE__, __VA_ARGS__)
#define HN_WARN(...) hn_util_logger(2, 0x1, __FILE__, __LINE__, __VA_ARGS__)

/* Remembers the text for ncclGetLastError (per thread and process), warns, returns `result`. */
ncclResult_t hn_util_fail(ncclResult_t result, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
const char *hn_util_last_error(void);

/* Back-off of a polling thread: yields for HOSTNCCL_SPIN_US after the last progress, then sleeps
 * 20 us, later HOSTNCCL_NAP_US (at once if that is over 200). Zero-initialise; one per thread. */
struct hn_idle {
    uint64_t since;
};
void hn_util_idle(struct hn_idle *idle, bool progress);

#endif
