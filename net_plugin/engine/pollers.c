#define _GNU_SOURCE
#include "engine/pollers.h"

#include <pthread.h>
#include <sched.h>

#include "engine/internal.h"
#include "engine/pause.h"
#include "engine/sharing.h"

#define OF_NCCL 2                   /* cores of a process, see pollers.h */
#define FRESH_NS (5 * R2_NS_PER_MS) /* a look is good for so long */
#define LOOK_NS (UINT64_C(2000) * R2_NS_PER_MS)

int r2_pollers(int part)
{
    return part > OF_NCCL ? part - OF_NCCL : 0;
}

static void neighbour(void *arg, int pid)
{
    cpu_set_t set;
    bool known = pid > 0 && !sched_getaffinity(pid, sizeof(set), &set);

    r2_sharing_add(arg, known ? &set : NULL);
}

void r2_pollers_look(void)
{
    static pthread_mutex_t at_it = PTHREAD_MUTEX_INITIALIZER;
    static struct r2_sharing s; /* this and the next: who is at it */
    static uint64_t looked;
    uint64_t now = r2_now_ns();

    if (pthread_mutex_trylock(&at_it))
        return;
    if (!looked || now - looked >= FRESH_NS) {
        looked = now;
        r2_sharing_start(&s);
        r2_control_neighbours(r2_eng.ctl, neighbour, &s);
        r2_pause_let(r2_pollers(r2_sharing_part(&s)));
        if (r2_eng.set->io_threads <= 0)
            r2_io_use(r2_pollers(r2_sharing_part(&s)));
    }
    pthread_mutex_unlock(&at_it);
}

void r2_pollers_house(uint64_t now)
{
    static uint64_t next; /* the house timer's thread only */
    static unsigned looks;

    if (now < next)
        return;
    next = now + (looks < 10 ? LOOK_NS / 100 : looks < 30 ? LOOK_NS / 20 : LOOK_NS);
    looks++; /* ranks of a node start together */
    r2_pollers_look();
}
