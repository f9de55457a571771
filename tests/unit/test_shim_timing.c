/* How long operations take is asked of a driver that does not answer: plans go on, errors are told,
 * communicators end. Rung 3: real sockets on loopback, the no-op NCCL, a driver that only pretends
 * (tests/shim/fakecuda.c); it cannot prove how CUDA's own one blocks. */
#define _GNU_SOURCE
#include "await.h"
#include "plan_bed.h"

#include <dirent.h>

#define NOT_READY 600 /* as CUDA's driver says */

static struct {
    int (*asked)(void);
    void (*hold)(int on);
    int (*held)(void);
    int (*events)(void);
    void (*answer)(int is_slow, int what);
    int (*retained)(void);
    void (*reset)(int on);
} driver;

/* Whether that many events are left, at most 20 s from now. */
static bool events_left(int n)
{
    return WITHIN_MS(20000, driver.events() == n);
}

/* The shim's threads hold no context of a device, but for the moment in which they use it. */
static void no_context_held(void)
{
    AWAIT(!driver.retained());
}

/* Threads of ours, as their names say, and none of them takes the application's signals. */
static int without_signals(void)
{
    DIR *d = opendir("/proc/self/task");
    struct dirent *e;
    int n = 0;

    CHECK(d);
    while ((e = readdir(d))) {
        char path[300], line[256];
        uint64_t blocked = 0;
        bool ours = false;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/task/%s/status", e->d_name);
        f = fopen(path, "re");
        while (f && fgets(line, sizeof(line), f)) {
            ours |= strncmp(line, "Name:\tr2", 8) == 0;
            sscanf(line, "SigBlk: %" SCNx64, &blocked);
        }
        if (f)
            fclose(f);
        for (int s = 1; ours && s < 32; s++)
            CHECK_MSG(s == SIGKILL || s == SIGSTOP || blocked >> (s - 1) & 1, "signal %d", s);
        n += ours;
    }
    closedir(d);
    return n;
}

/* One that does not come back is a hang: no more than this. */
static void begin_to_hold(struct rank *me)
{
    CHECK_EQ(driver.held(), 0);
    driver.hold(1);
    WHILE_MS (20000, !driver.held())
        CHECK_EQ(reduce(me->comm, BIG), 0);
    CHECK(driver.held() > 0);
    CHECK(me->follow->timing->polled); /* its own operations are what is asked about */
}

static void no_longer(void)
{
    driver.hold(0);
    CHECK(events_left(0));
    CHECK_EQ(driver.held(), 0);
    no_context_held();
}

/* The leader's thread waits for the driver; plans are agreed. */
static void plans(struct rank *me)
{
    agree(me);
    if (me->rank == 0)
        begin_to_hold(me);
    pthread_barrier_wait(&together);
    agree(me);
    agree(me);
    if (me->rank == 0) {
        CHECK(driver.held() > 0); /* all the time */
        /* Threads for the agreement, plans, times; an emulator keeps some signals for itself. */
        if (!getenv("R2_TEST_EMULATED"))
            CHECK_GE(without_signals(), 3);
    }
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommDestroy(me->comm), 0); /* does not wait for it either */
}

TEST(plans)
{
    run_all(plans);
    CHECK(driver.held() > 0);
    CHECK(driver.events() > 0);
    no_longer();
}

/* A watchdog's abort ends a kernel that the driver's own call waits for: it must not wait too. */
static void aborts(struct rank *me)
{
    uint64_t begin;

    agree(me);
    if (me->rank == 0)
        begin_to_hold(me);
    pthread_barrier_wait(&together);
    begin = r2_now_ns();
    CHECK_EQ(ncclCommAbort(me->comm), 0);
    CHECK(r2_now_ns() - begin < 20 * R2_NS_PER_S);
}

TEST(aborts)
{
    for (int i = 0; i < 2; i++) { /* the next communicator is looked after again */
        run_all(aborts);
        CHECK(driver.held() > 0);
        no_longer();
    }
}

/* Many communicators come and go while they are asked about, or not: when a destroy returns their
 * events are gone, but for those that the driver is being asked about, which follow. */
