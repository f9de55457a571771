/* How many words of one kind go into a journal that has other things to keep: a burst, then one now
 * and then. Pure; the caller locks. */
#ifndef R2_UTIL_RATELIMIT_H
#define R2_UTIL_RATELIMIT_H

#include <stdbool.h>
#include <stdint.h>

#include "util/clock.h"

#define R2_RATELIMIT_BURST 64
#define R2_RATELIMIT_EACH_NS (60 * R2_NS_PER_S)

/* Zero-initialised. */
struct r2_ratelimit {
    unsigned used; /* of the burst */
    uint64_t since_ns;
    unsigned untold;
};

/* True when the message is to be logged; *untold: how many before it were not. `anyway`: told at
 * any rate, and counted. */
static inline bool r2_ratelimit_pass(struct r2_ratelimit *t, bool anyway, uint64_t now_ns,
                                     unsigned *untold)
{
    uint64_t back;

    if (!t->used)
        t->since_ns = now_ns;
    back = now_ns > t->since_ns ? (now_ns - t->since_ns) / R2_RATELIMIT_EACH_NS : 0;
    t->since_ns += back * R2_RATELIMIT_EACH_NS;
    t->used = back < t->used ? t->used - (unsigned)back : 0;
    *untold = 0;
    if (t->used >= R2_RATELIMIT_BURST && !anyway) {
        t->untold++;
        return false;
    }
    if (t->used < R2_RATELIMIT_BURST)
        t->used++;
    *untold = t->untold;
    t->untold = 0;
    return true;
}

#endif
