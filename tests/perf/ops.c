/* The operations: shapes, calls, what goes in and what must come out. */
#include <string.h>

#include "perf.h"

void perf_ops_shape(const struct perf *p, size_t bytes, struct perf_shape *s)
{
    size_t n = (size_t)p->ranks.nranks, count = bytes / p->data.es;
    double parts = (double)(n - 1) / (double)n;
    *s = (struct perf_shape){.in_place = true, .bus = 1};
    switch (p->o.op) {
    case PERF_REDUCE_SCATTER:
        s->bus = parts;
        break;
    case PERF_ALL_GATHER:
        s->bus = parts;
        break;
    case PERF_ALLTOALL:
        s->bus = parts;
        s->in_place = false;
        break;
    case PERF_ALL_REDUCE:
        s->bus = 2 * parts;
        break;
    case PERF_SENDRECV:
        s->in_place = false;
        break;
    default:
        break;
    }
    bool blocks =
        p->o.op == PERF_REDUCE_SCATTER || p->o.op == PERF_ALL_GATHER || p->o.op == PERF_ALLTOALL;
    s->count = blocks ? count / n : count;
    size_t all = blocks ? s->count * n : s->count;
    s->bytes = all * p->data.es;
    s->send_count = p->o.op == PERF_ALL_GATHER ? s->count : all;
    s->recv_count = p->o.op == PERF_REDUCE_SCATTER ? s->count : all;
}

static ncclResult_t start_alltoall(struct perf *p, const struct perf_shape *s, const char *send,
                                   char *recv)
{
    const struct perf_nccl *n = &p->nccl;
    size_t block = s->count * p->data.es;
    ncclResult_t rc = n->GroupStart();
    for (int r = 0; r < p->ranks.nranks && rc == ncclSuccess; r++) {
        rc = n->Send(send + (size_t)r * block, s->count, p->o.type, r, p->comm, perf_gpu_stream());
        if (rc == ncclSuccess)
            rc = n->Recv(recv + (size_t)r * block, s->count, p->o.type, r, p->comm,
                         perf_gpu_stream());
    }
    ncclResult_t end = n->GroupEnd();
    return rc == ncclSuccess ? end : rc;
}

static ncclResult_t start_sendrecv(struct perf *p, const struct perf_shape *s, const void *send,
                                   void *recv)
{
    const struct perf_nccl *n = &p->nccl;
    int size = p->ranks.nranks, next = (p->ranks.rank + 1) % size;
    ncclResult_t rc = n->GroupStart();
    if (rc == ncclSuccess)
        rc = n->Send(send, s->count, p->o.type, next, p->comm, perf_gpu_stream());
    if (rc == ncclSuccess)
        rc = n->Recv(recv, s->count, p->o.type, (p->ranks.rank + size - 1) % size, p->comm,
                     perf_gpu_stream());
    ncclResult_t end = n->GroupEnd();
    return rc == ncclSuccess ? end : rc;
}

ncclResult_t perf_ops_start(struct perf *p, const struct perf_shape *s, const void *send,
                            void *recv)
{
    const struct perf_nccl *n = &p->nccl;
    const struct perf_options *o = &p->o;
    ncclStream_t stream = perf_gpu_stream();
    switch (o->op) {
    case PERF_ALL_REDUCE:
        return n->AllReduce(send, recv, s->count, o->type, o->redop, p->comm, stream);
    case PERF_REDUCE_SCATTER:
        return n->ReduceScatter(send, recv, s->count, o->type, o->redop, p->comm, stream);
    case PERF_ALL_GATHER:
        return n->AllGather(send, recv, s->count, o->type, p->comm, stream);
    case PERF_BROADCAST:
        return n->Broadcast(send, recv, s->count, o->type, o->root, p->comm, stream);
    case PERF_REDUCE:
        return n->Reduce(send, recv, s->count, o->type, o->redop, o->root, p->comm, stream);
    case PERF_ALLTOALL:
        return start_alltoall(p, s, send, recv);
    default:
        return start_sendrecv(p, s, send, recv);
    }
}

void perf_ops_in_place(const struct perf *p, const struct perf_shape *s, void **send, void **recv)
{
    size_t own = (size_t)p->ranks.rank * s->count * p->data.es;
    if (p->o.op == PERF_REDUCE_SCATTER)
        *recv = (char *)*send + own;
    else if (p->o.op == PERF_ALL_GATHER)
        *send = (char *)*recv + own;
    else
        *recv = *send;
}

static const unsigned char *input(const struct perf *p, int rank)
{
    return p->data.inputs + (size_t)(rank % p->data.rows) * PERF_PERIOD * p->data.es;
}

/* Fresh input, and garbage where the result goes. */
void perf_ops_fill(struct perf *p, const struct perf_shape *s, void *send, void *recv,
                   bool in_place, uint64_t iteration)
{
    char *host = p->host;
    if (!in_place || p->o.op == PERF_ALL_GATHER) {
        size_t bytes = s->recv_count * p->data.es;
        char *whole = recv;
        memset(host, 0xdb, bytes);
        perf_gpu_write(whole, host, bytes);
    }
    /* Place in the table: the element's place in its rank's send buffer. */
    perf_data_fill(&p->data, host, input(p, p->ranks.rank), 0, s->send_count, iteration);
    perf_gpu_write(send, host, s->send_count * p->data.es);
}

static size_t wrong_blocks(const struct perf *p, const struct perf_shape *s, const char *got,
                           size_t first, uint64_t iteration)
{
    size_t wrong = 0;
    for (int r = 0; r < p->ranks.nranks; r++)
        wrong += perf_data_wrong(&p->data, got + (size_t)r * s->count * p->data.es, input(p, r),
                                 first, s->count, iteration);
    return wrong;
}

size_t perf_ops_wrong(struct perf *p, const struct perf_shape *s, const void *recv,
                      uint64_t iteration)
{
    int n = p->ranks.nranks, me = p->ranks.rank;
    size_t mine = (size_t)me * s->count;
    bool root_only = p->o.op == PERF_REDUCE && me != p->o.root;
    if (root_only)
        return 0;
    perf_gpu_read(p->host, recv, s->recv_count * p->data.es);
    switch (p->o.op) {
    case PERF_ALL_REDUCE:
    case PERF_REDUCE:
        return perf_data_wrong(&p->data, p->host, p->data.result, 0, s->count, iteration);
    case PERF_REDUCE_SCATTER:
        return perf_data_wrong(&p->data, p->host, p->data.result, mine, s->count, iteration);
    case PERF_ALL_GATHER:
        return wrong_blocks(p, s, p->host, 0, iteration);
    case PERF_ALLTOALL:
        return wrong_blocks(p, s, p->host, mine, iteration);
    case PERF_BROADCAST:
        return perf_data_wrong(&p->data, p->host, input(p, p->o.root), 0, s->count, iteration);
    default:
        return perf_data_wrong(&p->data, p->host, input(p, (me + n - 1) % n), 0, s->count,
                               iteration);
    }
}
