/* Which path takes the next chunk; weights of paths, slow paths. */
#ifndef R2_ENGINE_SCHED_SCHED_H
#define R2_ENGINE_SCHED_SCHED_H

#include "engine/message/message.h"

/* ---- next_chunk.c: which chunk goes over which path */
bool r2_up_next_chunk(void *owner, struct r2_ep *ep, struct r2_bulk *bulk);
void r2_up_blocked(void *owner, struct r2_ep *ep);
void r2_up_chunk_sent(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk);
void r2_peer_kick(struct r2_peer *p); /* there is work for bulk lanes */

/* ---- slownics.c: whether slow NICs are what is waited for, which makes I/O threads sleep
 * (pause.h) and NCCL's stand in for them (standin.h); under the lock */
/* S: the path has no room for what waits. */
void r2_slownics_full(struct r2_path *path);
/* S: the path has taken a chunk; marks it for the receiver (R2_BULK_LIMITED). */
void r2_slownics_taken(struct r2_path *path, struct r2_bulk *bulk);

/* ---- leave.c: NICs that a peer's bytes leave to other peers' */
/* I/O thread 0, no lock held. */
void r2_leave_tick(void);

/* ---- pathweight.c: weights of paths; all under the lock */
/* Some path's weight or usability may have changed: weighs all of the peer's anew. */
void r2_peer_weigh(struct r2_peer *p);
/* The path is slow or lossy against its siblings: `permille` of its weight is shown (1000: all is
 * well again), which limits nothing. Journalled with the reason: call it when either changes. */
void r2_path_set_grey(struct r2_path *path, unsigned permille, const char *reason);

/* ---- greywatch.c: slow and lossy paths */
void r2_peer_watch_grey(struct r2_peer *p, uint64_t now);

#endif
