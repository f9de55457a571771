/* What the "GPU" does: tasks are sequences of primitives, generated step by step (schedule.c,
 * pure) and run slice by slice without ever blocking (kernels.c). */
#ifndef HOSTNCCL_KERNELS_H
#define HOSTNCCL_KERNELS_H

#include "comm.h"

enum hn_func { /* NCCL's numbers, for setNetAttr */
               HN_BROADCAST = 0,
               HN_REDUCE = 1,
               HN_ALLGATHER = 2,
               HN_REDUCESCATTER = 3,
               HN_ALLREDUCE = 4,
               HN_SEND = 6,
               HN_RECV = 7,
               HN_COPY = 100, /* to oneself */
};

/* One step on one chunk: with what arrives, with one's own input, or with both. */
struct hn_prim {
    bool recv, send, reduce;
    const char *src; /* own input; NULL when only what arrives counts */
    char *dst;       /* result is stored here; NULL: only sent on */
    bool last;       /* the result is final: divide where the operation asks for it */
    size_t count;    /* elements */
};

struct hn_task {
    struct hn_task *next;
    enum hn_func func;
    enum hn_proto proto;
    ncclDataType_t type;
    struct hn_redop op;
    int rank, nranks, root;
    struct hn_conn *from, *to; /* receive from, send to; NULL: nobody */
    const char *src;
    char *dst;
    size_t stride;     /* elements between the blocks of two ranks (all-gather, reduce-scatter) */
    size_t begin, end; /* this channel's elements (of a block) */
    size_t chunk;      /* most elements of one primitive */
    int slices;        /* messages per primitive */
    /* position */
    size_t loop_at;
    int step;
    struct hn_prim prim;
    bool has_prim;
    int slice;
    size_t slice_at, rx_done;
};

enum { HN_RX_BYTES = 128 << 10 }; /* room for the data of one message in LL or LL128 */

/* Bytes of data that one message of the protocol carries in a slot. */
size_t hn_proto_capacity(enum hn_proto proto, size_t slot_bytes);
size_t hn_proto_wire_bytes(enum hn_proto proto, size_t data_bytes);
/* Data to lines with flags; `number` is the message's on its connection. */
void hn_proto_encode(enum hn_proto proto, char *wire, const char *data, size_t bytes,
                     uint64_t number);
/* Takes what has arrived, in order, from `done` bytes on; returns the new `done`. It reads memory
 * that a plugin may be writing: that is how a GPU sees LL and LL128. */
size_t hn_proto_decode(enum hn_proto proto, const char *wire, char *data, size_t bytes, size_t done,
                       uint64_t number);

/* The next primitive of the task; false at the end. */
bool hn_schedule_next(struct hn_task *task, struct hn_prim *prim);
/* Messages that the whole task sends or receives (the task's position does not move). */
uint64_t hn_schedule_messages(const struct hn_task *task, bool send);
/* Elements of slice `slice` that starts at `at`. */
size_t hn_schedule_slice(const struct hn_task *task, const struct hn_prim *prim, int slice,
                         size_t at);

/* Runs the chain as far as it goes. 1 finished, 0 not yet, negative ncclResult_t on an error;
 * `*progress` is set when anything moved. */
int hn_kernel_step(struct hn_chain *chain, bool *progress);

#endif
