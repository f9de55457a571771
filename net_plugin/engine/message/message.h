/* Connections and their messages. */
#ifndef R2_ENGINE_MESSAGE_MESSAGE_H
#define R2_ENGINE_MESSAGE_MESSAGE_H

#include "engine/path/path.h"

/* ---- memory.c */
/* Lets every lane go of the connection's memory: with the peer's agreement if it may write there,
 * else by force. Under the lock, without it on return. 0, or -ETIMEDOUT: a NIC does not confirm
 * it. `*revoke`: a peer may still hold a key. */
int r2_conn_detach(struct r2_conn *c, bool *revoke);

/* ---- flush.c */
/* Of a request that is a flush: as r2_engine_test. */
int r2_flush_test(struct r2_req *r, int *done);
/* A chunk has arrived over the path; under the lock. */
void r2_flush_note(struct r2_req *r, const struct r2_path *path);
/* R: a generation has been fenced, whose last bytes may still be on their way to a GPU; under the
 * lock. */
void r2_flush_note_fenced(const struct r2_path *path);

/* ---- revoke.c: what was cleared to send is taken back; all under the lock but the first */
/* R: asks the sender of a connection that is closed or failed here to stop. Waits for its answer
 * and for the chunks that it names, r2_revoke_wait_ns at most. True: nothing of the connection can
 * be written any more. Takes the peer's lock; the caller holds none. */
bool r2_revoke(struct r2_conn *c);
extern uint64_t r2_revoke_wait_ns; /* 0: by the heartbeats' deadline; tests set it */
/* A chunk of the connection was handed to (S) or came over (R) the path. */
void r2_revoke_count(struct r2_conn *c, const struct r2_path *path);
/* S: a NIC has let go of a chunk. True: the peer is told by a frame, to be sent with the unlock. */
bool r2_revoke_back(struct r2_conn *c, const struct r2_path *path);
int r2_revoke_on_ask(struct r2_path *path, const uint8_t *body);
int r2_revoke_on_answer(struct r2_path *path, const uint8_t *body);
/* R: the sender's word, in REVOKED or CLOSE. */
void r2_revoke_said(struct r2_conn *c, const uint8_t *lanes, uint32_t n);
/* S: fills what it has handed out; the number of entries. */
uint32_t r2_revoke_lanes(const struct r2_conn *c, struct r2_msg_lane out[R2_PATHS_MAX]);

/* ---- buffered.c: small messages whose send is done before they are acknowledged; all but the last
 * two under the peer's lock */
/* S: a small message is about to be sent: from now on its data is the engine's copy. False: it is
 * not copied (R2CCL_BUFFERED, one I/O thread, no memory), and done when it is acknowledged. */
bool r2_buffered_take(struct r2_req *r);
/* S: it was sent: if it is a copy the application learns that it is done. */
void r2_buffered_done(struct r2_req *r);
/* S: acknowledged, or failed; its connection may have waited for that. */
void r2_buffered_free(struct r2_req *r);
/* S: the application closes a connection: whether copies, and only they, are unacknowledged. Then
 * the application's reference is the engine's, and r2_conns_leave ends it. */
bool r2_buffered_lingers(struct r2_conn *c);
/* No exit waits for the connection any more: the peer knows its end, has said its own, or is gone.
 */
void r2_buffered_left(struct r2_conn *c);
/* In the whole process, for whoever waits for none: messages that nobody has acknowledged, and
 * connections that linger. Any thread. */
int r2_buffered_unacked(void);
int r2_buffered_lingering(void);

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
/* Ends the lingering connections of a peer that wait for nothing more (buffered.c). Its task only:
 * connections may be freed. */
void r2_conns_leave(struct r2_peer *p);
void r2_conn_out_open(struct r2_conn *c);
/* Takes a closed connection whose CLOSE is acknowledged out of the peer. */
void r2_conn_reap(struct r2_conn *c);
void r2_req_finish(struct r2_req *r, int err); /* err 0: done */

/* ---- p2pchunk.c: the pieces that NCCL cuts sends and receives into between nodes */
/* Puts `bytes` into the environment where the user has put nothing. 0: nothing; else rounded down
 * to 4 KiB, and to what NCCL's buffers hold. Called at NCCL's first call of the plugin, before NCCL
 * has read the variable. `nccl`: its version, 0 if unknown. Once, before the engine's I/O threads;
 * other threads that look into the environment meanwhile: docs/decisions.md 40. */
void r2_p2pchunk_start(uint64_t bytes, unsigned nccl);
/* What is to be said of the memory that the pieces take, where a control group (a container) allows
 * `limit` bytes to `ranks` processes; "" if that is enough. Pure. */
void r2_p2pchunk_memory(uint64_t limit, int ranks, uint64_t bytes, char *out, size_t cap);
/* The least memory.max of the control groups that `cgroup` (the text of /proc/self/cgroup) names,
 * under the folder `root`; 0: no limit, or not known. */
uint64_t r2_p2pchunk_limit(const char *root, const char *cgroup);
/* What NCCL takes here, in KiB, rounded up; more than the word holds: its largest. */
uint16_t r2_p2pchunk_word(void);
/* The peer's. Another one than ours is told to the user, once for each peer: NCCL does not look,
 * and what it sends and receives is then wrong. Under the peer's lock. */
void r2_p2pchunk_heard(struct r2_peer *p, uint16_t word);

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

/* ---- acks.c: the receiver's acknowledgements, queued under the peer's lock. They are said at the
 * end of a burst of arrivals, or a little later when nobody waits for them. */
void r2_acks_init(struct r2_peer *p);
/* Over which path they leave when the one that brought the bytes is gone; may be NULL. */
struct r2_path *r2_acks_path(struct r2_conn *c);
/* `len` bytes of a message beyond c->cum; 0: c->cum alone is news. path: that brought them, or
 * NULL. */
void r2_recv_queue_ack(struct r2_conn *c, struct r2_path *path, uint64_t seq, uint64_t off,
                       uint64_t len);
/* The same for a whole message that its sender has a copy of. */
void r2_recv_queue_late_ack(struct r2_conn *c, struct r2_path *path, uint64_t seq, uint64_t len);
/* Turns queued acknowledgements into frames. */
void r2_recv_out_acks(struct r2_peer *p);
/* The kernel has what says that all messages below `cum` are here. */
void r2_recv_flushed(struct r2_conn *c, uint64_t cum);
/* Everything that has arrived, queued for acknowledgement again. */
void r2_recv_repeat(struct r2_conn *c, struct r2_path *path);
/* At exit, as a hint and without waiting for a lock. True: there is a path, but a message is here
 * whose sender will not know it, or a frame (the end of a connection) is queued; or a lock is
 * taken. */
bool r2_acks_unsaid(void);
void r2_up_burst_end(void *owner, struct r2_ep *ep);

/* ---- resync.c */
/* If that is wanted, repeats on live paths what is dead, cleared to send, arrived, opened and
 * closed. Repeats also news about NICs that nobody has acknowledged (nicnews.c). */
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
 * it is the home NIC while it is up and at full weight, else the nearest one that is. Without one
 * it is the nearest with less. It may be slow: nothing would show that it is well again. */
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
