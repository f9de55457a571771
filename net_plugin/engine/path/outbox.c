/* Control frames on their way out: appended under the peer's lock, pulled by the transport. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"

#define OUTBOX_FULL (1024 * 1024)

static int reserve(struct r2_path *path, size_t more)
{
    size_t cap = path->out_cap ? path->out_cap : 4096;
    uint8_t *bigger;

    if (path->out_off == path->out_len)
        path->out_off = path->out_len = 0;
    if (path->out_off > 65536) {
        memmove(path->out, path->out + path->out_off, path->out_len - path->out_off);
        path->out_len -= path->out_off;
        path->out_off = 0;
    }
    while (cap < path->out_len + more)
        cap *= 2;
    if (cap == path->out_cap)
        return 0;
    bigger = realloc(path->out, cap);
    if (!bigger)
        return -ENOMEM;
    r2_mem_more(cap - path->out_cap);
    path->out = bigger;
    path->out_cap = cap;
    return 0;
}

bool r2_out_full(const struct r2_path *path)
{
    return path->out_len - path->out_off > OUTBOX_FULL;
}

int r2_out_frame(struct r2_path *path, uint8_t type, const void *a, size_t a_len, const void *b,
                 size_t b_len)
{
    struct r2_frame f = {
        .type = type, .version = R2_WIRE_VERSION, .len = (uint16_t)(a_len + b_len)};

    if (!path->ep || path->state != R2_PATH_UP)
        return -ENOTCONN;
    if (reserve(path, sizeof(f) + a_len + b_len)) {
        r2_path_fail(path, path->gen, ENOMEM, "no memory for control frames");
        return -ENOMEM;
    }
    memcpy(path->out + path->out_len, &f, sizeof(f));
    path->out_len += sizeof(f);
    if (a_len)
        memcpy(path->out + path->out_len, a, a_len);
    path->out_len += a_len;
    if (b_len)
        memcpy(path->out + path->out_len, b, b_len);
    path->out_len += b_len;
    path->flush_wanted = true;
    path->hb_given |= type != R2_F_HEARTBEAT;
    return 0;
}

void r2_out_hold(struct r2_path *path, uint64_t now, uint64_t ns)
{
    struct r2_peer *p = path->peer;
    uint64_t until = atomic_load_explicit(&p->held_until, memory_order_relaxed);

    path->flush_wanted = false;
    if (path->held_until)
        return;
    path->held_until = now + ns;
    if (!until || path->held_until < until)
        atomic_store_explicit(&p->held_until, path->held_until, memory_order_relaxed);
}

void r2_peer_say_held(struct r2_peer *p, uint64_t now)
{
    uint64_t next = 0;

    for (int i = 0; i < p->n_paths; i++) {
        struct r2_path *path = p->paths[i];

        if (path->held_until && path->held_until <= now) {
            path->held_until = 0;
            path->flush_wanted = true;
        } else if (path->held_until && (!next || path->held_until < next)) {
            next = path->held_until;
        }
    }
    atomic_store_explicit(&p->held_until, next, memory_order_relaxed);
}

void r2_out_again(struct r2_peer *p)
{
    for (int i = 0; i < p->n_paths; i++) {
        struct r2_path *path = p->paths[i];

        if (path->state == R2_PATH_UP && path->out_len > path->out_off)
            path->flush_wanted = true;
    }
}

void r2_out_reset(struct r2_path *path)
{
    path->out_len = path->out_off = 0;
    path->out_total = path->out_said = 0;
    path->held_until = 0;
    path->flush_wanted = false;
    path->ctrl_ready = false;
    while (!r2_list_empty(&path->flushq))
        r2_list_del(r2_list_first(&path->flushq)); /* r2_peer_resync acknowledges them anew */
}

size_t r2_up_next_ctrl(void *owner, struct r2_ep *ep, uint8_t *buf, size_t cap)
{
    struct r2_path *path = owner;
    size_t n = 0;

    r2_peer_lock(path->peer);
    if (path->ep == ep) {
        n = path->out_len - path->out_off;
        if (n > cap)
            n = cap;
        if (n)
            memcpy(buf, path->out + path->out_off, n);
        path->out_off += n;
        path->out_total += n;
        if (path->out_off == path->out_len)
            path->held_until = 0;
    }
    r2_peer_leave(path->peer);
    return n;
}

static uint16_t weight_less(int nic)
{
    return (uint16_t)(R2_WEIGHT_FULL - atomic_load(&r2_eng.nic_state[nic].weight));
}

void r2_out_info(struct r2_path *path)
{
    struct r2_msg_info m = {0};
    struct r2_info_nic nics[R2_MAX_NICS];

    memset(nics, 0, sizeof(nics));
    m.pid = r2_control_segment(r2_eng.ctl)->process.pid;
    m.nics = (uint32_t)r2_local.n;
    memcpy(m.host, r2_eng.host, sizeof(m.host));
    for (int i = 0; i < r2_local.n; i++) {
        snprintf(nics[i].name, sizeof(nics[i].name), "%.*s", (int)sizeof(nics[i].name) - 1,
                 r2_local.nics[i].name);
        nics[i].epoch = atomic_load(&r2_eng.nic_state[i].epoch); /* first: see r2_nic_state */
        r2_eng.ops->address(i, &nics[i].addr);
        nics[i].word = (uint8_t)r2_nic_word(i);
        nics[i].less = weight_less(i);
        nics[i].forgiven = atomic_load(&r2_eng.nic_state[i].forgiven);
        nics[i].speed_mbps = (uint32_t)r2_local.nics[i].speed_mbps;
    }
    r2_out_frame(path, R2_F_INFO, &m, sizeof(m), nics, (size_t)r2_local.n * sizeof(nics[0]));
}

void r2_out_nic(struct r2_path *path, int nic)
{
    struct r2_msg_nic m = {.nic = (uint8_t)nic};

    m.epoch = atomic_load(&r2_eng.nic_state[nic].epoch); /* first: see r2_nic_state */
    m.word = (uint8_t)r2_nic_word(nic);
    m.less = weight_less(nic);
    m.forgiven = atomic_load(&r2_eng.nic_state[nic].forgiven);
    m.reason = m.word == R2_NIC_DOWN ? ENETDOWN : 0;
    r2_out_frame(path, R2_F_NIC, &m, sizeof(m), NULL, 0);
}
