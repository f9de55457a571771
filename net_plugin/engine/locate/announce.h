/* Who tells the others about a broken NIC of another node. Pure.
 *
 * Everybody who lost a path to the NIC finds out at about the same time, and if each told all its
 * peers, n processes would say n x n times the same. So whoever has many peers waits for a random
 * time that grows with their number, and says nothing if it has heard it meanwhile (suppression, as
 * of group reports in IGMPv2, RFC 2236). Expected: some processes tell, whatever n is. A hint that
 * nobody gives is no loss of correctness: each finds out by itself.
 *
 * Units: nanoseconds. Threads: one at a time. No function fails.
 */
#ifndef R2_ENGINE_LOCATE_ANNOUNCE_H
#define R2_ENGINE_LOCATE_ANNOUNCE_H

#include <stdbool.h>
#include <stdint.h>

#include "oob/wire.h"

#define R2_TELLS 8
#define R2_TELL_FEW 8 /* with so few peers everybody tells: in a ring nobody else tells them */

struct r2_tell {
    struct r2_msg_verdict m;
    uint64_t due; /* 0: free */
};

struct r2_tells {
    struct r2_tell pending[R2_TELLS];
    struct {
        struct r2_wire_addr nic;
        uint64_t at;
    } heard[R2_TELLS];
    unsigned next_heard;
};

/* There is something to tell to `peers` peers. `random`: any number. */
void r2_tells_add(struct r2_tells *t, const struct r2_msg_verdict *m, int peers, uint64_t random,
                  uint64_t now);
/* Another process has said it. */
void r2_tells_heard(struct r2_tells *t, const struct r2_wire_addr *nic, int peers, uint64_t now);
/* What is to be told now: true, once for each. */
bool r2_tells_due(struct r2_tells *t, struct r2_msg_verdict *out, uint64_t now);

#endif
