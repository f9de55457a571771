/* Rung 3: many communicators in one process, ranks as threads over loopback: splits, abort from
 * another thread, fork. Collectives are the stand-in's for NCCL. What it cannot prove: several
 * hosts. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "../hostnccl/nccl.h"
#include "await.h"
#include "check.h"

enum { RANKS = 4, MAX_COUNT = 300000 };

#define EACH_FUNCTION(X)                                                                           \
    X(CommInitAll)                                                                                 \
    X(CommSplit)                                                                                   \
    X(CommDestroy)                                                                                 \
    X(CommAbort)                                                                                   \
    X(CommUserRank)                                                                                \
    X(CommCount)                                                                                   \
    X(GetLastError)                                                                                \
    X(AllReduce)                                                                                   \
    X(GroupStart)                                                                                  \
    X(GroupEnd)

static struct {
#define X(f) __typeof__(&nccl##f) f;
    EACH_FUNCTION(X)
#undef X
} nc;

#define OK(call) CHECK_MSG((call) == ncclSuccess, "%s: %s", #call, nc.GetLastError(NULL))

static ncclComm_t comms[RANKS];
static int32_t *in[RANKS], *out[RANKS];

static void load(void)
{
    const char *path = check_built("hostnccl/libnccl.so.2");
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK_MSG(lib, "%s: %s", path, dlerror());
#define X(f)                                                                                       \
    *(void **)&nc.f = dlsym(lib, "nccl" #f);                                                       \
    CHECK(nc.f);
    EACH_FUNCTION(X)
#undef X
}

static void start(int ranks)
{
    for (int r = 0; r < ranks; r++) {
        in[r] = malloc(MAX_COUNT * sizeof(int32_t));
        out[r] = malloc(MAX_COUNT * sizeof(int32_t));
        CHECK(in[r] && out[r]);
    }
    OK(nc.CommInitAll(comms, ranks, NULL));
}

static void finish(int ranks)
{
    for (int r = 0; r < ranks; r++) {
        if (comms[r])
            OK(nc.CommDestroy(comms[r]));
        comms[r] = NULL;
        free(in[r]);
        free(out[r]);
    }
}

static void fill(int ranks, size_t count)
{
    for (int r = 0; r < ranks; r++) {
        for (size_t i = 0; i < count; i++)
            in[r][i] = (int32_t)check_random();
        memset(out[r], 0xdb, count * sizeof(int32_t));
    }
}

static int32_t sum_at(int ranks, size_t i)
{
    uint32_t sum = 0;
    for (int r = 0; r < ranks; r++)
        sum += (uint32_t)in[r][i];
    return (int32_t)sum;
}

static void all_reduce(int ranks, size_t count)
{
    fill(ranks, count);
    OK(nc.GroupStart());
    for (int r = 0; r < ranks; r++)
        OK(nc.AllReduce(in[r], out[r], count, ncclInt32, ncclSum, comms[r], NULL));
    OK(nc.GroupEnd());
    for (int r = 0; r < ranks; r++)
        for (size_t i = 0; i < count; i++)
            CHECK_EQ(out[r][i], sum_at(ranks, i));
}

/* A process that ends without destroying anything. The first test: it forks before there are
 * threads. */
TEST(exit_without_destroy)
{
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        start(2);
        all_reduce(2, 5000);
        _exit(comms[0] && comms[1] ? 0 : 1);
    }
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
}

TEST(group_all_reduce)
{
    start(RANKS);
    for (int i = 0; i < 5; i++)
        all_reduce(RANKS, 1 + check_below(i < 4 ? 40000 : MAX_COUNT));
    finish(RANKS);
}

/* Even and odd ranks apart, in reverse order; rank 3 is left out; once with the parent's network.
 */
