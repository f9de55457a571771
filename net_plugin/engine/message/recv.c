/* The receiver's data plane: where bytes are placed. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/message/message.h"
#include "util/copy.h"
#include "util/crc32c.h"

#define POSTED_AHEAD 3
#define HOLD_NS (20 * R2_NS_PER_US)
#define HOLD_SMALL_NS (100 * R2_NS_PER_US)
#define HOLD_AFTER_SMALL 8
#define KEPT_NS (50 * R2_NS_PER_MS)
#define LANE_COPY 0x8000 /* of a claim: a whole copy is being put into place */

/* Message `seq` has arrived whole. */
static void mark_arrived(struct r2_conn *c, uint64_t seq)
{
    if (seq < c->cum || seq - c->cum >= 64)
        return;
    c->ahead |= UINT64_C(1) << (seq - c->cum);
    while (c->ahead & 1) {
        c->ahead >>= 1;
        c->cum++;
    }
}

static bool has_arrived(const struct r2_conn *c, uint64_t seq)
{
    return seq < c->cum || (seq - c->cum < 64 && (c->ahead >> (seq - c->cum) & 1));
}

/* ---- receives */

void r2_recv_cts(struct r2_req *r, struct r2_path *path)
{
    struct r2_msg_cts m = {.conn = r->conn->id, .seq = r->seq, .size = r->size};
    uint32_t keys[R2_WIRE_MAX_NICS];

    m.addr = (uint64_t)(uintptr_t)r->data;
    if (r->mr && r->mr->keys)
        m.keys = (uint32_t)r2_eng.ops->remote_keys(r->mr->keys, keys);
    m.flags = r->mr && r->mr->device ? R2_CTS_DEVICE : 0;
    if (!path || r2_out_frame(path, R2_F_CTS, &m, sizeof(m), keys, m.keys * sizeof(*keys)))
        return;
    r->kept = false;
    if (r->conn->cts_sent <= r->seq)
        r->conn->cts_sent = r->seq + 1;
}

void r2_recv_say_kept(struct r2_peer *p, uint64_t now)
{
    R2_FOR_EACH_CONN (c, p) {
        if (c->state != R2_CONN_OPEN)
            continue;
        R2_FOR_EACH_REQ (r, c) {
            if (r->kept && !r->arrived && now > r->posted_at + KEPT_NS)
                r2_recv_cts(r, r2_acks_path(c));
        }
    }
    r2_peer_say_held(p, now);
}

/* A receive that only a small message can fill needs no word of its own: the sender does not wait
 * for it. Its credit goes back once for every few messages. */
static bool cts_can_wait(const struct r2_req *r)
{
    return r->size <= r->conn->peer_eager && r->seq - r->conn->cts_sent < R2_EAGER_AHEAD / 2;
}

/* How long the word may wait for another frame to go along with, as a rule the acknowledgement of
 * an earlier message. Not at all where nothing earlier is to come, unless the sender does not wait
 * for it: then it sends small messages, one after the other. Where cores are few each call on a
 * socket counts; elsewhere only what is several messages ahead waits. */
static uint64_t patience(const struct r2_req *r)
{
    uint64_t enough = r2_io_alone() ? 1 : POSTED_AHEAD;

    if (r->conn->small >= HOLD_AFTER_SMALL)
        return HOLD_SMALL_NS;
    return r->seq >= r->conn->cum + enough ? HOLD_NS : 0;
}

static void post_cts(struct r2_req *r, struct r2_path *path)
{
    uint64_t before = path ? path->outbox.due : 0;

    r2_recv_cts(r, path);
    if (path && patience(r))
        r2_out_hold(path, before, r->posted_at + patience(r));
}

static struct r2_stash *stash_of(struct r2_conn *c, uint64_t seq)
{
    struct r2_stash *s = &c->stash[seq % R2_EAGER_AHEAD];

    return s->data && s->seq == seq ? s : NULL;
}

static void placed(struct r2_req *r)
{
    struct r2_conn *c = r->conn;

    r->arrived = true;
    mark_arrived(c, r->seq);
    if (r->seq < c->flushed)
        r2_req_finish(r, 0);
}

/* buffered: the sender does not wait for the acknowledgement, so nobody here does, unless an
 * earlier message is missing: until it has come r2_recv_repeat has to know of this one. */
