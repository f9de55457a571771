/* Paths: made, tested, watched, and the frames that leave on them. */
#ifndef R2_ENGINE_PATH_PATH_H
#define R2_ENGINE_PATH_PATH_H

#include "engine/peer/peer.h"

/* ---- path.c: paths are made and tried, and what time does to them; all under the lock */
void r2_peer_account(struct r2_peer *p, int delta); /* requests in flight */
struct r2_path *r2_path_obtain(struct r2_peer *p, int lnic, int rnic, int transport);
void r2_path_free(struct r2_path *path);
/* Before the path gets an endpoint. False: no memory. */
bool r2_path_end_memory(struct r2_path *path);
/* What a host answers from that NIC of the peer's comes from there: the two NICs have met, and the
 * peer's is not down, so no other one of the host stands in for it. */
static inline bool r2_pair_speaks(const struct r2_peer *p, int lnic, int rnic)
{
    return (p->reached[lnic] >> rnic & 1) && p->rnics[rnic].word != R2_NIC_DOWN &&
           p->rnics[rnic].word != R2_NIC_FAILED;
}
void r2_path_up(struct r2_path *path);
/* The peer's kernel has taken the attempt that is under way, and its process has not answered yet.
 */
static inline bool r2_path_is_taken(const struct r2_path *path)
{
    return path->state == R2_PATH_CONNECTING && path->ep && r2_eng.ops->reached(path->ep);
}
/* After each change of what the path has in flight: its NIC's sums follow. */
void r2_path_tell_inflight(struct r2_path *path);
/* The most that it may carry now. */
enum r2_path_may r2_path_may(const struct r2_path *path);
/* Its round trips take far longer than another's: no frames if it can be helped. */
static inline bool r2_path_high_rtt(const struct r2_path *path)
{
    return path->hb.rtt_ns > path->peer->rtt_most;
}
/* It is up, and carries whatever memory may be taken. */
bool r2_path_suffices(const struct r2_path *path);
int r2_path_connect(struct r2_path *path, uint64_t now); /* S: one attempt */
/* Time passes: ramps end, drained paths are let go, tests run out. */
void r2_path_tick(struct r2_path *path, uint64_t now);
/* A NIC of this side or the other was drained, or given back. */
void r2_path_follow(struct r2_path *path);
/* Another path to its peer is up, or tried. */
bool r2_path_has_others(const struct r2_path *path);
void r2_path_refused(struct r2_path *path, bool yes); /* S: how it has ended */
/* The path that control frames of a connection take: the preferred one while it lives, else any
 * that answers; NULL when none is up. */
struct r2_path *r2_path_for_ctrl(struct r2_peer *p, int home, int remote_home);

/* ---- pathend.c: the end of a generation; all under the lock */
/* A generation is dead: hands its endpoint to the peer's task. Idempotent. */
void r2_path_fail(struct r2_path *path, uint32_t gen, int err, const char *cause);
/* Something is about to wait for the peer. If it is the first, the time that the peer has been out
 * of reach begins anew: nobody has waited. Under the lock. */
void r2_peer_waits(struct r2_peer *p, uint64_t now);
/* A path to the peer has proved itself and is up. */
bool r2_peer_served(const struct r2_peer *p);
/* An attempt between these NICs was refused, or another process answered. It counts with no path
 * up only, and where it can tell something about the process (r2_pair_speaks). */
void r2_peer_refused(struct r2_peer *p, int lnic, int rnic, uint64_t now);
/* The process has answered, if only that it wants no such path, or its NICs have changed: what was
 * refused before says nothing now. */
void r2_peer_answers(struct r2_peer *p);

/* ---- pathtest.c: test chunks; all under the lock */
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
/* It may carry job data from now on. */
void r2_path_proven(struct r2_path *path, const char *cause);
/* Time passes: more of the test is sent, or it has taken too long. */
void r2_path_test_tick(struct r2_path *path, uint64_t now);
/* S, with its heartbeats: whether a path that small packets have proved loses large ones alone, of
 * which the user is told, or packets of any size; then the next attempt is made with large ones. */
