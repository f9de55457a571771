/* What the rooms of engine/ do for each other, file by file; private to engine/.
 *
 * Locks: transport lane locks -> peer->lock -> leaf locks (r2_eng.lock, I/O threads, control).
 * peer->lock guards everything below the peer: paths, connections, requests, ledgers, outboxes.
 * Requests carry one atomic (`state`) so that r2_engine_test needs no lock.
 * No transport operation marked [locks] is called under peer->lock: frames are appended to a
 * path's outbox, and r2_peer_unlock flushes what was appended.
 */
#ifndef R2_ENGINE_INTERNAL_H
#define R2_ENGINE_INTERNAL_H

#include "engine/objects.h"

/* ---- engine.c */
int r2_engine_start(void); /* threads, listeners, control; once */

/* ---- peer.c */
/* Finds or makes; with a reference. */
struct r2_peer *r2_peer_obtain(const uint8_t id[16], const uint8_t secret[16], bool out);
/* The same, NULL when there is none. */
struct r2_peer *r2_peer_find(const uint8_t id[16], bool out);
/* Under the lock: its NIC is there now, as it says without a path. */
void r2_peer_moved(struct r2_peer *p, int nic, const struct r2_wire_addr *addr);
void r2_peer_get(struct r2_peer *p);
/* When what was left to I/O threads is looked at again (loop/recheck.c), after it was left. By then
 * a lane that was relied on has come, or is relied on no more (AT_WORK_NS in bulk.c), and so a
 * thread (AT_HAND_NS in io.c). */
#define R2_RECHECK_NS (300 * R2_NS_PER_US)
/* A look is due at `at`, or earlier. Any thread, no lock. */
void r2_recheck_by(unsigned long at);
/* References to all peers, so that they can be locked without the engine's lock. The caller puts
 * each and frees the array. */
struct r2_peer **r2_peer_all(int *count);
/* Lets the peer's task run; the queued task holds a reference. */
void r2_peer_wake(struct r2_peer *p);
void r2_peer_put(struct r2_peer *p);
void r2_peer_lock(struct r2_peer *p);
/* Releases the lock, then flushes outboxes and kicks lanes that were asked for meanwhile. May be
 * called with lane locks held: flushing only tries the control lane's lock. */
void r2_peer_unlock(struct r2_peer *p);
/* Releases the lock without a look at outboxes and lanes: whoever comes next sees to them. */
void r2_peer_leave(struct r2_peer *p);
/* As r2_peer_unlock, for who has other things to do: frames may be left to an I/O thread that is
 * awake, which says many with one call. */
void r2_peer_unlock_soon(struct r2_peer *p);
/* The same after a request was posted. `eager`: it is a message that goes with the frames, at once
 * if the transport finds that best. `push`: the caller may send a single chunk itself. */
void r2_peer_unlock_posted(struct r2_peer *p, bool eager, bool push);
/* Endpoints of the peer, living and dying, each with a reference. Under the lock. */
int r2_peer_eps(struct r2_peer *p, struct r2_ep **out, int max);

/* ---- base.c: what is known about this node's NICs; any thread */
/* As r2_transport_events.meeting. */
int r2_nic_meeting(void);
/* The NIC that has this address, -1: none, it is another node's. */
int r2_nic_own(const struct r2_wire_addr *addr);
/* A path over the NIC has proven itself, to a peer that is not on this node. */
void r2_nic_met(int nic);

/* ---- path.c: states of paths; all under the lock */
void r2_peer_account(struct r2_peer *p, int delta); /* requests in flight */
/* Something is about to wait for the peer. If it is the first, the time that the peer has been out
 * of reach begins anew: nobody has waited. Under the lock. */
