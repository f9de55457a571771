/* How the communicators of plans end where operations are queued on them, over the no-op NCCL and a
 * driver of CUDA that only pretends: one that a plan has dropped is destroyed when its last
 * operation is over and no sooner, and until then an abort and a question about errors reach it;
 * and what ends at once ends together, whichever stands in front on a stream. Rung 3. It cannot
 * prove that NCCL's kernels stop: docs/shim.md says what did with GPUs. */
#define _GNU_SOURCE
#include "await.h"
#include "plan_bed.h"
#include "schedules/force.h"
#include "schedules/second_inside.h"

#define NOT_READY 600
#define CAPTURING ((r2_nccl_stream)0xca)

static struct {
    void (*answer)(int slow, int what);
    void (*hold)(int on);
    int (*events)(void);
    int (*set_current)(void *context);
    int (*get_current)(void **context);
} driver;

static void load_driver(void)
{
    void *lib = dlopen(check_built("tests/fakecuda/libcuda.so.1"), RTLD_NOW | RTLD_LOCAL);

    CHECK_MSG(lib, "%s", dlerror());
    *(void **)&driver.answer = dlsym(lib, "fake_cuda_answer");
    *(void **)&driver.hold = dlsym(lib, "fake_cuda_hold");
    *(void **)&driver.events = dlsym(lib, "fake_cuda_events");
    *(void **)&driver.set_current = dlsym(lib, "cuCtxSetCurrent");
    *(void **)&driver.get_current = dlsym(lib, "cuCtxGetCurrent");
    CHECK(driver.answer && driver.hold && driver.events && driver.set_current &&
          driver.get_current);
}

static void await_live(long n)
{
    AWAIT(noop.live() == n);
}

/* A plan's communicator that operations are queued on and the next plan does not have. */
static r2_nccl_comm dropped(struct rank *me)
{
    r2_nccl_comm y;

    take_plan(me, 1);
    y = second(me, 11);
    CHECK_EQ(reduce(me->comm, BIG), 0);
    pthread_barrier_wait(&together);
    if (me->rank == 0)
        driver.answer(0, NOT_READY);
    pthread_barrier_wait(&together);
    agree(me, 0, false);
    CHECK(r2_seconds_get(me->follow->seconds, 11) == NULL);
    for (int i = 0; i < 300 && noop.live() == 2 * RANKS; i++)
        usleep(1000);
    CHECK_EQ(noop.live(), 2 * RANKS); /* none was destroyed meanwhile */
    pthread_barrier_wait(&together);
    return y;
}

static int async_error(struct rank *me)
{
    int error = -1;

    CHECK_EQ(ncclCommGetAsyncError(me->comm, &error), 0);
    return error;
}

/* A peer dies then: the error is that communicator's, and the abort ends it. */
static void aborted(struct rank *me)
{
    r2_nccl_comm y = dropped(me);

    CHECK_EQ(async_error(me), 0);
    pthread_barrier_wait(&together); /* the first error is told to all */
    atomic_store(&y->error, R2_NCCL_REMOTE);
    CHECK_EQ(async_error(me), R2_NCCL_REMOTE);
    CHECK_EQ(ncclCommAbort(me->comm), 0);
}

static void test_aborted_while_queued(void)
{
    long aborts = noop.calls("ncclCommAbort"), destroys = noop.calls("ncclCommDestroy");

    driver.answer(0, 0);
    run_all(aborted);
    CHECK_EQ(noop.calls("ncclCommAbort"), aborts + 2 * RANKS);
    CHECK_EQ(noop.calls("ncclCommDestroy"), destroys);
    CHECK_EQ(noop.live(), 0);
    driver.answer(0, 0);
}

