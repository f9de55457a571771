/* Connections and requests: the calls of NCCL's threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/internal.h"
#include "engine/loop/look.h"
#include "engine/nic/p2pchunk.h"
#include "engine/sched/slownics.h"
#include "io/standin.h"
#include "util/copy.h"
#include "util/lock.h"

/* Messages up to this size are sent by the caller itself: a wake-up would cost more. */
#define PUSH_BYTES (64 * 1024)
#define PUSH_BYTES_ALONE (256 * 1024) /* where one I/O thread would do all of them */

struct r2_conn *r2_conn_new(struct r2_peer *p, uint64_t id, bool out)
{
    struct r2_conn *c = calloc(1, sizeof(*c));

    if (!c)
        return NULL;
    r2_mem_more(sizeof(*c));
    c->peer = p;
    c->id = id;
    c->out = out;
    c->eager = r2_eng.device_memory ? 0 : r2_eng.set->eager;
    atomic_init(&c->refs, 2); /* the peer's table and the application */
    r2_list_init(&c->node);
    r2_list_init(&c->ctx_node);
    r2_list_init(&c->queue);
    r2_list_init(&c->mrs);
    r2_list_init(&c->ready);
    r2_list_init(&c->acks);
    r2_list_init(&c->flush);
    if (r2_hash_put(&p->conns, id, c)) {
        r2_mem_less(sizeof(*c));
        free(c);
        return NULL;
    }
    r2_peer_get(p);
    r2_list_add_tail(&p->conn_list, &c->node);
    for (int i = 0; i < R2_MAX_REQUESTS; i++)
        c->reqs[i].conn = c;
    r2_count(&r2_eng.n->connections_opened, 1);
    r2_gauge_add(&r2_eng.g->connections_open, 1);
    return c;
}

struct r2_conn *r2_conn_find(struct r2_peer *p, uint64_t id)
{
    return r2_hash_get(&p->conns, id);
}

bool r2_conn_has_ended(const struct r2_peer *p, uint64_t id)
{
    for (unsigned i = 0; i < p->n_ended && i < R2_ENDED; i++) {
        if (p->ended[i] == id)
            return true;
    }
    return false;
}

void r2_conn_ended(struct r2_peer *p, uint64_t id)
{
    if (!r2_conn_has_ended(p, id))
        p->ended[p->n_ended++ % R2_ENDED] = id;
}

void r2_conn_put(struct r2_conn *c)
{
    if (atomic_fetch_sub_explicit(&c->refs, 1, memory_order_acq_rel) != 1)
        return;
    for (int i = 0; i < R2_EAGER_AHEAD; i++) {
        if (c->stash[i].data)
            r2_mem_less(c->stash[i].size);
        free(c->stash[i].data);
    }
    r2_mem_less(sizeof(*c) + c->cap_ranges * sizeof(*c->ranges));
    free(c->ranges);
    r2_peer_put(c->peer);
    free(c);
}

void r2_conn_reap(struct r2_conn *c)
{
    /* A sender that has said its CLOSE needs nothing more from here; it may be gone by the time
     * that this side closes, and then nobody acknowledges that. */
    bool over = c->close_acked || (!c->out && c->remote_closed);

    if (c->state != R2_CONN_CLOSED || !over || c->detaching || r2_list_empty(&c->node))
        return;
    r2_buffered_left(c);
    r2_list_del(&c->node);
    r2_list_del(&c->ready);
    r2_list_del(&c->acks);
    r2_list_del(&c->flush);
    r2_hash_del(&c->peer->conns, c->id);
    if (!c->out)
        r2_conn_ended(c->peer, c->id);
    r2_count(&r2_eng.n->connections_closed, 1);
    r2_gauge_add(&r2_eng.g->connections_open, -1);
    r2_conn_put(c);
}

struct r2_req *r2_conn_req(struct r2_conn *c, uint64_t seq)
{
    struct r2_req *r = c->window[seq % R2_WINDOW];

    return r && r->seq == seq ? r : NULL;
}

/* What is under way of a message that ends early is acknowledged to nobody: it must not go on
 * taking room on its path, which others need. */
static void give_room(void *arg, const struct r2_send_report *rep)
{
    struct r2_peer *p = arg;
    struct r2_path *path = rep->path < p->n_paths ? p->paths[rep->path] : NULL;

    if (path && path->gen == rep->gen && path->state == R2_PATH_UP && rep->stamp.first_sent_ns)
        r2_pathrate_on_lost(&path->rate, rep->bytes);
}

