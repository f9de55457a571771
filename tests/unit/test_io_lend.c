/* io/io: a caller that polls stands in for the one I/O thread (r2_io_lend). What may run where,
 * that nothing is lost on the way, and that callbacks still run one after another. Rung 2: the real
 * thread, without a transport. */
#define _GNU_SOURCE
#include "await.h"
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include "io/io.h"
#include "naps.h"
#include "util/clock.h"

#define LIMIT_NS (UINT64_C(20) * 1000000000)
#define CALLERS 2
#define ROUND 20
#define FEW 5
#define GAP_NS 30000  /* between events, spent polling */
#define TAKES_MS 2000 /* far more than the thread takes to notice that nobody polls */
#define MANY 40
#define INSIDE_NS 3000 /* of a callback: long enough to meet another */

static struct r2_io_fd brief_fd, long_fd;
static struct r2_task brief_task, long_task;
static atomic_int inside, overlaps;
static atomic_long written, seen, left_seen, brief_runs, long_runs;
static atomic_long by_thread;     /* brief callbacks that the I/O thread ran */
static atomic_bool misplaced;     /* a callback that is not brief ran elsewhere */
static _Thread_local bool caller; /* this thread is none of io/io */
static _Thread_local bool worked; /* the latest look */
static atomic_bool stop;
static struct r2_task many[MANY]; /* brief; kicked by an event that asks for them */
static atomic_long many_by_caller, many_by_thread;
static atomic_int looks;                 /* of who waits inside */
static atomic_bool ask_many, hold, held; /* the next event: kicks them; waits inside */
static atomic_bool ask_one, ask_next;    /* ... kicks the first, which kicks the second */

static void enter(bool brief)
{
    if (atomic_fetch_add(&inside, 1))
        atomic_fetch_add(&overlaps, 1);
    if (!brief && caller)
        atomic_store(&misplaced, true);
    if (brief && !caller)
        atomic_fetch_add(&by_thread, 1);
}

static void leave(void)
{
    uint64_t until = r2_now_ns() + INSIDE_NS;

    while (r2_now_ns() < until)
        ;
    atomic_fetch_sub(&inside, 1);
}

static void run_many(struct r2_task *t)
{
    atomic_fetch_add(caller ? &many_by_caller : &many_by_thread, 1);
    if (t == &many[0] && atomic_exchange(&ask_next, false))
        r2_task_kick(&many[1]);
}

/* Inside a callback, as one that reads a socket is, while somebody cancels the caller. */
static void held_inside(void)
{
    atomic_store(&held, true);
    for (; atomic_load(&hold); await_nap()) /* a cancellation point, as read and write are */
        atomic_fetch_add(&looks, 1);
}

static void ready(struct r2_io_fd *f, uint32_t events)
{
    uint64_t count = 0;

    (void)events;
    enter(f == &brief_fd);
    for (int i = 0; caller && atomic_load(&ask_many) && i < MANY; i++)
        r2_task_kick(&many[i]);
    if (caller && atomic_load(&hold))
        held_inside();
    if (caller && atomic_exchange(&ask_one, false)) {
        atomic_store(&ask_next, true);
        r2_task_kick(&many[0]);
        leave();
        return; /* unread: reading would be an event of its own, which wakes the thread */
    }
    if (read(f->fd, &count, sizeof(count)) == (ssize_t)sizeof(count))
        atomic_fetch_add(f == &brief_fd ? &seen : &left_seen, (long)count);
    leave();
}

static void run(struct r2_task *t)
{
    enter(t == &brief_task);
    atomic_fetch_add(t == &brief_task ? &brief_runs : &long_runs, 1);
    leave();
}

static void add(struct r2_io_fd *f, bool brief)
{
    f->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    f->brief = brief;
    f->ready = ready;
    CHECK_GE(f->fd, 0);
    CHECK_EQ(r2_io_add(r2_io_at(0), f), 0);
}

static void begin(void)
{
    caller = true;
    CHECK_EQ(r2_io_start(1, NULL, 0), 0);
    add(&brief_fd, true);
    add(&long_fd, false);
    r2_task_init(&brief_task, r2_io_at(0), run);
    r2_task_init(&long_task, r2_io_at(0), run);
    brief_task.brief = true;
    for (int i = 0; i < MANY; i++) {
        r2_task_init(&many[i], r2_io_at(0), run_many);
        many[i].brief = true;
    }
}

static void put(struct r2_io_fd *f)
{
    uint64_t one = 1;

    CHECK_EQ(write(f->fd, &one, sizeof(one)), sizeof(one));
}

