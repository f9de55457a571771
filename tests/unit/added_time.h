/* A clock in place of util/clock.c's: the machine's plus what the test adds. Timers that are due by
 * it run when their thread wakes, which it does by the machine's. Once in a program. */
#ifndef R2_TESTS_ADDED_TIME_H
#define R2_TESTS_ADDED_TIME_H

#include <stdatomic.h>
#include <time.h>

#include "util/clock.h"

_Atomic uint64_t added_ns;

uint64_t r2_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * R2_NS_PER_S + (uint64_t)ts.tv_nsec + atomic_load(&added_ns);
}

static inline void add_time(uint64_t ns)
{
    atomic_fetch_add(&added_ns, ns);
}

#endif