void r2_req_finish(struct r2_req *r, int err)
{
    struct r2_conn *c = r->conn;

    if (!r->attached)
        return;
    if (c->out) {
        if (err)
            r2_send_unacked(&r->led.send, give_room, c->peer);
        r2_send_free(&r->led.send);
    } else {
        if (!err)
            r->size = r->led.recv.total;
        r2_recv_free(&r->led.recv);
    }
    c->window[r->seq % R2_WINDOW] = NULL;
    r->attached = false;
    while (c->oldest < c->next_seq && !c->window[c->oldest % R2_WINDOW])
        c->oldest++;
    r2_peer_account(c->peer, -1);
    if (!err) {
        r2_count(c->out ? &r2_eng.n->messages_sent : &r2_eng.n->messages_received, 1);
        r2_count(c->out ? &r2_eng.n->bytes_sent : &r2_eng.n->bytes_received, r->size);
    }
    if (r->copy)
        r2_buffered_free(r);
    if (r->told)
        return; /* the application looks at it no more, or uses it for another message soon */
    r->error = err;
    /* Pairs with the acquire in r2_engine_test: what the engine and its sockets did to the buffer
     * happens before the application looks at it. */
    atomic_store_explicit(&r->state, err ? R2_REQ_FAILED : R2_REQ_DONE, memory_order_release);
}

static void finish_all(struct r2_conn *c, int err)
{
    for (int i = 0; i < R2_MAX_REQUESTS; i++) {
        if (c->reqs[i].attached)
            r2_req_finish(&c->reqs[i], err);
    }
    if (c->out)
        r2_peer_kick(c->peer);
}

/* That of a peer that is gone is one event for all of its connections. */
static void tell_failed(const struct r2_conn *c, int err)
{
    struct r2_control_event ev = {
        .event = R2_EV_CONNECTION_FAILED, .peer_host = c->peer->host, .peer_pid = c->peer->pid};
    char cause[96];

    if (c->peer->life == R2_PEER_GONE)
        return;
    snprintf(cause, sizeof(cause), "%s: %s", c->out ? "sending" : "receiving", strerror(-err));
    ev.nic = r2_nic_name(c->home);
    ev.cause = cause;
    r2_control_journal(r2_eng.ctl, &ev);
}

void r2_conn_fail(struct r2_conn *c, int err)
{
    if (c->state == R2_CONN_FAILED || c->state == R2_CONN_CLOSED)
        return;
    if (c->state == R2_CONN_OPENING)
        c->peer->opening--;
    c->tell = c->state == R2_CONN_OPEN && !c->remote_closed && c->peer->life == R2_PEER_ALIVE;
    c->state = R2_CONN_FAILED;
    c->error = err;
    c->waiting = 0;
    r2_list_del(&c->ready);
    r2_list_del(&c->acks);
    /* What has arrived whole, and only waits for its acknowledgement to leave, is no loss. */
    for (uint64_t s = c->oldest; !c->out && s < c->next_seq; s++) {
        struct r2_req *r = r2_conn_req(c, s);

        if (r && r->arrived)
            r2_req_finish(r, 0);
    }
    finish_all(c, err);
    if (c->tell) /* the peer's requests must not wait until the application closes */
        r2_conn_out_close(c);
    tell_failed(c, err);
    r2_count(&r2_eng.n->connections_failed, 1);
}

void r2_conn_out_open(struct r2_conn *c)
{
    struct r2_msg_open m = {.conn = c->id,
                            .listen = c->listen_id,
                            .home_nic = c->home,
                            .must_exist = c->state == R2_CONN_OPEN,
                            .p2p_chunk = r2_p2pchunk_word(),
                            .eager = (uint32_t)c->eager};
    struct r2_path *path = r2_path_for_ctrl(c->peer, c->home, -1);

    if (path)
        r2_out_frame(path, R2_F_OPEN, &m, sizeof(m), NULL, 0);
}

void r2_conn_out_close(struct r2_conn *c)
{
    struct r2_msg_close m = {.conn = c->id, .from_sender = c->out};
    struct r2_path *path = r2_path_for_ctrl(c->peer, -1, -1);
    struct r2_msg_lane lanes[R2_PATHS_MAX];

    m.cumulative = c->out ? c->next_seq : c->cum;
    if (c->out && !c->under_way) {
        m.from_sender |= R2_CLOSE_IDLE;
        m.lanes = r2_revoke_lanes(c, lanes);
    }
    if (path)
        r2_out_frame(path, R2_F_CLOSE, &m, sizeof(m), lanes, m.lanes * sizeof(lanes[0]));
}

/* ---- requests */