static int place_eager(struct r2_req *r, const uint8_t *data, uint32_t size, bool buffered)
{
    int rc = r2_recv_set_total(&r->led.recv, size);

    if (rc == 0 && size && r->mr && r->mr->device)
        rc = -EPROTO; /* no thread may write there, and the sender was told */
    if (rc == 0 && size) {
        rc = r2_recv_claim(&r->led.recv, 0, size, UINT16_MAX, 0, 0, false);
        if (rc == 0) {
            r2_copy_lines(r->data, data, size, 0);
            rc = r2_recv_done(&r->led.recv, 0, size, UINT16_MAX, 0);
        }
    }
    if (rc < 0) {
        if (rc == -EMSGSIZE)
            R2_WARN("a message of %u bytes does not fit its receive of %llu", size,
                    (unsigned long long)r->size);
        r2_conn_fail(r->conn, rc);
        return rc;
    }
    placed(r);
    if (buffered && r->seq < r->conn->cum)
        r2_req_finish(r, 0);
    return 0;
}

void r2_recv_start(struct r2_req *r)
{
    struct r2_conn *c = r->conn;
    struct r2_stash *s = stash_of(c, r->seq);

    r2_recv_init(&r->led.recv, r->size);
    r->kept = cts_can_wait(r);
    if (!r->kept)
        post_cts(r, r2_acks_path(c)); /* for a stashed message it gives the credit back */
    if (s) {
        place_eager(r, s->data, s->size, s->buffered);
        r2_mem_less(s->size);
        free(s->data);
        s->data = NULL;
    }
}

static int stash_eager(struct r2_conn *c, const struct r2_msg_eager *m, const uint8_t *data)
{
    struct r2_stash *s = &c->stash[m->seq % R2_EAGER_AHEAD];

    if (m->seq >= c->next_seq + R2_EAGER_AHEAD || s->data)
        return -EPROTO;
    s->data = malloc(m->size ? m->size : 1);
    if (!s->data)
        return -ENOMEM;
    r2_mem_more(m->size);
    memcpy(s->data, data, m->size);
    s->seq = m->seq;
    s->size = m->size;
    s->buffered = m->flags & R2_EAGER_BUFFERED;
    mark_arrived(c, m->seq);
    return 0;
}

/* Some of the message has come in chunks, and its receive is not full. */
static bool in_chunks(struct r2_conn *c, uint64_t seq)
{
    const struct r2_req *r = r2_conn_req(c, seq);

    return r && !r->arrived && r->led.recv.total_known;
}

/* Its sender sends it as a small message and in chunks. Each half might wait for ever for the rest,
 * and another path would bring the same: the connection fails. */
static void both_ways(struct r2_conn *c, uint64_t seq)
{
    char who[R2_PEER_WHO];

    R2_WARN_LIMIT("peer %s breaks the protocol: message %llu of connection %llu comes as a "
                  "small message and in chunks; the connection fails",
                  r2_peer_who(c->peer, who), (unsigned long long)seq, (unsigned long long)c->id);
    r2_conn_fail(c, -EPROTO);
}

int r2_recv_on_eager(struct r2_conn *c, struct r2_path *path, const struct r2_msg_eager *m,
                     const uint8_t *data)
{
    bool buffered = m->flags & R2_EAGER_BUFFERED, fresh = !has_arrived(c, m->seq);
    struct r2_req *r;
    uint64_t beyond;
    int rc = 0;

    if (c->state != R2_CONN_OPEN)
        return 0;
    if ((m->flags & R2_BULK_CRC) && r2_crc32c(0, data, m->size) != m->crc) {
        r2_count(&r2_eng.n->crc_errors, 1);
        r2_path_journal(path, R2_EV_CRC_ERROR, m->size, 0, "small message");
        return -EBADMSG; /* ends the path; the message comes over another one */
    }
    if (in_chunks(c, m->seq)) {
        both_ways(c, m->seq);
        return 0;
    }
    if (!fresh) {
        r2_count(&r2_eng.n->duplicate_chunks, 1);
    } else {
        r = r2_conn_req(c, m->seq);
        if (r)
            place_eager(r, data, m->size, buffered);
        else
            rc = m->seq < c->next_seq ? 0 : stash_eager(c, m, data);
    }
    c->small += c->small < HOLD_AFTER_SMALL;
    path->sum.rx_bytes += m->size;
    r2_count(&r2_control_nic_counters(r2_eng.ctl, path->lnic)->rx_bytes, m->size);
    beyond = has_arrived(c, m->seq) && m->seq >= c->cum ? m->size : 0;
    /* Of those that an earlier one kept waiting the receives are done when that is said. */
    if (buffered && fresh && c->cum == m->seq + 1)
        r2_recv_queue_late_ack(c, path, m->seq, beyond);
    else
        r2_recv_queue_ack(c, path, m->seq, 0, beyond);
    return rc;
}

/* ---- chunks */

