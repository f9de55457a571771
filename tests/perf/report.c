/* nccl-tests' columns on standard output, and JSON. Only rank 0 writes. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "perf.h"

static FILE *json, *timeline;
static int json_errno, timeline_errno; /* of the first write that failed */
static int lines;
static int64_t wrong_total;
static double bus_sum, started;
static int bus_count;

static FILE *open_file(const char *path)
{
    FILE *file = path ? fopen(path, "w") : NULL;
    if (path && !file)
        perf_die("cannot write %s: %s", path, strerror(errno));
    return file;
}

/* Behind each line: errno is still that of the write which failed. */
static void look_after(FILE *file, int *failed)
{
    if (!*failed && ferror(file))
        *failed = errno;
}

/* False, with a word, where not everything came to be in the file. */
static bool close_file(FILE *file, const char *path, int failed)
{
    if (!file)
        return true;
    look_after(file, &failed);
    if (fclose(file) && !failed)
        failed = errno;
    if (failed)
        fprintf(stderr, "r2ccl_perf: cannot write %s: %s\n", path, strerror(failed));
    return !failed;
}

static bool reduces(const struct perf *p)
{
    return p->o.op == PERF_ALL_REDUCE || p->o.op == PERF_REDUCE_SCATTER || p->o.op == PERF_REDUCE;
}

static const char *redop(const struct perf *p)
{
    return reduces(p) ? perf_redop_names[p->o.redop] : "none";
}

void perf_report_head(const struct perf *p)
{
    int version = 0;
    started = perf_run_now();
    if (p->ranks.rank)
        return;
    p->nccl.GetVersion(&version);
    json = open_file(p->o.json);
    timeline = open_file(p->o.timeline);
    const char *place = p->nccl.standin ? "stand-in for NCCL on host memory" : "NCCL";
    if (json)
        fprintf(json,
                "{\"schema\": \"r2ccl_perf/1\", \"op\": \"%s\", \"ranks\": %d, \"nccl\": %d, "
                "\"standin\": %s, \"type\": \"%s\", \"redop\": \"%s\", \"iters\": %d, "
                "\"seed\": %llu, \"results\": [",
                perf_op_names[p->o.op], p->ranks.nranks, version,
                p->nccl.standin ? "true" : "false", perf_type_names[p->o.type], redop(p),
                p->o.iters, (unsigned long long)p->o.seed);
    printf("# r2ccl_perf %s, %d ranks, %s %d\n", perf_op_names[p->o.op], p->ranks.nranks, place,
           version);
    printf("# minBytes %zu maxBytes %zu iters %d warmup %d check %d blocking %d seed %llu\n#\n",
           p->o.min_bytes, p->o.max_bytes, p->o.iters, p->o.warmup, p->o.check, p->o.blocking,
           (unsigned long long)p->o.seed);
    if (p->o.duration > 0) {
        printf("#      t    iteration        size     time   algbw   busbw  #wrong\n");
        printf("#    (s)                      (B)     (us)  (GB/s)  (GB/s)\n");
        fflush(stdout);
        return;
    }
    printf("#%58s out-of-place %31s in-place\n", "", "");
    printf("#       size         count      type   redop    root     time   algbw   busbw #wrong  "
           "   time   algbw   busbw #wrong\n");
    printf("#        (B)    (elements)                               (us)  (GB/s)  (GB/s)         "
           "   (us)  (GB/s)  (GB/s)\n");
    fflush(stdout);
}

static void count_in(const struct perf_result *r)
{
    if (!r->valid)
        return;
    wrong_total += r->wrong > 0 ? r->wrong : 0;
    bus_sum += r->busbw;
    bus_count++;
}

static void print_half(const struct perf_result *r)
{
    if (!r->valid) {
        printf(" %8s %7s %7s %6s", "N/A", "N/A", "N/A", "N/A");
        return;
    }
    printf(" %8.*f %7.2f %7.2f", r->seconds < 0.1 ? 2 : 0, r->seconds * 1e6, r->algbw * 1e-9,
           r->busbw * 1e-9);
    if (r->wrong < 0)
        printf(" %6s", "N/A");
    else
        printf(" %6lld", (long long)r->wrong);
}

