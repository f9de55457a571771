/* The communicator of one node's ranks, for an AllReduce between nodes that have several ranks
 * (comms/vote.h): NCCL's ReduceScatter in the node, each rank's slice between the nodes, NCCL's
 * AllGather in the node. NCCL makes it as any other; the application never sees it.
 *
 * Threads: any; who calls beside its owner, or later, has held it. Results are NCCL's.
 */
#ifndef R2_COMMS_NODE_H
#define R2_COMMS_NODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agree/agree.h"
#include "nccl/nccl.h"
#include "real/real.h"

struct r2_node;

struct r2_node_config {
    struct r2_real *real;
    int device, rank, nranks; /* of the node's */
    uint8_t id[R2_AGREE_ID];  /* r2_node_id's, of the node's rank 0 */
    void (*changed)(void);    /* r2_node_state has; on a thread of its own */
};

/* For the rank that is 0 in its node. False: NCCL gives none. */
bool r2_node_id(struct r2_real *real, uint8_t id[R2_AGREE_ID]);

/* Begins to make it, on a thread of its own: NCCL waits for the other ranks. It is given up after a
 * minute, and only that thread waits on. 0; -ENOMEM; -EAGAIN:
 * no thread; -ENOSYS: this NCCL lacks a function. */
int r2_node_new(struct r2_node **out, const struct r2_node_config *config);

enum r2_node_state { R2_NODE_MAKING, R2_NODE_MADE, R2_NODE_ABORTED, R2_NODE_FAILED };
enum r2_node_state r2_node_state(struct r2_node *n);

/* `count` elements for each rank, from nranks * count; in place as NCCL has it. */
int r2_node_reduce_scatter(struct r2_node *n, const void *in, void *out, size_t count, int type,
                           int op, r2_nccl_stream stream);
int r2_node_all_gather(struct r2_node *n, const void *in, void *out, size_t count, int type,
                       r2_nccl_stream stream);

void r2_node_hold(struct r2_node *n);
void r2_node_drop(struct r2_node *n);

/* What runs on it ends; one in the making is ended when NCCL has made it. */
void r2_node_abort(struct r2_node *n);
/* Ends it, after its work unless it was aborted, and drops it. NULL is allowed. */
void r2_node_free(struct r2_node *n);

#endif
