/* Carrying plans out (R2CCL_PLAN=on) over the no-op NCCL: what runs where, in which order, and what
 * happens when a communicator cannot be made or is ended meanwhile. All ranks are threads of this
 * process; plans are proposed here, not by the planner. Rung 3: real sockets on loopback. It cannot
 * prove anything about results: tests/py/test_shim_executor.py does. */
#define _GNU_SOURCE
#include <dirent.h>

#include "await.h"
#include "plan_bed.h"
#include "util/thread.h"

/* What this thread's last operations ran on. */
static void expect(int n, const r2_nccl_comm *comms, const size_t *counts)
{
    r2_nccl_comm ran[NOOP_TRACE];
    size_t elements[NOOP_TRACE];

    CHECK_EQ(noop.traced(ran, elements), n);
    for (int i = 0; i < n; i++) {
        CHECK(ran[i] == comms[i]);
        CHECK_EQ(elements[i], counts[i]);
    }
    noop.trace();
}

#define EXPECT(n, ...) expect(n, (r2_nccl_comm[n])__VA_ARGS__

/* ---- what runs where */

/* The leader times what a plan may take, under the plan that took it, and nothing else. */
static void timed(struct rank *me)
{
    struct r2_follow *f = me->follow;
    struct r2_timing *t = f->timing;
    struct r2_device_watch *next;
    unsigned before;

    for (int i = 0; i < R2_TIMING_WATCHES; i += atomic_load(&t->watches[i].state) == 0)
        usleep(1000); /* until all stopwatches have been read */
    before = t->timed;
    next = &t->watches[before % R2_TIMING_WATCHES];
    CHECK_EQ(reduce(me->comm, BIG), 0);
    CHECK_EQ(t->timed, before + 1);
    CHECK_EQ(next->note[R2_TIMING_BYTES], BIG * 4);
    CHECK_EQ(next->note[R2_TIMING_EPOCH], f->epoch);
    next = &t->watches[t->timed % R2_TIMING_WATCHES];
    memset(next->note, 0xdb, sizeof(next->note));
    CHECK_EQ(ncclAllReduce(NULL, NULL, BIG, FLOAT, 5, me->comm, NULL), 0); /* its own sum */
    CHECK_EQ(ncclAllReduceConfig(NULL, NULL, BIG, FLOAT, 0, me->comm, NULL, NULL), 0);
    CHECK_EQ(ncclAllGather(NULL, NULL, BIG, FLOAT, me->comm, NULL), 0);
    CHECK_EQ(t->timed, before + 1);
    CHECK_EQ(next->note[R2_TIMING_BYTES], UINT64_C(0xdbdbdbdbdbdbdbdb));
}

static void single(struct rank *me)
{
    r2_nccl_comm x = me->comm, y;

    take_plan(me, 1);
    y = second(me, 11);
    CHECK_EQ(y->nranks, RANKS);
    CHECK_EQ(y->rank, (me->rank + 1) % RANKS); /* its place in {2, 0, 1} */
    noop.trace();
    CHECK_EQ(reduce(x, BIG), 0);
    CHECK_EQ(reduce(x, SMALL), 0);
    CHECK_EQ(ncclAllReduce(NULL, NULL, BIG, FLOAT, 5, x, NULL), 0); /* the application's own sum */
    CHECK_EQ(ncclAllGather(NULL, NULL, BIG, FLOAT, x, NULL), 0);
    EXPECT(4, {y, x, x, x}), (size_t[]){BIG, SMALL, BIG, BIG});
    if (me->rank == 0)
        timed(me);
    pthread_barrier_wait(&together);
    agree(me, 1, false);
    CHECK(second(me, 11) == y); /* listed still */
    noop.trace();
    CHECK_EQ(reduce(x, BIG), 0);
    EXPECT(1, {x}), (size_t[]){BIG});
    agree(me, 0, false);
    CHECK(r2_seconds_get(me->follow->seconds, 11) == NULL);
    CHECK_EQ(ncclCommDestroy(x), 0);
}

static void test_single_operations(void)
{
    run_all(single);
}

