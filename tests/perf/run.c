/* Timing: barrier, warm-up, timed iterations, one checked iteration. */
#define _GNU_SOURCE
#include <sched.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "perf.h"

double perf_run_now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static double cpu_now(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
           (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

/* Until the GPU is done, or NCCL reports an error. */
static void wait_done(struct perf *p)
{
    ncclResult_t end = p->nccl.Synchronize ? p->nccl.Synchronize(p->comm) : ncclSuccess;
    if (end != ncclSuccess)
        perf_watch_failed(p, end, "asynchronous error");
    while (perf_gpu_used() && !perf_gpu_query()) {
        ncclResult_t error = ncclSuccess;
        ncclResult_t rc = p->nccl.CommGetAsyncError(p->comm, &error);
        if (rc != ncclSuccess || (error != ncclSuccess && error != ncclInProgress))
            perf_watch_failed(p, rc != ncclSuccess ? rc : error, "asynchronous error");
        sched_yield();
    }
}

/* Over all ranks, in place. */
static void run_sum(struct perf *p, double *values, int count)
{
    size_t bytes = (size_t)count * sizeof(double);
    perf_watch_begin("agreement of the ranks", bytes, 0);
    perf_gpu_write(p->small, values, bytes);
    ncclResult_t rc = p->nccl.AllReduce(p->small, p->small, (size_t)count, ncclFloat64, ncclSum,
                                        p->comm, perf_gpu_stream());
    if (rc != ncclSuccess)
        perf_watch_failed(p, rc, "agreement of the ranks");
    wait_done(p);
    perf_gpu_read(values, p->small, bytes);
    perf_watch_end();
}

static void one(struct perf *p, const struct perf_shape *s, void *send, void *recv, bool wait,
                uint64_t iteration)
{
    const char *name = perf_op_names[p->o.op];
    perf_watch_begin(name, s->bytes, iteration);
    ncclResult_t rc = perf_ops_start(p, s, send, recv);
    if (rc != ncclSuccess)
        perf_watch_failed(p, rc, name);
    if (wait)
        wait_done(p);
    if (wait)
        perf_watch_end();
}

enum { SLOWEST_OF = 256 }; /* ranks up to which the slowest one's time is known */
static uint64_t iterations_run;

/* The sum came over the network under test: what this rank saw itself counts in any case. */
static int64_t wrong_of(const struct perf *p, double all_ranks, size_t own)
{
    if (!p->o.check)
        return -1;
    return all_ranks >= (double)own && all_ranks < 1e18 ? (int64_t)all_ranks : (int64_t)own + 1;
}

/* Fresh data, one operation, every value looked at. */
static size_t checked_one(struct perf *p, const struct perf_shape *s, void *send, void *recv,
                          bool in_place, double *seconds)
{
    uint64_t iteration = ++iterations_run;
    perf_ops_fill(p, s, send, recv, in_place, iteration);
    if (p->o.duration > 0 && p->o.factor > 0) {
        double barrier = 0; /* large data: ranks take unlike times to fill them */
        run_sum(p, &barrier, 1);
    }
    double start = perf_run_now();
    one(p, s, send, recv, true, iteration);
    *seconds = perf_run_now() - start;
    return perf_ops_wrong(p, s, recv, iteration);
}

static void timed(struct perf *p, const struct perf_shape *s, void *send, void *recv, bool in_place,
                  double *seconds, size_t *wrong)
{
    double took, start = perf_run_now();
    for (int i = 0; i < p->o.iters && !p->o.check_every; i++)
        one(p, s, send, recv, p->o.blocking || i + 1 == p->o.iters, (uint64_t)i);
    *seconds = perf_run_now() - start;
    if (!p->o.check_every)
        return;
    *seconds = 0;
    for (int i = 0; i < p->o.iters; i++) {
        *wrong += checked_one(p, s, send, recv, in_place, &took);
        *seconds += took;
    }
}

static struct perf_result measure(struct perf *p, const struct perf_shape *s, bool in_place)
{
    struct perf_result r = {.wrong = -1, .valid = true};
    void *send = p->send, *recv = p->recv;
    size_t wrong = 0;
    double seconds, took;
    if (in_place) {
        send = p->recv; /* one buffer for both */
        perf_ops_in_place(p, s, &send, &recv);
    }
    for (int i = 0; i < p->o.warmup; i++)
        one(p, s, send, recv, true, (uint64_t)i);
    double barrier = 0;
    run_sum(p, &barrier, 1);
    double cpu = cpu_now();
    timed(p, s, send, recv, in_place, &seconds, &wrong);
    cpu = cpu_now() - cpu;
    if (p->o.check && !p->o.check_every)
        wrong += checked_one(p, s, send, recv, in_place, &took);
    int iters = p->o.iters > 0 ? p->o.iters : 1;
    double sums[3] = {seconds / iters, cpu / iters, (double)wrong};
    run_sum(p, sums, 3);
    r.seconds = sums[0] / p->ranks.nranks;
    r.cpu = sums[1];
    r.wrong = wrong_of(p, sums[2], wrong);
    r.algbw = r.seconds > 0 ? (double)s->bytes / r.seconds : 0;
    r.busbw = r.algbw * s->bus;
    return r;
}

void perf_run_table(struct perf *p)
{
    perf_report_head(p);
    for (size_t bytes = p->o.min_bytes; bytes <= p->o.max_bytes;) {
        struct perf_shape shape;
        perf_ops_shape(p, bytes, &shape);
        struct perf_result out = measure(p, &shape, false), in = {.valid = false};
        if (shape.in_place)
            in = measure(p, &shape, true);
        perf_report_line(p, &shape, &out, &in);
        size_t next =
            p->o.factor > 0 ? (size_t)((double)bytes * p->o.factor) : bytes + p->o.step_bytes;
        bytes = next > bytes ? next : bytes + 1;
    }
}

/* The seconds of an iteration, on average over a window. */
static double window(struct perf *p, const struct perf_shape *s, size_t *wrong)
{
    double seconds = 0, took;
    for (int i = 0; i < p->o.window; i++) {
        if (p->o.check) {
            *wrong += checked_one(p, s, p->send, p->recv, false, &took);
            seconds += took;
            continue;
        }
        double start = perf_run_now();
        one(p, s, p->send, p->recv, true, ++iterations_run);
        seconds += perf_run_now() - start;
    }
    return seconds / p->o.window;
}

static bool over(const struct perf *p, double end)
{
    return p->ranks.rank == 0 &&
           (perf_run_now() > end || (p->o.until && access(p->o.until, F_OK) == 0));
}

static double largest(const double *values, int count)
{
    double most = 0;
    for (int i = 0; i < count; i++)
        most = values[i] > most ? values[i] : most;
    return most;
}

void perf_run_loop(struct perf *p)
{
    perf_report_head(p);
    double end = perf_run_now() + p->o.duration;
    size_t bytes = p->o.min_bytes;
    bool more = true;
    while (more) {
        struct perf_shape shape;
        perf_ops_shape(p, bytes, &shape);
        double cpu = cpu_now();
        size_t wrong = 0;
        double seconds = window(p, &shape, &wrong);
        double sums[4 + SLOWEST_OF] = {seconds, (double)wrong, (cpu_now() - cpu) / p->o.window,
                                       over(p, end)};
        int each = p->ranks.nranks <= SLOWEST_OF ? p->ranks.nranks : 0;
        if (each)
            sums[4 + p->ranks.rank] = seconds;
        run_sum(p, sums, 4 + each); /* all ranks stop together, when rank 0 says so */
        more = sums[3] == 0;
        struct perf_result r = {.seconds = sums[0] / p->ranks.nranks,
                                .cpu = sums[2],
                                .wrong = wrong_of(p, sums[1], wrong),
                                .slowest = largest(sums + 4, each),
                                .valid = true};
        r.algbw = r.seconds > 0 ? (double)shape.bytes / r.seconds : 0;
        r.busbw = r.algbw * shape.bus;
        perf_report_window(p, &shape, iterations_run, &r);
        size_t next = p->o.factor > 0 ? (size_t)((double)bytes * p->o.factor) : 0;
        bytes = next > bytes && next <= p->o.max_bytes ? next : p->o.min_bytes;
    }
}
