/* How long collectives take on the network: pure, times are arguments.
 *
 * NCCL's threads write down what they see of a collective in a slot, with a few stores. Nobody
 * waits: where no slot is free, the collective is not recorded, and counted as dropped. Later one
 * thread takes out what has ended (r2_coll_reap).
 *
 * The time of a collective begins with the first data that this rank's GPU hands to the network (a
 * rank that only receives: the first that arrives), and ends when its last network operation is
 * over. An operation that waits for the GPU costs no time before that. */
#ifndef R2_ENGINE_CORE_COLLTIMES_H
#define R2_ENGINE_CORE_COLLTIMES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define R2_COLL_SLOTS 2048
#define R2_COLL_TRIES 4             /* slots that are looked at for a free one */
#define R2_COLL_SETTLE_NS 20000000u /* an operation that is not known by then comes no more */
#define R2_COLL_IDLE_NS 1000000000u /* the same of a collective without any: none is needed */
#define R2_COLL_STUCK_NS UINT64_C(600000000000) /* its communicator has been aborted, say */

struct r2_coll {
    uint64_t comm;
    int rank, ranks;
    unsigned op;        /* enum r2_seg_collective */
    uint64_t bytes;     /* as nccl-tests counts sizes */
    uint64_t bus_bytes; /* as it counts bus bandwidth */
};

struct r2_coll_slot {
    atomic_uint turn; /* odd: in use; a handle of another turn is of an earlier collective */
    atomic_uint begun, ended; /* network operations */
    atomic_bool handed;       /* NCCL has handed over all of them; `what` is whole */
    atomic_ulong first_sent, first_received, changed; /* times; 0: none yet */
    struct r2_coll what;
};

struct r2_colltimes {
    atomic_bool on;
    atomic_uint next;
    atomic_ulong dropped;
    struct r2_coll_slot slots[R2_COLL_SLOTS];
};

/* A handle of a collective, for the calls below, which ignore those that are not valid; 0: it is
 * not recorded. Any thread. */
uint64_t r2_coll_begin(struct r2_colltimes *t, const struct r2_coll *what, uint64_t now);
void r2_coll_handed(struct r2_colltimes *t, uint64_t handle, uint64_t now);
bool r2_coll_op_begin(struct r2_colltimes *t, uint64_t handle);
void r2_coll_op_end(struct r2_colltimes *t, uint64_t handle, uint64_t now);
/* True: nobody has told the time of the first data yet (r2_coll_moves). */
bool r2_coll_wants_first(struct r2_colltimes *t, uint64_t handle, bool sent);
void r2_coll_moves(struct r2_colltimes *t, uint64_t handle, bool sent, uint64_t now);

/* One thread. Calls `each` for every collective that has ended. One that does not end is dropped.
 * Returns how many slots are in use. */
typedef void (*r2_coll_fn)(void *arg, const struct r2_coll *what, uint64_t ns);
unsigned r2_coll_reap(struct r2_colltimes *t, uint64_t now, r2_coll_fn each, void *arg);

/* The class of a size: all up to so many bytes, 1 KiB, 4 KiB, 16 KiB, ... */
uint64_t r2_coll_class(uint64_t bytes);

#endif
