/* io/io: a thread polls after work, not after upkeep. Four threads, since fewer poll for 50 us
 * at most, whatever is set. Rung 2: its real threads, without a transport. */
#define _GNU_SOURCE
#include "await.h"
#include "check.h"

#include <sched.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "io/iothread.h"
#include "io/pause.h"
#include "util/clock.h"

#define SPIN_NS (UINT64_C(600) * 1000000)
#define THREADS 4

enum said { NOTHING, UPKEEP, WORK, BOTH };

static struct r2_io_fd fd;
static struct r2_task task;
static atomic_int say, runs;

static void note(void)
{
    int what = atomic_load(&say);

    if (what == UPKEEP || what == BOTH)
        r2_io_note(false);
    if (what == WORK || what == BOTH)
        r2_io_note(true);
    atomic_fetch_add(&runs, 1);
}

static void ready(struct r2_io_fd *f, uint32_t events)
{
    uint64_t count;

    (void)events;
    if (read(f->fd, &count, sizeof(count)) != (ssize_t)sizeof(count))
        atomic_fetch_sub(&runs, 1); /* it can be written again, that is all */
    note();
}

static void run(struct r2_task *t)
{
    (void)t;
    note();
}

static bool asleep_in(struct r2_io *io, int ms)
{
    return WITHIN_MS(ms, !r2_io_awake(io));
}

/* Idle times that end soon: a thread polls only while they do. */
static void has_paid(struct r2_io *io)
{
    struct r2_task t;

    atomic_store(&say, WORK);
    r2_task_init(&t, io, run);
    for (int i = 0; i < 60; i++) {
        int before = atomic_load(&runs);

        CHECK(r2_task_kick(&t));
        AWAIT(atomic_load(&runs) != before);
        CHECK_EQ(atomic_load(&runs), before + 1);
    }
}

/* One event or task; whether its thread polled after it before it went to sleep. */
static bool polls_after(enum said what, bool event)
{
    struct r2_io *io = event ? fd.io : task.io;
    int before = atomic_load(&runs);
    uint64_t one = 1, from;

    CHECK(asleep_in(io, 5000));
    atomic_store(&say, what);
    from = r2_now_ns();
    if (event)
        CHECK_EQ(write(fd.fd, &one, sizeof(one)), sizeof(one));
    else
        CHECK(r2_task_kick(&task));
    AWAIT(atomic_load(&runs) != before);
    CHECK(asleep_in(io, 5000));
    CHECK_EQ(atomic_load(&runs), before + 1); /* and so its last read of the event was before now */
    return r2_now_ns() - from >= SPIN_NS;
}

TEST(polls_after_work_only)
{
    CHECK_EQ(r2_io_start(THREADS, NULL, SPIN_NS), 0);
    fd.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    fd.ready = ready;
    CHECK_GE(fd.fd, 0);
    CHECK_EQ(r2_io_add(r2_io_at(1), &fd), 0);
    r2_task_init(&task, r2_io_at(2), run);
    CHECK(asleep_in(r2_io_at(1), 5000)); /* the descriptor says that it can be written */
    for (int event = 0; event < 2; event++) {
        has_paid(event ? fd.io : task.io);
        CHECK(polls_after(NOTHING, event));
        CHECK(!polls_after(UPKEEP, event));
        CHECK(polls_after(WORK, event));
        CHECK(polls_after(BOTH, event));
        CHECK(!polls_after(UPKEEP, event)); /* what the one before said is forgotten */
    }
    r2_io_del(&fd);
    close(fd.fd);
}

static int polling_of(struct r2_task *tasks, int ms)
{
    int n = 0;

    pause_us((unsigned long)ms * 1000);
    for (int i = 0; i < THREADS; i++)
        n += r2_io_awake(tasks[i].io);
    return n;
}

