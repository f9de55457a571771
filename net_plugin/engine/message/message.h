/* Connections and their messages. */
#ifndef R2_ENGINE_MESSAGE_MESSAGE_H
#define R2_ENGINE_MESSAGE_MESSAGE_H

#include "engine/message/buffered.h"
#include "engine/message/memory.h"
#include "engine/path/path.h"

/* ---- conn.c */
struct r2_conn *r2_conn_new(struct r2_peer *p, uint64_t id);
static inline struct r2_conn *r2_conn_find(struct r2_peer *p, uint64_t id)
{
    return r2_hash_get(&p->conns, id);
}
/* R: the connection is over for good; an OPEN that comes late makes none anew. Under the lock. */
void r2_conn_ended(struct r2_peer *p, uint64_t id);
bool r2_conn_has_ended(const struct r2_peer *p, uint64_t id);
void r2_conn_put(struct r2_conn *c);
/* Fails every request and the connection. Under the lock. */
void r2_conn_fail(struct r2_conn *c, int err);
void r2_conn_out_close(struct r2_conn *c);
/* Closed for the application: nothing is sent any more; then the peer is told, and the connection
 * forgotten as soon as it knows. */
void r2_conn_end(struct r2_conn *c);
void r2_conn_out_closed(struct r2_conn *c);
/* Ends the lingering connections of a peer that wait for nothing more (buffered.h). Its task only:
 * connections may be freed. */
void r2_conns_leave(struct r2_peer *p);
void r2_conn_out_open(struct r2_conn *c);
/* Takes a closed connection whose CLOSE is acknowledged out of the peer. */
void r2_conn_reap(struct r2_conn *c);
static inline struct r2_req *r2_conn_req(const struct r2_conn *c, uint64_t seq)
{
    struct r2_req *r = c->window[seq % R2_WINDOW];

    return r && r->seq == seq ? r : NULL;
}
/* The connection's messages that are not over, in their order. The body may end the one at hand. */
#define R2_FOR_EACH_REQ(r, c)                                                                      \
    for (struct r2_req *r = r2_req_from(c, (c)->oldest); r; r = r2_req_from(c, r->seq + 1))
static inline struct r2_req *r2_req_from(const struct r2_conn *c, uint64_t seq)
{
    for (; seq < c->next_seq; seq++) {
        struct r2_req *r = r2_conn_req(c, seq);

        if (r)
            return r;
    }
    return NULL;
}
void r2_req_finish(struct r2_req *r, int err); /* err 0: done */

/* ---- send.c: the sender's messages */
void r2_send_start(struct r2_req *r); /* a new message: eager or to the ready list */
void r2_send_pump(struct r2_conn *c); /* what waits for credit, CTS or a path */
void r2_send_on_cts(struct r2_conn *c, const struct r2_msg_cts *m, const uint32_t *keys);
int r2_send_on_ack(struct r2_conn *c, uint64_t cumulative, const struct r2_ack_range *ranges,
                   uint32_t n);
/* The receiver has fenced the path: what is missing goes back to the queue. */
void r2_send_fenced(struct r2_path *path, uint32_t gen);
/* So many more wait, or fewer: the connection is listed accordingly. */
void r2_send_more(struct r2_conn *c, uint64_t bytes);

/* ---- carries.c */
/* It goes over the control lane, ahead of bulk. */
static inline bool r2_send_is_eager(const struct r2_req *r)
{
    return r->size <= r->conn->eager;
}
/* The clear-to-send of that message, or NULL. */
static inline const struct r2_cts_slot *r2_send_cts(const struct r2_conn *c, uint64_t seq)
{
    const struct r2_cts_slot *s = &c->cts[seq % R2_WINDOW];

    return s->valid && s->seq == seq ? s : NULL;
}
/* Bytes of the message that bulk lanes may take now. */
uint64_t r2_send_waiting(const struct r2_req *r);
/* The connection's first message of which there are any, or NULL. */
const struct r2_req *r2_send_first_waiting(struct r2_conn *c);
/* The message is from or to memory of a device, which sockets do not carry. */
bool r2_send_device(const struct r2_req *r);
/* The path can carry the message: its memory is registered with the NICs of both ends, or read and
 * written by threads on both. */
