/* Control frames on their way out: appended under the peer's lock, pulled by the transport. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/path/path.h"

#define OUTBOX_FULL (1024 * 1024)

static int reserve(struct r2_path *path, size_t more)
{
    size_t cap = path->outbox.cap ? path->outbox.cap : 4096;
    uint8_t *bigger;

    if (path->outbox.off == path->outbox.len)
        path->outbox.off = path->outbox.len = 0;
    if (path->outbox.off > 65536) {
        memmove(path->outbox.data, path->outbox.data + path->outbox.off,
                path->outbox.len - path->outbox.off);
        path->outbox.len -= path->outbox.off;
        path->outbox.off = 0;
    }
    while (cap < path->outbox.len + more)
        cap *= 2;
    if (cap == path->outbox.cap)
        return 0;
    bigger = realloc(path->outbox.data, cap);
    if (!bigger)
        return -ENOMEM;
    r2_mem_more(cap - path->outbox.cap);
    path->outbox.data = bigger;
    path->outbox.cap = cap;
    return 0;
}

bool r2_out_full(const struct r2_path *path)
{
    return path->outbox.len - path->outbox.off > OUTBOX_FULL;
}

int r2_out_frame(struct r2_path *path, uint8_t type, const void *a, size_t a_len, const void *b,
                 size_t b_len)
{
    struct r2_frame f = {
        .type = type, .version = R2_WIRE_VERSION, .len = (uint16_t)(a_len + b_len)};

    if (!path->ep || !r2_path_is_up(path))
        return -ENOTCONN;
    if (reserve(path, sizeof(f) + a_len + b_len)) {
        r2_path_fail(path, path->gen, ENOMEM, "no memory for control frames");
        return -ENOMEM;
    }
    memcpy(path->outbox.data + path->outbox.len, &f, sizeof(f));
    path->outbox.len += sizeof(f);
    if (a_len)
        memcpy(path->outbox.data + path->outbox.len, a, a_len);
    path->outbox.len += a_len;
    if (b_len)
        memcpy(path->outbox.data + path->outbox.len, b, b_len);
    path->outbox.len += b_len;
    path->outbox.due = R2_OUT_NOW;
    if (type != R2_F_HEARTBEAT)
        path->hb.given_at = r2_peer_now(path->peer);
    return 0;
}

void r2_out_hold(struct r2_path *path, uint64_t before, uint64_t until)
{
    struct r2_peer *p = path->peer;
    uint64_t first = atomic_load_explicit(&p->held_until, memory_order_relaxed);

    path->outbox.due = before ? before : until;
    if (!before && (!first || until < first))
        atomic_store_explicit(&p->held_until, until, memory_order_relaxed);
}

void r2_peer_say_held(struct r2_peer *p, uint64_t now)
{
    uint64_t next = 0;

    R2_FOR_EACH_PATH (path, p) {
        uint64_t *due = &path->outbox.due;

        if (*due && *due <= now)
            *due = R2_OUT_NOW;
        else if (*due && (!next || *due < next))
            next = *due;
    }
    atomic_store_explicit(&p->held_until, next, memory_order_relaxed);
}

void r2_out_again(struct r2_peer *p)
{
    R2_FOR_EACH_PATH (path, p) {
        if (r2_path_is_up(path) && path->outbox.len > path->outbox.off)
            path->outbox.due = R2_OUT_NOW;
    }
}

size_t r2_up_next_ctrl(void *owner, struct r2_ep *ep, uint8_t *buf, size_t cap)
{
    struct r2_path *path = owner;
    size_t n = 0;

    r2_peer_lock(path->peer);
    if (path->ep == ep) {
        n = path->outbox.len - path->outbox.off;
        if (n > cap)
            n = cap;
        if (n)
            memcpy(buf, path->outbox.data + path->outbox.off, n);
        path->outbox.off += n;
        path->outbox.total += n;
        if (path->outbox.off == path->outbox.len)
            path->outbox.due = 0;
    }
    r2_peer_leave(path->peer);
    return n;
}

void r2_out_info(struct r2_path *path)
{
    struct r2_msg_info m = {.number = atomic_load(&r2_eng.news)}; /* first: see r2_engine.news */
    struct r2_info_nic nics[R2_MAX_NICS];

    memset(nics, 0, sizeof(nics));
    m.pid = r2_control_segment(r2_eng.ctl)->process.pid;
    m.rank = (uint32_t)r2_control_segment(r2_eng.ctl)->process.rank + 1;
    m.nics = (uint32_t)r2_local.n;
    memcpy(m.host, r2_eng.host, sizeof(m.host));
    for (int i = 0; i < r2_local.n; i++) {
        const struct r2_nic_state *s = &r2_eng.nic_state[i];

        snprintf(nics[i].name, sizeof(nics[i].name), "%.*s", (int)sizeof(nics[i].name) - 1,
                 r2_local.nics[i].name);
        r2_eng.ops->address(i, &nics[i].addr);
        if (r2_eng.ops->second)
            r2_eng.ops->second(i, &nics[i].second);
        nics[i].word = (uint8_t)r2_nic_word(i);
        nics[i].less = (uint16_t)(R2_WEIGHT_FULL - atomic_load(&s->weight));
        nics[i].forgiven = atomic_load(&s->forgiven);
    }
    r2_out_frame(path, R2_F_INFO, &m, sizeof(m), nics, (size_t)r2_local.n * sizeof(nics[0]));
}
