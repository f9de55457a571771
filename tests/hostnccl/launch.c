/* From API calls to chains of tasks and the messages that the progress thread must move. Every
 * choice here depends only on what all ranks know: sizes, ranks and settings. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "group.h"

enum { ALIGN = 16 };

struct build {
    struct ncclComm *comm;
    struct hn_launch *launch;
    struct hn_pxop *px, **px_end;
    int *keys;                       /* which connection a chain belongs to */
    struct hn_conn **sends, **recvs; /* to be connected first */
    int nsends, nrecvs, room;
};

static unsigned protos_allowed(void)
{
    static const char *const names[HN_PROTOS] = {"LL", "LL128", "Simple"};
    const char *text = getenv("NCCL_PROTO");
    if (!text || !*text)
        return 7;
    bool exclude = *text == '^';
    unsigned mask = 0;
    char list[128];
    char *rest = NULL;
    strncpy(list, text + exclude, sizeof(list) - 1);
    list[sizeof(list) - 1] = '\0';
    for (char *name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        for (int p = 0; p < HN_PROTOS; p++)
            if (!strcasecmp(name, names[p]))
                mask |= 1u << p;
    mask = exclude ? 7 & ~mask : mask;
    if (mask)
        return mask;
    HN_WARN("NCCL_PROTO=%s ignored: a list of LL, LL128, Simple is needed", text);
    return 7;
}

static enum hn_proto choose_proto(size_t bytes, bool p2p)
{
    unsigned allowed = protos_allowed();
    enum hn_proto wish = HN_SIMPLE;
    if (bytes <= (p2p ? 16u << 10 : 64u << 10))
        wish = HN_LL;
    else if (!p2p && bytes <= 1u << 20)
        wish = HN_LL128;
    if (p2p) { /* NCCL has no LL128 there */
        allowed &= 1u << HN_LL | 1u << HN_SIMPLE;
        allowed = allowed ? allowed : 1u << HN_SIMPLE;
    }
    for (int up = wish; up < HN_PROTOS; up++)
        if (allowed & 1u << up)
            return (enum hn_proto)up;
    for (int down = wish; down >= 0; down--)
        if (allowed & 1u << down)
            return (enum hn_proto)down;
    return HN_SIMPLE;
}

/* How many channels share `bytes`, each at least `least`. */
static size_t share(const struct ncclComm *comm, size_t bytes, size_t least)
{
    size_t parts = bytes / least;
    if (parts < 1)
        return 1;
    return parts > (size_t)comm->channels ? (size_t)comm->channels : parts;
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
    uint64_t total = conn ? hn_schedule_messages(t, conn->send) : 0;
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
        chain->rx = malloc(128 << 10);
        chain->tx = malloc(128 << 10);
        if (!chain->rx || !chain->tx)
            return -1;
    }
    bool p2p = t->func == HN_SEND || t->func == HN_RECV;
    return add_px(b, t, t->from, p2p) || add_px(b, t, t->to, p2p) ? -1 : 0;
}

static size_t slot_elements(const struct hn_conn *conn, enum hn_proto proto, size_t es)
{
    return hn_proto_capacity(proto, conn->lanes[proto].slot_bytes) / es / ALIGN * ALIGN;
}

static int add_collective(struct build *b, const struct hn_op *op)
{
    struct ncclComm *comm = b->comm;
    size_t es = hn_reduce_size(op->type), bytes = op->count * es;
    if (op->func == HN_ALLGATHER || op->func == HN_REDUCESCATTER)
        bytes *= (size_t)comm->nranks;
    enum hn_proto proto = choose_proto(bytes, false);
    size_t parts = share(comm, bytes, proto == HN_LL ? 8 << 10 : 64 << 10);
    size_t part = part_size(op->count, parts);
    for (size_t c = 0; c < parts && c * part < op->count; c++) {
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
        t.begin = t.loop_at = c * part;
        t.end = op->count - t.begin < part ? op->count : t.begin + part;
        t.slices = proto == HN_SIMPLE ? 2 : 1;
        t.chunk = t.end - t.begin;
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
    return share(comm, op->count * hn_reduce_size(op->type), 256 << 10);
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
        t.proto = choose_proto(op->count * es, true);
        t.begin = t.loop_at = i * part;
        t.end = op->count - t.begin < part ? op->count : t.begin + part;
        t.from = op->func == HN_RECV ? conn : NULL;
        t.to = op->func == HN_SEND ? conn : NULL;
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
        if (p2p ? add_p2p(b, op) : add_collective(b, op))
            result = hn_util_fail(ncclSystemError, "out of memory");
    }
    return result;
}

ncclResult_t hn_launch_build(struct ncclComm *comm, const struct hn_op *ops,
                             struct hn_launch **launch, struct hn_pxop **px)
{
    size_t room = (size_t)comm->channels + 1;
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
