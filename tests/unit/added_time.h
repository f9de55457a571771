/* A clock in place of util/clock.c's: the machine's plus what the test adds, or, while `frozen_ns`
 * is not 0, that alone. Timers that are due by it run when their thread wakes, which it does by the
 * machine's. It never goes back. Once in a program. */
#ifndef R2_TESTS_ADDED_TIME_H
#define R2_TESTS_ADDED_TIME_H

#include <stdatomic.h>
#include <time.h>

#include "util/clock.h"

_Atomic uint64_t added_ns, frozen_ns;

uint64_t r2_now_ns(void)
{
    static _Atomic uint64_t newest;
    uint64_t now = atomic_load(&frozen_ns), seen = atomic_load(&newest);
    struct timespec ts;

    if (!now) {
        clock_gettime(CLOCK_MONOTONIC, &ts);
        now = (uint64_t)ts.tv_sec * R2_NS_PER_S + (uint64_t)ts.tv_nsec + atomic_load(&added_ns);
    }
    while (now > seen && !atomic_compare_exchange_weak(&newest, &seen, now))
        ;
    return now > seen ? now : seen;
}

static inline void add_time(uint64_t ns)
{
    atomic_fetch_add(&added_ns, ns);
}

#endif
