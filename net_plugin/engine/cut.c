#include "engine/cut.h"

#include "engine/internal.h"

/* What one core surely moves, bytes/s: a slower NIC is no sooner done with many chunks at once. */
#define CORE_RATE UINT64_C(1500000000)
#define STEP (16 * 1024)
/* With fewer threads cores are few, and NCCL's wants one of them; where they are many, little
 * traffic keeps to few lanes. */
#define FEW_THREADS 4

uint32_t r2_cut_max(void)
{
    return (uint32_t)(r2_eng.set->chunk & ~UINT64_C(127));
}

/* Threads that could carry a part now, of paths that are asked first for what waits (`nics`, a bit
 * each); 0: one is as good as several. */
static unsigned threads_for(const struct r2_peer *p, uint32_t nics)
{
    uint64_t mask = 0;
    bool idle = false;

    for (int i = 0; i < p->n_paths; i++) {
        const struct r2_path *path = p->paths[i];

        if (path->transport == R2_VIA_TCP && nics >> path->lnic & 1 && r2_path_usable(path) &&
            r2_pathrate_rate(&path->rate) >= CORE_RATE)
            mask |= r2_eng.ops->threads(path->ep, &idle);
    }
    return idle ? (unsigned)__builtin_popcountll(mask) : 0;
}

uint32_t r2_cut(const struct r2_peer *p)
{
    uint64_t least = r2_eng.set->split & ~UINT64_C(127), most = r2_cut_max(), load = 0, len;
    unsigned used = (unsigned)r2_io_used(), threads;
    const struct r2_list *n;
    uint32_t nics = 0;

    if (least < STEP)
        least = STEP;
    if (!r2_eng.set->split || least >= most || !r2_eng.ops->threads || used < FEW_THREADS ||
        used > R2_MANY_THREADS)
        return (uint32_t)most;
    for (int i = 0; i < p->n_paths; i++) {
        if (r2_path_usable(p->paths[i]))
            load += r2_pathrate_inflight(&p->paths[i]->rate);
    }
    R2_LIST_FOR_EACH (n, &p->ready) {
        const struct r2_conn *c = R2_CONTAINER_OF(n, struct r2_conn, ready);
        int stays = r2_conn_stays(c);

        nics |= stays >= 0              ? UINT32_C(1) << stays
                : r2_conn_home_alive(c) ? UINT32_C(1) << c->home
                                        : UINT32_MAX; /* at_home (pull.c): any takes it */
        load += c->waiting;
        if (load >= most * used)
            return (uint32_t)most;
    }
    threads = threads_for(p, nics);
    if (threads < 2)
        return (uint32_t)most;
    len = (load / threads + STEP - 1) / STEP * STEP;
    return (uint32_t)(len < least ? least : len > most ? most : len);
}