/* 0, 1, or < 0 as r2_transport_events.chunk_claim has them; -EBUSY: another lane reads it. */
static int claim(struct r2_path *path, struct r2_ep *ep, struct r2_bulk *bulk, uint16_t lane)
{
    struct r2_conn *c = r2_conn_find(path->peer, bulk->conn);
    struct r2_req *r;
    int rc;

    if (path->ep != ep) {
        r2_count(&r2_eng.n->stale_chunks, 1);
        return 1;
    }
    if (bulk->conn == R2_CONN_TEST)
        return bulk->flags & R2_BULK_COPY ? -EPROTO : r2_path_test_claim(path, bulk);
    if (c && !c->peer->out)
        r2_revoke_count(c, path);
    if (!c || c->peer->out || c->state != R2_CONN_OPEN)
        return 1;
    c->small = 0;
    r = r2_conn_req(c, bulk->seq);
    if (has_arrived(c, bulk->seq) || (!r && bulk->seq < c->next_seq)) {
        r2_count(&r2_eng.n->duplicate_chunks, 1);
        if (stash_of(c, bulk->seq))
            both_ways(c, bulk->seq);
        else
            r2_recv_queue_ack(c, path, 0, 0, 0);
        return 1;
    }
    if (!r) /* nobody cleared it to send */
        return -EPROTO;
    if (r->mr && r->mr->device && path->transport == R2_VIA_TCP)
        return -EPROTO; /* no thread may write there, and the sender was told */
    rc = r2_recv_set_total(&r->led.recv, bulk->total);
    if (rc == -EMSGSIZE) {
        r2_conn_fail(c, -EMSGSIZE);
        return 1;
    }
    if (rc == 0)
        rc = r2_recv_claim(&r->led.recv, bulk->offset, bulk->len, path->index,
                           r2_eng.ops->params(ep)->gen,
                           bulk->flags & R2_BULK_COPY ? lane | LANE_COPY : lane, false);
    if (rc == -EBUSY && !(bulk->flags & R2_BULK_COPY)) /* some of it has come, in other pieces */
        rc = r2_recv_claim(&r->led.recv, bulk->offset, bulk->len, path->index,
                           r2_eng.ops->params(ep)->gen, lane, true);
    if (rc == 1) {
        r2_count(&r2_eng.n->duplicate_chunks, 1);
        r2_recv_queue_ack(c, path, bulk->seq, bulk->offset, bulk->len);
    }
    if (rc)
        return rc;
    if (r->mr && r->mr->device)
        bulk->flags &= ~R2_BULK_CRC; /* no thread may look at it */
    bulk->data = r->data + bulk->offset;
    if (r->lines)
        bulk->flags |= R2_BULK_LINES;
    return 0;
}

/* The receive that the chunk belongs to, or NULL. */
static struct r2_req *req_of(struct r2_peer *p, const struct r2_bulk *bulk)
{
    struct r2_conn *c = r2_conn_find(p, bulk->conn);

    return c && !c->peer->out ? r2_conn_req(c, bulk->seq) : NULL;
}

/* The claim that covers this chunk, or NULL. */
static const struct r2_recv_claim *claim_of(struct r2_peer *p, const struct r2_bulk *bulk)
{
    const struct r2_req *r = req_of(p, bulk);

    for (uint32_t i = 0; r && i < r->led.recv.count; i++) {
        const struct r2_recv_claim *k = r2_recv_claim_at(&r->led.recv, i);

        if (k->off <= bulk->offset && bulk->offset + bulk->len <= k->off + k->len)
            return k;
    }
    return NULL;
}

/* An original that comes while its copy, whole already, is put into place: that cannot fail any
 * more, so the original is drained. */
static bool being_placed(struct r2_peer *p, const struct r2_bulk *bulk)
{
    const struct r2_recv_claim *k = claim_of(p, bulk);

    return k && (k->lane & LANE_COPY);
}

/* Who reads the very chunk of a copy into its place: its path, with the endpoint's reference. None
 * that was claimed over bytes in place (`over`): a copy cannot have its claim. */
static struct r2_path *reader(struct r2_peer *p, const struct r2_bulk *bulk, struct r2_ep **ep,
                              unsigned *lane)
{
    const struct r2_recv_claim *k = claim_of(p, bulk);
    struct r2_path *path = k && k->path < p->n_paths ? p->paths[k->path] : NULL;

    if (!path || k->off != bulk->offset || k->len != bulk->len || !path->ep ||
        path->gen != k->gen || (k->lane & LANE_COPY) ||
        r2_ranges_overlap(&req_of(p, bulk)->led.recv.done, bulk->offset, bulk->len))
        return NULL;
    *ep = path->ep;
    *lane = k->lane;
    r2_eng.ops->get(*ep);
    return path;
}

