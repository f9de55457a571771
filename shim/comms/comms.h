/* The communicators of the process: a side table keyed by NCCL's own handle, which is what the
 * application keeps using.
 *
 * The index of a communicator counts the collectives that NCCL took from the application, when it
 * took them. Those of a group count at its outermost end, just before NCCL is told of that.
 * Captured, zero-count and single-rank ones count as well. Send and Recv do not. Collectives of a
 * group that ended in ncclGroupSimulateEnd, or that NCCL refused, are taken back. NCCL asks its
 * users to issue the collectives of a communicator in the same order on all ranks. So the index of
 * an operation is the same on all of them.
 *
 * Threads: everything may be called from any thread. An entry lives while it is in the table or
 * held; removing one (destroy, abort from another thread) does not wait for holders. No lock is
 * held over a call to NCCL: the table's lock covers a look-up only.
 */
#ifndef R2_COMMS_COMMS_H
#define R2_COMMS_COMMS_H

#include <stdbool.h>
#include <stdint.h>

#include "control/segment.h"
#include "nccl/nccl.h"
#include "real/real.h"

struct r2_comm;

/* What a call that makes a communicator knows about it. */
struct r2_comm_birth {
    struct r2_real *real;
    uint64_t id;      /* the same on all ranks, not 0 */
    uint64_t parent;  /* id of the parent; 0: none */
    int rank, nranks; /* -1, 0: to be asked of NCCL */
    bool nonblocking; /* its calls may return before they are done, on some rank if not here */
    bool pending;     /* still in the making */
    char name[40];
    /* For plans: the id that it was made from, or the parent (held by the birth) and what tells it
     * from its siblings. */
    bool has_id;
    struct r2_nccl_id nccl_id;
    struct r2_comm *from;
    uint64_t salt;
};

/* Adds a communicator that a call has given to the application; NULL: a split that gave it none. */
void r2_comms_add(r2_nccl_comm handle, const struct r2_comm_birth *birth);
/* Takes it out, before NCCL frees it: the address may come back at once. aborted: nobody may wait
 * for its peers any more. */
void r2_comms_remove(r2_nccl_comm handle, bool aborted);

/* The entry of a handle, held until r2_comms_drop; NULL: not one of ours. */
struct r2_comm *r2_comms_hold(r2_nccl_comm handle);
void r2_comms_drop(struct r2_comm *comm);

struct r2_real *r2_comms_real(const struct r2_comm *comm);
uint64_t r2_comms_id(const struct r2_comm *comm);
/* Index of the next collective. */
uint64_t r2_comms_index(const struct r2_comm *comm);
/* The n-th child that a split, shrink or grow makes of it, from 1: the same on all ranks. */
uint64_t r2_comms_next_child(struct r2_comm *comm);

/* Around an operation. begin: what is not R2_NCCL_OK is the operation's result, and it is not to be
 * run. `result` is NCCL's; what it did not take is not counted. */
int r2_comms_begin(struct r2_comm *comm, enum r2_seg_collective kind, size_t count, int type);
void r2_comms_end(struct r2_comm *comm, int result, bool collective, r2_nccl_stream stream);
/* Between the two, of an AllReduce with these arguments (comms/vote.h): true, and *result is what
 * the call returns. False: NCCL has it, as always in a group and if `configured`
 * (ncclAllReduceConfig). */
bool r2_comms_take(struct r2_comm *comm, const uint64_t *word, bool configured, int *result);

/* Whether another thread has ended it since it was held: its handle is not NCCL's any more. */
bool r2_comms_gone(struct r2_comm *comm);

/* The application ends it by a shrink that aborts: nobody waits for its peers any more. */
void r2_comms_abort(struct r2_comm *comm);
/* NCCL has revoked it: nobody waits for a plan any more, and what is done with it goes to NCCL. */
void r2_comms_revoked(struct r2_comm *comm);

void r2_comms_state(struct r2_comm *comm, enum r2_seg_comm_state state, const char *cause);
/* The ranks no longer have the same to run on, or nobody could tell this one what became of a plan:
 * it runs nothing any more, and the application sees ncclRemoteError. Tells the other ranks, which
 * may take 200 ms. `cause`: 37 characters at most, for one line of the journal. */
void r2_comms_broken(struct r2_comm *comm, const char *cause);
/* What ncclCommGetAsyncError said: a communicator in the making becomes ready or fails. The first
 * error is told to the other ranks. */
void r2_comms_async(struct r2_comm *comm, r2_nccl_comm handle, int error);
/* R2_NCCL_REMOTE once another rank has told of its error; else R2_NCCL_OK. */
int r2_comms_elsewhere(struct r2_comm *comm);

/* Groups, of the calling thread. Only calls of the application itself come here. */
void r2_comms_group_start(void);
/* Depth after this end; below 1 the group is over. */
int r2_comms_group_end(void);
bool r2_comms_in_group(void);
/* In a group: the communicator that a call will have put to *out when the group is over (NULL: a
 * split that gives none). */
void r2_comms_group_birth(r2_nccl_comm *out, const struct r2_comm_birth *birth);
/* The outermost end is about to be called, and no simulated one: what NCCL took counts from now on,
 * so that a rank that hangs in it has handed over as much as its peers. */
void r2_comms_group_hand(void);
/* NCCL has refused an operation in the group. */
void r2_comms_group_refuse(void);
/* The outermost end is through NCCL, with what NCCL said of it. It launches nothing once a call of
 * the group was refused, and refuses arguments before it launches; where it fails in between, the
 * communicator is no good any more. simulated: nothing of it was really done. */
void r2_comms_group_over(int ended, bool simulated);

/* How many are in the table. */
int r2_comms_count(void);

/* Around fork: the table is at rest, so that the child can still look up whose a communicator is.
 */
void r2_comms_before_fork(void);
void r2_comms_after_fork(void);
/* In the child, after that. */

#endif
