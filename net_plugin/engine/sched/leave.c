/* Bytes for healthy peers leave NICs to peers that have lost some (core/leave.h), if any NIC may
 * take them. It is decided every 20 ms, on I/O thread 0, under the engine's lock. All that is read
 * and written of peers is a hint, so the order is relaxed. */
#include "engine/core/leave.h"
#include "engine/sched/sched.h"

_Static_assert(R2_MAX_NICS <= R2_LEAVE_NICS, "all NICs of the node");

static uint32_t nics_of(const struct r2_peer *p)
{
    return atomic_load_explicit(&p->leave.nics, memory_order_relaxed);
}

/* What was sent since the last look, to all of them. */
static uint64_t count_bytes(void)
{
    uint64_t moved = 0;

    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
        uint64_t now = atomic_load_explicit(&p->leave.bytes, memory_order_relaxed);

        moved += now - p->leave.seen;
        p->leave.lately += now - p->leave.seen;
        p->leave.seen = now;
    }
    return moved;
}

static void look(struct r2_leave *l)
{
    for (int i = 0; i < R2_LEAVE_NICS; i++)
        l->speed[i] =
            i < r2_local.n && r2_local.nics[i].weight > 0 ? (unsigned)r2_local.nics[i].weight : 1;
    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers)
        l->all |= nics_of(p);
    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
        uint32_t nics = nics_of(p);

        if (nics)
            r2_leave_add(l, nics, p->leave.lately);
        p->leave.lately /= 2;
    }
}

void r2_leave_tick(void)
{
    struct r2_leave l = {0};
    uint32_t leaves;

    if (pthread_mutex_trylock(&r2_eng.lock))
        return;          /* soon again */
    if (count_bytes()) { /* else it is between two operations: the next one is like the last */
        look(&l);
        leaves = l.all ? r2_leave_nics(&l) : 0;
        R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers)
            atomic_store_explicit(&p->leave.leaves, nics_of(p) == l.all ? leaves : 0,
                                  memory_order_relaxed);
    }
    pthread_mutex_unlock(&r2_eng.lock);
}