static void parts(struct rank *me)
{
    size_t first = BIG / 4 / 128 * 128;

    take_plan(me, 2);
    noop.trace();
    CHECK_EQ(reduce(me->comm, BIG), 0);
    EXPECT(2, {second(me, 11), second(me, 12)}), (size_t[]){first, BIG - first});
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_parts(void)
{
    run_all(parts);
}

/* A group keeps the places of its communicators; the plan's comes behind the application's, also
 * where that is named later. */
static void groups(struct rank *me)
{
    struct r2_nccl_id id = {{0}};
    r2_nccl_comm x = me->comm, y, z;
    uint64_t index;

    memset(id.bytes, me->rank + 1, 128); /* not signed: no plans */
    CHECK_EQ(ncclCommInitRank(&z, 1, id, 0), 0);
    take_plan(me, 1);
    y = second(me, 11);
    noop.trace();
    index = r2_comms_index(me->entry);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(x, BIG), 0);
    CHECK_EQ(reduce(z, 1), 0);
    CHECK_EQ(ncclSend(NULL, 7, FLOAT, 0, x, NULL), 0);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(x, BIG + 1), 0);
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK_EQ(reduce(x, SMALL), 0);
    expect(0, NULL, NULL);
    CHECK_EQ(ncclGroupEnd(), 0);
    EXPECT(5, {x, x, y, y, z}), (size_t[]){7, SMALL, BIG, BIG + 1, 1});
    CHECK_EQ(r2_comms_index(me->entry), index + 3);

    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(z, 1), 0); /* before anything with a plan: straight on */
    CHECK_EQ(ncclRecv(NULL, 7, FLOAT, 0, x, NULL), 0);
    CHECK_EQ(reduce(z, 2), 0);
    CHECK_EQ(reduce(x, BIG), 0);
    EXPECT(1, {z}), (size_t[]){1});
    CHECK_EQ(ncclGroupEnd(), 0);
    EXPECT(3, {x, y, z}), (size_t[]){7, BIG, 2});

    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(x, BIG), 0);
    CHECK_EQ(ncclGroupSimulateEnd(NULL), 0);
    EXPECT(1, {x}), (size_t[]){BIG});
    CHECK_EQ(ncclCommDestroy(z), 0);
    CHECK_EQ(ncclCommDestroy(x), 0);
}

static void test_groups(void)
{
    run_all(groups);
}

/* ---- what goes wrong */

static atomic_int failures;

/* One rank cannot make its communicator: it says so, it refuses the switch, and all go on. */
static void failing(struct rank *me)
{
    if (me->rank == 0) {
        noop.fail_inits(1);
        propose(me, 1, false);
    }
    reach(me);
    atomic_fetch_add(&failures, made(me));
    pthread_barrier_wait(&together);
    CHECK_EQ(atomic_load(&failures), 1);
    if (me->rank == 0)
        propose(me, 1, true);
    for (int i = 0; i < 700; i++) {
        CHECK_EQ(reduce(me->comm, BIG), 0);
        usleep(1000);
    }
    CHECK_EQ(me->follow->epoch, me->epoch); /* the switch was not agreed */
    pthread_barrier_wait(&together);
    noop.trace();
    CHECK_EQ(reduce(me->comm, BIG), 0);
    EXPECT(1, {me->comm}), (size_t[]){BIG});
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_failed_making(void)
{
    atomic_store(&failures, 0);
    run_all(failing);
}

/* Abort does not wait for what is being made; that is ended when NCCL is through with it. */
static void aborting(struct rank *me)
{
    uint64_t begin;

    if (me->rank == 0) {
        noop.hold_inits(1);
        propose(me, 1, false);
    }
    reach(me);
    CHECK_EQ(reduce(me->comm, BIG), 0); /* nor do operations */
    begin = r2_now_ns();
    CHECK_EQ(ncclCommAbort(me->comm), 0);
    CHECK(r2_now_ns() - begin < 4 * R2_NS_PER_S);
}

static void test_abort_while_making(void)
{
    long before = noop.calls("ncclCommAbort");

    run_all(aborting);
    CHECK_EQ(noop.calls("ncclCommAbort"), before + RANKS);
    noop.hold_inits(0);
    AWAIT(noop.calls("ncclCommAbort") >= before + 2 * RANKS);
    CHECK_EQ(noop.calls("ncclCommAbort"), before + 2 * RANKS);
}

