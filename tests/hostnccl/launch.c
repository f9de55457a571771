/* From API calls to chains of tasks and the messages that the progress thread must move. Every
 * choice here depends only on what all ranks know: sizes, ranks and settings. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "group.h"
#include "tuning.h"

enum { ALIGN = 16 };

struct build {
    struct ncclComm *comm;
    const struct hn_op *op; /* whose tasks are being added */
    struct hn_launch *launch;
    struct hn_pxop *px, **px_end;
    int *keys;                       /* which connection a chain belongs to */
    struct hn_conn **sends, **recvs; /* to be connected first */
    int nsends, nrecvs, room;
};

/* How many of `channels` share `bytes`, each at least `least`. */
static size_t share(int channels, size_t bytes, size_t least)
{
    size_t parts = bytes / least;
    if (parts < 1)
        return 1;
    return parts > (size_t)channels ? (size_t)channels : parts;
}

static size_t part_size(size_t count, size_t parts)
{
    return (count + parts * ALIGN - 1) / (parts * ALIGN) * ALIGN;
}

static struct hn_chain *chain_for(struct build *b, int key)
{
    struct hn_launch *l = b->launch;
    for (int i = 0; i < l->chain_count; i++)
        if (b->keys[i] == key)
            return &l->chains[i];
    b->keys[l->chain_count] = key;
    return &l->chains[l->chain_count++];
}

static int add_px(struct build *b, const struct hn_task *t, struct hn_conn *conn, bool exact)
{
    uint64_t total = hn_schedule_messages(t, conn->send);
    if (!total)
        return 0;
    struct hn_pxop *px = calloc(1, sizeof(*px));
    if (!px)
        return -1;
    px->conn = conn;
    px->api = b->op;
    px->proto = t->proto;
    px->func = t->func;
    px->total = total;
    px->exact_left = SIZE_MAX;
    if (exact && t->proto == HN_SIMPLE)
        px->exact_left = (t->end - t->begin) * hn_reduce_size(t->type);
    *b->px_end = px;
    b->px_end = &px->next;
    return 0;
}

static int add_task(struct build *b, int key, const struct hn_task *model)
{
    struct hn_task *t = malloc(sizeof(*t));
    if (!t)
        return -1;
    *t = *model;
    struct hn_chain *chain = chain_for(b, key);
    if (chain->last)
        chain->last->next = t;
    else
        chain->first = chain->now = t;
    chain->last = t;
    if (t->proto != HN_SIMPLE && !chain->rx) {
        chain->rx = malloc(HN_RX_BYTES);
        chain->tx = malloc(HN_RX_BYTES);
        if (!chain->rx || !chain->tx)
            return -1;
    }
    bool p2p = t->func == HN_SEND || t->func == HN_RECV;
    int failed = t->from ? add_px(b, t, t->from, p2p) : 0;
    return failed || !t->to ? failed : add_px(b, t, t->to, p2p);
}

static size_t slot_elements(const struct hn_conn *conn, enum hn_proto proto, size_t es)
{
    return hn_proto_capacity(proto, conn->lanes[proto].slot_bytes) / es / ALIGN * ALIGN;
}

static struct hn_task collective_task(const struct ncclComm *comm, const struct hn_op *op,
                                      enum hn_proto proto, size_t part, size_t i)
{
    struct hn_task t = {.func = op->func,
                        .proto = proto,
                        .type = op->type,
                        .op = op->op,
                        .rank = comm->rank,
                        .nranks = comm->nranks,
                        .root = op->peer,
                        .src = op->send,
                        .dst = op->recv,
                        .stride = op->count};
    t.begin = t.loop_at = i * part;
    t.end = op->count - t.begin < part ? op->count : t.begin + part;
    t.slices = proto == HN_SIMPLE ? 2 : 1;
    t.chunk = t.end - t.begin;
    return t;
}

static int add_ring(struct build *b, const struct hn_op *op, enum hn_proto proto, size_t bytes)
{
    struct ncclComm *comm = b->comm;
    size_t es = hn_reduce_size(op->type);
    size_t parts = share(comm->channels, bytes, proto == HN_LL ? 8 << 10 : 64 << 10);
    size_t part = part_size(op->count, parts);
    for (size_t c = 0; c < parts && c * part < op->count; c++) {
        struct hn_task t = collective_task(comm, op, proto, part, c);
        if (comm->nranks > 1) {
            t.from = comm->ring_recv[c];
            t.to = comm->ring_send[c];
            t.chunk = slot_elements(t.to, proto, es) * (size_t)t.slices;
        }
        if (add_task(b, (int)c, &t))
            return -1;
    }
    return 0;
}

static ncclResult_t add_collective(struct build *b, const struct hn_op *op)
{
    struct ncclComm *comm = b->comm;
    size_t bytes = op->count * hn_reduce_size(op->type);
    if (op->func == HN_ALLGATHER || op->func == HN_REDUCESCATTER)
        bytes *= (size_t)comm->nranks;
    if (add_ring(b, op, hn_tuning_protocol(bytes, false), bytes))
        return hn_util_fail(ncclSystemError, "out of memory");
    return ncclSuccess;
}

/* Part `i` of a message to or from a peer: both ends come to one channel. */
static int p2p_channel(const struct ncclComm *comm, const struct hn_op *op, size_t i)
{
    int ahead = op->func == HN_SEND ? op->peer - comm->rank : comm->rank - op->peer;
    return (int)(((size_t)(ahead + comm->nranks) + i) % (size_t)comm->channels);
}

static struct hn_conn **p2p_conn(struct ncclComm *comm, const struct hn_op *op, int channel)
{
    struct hn_conn **all = op->func == HN_SEND ? comm->p2p_send : comm->p2p_recv;
    return &all[(size_t)op->peer * (size_t)comm->channels + (size_t)channel];
}

