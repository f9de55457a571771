/* Whether slow NICs are what is waited for, which makes I/O threads sleep (pause.h) and NCCL's
 * stand in for them (standin.h). Under the peer's lock, but for those that say so. */
#ifndef R2_ENGINE_SCHED_SLOWNICS_H
#define R2_ENGINE_SCHED_SLOWNICS_H

#include <stdbool.h>

struct r2_bulk;
struct r2_path;
struct r2_peer;

/* S: the path has no room for what waits. */
void r2_slownics_full(struct r2_path *path);
/* S: the path has taken a chunk; marks it for the receiver (R2_BULK_LIMITED). */
void r2_slownics_taken(struct r2_path *path, struct r2_bulk *bulk);

#endif