/* ---- no threads */

/* Whether this process can have threads: one more takes more room than there is, or not. */
static void threads_can_start(bool can)
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
    if (!can)
        CHECK_EQ(r2_thread_start(run_rank, &thread), EAGAIN);
}

static int descriptors(void)
{
    DIR *folder = opendir("/proc/self/fd");
    int n = 0;

    CHECK(folder != NULL);
    while (readdir(folder))
        n++;
    closedir(folder);
    return n;
}

/* Nor for what ranks tell each other: each communicator goes without, and leaves nothing behind.
 * Before all other tests, which have that thread. */
static void test_no_thread_at_first(void)
{
    struct r2_nccl_id id;
    r2_nccl_comm comm;
    int before = 0;

    threads_can_start(false);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(ncclGetUniqueId(&id), 0);
        CHECK_EQ(ncclCommInitRank(&comm, RANKS, id, 1), 0);
        CHECK_EQ(reduce(comm, BIG), 0);
        CHECK_EQ(ncclCommAbort(comm), 0);
        before = i ? before : descriptors();
    }
    CHECK_EQ(descriptors(), before);
    threads_can_start(true);
}

static uint32_t seconds_made(struct rank *me)
{
    struct r2_seconds_stats stats;

    r2_seconds_stats(me->follow->seconds, &stats);
    return stats.made;
}

/* What a plan does not list any more is destroyed by a thread of its own. Where there is none, it
 * is kept, and goes with the next plan, or with the application's; the other ranks do not have it,
 * so it is not suspended. */
static void without_threads(struct rank *me)
{
    for (int again = 0; again < 2; again++) {
        take_plan(me, 1);
        CHECK_EQ(seconds_made(me), 1);
        pthread_barrier_wait(&together);
        if (me->rank == 0)
            threads_can_start(false);
        pthread_barrier_wait(&together);
        agree(me, 0, false);
        CHECK_EQ(seconds_made(me), 1);
        CHECK_EQ(noop.live(), 2 * RANKS);
        CHECK_EQ(ncclCommSuspend(me->comm, 0), 0);
        CHECK_EQ(atomic_load(&second(me, 11)->suspended), 0);
        CHECK_EQ(ncclCommResume(me->comm), 0);
        pthread_barrier_wait(&together);
        if (again) {
            CHECK_EQ(ncclCommDestroy(me->comm), 0);
            pthread_barrier_wait(&together);
            CHECK_EQ(noop.live(), 0);
        }
        pthread_barrier_wait(&together);
        if (me->rank == 0)
            threads_can_start(true);
        pthread_barrier_wait(&together);
        if (again)
            return;
        agree(me, 0, false);
        AWAIT(noop.live() == RANKS);
        CHECK_EQ(seconds_made(me), 0);
        pthread_barrier_wait(&together);
    }
}

static void test_without_threads(void)
{
    run_all(without_threads);
}

/* ---- fan-out */

static void fanned(struct rank *me)
{
    int error = 0;

    take_plan(me, 2);
    CHECK_EQ(ncclCommGetAsyncError(me->comm, &error), 0);
    CHECK_EQ(error, 0);
    pthread_barrier_wait(&together); /* the first error is told to all */
    atomic_store(&second(me, 12)->error, R2_NCCL_REMOTE);
    CHECK_EQ(ncclCommGetAsyncError(me->comm, &error), 0);
    CHECK_EQ(error, R2_NCCL_REMOTE);
    CHECK_EQ(ncclCommRevoke(me->comm, 0), 0);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), 0);
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(ncclCommFinalize(me->comm), 0);
    CHECK_EQ((me->rank ? ncclCommDestroy : ncclCommAbort)(me->comm), 0);
}

