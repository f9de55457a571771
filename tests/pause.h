/* The pause of a loop that waits for something: the caller looks again afterwards. All C programs
 * below tests/ pause here. */
#ifndef R2_TESTS_PAUSE_H
#define R2_TESTS_PAUSE_H

#include <time.h>

static inline void pause_us(unsigned long us)
{
    struct timespec ts = {.tv_sec = (time_t)(us / 1000000), .tv_nsec = (long)(us % 1000000) * 1000};

    nanosleep(&ts, NULL);
}

#endif
