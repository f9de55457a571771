#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>

#include "engine/message/message.h"

#define RANGES_PER_FRAME 256
#define LATE_NS (100 * R2_NS_PER_US)
#define LATE_MOST (R2_MAX_REQUESTS / 2) /* a sender has room for more */

struct r2_path *r2_acks_path(struct r2_conn *c)
{
    return r2_path_for_ctrl(c->peer, -1, c->remote_home);
}

/* Without memory for one more range what can be said is said, and all of it again soon. Until that
 * has worked no generation is called fenced, or the sender would send again what is in place. */
static void queue(struct r2_conn *c, struct r2_path *path, uint64_t seq, uint64_t off, uint64_t len)
{
    if (len) {
        if (c->n_ranges == c->cap_ranges) {
            uint32_t cap = c->cap_ranges ? 2 * c->cap_ranges : 16;
            struct r2_ack_range *more = realloc(c->ranges, cap * sizeof(*more));

            if (more) {
                r2_mem_more((cap - c->cap_ranges) * sizeof(*more));
                c->ranges = more;
                c->cap_ranges = cap;
            }
        }
        if (c->n_ranges < c->cap_ranges) {
            c->ranges[c->n_ranges++] = (struct r2_ack_range){.seq = seq, .offset = off, .len = len};
        } else {
            c->peer->resync = R2_RESYNC_ACKS;
            r2_timer_sooner(&c->peer->timer, r2_peer_now(c->peer) + R2_TICK_NS);
        }
    }
    if (path)
        c->ack_path = path->index;
    if (r2_list_empty(&c->acks))
        r2_list_add_tail(&c->peer->ackq, &c->acks);
}

void r2_recv_queue_ack(struct r2_conn *c, struct r2_path *path, uint64_t seq, uint64_t off,
                       uint64_t len)
{
    c->peer->ack_delay.hurry = true;
    queue(c, path, seq, off, len);
}

void r2_recv_queue_late_ack(struct r2_conn *c, struct r2_path *path, uint64_t seq, uint64_t len)
{
    c->peer->ack_delay.late++;
    queue(c, path, seq, 0, len);
}

static void out_ack(struct r2_conn *c, struct r2_path *path)
{
    struct r2_msg_ack m = {.conn = c->id, .cumulative = c->cum};
    uint32_t done = 0;

    do {
        m.ranges = c->n_ranges - done;
        if (m.ranges > RANGES_PER_FRAME)
            m.ranges = RANGES_PER_FRAME;
        if (r2_out_frame(path, R2_F_ACK, &m, sizeof(m), c->ranges ? c->ranges + done : NULL,
                         m.ranges * sizeof(*c->ranges)))
            return;
        done += m.ranges;
        r2_count(&r2_eng.n->acks_sent, 1);
    } while (done < c->n_ranges);
    c->n_ranges = 0;
    c->flush_cum = c->cum;
    c->flush_pos = path->outbox.total + (path->outbox.len - path->outbox.off);
    r2_list_del(&c->flush);
    r2_list_add_tail(&path->outbox.flushq, &c->flush);
}

void r2_recv_out_acks(struct r2_peer *p)
{
    p->ack_delay.hurry = false;
    p->ack_delay.late = 0;
    while (!r2_list_empty(&p->ackq)) {
        struct r2_conn *c = R2_CONTAINER_OF(r2_list_first(&p->ackq), struct r2_conn, acks);
        struct r2_path *path = c->ack_path < p->n_paths ? p->paths[c->ack_path] : NULL;

        r2_list_del(&c->acks);
        /* The path that brought the bytes is alive, or was a moment ago. */
        if (!path || !r2_path_is_up(path) || r2_path_high_rtt(path))
            path = r2_acks_path(c);
        if (path)
            out_ack(c, path);
        else
            c->n_ranges = 0; /* none is up: r2_recv_repeat builds them anew */
    }
}

void r2_recv_flushed(struct r2_conn *c, uint64_t cum)
{
    if (cum > c->flushed)
        c->flushed = cum;
    R2_FOR_EACH_REQ (r, c) {
        if (r->seq >= c->flushed)
            break;
        if (r->arrived)
            r2_req_finish(r, 0);
    }
}

static bool repeat_range(void *arg, uint64_t off, uint64_t len)
{
    struct r2_req *r = arg;

    r2_recv_queue_ack(r->conn, NULL, r->seq, off, len);
    return true;
}