static void json_half(const char *name, const struct perf_result *r)
{
    if (!r->valid) {
        fprintf(json, "\"%s\": null", name);
        return;
    }
    fprintf(json,
            "\"%s\": {\"time_us\": %.3f, \"algbw_gbs\": %.6f, \"busbw_gbs\": %.6f, "
            "\"cpu_us\": %.1f, \"wrong\": ",
            name, r->seconds * 1e6, r->algbw * 1e-9, r->busbw * 1e-9, r->cpu * 1e6);
    if (r->wrong < 0)
        fprintf(json, "null}");
    else
        fprintf(json, "%lld}", (long long)r->wrong);
}

void perf_report_line(const struct perf *p, const struct perf_shape *s,
                      const struct perf_result *out, const struct perf_result *in)
{
    count_in(out);
    count_in(in);
    if (p->ranks.rank)
        return;
    bool rooted = p->o.op == PERF_BROADCAST || p->o.op == PERF_REDUCE;
    printf(" %11zu  %12zu  %8s  %6s  %6d", s->bytes, s->count, perf_type_names[p->o.type], redop(p),
           rooted ? p->o.root : -1);
    print_half(out);
    print_half(in);
    printf("\n");
    fflush(stdout);
    if (!json)
        return;
    fprintf(json, "%s\n  {\"size\": %zu, \"count\": %zu, ", lines++ ? "," : "", s->bytes, s->count);
    json_half("out_of_place", out);
    fprintf(json, ", ");
    json_half("in_place", in);
    fprintf(json, "}");
    look_after(json, &json_errno);
}

void perf_report_window(const struct perf *p, const struct perf_shape *s, uint64_t iteration,
                        const struct perf_result *r)
{
    count_in(r);
    if (p->ranks.rank)
        return;
    double now = perf_run_now(), t = now - started;
    printf("  %6.3f %12llu %11zu", t, (unsigned long long)iteration, s->bytes);
    print_half(r);
    printf("\n");
    fflush(stdout);
    if (json) {
        fprintf(json, "%s\n  {\"t\": %.6f, \"size\": %zu, \"count\": %zu, ", lines++ ? "," : "", t,
                s->bytes, s->count);
        json_half("out_of_place", r);
        fprintf(json, ", \"in_place\": null}");
        look_after(json, &json_errno);
    }
    if (!timeline)
        return;
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    fprintf(timeline,
            "{\"t\": %.6f, \"monotonic_ns\": %.0f, \"unix\": %.6f, \"iteration\": %llu, "
            "\"size\": %zu, \"time_us\": %.3f, \"slowest_us\": %.3f, \"algbw\": %.6f, \"busbw\": "
            "%.6f, \"cpu_us\": %.1f, "
            "\"wrong\": %lld}\n",
            t, now * 1e9, (double)wall.tv_sec + (double)wall.tv_nsec * 1e-9,
            (unsigned long long)iteration, s->bytes, r->seconds * 1e6, r->slowest * 1e6,
            r->algbw * 1e-9, r->busbw * 1e-9, r->cpu * 1e6, (long long)r->wrong);
    fflush(timeline);
    look_after(timeline, &timeline_errno);
}

int perf_report_end(const struct perf *p)
{
    double mean = bus_count ? bus_sum / bus_count * 1e-9 : 0;
    if (p->ranks.rank)
        return wrong_total ? 1 : 0;
    printf("# Out of bounds values : %lld %s\n", (long long)wrong_total,
           wrong_total ? "FAILED" : "OK");
    printf("# Avg bus bandwidth    : %g\n#\n", mean);
    fflush(stdout);
    if (json)
        fprintf(json, "\n], \"avg_busbw_gbs\": %.6f, \"wrong\": %lld}\n", mean,
                (long long)wrong_total);
    bool written = close_file(json, p->o.json, json_errno);
    written = close_file(timeline, p->o.timeline, timeline_errno) && written;
    return wrong_total ? 1 : written ? 0 : 2;
}
