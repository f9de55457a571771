/* Peers: references, lock. For all layers above.
 *
 * Locks: transport lane locks -> peer->lock -> leaf locks (r2_eng.lock, I/O threads, control).
 * peer->lock guards everything below the peer: paths, connections, requests, ledgers, outboxes.
 * Requests carry one atomic (`state`) so that r2_engine_test needs no lock.
 * No transport operation marked [locks] is called under peer->lock: frames are appended to a
 * path's outbox, and r2_peer_unlock flushes what was appended.
 */
#ifndef R2_ENGINE_PEER_PEER_H
#define R2_ENGINE_PEER_PEER_H

#include "engine/base/base.h"

/* ---- peer.c */
/* Finds or makes; with a reference. */
struct r2_peer *r2_peer_obtain(const uint8_t id[16], const uint8_t secret[16], bool out);
/* The same, NULL when there is none. */
struct r2_peer *r2_peer_find(const uint8_t id[16], bool out);
void r2_peer_get(struct r2_peer *p);
/* When what was left to I/O threads is looked at again (loop/recheck.c), after it was left. By then
 * a lane that was relied on has come, or is relied on no more (AT_WORK_NS in bulk.c). The same
 * holds for a thread (AT_HAND_NS in io.c). */
#define R2_RECHECK_NS (300 * R2_NS_PER_US)
/* A look is due at `at`, or earlier. Any thread, no lock. */
void r2_recheck_by(unsigned long at);
/* References to all peers, so that they can be locked without the engine's lock; NULL behind the
 * last. NULL: no memory. */
struct r2_peer **r2_peers_all(void);
void r2_peers_put(struct r2_peer ***all);
/* Each of them; the loop may be left at any place. */
#define R2_FOR_EACH_PEER(p)                                                                        \
    for (struct r2_peer * *p##_all __attribute__((cleanup(r2_peers_put))) = r2_peers_all(),        \
                                   **p##_at = p##_all, *p;                                         \
         p##_at && (p = *p##_at) != NULL; p##_at++)
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
/* "node1 pid 17 rank 3" for messages, as far as it is known. Under the lock. */
#define R2_PEER_WHO 112
const char *r2_peer_who(const struct r2_peer *p, char out[R2_PEER_WHO]);
/* Endpoints of the peer, living and dying, each with a reference. Under the lock. */
int r2_peer_eps(struct r2_peer *p, struct r2_ep **out, int max);

#endif
