/* Groups: what a thread calls between ncclGroupStart and ncclGroupEnd is queued and done at the
 * outermost end; a call outside a group is a group of one. */
#ifndef HOSTNCCL_GROUP_H
#define HOSTNCCL_GROUP_H

#include "kernels.h"

struct hn_op { /* one API call */
    struct hn_op *next;
    struct ncclComm *comm;
    enum hn_func func;
    const void *send;
    void *recv;
    size_t count; /* of a block, for all-gather and reduce-scatter */
    ncclDataType_t type;
    struct hn_redop op;
    int peer; /* or root */
    int mask; /* what of it the profiler wants to know */
    void *event;
};

struct hn_init { /* one communicator to be made */
    struct hn_init *next;
    struct ncclComm *comm;
    ncclComm_t *out;
    ncclUniqueId id;
    struct ncclComm *parent; /* a split, shrink or old rank of a grow, else NULL */
    int color, key;
    int *stay; /* shrink: old ranks of the new ones; ours until it is made. Else NULL */
    int stays;
    bool grows, has_id; /* an old rank; the one that has the id */
    ncclResult_t result;
};

/* Queues a copy of `op`, and does it at once outside a group. */
ncclResult_t hn_group_op(const struct hn_op *op);
ncclResult_t hn_group_init(const struct hn_init *init);
bool hn_group_open(void);

/* launch.c: makes the p2p connections that are missing (waits for the peers concerned), then the
 * launch and the progress thread's part of it. `ops` all belong to `comm`. */
ncclResult_t hn_launch_build(struct ncclComm *comm, const struct hn_op *ops,
                             struct hn_launch **launch, struct hn_pxop **px);

/* init.c */
ncclResult_t hn_init_prepare(struct hn_init *init, int nranks, int rank, int device,
                             const ncclConfig_t *config);
void hn_init_run(struct hn_init *init); /* may run on any thread; the result is in init->result */
/* Its end, also of one that was prepared and not run, with the error in init->result. */
void hn_init_over(struct hn_init *init);

#endif
