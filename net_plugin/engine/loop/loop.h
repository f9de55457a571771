/* The peer's task and timer, upcalls, dispatch of frames, time-outs. */
#ifndef R2_ENGINE_LOOP_LOOP_H
#define R2_ENGINE_LOOP_LOOP_H

#include "engine/locate/locate.h"

/* ---- engine.c */
int r2_engine_start(void); /* threads, listeners, control; once */

/* ---- peershow.c: what operators see of a peer; what stderr hears, once. Under the lock. */
void r2_peer_show(struct r2_peer *p, uint64_t now);
void r2_peer_tell_gone(const struct r2_peer *p, const char *cause);

/* ---- housekeeping.c */
void r2_housekeeping_start(void);

/* ---- maintain.c: the peer's task and timer */
void r2_peer_task(struct r2_task *t);
extern const struct r2_upper r2_loop_upper;

/* ---- liveness.c: whether a peer's process still exists, when no path leads to it any more; what
 * refusals say, and the questions of the accepting side, which makes no attempts. Under the lock.
 */
/* The peer's process does not exist any more (err -ECONNRESET), or no path came back
 * (-ETIMEDOUT): its connections fail. Under the lock. */
void r2_peer_gone(struct r2_peer *p, int err, const char *cause);
/* With no path up: ends the peer (r2_peer_gone) if what was refused proves that its process is. */
void r2_peer_judge_refusals(struct r2_peer *p, uint64_t now);
/* R: gives questions up that had their time; with no path left asks the next one. */
void r2_peer_ask(struct r2_peer *p, uint64_t now);
/* R: a question is over, unless it was given up before. */
void r2_peer_asked(struct r2_peer *p, struct r2_ep *ep, int err, const struct r2_ep_health *h);
/* Its process has answered, to an attempt or question that began at `asked`, that it has given this
 * one up: ends the peer, if that is about the connections there are. */
void r2_peer_given_up(struct r2_peer *p, uint64_t asked);
/* Whether this NIC is worth an attempt or a question. FAILED: probing goes on. The last one is
 * never damped. */
bool r2_peer_may_try(const struct r2_peer *p, int lnic);
/* R: questions are out. */
bool r2_peer_is_asking(const struct r2_peer *p);
/* The last reference is gone. */
void r2_liveness_free(struct r2_liveness *a);

/* ---- recheck.c */
/* By a caller that polls, without locks. A peer whose lock is taken is left for later. */
void r2_recheck(void);

/* ---- dispatch.c */
int r2_up_ctrl(void *owner, struct r2_ep *ep, uint8_t type, const uint8_t *body, size_t len);
/* Under the lock: its NIC is there now, as it says without a path. */
void r2_peer_moved(struct r2_peer *p, int nic, const struct r2_wire_addr *addr);

/* ---- upcalls.c */
extern const struct r2_transport_events r2_engine_events;

#endif
