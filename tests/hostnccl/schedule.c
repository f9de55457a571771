/* The ring algorithms, as primitives. Position: loop_at (first element of the round) and step. */
#include "kernels.h"

enum { ALIGN = 16 }; /* elements */

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static const char *at_c(const struct hn_task *t, const char *base, size_t element)
{
    return base ? base + element * hn_reduce_size(t->type) : NULL;
}

static char *at(const struct hn_task *t, char *base, size_t element)
{
    return base ? base + element * hn_reduce_size(t->type) : NULL;
}

/* All-reduce works on rounds of one chunk per rank; the last round has smaller chunks, some maybe
 * empty. Chunk `block` of the current round: */
static void round_chunk(const struct hn_task *t, int block, size_t *begin, size_t *count)
{
    size_t left = t->end - t->loop_at;
    size_t n = (size_t)t->nranks;
    size_t chunk = min_size(t->chunk, (left + n * ALIGN - 1) / (n * ALIGN) * ALIGN);
    size_t offset = min_size(chunk * (size_t)block, left);
    *begin = t->loop_at + offset;
    *count = min_size(chunk, left - offset);
}

static bool next_allreduce(struct hn_task *t, struct hn_prim *p)
{
    int n = t->nranks, steps = 2 * n - 1;
    if (t->step == steps) {
        size_t begin, count;
        round_chunk(t, n - 1, &begin, &count);
        t->loop_at = begin + count;
        t->step = 0;
    }
    if (t->loop_at >= t->end)
        return false;
    int s = t->step++;
    bool gather = s >= n; /* first n steps reduce, n - 1 steps pass the results on */
    int block = (t->rank + 2 * n - 1 - s) % n;
    size_t begin;
    round_chunk(t, block, &begin, &p->count);
    p->recv = s > 0;
    p->send = s < steps - 1;
    p->reduce = !gather && s > 0;
    p->src = gather ? NULL : at_c(t, t->src, begin);
    p->dst = s >= n - 1 ? at(t, t->dst, begin) : NULL;
    p->last = s == n - 1;
    return true;
}

/* Advances by one chunk of a block when `steps` are done; false at the end. */
static bool next_chunk(struct hn_task *t, struct hn_prim *p, int steps)
{
    if (t->step == steps) {
        t->loop_at += min_size(t->chunk, t->end - t->loop_at);
        t->step = 0;
    }
    if (t->loop_at >= t->end)
        return false;
    p->count = min_size(t->chunk, t->end - t->loop_at);
    return true;
}

static bool next_reducescatter(struct hn_task *t, struct hn_prim *p)
{
    int n = t->nranks;
    if (!next_chunk(t, p, n))
        return false;
    int s = t->step++;
    size_t block = (size_t)((t->rank + 2 * n - 1 - s) % n);
    p->recv = p->reduce = s > 0;
    p->send = s < n - 1;
    p->src = at_c(t, t->src, block * t->stride + t->loop_at);
    p->last = s == n - 1;
    p->dst = p->last ? at(t, t->dst, t->loop_at) : NULL;
    return true;
}

static bool next_allgather(struct hn_task *t, struct hn_prim *p)
{
    int n = t->nranks;
    if (!next_chunk(t, p, n))
        return false;
    int s = t->step++;
    size_t block = (size_t)((t->rank + n - s) % n);
    p->recv = s > 0;
    p->send = s < n - 1;
    p->src = s ? NULL : at_c(t, t->src, t->loop_at);
    p->dst = at(t, t->dst, block * t->stride + t->loop_at);
    return true;
}

static bool next_broadcast(struct hn_task *t, struct hn_prim *p)
{
    if (!next_chunk(t, p, 1))
        return false;
    t->step++;
    p->recv = t->rank != t->root;
    p->send = (t->rank + 1) % t->nranks != t->root;
    p->src = p->recv ? NULL : at_c(t, t->src, t->loop_at);
    p->dst = at(t, t->dst, t->loop_at);
    return true;
}

static bool next_reduce(struct hn_task *t, struct hn_prim *p)
{
    if (!next_chunk(t, p, 1))
        return false;
    t->step++;
    p->send = t->rank != t->root;
    p->recv = p->reduce = (t->rank + t->nranks - 1) % t->nranks != t->root;
    p->src = at_c(t, t->src, t->loop_at);
    p->last = !p->send;
    p->dst = p->last ? at(t, t->dst, t->loop_at) : NULL;
    return true;
}

/* Send, receive and copy move chunks one by one; an empty message is one of zero bytes. */
static bool next_p2p(struct hn_task *t, struct hn_prim *p)
{
    bool empty = t->begin == t->end && t->func != HN_COPY;
    if (empty ? t->step > 0 : t->loop_at >= t->end)
        return false;
    t->step++;
    p->count = min_size(t->chunk, t->end - t->loop_at);
    p->recv = t->func == HN_RECV;
    p->send = t->func == HN_SEND;
    p->last = t->func == HN_COPY;
    p->src = p->recv ? NULL : at_c(t, t->src, t->loop_at);
    p->dst = p->send ? NULL : at(t, t->dst, t->loop_at);
    t->loop_at += p->count;
    return true;
}

bool hn_schedule_next(struct hn_task *t, struct hn_prim *p)
{
    *p = (struct hn_prim){0};
    switch (t->func) {
    case HN_ALLREDUCE:
        return next_allreduce(t, p);
    case HN_REDUCESCATTER:
        return next_reducescatter(t, p);
    case HN_ALLGATHER:
        return next_allgather(t, p);
    case HN_BROADCAST:
        return next_broadcast(t, p);
    case HN_REDUCE:
        return next_reduce(t, p);
    default:
        return next_p2p(t, p);
    }
}

uint64_t hn_schedule_messages(const struct hn_task *task, bool send)
{
    struct hn_task copy = *task;
    struct hn_prim prim;
    uint64_t count = 0;
    while (hn_schedule_next(&copy, &prim))
        count += send ? prim.send : prim.recv;
    return count * (uint64_t)task->slices;
}

size_t hn_schedule_slice(const struct hn_task *task, const struct hn_prim *prim, int slice,
                         size_t at_element)
{
    size_t n = (size_t)task->slices;
    if (slice == task->slices - 1)
        return prim->count - at_element;
    size_t part = (prim->count + n * ALIGN - 1) / (n * ALIGN) * ALIGN;
    return min_size(part, prim->count - at_element);
}