static size_t p2p_parts(const struct ncclComm *comm, const struct hn_op *op)
{
    return share(comm->channels, op->count * hn_reduce_size(op->type), 256 << 10);
}

static int add_p2p(struct build *b, const struct hn_op *op)
{
    struct ncclComm *comm = b->comm;
    size_t es = hn_reduce_size(op->type), parts = p2p_parts(comm, op);
    size_t part = part_size(op->count, parts);
    for (size_t i = 0; i < parts && (i == 0 || i * part < op->count); i++) {
        int channel = p2p_channel(comm, op, i);
        struct hn_conn *conn = *p2p_conn(comm, op, channel);
        struct hn_task t = {.func = op->func,
                            .type = op->type,
                            .rank = comm->rank,
                            .nranks = comm->nranks,
                            .src = op->send,
                            .dst = op->recv,
                            .slices = 1};
        t.proto = hn_tuning_protocol(op->count * es, true);
        t.begin = t.loop_at = i * part;
        t.end = op->count - t.begin < part ? op->count : t.begin + part;
        if (op->func == HN_SEND)
            t.to = conn;
        else
            t.from = conn;
        t.chunk = slot_elements(conn, t.proto, es);
        int key = (op->peer * comm->channels + channel) * 2 + (op->func == HN_SEND);
        if (add_task(b, comm->channels + 1 + key, &t))
            return -1;
    }
    return 0;
}

/* The k-th send to oneself goes into the k-th receive from oneself. */
static ncclResult_t add_self(struct build *b, const struct hn_op *ops)
{
    const struct hn_op *recv = ops;
    for (const struct hn_op *send = ops; send; send = send->next) {
        if (send->func != HN_SEND || send->peer != b->comm->rank)
            continue;
        while (recv && (recv->func != HN_RECV || recv->peer != b->comm->rank))
            recv = recv->next;
        size_t bytes = send->count * hn_reduce_size(send->type);
        if (!recv || recv->count * hn_reduce_size(recv->type) != bytes)
            return hn_util_fail(ncclInvalidUsage,
                                "a send of %zu bytes to oneself has no receive of that size",
                                bytes);
        struct hn_task t = {.func = HN_COPY,
                            .proto = HN_SIMPLE,
                            .type = ncclInt8,
                            .src = send->send,
                            .dst = recv->recv,
                            .end = bytes,
                            .chunk = bytes,
                            .slices = 1};
        if (add_task(b, b->comm->channels, &t))
            return hn_util_fail(ncclSystemError, "out of memory");
        recv = recv->next;
    }
    return ncclSuccess;
}

static bool is_p2p(const struct hn_op *op)
{
    return op->func == HN_SEND || op->func == HN_RECV;
}

static ncclResult_t connect_peers(struct build *b, const struct hn_op *ops)
{
    struct ncclComm *comm = b->comm;
    for (const struct hn_op *op = ops; op; op = op->next) {
        size_t parts = is_p2p(op) && op->peer != comm->rank ? p2p_parts(comm, op) : 0;
        for (size_t i = 0; i < parts; i++) {
            int channel = p2p_channel(comm, op, i);
            struct hn_conn **conn = p2p_conn(comm, op, channel);
            bool send = op->func == HN_SEND;
            if (*conn)
                continue;
            *conn = hn_conn_new(comm, op->peer, channel, send, true);
            if (!*conn)
                return hn_util_fail(ncclSystemError, "out of memory");
            *(send ? &b->sends[b->nsends++] : &b->recvs[b->nrecvs++]) = *conn;
        }
    }
    if (!b->nsends && !b->nrecvs)
        return ncclSuccess;
    return hn_conn_setup(comm, b->sends, b->nsends, b->recvs, b->nrecvs);
}

static ncclResult_t fill(struct build *b, const struct hn_op *ops)
{
    ncclResult_t result = connect_peers(b, ops);
    if (result == ncclSuccess)
        result = add_self(b, ops);
    for (const struct hn_op *op = ops; op && result == ncclSuccess; op = op->next) {
        bool p2p = is_p2p(op);
        b->op = op;
        if (p2p ? op->peer == b->comm->rank : !op->count)
            continue;
        if (!p2p)
            result = add_collective(b, op);
        else if (add_p2p(b, op))
            result = hn_util_fail(ncclSystemError, "out of memory");
    }
    return result;
}

ncclResult_t hn_launch_build(struct ncclComm *comm, const struct hn_op *ops,
                             struct hn_launch **launch, struct hn_pxop **px)
{
    size_t room = (size_t)comm->channels + 1; /* rings, and to oneself */
    for (const struct hn_op *op = ops; op; op = op->next)
        room += is_p2p(op) ? (size_t)comm->channels : 0;
    struct build b = {.comm = comm};
    b.px_end = &b.px;
    b.launch = calloc(1, sizeof(*b.launch));
    b.keys = calloc(room, sizeof(*b.keys));
    b.sends = calloc(room, sizeof(void *));
    b.recvs = calloc(room, sizeof(void *));
    if (b.launch)
        b.launch->chains = calloc(room, sizeof(*b.launch->chains));
    ncclResult_t result = ncclSystemError;
    if (b.launch && b.launch->chains && b.keys && b.sends && b.recvs)
        result = fill(&b, ops);
    free(b.keys);
    free(b.sends);
    free(b.recvs);
    if (result != ncclSuccess) {
        while (b.px) {
            struct hn_pxop *next = b.px->next;
            free(b.px);
            b.px = next;
        }
        if (b.launch && b.launch->chains)
            hn_gpu_free(b.launch);
        else
            free(b.launch);
        return result;
    }
    *launch = b.launch;
    *px = b.px;
    return ncclSuccess;
}
