/* Connections and requests: the calls of NCCL's threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/message/message.h"
#include "util/copy.h"
#include "util/lock.h"

struct r2_conn *r2_conn_new(struct r2_peer *p, uint64_t id)
{
    struct r2_conn *c = calloc(1, sizeof(*c));

    if (!c)
        return NULL;
    r2_mem_more(sizeof(*c));
    c->peer = p;
    c->id = id;
    c->final_seq = R2_SEQ_NONE;
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
    bool over = c->word == R2_WORD_HEARD || (!c->peer->out && r2_conn_is_left(c));

    if (c->state != R2_CONN_CLOSED || !over || r2_list_empty(&c->node))
        return;
    r2_buffered_left(c);
    r2_list_del(&c->node);
    r2_list_del(&c->ready);
    r2_list_del(&c->acks);
    r2_list_del(&c->flush);
    r2_hash_del(&c->peer->conns, c->id);
    if (!c->peer->out)
        r2_conn_ended(c->peer, c->id);
    r2_count(&r2_eng.n->connections_closed, 1);
    r2_gauge_add(&r2_eng.g->connections_open, -1);
    r2_conn_put(c);
}

/* What is under way of a message that ends early is acknowledged to nobody: it must not go on
 * taking room on its path, which others need. */
static void give_room(void *arg, const struct r2_send_report *rep)
{
    struct r2_peer *p = arg;
    struct r2_path *path = rep->path < p->n_paths ? p->paths[rep->path] : NULL;

    if (!path || path->gen != rep->gen || !r2_path_is_up(path) || !rep->stamp.first_sent_ns)
        return;
    r2_pathrate_on_lost(&path->rate, rep->bytes);
    r2_path_tell_inflight(path);
}

void r2_req_finish(struct r2_req *r, int err)
{
    struct r2_conn *c = r->conn;

    if (!r->attached)
        return;
    if (c->peer->out) {
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
        r2_count(c->peer->out ? &r2_eng.n->messages_sent : &r2_eng.n->messages_received, 1);
        r2_count(c->peer->out ? &r2_eng.n->bytes_sent : &r2_eng.n->bytes_received, r->size);
    }
    if (r->copy)
        r2_buffered_free(r);
    if (r->done_early)
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
    if (c->peer->out)
        c->peer->todo |= R2_TODO_KICK;
}

/* That of a peer that is gone is one event for all of its connections. */
static void tell_failed(const struct r2_conn *c, int err)
{
    struct r2_control_event ev = {
        .event = R2_EV_CONNECTION_FAILED, .peer_host = c->peer->host, .peer_pid = c->peer->pid};
    char cause[96];

    if (c->peer->life != R2_PEER_ALIVE)
        return;
    snprintf(cause, sizeof(cause), "%s: %s", c->peer->out ? "sending" : "receiving",
             strerror(-err));
    ev.nic = r2_nic_name(c->home);
    ev.cause = cause;
    r2_control_journal(r2_eng.ctl, &ev);
}

void r2_conn_fail(struct r2_conn *c, int err)
{
    if (c->state >= R2_CONN_FAILED)
        return;
    if (c->state == R2_CONN_OPENING)
        c->peer->opening--;
    c->word = c->state == R2_CONN_OPEN && !r2_conn_is_left(c) && c->peer->life == R2_PEER_ALIVE
                  ? R2_WORD_OWED
                  : R2_WORD_NONE;
    c->state = R2_CONN_FAILED;
    c->error = err;
    c->waiting = 0;
    r2_list_del(&c->ready);
    r2_list_del(&c->acks);
    /* What has arrived whole, and only waits for its acknowledgement to leave, is no loss. */
    R2_FOR_EACH_REQ (r, c) {
        if (r->arrived)
            r2_req_finish(r, 0);
    }
    finish_all(c, err);
    if (c->word) /* the peer's requests must not wait until the application closes */
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
    struct r2_msg_close m = {.conn = c->id, .from_sender = c->peer->out};
    struct r2_path *path = r2_path_for_ctrl(c->peer, -1, -1);
    struct r2_msg_lane lanes[R2_PATHS_MAX];

    m.cumulative = c->peer->out ? c->next_seq : c->cum;
    if (c->peer->out && !c->under_way) {
        m.from_sender |= R2_CLOSE_IDLE;
        m.lanes = r2_revoke_lanes(c, lanes);
    }
    if (path)
        r2_out_frame(path, R2_F_CLOSE, &m, sizeof(m), lanes, m.lanes * sizeof(lanes[0]));
}

void r2_conn_end(struct r2_conn *c)
{
    if (c->state == R2_CONN_OPENING)
        c->peer->opening--;
    c->state = R2_CONN_CLOSED;
    c->word = R2_WORD_OWED;
    c->error = -ECANCELED;
    finish_all(c, -ECANCELED);
    c->waiting = 0;
    r2_list_del(&c->ready);
}

void r2_conn_out_closed(struct r2_conn *c)
{
    if (c->peer->life != R2_PEER_ALIVE)
        c->word = R2_WORD_HEARD; /* nobody is left to hear it */
    else
        r2_conn_out_close(c);
    r2_conn_reap(c);
}

void r2_conns_leave(struct r2_peer *p)
{
    R2_FOR_EACH_CONN_SAFE (c, p) {
        /* A connection that did not linger waits for no path either to say its end. */
        if (c->state >= R2_CONN_CLOSING && !p->n_up)
            r2_buffered_left(c);
        if (!c->linger || c->state >= R2_CONN_CLOSING || c->oldest != c->next_seq)
            continue;
        r2_conn_end(c);
        r2_conn_out_closed(c);
        r2_conn_put(c);
    }
}