void r2_path_judge_packets(struct r2_path *path, const struct r2_ep_health *health);

/* ---- pathhealth.c: health of paths; all under the lock */
const char *r2_path_text(const struct r2_path *path, char *out, size_t cap);
void r2_path_journal(const struct r2_path *path, enum r2_seg_event event, uint64_t bytes,
                     uint64_t duration_ns, const char *cause);
/* As r2_control_journal_seldom. */
struct r2_ratelimit;
bool r2_path_journal_seldom(const struct r2_path *path, enum r2_seg_event event, const char *cause,
                            struct r2_ratelimit *kind, bool anyway);
/* Takes the event, and shows and journals what follows from it. True: something did. */
bool r2_path_event(struct r2_path *path, enum r2_health_event event, const char *cause);
void r2_path_show(struct r2_path *path, const char *cause);
/* Paths that are up in place of one of that transport, so that it may be left alone: of sockets
 * all, of queue pairs those that suffice. */
int r2_peer_left(const struct r2_peer *p, int transport);
/* A better pair of NICs serves, or not any more. Under the peer's lock. */
void r2_path_set_role(struct r2_path *path, enum r2_path_role role);
/* The journal's word that the path is up, once there is all to say it with. */
void r2_path_tell_up(struct r2_path *path);
/* Operator's word: past failures are forgotten. */
void r2_path_forgive(struct r2_path *path);
/* Heartbeats in a row without an answer: it is in doubt. */
#define R2_SUSPECT_BEATS 2
/* A connection that neither side has closed. */
bool r2_peer_has_open(const struct r2_peer *p);
/* What its paths say about each NIC. */
void r2_peer_census(struct r2_peer *p);
/* A path of it is wanted and does not answer, and the peer's NIC is not what is at fault. Locks
 * peers. */
bool r2_nic_asked_in_vain(int nic);
struct r2_damp_rules r2_damp_rules(void);
/* Both NICs are of this node, so its kernel hands the bytes over and no wire is
 * asked. Under the peer's lock. */
bool r2_path_wireless(const struct r2_path *path);

/* ---- pairs.c: which pairs of NICs may have a path, and by which transport. Under the lock; but
 * for r2_path_find only the connecting side (S) asks. No function fails. */
struct r2_path *r2_path_find(struct r2_peer *p, int lnic, int rnic, int transport);
/* Keeps of a local NIC's candidates, best first, those that there is room for; how many. */
int r2_pairs_keep(struct r2_peer *p, int lnic, int via, int *order, int n);
/* The peer's NICs that a transport can join to a local one, by rail, best first; how many. */
int r2_pairs_candidates(const struct r2_peer *p, int lnic, int transport, int *order);
/* Those, as bits, that a socket joins to it while queue pairs serve others. */
unsigned r2_pairs_beside(const struct r2_peer *p, int lnic);

/* Where a local NIC finds the peer's NIC: by an address of a family that it has, too, if there is
 * one. */
const struct r2_wire_addr *r2_pair_addr(const struct r2_peer *p, int lnic, int rnic);
/* The peer's NIC has an address of the local one's own subnet: what answers there is on its wire.
 */
bool r2_pair_on_link(const struct r2_peer *p, int lnic, int rnic);

/* ---- nicnews.c: what peers are told about this node's NICs; under the lock */
/* There is news about a NIC of ours: said at once, if a path is up, and until it is heard. */
void r2_nicnews_tell(struct r2_peer *p);
/* What is open, over the path: one was lost, and maybe words with it. */
void r2_nicnews_resync(struct r2_peer *p, struct r2_path *via);
/* Time passes: what is due is said again, over the paths that are up in turn. */
void r2_nicnews_repeat(struct r2_peer *p, uint64_t now);

/* An INFO of the peer's has come: it hears that it was heard, over the path that brought it unless
 * that has just ended by what it said. */
void r2_nicnews_heard(struct r2_path *path);
int r2_nicnews_on_heard(struct r2_path *path, const uint8_t *body);

/* ---- limited.c: slow NICs are what a peer waits for. Noted here by whoever finds it:
 * sched/slownics.c for what is sent, the sender's mark for what is received. Under the lock. */
