/* What a communicator's ranks know of each other and would plan together (R2CCL_PLAN=shadow).
 *
 * Every rank tells the lowest one, over shim/agree, how much of its node's NIC bandwidth is left;
 * that one asks the planner (shim/plan) what it would do, and says so: in the log, in the journal
 * and in the communicator's row. Nothing is proposed and nothing changes: schedules/ is empty.
 *
 * A thread of the shim looks at the NICs in the control segment four times a second, from the first
 * communicator on whose ranks have met, and plans. Callbacks of shim/agree only note what they are
 * told. Lock order: the list's lock, then a communicator's; neither is held over a call to NCCL.
 */
#ifndef R2_COMMS_FOLLOW_H
#define R2_COMMS_FOLLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "api/nccl.h"
#include "comms/comms.h"

struct r2_follow;

/* Whether plans are asked for at all. */
bool r2_follow_wanted(void);
/* Puts the rendezvous into an id that NCCL has just made. */
void r2_follow_sign(struct r2_nccl_id *id);

/* For a new communicator made from `id`, or out of `parent` (then `salt` tells its siblings apart).
 * NULL: no plans for it, one warning has said why. */
struct r2_follow *r2_follow_new(struct r2_comm *comm, const struct r2_nccl_id *id, int rank,
                                int nranks);
struct r2_follow *r2_follow_child(struct r2_comm *comm, struct r2_follow *parent, uint64_t salt,
                                  int rank, int nranks);
/* A split of `parent` that this rank gets no communicator from. */
void r2_follow_skip(struct r2_follow *parent, uint64_t salt);

/* Before a collective, and after NCCL took `n` of them (a group's at its end). */
void r2_follow_before(struct r2_follow *follow, enum r2_seg_collective kind, uint64_t bytes);
void r2_follow_after(struct r2_follow *follow, uint64_t n);

/* The application aborts: nobody waits any more. Then, when nobody holds the communicator, free. */
void r2_follow_abort(struct r2_follow *follow);
void r2_follow_free(struct r2_follow *follow);

#endif
