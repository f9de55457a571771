/* Which NICs peers that all NICs reach leave to the others. Pure.
 *
 * A peer that has lost NICs is reached over the rest alone. If its bytes need all of the time of
 * these NICs, each chunk for another peer there delays it. Peers that all NICs reach have others.
 *
 * Bytes for peers with few NICs are dealt out over these, by speed. Then those for peers with all
 * NICs come where the least is to be done. A NIC that gets next to nothing of them is left.
 *
 * Units: bytes; speeds in any unit, all the same. Nothing to free; no function fails. */
#ifndef R2_ENGINE_CORE_LEAVE_H
#define R2_ENGINE_CORE_LEAVE_H

#include <stdint.h>

#define R2_LEAVE_NICS 16

struct r2_leave {
    unsigned speed[R2_LEAVE_NICS]; /* of each NIC, above 0 */
    uint32_t all;                  /* bits: NICs that reach some peer */
    double bytes;                  /* for peers that all of these reach */
    double load[R2_LEAVE_NICS];    /* bytes for other peers, by NIC */
};

/* Adds `bytes` for a peer that these NICs reach, one at least. */
void r2_leave_add(struct r2_leave *l, uint32_t nics, uint64_t bytes);

/* NICs that peers which all NICs reach leave, as bits. */
uint32_t r2_leave_nics(const struct r2_leave *l);

#endif
