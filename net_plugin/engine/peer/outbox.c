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
    pthread_mutex_unlock(&path->peer->lock);
    return n;
}

void r2_up_ctrl_sent(void *owner, struct r2_ep *ep, uint64_t sent)
{
    struct r2_path *path = owner;

    r2_peer_lock(path->peer);
    if (path->ep == ep && sent > path->out_said)
        path->out_said = sent;
    while (path->ep == ep && !r2_list_empty(&path->flushq)) {
        struct r2_conn *c = R2_CONTAINER_OF(r2_list_first(&path->flushq), struct r2_conn, flush);

        if (c->flush_pos > sent)
            break;
        r2_list_del(&c->flush);
        r2_recv_flushed(c, c->flush_cum);
    }
    pthread_mutex_unlock(&path->peer->lock);
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

static void resync_paths(struct r2_peer *p, struct r2_path *via)
{
    for (int i = 0; i < p->n_paths; i++) {
        struct r2_path *path = p->paths[i];
        struct r2_msg_path m = {
            .sender_nic = path->lnic, .receiver_nic = path->rnic, .transport = path->transport};

        if (p->out && path->down_gen > path->fenced_gen) {
            m.gen = path->down_gen;
            m.reason = (uint32_t)path->last_err;
            path->down_sent_at = r2_now_ns();
            r2_out_frame(via, R2_F_DOWN, &m, sizeof(m), NULL, 0);
        } else if (!p->out && path->fenced_gen && !p->acks_dropped) {
            m.sender_nic = path->rnic;
            m.receiver_nic = path->lnic;
            m.gen = path->fenced_gen;
            m.reason = (uint32_t)path->last_err;
            r2_out_frame(via, R2_F_FENCED, &m, sizeof(m), NULL, 0);
        }
    }
}

static void resync_conn(struct r2_conn *c, struct r2_path *via)
{
    if (c->out && (c->state == R2_CONN_OPENING || c->state == R2_CONN_OPEN))
        r2_conn_out_open(c);
    if (!c->out && c->state != R2_CONN_FAILED) {
        r2_recv_repeat(c, via);
        c->cts_sent = 0; /* credit that was on its way may be lost: the next receive says it */
        for (uint64_t s = c->oldest; s < c->next_seq && c->state == R2_CONN_OPEN; s++) {
            struct r2_req *r = r2_conn_req(c, s);

            if (r && !r->arrived)
                r2_recv_cts(r, via);
        }
    }
    if ((c->state == R2_CONN_CLOSED && !c->close_acked) || (c->state == R2_CONN_FAILED && c->tell))
        r2_conn_out_close(c);
}

/* One path carries all of it, acknowledgements before FENCED: when the sender puts the missing
 * bytes back into the queue it knows everything that has arrived. */
void r2_peer_resync(struct r2_peer *p)
{
    struct r2_path *via = r2_path_for_ctrl(p, -1, -1);
    struct r2_list *n;

    if (!via || r2_out_full(via))
        return; /* the peer does not read: what is queued says enough until it does */
    p->resync_wanted = false;
    p->acks_dropped = false;
    r2_words_resync(p, via);
    R2_LIST_FOR_EACH (n, &p->conn_list)
        resync_conn(R2_CONTAINER_OF(n, struct r2_conn, node), via);
    r2_recv_out_acks(p);
    resync_paths(p, via);
}
