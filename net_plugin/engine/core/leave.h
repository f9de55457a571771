/* Which NICs the bytes for healthy peers leave to peers that have lost NICs. Pure.
 *
 * A peer that has lost NICs is reached over the rest. If its bytes need all of the time of these
 * NICs, each chunk for another peer there delays it. A healthy peer is reached over other NICs,
 * too.
 *
 * The bytes for peers that have lost NICs are divided among the NICs that reach them, by speed.
 * Then the bytes for healthy peers go to the NICs that have the least to do. A NIC that would get
 * next to nothing of these is left.
 *
 * Units: bytes; speeds in any unit, all the same. Nothing to free; no function fails. */
#ifndef R2_ENGINE_CORE_LEAVE_H
#define R2_ENGINE_CORE_LEAVE_H

#include <stdint.h>

#define R2_LEAVE_NICS 16

struct r2_leave {
    unsigned speed[R2_LEAVE_NICS]; /* of each NIC, above 0 */
    uint32_t all;                  /* bits: NICs that reach some peer; all reach healthy ones */
    double bytes;                  /* for healthy peers */
    double load[R2_LEAVE_NICS];    /* bytes for other peers, by NIC */
};

/* Adds `bytes` for a peer that these NICs reach, one at least. */
void r2_leave_add(struct r2_leave *l, uint32_t nics, uint64_t bytes);

/* NICs that the bytes for healthy peers leave, as bits. */
uint32_t r2_leave_nics(const struct r2_leave *l);

#endif
