/* That slow NICs are what is waited for: noted, and asked. */
#include "engine/path/path.h"
#include "io/pause.h"
#include "io/standin.h"

#define FAST_MBPS 20000 /* a NIC that is known to be so fast is not what is waited for */

bool r2_limited_never(const struct r2_path *path)
{
    const struct r2_nic *nic = r2_local_nic(path->lnic);

    return nic && nic->speed_known && nic->speed_mbps >= FAST_MBPS;
}

/* Nobody stands in where NCCL's threads may not help: threads had better poll. */
void r2_limited_note(struct r2_peer *p, uint64_t bytes)
{
    uint64_t now = r2_peer_now(p);

    if (!r2_eng.set->help_progress)
        return;
    /* Relaxed: a time that orders nothing. */
    atomic_store_explicit(&p->limited_until, now + R2_LIMITED_NS, memory_order_relaxed);
    r2_standin_limit(now, bytes);
}

void r2_limited_marked(struct r2_path *path, const struct r2_bulk *bulk)
{
    if (!r2_limited_never(path))
        r2_limited_note(path->peer, bulk->len);
}

bool r2_limited_now(const struct r2_peer *p, uint64_t now)
{
    return now < atomic_load_explicit(&p->limited_until, memory_order_relaxed);
}