/* Polls as NCCL does until the counter is there. */
static bool lend_until(atomic_long *counter, long value)
{
    uint64_t until = r2_now_ns() + LIMIT_NS;

    while (atomic_load(counter) < value && r2_now_ns() < until)
        r2_io_lend(r2_io_at(0), &worked);
    return atomic_load(counter) >= value;
}

static void lend_for(uint64_t ns)
{
    uint64_t until = r2_now_ns() + ns;

    while (r2_now_ns() < until)
        r2_io_lend(r2_io_at(0), &worked);
}

/* A thread that was woken and waits for a core shows only once it sleeps again. */
static long naps_of_a_sleeper(uint64_t until)
{
    struct naps now;

    while (!(now = naps_now()).asleep && r2_now_ns() < until)
        lend_for(GAP_NS);
    return now.n;
}

static long preempted(void)
{
    struct rusage ru;

    CHECK_EQ(getrusage(RUSAGE_THREAD, &ru), 0);
    return ru.ru_nivcsw;
}

/* Few events at a time while the caller polls: the thread mostly sleeps through them. It looks once
 * in a millisecond, and steps in when the caller loses its core: such rounds do not count. */
static void thread_sleeps_through(void (*event)(uint64_t until))
{
    uint64_t until = r2_now_ns() + LIMIT_NS;
    int good = 0, rounds = 0;

    while (rounds < 100 && r2_now_ns() < until) {
        long slept = naps_of_a_sleeper(until), before = atomic_load(&by_thread), lost = preempted();

        for (int i = 0; i < FEW; i++) {
            event(until);
            lend_for(GAP_NS);
        }
        if (preempted() != lost)
            continue;
        rounds++;
        good += naps_of_a_sleeper(until) == slept && atomic_load(&by_thread) == before;
    }
    CHECK_MSG(good > rounds / 20, "%d of %d rounds", good, rounds);
}

static void brief_event(uint64_t until)
{
    (void)until;
    put(&brief_fd);
    CHECK(lend_until(&seen, atomic_fetch_add(&written, 1) + 1));
}

TEST(caller_runs_what_is_brief)
{
    thread_sleeps_through(brief_event);
}

/* Each while the caller goes on polling, so that the thread must be woken for them. */
TEST(thread_runs_the_rest)
{
    for (long i = 1; i <= ROUND; i++) {
        put(&long_fd);
        CHECK(lend_until(&left_seen, i));
        CHECK(r2_task_kick(&long_task));
        CHECK(lend_until(&long_runs, i));
    }
    CHECK(!atomic_load(&misplaced));
}

/* The caller comes no more. */
TEST(thread_takes_over)
{
    for (int i = 0; i < ROUND; i++) {
        bool task = i % 2;
        long want = atomic_fetch_add(&written, !task) + !task;
        long tasks = atomic_load(&brief_runs) + task;

        for (int k = 0; k < 100; k++) {
            r2_io_lend(r2_io_at(0), &worked);
            if (k % 10 == 0)
                await_nap(); /* it goes to sleep meanwhile */
        }
        if (task)
            r2_task_kick(&brief_task);
        else
            put(&brief_fd);
        (void)WITHIN_MS(TAKES_MS, atomic_load(&seen) >= want && atomic_load(&brief_runs) >= tasks);
        CHECK_EQ(atomic_load(&seen), want);
        CHECK_EQ(atomic_load(&brief_runs), tasks);
    }
}

static void *polling(void *arg)
{
    (void)arg;
    caller = true;
    while (!atomic_load(&stop))
        r2_io_lend(r2_io_at(0), &worked);
    return NULL;
}

/* One event makes work for many: the caller has other things to do, so it takes a few of them. */
TEST(a_few_tasks_at_a_time)
{
    uint64_t until = r2_now_ns() + LIMIT_NS;
    long mine = 0, want = 0;

    while (!mine && r2_now_ns() < until) {
        uint64_t warm = r2_now_ns() + 3000000;
        long seen_before = atomic_load(&seen);

        while (r2_now_ns() < warm) /* the thread leaves its descriptors to the caller */
            r2_io_lend(r2_io_at(0), &worked);
        atomic_store(&ask_many, true);
        put(&brief_fd);
        atomic_fetch_add(&written, 1);
        while (atomic_load(&seen) == seen_before && r2_now_ns() < until)
            r2_io_lend(r2_io_at(0), &worked);
        atomic_store(&ask_many, false);
        mine = atomic_load(&many_by_caller); /* of the one call that ran the event */
        want += mine ? MANY : 0;
    }
    CHECK_GT(mine, 0);
    CHECK(mine <= MANY / 4);
    while (atomic_load(&many_by_caller) + atomic_load(&many_by_thread) < want &&
           r2_now_ns() < until)
        r2_io_lend(r2_io_at(0), &worked);
    CHECK_EQ(atomic_load(&many_by_caller) + atomic_load(&many_by_thread), want);
}

