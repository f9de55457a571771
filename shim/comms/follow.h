/* What a communicator's ranks know of each other, and the plan that they follow together
 * (R2CCL_PLAN, R2CCL_ALLREDUCE). Also that NCCL has failed at one of them (R2CCL_TELL_ERRORS).
 *
 * Every rank tells rank 0, over shim/agree, how much of its node's NIC bandwidth is left. Rank 0
 * plans (leader.c), and all ranks take the plan from the same operation on (vote.c).
 *
 * A thread of the shim looks at the NICs in the control segment ten times a second, and plans. It
 * starts with the first communicator whose ranks have met. Callbacks of shim/agree only note what
 * they are told. None of the locks is held over a call to NCCL.
 */
#ifndef R2_COMMS_FOLLOW_H
#define R2_COMMS_FOLLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comms/comms.h"
#include "nccl/nccl.h"

struct r2_follow;

/* Whether ranks are to meet at all, for plans or to be told of each other's errors. */
bool r2_follow_wanted(void);
/* The ranks of a communicator cannot speak to each other: says so and why. NULL: not made yet. */
void r2_follow_lacks(struct r2_comm *comm, const char *why);
/* Puts the rendezvous into an id that NCCL has just made. */
void r2_follow_sign(struct r2_nccl_id *id, int version);

/* What a new communicator is. */
struct r2_follow_birth {
    int rank, nranks, device;
};

/* For a new communicator made from `id`, or out of `parent` (then `salt` tells its siblings apart).
 * NULL: no plans for it, one warning has said why. */
struct r2_follow *r2_follow_new(struct r2_comm *comm, const struct r2_nccl_id *id,
                                const struct r2_follow_birth *birth);
struct r2_follow *r2_follow_child(struct r2_comm *comm, struct r2_follow *parent, uint64_t salt,
                                  const struct r2_follow_birth *birth);
/* A split of `parent` that this rank gets no communicator from. */
void r2_follow_skip(struct r2_follow *parent, uint64_t salt);

/* Before a collective, and after NCCL took `n` of them (a group's at its end). Before may wait, and
 * returns NCCL's result: what is not R2_NCCL_OK is the collective's. group: NCCL is about to launch
 * a group with `n` of them; forget: it has refused that, and they may come in another way. */
int r2_follow_before(struct r2_follow *follow, enum r2_seg_collective kind, uint64_t bytes);
void r2_follow_group(struct r2_follow *follow, uint64_t n);
void r2_follow_forget(struct r2_follow *follow);
void r2_follow_after(struct r2_follow *follow, uint64_t n);

/* NCCL has revoked the communicator: who waits for a plan's fate does so no more, and its operation
 * goes to NCCL, which refuses it. No more plans. Any thread. */
void r2_follow_revoked(struct r2_follow *follow);
/* The application aborts: nobody waits any more. Or it destroys. Then, when nobody holds the
 * communicator, free. */
void r2_follow_abort(struct r2_follow *follow);
void r2_follow_end(struct r2_follow *follow);
void r2_follow_free(struct r2_follow *follow);

#endif
