/* The last AllReduces of a rank. Ranks must give the same ones in the same order; the size decides
 * whether NCCL or R2CCL carries one out, so that of unequal sizes each may get a part, and neither
 * ends. Ranks that stand still tell rank 0 what they have called, and it compares. Without a lock:
 * one thread notes, any may read. */
#ifndef R2_COMMS_CALLS_H
#define R2_COMMS_CALLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define R2_CALLS 8
#define R2_CALLS_GROUPED UINT64_MAX /* as bytes: a collective of a group, which NCCL has */

struct r2_calls_entry {
    uint64_t number; /* of the collective, from 1; 0: none */
    uint64_t bytes;
    uint64_t taken; /* by R2CCL so far, with this one */
};

struct r2_calls {
    struct r2_calls_entry of[R2_CALLS]; /* the newest first */
};

/* What is read, and one that may be in the making. */
struct r2_calls_log {
    _Atomic uint64_t count, taken;
    struct {
        _Atomic uint64_t number, bytes, taken;
    } of[R2_CALLS + 1];
};

/* taken: by R2CCL, not by NCCL. One thread at a time. */
void r2_calls_note(struct r2_calls_log *log, uint64_t number, uint64_t bytes, bool taken);
/* What was noted is compared no more. By who notes. */
void r2_calls_forget(struct r2_calls_log *log);
/* How many were noted. */
uint64_t r2_calls_count(const struct r2_calls_log *log);
/* False: another one was noted meanwhile. */
bool r2_calls_read(const struct r2_calls_log *log, struct r2_calls *out);

struct r2_calls_difference {
    uint64_t number;
    uint64_t taken_bytes, left_bytes; /* what R2CCL got at one rank, and NCCL at the other */
    bool first;                       /* `a` is the rank where R2CCL got it */
};

/* The first call that R2CCL has at one rank and NCCL at the other, as far as both still know it. */
bool r2_calls_differ(const struct r2_calls *a, const struct r2_calls *b,
                     struct r2_calls_difference *out);

#endif
