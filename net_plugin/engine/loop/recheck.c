/* A second look at what was left to I/O threads that may have no core, or too much to do: bulk
 * lanes that were asked for what waits, frames that a control socket's thread was to send. A thread
 * that polls for a message, of whatever peer, does so once they have had 300 us or so. What nobody
 * polls for is left to the peer's tick. So are test chunks, copies, what a full socket holds up,
 * and all that queue pairs are asked for but frames. Not where one thread does all. */
#define _GNU_SOURCE
#include "engine/loop/loop.h"
#include "util/lock.h"

#define AGAIN_NS (20 * R2_NS_PER_US) /* the peer's lock was taken */
#define SCAN_NS (100 * R2_NS_PER_US) /* between two walks over all peers, which may be many */
#define MOST 8                       /* peers at once */

/* Each with a reference, no more than MOST, those first that were not reached the last time. Says
 * to the engine when others are due. Under its lock. */
static int due_peers(uint64_t now, struct r2_peer **out)
{
    static unsigned from; /* peers of the list, its length may have changed */
    unsigned i, ended = 0;
    uint64_t next = 0;
    int n = 0;

    for (int pass = 0; pass < 2; pass++) {
        i = 0;
        R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
            unsigned long at = atomic_load(&p->recheck_at);

            if ((i++ < from) == !pass || !at)
                continue;
            if (at <= now && n < MOST) {
                r2_peer_get(p);
                out[n++] = p;
                ended = i;
            } else if (!next || at < next) {
                next = at;
            }
        }
    }
    from = n == MOST ? ended : 0;
    if (next)
        r2_recheck_by(next < now + SCAN_NS ? now + SCAN_NS : next);
    if (n) /* for the case that the caller does not come to them all */
        r2_recheck_by(now + R2_RECHECK_NS);
    return n;
}

/* False: somebody has its lock, and may have lost its core. */
static bool look_at_peer(struct r2_peer *p)
{
    if (pthread_mutex_trylock(&p->lock))
        return false;
    atomic_store_explicit(&p->recheck_at, 0, memory_order_relaxed);
    r2_peer_kick(p);
    if (r2_eng.set->help_progress)
        r2_out_again(p);
    r2_peer_unlock_soon(p); /* left once more only to a thread that has come round */
    return true;
}

void r2_recheck(void)
{
    /* Relaxed: who misses it, or a lock, asks again soon. */
    unsigned long at = atomic_load_explicit(&r2_eng.recheck_at, memory_order_relaxed);
    struct r2_peer *due[MOST];
    uint64_t now;
    int n;

    if (!at || (now = r2_now_ns()) < at)
        return;
    R2_UNCANCELLED;
    if (pthread_mutex_trylock(&r2_eng.lock))
        return;
    atomic_store(&r2_eng.recheck_at, 0);
    n = due_peers(now, due);
    pthread_mutex_unlock(&r2_eng.lock);
    for (int i = 0; i < n; i++) {
        if (!look_at_peer(due[i]))
            r2_recheck_by(now + AGAIN_NS);
        r2_peer_put(due[i]);
    }
}
