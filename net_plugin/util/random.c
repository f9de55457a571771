#include "util/random.h"

#include <errno.h>
#include <sys/random.h>

int r2_random_bytes(void *buf, size_t len)
{
    unsigned char *p = buf;

    while (len > 0) {
        ssize_t n = getrandom(p, len, 0);

        if (n < 0) {
            if (errno == EINTR) {
                continue;
            }
            return -errno;
        }
        p += n;
        len -= (size_t)n;
    }
    return 0;
}

static uint64_t rotl(uint64_t x, int n)
{
    return (x << n) | (x >> (64 - n));
}

/* splitmix64: spreads a seed of any quality over the state. */
static uint64_t splitmix(uint64_t *x)
{
    uint64_t z = (*x += UINT64_C(0x9e3779b97f4a7c15));

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void r2_prng_seed(struct r2_prng *p, uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        p->s[i] = splitmix(&seed);
    }
}

uint64_t r2_prng_next(struct r2_prng *p)
{
    uint64_t result = rotl(p->s[1] * 5, 7) * 9;
    uint64_t t = p->s[1] << 17;

    p->s[2] ^= p->s[0];
    p->s[3] ^= p->s[1];
    p->s[1] ^= p->s[2];
    p->s[0] ^= p->s[3];
    p->s[2] ^= t;
    p->s[3] = rotl(p->s[3], 45);
    return result;
}

uint64_t r2_prng_below(struct r2_prng *p, uint64_t bound)
{
    uint64_t reject;
    uint64_t x;

    if (bound == 0) {
        return 0;
    }
    /* Values under 2^64 mod bound would make small results likelier. */
    reject = (0 - bound) % bound;
    do {
        x = r2_prng_next(p);
    } while (x < reject);
    return x % bound;
}