void r2_peer_waits(struct r2_peer *p, uint64_t now);
/* Something begins to wait for a peer without paths: the journal says so, if it ever had one. */
void r2_path_wait_late(const struct r2_peer *p);
struct r2_path *r2_path_obtain(struct r2_peer *p, int lnic, int rnic, int transport);
void r2_path_free(struct r2_path *path);
struct r2_path *r2_path_find(struct r2_peer *p, int lnic, int rnic, int transport);
/* Paths that are up in place of one of that transport, so that it may be left alone: of sockets
 * all, of queue pairs those that suffice. */
int r2_peer_left(const struct r2_peer *p, int transport);
/* Before the path gets an endpoint. False: no memory. */
bool r2_path_end_memory(struct r2_path *path);
/* What a host answers from that NIC of the peer's comes from there: the two NICs have met, and the
 * peer's is not down, so no other one of the host stands in for it. */
static inline bool r2_pair_speaks(const struct r2_peer *p, int lnic, int rnic)
{
    return (p->reached[lnic] >> rnic & 1) && p->rnics[rnic].word != R2_NIC_DOWN &&
           p->rnics[rnic].word != R2_NIC_FAILED;
}
/* A path to the peer has proved itself and is up. */
bool r2_peer_served(const struct r2_peer *p);
/* A generation is dead: hands its endpoint to the peer's task. Idempotent. */
void r2_path_fail(struct r2_path *path, uint32_t gen, int err, const char *cause);
void r2_path_up(struct r2_path *path);
/* The most that it may carry now. */
enum r2_path_may r2_path_may(const struct r2_path *path);
/* It is up, and carries whatever memory may be taken. */
bool r2_path_suffices(const struct r2_path *path);
int r2_path_connect(struct r2_path *path, uint64_t now); /* S: one attempt */
/* Another path to its peer is up, or tried. */
bool r2_path_has_others(const struct r2_path *path);
void r2_path_refused(struct r2_path *path, bool yes); /* S: how it has ended */
/* The path that control frames of a connection take: the preferred one while it lives, else any
 * that answers; NULL when none is up. */
struct r2_path *r2_path_for_ctrl(struct r2_peer *p, int home, int remote_home);
const char *r2_path_text(const struct r2_path *path, char *out, size_t cap);
void r2_path_journal(const struct r2_path *path, enum r2_seg_event event, uint64_t bytes,
                     uint64_t duration_ns, const char *cause);

/* ---- pathhealth.c: health of paths, test chunks; all under the lock */
/* Takes the event, and shows and journals what follows from it. True: something did. */
bool r2_path_event(struct r2_path *path, enum r2_health_event event, const char *cause);
void r2_path_show(struct r2_path *path, const char *cause);
/* A better pair of NICs serves, or not any more. Under the peer's lock. */
void r2_path_spare(struct r2_path *path, bool spare);
/* The path has come up: it proves itself first, or is in use at once (S); waits for the other
 * side's test (R). */
void r2_path_test(struct r2_path *path);
/* S: a test chunk to send. */
bool r2_path_test_next(struct r2_path *path, struct r2_bulk *bulk);
int r2_path_on_test(struct r2_path *path, const uint8_t *body);
int r2_path_on_test_ack(struct r2_path *path, const uint8_t *body);
/* Test chunks at the receiver; as the upcalls of those names. */
int r2_path_test_claim(struct r2_path *path, struct r2_bulk *bulk);
void r2_path_test_done(struct r2_path *path, const struct r2_bulk *bulk, bool whole);
/* The journal's word that the path is up, once there is all to say it with. */
void r2_path_tell_up(struct r2_path *path);
/* Time passes: ramps end, drained paths are let go, tests run out. */
void r2_path_tick(struct r2_path *path, uint64_t now);
/* A NIC of this side or the other was drained, or given back. */
void r2_path_follow(struct r2_path *path);
/* Operator's word: past failures are forgotten. */
void r2_path_forgive(struct r2_path *path);
/* Heartbeats in a row without an answer: it is in doubt. */
#define R2_SUSPECT_BEATS 2
void r2_path_test_lost(struct r2_path *path);
/* What its paths say about each NIC. */
void r2_peer_census(struct r2_peer *p);
/* A path of it is wanted and does not answer, and the peer's NIC is not what is at fault. Locks
 * peers. */
