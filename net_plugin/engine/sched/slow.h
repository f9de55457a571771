/* Slow and lossy paths, and the chunks that they hold back. Included by internal.h; all under the
 * peer's lock. */
#ifndef R2_ENGINE_SCHED_SLOW_H
#define R2_ENGINE_SCHED_SLOW_H

/* ---- tail.c: chunks that a slow path holds back, sent again */
/* A chunk for a path that has nothing else to send; false: none. */
bool r2_tail_take(struct r2_path *path, struct r2_bulk *bulk);
/* Something may be held back now, so that paths with room should ask for copies. */
bool r2_tail_waits(const struct r2_peer *p, uint64_t now);
/* Asks a faster path to look, if one holds something back. */
void r2_tail_poll(struct r2_peer *p, uint64_t now);
/* Bytes that were sent twice have arrived. */
void r2_tail_acked(struct r2_path *path, const struct r2_send_report *rep, uint64_t now);

/* ---- greywatch.c: slow and lossy paths */
void r2_peer_watch_grey(struct r2_peer *p, uint64_t now);

#endif
