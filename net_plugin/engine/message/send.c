/* The sender's messages: small ones, what may be pulled of large ones (next_chunk.c),
 * acknowledgements, what is sent again. */
#include <errno.h>
#include <string.h>

#include "engine/message/message.h"
#include "util/crc32c.h"

/* How long nothing could carry what waits is counted from now on: nobody looks at connections that
 * are not in the line. */
static void line_up(struct r2_conn *c)
{
    c->stuck_since = 0;
    r2_list_add_tail(&c->peer->ready, &c->ready);
}

/* Counts anew what waits for bulk lanes, and lists the connection accordingly. The hot paths add
 * and subtract instead (r2_send_more, take_chunk). */
static void recount(struct r2_conn *c)
{
    c->waiting = 0;
    R2_FOR_EACH_REQ (r, c)
        c->waiting += r2_send_waiting(r);
    if (!c->waiting)
        r2_list_del(&c->ready);
    else if (r2_list_empty(&c->ready))
        line_up(c);
}

void r2_send_more(struct r2_conn *c, uint64_t bytes)
{
    c->waiting += bytes;
    if (c->waiting && r2_list_empty(&c->ready))
        line_up(c);
}

/* ---- small messages: over the control lane, ahead of bulk */

static bool send_eager(struct r2_conn *c, struct r2_req *r)
{
    struct r2_path *path = r2_path_for_ctrl(c->peer, c->home, -1);
    struct r2_msg_eager m = {.conn = c->id, .seq = r->seq, .size = (uint32_t)r->size};
    struct r2_chunk chunk;

    if (!path || path->state != R2_PATH_PROVEN ||
        !r2_send_next(&r->led.send, UINT32_MAX, path->index, path->gen, r2_peer_now(path->peer),
                      &chunk))
        return false;
    m.flags = r2_buffered_take(r) ? R2_EAGER_BUFFERED : 0;
    if (r2_eng.set->verify) {
        m.flags |= R2_BULK_CRC;
        m.crc = r2_crc32c(0, r->data, r->size);
    }
    r2_out_frame(path, R2_F_EAGER, &m, sizeof(m), r->data, r->size);
    r2_send_released(&r->led.send, chunk.off, chunk.len, path->index, path->gen);
    path->sum.tx_bytes += r->size;
    r2_count(&r2_control_nic_counters(r2_eng.ctl, path->lnic)->tx_bytes, r->size);
    r2_count(&r2_eng.n->eager_messages, 1);
    r2_buffered_done(r);
    return true;
}

void r2_send_pump(struct r2_conn *c)
{
    if (!c->peer->out || (c->state != R2_CONN_OPEN))
        return;
    R2_FOR_EACH_REQ (r, c) {
        if (r2_send_idle(&r->led.send) || !r2_send_is_eager(r))
            continue;
        if (r->seq >= c->posted + R2_EAGER_AHEAD || !send_eager(c, r))
            return;
    }
}

void r2_send_start(struct r2_req *r)
{
    struct r2_conn *c = r->conn;
    const struct r2_cts_slot *cts = r2_send_cts(c, r->seq);

    r2_send_init(&r->led.send, r->size);
    r->tail_bytes = 0;
    if (cts && cts->size < r->size) {
        r2_conn_fail(c, -EMSGSIZE);
        return;
    }
    if (r2_send_is_eager(r)) {
        r2_send_pump(c);
    } else if (cts) {
        r2_conn_begins(c, r);
        r2_send_more(c, r->size);
        c->peer->todo |= R2_TODO_KICK;
    }
}

void r2_send_on_cts(struct r2_conn *c, const struct r2_msg_cts *m, const uint32_t *keys)
{
    struct r2_cts_slot *s = &c->cts[m->seq % R2_WINDOW];
    struct r2_req *r;
    bool fresh;

    if ((c->state != R2_CONN_OPEN && c->state != R2_CONN_OPENING) || c->revocation)
        return;
    if (m->seq >= c->oldest + R2_WINDOW)
        return; /* nonsense */
    if (m->seq >= c->posted)
        c->posted = m->seq + 1;
    if (m->seq < c->oldest) { /* acknowledged from the stash before: only the credit is news */
        r2_send_pump(c);
        return;
    }
    fresh = !r2_send_cts(c, m->seq);
    s->valid = true;
    s->seq = m->seq;
    s->size = m->size;
    s->addr = m->addr;
    s->device = m->flags & R2_CTS_DEVICE;
    memcpy(s->keys, keys, sizeof(s->keys));
    r = r2_conn_req(c, m->seq);
    if (r && r->size > m->size) {
        R2_WARN("a send of %llu bytes is larger than its receive of %llu",
                (unsigned long long)r->size, (unsigned long long)m->size);
        r2_conn_fail(c, -EMSGSIZE);
        return;
    }
    if (fresh && r && r2_send_waiting(r)) {
        r2_conn_begins(c, r);
        r2_send_more(c, r2_send_waiting(r));
    }
    r2_send_pump(c);
    if (!r2_list_empty(&c->ready))
        c->peer->todo |= R2_TODO_KICK;
}

