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
    l->chains[l->chain_count].thread = l->chain_count;
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
        chain->rx = malloc(HN_ARITY * HN_RX_BYTES);
        chain->tx = malloc(HN_RX_BYTES);
        if (!chain->rx || !chain->tx)
            return -1;
    }
    bool p2p = t->func == HN_SEND || t->func == HN_RECV;
    int failed = 0;
    for (int i = 0; i < t->nfrom && !failed; i++)
        failed = add_px(b, t, t->from[i], p2p);
    for (int i = 0; i < t->nto && !failed; i++)
        failed = add_px(b, t, t->to[i], p2p);
    return failed;
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
            t.from[t.nfrom++] = comm->ring_recv[c];
            t.to[t.nto++] = comm->ring_send[c];
            t.chunk = slot_elements(t.to[0], proto, es) * (size_t)t.slices;
        }
        if (add_task(b, (int)c, &t))
            return -1;
    }
    return 0;
}

/* Small enough that several are under way between root and leaves. */
static size_t tree_chunk(const struct ncclComm *comm, const struct hn_task *t, size_t largest)
{
    size_t es = hn_reduce_size(t->type), steps = 4 * (size_t)hn_tree_depth(comm->nodes) + 8;
    size_t chunk = largest, least = t->proto == HN_SIMPLE ? 64 << 10 : 8 << 10;
    while ((t->end - t->begin) / chunk < steps && chunk * es > 2 * least)
        chunk = chunk / 2 / ALIGN * ALIGN;
    return chunk;
}

static bool is_root(const struct hn_tree *tree)
{
    return tree->up < 0;
}

/* Both ways of one part. They share a GPU thread: what the one reads, the other writes. */
static int add_tree_part(struct build *b, struct hn_task *t, size_t part)
{
    struct ncclComm *comm = b->comm;
    const struct hn_tree *tree = &comm->trees[part % 2];
    struct hn_conn **send = &comm->tree_send[part * HN_LINKS];
    struct hn_conn **recv = &comm->tree_recv[part * HN_LINKS];
    struct hn_task up = *t, down = *t;
    up.way = HN_UP;
    up.root = is_root(tree) ? comm->rank : -1;
    down.way = HN_DOWN;
    for (int i = 0; i < HN_ARITY; i++) {
        if (tree->down[i] < 0)
            continue;
        up.from[up.nfrom++] = recv[1 + i];
        down.to[down.nto++] = send[1 + i];
    }
    if (is_root(tree)) {
        memcpy(up.to, down.to, sizeof(up.to));
        up.nto = down.nto;
    } else {
        up.to[up.nto++] = send[0];
        down.from[down.nfrom++] = recv[0];
    }
    int key = -2 - (int)part * 2;
    if (add_task(b, key, &up) || (!is_root(tree) && add_task(b, key - 1, &down)))
        return -1;
    chain_for(b, is_root(tree) ? key : key - 1)->thread = chain_for(b, key)->thread;
    return 0;
}

/* Each tree has half of the data, each channel an equal share of both. */
static int add_tree(struct build *b, const struct hn_op *op, enum hn_proto proto, size_t bytes)
{
    struct ncclComm *comm = b->comm;
    size_t es = hn_reduce_size(op->type);
    size_t parts = share(comm->channels * 2, bytes, proto == HN_LL ? 8 << 10 : 64 << 10);
    size_t part = part_size(op->count, parts);
    for (size_t i = 0; i < parts && i * part < op->count; i++) {
        struct hn_task t = collective_task(comm, op, proto, part, i);
        struct hn_conn *any = NULL;
        for (int l = 0; l < HN_LINKS && !any; l++)
            any = comm->tree_send[i * HN_LINKS + (size_t)l];
        t.slices = 1;
        t.chunk = tree_chunk(comm, &t, slot_elements(any, proto, es));
        if (add_tree_part(b, &t, i))
            return -1;
    }
    return 0;
}

static ncclResult_t add_collective(struct build *b, const struct hn_op *op)
{
    struct ncclComm *comm = b->comm;
    size_t bytes = op->count * hn_reduce_size(op->type);
    enum hn_algo algo = HN_RING;
    enum hn_proto proto;
    if (op->func == HN_ALLGATHER || op->func == HN_REDUCESCATTER)
        bytes *= (size_t)comm->nranks;
    ncclResult_t result = hn_tuning_choose(comm, op->func, bytes, &algo, &proto);
    bool tree = algo == HN_TREE && comm->nranks > 1;
    if (result == ncclSuccess && tree)
        result = hn_conn_trees(comm);
    const char *delay = tree ? "HOSTNCCL_TREE_DELAY_MS" : "HOSTNCCL_RING_DELAY_MS";
    if (op->func == HN_ALLREDUCE && bytes >= 1 << 20)
        usleep((useconds_t)(1000 * hn_util_env(delay, 0, 0, 10000)));
    if (result != ncclSuccess)
        return result;
    if (tree ? add_tree(b, op, proto, bytes) : add_ring(b, op, proto, bytes))
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
        t.proto = hn_tuning_p2p(op->count * es);
        t.begin = t.loop_at = i * part;
        t.end = op->count - t.begin < part ? op->count : t.begin + part;
        if (op->func == HN_SEND)
            t.to[t.nto++] = conn;
        else
            t.from[t.nfrom++] = conn;
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
    size_t room = (size_t)comm->channels * 5 + 1; /* rings, two ways of two trees, to oneself */
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
