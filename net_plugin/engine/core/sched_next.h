/* Which path takes the next chunk. Pure: what is measured comes in as arguments.
 *
 * Paths pull. r2_sched_order says which ones are asked first, r2_sched_next whether the path that
 * asks takes the chunk or leaves it to another one.
 *
 * Units: bytes, bytes per second, nanoseconds. Plain structs, nothing to free. No function fails.
 */
#ifndef R2_ENGINE_CORE_SCHED_NEXT_H
#define R2_ENGINE_CORE_SCHED_NEXT_H

#include <stdbool.h>
#include <stdint.h>

#define R2_SCHED_MAX 128 /* paths */

/* One path, as it is now. */
struct r2_sched_path {
    uint64_t rate;         /* 0: nothing is known yet */
    uint64_t inflight;     /* not acknowledged */
    uint64_t srtt;         /* how long its chunks take; 0: none was sent yet */
    unsigned distance;     /* of its NIC from the connection's home NIC */
    uint64_t nic_inflight; /* the same of all paths of its NIC, to any peer */
    uint64_t nic_rate;     /* their rates together */
    unsigned nic_paths;    /* of its NIC, to all peers, that answer; this one included */
    uint32_t chunk;        /* the most that it takes at once */
    bool takes;            /* it has room, or will have: something is in flight */
    bool left;             /* its NIC is left to other peers (core/leave.h) */
};

/* What waits to be sent. */
struct r2_sched_bytes {
    uint64_t waiting;
    bool any_nic; /* no NIC is the first choice for them */
    bool trial;   /* who asks has to show what it can do: it leaves nothing to faster ones */
};

/* When the path would be done with `len` more bytes, in ns from now; 0 while nothing is known. */
uint64_t r2_sched_done(const struct r2_sched_path *path, uint64_t len);

/* The order in which `n` paths with room are asked: paths without a rate, then by the time when
 * they are done with what they have, then the nearest. Writes indices. */
void r2_sched_order(const struct r2_sched_path paths[], int n, uint16_t order[]);

/* paths[0] asks for a chunk; all `n` may take it. Returns who takes it, an index.
 *
 * A slow path must not hold a message back. It leaves the last chunks to faster paths if two things
 * hold. These together would have sent all that waits before it had sent one chunk. One of them is
 * done with a chunk in half its time. So the path that is done soonest never declines. The time is
 * that of the path's own bytes at its rate. For bytes for any NIC it is at most the longer of two:
 * what the NIC needs for all of its bytes, and what the path's chunks took lately.
 *
 * Bytes for any NIC go to the path with the least ahead of them, of those that would leave them to
 * nobody faster. A NIC that is left to other peers gets none while it has bytes of theirs in
 * flight. The path with the least may have no room now. Then they wait until something that it has
 * in flight is acknowledged: on another NIC they would delay peers that have no other one. So the
 * path with the least ahead never declines for that reason. */
int r2_sched_next(const struct r2_sched_path paths[], int n, const struct r2_sched_bytes *bytes);

/* What is ahead of a chunk that any NIC may take. If it goes to the path with the least, a NIC that
 * some peers have no other of leaves its time to them. Of NICs with unlike rates each has about as
 * much in flight.
 *
 * It waits at both ends. At the own NIC it waits for all that this one has in flight. At the peer's
 * it waits for what comes from here, and for about as much from every other node that uses it. */
uint64_t r2_sched_ahead(const struct r2_sched_path *path);

#endif
