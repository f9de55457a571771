/* Ranks of the direct AllReduce as processes over loopback NICs (rung 3), since the engine is one
 * for each process. They meet in shared memory. Every wait is bounded. */
#ifndef R2_TESTS_DIRECT_BED_H
#define R2_TESTS_DIRECT_BED_H

#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "await.h"
#include "direct/direct.h"

struct r2_ncclnet_v12;
extern const struct r2_ncclnet_v12 ncclNetPlugin_v12;

#define BED_RANKS 8
#define BED_RESULT ((size_t)8 << 20)

enum { INT32 = 2, FLOAT32 = 7, SUM = 0 };

static struct bed_shared {
    struct r2_links_card card[BED_RANKS];
    atomic_int cards;
    atomic_int step[8]; /* the test's */
    uint8_t result[BED_RESULT];
} * sh;

static int bed_p;
static struct r2_direct_config bed_config;
static void (*bed_before)(int rank); /* a rank connects; NULL: nothing */

static struct r2_direct *bed_new(int rank)
{
    struct r2_direct_config config = bed_config;
    struct r2_direct *d;

    config.net = &ncclNetPlugin_v12;
    config.rank = rank;
    config.p = bed_p;
    CHECK_EQ(r2_direct_new(&d, &config), 0);
    sh->card[rank] = *r2_direct_card(d);
    atomic_fetch_add(&sh->cards, 1);
    AWAIT(atomic_load(&sh->cards) == bed_p);
    if (bed_before)
        bed_before(rank);
    for (int r = 0; r < bed_p; r++)
        CHECK_EQ(r2_direct_meet(d, r, &sh->card[r], r2_links_card_bytes(&sh->card[r])), 0);
    r2_direct_connect(d);
    return d;
}

static struct r2_direct *bed_join(int rank)
{
    struct r2_direct *d = bed_new(rank);

    AWAIT(r2_direct_state(d, NULL) != R2_DIRECT_CONNECTING);
    CHECK_EQ(r2_direct_state(d, NULL), R2_DIRECT_READY);
    return d;
}

/* All ranks have come to `step`. */
static void bed_together(int step)
{
    atomic_fetch_add(&sh->step[step], 1);
    AWAIT(atomic_load(&sh->step[step]) >= bed_p);
}

/* Runs `one` as each of p ranks, 100 s at most; rank `killed` is to die of SIGKILL, -1: none. */
static void bed_run(int p, int killed, void (*one)(int rank))
{
    pid_t pids[BED_RANKS];

    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LOG", getenv("BED_LOG") ? getenv("BED_LOG") : "none", 1);
    bed_p = p;
    sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(sh != MAP_FAILED);
    fflush(stdout);
    for (int r = 0; r < p; r++) {
        pids[r] = fork();
        CHECK(pids[r] >= 0);
        if (pids[r] == 0) {
            alarm(100);
            one(r);
            fflush(stdout);
            _exit(0);
        }
    }
    for (int r = 0; r < p; r++) {
        int status = 0;

        CHECK_EQ(waitpid(pids[r], &status, 0), pids[r]);
        if (r == killed)
            CHECK_EQ(WTERMSIG(status), SIGKILL);
        else
            CHECK_MSG(status == 0, "rank %d ended with status 0x%x", r, (unsigned)status);
    }
    munmap(sh, sizeof(*sh));
}

/* ---- values */

static uint64_t bed_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    return x ^ x >> 27;
}

/* Floats whose sum depends on the order of addition. */
static float bed_value(int rank, uint64_t i, unsigned round)
{
    uint64_t h = bed_mix(i * 1000003 + (uint64_t)rank * 7919 + round);
    float f = (float)(h & 0xffffff) / 65536.0f;

    return (h >> 40 & 1 ? -f : f) * (h >> 41 & 1 ? 4096.0f : 1.0f);
}

static float bed_sum(uint64_t i, unsigned round)
{
    float sum = bed_value(0, i, round);

    for (int r = 1; r < bed_p; r++)
        sum += bed_value(r, i, round);
    return sum;
}

static void bed_fill(float *in, int rank, uint64_t count, unsigned round)
{
    for (uint64_t i = 0; i < count; i++)
        in[i] = bed_value(rank, i, round);
}

static void bed_check(const float *out, uint64_t count, unsigned round)
{
    for (uint64_t i = 0; i < count; i++) {
        float want = bed_sum(i, round);

        CHECK_MSG(memcmp(&out[i], &want, sizeof(want)) == 0,
                  "round %u, element %llu of %llu: %a, not %a", round, (unsigned long long)i,
                  (unsigned long long)count, (double)out[i], (double)want);
    }
}

static int bed_allreduce(struct r2_direct *d, const float *in, float *out, uint64_t count,
                         const uint32_t *weights)
{
    struct r2_direct_call call = {
        .in = in, .out = out, .count = count, .type = FLOAT32, .op = SUM, .weights = weights};
    uint64_t number;
    int rc = r2_direct_allreduce(d, &call, &number);

    return rc ? rc : r2_direct_wait(d, number);
}

#endif