/* ---- acknowledgements */

/* Something sent after the failure has arrived. Had nothing been under way then, the time since is
 * no time that anybody waited. */
static void resumed(struct r2_path *path)
{
    struct r2_peer *p = path->peer;
    uint64_t took = p->resume_idle ? 0 : r2_peer_now(p) - p->resume_from;

    r2_path_journal(path, R2_EV_RESUME, 0, took, p->resume_idle ? "was idle" : "");
    if (!p->resume_idle)
        r2_count_time(&r2_eng.n->resume, took);
    p->resume_from = 0;
}

static void report(void *arg, const struct r2_send_report *rep)
{
    struct r2_peer *p = arg;
    struct r2_path *path = rep->path < p->n_paths ? p->paths[rep->path] : NULL;
    uint64_t now = r2_peer_now(p);

    if (!path || path->gen != rep->gen || !r2_path_is_up(path))
        return;
    if (p->resume_from && rep->t_sent_ns >= p->resume_from)
        resumed(path);
    if (!rep->stamp.first_sent_ns) /* a small message: it took no room among the bulk */
        return;
    if (rep->doubled) {
        r2_tail_acked(path, rep, now);
    } else {
        r2_pathrate_on_ack(&path->rate, rep->bytes, &rep->stamp, rep->t_sent_ns, now);
        r2_grey_acked(path, rep, now);
    }
    r2_path_tell_inflight(path);
    if (!r2_list_empty(&p->ready) || r2_tail_waits(p, now))
        path->outbox.kick_wanted++;
}

static int64_t ack_req(struct r2_conn *c, uint64_t seq, const struct r2_ack_range *range)
{
    struct r2_req *r = r2_conn_req(c, seq);
    uint64_t before;
    int64_t n;

    if (!r)
        return 0;
    before = r2_send_waiting(r);
    n = r2_send_ack(&r->led.send, range ? range->offset : 0, range ? range->len : r->size, report,
                    c->peer);
    if (n < 0)
        return n;
    if (r2_send_waiting(r) != before)
        recount(c); /* bytes that were queued for replay had arrived */
    if (r2_send_complete(&r->led.send))
        r2_req_finish(r, 0);
    return n;
}

int r2_send_on_ack(struct r2_conn *c, uint64_t cumulative, const struct r2_ack_range *ranges,
                   uint32_t n)
{
    int64_t rc = 0;

    for (uint64_t s = c->oldest; s < cumulative && rc >= 0; s++)
        rc = ack_req(c, s, NULL);
    for (uint32_t i = 0; i < n && rc >= 0; i++)
        rc = ack_req(c, ranges[i].seq, &ranges[i]);
    return rc < 0 ? (int)rc : 0;
}

/* ---- failures */

void r2_send_fenced(struct r2_path *path, uint32_t gen)
{
    struct r2_peer *p = path->peer;
    struct r2_send_replay again = {0, 0};
    uint64_t took;

    R2_FOR_EACH_CONN (c, p) {
        bool any = false;

        R2_FOR_EACH_REQ (r, c)
            any |= r2_send_path_down(&r->led.send, path->index, gen, &again) > 0;
        if (any)
            recount(c);
        r2_send_pump(c); /* messages of no bytes, too */
    }
    if (!r2_past_carried(path->past) || (path->past == R2_PAST_CLOSED && !again.bytes))
        return;
    path->sum.replayed += again.bytes;
    took = r2_peer_now(path->peer) - path->down.at;
    r2_path_journal(path, R2_EV_REPLAY, again.bytes, took, "");
    r2_count_time(&r2_eng.n->failover, took);
    r2_count(&r2_eng.n->replayed_bytes, again.bytes);
    r2_count(&r2_eng.n->replayed_chunks, again.chunks);
    r2_count(&r2_control_nic_counters(r2_eng.ctl, path->lnic)->replayed_bytes, again.bytes);
    r2_count(&r2_eng.n->failovers, 1);
    p->resume_from = path->down.at;
    p->resume_idle = p->active == 0;
    p->todo |= R2_TODO_KICK;
}
