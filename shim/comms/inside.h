/* Inside comms/: the entry, its row, and a thread's open group. */
#ifndef R2_COMMS_INSIDE_H
#define R2_COMMS_INSIDE_H

#include <stdatomic.h>

#include "comms/comms.h"

struct r2_comm {
    r2_nccl_comm handle;
    struct r2_real *real;
    uint64_t id, parent;
    atomic_int holders; /* the table is one */
    atomic_uint_fast64_t index;
    atomic_uint_fast64_t children;
    atomic_int state;         /* enum r2_seg_comm_state */
    atomic_int told;          /* by the shim: what the application gets to see; 0: nothing */
    atomic_bool journaled;    /* that it has failed */
    struct r2_follow *follow; /* plans; NULL: none. Set before it is in the table */
    /* Where readers see it: in the control segment, else in `unseen`. */
    _Atomic(struct r2_seg_comm *) row;
    atomic_int row_number; /* -1: unseen */
    struct r2_seg_comm unseen;
};

static inline struct r2_seg_comm *r2_comm_row(struct r2_comm *comm)
{
    return atomic_load_explicit(&comm->row, memory_order_acquire);
}

/* group.c: room for what the open group does on a communicator (false: no memory), before an
 * operation; then notes that NCCL took it. comms.c: so many are NCCL's now, or (below 0) are not.
 */
bool r2_comms_group_reserve(struct r2_comm *comm);
void r2_comms_group_count(struct r2_comm *comm, bool collective, uint64_t bus_bytes);
void r2_comms_handed(struct r2_comm *comm, int64_t collectives, int64_t p2p, int64_t bus_bytes);

/* The plugin makes the segment with the first connection, which may come after the communicator:
 * rows that nobody can see are tried again now and then. */
void r2_comms_row_again(struct r2_comm *comm, uint64_t now);

/* comm.c. It has failed here, and the first who says so tells the other ranks, which may take
 * 200 ms. `line`: for the journal; NULL: the error's name. */
void r2_comm_fail(struct r2_comm *comm, int error, const char *cause, const char *line);
/* NCCL has failed with `error` at another rank: this one cannot continue. Not held. */
void r2_comms_told(struct r2_comm *comm, int rank, int error);

/* row.c. Finds the process's control segment if the plugin has made it by now, and a free row in
 * it; otherwise the entry stays unseen. Cheap when it was tried a moment ago. The caller holds the
 * table's lock. */
void r2_comm_row_attach(struct r2_comm *comm, uint64_t now_ns);
/* Frees the row; the entry is unseen afterwards. The caller holds the table's lock. */
void r2_comm_row_detach(struct r2_comm *comm);
void r2_comm_row_state(struct r2_comm *comm, enum r2_seg_comm_state state, const char *cause);
void r2_comm_row_ranks(struct r2_comm *comm, int rank, int nranks, int device);
void r2_comm_row_name(struct r2_comm *comm, const char *name);
/* nodes, local: how many nodes its ranks are on, and how many ranks on this one. */
void r2_comm_row_nodes(struct r2_comm *comm, int nodes, int local);
/* What is NULL stays as it was. */
void r2_comm_row_plan(struct r2_comm *comm, const char *plan, const char *cause);
void r2_comm_row_epoch(struct r2_comm *comm, uint64_t epoch);
struct r2_comm_plans {
    uint64_t messages, wait_ns;
    uint32_t proposals, agreed, events, rounds;
};
void r2_comm_row_plans(struct r2_comm *comm, const struct r2_comm_plans *plans);
/* The process's control segment once a row has found it, else NULL. */
struct r2_segment *r2_comm_segment(void);
/* Whether there is no use in trying (R2CCL_SHM=0, or it was tried too often). */
bool r2_comm_row_hopeless(void);

#endif
