/* Rung 3: the stand-in for NCCL itself, ranks as threads of this process over loopback: groups,
 * several communicators, splits, abort from another thread, fork, user reductions.
 *
 * It runs over the built-in Socket transport; HOSTNCCL_TEST_PLUGIN names a plugin to use instead
 * (then R2CCL_NICS and the like come from the environment). What it cannot prove: several hosts. */
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
    X(CommInitRankConfig)                                                                          \
    X(GetUniqueId)                                                                                 \
    X(CommSplit)                                                                                   \
    X(CommShrink)                                                                                  \
    X(CommGrow)                                                                                    \
    X(CommGetUniqueId)                                                                             \
    X(CommRevoke)                                                                                  \
    X(CommSuspend)                                                                                 \
    X(CommResume)                                                                                  \
    X(CommFinalize)                                                                                \
    X(CommDestroy)                                                                                 \
    X(CommAbort)                                                                                   \
    X(CommGetAsyncError)                                                                           \
    X(CommUserRank)                                                                                \
    X(CommCount)                                                                                   \
    X(GetLastError)                                                                                \
    X(RedOpCreatePreMulSum)                                                                        \
    X(RedOpDestroy)                                                                                \
    X(AllReduce)                                                                                   \
    X(ReduceScatter)                                                                               \
    X(AllGather)                                                                                   \
    X(Bcast)                                                                                       \
    X(AlltoAll)                                                                                    \
    X(Send)                                                                                        \
    X(Recv)                                                                                        \
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

/* Several operations of several kinds in one group, self-sends and empty ones among them. */
TEST(group_mixed)
{
    size_t count = 1 + check_below(20000);
    static int32_t root_data[RANKS][1000], extra[RANKS][RANKS * 100];
    start(RANKS);
    fill(RANKS, count * RANKS);
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < 1000; i++)
            root_data[r][i] = r * 1000 + i;
    OK(nc.GroupStart());
    for (int r = 0; r < RANKS; r++) {
        OK(nc.Bcast(root_data[r], 1000, ncclInt32, 2, comms[r], NULL));
        OK(nc.AllReduce(in[r], in[r], 0, ncclInt32, ncclSum, comms[r], NULL));
        OK(nc.AlltoAll(in[r], out[r], count, ncclInt32, comms[r], NULL));
        OK(nc.AllGather(in[r], extra[r], 100, ncclInt32, comms[r], NULL));
        OK(nc.Send(in[r], 0, ncclInt32, (r + 1) % RANKS, comms[r], NULL));
        OK(nc.Recv(out[r], 0, ncclInt32, (r + RANKS - 1) % RANKS, comms[r], NULL));
    }
    OK(nc.GroupEnd());
    for (int r = 0; r < RANKS; r++) {
        for (int i = 0; i < 1000; i++)
            CHECK_EQ(root_data[r][i], 2000 + i);
        for (int s = 0; s < RANKS; s++) {
            CHECK_MEM(&out[r][(size_t)s * count], &in[s][(size_t)r * count], count * 4);
            CHECK_MEM(&extra[r][s * 100], in[s], 400);
        }
    }
    finish(RANKS);
}

