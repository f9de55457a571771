/* Requests and the end of connections: the calls of NCCL's threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "engine/loop/loop.h"
#include "io/standin.h"
#include "util/copy.h"
#include "util/lock.h"
#include "util/thread.h"

#define PUSH_BYTES (64 * 1024)
#define PUSH_BYTES_ALONE (256 * 1024) /* where one I/O thread would do all of them */
#define HELP_NS (2 * R2_NS_PER_US)
/* Nothing to help: the next look, well before an I/O thread has polled for nothing and sleeps. */
#define LATER_NS (50 * R2_NS_PER_US)

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
    if (c->next_seq >= c->final_seq)
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
    r->arrived = r->done_early = false;
    r->attached = true;
    r->posted_at = r2_peer_now(c->peer);
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
    if (!c || c->peer->out != send)
        return -EINVAL;
    r2_fault_op();
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
        r2_peer_say_held(p, r2_peer_now(p));
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

    if ((!awake && r2_standin_look() && (r2_io_alone() || r2_limited_now(c->peer, r2_now_ns()))) ||
        pthread_mutex_trylock(&c->peer->lock))
        return;
    R2_FOR_EACH_PATH (path, c->peer) {
        if (r2_path_is_up(path) && path->role != R2_ROLE_SPARE) {
            eps[n++] = path->ep;
            r2_eng.ops->get(path->ep);
        }
    }
    r2_peer_leave(c->peer);
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
        r2_recheck();
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
        c->state = R2_CONN_CLOSING;
        rc = r2_conn_detach(c, &revoke);
        r2_peer_lock(p);
        c->state = R2_CONN_CLOSED;
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
