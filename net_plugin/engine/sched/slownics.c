#include "engine/sched/slownics.h"

#include "engine/internal.h"
#include "io/pause.h"
#include "io/standin.h"

#define SLOW_RATE UINT64_C(600000000) /* bytes/s of one NIC: its window holds 2 ms at least */
#define SLOW_SUM UINT64_C(1500000000) /* ... of all of a peer: NCCL's thread can carry that */
#define FAST_MBPS 20000 /* a NIC that is known to be so fast is not what is waited for */

/* Queue pairs are their threads' own, but for their events. */
static bool is_slow(const struct r2_path *path)
{
    uint64_t rate = r2_pathrate_rate(&path->rate);

    return path->transport == R2_VIA_TCP && rate && rate < SLOW_RATE && !path->rate.startup;
}

static bool known_fast(const struct r2_path *path)
{
    const struct r2_nic *nic = r2_local_nic(path->lnic);

    return nic && nic->speed_known && nic->speed_mbps >= FAST_MBPS;
}

/* Whether NICs are what the path's peer waits for: this one is slow, and so are all others. What
 * comes next then comes when they have sent what they have. One among fast ones is not waited for.
 */
static bool nics_limit(const struct r2_path *path)
{
    const struct r2_peer *p = path->peer;
    uint64_t sum = 0;

    if (!is_slow(path) || path->rate.probing_rtt || !r2_pathrate_inflight(&path->rate) ||
        known_fast(path))
        return false;
    for (int i = 0; i < p->n_paths; i++) {
        if (!r2_path_usable(p->paths[i]))
            continue;
        if (!is_slow(p->paths[i]))
            return false;
        sum += r2_pathrate_rate(&p->paths[i]->rate);
    }
    return sum < SLOW_SUM;
}

/* Nobody stands in where NCCL's threads may not help: threads had better poll. */
static void limit(struct r2_peer *p, uint64_t bytes)
{
    uint64_t now = r2_now_ns();

    if (!r2_eng.set->help_progress)
        return;
    /* Relaxed: a time that orders nothing. */
    atomic_store_explicit(&p->limited_until, now + R2_LIMITED_NS, memory_order_relaxed);
    r2_standin_limit(now, bytes);
}

void r2_slownics_full(struct r2_path *path)
{
    path->limits = path->owes_until <= r2_now_ns() && nics_limit(path);
    if (path->limits)
        limit(path->peer, 0);
}

void r2_slownics_taken(struct r2_path *path, struct r2_bulk *bulk)
{
    path->limits = path->limits && nics_limit(path); /* it may have become faster, or another one */
    if (!path->limits)
        return;
    bulk->flags |= R2_BULK_LIMITED;
    limit(path->peer, bulk->len);
}

void r2_slownics_marked(struct r2_path *path, const struct r2_bulk *bulk)
{
    if (!known_fast(path))
        limit(path->peer, bulk->len);
}

bool r2_slownics_of(const struct r2_peer *p)
{
    return r2_now_ns() < atomic_load_explicit(&p->limited_until, memory_order_relaxed);
}
