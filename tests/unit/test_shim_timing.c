/* How long operations take is asked of a driver that does not answer: plans go on, errors are told,
 * communicators end. Rung 3: real sockets on loopback, the no-op NCCL, a driver that only pretends
 * (tests/shim/fakecuda.c); it cannot prove how CUDA's own one blocks. */
#define _GNU_SOURCE
#include "plan_bed.h"

static struct {
    void (*hold)(int on);
    int (*held)(void);
} driver;

/* One that does not come back is a hang: no more than this. */
static void begin_to_hold(struct rank *me)
{
    driver.hold(1);
    for (int i = 0; i < 20000 && !driver.held(); i++) {
        CHECK_EQ(reduce(me->comm, BIG), 0);
        usleep(1000);
    }
    CHECK(driver.held() > 0);
}

/* The leader's thread waits for the driver; a plan is agreed, made, taken, and taken back. */
static void plans(struct rank *me)
{
    if (me->rank == 0)
        begin_to_hold(me);
    pthread_barrier_wait(&together);
    take_plan(me, 1);
    agree(me, 0, false);
    if (me->rank == 0) {
        CHECK(driver.held() > 0); /* all the time */
        driver.hold(0);
    }
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_plans(void)
{
    run_all(plans);
}

/* A watchdog's abort ends a kernel that the driver's own call waits for: it must not wait too. */
static void aborts(struct rank *me)
{
    uint64_t begin;

    if (me->rank == 0)
        begin_to_hold(me);
    pthread_barrier_wait(&together);
    begin = r2_now_ns();
    CHECK_EQ(ncclCommAbort(me->comm), 0);
    CHECK(r2_now_ns() - begin < 20 * R2_NS_PER_S);
    pthread_barrier_wait(&together);
    if (me->rank == 0) {
        CHECK(driver.held() > 0);
        driver.hold(0);
    }
}

static void test_aborts(void)
{
    run_all(aborts);
    run_all(aborts); /* and the next communicator is looked after again */
}

/* Many communicators come and go while their operations are timed: each watch is freed once, after
 * all that is done to it (sanitizers look). */
static void comes_and_goes(struct rank *me)
{
    for (int i = 0; i < 300; i++)
        CHECK_EQ(reduce(me->comm, BIG), 0);
    if (me->rank == 0) /* while it is asked, or not */
        usleep((useconds_t)(r2_now_ns() % 3) * 100000);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_comes_and_goes(void)
{
    for (int i = 0; i < 12; i++)
        run_all(comes_and_goes);
}

static const struct check_test tests[] = {
    {"plans", test_plans},
    {"aborts", test_aborts},
    {"comes_and_goes", test_comes_and_goes},
    {0},
};

int main(int argc, char **argv)
{
    void *lib = dlopen(check_built("tests/fakecuda/libcuda.so.1"), RTLD_NOW | RTLD_LOCAL);

    CHECK(lib != NULL);
    *(void **)(void *)&driver.hold = dlsym(lib, "fake_cuda_hold");
    *(void **)(void *)&driver.held = dlsym(lib, "fake_cuda_held");
    CHECK(driver.hold && driver.held);
    noop_bed("on");
    setenv("R2CCL_PLAN_FORCE", "0", 1);
    return check_main(argc, argv, tests);
}
