#include <errno.h>
#include <pthread.h>
#include <stdio.h>

#include "engine/base/base.h"

#define MASKS 4 /* NCCLs of a process that are recorded */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* a leaf */
static int bits;
static struct {
    int *word;      /* of one of the process's NCCLs */
    unsigned comms; /* its communicators: while there is one it is loaded */
} masks[MASKS];
static unsigned left; /* slots in use; I/O thread 0 */

static bool is_on(void)
{
    return atomic_load_explicit(&r2_eng.colls.on, memory_order_relaxed);
}

/* NCCL reads it without a lock. Bits that others set there stay. */
static void set_mask(int *word, bool on)
{
    if (on)
        __atomic_fetch_or(word, bits, __ATOMIC_RELAXED);
    else
        __atomic_fetch_and(word, ~bits, __ATOMIC_RELAXED);
}

/* The place of `word`, else a free one; -1: there is none. */
static int place_of(const int *word)
{
    int found = -1;

    for (int i = 0; i < MASKS; i++) {
        if (masks[i].comms && masks[i].word == word)
            return i;
        if (!masks[i].comms && found < 0)
            found = i;
    }
    return found;
}

bool r2_engine_coll_comm_begins(int *mask, int its_bits)
{
    int at;

    if (atomic_load(&r2_eng.inert)) /* the lock may be that of a thread which is not here */
        return false;
    pthread_mutex_lock(&lock);
    at = place_of(mask);
    if (at >= 0) {
        bits = its_bits;
        masks[at].word = mask;
        masks[at].comms++;
        set_mask(mask, is_on());
    }
    pthread_mutex_unlock(&lock);
    return at >= 0;
}

void r2_engine_coll_comm_ends(const int *mask)
{
    int at;

    if (atomic_load(&r2_eng.inert))
        return;
    pthread_mutex_lock(&lock);
    at = place_of(mask);
    if (at >= 0 && masks[at].comms)
        masks[at].comms--;
    pthread_mutex_unlock(&lock);
}

/* Returns whether there is one. */
static bool set_masks(bool on)
{
    bool any = false;

    for (int i = 0; i < MASKS; i++) {
        if (!masks[i].comms)
            continue;
        set_mask(masks[i].word, on);
        any = true;
    }
    return any;
}

int r2_colls_record(bool on, char *result, size_t size)
{
    int rc = 0;

    pthread_mutex_lock(&lock);
    if (set_masks(on) || (!on && is_on())) {
        atomic_store_explicit(&r2_eng.colls.on, on, memory_order_relaxed);
        snprintf(result, size, "times of collectives are %s",
                 on ? "recorded" : "no longer recorded");
        r2_control_journal(r2_eng.ctl, &(struct r2_control_event){.event = R2_EV_OPERATOR,
                                                                  .cause = on ? "collectives on"
                                                                              : "collectives off"});
    } else {
        snprintf(result, size,
                 "this process cannot record: it needs a communicator, NCCL 2.28 or later, and no "
                 "other profiler (NCCL_PROFILER_PLUGIN, libnccl-profiler.so)");
        rc = -EOPNOTSUPP;
    }
    pthread_mutex_unlock(&lock);
    return rc;
}

static enum r2_seg_recording state(void)
{
    bool any = false;

    pthread_mutex_lock(&lock);
    for (int i = 0; i < MASKS; i++)
        any |= masks[i].comms > 0;
    pthread_mutex_unlock(&lock);
    return !any ? R2_SEG_RECORDING_CANNOT : is_on() ? R2_SEG_RECORDING_ON : R2_SEG_RECORDING_OFF;
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