/* Plans come and go meanwhile, one with the same order among them. */
static void over(struct rank *me)
{
    r2_nccl_comm y = dropped(me), again;

    agree(me, 1, false);
    CHECK(!made(me));
    again = second(me, 11);
    CHECK(again != y);
    pthread_barrier_wait(&together);
    CHECK_EQ(noop.live(), 3 * RANKS);
    pthread_barrier_wait(&together);
    if (me->rank == 0)
        driver.answer(0, 0);
    await_live(2 * RANKS);
    CHECK(second(me, 11) == again);
    pthread_barrier_wait(&together);
    agree(me, 1, true);
    CHECK(second(me, 11) == again);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_destroyed_when_over(void)
{
    long aborts = noop.calls("ncclCommAbort"), destroys = noop.calls("ncclCommDestroy");

    run_all(over);
    CHECK_EQ(noop.calls("ncclCommAbort"), aborts);
    CHECK_EQ(noop.calls("ncclCommDestroy"), destroys + 3 * RANKS);
    CHECK_EQ(noop.live(), 0);
}

static void destroyed(struct rank *me)
{
    dropped(me);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_destroyed_while_queued(void)
{
    long destroys = noop.calls("ncclCommDestroy");

    run_all(destroyed);
    CHECK_EQ(noop.calls("ncclCommDestroy"), destroys + 2 * RANKS);
    CHECK_EQ(noop.live(), 0);
    driver.answer(0, 0);
}

/* In a group NCCL does it only at the group's end, and nobody may free one of them before. */
static int (*asked_for)(r2_nccl_comm comm);

static int ask_revoke(r2_nccl_comm comm)
{
    return ncclCommRevoke(comm, 0);
}

static void asked_in_group(struct rank *me)
{
    dropped(me);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(asked_for(me->comm), 0);
    pthread_barrier_wait(&together);
    if (me->rank == 0)
        driver.answer(0, 0); /* its operations are over */
    usleep(600000);          /* two looks */
    CHECK_EQ(noop.live(), 2 * RANKS);
    CHECK_EQ(ncclGroupEnd(), 0);
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_asked_in_group(void)
{
    int (*const all[])(r2_nccl_comm) = {ask_revoke, ncclCommFinalize};

    for (int i = 0; i < 2; i++) {
        asked_for = all[i];
        run_all(asked_in_group);
        CHECK_EQ(noop.live(), 0);
    }
}

/* ---- the driver answers late: cudaFree of another thread waits for a kernel */

static void hold(struct rank *me, int on)
{
    pthread_barrier_wait(&together);
    if (me->rank == 0)
        driver.hold(on);
    pthread_barrier_wait(&together);
}

/* Plans go on behind one that was dropped and is over. */
static void plans_while_held(struct rank *me)
{
    dropped(me);
    driver.answer(0, 0);
    await_live(RANKS);
    hold(me, 1);
    agree(me, 1, false);
    CHECK(!made(me));
    hold(me, 0);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

/* And a thread that aborts goes on to the next communicator, whose kernel that is. */
static void aborts_while_held(struct rank *me)
{
    struct r2_nccl_id id;
    r2_nccl_comm next;

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclCommInitRank(&next, RANKS, id, me->rank), 0);
    take_plan(me, 1);
    CHECK_EQ(reduce(me->comm, BIG), 0);
    r2_comms_drop(me->entry); /* the abort is to free it */
    me->entry = r2_comms_hold(next);
    hold(me, 1);
    CHECK_EQ(ncclCommAbort(me->comm), 0);
    CHECK_EQ(ncclCommAbort(next), 0);
    hold(me, 0);
}

static void test_held(void)
{
    run_all(plans_while_held);
    run_all(aborts_while_held);
    CHECK_EQ(noop.live(), 0);
}

/* ---- marks */

static struct timespec marked(struct rank *me)
{
    struct r2_second *c = me->follow->seconds->all;

    CHECK(c && !c->next && c->mark.state == R2_DEVICE_MARKED);
    return *(struct timespec *)c->mark.event;
}

static bool later(struct timespec a, struct timespec b)
{
    return a.tv_sec > b.tv_sec || (a.tv_sec == b.tv_sec && a.tv_nsec > b.tv_nsec);
}

/* In a group an operation is on its stream only when NCCL is through with the end; and a thread
 * keeps the device that it had. */
static void behind(struct rank *me)
{
    void *mine = &mine, *now = NULL;
    struct timespec before, end;

    CHECK_EQ(driver.set_current(mine), 0);
    take_plan(me, 1);
    CHECK_EQ(reduce(me->comm, BIG), 0);
    before = marked(me);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(me->comm, BIG), 0);
    CHECK(!later(marked(me), before));
    clock_gettime(CLOCK_MONOTONIC, &end);
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK(later(marked(me), end));
    before = marked(me);
    CHECK_EQ(reduce(me->comm, BIG), 0);
    CHECK(later(marked(me), before));
    before = marked(me);
    CHECK_EQ(ncclAllReduce(NULL, NULL, BIG, FLOAT, 0, me->comm, CAPTURING), 0); /* stays */
    CHECK(!later(marked(me), before));
    CHECK_EQ(driver.get_current(&now), 0);
    CHECK(now == mine);
    CHECK_EQ(driver.set_current(NULL), 0);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_marks(void)
{
    struct r2_device_mark mark = {0};

    run_all(behind);
    CHECK_EQ(r2_device_enter(1), 0);
    CHECK(r2_device_mark_over(&mark)); /* nothing ran on it */
    r2_device_mark_set(&mark, 1, CAPTURING);
    CHECK(!r2_device_mark_over(&mark)); /* nobody will ever know */
    r2_device_mark_set(&mark, 1, NULL);
    CHECK(r2_device_mark_over(&mark)); /* NCCL puts it behind what was there before */
    driver.answer(0, NOT_READY);
    CHECK(!r2_device_mark_over(&mark));
    driver.answer(0, 719); /* a kernel has failed: the device is no good any more */
    CHECK(!r2_device_mark_over(&mark));
    driver.answer(0, 0);
    r2_device_leave();
    r2_device_mark_free(&mark, 1);
    r2_device_mark_free(&mark, 1);
}

/* ---- one behind the other on a stream

 * A peer is dead. NCCL's abort of a communicator waits for its kernels, and these for others in
 * front of them, which hang until their own communicator is told to stop. */

static atomic_int told[RANKS];
static void (*ends)(struct rank *me);
static bool ours_in_front;

static void queued(struct rank *me)
{
    r2_nccl_comm y;

    take_plan(me, 1);
    y = second(me, 11);
    atomic_store(&told[me->rank], 0);
    (ours_in_front ? me->comm : y)->stops = &told[me->rank];
    (ours_in_front ? y : me->comm)->waits = &told[me->rank];
    pthread_barrier_wait(&together);
    ends(me);
}

static void do_abort(struct rank *me)
{
    CHECK_EQ(ncclCommAbort(me->comm), 0);
}

/* As PyTorch does with all of a process. */
static void do_abort_in_group(struct rank *me)
{
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(ncclCommAbort(me->comm), 0);
    CHECK_EQ(ncclGroupEnd(), 0);
}

static void do_revoke(struct rank *me)
{
    CHECK_EQ(ncclCommRevoke(me->comm, 0), 0);
    CHECK_EQ(ncclCommAbort(me->comm), 0);
}

static void do_shrink(struct rank *me)
{
    r2_nccl_comm child = NULL;
    int excluded = RANKS;

    CHECK_EQ(ncclCommShrink(me->comm, &excluded, 1, &child, NULL, R2_NCCL_SHRINK_ABORT), 0);
    CHECK(child != NULL);
    CHECK_EQ(ncclCommAbort(child), 0);
    CHECK_EQ(ncclCommAbort(me->comm), 0);
}

static void test_ended_together(void)
{
    void (*const all[])(struct rank *) = {do_abort, do_abort_in_group, do_revoke, do_shrink};

    for (int i = 0; i < 8; i++) {
        ends = all[i / 2];
        ours_in_front = i % 2;
        run_all(queued);
        CHECK_EQ(noop.stuck(), 0);
        CHECK_EQ(noop.live(), 0);
    }
}

/* What NCCL refuses of a group is the whole group; nothing is left behind. */
static void shrinks_wrongly(struct rank *me)
{
    r2_nccl_comm child = NULL;

    take_plan(me, 2);
    CHECK_EQ(noop.live(), 3 * RANKS);
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommShrink(me->comm, NULL, -1, &child, NULL, R2_NCCL_SHRINK_ABORT),
             R2_NCCL_ARGUMENT);
    CHECK(child == NULL);
    await_live(RANKS);
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommAbort(me->comm), 0);
}

static void test_refused_shrink(void)
{
    run_all(shrinks_wrongly);
    CHECK_EQ(noop.live(), 0);
}

/* Before 2.22 NCCL's abort waits in the call, also in a group. */
static void test_versions(void)
{
    struct r2_real real = {.version = 22105};

    CHECK(!r2_force_available(&real));
    real.version = 22203;
    CHECK(r2_force_available(&real));
}

static void test_nothing_left(void)
{
    AWAIT(driver.events() <= 0);
    CHECK_EQ(driver.events(), 0);
}

static const struct check_test tests[] = {
    {"aborted_while_queued", test_aborted_while_queued},
    {"destroyed_when_over", test_destroyed_when_over},
    {"destroyed_while_queued", test_destroyed_while_queued},
    {"asked_in_group", test_asked_in_group},
    {"held", test_held},
    {"marks", test_marks},
    {"ended_together", test_ended_together},
    {"refused_shrink", test_refused_shrink},
    {"versions", test_versions},
    {"nothing_left", test_nothing_left},
    {0},
};

int main(int argc, char **argv)
{
    noop_bed("on");
    setenv("R2CCL_PLAN_FORCE", "0", 1);
    setenv("R2CCL_TELL_ERRORS", "0", 1);
    load_driver();
    return check_main(argc, argv, tests);
}
