/* The peer's task and timer, upcalls, dispatch of frames, time-outs. */
#ifndef R2_ENGINE_LOOP_LOOP_H
#define R2_ENGINE_LOOP_LOOP_H

#include "engine/locate/locate.h"

/* ---- engine.c */
int r2_engine_start(void); /* threads, listeners, control; once */

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
/* The task and the descriptor for the kernel's link events; before r2_niclink_start. */
struct r2_task *r2_housekeeping_links(void);
void r2_housekeeping_start(void);

/* ---- maintain.c: the peer's task and timer */
void r2_peer_task(struct r2_task *t);
void r2_peer_timer(struct r2_timer *t, uint64_t now);

/* ---- dispatch.c */
int r2_up_ctrl(void *owner, struct r2_ep *ep, uint8_t type, const uint8_t *body, size_t len);
/* Under the lock: its NIC is there now, as it says without a path. */
void r2_peer_moved(struct r2_peer *p, int nic, const struct r2_wire_addr *addr);

/* ---- upcalls.c */
extern const struct r2_transport_events r2_engine_events;

#endif
