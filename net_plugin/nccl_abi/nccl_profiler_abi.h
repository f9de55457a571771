/* Binary interface between NCCL and a profiler plugin, v5: our own declarations, written from the
 * documented facts. Only layout matters here: names are ours, and what is not used is left out.
 *
 * NCCL 2.28 to 2.32 take the symbol "ncclProfiler_v5", of which the layout has not changed. They
 * look for it in NCCL_PROFILER_PLUGIN, then in libnccl-profiler.so, and only where neither can be
 * opened in the net plugin's library; older ones do not look there.
 *
 * NCCL reads the word at `mask` (init) before each event, and tells no event that is not asked for
 * there. Events of a kind come with their parents; a parent's handle is what start_event wrote
 * into *event, NULL if it wants no more of it. */
#ifndef R2_NCCL_ABI_NCCL_PROFILER_ABI_H
#define R2_NCCL_ABI_NCCL_PROFILER_ABI_H

#include "nccl_abi/nccl_net_abi.h"

/* `type` of an event, and bits of the mask. */
#define R2_PROF_COLL (1 << 1)       /* a collective, while NCCL hands it over */
#define R2_PROF_PROXY_OP (1 << 3)   /* its work on one connection; parent: the collective */
#define R2_PROF_PROXY_STEP (1 << 4) /* a message; parent: the work */

/* States of a message. */
#define R2_PROF_RECV_FLUSH_WAIT 11 /* it has arrived */
#define R2_PROF_SEND_PEER_WAIT 20  /* the GPU has filled its buffer */

struct r2_prof_event {
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct {
            uint64_t seq;
            const char *func; /* "AllReduce" */
            const void *send;
            void *recv;
            size_t count;
            int root;
            const char *datatype; /* "ncclFloat32" */
            uint8_t channels, warps;
            const char *algo, *proto;
            void *group;
        } coll;
        struct {
            int pid; /* of the process that handed it over: the parent is a handle there */
            uint8_t channel;
            int peer, steps, chunk, is_send;
        } proxy_op;
        struct {
            int step;
        } proxy_step;
    };
};

struct r2_ncclprofiler_v5 {
    const char *name;
    int (*init)(void **ctx, uint64_t comm_id, int *mask, const char *comm_name, int nodes,
                int ranks, int rank, r2_nccl_logger log);
    int (*start_event)(void *ctx, void **event, struct r2_prof_event *what);
    int (*stop_event)(void *event);
    int (*record_state)(void *event, int state, void *args);
    int (*finalize)(void *ctx); /* only of a context that is not NULL */
};

#endif