void r2_recv_repeat(struct r2_conn *c, struct r2_path *path)
{
    c->n_ranges = 0;
    R2_FOR_EACH_REQ (r, c) {
        if (!r->arrived)
            r2_recv_arrived(&r->led.recv, repeat_range, r);
        else if (r->seq >= c->cum) /* whole, but an earlier message is not */
            r2_recv_queue_ack(c, NULL, r->seq, 0, r->led.recv.total);
    }
    for (int i = 0; i < R2_EAGER_AHEAD; i++) {
        if (c->stash[i].data && c->stash[i].seq >= c->cum)
            r2_recv_queue_ack(c, NULL, c->stash[i].seq, 0, c->stash[i].size);
    }
    r2_recv_queue_ack(c, path, 0, 0, 0);
}

/* What has waited for acknowledgements goes with them, or over its own path: theirs may be another.
 */
static void say_all(struct r2_peer *p)
{
    r2_recv_out_acks(p);
    if (atomic_load_explicit(&p->held_until, memory_order_relaxed))
        r2_peer_say_held(p, UINT64_MAX);
}

static void say_late(struct r2_timer *t, uint64_t now)
{
    struct r2_peer *p = R2_CONTAINER_OF(t, struct r2_peer, ack_delay.timer);

    (void)now;
    r2_peer_lock(p);
    p->ack_delay.armed = false;
    say_all(p);
    r2_peer_unlock(p); /* as a rule this is the thread of the socket */
    r2_peer_put(p);
}

/* Of queue pairs' frames not all are said to have gone. What is held is a credit that waits for
 * company (r2_out_hold): nobody misses that of a process that ends. */
static bool has_frames(const struct r2_path *path)
{
    return (path->outbox.len > path->outbox.off && path->outbox.due <= R2_OUT_NOW) ||
           (path->transport == R2_VIA_TCP && path->outbox.total > path->outbox.said);
}

/* Facts, not whether an acknowledgement is queued: its receive is done before that, and it is with
 * the kernel later. `cum` rises before the receive is done. */
static bool unsaid_to(const struct r2_peer *p)
{
    R2_FOR_EACH_PATH (path, p) {
        if (r2_path_is_up(path) && has_frames(path))
            return true;
    }
    R2_FOR_EACH_CONN (c, p) {
        if (!c->peer->out && c->state == R2_CONN_OPEN && !r2_conn_is_left(c) && c->flushed < c->cum)
            return true;
    }
    return false;
}

bool r2_acks_unsaid(void)
{
    bool some = false;

    if (pthread_mutex_trylock(&r2_eng.lock))
        return true;
    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
        some = pthread_mutex_trylock(&p->lock);
        if (some)
            break;
        some = p->n_up && unsaid_to(p);
        r2_peer_leave(p);
        if (some)
            break;
    }
    pthread_mutex_unlock(&r2_eng.lock);
    return some;
}

void r2_acks_init(struct r2_peer *p)
{
    r2_timer_init(&p->ack_delay.timer, p->io, say_late);
}

/* Nobody waits for what is queued, nor for a credit that would go along, and there is time until it
 * is said. Where there is one I/O thread cores are few: a timer would take one from NCCL, and to
 * send costs nobody a wake-up. */
static bool may_wait(struct r2_peer *p)
{
    if (r2_io_alone() || p->ack_delay.hurry || r2_list_empty(&p->ackq) ||
        p->ack_delay.late >= LATE_MOST ||
        atomic_load_explicit(&p->held_until, memory_order_relaxed))
        return false;
    if (!p->ack_delay.armed) { /* on the thread that reads what comes, and will say this */
        p->ack_delay.armed = true;
        r2_peer_get(p);
        r2_timer_here(&p->ack_delay.timer, r2_peer_now(p) + LATE_NS);
    }
    return true;
}

void r2_up_burst_end(void *owner, struct r2_ep *ep)
{
    struct r2_path *path = owner;

    (void)ep;
    r2_peer_lock(path->peer);
    if (!may_wait(path->peer))
        say_all(path->peer);
    r2_peer_unlock_soon(path->peer);
}

void r2_up_ctrl_sent(void *owner, struct r2_ep *ep, uint64_t sent)
{
    struct r2_path *path = owner;

    r2_peer_lock(path->peer);
    if (path->ep == ep && sent > path->outbox.said)
        path->outbox.said = sent;
    while (path->ep == ep && !r2_list_empty(&path->outbox.flushq)) {
        struct r2_conn *c =
            R2_CONTAINER_OF(r2_list_first(&path->outbox.flushq), struct r2_conn, flush);

        if (c->flush_pos > sent)
            break;
        r2_list_del(&c->flush);
        r2_recv_flushed(c, c->flush_cum);
    }
    r2_peer_leave(path->peer);
}
