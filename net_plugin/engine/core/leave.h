/* Which NICs a peer's bytes leave to those of other peers. Pure.
 *
 * A peer that has lost NICs is reached over the others alone. If its bytes need all of the time of
 * these, each chunk for somebody else there delays it, and that one has other NICs.
 *
 * Bytes are dealt out so that the NIC with the most has as few as possible: those for peers with
 * few NICs first, those for peers with the same NICs together. A peer leaves the NICs that get next
 * to nothing of its bytes.
 *
 * Units: bytes; speeds in any unit, all the same. Nothing to free; no function fails. */
#ifndef R2_ENGINE_CORE_LEAVE_H
#define R2_ENGINE_CORE_LEAVE_H

#include <stdint.h>

#define R2_LEAVE_NICS 16
#define R2_LEAVE_PEERS 64

struct r2_leave_peer {
    uint64_t bytes;  /* sent to it lately */
    uint32_t nics;   /* bits: NICs that it is reached over */
    uint32_t leaves; /* out: those of them that it leaves, never all */
};

/* At most R2_LEAVE_PEERS peers. speed: of each NIC, above 0. */
void r2_leave_decide(struct r2_leave_peer peers[], int n, const unsigned speed[R2_LEAVE_NICS]);

#endif
