/* Runs primitives: waits for data and for room without blocking, moves, reduces, passes on. */
#include <string.h>

#include "kernels.h"

static struct hn_lane *lane_of(const struct hn_task *t, struct hn_conn *conn)
{
    return &conn->lanes[t->proto];
}

static char *slot_of(const struct hn_task *t, struct hn_conn *conn, uint64_t number)
{
    struct hn_lane *lane = lane_of(t, conn);
    return lane->base + number % (uint64_t)lane->depth * lane->slot_bytes;
}

/* By number alone: messages of an older operation with another protocol, and so another depth, may
 * still be on their way. */
static struct hn_slot *state_of(struct hn_conn *conn, uint64_t number)
{
    return &conn->slots[number % HN_MAX_DEPTH];
}

/* Has the next message arrived? For LL and LL128 its lines are taken into `rx` as they come,
 * before the plugin reports the receive done. 1, 0, or a negative result. */
static int arrived(struct hn_task *t, struct hn_chain *chain, size_t bytes, bool *progress)
{
    struct hn_conn *c = t->from;
    /* Read before the lines: pairs with the release after test said done. */
    bool tested = atomic_load_explicit(&c->tail, memory_order_acquire) > c->consumed;
    if (t->proto == HN_SIMPLE || bytes == 0) /* an empty message has no flag */
        return tested;
    size_t before = t->rx_done;
    t->rx_done = hn_proto_decode(t->proto, slot_of(t, c, c->consumed), chain->rx, bytes, before,
                                 c->consumed);
    if (t->rx_done != before)
        *progress = true;
    if (t->rx_done == bytes)
        return 1;
    if (!tested)
        return 0;
    hn_util_fail(ncclInternalError,
                 "message %llu from rank %d on channel %d was reported received, but its line at "
                 "byte %zu of %zu has no valid flag",
                 (unsigned long long)c->consumed, c->peer, c->channel, t->rx_done, bytes);
    return -ncclInternalError;
}

static bool has_room(const struct hn_task *t, struct hn_conn *c)
{
    /* Pairs with the release after test said done: the plugin no longer reads the slot. */
    uint64_t head = atomic_load_explicit(&c->head, memory_order_acquire);
    return c->filled - head < (uint64_t)lane_of(t, c)->depth;
}

static void consumed(struct hn_task *t, struct hn_conn *c, size_t bytes)
{
    struct hn_slot *slot = state_of(c, c->consumed);
    size_t want = hn_proto_wire_bytes(t->proto, bytes);
    atomic_store_explicit(&slot->want, want, memory_order_relaxed);
    if (t->proto == HN_SIMPLE) {
        hn_scribble(slot_of(t, c, c->consumed), lane_of(t, c)->slot_bytes);
        lane_of(t, c)->scribbled[c->consumed % (uint64_t)lane_of(t, c)->depth] = true;
    }
    c->consumed++;
    /* Pairs with the acquire before the progress thread posts the slot again. */
    atomic_store_explicit(&c->head, c->consumed, memory_order_release);
}

static void sent(struct hn_task *t, struct hn_conn *c, const char *data, size_t bytes)
{
    char *slot = slot_of(t, c, c->filled);
    if (t->proto != HN_SIMPLE)
        hn_proto_encode(t->proto, slot, data, bytes, c->filled);
    else if (slot != data && bytes)
        memcpy(slot, data, bytes);
    state_of(c, c->filled)->bytes = hn_proto_wire_bytes(t->proto, bytes);
    c->filled++;
    /* Pairs with the acquire before the progress thread sends. */
    atomic_store_explicit(&c->tail, c->filled, memory_order_release);
}

/* `in`: what arrived, NULL without anything. */
static void compute(const struct hn_task *t, const struct hn_prim *p, char *out, const char *in,
                    const char *own, size_t count)
{
    size_t bytes = count * hn_reduce_size(t->type);
    if (own)
        hn_reduce_apply(out, p->reduce ? in : NULL, own, count, t->type, &t->op);
    else if (out != in && bytes)
        memcpy(out, in, bytes);
    if (p->last)
        hn_reduce_finish(out, count, t->type, &t->op);
}

/* One slice of the current primitive. 1 done, 0 not yet, negative result. */
static int run_slice(struct hn_task *t, struct hn_chain *chain, bool *progress)
{
    const struct hn_prim *p = &t->prim;
    size_t count = hn_schedule_slice(t, p, t->slice, t->slice_at);
    size_t es = hn_reduce_size(t->type), bytes = count * es;
    int rc = p->recv ? arrived(t, chain, bytes, progress) : 1;
    if (rc <= 0)
        return rc;
    if (p->send && !has_room(t, t->to))
        return 0;
    const char *in = NULL;
    if (p->recv)
        in = t->proto == HN_SIMPLE ? slot_of(t, t->from, t->from->consumed) : chain->rx;
    const char *own = p->src ? p->src + t->slice_at * es : NULL;
    char *dst = p->dst ? p->dst + t->slice_at * es : NULL;
    char *out = dst;
    if (p->send)
        out = t->proto == HN_SIMPLE ? slot_of(t, t->to, t->to->filled) : chain->tx;
    compute(t, p, out, in, own, count);
    if (dst && dst != out && bytes)
        memcpy(dst, out, bytes);
    if (p->send)
        sent(t, t->to, out, bytes);
    if (p->recv)
        consumed(t, t->from, bytes);
    t->rx_done = 0;
    t->slice_at += count;
    t->slice++;
    *progress = true;
    return 1;
}

/* 1 finished, 0 not yet, negative result. */
static int run_task(struct hn_task *t, struct hn_chain *chain, bool *progress)
{
    for (;;) {
        if (!t->has_prim) {
            if (!hn_schedule_next(t, &t->prim))
                return 1;
            t->has_prim = true;
            t->slice = 0;
            t->slice_at = 0;
        }
        int rc = run_slice(t, chain, progress);
        if (rc <= 0)
            return rc;
        if (t->slice == t->slices)
            t->has_prim = false;
    }
}

int hn_kernel_step(struct hn_chain *chain, bool *progress)
{
    while (chain->now) {
        int rc = run_task(chain->now, chain, progress);
        if (rc <= 0)
            return rc;
        chain->now = chain->now->next;
    }
    return 1;
}
