/* The time limit: a second thread ends the program when an iteration takes too long. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "../pause.h"
#include "perf.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct { /* lock */
    const char *what;
    size_t bytes;
    uint64_t iteration;
    double until; /* 0: nothing under way */
} now;
static double limit;
static int rank;

static void expired(const struct perf *p)
{
    ncclResult_t error = ncclSuccess;
    if (p->comm)
        p->nccl.CommGetAsyncError(p->comm, &error);
    fprintf(stderr,
            "r2ccl_perf: rank %d: timeout: %s of %zu bytes, iteration %llu, did not finish within "
            "%g s (async error: %s)\n",
            rank, now.what, now.bytes, (unsigned long long)now.iteration, limit,
            p->nccl.GetErrorString(error));
    fflush(NULL);
    _exit(3);
}

static void *watch_main(void *arg)
{
    for (;;) {
        pause_us(50000);
        pthread_mutex_lock(&lock);
        if (now.until > 0 && perf_run_now() > now.until)
            expired(arg);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

void perf_watch_start(struct perf *p)
{
    pthread_t thread;
    limit = p->o.timeout;
    rank = p->ranks.rank;
    if (pthread_create(&thread, NULL, watch_main, p))
        perf_die("no thread for the time limit");
    pthread_detach(thread);
}

static void set(const char *what, size_t bytes, uint64_t iteration, double until)
{
    pthread_mutex_lock(&lock);
    now.what = what;
    now.bytes = bytes;
    now.iteration = iteration;
    now.until = until;
    pthread_mutex_unlock(&lock);
}

void perf_watch_begin(const char *what, size_t bytes, uint64_t iteration)
{
    if (limit > 0)
        set(what, bytes, iteration, perf_run_now() + limit);
}

void perf_watch_end(void)
{
    if (limit > 0)
        set("", 0, 0, 0);
}

static void *abort_main(void *arg)
{
    struct perf *p = arg;
    p->nccl.CommAbort(p->comm);
    _exit(2);
}

void perf_watch_failed(struct perf *p, ncclResult_t result, const char *what)
{
    struct timespec until;
    pthread_t thread;
    const char *detail = p->nccl.GetLastError ? p->nccl.GetLastError(p->comm) : "";
    perf_watch_end();
    fprintf(stderr, "r2ccl_perf: rank %d: %s: NCCL error %d, %s: %s\n", p->ranks.rank, what,
            (int)result, p->nccl.GetErrorString(result), detail);
    fflush(NULL);
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 10;
    if (p->comm && !pthread_create(&thread, NULL, abort_main, p))
        pthread_timedjoin_np(thread, NULL, &until);
    _exit(2);
}
