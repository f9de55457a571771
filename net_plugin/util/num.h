/* Arithmetic of 64-bit numbers that cannot overflow. */
#ifndef R2_UTIL_NUM_H
#define R2_UTIL_NUM_H

#include <stdint.h>

static inline uint64_t r2_max(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static inline uint64_t r2_min(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* a * b / c, UINT64_MAX where that is more; c > 0. */
static inline uint64_t r2_mul_div(uint64_t a, uint64_t b, uint64_t c)
{
    unsigned __int128 x = (unsigned __int128)a * b / c;

    return x > UINT64_MAX ? UINT64_MAX : (uint64_t)x;
}

#endif
