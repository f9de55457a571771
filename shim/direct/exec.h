/* Carries out one rank's schedule (plan/schedule.h): which message is posted next, which piece is
 * added, when a step has ended. Pure: what it begins it begins through `ops`, and it learns from
 * them what has ended. No clock, socket or thread.
 *
 * A lane is one direction of one stream with one peer. Messages of a lane are posted in list order
 * and end in that order. At most `credit` bytes are posted on a lane, counted as
 * pieces of full size: a rank that owns little gets less at a time. What is posted to receive is
 * what the peer may send, so this bounds the incast.
 *
 * Memory: `slots` of `piece` bytes each, which pieces need not fill. From its admission to its end
 * a step holds one for its own piece (the contribution, then the sum). It also holds one for each
 * contribution that it receives. Steps are admitted in list order while they lie within as many
 * rounds as fit into the slots. Copies out of the input and into the output end in list order.
 *
 * A step's `reader` needs no wait here: what a rank sends of its input is copied into a slot first,
 * and no sum exists before it has every rank's contribution.
 *
 * Threads: none, the caller serialises.
 */
#ifndef R2_DIRECT_EXEC_H
#define R2_DIRECT_EXEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "plan/schedule.h"

enum r2_lane_kind {
    R2_LANE_IN,   /* receives contributions */
    R2_LANE_UP,   /* sends them */
    R2_LANE_DOWN, /* receives sums */
    R2_LANE_OUT,  /* sends them */
    R2_LANE_KINDS,
};

/* What the acting part does. `post` and `copy` return 1: begun; 0: not now, ask again; -errno.
 * `posted` and `copied` return how many of those begun have ended since they were last asked, or
 * -errno. */
struct r2_exec_ops {
    int (*post)(void *user, enum r2_lane_kind kind, int peer, void *data, size_t len);
    int (*posted)(void *user, enum r2_lane_kind kind, int peer);
    /* Between the slots and the application's memory. out: from the input (or, written: from the
     * output) into `slot`; else from `slot` into the output. Copies end in the order of the calls;
     * several may end at once. */
    int (*copy)(void *user, bool out, bool written, void *slot, uint64_t offset, size_t len);
    int (*copied)(void *user, bool out);
    /* Adds `n` contributions into `sum`, which is one of them. */
    void (*add)(void *user, void *sum, const void *const *in, int n, size_t count);
};

struct r2_exec;

struct r2_exec_config {
    int p;
    void *slots;
    size_t piece; /* bytes of a slot */
    int n_slots;
    const struct r2_exec_ops *ops;
    void *user;
};

/* Whether the step's sum goes into the output. */
static inline bool r2_exec_lands(const struct r2_step *step)
{
    return step->up < 0 || step->down >= 0;
}

/* So many such rounds must fit into the slots for a schedule of this kind. */
static inline int r2_exec_least(enum r2_schedule_kind kind)
{
    return kind == R2_SCHEDULE_DIRECT ? 1 : kind == R2_SCHEDULE_RING ? 2 : 4;
}

/* 0 and *out, -EINVAL (too few slots for one round of `direct`), -ENOMEM. */
int r2_exec_new(struct r2_exec **out, const struct r2_exec_config *config);
void r2_exec_free(struct r2_exec *x);

/* Begins the next operation, with so many bytes posted on a lane, one piece at least. The one
 * before has landed; what it still sends goes on meanwhile. The schedule stays the caller's until
 * it has landed. */
void r2_exec_begin(struct r2_exec *x, const struct r2_schedule *schedule, size_t credit);
/* Does what can be done now. 1: something was; 0: nothing; -errno: it has failed for good. */
int r2_exec_turn(struct r2_exec *x);
/* Everything is in the output. Sends may still be under way. */
bool r2_exec_landed(const struct r2_exec *x);
bool r2_exec_ended(const struct r2_exec *x);

/* Rounds of `direct` that the slots hold. */
int r2_exec_rounds(const struct r2_exec *x);
/* The slot of a step's own piece, by base + index. Constant: what copies into it and out of it can
 * be told long before the step begins. Any thread may ask. */
void *r2_exec_slot(const struct r2_exec *x, uint64_t number);
/* Whether step `later` may begin before step `earlier` has ended; with their rounds. Any thread. */
bool r2_exec_beside(const struct r2_exec *x, uint64_t earlier, uint64_t its_round, uint64_t later,
                    uint64_t round);

#endif
