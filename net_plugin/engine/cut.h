/* How small messages are cut so that several I/O threads carry one at once. Under the peer's lock.
 */
#ifndef R2_ENGINE_CUT_H
#define R2_ENGINE_CUT_H

#include <stdint.h>

struct r2_peer;

/* The longest chunk of any message: R2CCL_CHUNK. */
uint32_t r2_cut_max(void);
/* S: the longest one of what waits for the peer now, bytes: R2CCL_SPLIT to r2_cut_max(). Where
 * little waits and is under way it is an equal part for each thread that is awake; where the
 * threads have enough to do anyway, or one alone would outrun the NIC, a smaller chunk would only
 * cost. For sockets: queue pairs need no threads. */
uint32_t r2_cut(const struct r2_peer *p);

#endif