bool r2_nic_asked_in_vain(int nic);
void r2_damp_rules_get(struct r2_damp_rules *out);

/* ---- refusals.c: hosts that refuse; under the lock */
/* An attempt between these NICs was refused, or another process answered. It counts with no path
 * up only, and where it can tell something about the process (r2_pair_speaks). */
void r2_peer_refused(struct r2_peer *p, int lnic, int rnic, uint64_t now);
/* The process has answered, if only that it wants no such path, or its NICs have changed: what was
 * refused before says nothing now. */
void r2_peer_answers(struct r2_peer *p);

/* ---- pathgrey.c: what is measured of a path; under the lock */
void r2_grey_path_init(struct r2_path *path);
void r2_grey_path_up(struct r2_path *path);
void r2_grey_path_free(struct r2_path *path);
void r2_grey_acked(struct r2_path *path, const struct r2_send_report *rep, uint64_t now);
/* It takes chunks for trial soon again: it is slow, or its rate has fallen and nobody knows why. */
bool r2_grey_path_doubted(const struct r2_path *path);
/* The judge calls it slow or lossy, or does not any more. */
void r2_grey_note(struct r2_path *path, bool grey);
/* Paths of this node's NIC that are called so, and all that are watched. Any thread. */
void r2_grey_counts(int nic, int *grey, int *all);

/* ---- beats.c: heartbeats, and what their silence means; all under the lock */
void r2_peer_hb_intervals(struct r2_peer *p, bool busy, uint64_t now);
void r2_peer_hb_forget(struct r2_peer *p);
/* All its paths are asked at the pace of paths in use for a while. */
void r2_peer_hb_doubt(struct r2_peer *p, uint64_t now);
/* It answers: a heartbeat that was sent at `since` or later. */
bool r2_path_hb_answers(const struct r2_path *path, uint64_t since);
/* ns until a look that cannot wait for the next tick (r2_hb_next), of all its paths. */
uint64_t r2_peer_hb_next(struct r2_peer *p, uint64_t now);
/* Looks at the paths whose turn it is. Lets go of the lock meanwhile. `judge`: the observer was
 * awake, so an answer that is missing counts. */
void r2_peer_beat(struct r2_peer *p, uint64_t now, bool judge);
void r2_peer_judge_silence(struct r2_peer *p, uint64_t now);

/* ---- gone.c */
/* The peer's process does not exist any more (err -ECONNRESET), or no path came back
 * (-ETIMEDOUT): its connections fail. Under the lock. */
void r2_peer_gone(struct r2_peer *p, int err, const char *cause);

/* ---- peershow.c: what operators see of a peer; what stderr hears, once. Under the lock. */
void r2_peer_show(struct r2_peer *p, uint64_t now);
void r2_peer_tell_gone(const struct r2_peer *p, const char *cause);

/* ---- carry_out.c */
extern const struct r2_upper r2_loop_upper;

/* ---- housekeeping.c */
void r2_housekeeping_start(void);

/* ---- maintain.c: the peer's task and timer */
bool r2_peer_may_try(const struct r2_peer *p, int lnic);
void r2_peer_task(struct r2_task *t);
void r2_peer_timer(struct r2_timer *t, uint64_t now);

/* ---- outbox.c: control frames */
/* Appends a frame to the path's outbox and wants a flush. 0 or -ENOMEM (the path is failed). */
int r2_out_frame(struct r2_path *path, uint8_t type, const void *a, size_t a_len, const void *b,
                 size_t b_len);
/* What was appended last is in no hurry: unless other frames take it along it leaves `ns` later, as
 * r2_peer_say_held finds, which whoever polls a request of the peer's calls, and the peer's tick.
 */
