/* Hosts that refuse a peer's paths: noted here, judged in loop/liveness.c. Under the peer's lock.
 */
#include <string.h>

#include "engine/path/path.h"

void r2_peer_refused(struct r2_peer *p, int lnic, int rnic, uint64_t now)
{
    struct r2_liveness *a = &p->liveness;

    if (p->n_up || !r2_pair_speaks(p, lnic, rnic))
        return;
    if (!a->refused_from || now - a->refused_at > R2_REFUSAL_STALE_NS) {
        a->refused_from = now;
        memset(a->nic_refused_from, 0, sizeof(a->nic_refused_from));
    }
    if (!a->nic_refused_from[rnic])
        a->nic_refused_from[rnic] = now;
    a->refused_at = a->nic_refused_at[rnic] = now;
    a->taken_at[rnic] = 0;
}

void r2_peer_answers(struct r2_peer *p)
{
    p->liveness.refused_from = 0;
    memset(p->liveness.taken_at, 0, sizeof(p->liveness.taken_at));
    R2_FOR_EACH_PATH (path, p)
        path->attempt.refused_from = 0;
}