bool r2_send_carries(const struct r2_path *path, const struct r2_req *r);
void r2_send_fill(struct r2_path *path, struct r2_conn *c, struct r2_req *r,
                  const struct r2_chunk *chunk, struct r2_bulk *bulk);

/* ---- resync.c */
/* Repeats on live paths what is dead, cleared to send, arrived, opened and closed, and news about
 * NICs that nobody has acknowledged (nicnews.c). */
void r2_peer_resync(struct r2_peer *p);
void r2_up_ctrl_sent(void *owner, struct r2_ep *ep, uint64_t sent);

/* ---- recv.c: the receiver's data plane */
int r2_up_chunk_claim(void *owner, struct r2_ep *ep, struct r2_bulk *bulk, uint16_t lane);
void r2_up_chunk_done(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk);
void r2_up_chunk_dropped(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk, bool bad_crc);
void r2_recv_start(struct r2_req *r);
int r2_recv_on_eager(struct r2_conn *c, struct r2_path *path, const struct r2_msg_eager *m,
                     const uint8_t *data);
void r2_recv_cts(struct r2_req *r, struct r2_path *path);
/* Says the clear-to-send of small receives that are still empty after a while: if the message is
 * too large for its receive, nobody learns it otherwise. And what else was held (r2_out_hold). */
void r2_recv_say_kept(struct r2_peer *p, uint64_t now);

/* ---- usable_paths.c: which paths a connection's messages may take; all under the lock */
/* A path of the NIC that the connection's chunks go over first is well. */
bool r2_conn_home_alive(const struct r2_conn *c);
/* Whether connections keep to one NIC at a time. */
static inline bool r2_conn_narrow(void)
{
    return r2_eng.set->mode == R2_MODE_MIGRATE;
}
/* The NIC that the connection keeps to now, or -1: none, it goes over all. With R2CCL_MODE=migrate
 * it is the home NIC while it is up and at full weight, slow or not (nothing would show that it is
 * well again), else the nearest one that is. */
int r2_conn_stays(const struct r2_conn *c);
/* Memory may be registered with some NICs only. If those only stand by, have weight 0 or are not
 * the home NIC, its messages would wait for ever: finds such connections, for which these rules do
 * not hold (R2_WAYS_ANY). */
void r2_peer_find_ways(struct r2_peer *p);
/* The same for a message that begins to wait for a bulk lane, before its connection is listed. */
void r2_conn_begins(struct r2_conn *c, const struct r2_req *r);
/* S: what waits has no path that may carry it, as sockets may not: for so long, then it fails. */
void r2_peer_check_stuck(struct r2_peer *p, uint64_t now);
/* S: some message that waits could go over a path that is up; or none but those that wait for the
 * receiver's word. `proven`: paths that are being tested do not count, and what any path may carry
 * has a way while none is proven: that ends with the peer. */
bool r2_conn_has_way(struct r2_conn *c, bool proven);

/* ---- tail.c: chunks that a slow path holds back, sent again */
/* A chunk for a path that has nothing else to send; false: none. */
bool r2_tail_take(struct r2_path *path, struct r2_bulk *bulk);
/* Something may be held back now, so that paths with room should ask for copies. */
bool r2_tail_waits(const struct r2_peer *p, uint64_t now);
/* Asks a faster path to look, if one holds something back. */
void r2_tail_poll(struct r2_peer *p, uint64_t now);
/* Bytes that were sent twice have arrived. */
void r2_tail_acked(struct r2_path *path, const struct r2_send_report *rep, uint64_t now);

#endif