void r2_out_hold(struct r2_path *path, uint64_t now, uint64_t ns);
void r2_peer_say_held(struct r2_peer *p, uint64_t now);
void r2_out_reset(struct r2_path *path);
/* Frames that no transport has taken yet are asked for again, on all paths; those that are held go
 * along. */
void r2_out_again(struct r2_peer *p);
size_t r2_up_next_ctrl(void *owner, struct r2_ep *ep, uint8_t *buf, size_t cap);
void r2_out_info(struct r2_path *path);
void r2_out_nic(struct r2_path *path, int nic);
/* The peer does not read: what can be said later is. */
bool r2_out_full(const struct r2_path *path);

/* ---- dispatch.c */
int r2_up_ctrl(void *owner, struct r2_ep *ep, uint8_t type, const uint8_t *body, size_t len);

/* ---- conn.c */
struct r2_conn *r2_conn_new(struct r2_peer *p, uint64_t id, bool out);
struct r2_conn *r2_conn_find(struct r2_peer *p, uint64_t id);
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
void r2_conn_out_open(struct r2_conn *c);
/* Takes a closed connection whose CLOSE is acknowledged out of the peer. */
void r2_conn_reap(struct r2_conn *c);
static inline struct r2_req *r2_conn_req(struct r2_conn *c, uint64_t seq)
{
    struct r2_req *r = c->window[seq % R2_WINDOW];

    return r && r->seq == seq ? r : NULL;
}
void r2_req_finish(struct r2_req *r, int err); /* err 0: done */

/* ---- next_chunk.c: which chunk goes over which path */
/* The message is from or to memory of a device, which sockets do not carry. */
bool r2_send_device(const struct r2_req *r);
/* The path can carry the message: its memory is registered with the NICs of both ends, or read and
 * written by threads on both. */
bool r2_send_carries(const struct r2_path *path, const struct r2_req *r);
bool r2_up_next_chunk(void *owner, struct r2_ep *ep, struct r2_bulk *bulk);
void r2_up_blocked(void *owner, struct r2_ep *ep);
void r2_up_chunk_sent(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk);
void r2_send_fill(struct r2_path *path, struct r2_conn *c, struct r2_req *r,
                  const struct r2_chunk *chunk, struct r2_bulk *bulk);
void r2_peer_kick(struct r2_peer *p); /* there is work for bulk lanes */

/* ---- send.c: the sender's messages */
void r2_send_start(struct r2_req *r); /* a new message: eager or to the ready list */
void r2_send_pump(struct r2_conn *c); /* what waits for credit, CTS or a path */
void r2_send_on_cts(struct r2_conn *c, const struct r2_msg_cts *m, const uint32_t *keys);
int r2_send_on_ack(struct r2_conn *c, uint64_t cumulative, const struct r2_ack_range *ranges,
                   uint32_t n);
/* The receiver has fenced the path: what is missing goes back to the queue. */
void r2_send_fenced(struct r2_path *path, uint32_t gen);
/* Bytes of the message that bulk lanes may take now. */
uint64_t r2_send_waiting(const struct r2_req *r);
/* The connection's first message of which there are any, or NULL. */
const struct r2_req *r2_send_first_waiting(struct r2_conn *c);
/* So many more wait, or fewer: the connection is listed accordingly. */
void r2_send_more(struct r2_conn *c, uint64_t bytes);
/* The clear-to-send of that message, or NULL. */
const struct r2_cts_slot *r2_send_cts(const struct r2_conn *c, uint64_t seq);

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

/* ---- upcalls.c */
extern const struct r2_transport_events r2_engine_events;
#include "engine/message/buffered.h"
#include "engine/message/memory.h"   /* revoke.c, flush.c */
#include "engine/sched/pathweight.h" /* weights of paths */
#include "engine/sched/slow.h"       /* tail.c, greywatch.c */

static inline const char *r2_nic_name(int nic)
{
    return nic >= 0 && nic < r2_local.n ? r2_local.nics[nic].name : "?";
}

#include "engine/nic/nics.h"

#endif