static struct r2_req *take_req(struct r2_conn *c)
{
    if (c->window[c->next_seq % R2_WINDOW] || c->next_seq - c->oldest >= R2_MAX_REQUESTS)
        return NULL;
    for (int i = 0; i < R2_MAX_REQUESTS; i++) {
        struct r2_req *r = &c->reqs[(c->next_seq + (uint64_t)i) % R2_MAX_REQUESTS];

        if (!r->attached && atomic_load_explicit(&r->state, memory_order_acquire) == R2_REQ_FREE)
            return r;
    }
    return NULL;
}

static int post(struct r2_conn *c, void *data, size_t size, bool lines, struct r2_mr *mr,
                struct r2_req **out)
{
    struct r2_req *r;

    if (c->state != R2_CONN_OPEN && c->state != R2_CONN_OPENING)
        return c->error ? c->error : -ECONNRESET;
    if (c->remote_closed && (c->out || c->next_seq >= c->final_seq))
        return -ECONNRESET;
    r = take_req(c);
    if (!r)
        return 0;
    r->seq = c->next_seq++;
    r->data = data;
    r->size = size;
    r->mr = mr;
    r->error = 0;
    r->lines = lines;
    r->arrived = r->told = false;
    r->attached = true;
    r->posted_at = r2_now_ns();
    atomic_store_explicit(&r->state, R2_REQ_ACTIVE, memory_order_relaxed);
    c->window[r->seq % R2_WINDOW] = r;
    r2_peer_account(c->peer, 1);
    *out = r;
    return 0;
}

static bool pushes(size_t size)
{
    return r2_eng.set->help_progress && size <= (r2_io_alone() ? PUSH_BYTES_ALONE : PUSH_BYTES);
}

static int post_any(struct r2_conn *c, bool send, void *data, size_t size, bool lines,
                    struct r2_mr *mr, struct r2_req **out)
{
    R2_UNCANCELLED;
    int rc;

    *out = NULL;
    /* NCCL's thread has read a GPU's word that the bytes are there, by a plain load, and may copy
     * them itself here: on processors that do not keep loads in order this does. */
    if (send)
        r2_device_seen();
    if (atomic_load(&r2_eng.inert))
        return -EPERM;
    if (!c || c->out != send)
        return -EINVAL;
    r2_peer_lock(c->peer);
    rc = post(c, data, size, lines, mr, out);
    if (*out && send)
        r2_send_start(*out);
    else if (*out)
        r2_recv_start(*out);
    r2_peer_unlock_posted(c->peer, send && size <= r2_eng.set->eager, pushes(size));
    return rc;
}

int r2_engine_isend(struct r2_conn *c, void *data, size_t size, int tag, struct r2_mr *mr,
                    struct r2_req **out)
{
    (void)tag; /* one receive buffer per irecv: order alone decides */
    return post_any(c, true, data, size, false, mr, out);
}

int r2_engine_irecv(struct r2_conn *c, void *data, size_t size, int tag, struct r2_mr *mr,
                    struct r2_req **out)
{
    (void)tag;
    return post_any(c, false, data, size, false, mr, out);
}

int r2_engine_irecv_lines(struct r2_conn *c, void *data, size_t size, int tag, struct r2_mr *mr,
                          struct r2_req **out)
{
    (void)tag;
    return post_any(c, false, data, size, true, mr, out);
}

#define HELP_NS (2 * R2_NS_PER_US)
/* Nothing to help: the next look, well before an I/O thread has polled for nothing and sleeps. */
#define LATER_NS (50 * R2_NS_PER_US)

/* NCCL polls without a pause: it may not take the peer's lock each time, nor while the I/O threads
 * look at the sockets anyway. One of several that are all awake may have no core, though: then it
 * is asked for each peer, and seldom. help_at is a hint, and the caller nearly always the same
 * thread. */
static bool help_is_due(struct r2_conn *c, bool awake)
{
    atomic_ulong *at = awake ? &c->peer->help_at : &c->help_at;
    uint64_t now;

    if (!r2_eng.set->help_progress || (awake && r2_io_alone()))
        return false;
    now = r2_now_ns();
    if (now < atomic_load_explicit(at, memory_order_relaxed))
        return false;
    atomic_store_explicit(at, now + (awake ? LATER_NS : HELP_NS), memory_order_relaxed);
    return true;
}

/* Frames that waited for others have waited long enough. */
static void say_held(struct r2_peer *p)
{
    uint64_t until = atomic_load_explicit(&p->held_until, memory_order_relaxed);

    if (until && r2_now_ns() >= until) {
        R2_UNCANCELLED;

        if (pthread_mutex_trylock(&p->lock))
            return;
        r2_recv_out_acks(p); /* they go along */
        r2_peer_say_held(p, r2_now_ns());
        r2_peer_unlock(p);
    }
}

