#include "engine/base/colls.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>

#include "engine/base/base.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf */
static int *mask;                                        /* NCCL's; NULL: it has none */
static int bits;
static unsigned left; /* slots in use; I/O thread 0 */

static bool is_on(void)
{
    return atomic_load_explicit(&r2_eng.colls.on, memory_order_relaxed);
}

/* NCCL reads it without a lock. Bits that others set there stay. */
static void set_mask(bool on)
{
    if (on)
        __atomic_fetch_or(mask, bits, __ATOMIC_RELAXED);
    else
        __atomic_fetch_and(mask, ~bits, __ATOMIC_RELAXED);
}

void r2_colls_switch(int *its_mask, int its_bits)
{
    pthread_mutex_lock(&lock);
    mask = its_mask;
    bits = its_bits;
    if (mask)
        set_mask(is_on());
    pthread_mutex_unlock(&lock);
}

int r2_colls_record(bool on, char *result, size_t size)
{
    int rc = 0;

    pthread_mutex_lock(&lock);
    if (mask) {
        atomic_store_explicit(&r2_eng.colls.on, on, memory_order_relaxed);
        set_mask(on);
        snprintf(result, size, "times of collectives are %s",
                 on ? "recorded" : "no longer recorded");
        r2_control_journal(r2_eng.ctl, &(struct r2_control_event){.event = R2_EV_OPERATOR,
                                                                  .cause = on ? "collectives on"
                                                                              : "collectives off"});
    } else {
        snprintf(result, size,
                 "this process cannot record: it needs NCCL 2.28 or later, and no other profiler "
                 "(NCCL_PROFILER_PLUGIN, libnccl-profiler.so)");
        rc = -EOPNOTSUPP;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

static enum r2_seg_recording state(void)
{
    enum r2_seg_recording found;

    pthread_mutex_lock(&lock);
    found = !mask ? R2_SEG_RECORDING_CANNOT : is_on() ? R2_SEG_RECORDING_ON : R2_SEG_RECORDING_OFF;
    pthread_mutex_unlock(&lock);
    return found;
}

static void one(void *arg, const struct r2_coll *what, uint64_t ns)
{
    struct r2_control_timing timing = {
        .comm = what->comm,
        .rank = what->rank,
        .ranks = what->ranks,
        .op = (enum r2_seg_collective)what->op,
        .up_to = r2_coll_class(what->bytes),
        .bus_bytes = what->bus_bytes,
    };

    (void)arg;
    if (!r2_control_timing(r2_eng.ctl, &timing, ns))
        atomic_fetch_add_explicit(&r2_eng.colls.dropped, 1, memory_order_relaxed);
}

void r2_colls_tick(uint64_t now)
{
    r2_control_recording(r2_eng.ctl, state());
    if (!is_on() && !left)
        return;
    left = r2_coll_reap(&r2_eng.colls, now, one, NULL);
    r2_gauge(&r2_eng.n->timings_dropped,
             atomic_load_explicit(&r2_eng.colls.dropped, memory_order_relaxed));
}
