/* Peers leave NICs to others that have no other ones (core/leave.h). It concerns bytes that any NIC
 * may take. Looked at every few milliseconds, on I/O thread 0. */
#include "engine/core/leave.h"
#include "engine/sched/sched.h"

_Static_assert(R2_MAX_NICS <= R2_LEAVE_NICS, "all NICs of the node");

/* Peers that got such bytes lately; with more than R2_LEAVE_PEERS nobody leaves anything. The
 * engine's lock is held. */
static int take_stock(struct r2_leave_peer seen[], struct r2_peer *of[], uint64_t *moved)
{
    int n = 0;

    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
        /* Relaxed: hints, each by itself. */
        uint64_t now = atomic_load_explicit(&p->leave.bytes, memory_order_relaxed);
        uint64_t new = now - p->leave.seen;

        p->leave.seen = now;
        p->leave.lately += new;
        *moved += new;
        if (!p->leave.lately || n == R2_LEAVE_PEERS)
            continue;
        seen[n] = (struct r2_leave_peer){
            .bytes = p->leave.lately,
            .nics = atomic_load_explicit(&p->leave.nics, memory_order_relaxed)};
        of[n] = p;
        n += seen[n].nics != 0;
    }
    return n;
}

static void decide(void)
{
    struct r2_leave_peer seen[R2_LEAVE_PEERS];
    struct r2_peer *of[R2_LEAVE_PEERS];
    unsigned speed[R2_LEAVE_NICS];
    uint64_t moved = 0;
    int n = take_stock(seen, of, &moved);

    if (!moved)
        return; /* between two operations: the next one is like the last */
    for (int i = 0; i < R2_LEAVE_NICS; i++)
        speed[i] =
            i < r2_local.n && r2_local.nics[i].weight > 0 ? (unsigned)r2_local.nics[i].weight : 1;
    r2_leave_decide(seen, n, speed);
    for (int i = 0; i < n; i++) {
        of[i]->leave.lately /= 2;
        atomic_store_explicit(&of[i]->leave.leaves, n < R2_LEAVE_PEERS ? seen[i].leaves : 0,
                              memory_order_relaxed);
    }
}

void r2_leave_tick(void)
{
    if (pthread_mutex_trylock(&r2_eng.lock))
        return; /* soon again */
    decide();
    pthread_mutex_unlock(&r2_eng.lock);
}