static void comes_and_goes(struct rank *me)
{
    agree(me);
    for (int i = 0; i < 300; i++)
        CHECK_EQ(reduce(me->comm, BIG), 0);
    if (me->rank == 0 && r2_now_ns() % 2) {
        int asked = driver.asked();

        WHILE_MS (300, driver.asked() == asked)
            ;
    }
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

TEST(comes_and_goes)
{
    int gone = 0;

    driver.answer(1, 0);
    for (int i = 0; i < 12; i++) {
        run_all(comes_and_goes);
        gone += driver.events() == 0;
        CHECK(events_left(0));
    }
    CHECK_GE(gone, 2); /* the thread asks for 16 ms of every 250 */
    driver.answer(0, 0);
}

/* Whether the leader knows its own median, of the one size that there is and what is in force. */
static bool measured(struct rank *me)
{
    struct r2_leader *l = me->follow->leader;
    const struct r2_leader_word *told = &l->told[0];
    bool any = false;

    pthread_mutex_lock(&l->lock);
    for (int c = 0; c < R2_TIMES_CLASSES && told->epoch == me->epoch; c++)
        any |= told->medians.of[false][c] > 0;
    pthread_mutex_unlock(&l->lock);
    return any;
}

static void measure(struct rank *me)
{
    CHECK(!measured(me));
    WHILE_MS (20000, !measured(me))
        CHECK_EQ(reduce(me->comm, BIG), 0);
    CHECK(measured(me));
}

/* What the driver says reaches the planner. An error is no time, and ends nothing. */
static void known(struct rank *me)
{
    agree(me);
    if (me->rank == 0) {
        unsigned before = me->follow->timing->timed;

        driver.answer(0, 700); /* an illegal address, say */
        WHILE_MS (20000, me->follow->timing->timed <= before + R2_TIMING_WATCHES)
            CHECK_EQ(reduce(me->comm, BIG), 0);
        CHECK_GT(me->follow->timing->timed, before + R2_TIMING_WATCHES);
        CHECK(!measured(me));
        driver.answer(0, 0);
        measure(me);
    }
    pthread_barrier_wait(&together);
    agree(me);
    if (me->rank == 0)
        measure(me);
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

/* The first operations of an epoch are left out, so times have to come in order, also where the
 * ring of stopwatches begins again. */
TEST(oldest_first)
{
    struct r2_timing *t = r2_timing_new(0);
    uint64_t note[R2_TIMING_NOTES] = {0}, seen, ns;

    CHECK(t);
    for (seen = 0; note[R2_TIMING_BYTES] < R2_TIMING_WATCHES + 10;) {
        for (int i = 0; i < 10; i++) {
            note[R2_TIMING_BYTES]++;
            r2_timing_start(t, note, NULL);
            r2_timing_stop(t, NULL, true);
        }
        for (int i = 0; i < R2_TIMING_WATCHES; i++)
            AWAIT(!r2_device_watch_asks(&t->watches[i]));
        for (uint64_t got[R2_TIMING_NOTES]; r2_timing_take(t, &ns, got); seen++)
            CHECK_EQ(got[R2_TIMING_BYTES], seen + 1);
    }
    CHECK_EQ(seen, note[R2_TIMING_BYTES]);
    r2_timing_free(t);
    CHECK(events_left(0));
}

TEST(known)
{
    run_all(known);
    CHECK(events_left(0));
}

/* The application ends its devices between two of its communicators, and begins again. */
static void in_another_life(struct rank *me)
{
    agree(me);
    if (me->rank == 0)
        measure(me);
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

TEST(device_reset)
{
    for (int i = 0; i < 3; i++) {
        run_all(in_another_life);
        CHECK(events_left(0));
        no_context_held(); /* nor would a reset be the end of one */
        driver.reset(1);
        driver.reset(0);
    }
}

/* ... while the driver was still to be asked: that is over, and no device is begun for it. */
static void ends_its_device(struct rank *me)
{
    agree(me);
    if (me->rank == 0)
        begin_to_hold(me);
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommAbort(me->comm), 0);
}

TEST(device_ended)
{
    run_all(ends_its_device);
    driver.reset(1);
    driver.hold(0);
    no_context_held();
    WHILE_MS (600, true) /* two looks: r2ccl-time would be seen destroying events in no context */
        no_context_held();
    driver.reset(0);
}

int main(int argc, char **argv)
{
    void *lib = dlopen(check_built("tests/fakecuda/libcuda.so.1"), RTLD_NOW | RTLD_LOCAL);

    CHECK(lib != NULL);
    *(void **)(void *)&driver.hold = dlsym(lib, "fake_cuda_hold");
    *(void **)(void *)&driver.held = dlsym(lib, "fake_cuda_held");
    *(void **)(void *)&driver.asked = dlsym(lib, "fake_cuda_asked");
    *(void **)(void *)&driver.events = dlsym(lib, "fake_cuda_events");
    *(void **)(void *)&driver.answer = dlsym(lib, "fake_cuda_answer");
    *(void **)(void *)&driver.retained = dlsym(lib, "fake_cuda_retained");
    *(void **)(void *)&driver.reset = dlsym(lib, "fake_cuda_reset");
    CHECK(driver.hold && driver.held && driver.asked && driver.events && driver.answer &&
          driver.retained && driver.reset);
    noop_bed("auto");
    return check_main(argc, argv);
}