static long both_ran(void)
{
    return atomic_load(&many_by_caller) + atomic_load(&many_by_thread);
}

/* ... and the thread's if it does not. */
TEST(left_for_the_thread)
{
    uint64_t limit = r2_now_ns() + LIMIT_NS;
    int left = 0;

    while (left < ROUND / 2 && r2_now_ns() < limit) {
        uint64_t until = r2_now_ns() + TAKES_MS * R2_NS_PER_MS, warm = r2_now_ns() + 3000000;
        long mine = atomic_load(&many_by_caller), ran = both_ran();

        while (r2_now_ns() < warm) /* the thread leaves its descriptors to the caller */
            r2_io_lend(r2_io_at(0), &worked);
        atomic_store(&ask_one, true);
        put(&brief_fd);
        atomic_fetch_add(&written, 1);
        while (both_ran() == ran && atomic_load(&seen) < atomic_load(&written) &&
               r2_now_ns() < until)
            r2_io_lend(r2_io_at(0), &worked);
        if (atomic_exchange(&ask_one, false))
            continue; /* it was the thread's event */
        left += atomic_load(&many_by_caller) == mine + 1;
        CHECK(WITHIN_MS(TAKES_MS, both_ran() == ran + 2));
    }
    CHECK_GT(left, 0);
    put(&brief_fd);
    CHECK(lend_until(&seen, atomic_fetch_add(&written, 1) + 1));
}

static void *cancelled(void *arg)
{
    uint64_t until = r2_now_ns() + LIMIT_NS / 4;

    (void)arg;
    caller = true;
    while (r2_now_ns() < until) { /* ends by being cancelled */
        r2_io_lend(r2_io_at(0), &worked);
        pthread_testcancel();
    }
    return NULL;
}

/* The application cancels a thread that stands in: it ends when it has given the turn back. */
TEST(cancelled_while_it_stands_in)
{
    pthread_t thread;
    void *how = NULL;
    int before;

    atomic_store(&hold, true);
    CHECK_EQ(pthread_create(&thread, NULL, cancelled, NULL), 0);
    WHILE_MS (5000, !atomic_load(&held)) {
        put(&brief_fd); /* until one is the caller's: the thread may be awake for others */
        atomic_fetch_add(&written, 1);
    }
    CHECK(atomic_load(&held));
    CHECK_EQ(pthread_cancel(thread), 0);
    before = atomic_load(&looks);
    WHILE_MS (1000, atomic_load(&looks) < before + 2) /* else it has left with the turn in hand */
        ;
    atomic_store(&hold, false);
    CHECK_EQ(pthread_join(thread, &how), 0);
    CHECK(how == PTHREAD_CANCELED);
    for (long i = 1, more = atomic_load(&long_runs); i <= 3; i++) {
        CHECK(r2_task_kick(&long_task));
        AWAIT(atomic_load(&long_runs) == more + i);
    }
    CHECK(lend_until(&seen, atomic_load(&written)));
}

TEST(one_after_another)
{
    pthread_t threads[CALLERS];
    uint64_t until = r2_now_ns() + LIMIT_NS / 40;
    long rest = atomic_load(&left_seen), n = 0;

    for (int i = 0; i < CALLERS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, polling, NULL), 0);
    for (; r2_now_ns() < until; n++) {
        put(&brief_fd);
        atomic_fetch_add(&written, 1);
        r2_task_kick(&brief_task);
        if (n % 8 == 0) {
            put(&long_fd);
            rest++;
            r2_task_kick(&long_task);
        }
        await_nap();
    }
    CHECK(lend_until(&seen, atomic_load(&written)));
    CHECK(lend_until(&left_seen, rest));
    atomic_store(&stop, true);
    for (int i = 0; i < CALLERS; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(atomic_load(&seen), atomic_load(&written));
    CHECK_EQ(atomic_load(&left_seen), rest);
    CHECK_EQ(atomic_load(&overlaps), 0);
    CHECK(!atomic_load(&misplaced));
}

int main(int argc, char **argv)
{
    begin();
    return check_main(argc, argv);
}
