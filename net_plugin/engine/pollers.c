#define _GNU_SOURCE
#include "engine/pollers.h"

#include <sched.h>
#include <unistd.h>

#include "engine/internal.h"
#include "engine/pause.h"

#define OF_NCCL 2                    /* cores of a process, see pollers.h */
#define SOON_NS (100 * R2_NS_PER_MS) /* ranks of a node start together */
#define LOOK_NS (UINT64_C(2000) * R2_NS_PER_MS)

int r2_pollers(int cores, int processes)
{
    int part = cores / (processes < 1 ? 1 : processes) - OF_NCCL;

    return part < 0 ? 0 : part;
}

int r2_pollers_cores(void)
{
    cpu_set_t set;

    if (sched_getaffinity(getpid(), sizeof(set), &set) && /* it may have ended */
        sched_getaffinity(0, sizeof(set), &set))
        return 1;
    return CPU_COUNT(&set);
}

void r2_pollers_house(uint64_t now)
{
    static uint64_t next; /* the house timer's thread only */
    static unsigned looks;

    if (now < next)
        return;
    next = now + (looks++ < 20 ? SOON_NS : LOOK_NS);
    r2_pause_let(r2_pollers(r2_pollers_cores(), 1 + r2_control_neighbours(r2_eng.ctl)));
}
