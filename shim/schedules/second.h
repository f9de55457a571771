/* The communicators that the shim makes beside one of the application's: the same ranks in another
 * order, made from an id of their own that the plan brought.
 *
 * The set follows the plans: what a plan lists is made, each on a thread of its own, and what it
 * does not list is destroyed on another one, once what ran on it is over. So the application's
 * thread waits for neither; making needs all ranks at once, and a rank may not reach this point
 * before another one has got something else from it. The plan that runs on them comes later
 * (steer.h).
 *
 * Threads: r2_seconds_follow by the one that runs the communicator's collectives; the rest from any
 * thread. A thread that is making one cannot be interrupted: NCCL ends it when its peers end. It
 * shares nothing with the set once it is abandoned. Errors are NCCL's results.
 */
#ifndef R2_SCHEDULES_SECOND_H
#define R2_SCHEDULES_SECOND_H

#include <stdbool.h>
#include <stdint.h>

#include "api/nccl.h"
#include "plan/table.h"
#include "real/real.h"

struct r2_seconds;

struct r2_seconds_config {
    struct r2_real *real;
    int rank, nranks, device;
    bool has_config; /* of the application's communicator, cut to what we know */
    struct r2_nccl_config config;
    const char *net_name; /* copied; NULL: none */
    /* A making has ended; on its thread. */
    void (*changed)(void);
};

/* NULL: no memory. */
struct r2_seconds *r2_seconds_new(const struct r2_seconds_config *config);

/* A plan came into force, agreed in `epoch`. */
void r2_seconds_follow(struct r2_seconds *s, const struct r2_plan_table *t, uint64_t epoch);

/* How far the newest plan's are: the epoch, once all of them are made or one has failed (then
 * *failed); 0: not yet. */
uint64_t r2_seconds_made(struct r2_seconds *s, bool *failed);

/* Whether all that `t` runs on are made. */
bool r2_seconds_ready(struct r2_seconds *s, const struct r2_plan_table *t);

/* The handle of a made one that plans list, or NULL. It lives until a plan does not list it or the
 * set ends. */
r2_nccl_comm r2_seconds_get(struct r2_seconds *s, uint64_t key);
/* Graphs hold it from now on: it stays until the set ends. */
void r2_seconds_pin(struct r2_seconds *s, uint64_t key);

/* An operation was put on `stream` on it: when a plan does not list it any more, it is destroyed
 * only after that. By the thread that runs the communicator's operations, behind NCCL's launch. */
void r2_seconds_mark(struct r2_seconds *s, uint64_t key, void *stream);

struct r2_seconds_stats {
    uint32_t made, making; /* those that are not destroyed yet, too */
    uint64_t bytes;        /* device memory that they took, about; 0: not known */
    uint64_t make_ns;      /* the last making took so long */
};
void r2_seconds_stats(struct r2_seconds *s, struct r2_seconds_stats *out);

/* Whether there are any, made or in the making. */
bool r2_seconds_any(struct r2_seconds *s);
/* What the application does to its communicator, done to all of these: the function of the real
 * NCCL, if it has it. Returns the first error. */
int r2_seconds_fan(struct r2_seconds *s, enum r2_api function, bool has_flags, int flags);
/* The first asynchronous error, or R2_NCCL_OK. */
int r2_seconds_async(struct r2_seconds *s);

/* Ends them all, once, those that plans have dropped and operations still need as well; the set
 * stays, empty, and makes nothing more. abort: at once, otherwise with NCCL's destroy, after
 * waiting a bounded time for those in the making. */
void r2_seconds_end(struct r2_seconds *s, bool abort);
/* NCCL has dropped the group that they were aborted in: aborts them once more. By the same thread.
 */
void r2_seconds_again(struct r2_seconds *s);
/* After r2_seconds_end, when nobody uses the set any more. */
void r2_seconds_free(struct r2_seconds *s);

#endif