/* The path's NIC is known to be so fast that nobody waits for it. */
bool r2_limited_never(const struct r2_path *path);
/* `bytes` of the peer's wait for slow NICs now. */
void r2_limited_note(struct r2_peer *p, uint64_t bytes);
/* R: a marked chunk (R2_BULK_LIMITED) has begun to come. */
void r2_limited_marked(struct r2_path *path, const struct r2_bulk *bulk);
/* The peer is one of those that are waited for: what it sends comes by sockets whose threads are
 * stood in for. A hint; any thread, no lock. */
bool r2_limited_now(const struct r2_peer *p, uint64_t now);

/* ---- pathgrey.c: what is measured of a path; under the lock */
void r2_grey_path_init(struct r2_path *path);
void r2_grey_path_up(struct r2_path *path);
void r2_grey_path_free(struct r2_path *path);
void r2_grey_acked(struct r2_path *path, const struct r2_send_report *rep, uint64_t now);
/* It takes chunks for trial soon again: it is slow, or its rate has fallen and nobody knows why. */
bool r2_grey_path_doubted(const struct r2_path *path);
/* What the judge leaves of its weight, per mille. */
void r2_grey_note(struct r2_path *path, unsigned permille);
/* Below this share of its siblings, per mille, it is far behind. */
#define R2_GREY_BEHIND 250u
/* What it carries beside its siblings (r2_grey_beside). */
void r2_grey_note_beside(struct r2_path *path, uint32_t beside);
/* The share, where at least half of the NIC's paths that tell are far behind, else 0. Any thread.
 */
uint32_t r2_grey_nic_behind(int nic);
/* Segments as its kernel has counted them: for the judge, for operators, and for its NIC. */
void r2_grey_path_segments(struct r2_path *path, const struct r2_ep_health *h, uint64_t now);
/* Paths of this node's NIC that are called so, and all that are watched. Any thread. */
void r2_grey_counts(int nic, int *grey, int *all);

/* ---- beats.c: heartbeats, and what their silence means; all under the lock */
void r2_peer_hb_intervals(struct r2_peer *p, bool busy, uint64_t now);
void r2_peer_hb_forget(struct r2_peer *p);
/* It answers: a heartbeat that was sent at `since` or later. */
bool r2_path_hb_answers(const struct r2_path *path, uint64_t since);
/* ns until a look that cannot wait for the next tick (r2_hb_next), of all its paths. */
uint64_t r2_peer_hb_next(struct r2_peer *p, uint64_t now);
/* Looks at the paths whose turn it is. Lets go of the lock meanwhile. `judge`: the observer was
 * awake, so an answer that is missing counts. */
void r2_peer_beat(struct r2_peer *p, uint64_t now, bool judge);
/* Its heartbeats are overdue for so long that it is dead, if another path answers. */
bool r2_path_is_silent(const struct r2_path *path);
void r2_peer_judge_silence(struct r2_peer *p, uint64_t now);

/* ---- outbox.c: control frames */
/* Appends a frame to the path's outbox and wants a flush. 0 or -ENOMEM (the path is failed). */
int r2_out_frame(struct r2_path *path, uint8_t type, const void *a, size_t a_len, const void *b,
                 size_t b_len);
/* What was appended last is in no hurry. It leaves with other frames, or at `until`, as
 * r2_peer_say_held finds. Whoever polls a request of the peer's calls that, and so does the peer's
 * tick. `before`: outbox.due before it was appended. */
void r2_out_hold(struct r2_path *path, uint64_t before, uint64_t until);
void r2_peer_say_held(struct r2_peer *p, uint64_t now);
/* Frames that no transport has taken yet are asked for again, on all paths; those that are held go
 * along. */
void r2_out_again(struct r2_peer *p);
size_t r2_up_next_ctrl(void *owner, struct r2_ep *ep, uint8_t *buf, size_t cap);
void r2_out_info(struct r2_path *path);
/* The peer does not read: what can be said later is. */
bool r2_out_full(const struct r2_path *path);

#endif