static void test_fan_out(void)
{
    static const char *const names[] = {"ncclCommRevoke", "ncclCommSuspend", "ncclCommResume",
                                        "ncclCommFinalize"};
    long before[4], destroys = noop.calls("ncclCommDestroy"), aborts = noop.calls("ncclCommAbort");
    for (int i = 0; i < 4; i++)
        before[i] = noop.calls(names[i]);
    run_all(fanned);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(noop.calls(names[i]), before[i] + 3 * RANKS);
    CHECK_EQ(noop.calls("ncclCommDestroy"), destroys + (RANKS - 1) * 3);
    CHECK_EQ(noop.calls("ncclCommAbort"), aborts + 3);
}

/* ---- ended by another thread

 * A peer is dead: one thread waits inside a plan's communicator, and another one aborts. */

static int do_revoke(r2_nccl_comm comm)
{
    return ncclCommRevoke(comm, 0);
}

static int do_suspend(r2_nccl_comm comm)
{
    return ncclCommSuspend(comm, 0);
}

static int (*stuck)(r2_nccl_comm);

static bool await(atomic_int *a, atomic_int *b)
{
    for (int i = 0; i < 20000 && !atomic_load(a) && !atomic_load(b); i++)
        usleep(1000);
    return atomic_load(a) || atomic_load(b);
}

static void *abort_stuck(void *arg)
{
    struct rank *me = arg;

    CHECK(await(&second(me, 11)->inside, &second(me, 12)->inside));
    CHECK_EQ(ncclCommAbort(me->comm), 0);
    return NULL;
}

/* The rest of the plan's communicators and the application's own are freed by now. */
static void overtaken(struct rank *me)
{
    pthread_t other;

    take_plan(me, 2);
    atomic_store(&me->comm->answered, 1);
    noop.hang(1);
    CHECK_EQ(pthread_create(&other, NULL, abort_stuck, me), 0);
    CHECK_EQ(stuck(me->comm), R2_NCCL_INTERNAL);
    CHECK_EQ(pthread_join(other, NULL), 0);
    CHECK(atomic_load(&me->entry->state) != R2_SEG_COMM_FAILED); /* it was ended, that is all */
    pthread_barrier_wait(&together);
    noop.hang(0);
}

static void test_abort_overtakes(void)
{
    static const struct {
        const char *name;
        int (*call)(r2_nccl_comm);
        long calls; /* of a rank: up to where it waited, no more */
    } cases[] = {{"ncclCommFinalize", ncclCommFinalize, 1},
                 {"ncclCommRevoke", do_revoke, 1},
                 {"ncclCommSuspend", do_suspend, 2}}; /* the application's is the first */

    for (int i = 0; i < 3; i++) {
        long before = noop.calls(cases[i].name);

        stuck = cases[i].call;
        run_all(overtaken);
        CHECK_EQ(noop.calls(cases[i].name), before + RANKS * cases[i].calls);
    }
}

static atomic_int aborted;

static void *abort_now(void *arg)
{
    CHECK_EQ(ncclCommAbort(((struct rank *)arg)->comm), 0);
    atomic_fetch_add(&aborted, 1);
    return NULL;
}

static void *ask(void *arg)
{
    int error;

    CHECK_EQ(ncclCommGetAsyncError(((struct rank *)arg)->comm, &error), 0);
    return NULL;
}

/* PyTorch's watchdog asks about a plan's communicator while it is aborted: that waits. */
static void asked(struct rank *me)
{
    pthread_t asker, other;
    r2_nccl_comm y;

    take_plan(me, 1);
    y = second(me, 11);
    atomic_store(&y->hold_asks, 1);
    CHECK_EQ(pthread_create(&asker, NULL, ask, me), 0);
    CHECK(await(&y->asking, &y->asking));
    CHECK_EQ(pthread_create(&other, NULL, abort_now, me), 0);
    usleep(100000);
    CHECK_EQ(atomic_load(&aborted), 0);
    pthread_barrier_wait(&together);
    atomic_store(&y->hold_asks, 0);
    CHECK_EQ(pthread_join(asker, NULL), 0);
    CHECK_EQ(pthread_join(other, NULL), 0);
}

static void test_abort_while_asked(void)
{
    run_all(asked);
    CHECK_EQ(atomic_load(&aborted), RANKS);
}