static void split(bool share)
{
    ncclComm_t child[RANKS];
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.splitShare = share;
    OK(nc.GroupStart());
    for (int r = 0; r < RANKS; r++)
        OK(nc.CommSplit(comms[r], r == 3 ? NCCL_SPLIT_NOCOLOR : r % 2, -r, &child[r], &config));
    OK(nc.GroupEnd());
    CHECK(child[3] == NULL);
    int rank = -1, size = -1;
    OK(nc.CommUserRank(child[2], &rank));
    OK(nc.CommCount(child[2], &size));
    CHECK_EQ(rank, 0);
    CHECK_EQ(size, 2);
    fill(RANKS, 777);
    OK(nc.GroupStart());
    for (int r = 0; r < 3; r++)
        OK(nc.AllReduce(in[r], out[r], 777, ncclInt32, ncclMax, child[r], NULL));
    OK(nc.GroupEnd());
    for (int i = 0; i < 777; i++) {
        CHECK_EQ(out[0][i], in[0][i] > in[2][i] ? in[0][i] : in[2][i]);
        CHECK_EQ(out[2][i], out[0][i]);
        CHECK_EQ(out[1][i], in[1][i]);
    }
    for (int r = 0; r < 3; r++)
        OK(nc.CommDestroy(child[r]));
}

TEST(split)
{
    start(RANKS);
    split(false);
    split(true);
    all_reduce(RANKS, 1000);
    finish(RANKS);
}

TEST(many_generations)
{
    unsigned long rounds = check_rounds(8);
    for (unsigned long i = 0; i < rounds; i++) {
        start(2);
        if (i % 2)
            all_reduce(2, 1 + check_below(5000));
        finish(2);
    }
}

static atomic_int entered;

/* Alone in a collective: nothing will ever come. */
static void *lonely(void *arg)
{
    ncclComm_t comm = arg;
    static int32_t buffers[RANKS][50000];
    int rank = 0;
    OK(nc.CommUserRank(comm, &rank));
    int32_t *data = buffers[rank];
    atomic_store(&entered, gettid());
    return (void *)(intptr_t)nc.AllReduce(data, data, 50000, ncclInt32, ncclSum, comm, NULL);
}

static double now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

TEST(abort)
{
    start(2);
    pthread_t thread;
    void *result = NULL;
    atomic_store(&entered, 0);
    CHECK_EQ(pthread_create(&thread, NULL, lonely, comms[0]), 0);
    AWAIT(thread_waits(atomic_load(&entered)));
    double began = now();
    OK(nc.CommAbort(comms[0]));
    pthread_join(thread, &result);
    CHECK(now() - began < 5);
    CHECK_NE((intptr_t)result, ncclSuccess);
    OK(nc.CommAbort(comms[1]));
    comms[0] = comms[1] = NULL;
    finish(2);
}

/* One communicator is aborted in the middle of an operation while another one of the same ranks
 * goes on unharmed. */
TEST(abort_one_of_two)
{
    ncclComm_t other[2];
    start(2);
    OK(nc.CommInitAll(other, 2, NULL));
    pthread_t thread;
    atomic_store(&entered, 0);
    CHECK_EQ(pthread_create(&thread, NULL, lonely, other[1]), 0);
    for (int i = 0; i < 10; i++) {
        all_reduce(2, 1 + check_below(100000));
        if (i == 5) {
            OK(nc.CommAbort(other[1]));
            pthread_join(thread, NULL);
        }
    }
    OK(nc.CommAbort(other[0]));
    finish(2);
}

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define R2_CLANG_ASAN 1
#endif
#endif
#ifndef R2_CLANG_ASAN
#define R2_CLANG_ASAN 0
#endif

/* A leak check in a forked child takes the parent's threads' memory for lost. */
__attribute__((noreturn)) static void leave(void)
{
#if defined(__SANITIZE_ADDRESS__) || R2_CLANG_ASAN
    _exit(0);
#else
    exit(0);
#endif
}

/* A child that exits the ordinary way, in the middle: the parent must not notice. */
TEST(fork)
{
    start(2);
    for (int i = 0; i < 5; i++) {
        fflush(NULL);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            leave();
        all_reduce(2, 1 + check_below(100000));
        int status = -1;
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
        all_reduce(2, 1 + check_below(100));
    }
    finish(2);
}

int main(int argc, char **argv)
{
    setenv("NCCL_NET_PLUGIN", check_built("libnccl-net-r2ccl.so"), 0);
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 0);
    setenv("HOSTNCCL_BOOTSTRAP_ADDR", "127.0.0.1", 1);
    setenv("HOSTNCCL_HARSH", "full", 0);
    load();
    return check_main(argc, argv);
}
