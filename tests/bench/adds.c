/* How fast one core adds up contributions (shim/reduce), beside memcpy.
 *
 *   adds [--ms 200]
 *
 * A piece of 256 KiB of 4 and of 8 contributions; SUM for each type of floating point, MAX for
 * float32 and SUM for int8. `cached`: the same pieces again and again. `cold`: the next ones of
 * 32 MiB each time. One line of JSON a case: bytes of all contributions and of the result in a
 * second of CPU time, and what memcpy reads and writes in one, measured in turn; the best of 5.
 */
#define _GNU_SOURCE
#include <getopt.h>
#include <string.h>
#include <time.h>

#include "harness.h"
#include "reduce/reduce.h"

#define PIECE ((size_t)256 << 10)
#define WINDOW ((size_t)32 << 20)
#define MOST 8
#define TURNS 5

struct kind {
    const char *name;
    int type, op;
};

static const struct kind kinds[] = {
    {"float32 SUM", R2_NCCL_FLOAT32, R2_NCCL_SUM},
    {"float32 MAX", R2_NCCL_FLOAT32, R2_NCCL_MAX},
    {"float64 SUM", R2_NCCL_FLOAT64, R2_NCCL_SUM},
    {"bfloat16 SUM", R2_NCCL_BFLOAT16, R2_NCCL_SUM},
    {"float16 SUM", R2_NCCL_FLOAT16, R2_NCCL_SUM},
    {"fp8 e4m3 SUM", R2_NCCL_FLOAT8E4M3, R2_NCCL_SUM},
    {"fp8 e5m2 SUM", R2_NCCL_FLOAT8E5M2, R2_NCCL_SUM},
    {"int8 SUM", R2_NCCL_INT8, R2_NCCL_SUM},
};

static char *rows[MOST], *out;
static size_t at;
static uint64_t turn_ns = 200000000 / TURNS;

/* Numbers of about one, as gradients are: no infinity, nothing subnormal in the wide types. */
static void fill(int type)
{
    size_t elem = r2_nccl_type_size(type);
    uint64_t seed = 1;

    for (int i = 0; i < MOST; i++)
        for (size_t k = 0; k < WINDOW; k += elem) {
            double d;
            float f;

            seed = seed * 6364136223846793005u + 1442695040888963407u;
            d = (double)(seed >> 40) / (1 << 23) - 1;
            f = (float)d;
            if (elem == 8)
                memcpy(rows[i] + k, &d, 8);
            else if (elem == 4)
                memcpy(rows[i] + k, &f, 4);
            else if (type == R2_NCCL_BFLOAT16)
                memcpy(rows[i] + k, (char *)&f + 2, 2); /* little endian */
            else
                memset(rows[i] + k, (int)(seed >> 56) & 0xbf, elem); /* below 2 */
        }
}

static void one(const struct kind *kind, int n, bool cold)
{
    const void *in[MOST];
    size_t elem = r2_nccl_type_size(kind->type);

    if (cold)
        at = (at + PIECE) % WINDOW;
    for (int i = 0; i < n; i++)
        in[i] = rows[i] + at;
    if (kind->op < 0)
        memcpy(out + at, in[0], PIECE);
    else
        r2_reduce(out + at, in, n, PIECE / elem, kind->type, kind->op);
    __asm__ volatile("" ::: "memory");
}

/* Of this thread's CPU time: other programs' turns do not count. */
static uint64_t cpu_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* GB/s read and written. */
static double rate(const struct kind *kind, int n, bool cold)
{
    uint64_t begin = cpu_ns(), now, done = 0;

    do {
        for (int i = 0; i < 8; i++, done++)
            one(kind, n, cold);
        now = cpu_ns();
    } while (now - begin < turn_ns);
    return (double)(done * PIECE * (uint64_t)(n + 1)) / (double)(now - begin);
}

static void measure(const struct kind *kind, int n, bool cold)
{
    const struct kind copy = {"memcpy", kind->type, -1};
    double best = 0, copied = 0;

    at = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        double got = rate(kind, n, cold), base = rate(&copy, 1, cold);

        best = got > best ? got : best;
        copied = base > copied ? base : copied;
    }
    printf("{\"name\": \"%s of %d, %s\", \"gbs\": %.3f, \"memcpy_gbs\": %.3f}\n", kind->name, n,
           cold ? "cold" : "cached", best, copied);
    fflush(stdout);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {{"ms", required_argument, NULL, 'm'}, {0}};
    int opt;

    while ((opt = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (opt != 'm')
            bench_usage("option", argv[optind - 1]);
        turn_ns = bench_number("--ms", optarg, 1, 60000) * 1000000 / TURNS;
    }
    if (optind < argc)
        bench_usage("argument", argv[optind]);
    for (int i = 0; i < MOST; i++)
        rows[i] = aligned_alloc(4096, WINDOW);
    out = aligned_alloc(4096, WINDOW);
    if (!out || !rows[MOST - 1])
        bench_die("no memory");
    memset(out, 0, WINDOW);
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        fill(kinds[i].type);
        for (int n = 4; n <= MOST; n += 4)
            for (int cold = 0; cold < 2; cold++)
                measure(&kinds[i], n, cold);
    }
    return 0;
}
