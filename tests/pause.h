/* How C programs below tests/ wait. */
#ifndef R2_TESTS_PAUSE_H
#define R2_TESTS_PAUSE_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline void pause_us(unsigned long us)
{
    struct timespec ts = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000};

    nanosleep(&ts, NULL);
}

static inline uint64_t pause_clock_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000 + (uint64_t)ts.tv_nsec;
}

/* Looks once in 0.2 ms, `ms` at most: whether it came to be so. */
#define WITHIN_MS(ms, cond)                                                                        \
    __extension__({                                                                                \
        uint64_t end_ = pause_clock_ns() + (uint64_t)(ms)*1000000;                                 \
        bool so_;                                                                                  \
                                                                                                   \
        while (!(so_ = (cond)) && pause_clock_ns() < end_)                                         \
            pause_us(200);                                                                         \
        so_;                                                                                       \
    })

/* The program's own limit ends it. */
#define UNTIL(cond) ((void)WITHIN_MS(INT32_MAX, cond))

#endif
