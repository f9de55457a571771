/* Peers leave NICs to others that have no other ones (core/leave.h). It concerns bytes that any NIC
 * may take. Looked at every few milliseconds, on I/O thread 0. */
#include "engine/core/leave.h"
#include "engine/sched/sched.h"

_Static_assert(R2_MAX_NICS <= R2_LEAVE_NICS, "all NICs of the node");

/* What was sent since the last look, to all of them. The engine's lock is held. */
static uint64_t count_bytes(void)
{
    uint64_t moved = 0;

    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
        /* Relaxed, here and below: hints, each by itself. */
        uint64_t now = atomic_load_explicit(&p->leave.bytes, memory_order_relaxed);

        moved += now - p->leave.seen;
        p->leave.lately += now - p->leave.seen;
        p->leave.seen = now;
    }
    return moved;
}

static void set_leaves(struct r2_peer *p, uint32_t nics)
{
    atomic_store_explicit(&p->leave.leaves, nics, memory_order_relaxed);
}

/* With more than R2_LEAVE_PEERS nobody leaves anything. */
static void decide(void)
{
    struct r2_leave_peer seen[R2_LEAVE_PEERS];
    struct r2_peer *of[R2_LEAVE_PEERS];
    unsigned speed[R2_LEAVE_NICS];
    int n = 0;

    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
        uint32_t nics = atomic_load_explicit(&p->leave.nics, memory_order_relaxed);

        set_leaves(p, 0);
        if (nics && p->leave.lately && n++ < R2_LEAVE_PEERS) {
            seen[n - 1] = (struct r2_leave_peer){.bytes = p->leave.lately, .nics = nics};
            of[n - 1] = p;
        }
        p->leave.lately /= 2;
    }
    if (n > R2_LEAVE_PEERS)
        return;
    for (int i = 0; i < R2_LEAVE_NICS; i++)
        speed[i] =
            i < r2_local.n && r2_local.nics[i].weight > 0 ? (unsigned)r2_local.nics[i].weight : 1;
    r2_leave_decide(seen, n, speed);
    for (int i = 0; i < n; i++)
        set_leaves(of[i], seen[i].leaves);
}

void r2_leave_tick(void)
{
    if (pthread_mutex_trylock(&r2_eng.lock))
        return;        /* soon again */
    if (count_bytes()) /* else it is between two operations: the next one is like the last */
        decide();
    pthread_mutex_unlock(&r2_eng.lock);
}