/* Communicators beside each other have plans of their own. */
static void two(struct rank *me)
{
    r2_nccl_comm other, y;

    CHECK_EQ(ncclCommSplit(me->comm, 0, me->rank, &other, NULL), 0);
    take_plan(me, 1);
    y = second(me, 11);
    noop.trace();
    CHECK_EQ(reduce(other, BIG), 0);
    CHECK_EQ(reduce(me->comm, BIG), 0);
    EXPECT(2, {other, y}), (size_t[]){BIG, BIG});
    CHECK_EQ(ncclCommDestroy(other), 0);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_two_communicators(void)
{
    run_all(two);
}

/* ---- captures, over a driver that only pretends */

#define CAPTURING ((r2_nccl_stream)0xca)

static int reduce_on(r2_nccl_comm comm, r2_nccl_stream stream)
{
    return ncclAllReduce(NULL, NULL, BIG, FLOAT, 0, comm, stream);
}

/* The switch falls into a capture: it takes effect with the first operation that is not captured.
 */
static void captured(struct rank *me)
{
    r2_nccl_comm x = me->comm, y;
    struct r2_device_watch watch = {0};
    uint64_t ns = 0, note[R2_DEVICE_NOTES];

    agree(me, 1, false);
    CHECK(!made(me));
    pthread_barrier_wait(&together);
    y = second(me, 11);
    if (me->rank == 0)
        propose(me, 1, true);
    for (int i = 0; i < 20000 && me->follow->epoch == me->epoch; i++) {
        noop.trace();
        CHECK_EQ(reduce_on(x, CAPTURING), 0);
        EXPECT(1, {x}), (size_t[]){BIG});
        usleep(1000);
    }
    reach(me);
    noop.trace();
    CHECK_EQ(reduce_on(x, CAPTURING), 0);
    CHECK_EQ(reduce_on(x, NULL), 0);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce_on(x, CAPTURING), 0);
    CHECK_EQ(ncclGroupEnd(), 0);
    EXPECT(3, {x, y, x}), (size_t[]){BIG, BIG, BIG});
    /* The stopwatch, as the leader uses it. */
    CHECK_EQ(r2_device_watch_start(&watch, CAPTURING), -EBUSY);
    CHECK_EQ(r2_device_watch_start(&watch, NULL), 0);
    usleep(3000);
    r2_device_watch_stop(&watch, NULL, true);
    CHECK_EQ(r2_device_watch_start(&watch, NULL), -EBUSY);
    CHECK_EQ(r2_device_enter(1), 0);
    CHECK(!r2_device_watch_take(&watch, &ns, note)); /* nobody has asked the driver */
    CHECK(r2_device_watch_poll(&watch));
    CHECK(r2_device_watch_take(&watch, &ns, note));
    r2_device_leave();
    CHECK(!r2_device_watch_take(&watch, &ns, note));
    CHECK(ns > 2 * R2_NS_PER_MS && ns < R2_NS_PER_S);
    r2_device_watch_free(&watch);
    CHECK_EQ(ncclCommDestroy(x), 0);
}

static void test_captures(void)
{
    CHECK(!r2_device_cuda());
    CHECK_EQ(r2_leader_orders(), 3);
    CHECK(dlopen(check_built("tests/fakecuda/libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) != NULL);
    CHECK(r2_device_cuda());
    CHECK_EQ(r2_leader_orders(), 1); /* one stream */
    run_all(captured);
}

static const struct check_test tests[] = {
    {"no_thread_at_first", test_no_thread_at_first},
    {"single_operations", test_single_operations},
    {"parts", test_parts},
    {"groups", test_groups},
    {"failed_making", test_failed_making},
    {"abort_while_making", test_abort_while_making},
    {"without_threads", test_without_threads},
    {"fan_out", test_fan_out},
    {"abort_overtakes", test_abort_overtakes},
    {"abort_while_asked", test_abort_while_asked},
    {"two_communicators", test_two_communicators},
    {"captures", test_captures},
    {0},
};

int main(int argc, char **argv)
{
    noop_bed("on");
    setenv("R2CCL_PLAN_FORCE", "0", 1);
    setenv("R2CCL_PLAN_ORDERS", "3", 1);
    return check_main(argc, argv, tests);
}
