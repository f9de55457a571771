#define _GNU_SOURCE
#include "engine/look.h"

#include "engine/internal.h"
#include "util/lock.h"

/* By then a lane that was relied on has come, or is relied on no more (AT_WORK_NS in bulk.c), and
 * so a thread (AT_HAND_NS in io.c). */
#define LOOK_NS (300 * R2_NS_PER_US)
#define AGAIN_NS (20 * R2_NS_PER_US) /* the peer's lock was taken */
#define MOST 8                       /* peers at once */

static void look_by(unsigned long at)
{
    unsigned long before = atomic_load(&r2_eng.look_at);

    while ((!before || at < before) && !atomic_compare_exchange_weak(&r2_eng.look_at, &before, at))
        ;
}

/* Here the peer's time is written before the engine's is read; who looks clears the engine's before
 * it reads the peers'. All seq_cst, so one of the two sees what the other has written. */
void r2_look_later(struct r2_peer *p, uint64_t now)
{
    if (atomic_load_explicit(&p->look_at, memory_order_relaxed) > now)
        return; /* written under the lock only */
    atomic_store(&p->look_at, now + LOOK_NS);
    look_by(now + LOOK_NS);
}

/* Each with a reference, no more than MOST; `*next`: when others are due, or 0. */
static int due_peers(uint64_t now, struct r2_peer **out, uint64_t *next)
{
    const struct r2_list *l;
    int n = 0;

    R2_LIST_FOR_EACH (l, &r2_eng.peers) {
        struct r2_peer *p = R2_CONTAINER_OF(l, struct r2_peer, node);
        unsigned long at = atomic_load(&p->look_at);

        if (at && at <= now && n < MOST) {
            r2_peer_get(p);
            out[n++] = p;
        } else if (at && (!*next || at < *next)) {
            *next = at;
        }
    }
    return n;
}

/* False: somebody has its lock, and may have lost its core. */
static bool look_at_peer(struct r2_peer *p)
{
    if (pthread_mutex_trylock(&p->lock))
        return false;
    atomic_store_explicit(&p->look_at, 0, memory_order_relaxed);
    r2_peer_kick(p);
    r2_out_again(p);
    r2_peer_unlock_soon(p); /* left once more only to a thread that has come round */
    return true;
}

void r2_look(void)
{
    /* Relaxed: who misses it, or a lock, asks again soon. */
    unsigned long at = atomic_load_explicit(&r2_eng.look_at, memory_order_relaxed);
    struct r2_peer *due[MOST];
    uint64_t now, next = 0;
    int n;

    if (!at || (now = r2_now_ns()) < at)
        return;
    R2_UNCANCELLED;
    if (pthread_mutex_trylock(&r2_eng.lock))
        return;
    atomic_store(&r2_eng.look_at, 0);
    n = due_peers(now, due, &next);
    pthread_mutex_unlock(&r2_eng.lock);
    for (int i = 0; i < n; i++) {
        if (!look_at_peer(due[i]) && (!next || next > now + AGAIN_NS))
            next = now + AGAIN_NS;
        r2_peer_put(due[i]);
    }
    if (next)
        look_by(next);
}