/* All threads have work at one moment; how many of them poll after it. */
static int pollers_of_all(int allowed)
{
    struct r2_task tasks[THREADS];
    int before = atomic_load(&runs), n;

    r2_pause_let(allowed);
    atomic_store(&say, WORK);
    for (int i = 0; i < THREADS; i++) {
        CHECK(asleep_in(r2_io_at(i), 5000));
        r2_task_init(&tasks[i], r2_io_at(i), run);
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(r2_task_kick(&tasks[i]));
    AWAIT(atomic_load(&runs) >= before + THREADS);
    n = polling_of(tasks, (int)(SPIN_NS / 2000000)); /* half of the time that they poll */
    for (int i = 0; i < THREADS; i++)
        CHECK(asleep_in(r2_io_at(i), 5000));
    return n;
}

TEST(no_more_poll_than_may)
{
    for (int turn = 0; turn < 2; turn++) { /* places are given back */
        r2_pause_let(THREADS);
        for (int i = 0; i < THREADS; i++)
            has_paid(r2_io_at(i));
        CHECK_EQ(pollers_of_all(0), 0);
        CHECK_EQ(pollers_of_all(1), 1);
        CHECK_EQ(pollers_of_all(3), 3);
        CHECK_EQ(pollers_of_all(64), THREADS);
    }
}

static int picked(int n)
{
    bool seen[THREADS] = {false};
    int different = 0;

    r2_io_use(n);
    for (int i = 0; i < 8 * THREADS; i++) {
        for (int t = 0; t < THREADS; t++)
            seen[t] |= r2_io_pick() == r2_io_at(t);
    }
    for (int t = 0; t < THREADS; t++) {
        different += seen[t];
        CHECK(!seen[t] || t < r2_io_used());
    }
    return different;
}

static atomic_int all_awake;

static void look(struct r2_task *t)
{
    (void)t;
    atomic_store(&all_awake, r2_io_all_awake());
}

/* One thread runs, the others sleep. */
static bool all_awake_with(int used, int one)
{
    struct r2_task t;

    r2_io_use(used);
    for (int i = 0; i < THREADS; i++)
        CHECK(asleep_in(r2_io_at(i), 5000));
    atomic_store(&all_awake, -1);
    r2_task_init(&t, r2_io_at(one), look);
    CHECK(r2_task_kick(&t));
    AWAIT(atomic_load(&all_awake) >= 0);
    return atomic_load(&all_awake) == 1;
}

/* Something new is given to the first threads only; those that are not used need not be awake. */
TEST(threads_in_use)
{
    CHECK_EQ(r2_io_used(), THREADS);
    for (int n = THREADS; n > 0; n--)
        CHECK_EQ(picked(n), n);
    CHECK_EQ(picked(0), 1);
    CHECK_EQ(picked(THREADS + 1), THREADS);
    CHECK(!all_awake_with(THREADS, 0));
    CHECK(all_awake_with(1, 0));
    CHECK(!all_awake_with(1, THREADS - 1)); /* that one is not in use */
    r2_pause_let(THREADS);
    CHECK(!polls_after(WORK, false)); /* fewer than four, so 50 us at most */
    r2_io_use(THREADS);
    has_paid(task.io);
    CHECK(polls_after(WORK, false));
}

/* Who has just been given something, and has not begun, has something to do. */
TEST(one_that_was_given_something)
{
    struct r2_io *io = task.io;
    bool polls = false;

    atomic_store(&say, WORK);
    for (int i = 0; i < 1000 && !polls; i++) {
        r2_task_kick(&task);
        await_nap();
        pthread_mutex_lock(&io->turn); /* it goes on looking when this is free */
        polls = r2_io_polls(io);
        if (!polls)
            pthread_mutex_unlock(&io->turn);
    }
    CHECK(polls);
    r2_task_kick(&task);
    CHECK(r2_io_awake(io));
    CHECK(!r2_io_polls(io));
    pthread_mutex_unlock(&io->turn);
    polls = false;
    WHILE_MS (1000, !polls) {
        polls = r2_io_polls(io);
    }
    CHECK(polls);
}
