/* One rank of the direct AllReduce on host memory, without NCCL: for tests/bench/direct.py.
 *
 *     allreduce --folder DIR --bytes N --iters K [--rates A,B,...] [--credit BYTES]
 *
 * RANK and WORLD_SIZE say which rank it is. Ranks meet through files in DIR. --rates: bandwidth of
 * each rank in any unit, of which the weights are made; else they are equal. NICs come from the
 * environment (R2CCL_NICS). Rank 0 prints a JSON line: seconds of each operation, the monotonic
 * clock's at the end of the last one, CPU seconds and wrong values of this rank. */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../pause.h"
#include "api/nccl.h"
#include "direct/direct.h"
#include "plan/schedule.h"
#include "plan/shard.h"
#include "util/clock.h"

#define MOST 64
#define LIMIT_NS (60 * R2_NS_PER_S)
#define FLOAT 7
#define SUM 0

struct r2_ncclnet_v12;
extern const struct r2_ncclnet_v12 ncclNetPlugin_v12;

static struct {
    int rank, ranks, iters;
    size_t credit;
    const char *folder;
    uint64_t bytes;
    bool weighted;
    double rates[MOST];
} opt = {.rank = -1, .iters = 5};

static void die(const char *what, int rc)
{
    fprintf(stderr, "rank %d: %s: %s\n", opt.rank, what, strerror(rc < 0 ? -rc : rc));
    exit(1);
}

static void parse_rates(char *text)
{
    int n = 0;

    for (char *rest = NULL, *word = strtok_r(text, ",", &rest); word && n < MOST;
         word = strtok_r(NULL, ",", &rest))
        opt.rates[n++] = strtod(word, NULL);
    opt.weighted = true;
}

