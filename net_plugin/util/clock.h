/* The engine's clock. Pure parts never call it: they take times as arguments. */
#ifndef R2_UTIL_CLOCK_H
#define R2_UTIL_CLOCK_H

#include <stdint.h>

#define R2_NS_PER_US UINT64_C(1000)
#define R2_NS_PER_MS UINT64_C(1000000)
#define R2_NS_PER_S UINT64_C(1000000000)

/* Nanoseconds of CLOCK_MONOTONIC: stops while the host is suspended, never goes back. */
uint64_t r2_now_ns(void);

#endif
