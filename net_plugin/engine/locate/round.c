/* The table of rounds: how one begins and ends. */
#include <stddef.h>
#include <string.h>

#include "engine/locate/round.h"

struct r2_round r2_rounds[R2_ROUNDS];
struct r2_nodeseg *r2_locate_seg;

struct r2_round *r2_round_open(int lnic)
{
    R2_FOR_EACH_ROUND(r)
    {
        if (r->lnic == lnic && !r->closed)
            return r;
    }
    return NULL;
}

struct r2_round *r2_round_new(int lnic, uint64_t now)
{
    for (int i = 0; i < R2_ROUNDS; i++) {
        struct r2_round *r = &r2_rounds[i];

        if (r->phase != R2_PHASE_FREE)
            continue;
        memset(r, 0, offsetof(struct r2_round, ev));
        r2_evidence_init(&r->ev);
        r->phase = R2_PHASE_SETTLE;
        r->lnic = lnic;
        r->began = now;
        return r;
    }
    return NULL;
}

void r2_round_free(struct r2_round *r, uint64_t now)
{
    if (!r->closed)
        r2_targets_close(r, now);
    for (int i = 0; i < r->n_suspects; i++)
        r2_peer_put(r->suspects[i].peer);
    r->phase = R2_PHASE_FREE;
}