/* A copy is whole, and the original is being read by another lane: that one lets go of it if it is
 * not inside a read just now, and the copy takes the place. Otherwise the copy is dropped: nothing
 * depends on it. Should the place be gone meanwhile, nobody would answer for the original, so its
 * path ends, which fences and replays it. The lock is let go of in between. */
static int claim_from(struct r2_path *path, struct r2_ep *ep, struct r2_bulk *bulk, uint16_t lane)
{
    struct r2_peer *p = path->peer;
    struct r2_ep *other = NULL;
    unsigned other_lane = 0;
    struct r2_path *from = reader(p, bulk, &other, &other_lane);
    uint32_t gen = from ? from->gen : 0;
    bool ok;
    int rc;

    r2_count(&r2_eng.n->duplicate_chunks, 1);
    if (!from)
        return 1;
    r2_peer_leave(p);
    ok = r2_eng.ops->revoke(other, other_lane, bulk);
    r2_eng.ops->put(other);
    r2_peer_lock(p);
    if (!ok)
        return 1;
    rc = claim(path, ep, bulk, lane);
    if (rc)
        r2_path_fail(from, gen, ECANCELED, "a copy came between");
    return rc == -EBUSY ? 1 : rc;
}

int r2_up_chunk_claim(void *owner, struct r2_ep *ep, struct r2_bulk *bulk, uint16_t lane)
{
    struct r2_path *path = owner;
    struct r2_peer *p = path->peer;
    int rc;

    r2_peer_lock(p);
    rc = claim(path, ep, bulk, lane);
    if (rc == -EBUSY && (bulk->flags & R2_BULK_COPY))
        rc = claim_from(path, ep, bulk, lane);
    else if (rc == -EBUSY && being_placed(p, bulk))
        rc = 1;
    if (rc == 0 && bulk->flags & R2_BULK_LIMITED)
        r2_limited_marked(path, bulk);
    r2_peer_leave(p);
    return rc;
}

static void test_over(struct r2_path *path, struct r2_ep *ep, const struct r2_bulk *bulk,
                      bool whole)
{
    r2_peer_lock(path->peer);
    r2_path_test_done(path, bulk, whole && path->ep == ep);
    r2_peer_unlock(path->peer);
}

void r2_up_chunk_done(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk)
{
    struct r2_path *path = owner;
    struct r2_peer *p = path->peer;
    struct r2_req *r;

    if (bulk->conn == R2_CONN_TEST) {
        test_over(path, ep, bulk, true);
        return;
    }
    r2_peer_lock(p);
    r = req_of(p, bulk);
    path->sum.rx_bytes += bulk->len;
    if (r && r2_recv_done(&r->led.recv, bulk->offset, bulk->len, path->index,
                          r2_eng.ops->params(ep)->gen) == 0) {
        r2_flush_note(r, path);
        if (r2_recv_complete(&r->led.recv))
            placed(r);
        r2_recv_queue_ack(r->conn, path, bulk->seq, bulk->offset,
                          bulk->seq >= r->conn->cum ? bulk->len : 0);
    }
    r2_peer_leave(p); /* acknowledged at the end of the burst */
    r2_count(&r2_control_nic_counters(r2_eng.ctl, path->lnic)->rx_bytes, bulk->len);
    r2_count(&r2_control_nic_counters(r2_eng.ctl, path->lnic)->rx_chunks, 1);
    r2_count(&r2_eng.n->chunks_received, 1);
}

void r2_up_chunk_dropped(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk, bool bad_crc)
{
    struct r2_path *path = owner;
    struct r2_peer *p = path->peer;
    struct r2_req *r;

    if (bulk->conn == R2_CONN_TEST) {
        r2_count(&r2_eng.n->crc_errors, bad_crc);
        test_over(path, ep, bulk, false);
        return;
    }
    r2_peer_lock(p);
    r = req_of(p, bulk);
    if (r && !(bulk->flags & R2_BULK_COPY)) /* a copy has no claim, an original might */
        r2_recv_release(&r->led.recv, bulk->offset, bulk->len, path->index,
                        r2_eng.ops->params(ep)->gen);
    if (bad_crc) {
        r2_count(&r2_eng.n->crc_errors, 1);
        r2_path_journal(path, R2_EV_CRC_ERROR, bulk->len, 0, "chunk");
        /* The bytes are in the buffer already, where their reader may have seen them: sending them
         * again would come too late (invariant "a wrong result is worse than an abort"). */
        if (r && path->transport != R2_VIA_TCP)
            r2_conn_fail(r->conn, -EBADMSG);
    }
    r2_peer_leave(p);
}