static void parse(int argc, char **argv)
{
    static const struct option names[] = {{"folder", 1, NULL, 'f'}, {"bytes", 1, NULL, 'b'},
                                          {"iters", 1, NULL, 'n'},  {"rates", 1, NULL, 'w'},
                                          {"credit", 1, NULL, 'c'}, {NULL, 0, NULL, 0}};
    const char *rank = getenv("RANK"), *ranks = getenv("WORLD_SIZE");
    int c;

    opt.rank = rank ? atoi(rank) : -1;
    opt.ranks = ranks ? atoi(ranks) : 0;
    while ((c = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (c) {
        case 'f':
            opt.folder = optarg;
            break;
        case 'b':
            opt.bytes = strtoull(optarg, NULL, 10);
            break;
        case 'n':
            opt.iters = atoi(optarg);
            break;
        case 'w':
            parse_rates(optarg);
            break;
        case 'c':
            opt.credit = strtoull(optarg, NULL, 10);
            break;
        default:
            exit(2);
        }
    }
    if (opt.rank < 0 || opt.ranks < 2 || opt.ranks > MOST || opt.rank >= opt.ranks || !opt.folder ||
        opt.bytes < 4 || opt.iters < 1) {
        fprintf(stderr, "usage: see the head of tests/bench/allreduce.c\n");
        exit(2);
    }
}

static void write_card(const struct r2_links_card *card)
{
    char part[512], path[512];
    FILE *file;

    snprintf(part, sizeof(part), "%s/part%d", opt.folder, opt.rank);
    snprintf(path, sizeof(path), "%s/card%d", opt.folder, opt.rank);
    file = fopen(part, "w");
    if (!file || fwrite(card, r2_links_card_bytes(card), 1, file) != 1 || fclose(file) ||
        rename(part, path))
        die("cannot write a card", EIO);
}

static void read_card(struct r2_direct *d, int rank)
{
    uint64_t begun = r2_now_ns();
    struct r2_links_card card;
    char path[512];
    size_t len = 0;
    FILE *file;
    int rc;

    snprintf(path, sizeof(path), "%s/card%d", opt.folder, rank);
    while (!(file = fopen(path, "r"))) {
        if (r2_now_ns() - begun > LIMIT_NS)
            die("a rank does not come", ETIMEDOUT);
        pause_us(5000);
    }
    len = fread(&card, 1, sizeof(card), file);
    fclose(file);
    rc = r2_direct_meet(d, rank, &card, len);
    if (rc)
        die("a card is damaged", rc);
}

static struct r2_direct *join(void)
{
    struct r2_direct_config config = {
        .net = &ncclNetPlugin_v12, .rank = opt.rank, .p = opt.ranks, .credit = opt.credit};
    uint64_t begun = r2_now_ns();
    struct r2_direct *d;
    int rc = r2_direct_new(&d, &config);

    if (rc)
        die("cannot begin", rc);
    write_card(r2_direct_card(d));
    for (int r = 0; r < opt.ranks; r++)
        read_card(d, r);
    r2_direct_connect(d);
    while (r2_direct_state(d, &rc) == R2_DIRECT_CONNECTING) {
        if (r2_now_ns() - begun > LIMIT_NS)
            die("not connected", ETIMEDOUT);
        pause_us(1000);
    }
    if (rc)
        die("cannot connect", rc);
    return d;
}

static const uint32_t *weigh(void)
{
    static uint32_t weights[MOST];
    struct r2_shard_node nodes[MOST] = {0};
    struct r2_shard_input input = {.p = opt.ranks, .nodes = nodes, .bytes = opt.bytes};

    for (int r = 0; r < opt.ranks; r++)
        nodes[r].out = nodes[r].in = opt.rates[r];
    return opt.weighted && r2_shard_weights(&input, weights) ? weights : NULL;
}

static double cpu_seconds(void)
{
    struct rusage u;

    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static double reduce(struct r2_direct *d, const float *in, float *out, uint64_t count,
                     const uint32_t *weights)
{
    struct r2_direct_call call = {
        .in = in, .out = out, .count = count, .type = FLOAT, .op = SUM, .weights = weights};
    uint64_t begun = r2_now_ns(), number;
    int rc = r2_direct_allreduce(d, &call, &number);

    if (rc == 0)
        rc = r2_direct_wait(d, number);
    if (rc)
        die("AllReduce", rc);
    return (double)(r2_now_ns() - begun) / 1e9;
}

static float value(int rank, uint64_t i)
{
    return (float)((i * 7 + (uint64_t)rank * 13) % 1021);
}

static uint64_t wrong(const float *out, uint64_t count)
{
    uint64_t bad = 0;

    for (uint64_t i = 0; i < count; i++) {
        float want = value(0, i);

        for (int r = 1; r < opt.ranks; r++)
            want += value(r, i);
        bad += out[i] != want;
    }
    return bad;
}

int main(int argc, char **argv)
{
    const uint32_t *weights;
    struct r2_direct *d;
    uint64_t count, bad;
    float *in, *out;
    double cpu, ended;

    parse(argc, argv);
    count = opt.bytes / sizeof(float);
    in = malloc(count * sizeof(float));
    out = calloc(count, sizeof(float));
    if (!in || !out)
        die("memory", ENOMEM);
    for (uint64_t i = 0; i < count; i++)
        in[i] = value(opt.rank, i);
    weights = weigh();
    d = join();
    reduce(d, in, out, count, weights); /* and a barrier */
    cpu = cpu_seconds();
    if (opt.rank == 0)
        printf("{\"seconds\": [");
    for (int i = 0; i < opt.iters; i++) {
        double took = reduce(d, in, out, count, weights);

        if (opt.rank == 0)
            printf("%s%.6f", i ? ", " : "", took);
    }
    ended = (double)r2_now_ns() / 1e9;
    cpu = cpu_seconds() - cpu;
    bad = wrong(out, count);
    if (opt.rank == 0)
        printf("], \"ended\": %.6f, \"cpu_s\": %.3f, \"wrong\": %llu}\n", ended, cpu,
               (unsigned long long)bad);
    r2_direct_finish(d);
    r2_direct_free(d);
    free(in);
    free(out);
    return bad != 0;
}
