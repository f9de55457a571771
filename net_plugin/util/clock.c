#include "util/clock.h"

#include <time.h>

uint64_t r2_now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * R2_NS_PER_S + (uint64_t)ts.tv_nsec;
}
