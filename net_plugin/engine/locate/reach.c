/* Whether a NIC that nobody came over reaches those who send to this process (nicreach.c). */
#include <stdlib.h>
#include <string.h>

#include "engine/locate/round.h"

#define ASKED 4     /* processes, in turn */
#define AT_A_TIME 8 /* NICs: the other rounds are for what has failed */

/* One process of each node will do, but they are few and any may be asleep. */
static void add(struct r2_round *r, struct r2_peer *p)
{
    struct r2_wire_addr addr;
    char label[R2_WIRE_NAME];
    int rnic;

    r2_peer_lock(p);
    rnic = r2_nicreach_pair(p, r->lnic);
    if (rnic >= 0) {
        addr = p->rnics[rnic].addr;
        r2_locate_label(label, p->rnics[rnic].name, p->host);
    }
    r2_peer_leave(p);
    if (rnic >= 0)
        r2_target_add(r, r->lnic, &addr, rnic, p->id, label, false);
}

int r2_locate_reach(int nic, uint64_t now)
{
    struct r2_peer **peers;
    struct r2_round *r;
    int n, asked;

    if (!r2_eng.set->locate || r2_round_of(R2_ROUND_REACH, nic) ||
        r2_round_count(R2_ROUND_REACH) >= AT_A_TIME)
        return R2_REACH_UNKNOWN;
    r = r2_round_new(R2_ROUND_REACH, nic, now);
    if (!r)
        return R2_REACH_UNKNOWN;
    peers = r2_peer_all(&n);
    for (int i = 0; i < n; i++) {
        struct r2_peer *p = peers[(i + (int)(r->id % (uint64_t)n)) % n];

        if (r->n_targets < ASKED)
            add(r, p);
        r2_peer_put(p);
    }
    free(peers);
    asked = r->n_targets;
    if (!asked)
        r2_round_free(r, now);
    return asked;
}

/* A kernel that took the connection says that the way is there, and not that the process can use
 * it: no word either way. */
void r2_reach_conclude(struct r2_round *r)
{
    bool answered = false;
    int vain = 0;

    for (int i = 0; i < r->n_targets; i++) {
        enum r2_seen seen = r->targets[i].outcome;

        answered |= seen == R2_SEEN_ANSWERED;
        vain += seen == R2_SEEN_SILENT || seen == R2_SEEN_REFUSED || seen == R2_SEEN_NO_ROUTE;
    }
    r2_nicreach_asked(r->lnic, answered, vain);
}
