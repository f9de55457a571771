#include "engine/cut.h"

#include "engine/internal.h"

/* What one core surely moves, bytes/s: a slower NIC is no sooner done with many chunks at once. */
#define CORE_RATE UINT64_C(1500000000)
#define STEP (16 * 1024)
/* With fewer threads cores are few, and NCCL's wants one of them. */
#define FEW_THREADS 4

uint32_t r2_cut_max(void)
{
    return (uint32_t)(r2_eng.set->chunk & ~UINT64_C(127));
}

/* Threads that could carry a part now; 0: one is as good as several. `*load`: bytes under way. */
static unsigned threads_for(const struct r2_peer *p, uint64_t *load)
{
    uint64_t mask = 0;
    bool idle = false;

    for (int i = 0; i < p->n_paths; i++) {
        const struct r2_path *path = p->paths[i];

        if (path->transport != R2_VIA_TCP || !r2_path_usable(path))
            continue;
        *load += r2_pathrate_inflight(&path->rate);
        if (r2_pathrate_rate(&path->rate) >= CORE_RATE)
            mask |= r2_eng.ops->threads(path->ep, &idle);
    }
    return idle ? (unsigned)__builtin_popcountll(mask) : 0;
}

uint32_t r2_cut(const struct r2_peer *p)
{
    uint64_t least = r2_eng.set->split & ~UINT64_C(127), most = r2_cut_max(), load = 0, len;
    const struct r2_list *n;
    unsigned threads;

    if (!r2_eng.set->split || least >= most || !r2_eng.ops->threads || r2_io_used() < FEW_THREADS)
        return (uint32_t)most;
    threads = threads_for(p, &load);
    if (!threads)
        return (uint32_t)most;
    R2_LIST_FOR_EACH (n, &p->ready) {
        load += R2_CONTAINER_OF(n, struct r2_conn, ready)->waiting;
        if (load >= most * threads)
            return (uint32_t)most;
    }
    len = (load / threads + STEP - 1) / STEP * STEP;
    return (uint32_t)(len < least ? least : len > most ? most : len);
}