/* NCCL's thread looks at control lanes itself: a small message then costs no wake-up. Where it
 * stands in for their I/O threads (standin.h) it does all that those would do for them. */
static void help(struct r2_conn *c, bool awake)
{
    R2_UNCANCELLED;
    struct r2_ep *eps[R2_PATHS_MAX];
    int n = 0;
    bool helped = false;

    if ((!awake && r2_standin_look() && (r2_io_alone() || r2_slownics_of(c->peer))) ||
        pthread_mutex_trylock(&c->peer->lock))
        return;
    for (int i = 0; i < c->peer->n_paths; i++) {
        struct r2_path *path = c->peer->paths[i];

        if (path->state == R2_PATH_UP && !path->spare) {
            eps[n++] = path->ep;
            r2_eng.ops->get(path->ep);
        }
    }
    pthread_mutex_unlock(&c->peer->lock);
    for (int i = 0; i < n; i++) {
        helped |= r2_eng.ops->help(eps[i]);
        r2_eng.ops->put(eps[i]);
    }
    if (!helped && !r2_io_alone())
        atomic_store_explicit(&c->help_at, r2_now_ns() + LATER_NS, memory_order_relaxed);
}

int r2_engine_test(struct r2_req *r, int *done, size_t *size)
{
    int state = atomic_load_explicit(&r->state, memory_order_acquire);
    bool awake;
    int err;

    *done = 0;
    if (r->flush)
        return r2_flush_test(r, done);
    if (state == R2_REQ_ACTIVE) {
        if (atomic_load(&r2_eng.inert))
            return -EPERM;
        say_held(r->conn->peer);
        r2_look();
        awake = r2_io_all_awake();
        if (help_is_due(r->conn, awake))
            help(r->conn, awake);
        state = atomic_load_explicit(&r->state, memory_order_acquire);
    }
    if (state == R2_REQ_ACTIVE)
        return 0;
    if (state == R2_REQ_FREE)
        return -EINVAL;
    err = r->error;
    if (state == R2_REQ_DONE) {
        *done = 1;
        if (size)
            *size = r->size;
    }
    /* Pairs with take_req: the request's fields are read before the slot can be used again. */
    atomic_store_explicit(&r->state, R2_REQ_FREE, memory_order_release);
    return err;
}

void r2_conn_end(struct r2_conn *c)
{
    if (c->state == R2_CONN_OPENING)
        c->peer->opening--;
    c->state = R2_CONN_CLOSED;
    c->error = -ECANCELED;
    finish_all(c, -ECANCELED);
    c->waiting = 0;
    r2_list_del(&c->ready);
}

void r2_conn_out_closed(struct r2_conn *c)
{
    if (c->peer->life == R2_PEER_GONE)
        c->close_acked = true;
    else
        r2_conn_out_close(c);
    r2_conn_reap(c);
}

/* May wait for a device: no lock. */
static int dereg_all(struct r2_list *mrs, bool revoke)
{
    int rc = 0;

    while (!r2_list_empty(mrs)) {
        struct r2_mr *mr = R2_CONTAINER_OF(r2_list_first(mrs), struct r2_mr, node);
        int one = r2_eng.ops->dereg(mr->keys, revoke);

        rc = rc ? rc : one;
        r2_list_del(&mr->node);
        free(mr);
    }
    return rc;
}

int r2_engine_close(struct r2_conn *c)
{
    R2_UNCANCELLED;
    struct r2_list mrs;
    struct r2_peer *p;
    bool busy, revoke = false;
    int rc = 0, one;

    if (!c || atomic_load(&r2_eng.inert))
        return 0;
    p = c->peer;
    r2_peer_get(p);
    pthread_mutex_lock(&r2_eng.lock);
    r2_list_del(&c->ctx_node);
    r2_list_del(&c->queue);
    pthread_mutex_unlock(&r2_eng.lock);
    r2_list_init(&mrs);
    r2_peer_lock(p);
    if (r2_buffered_lingers(c)) {
        r2_list_splice_tail(&mrs, &c->mrs);
        r2_peer_unlock(p);
        rc = dereg_all(&mrs, false);
        r2_peer_put(p);
        return rc;
    }
    busy = c->state == R2_CONN_FAILED || c->next_seq != c->oldest;
    r2_conn_end(c);
    if (busy) {
        c->detaching = true;
        rc = r2_conn_detach(c, &revoke);
        r2_peer_lock(p);
        c->detaching = false;
    }
    r2_list_splice_tail(&mrs, &c->mrs);
    r2_conn_out_closed(c);
    r2_peer_unlock(p);
    one = dereg_all(&mrs, revoke);
    rc = rc ? rc : one;
    r2_conn_put(c);
    r2_peer_put(p);
    return rc;
}
