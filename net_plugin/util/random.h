/* Random bytes from the kernel, and a fast seeded generator for jitter and tests. */
#ifndef R2_UTIL_RANDOM_H
#define R2_UTIL_RANDOM_H

#include <stddef.h>
#include <stdint.h>

/* Fills `buf` from getrandom. 0 or -errno (never a partial fill with return 0). Thread-safe. */
int r2_random_bytes(void *buf, size_t len);

/* xoshiro256**. Not for secrets. One generator belongs to one thread. */
struct r2_prng {
    uint64_t s[4];
};

/* Every seed, 0 included, gives a full-period generator. */
void r2_prng_seed(struct r2_prng *p, uint64_t seed);
uint64_t r2_prng_next(struct r2_prng *p);
/* Uniform in [0, bound); 0 when bound is 0. */
uint64_t r2_prng_below(struct r2_prng *p, uint64_t bound);

#endif