TEST(user_reduction)
{
    start(2);
    ncclRedOp_t op[2];
    int32_t scalar[2] = {3, -5};
    fill(2, 1000);
    for (int r = 0; r < 2; r++)
        OK(nc.RedOpCreatePreMulSum(&op[r], &scalar[r], ncclInt32, ncclScalarHostImmediate,
                                   comms[r]));
    OK(nc.GroupStart());
    for (int r = 0; r < 2; r++)
        OK(nc.ReduceScatter(in[r], out[r], 500, ncclInt32, op[r], comms[r], NULL));
    OK(nc.GroupEnd());
    for (int r = 0; r < 2; r++) {
        for (int i = 0; i < 500; i++)
            CHECK_EQ(out[r][i], (int32_t)((uint32_t)in[0][r * 500 + i] * 3u -
                                          (uint32_t)in[1][r * 500 + i] * 5u));
        OK(nc.RedOpDestroy(op[r], comms[r]));
        CHECK_EQ(nc.RedOpDestroy(op[r], comms[r]), ncclInvalidArgument);
    }
    finish(2);
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
    unsigned long rounds = check_rounds(20);
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

TEST(dead_peer)
{
    start(2);
    pthread_t thread;
    void *result = NULL;
    atomic_store(&entered, 0);
    CHECK_EQ(pthread_create(&thread, NULL, lonely, comms[0]), 0);
    AWAIT(thread_waits(atomic_load(&entered)));
    OK(nc.CommAbort(comms[1])); /* its sockets close: the other side must see an error */
    pthread_join(thread, &result);
    CHECK_EQ((intptr_t)result, ncclRemoteError);
    ncclResult_t error = ncclSuccess;
    OK(nc.CommGetAsyncError(comms[0], &error));
    CHECK_EQ(error, ncclRemoteError);
    CHECK_EQ((intptr_t)lonely(comms[0]), ncclRemoteError);
    OK(nc.CommAbort(comms[0]));
    comms[0] = comms[1] = NULL;
    finish(2);
}

/* ---- revoke, suspend, grow */

static void *do_shrink(void *arg)
{
    static int last = 2;
    int rank = (int)(intptr_t)arg;
    ncclComm_t whole = comms[rank];
    OK(nc.CommShrink(whole, &last, 1, &comms[rank], NULL, NCCL_SHRINK_DEFAULT));
    OK(nc.CommDestroy(whole));
    return NULL;
}

static void at_once(int ranks, void *(*run)(void *))
{
    pthread_t threads[RANKS];
    for (intptr_t r = 0; r < ranks; r++)
        CHECK_EQ(pthread_create(&threads[r], NULL, run, (void *)r), 0);
    for (int r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
}

/* The last rank stands still: what the others wait in ends, and they go on without it. */
TEST(revoke)
{
    pthread_t threads[2];
    void *result = NULL;
    ncclResult_t error = ncclRemoteError;
    start(3);
    all_reduce(3, 1000);
    for (int r = 0; r < 2; r++) {
        atomic_store(&entered, 0);
        CHECK_EQ(pthread_create(&threads[r], NULL, lonely, comms[r]), 0);
        AWAIT(thread_waits(atomic_load(&entered)));
    }
    for (int r = 0; r < 2; r++) {
        if (r) /* also in a group, as in NCCL */
            OK(nc.GroupStart());
        OK(nc.CommRevoke(comms[r], NCCL_REVOKE_DEFAULT));
        if (r)
            OK(nc.GroupEnd());
        pthread_join(threads[r], &result);
        CHECK_EQ((intptr_t)result, ncclInvalidUsage);
        CHECK_EQ((intptr_t)lonely(comms[r]), ncclInvalidUsage);
        CHECK_EQ(nc.CommRevoke(comms[r], NCCL_REVOKE_DEFAULT), ncclInvalidUsage);
        OK(nc.CommGetAsyncError(comms[r], &error));
        CHECK_EQ(error, ncclSuccess);
    }
    at_once(2, do_shrink);
    for (int i = 0; i < 3; i++)
        all_reduce(2, 1 + check_below(MAX_COUNT));
    finish(3); /* the last one was not revoked */
}

TEST(suspend)
{
    start(2);
    all_reduce(2, 1000);
    CHECK_EQ(nc.CommResume(comms[0]), ncclInvalidUsage);
    for (int r = 0; r < 2; r++)
        OK(nc.CommSuspend(comms[r], NCCL_SUSPEND_MEM));
    for (int r = 0; r < 2; r++) {
        CHECK_EQ((intptr_t)lonely(comms[r]), ncclInvalidUsage);
        CHECK_EQ(nc.CommSuspend(comms[r], NCCL_SUSPEND_MEM), ncclInvalidUsage);
        OK(nc.CommResume(comms[r]));
    }
    all_reduce(2, 1000);
    finish(2);
}

static ncclUniqueId invitation;

static void *do_grow(void *arg)
{
    int rank = (int)(intptr_t)arg;
    ncclComm_t before = rank < 2 ? comms[rank] : NULL;
    const ncclUniqueId *id = rank ? NULL : &invitation;
    OK(nc.CommGrow(before, 3, before ? id : &invitation, before ? -1 : rank, &comms[rank], NULL));
    if (before)
        OK(nc.CommDestroy(before));
    return NULL;
}

TEST(grow)
{
    int rank = -1, count = 0;
    start(3); /* for the buffers */
    for (int r = 0; r < 3; r++)
        OK(nc.CommDestroy(comms[r]));
    OK(nc.CommInitAll(comms, 2, NULL));
    all_reduce(2, 1000);
    CHECK_EQ(nc.CommGrow(comms[0], 2, NULL, -1, &comms[2], NULL), ncclInvalidArgument);
    CHECK_EQ(nc.CommGrow(comms[0], 3, NULL, 0, &comms[2], NULL), ncclInvalidArgument);
    CHECK_EQ(nc.CommGrow(NULL, 3, NULL, 2, &comms[2], NULL), ncclInvalidArgument);
    OK(nc.CommGetUniqueId(comms[0], &invitation));
    at_once(3, do_grow);
    for (int r = 0; r < 3; r++) {
        OK(nc.CommUserRank(comms[r], &rank));
        OK(nc.CommCount(comms[r], &count));
        CHECK(rank == r && count == 3);
    }
    all_reduce(3, 1 + check_below(MAX_COUNT));
    finish(3);
}

/* ---- */

static void *nothing(void *arg)
{
    return arg;
}

/* Whether this process can have threads: one more takes more room than there is, or not. */
static bool threads_can_start(bool can)
{
    static size_t usual;
    pthread_attr_t attr;
    pthread_t thread;
    CHECK_EQ(pthread_getattr_default_np(&attr), 0);
    if (!usual)
        CHECK_EQ(pthread_attr_getstacksize(&attr, &usual), 0);
    CHECK_EQ(pthread_attr_setstacksize(&attr, can ? usual : (size_t)1 << 47), 0);
    CHECK_EQ(pthread_setattr_default_np(&attr), 0);
    pthread_attr_destroy(&attr);
    bool started = pthread_create(&thread, NULL, nothing, NULL) == 0;
    if (started)
        pthread_join(thread, NULL);
    return started;
}

/* What is to be made by threads that cannot be started leaves nothing behind, and lets the
 * communicator go that it was to be made of. */
TEST(no_threads)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t made[2] = {NULL, NULL};
    int other[2] = {1, 0};
    start(2);
    config.blocking = 0;
    if (threads_can_start(false)) {
        threads_can_start(true);
        CHECK_SKIP("threads start whatever their stacks");
    }
    CHECK_EQ(nc.CommShrink(comms[0], other, 1, made, &config, NCCL_SHRINK_DEFAULT),
             ncclSystemError);
    CHECK(made[0] == NULL);
    OK(nc.GroupStart()); /* two of them: each has a thread */
    for (int r = 0; r < 2; r++)
        OK(nc.CommShrink(comms[r], &other[r], 1, &made[r], NULL, NCCL_SHRINK_DEFAULT));
    CHECK_EQ(nc.GroupEnd(), ncclSystemError);
    CHECK(made[0] == NULL && made[1] == NULL);
    CHECK(threads_can_start(true));
    all_reduce(2, 1000);
    finish(2);
}

TEST(nonblocking)
{
    ncclComm_t comm[2] = {NULL, NULL};
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    OK(nc.GetUniqueId(&id));
    for (int r = 0; r < 2; r++)
        CHECK_EQ(nc.CommInitRankConfig(&comm[r], 2, id, r, &config), ncclInProgress);
    for (int r = 0; r < 2; r++) {
        ncclResult_t state = ncclInProgress;
        WHILE_MS (20000, state == ncclInProgress)
            OK(nc.CommGetAsyncError(comm[r], &state));
        CHECK_EQ(state, ncclSuccess);
    }
    for (int r = 0; r < 2; r++) {
        OK(nc.CommFinalize(comm[r]));
        OK(nc.CommDestroy(comm[r]));
    }
}

TEST(bad_arguments)
{
    ncclComm_t comm = NULL;
    ncclUniqueId id;
    ncclConfig_t config = {.size = sizeof(config)};
    OK(nc.GetUniqueId(&id));
    CHECK_EQ(nc.CommInitRankConfig(&comm, 2, id, 2, NULL), ncclInvalidArgument);
    CHECK_EQ(nc.CommInitRankConfig(&comm, 1, id, 0, &config), ncclInvalidArgument);
    CHECK_EQ(nc.GroupEnd(), ncclInvalidUsage);
    start(1);
    CHECK_EQ(nc.AllReduce(in[0], NULL, 5, ncclInt32, ncclSum, comms[0], NULL), ncclInvalidArgument);
    CHECK_EQ(nc.AllReduce(in[0], out[0], 5, ncclNumTypes, ncclSum, comms[0], NULL),
             ncclInvalidArgument);
    CHECK_EQ(nc.Send(in[0], 5, ncclInt32, 1, comms[0], NULL), ncclInvalidArgument);
    CHECK_EQ(nc.AllReduce(in[0], out[0], 5, ncclInt32, (ncclRedOp_t)7, comms[0], NULL),
             ncclInvalidArgument);
    CHECK_EQ(nc.Send(in[0], 5, ncclInt32, 0, comms[0], NULL), ncclInvalidUsage);
    all_reduce(1, 1000);
    finish(1);
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
    const char *plugin = getenv("HOSTNCCL_TEST_PLUGIN");
    setenv("NCCL_NET_PLUGIN", plugin && *plugin ? plugin : "none", 1);
    setenv("HOSTNCCL_BOOTSTRAP_ADDR", "127.0.0.1", 1);
    setenv("HOSTNCCL_SOCKET_ADDRS", "127.0.1.1,127.0.2.1", 1);
    setenv("HOSTNCCL_HARSH", "full", 0);
    load();
    return check_main(argc, argv);
}
