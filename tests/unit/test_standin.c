/* io/standin over io/io, while slow NICs are what is waited for. A caller that polls does what
 * several sleeping I/O threads would be woken for, as long as it can keep up. Rung 2: real threads,
 * without a transport. */
#include "await.h"
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "io/iothread.h"
#include "io/pause.h"
#include "io/standin.h"
#include "util/clock.h"

#define THREADS 3
#define ROUNDS 300
#define TOLD 25
#define LIMIT_NS (UINT64_C(20) * R2_NS_PER_S)
#define TAKES_NS (2 * R2_NS_PER_S) /* far more than threads take to look by themselves */
#define SOON_NS (20 * R2_NS_PER_MS)
#define GAP_NS (30 * R2_NS_PER_US)    /* between events, spent polling */
#define HEAVY_NS (500 * R2_NS_PER_US) /* of a callback that is more than the caller can do */

static struct worker {
    struct r2_io_fd fd;
    struct r2_task task;
    atomic_long by_caller, by_thread, ran;
} workers[THREADS];

static _Thread_local bool caller; /* this thread is none of io/io */
static atomic_bool heavy, stop;

static void count(struct worker *w)
{
    uint64_t until = r2_now_ns() + (atomic_load(&heavy) ? HEAVY_NS : 0);

    while (r2_now_ns() < until)
        ;
    atomic_fetch_add(caller ? &w->by_caller : &w->by_thread, 1);
    atomic_fetch_add(&w->ran, 1);
}

static void ready(struct r2_io_fd *f, uint32_t events)
{
    uint64_t n;

    (void)events;
    if (read(f->fd, &n, sizeof(n)) == sizeof(n))
        count(R2_CONTAINER_OF(f, struct worker, fd));
}

static void run(struct r2_task *t)
{
    count(R2_CONTAINER_OF(t, struct worker, task));
}

static void put(struct worker *w)
{
    uint64_t one = 1;

    CHECK_EQ(write(w->fd.fd, &one, sizeof(one)), sizeof(one));
}

static long sum(size_t at)
{
    long n = 0;

    for (int i = 0; i < THREADS; i++)
        n += atomic_load((atomic_long *)((char *)&workers[i] + at));
    return n;
}

#define SUM(what) sum(offsetof(struct worker, what))

/* Polls as NCCL does, while the NICs limit, until the worker has run so often. */
static bool look_until(struct worker *w, long runs)
{
    uint64_t until = r2_now_ns() + LIMIT_NS;

    do {
        r2_pause_limit(r2_now_ns(), 0);
        r2_standin_look();
    } while (atomic_load(&w->ran) < runs && r2_now_ns() < until);
    return atomic_load(&w->ran) >= runs;
}

static void look_for(uint64_t ns)
{
    uint64_t until = r2_now_ns() + ns;

    do {
        r2_pause_limit(r2_now_ns(), 0);
        r2_standin_look();
    } while (r2_now_ns() < until);
}

static void begin(void)
{
    caller = true;
    CHECK_EQ(r2_io_start(THREADS, NULL, R2_NS_PER_MS), 0);
    for (int i = 0; i < THREADS; i++) {
        struct worker *w = &workers[i];

        w->fd.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        w->fd.brief = true;
        w->fd.ready = ready;
        CHECK_GE(w->fd.fd, 0);
        CHECK_EQ(r2_io_add(r2_io_at(i), &w->fd), 0);
        r2_task_init(&w->task, r2_io_at(i), run);
        w->task.brief = true;
    }
}

/* Events of each thread's, and tasks that the caller queues, are the caller's. A machine that takes
 * its core away for long makes it come too late, so one round of several must do. */
static void caller_does_it(int used)
{
    uint64_t until = r2_now_ns() + LIMIT_NS;
    long threads, callers;

    r2_io_use(used);
    do {
        look_for(5 * R2_NS_PER_MS); /* they have gone to sleep */
        threads = SUM(by_thread);
        callers = SUM(by_caller);
        for (int i = 0; i < ROUNDS; i++) {
            struct worker *w = &workers[i % THREADS];
            long runs = atomic_load(&w->ran) + 1;

            if (i % 2)
                put(w);
            else
                r2_task_kick(&w->task);
            CHECK(look_until(w, runs));
            look_for(GAP_NS);
        }
        threads = SUM(by_thread) - threads;
        callers = SUM(by_caller) - callers;
    } while (threads > ROUNDS / 20 && r2_now_ns() < until);
    CHECK_EQ(threads + callers, ROUNDS);
    CHECK_MSG(threads <= ROUNDS / 20, "I/O threads did %ld of %d", threads, ROUNDS);
    r2_io_use(THREADS);
}

TEST(caller_does_it)
{
    caller_does_it(THREADS);
}

/* Sockets of threads that are given nothing new any more are among them. */
TEST(threads_used_no_more)
{
    caller_does_it(2);
}

static int by_time(const void *a, const void *b)
{
    const uint64_t *x = a, *y = b;

    return *x < *y ? -1 : *x > *y;
}

/* Told that nobody stands in any more, threads do not sleep until they would have looked. */
TEST(taken_back)
{
    uint64_t until = r2_now_ns() + LIMIT_NS, took[TOLD], soon = R2_NS_PER_MS / 2;

    do {
        for (size_t i = 0; i < TOLD; i++) {
            struct worker *w = &workers[i % THREADS];
            long runs = atomic_load(&w->ran);
            uint64_t at;

            for (int k = 0; k < 5; k++) { /* it is woken, and sleeps on as one stood in for */
                put(w);
                CHECK(look_until(w, ++runs));
            }
            look_for(R2_NS_PER_MS);
            at = r2_now_ns();
            r2_io_take_back();
            for (int k = 1; k <= 2; k++) { /* nor when it has slept once more since */
                for (uint64_t next = r2_now_ns() + 50 * R2_NS_PER_US; k == 2 && r2_now_ns() < next;)
                    ;
                put(w);
                while (atomic_load(&w->ran) < runs + k && r2_now_ns() < at + TAKES_NS)
                    ;
            }
            took[i] = r2_now_ns() - at;
        }
        qsort(took, TOLD, sizeof(took[0]), by_time);
    } while (took[TOLD / 2] > soon && r2_now_ns() < until);
    CHECK_LT(took[TOLD / 2], soon);
    CHECK_LT(took[TOLD - 1], TAKES_NS);
}

static bool is_lent(void)
{
    bool is = false;

    for (int i = 0; i < THREADS; i++)
        is |= atomic_load(&r2_io_at(i)->lent_until) != 0;
    return is;
}

/* The latest crowd is over, and a thread sleeps as one stood in for. */
static void until_lent(void)
{
    uint64_t until = r2_now_ns() + LIMIT_NS;

    while (!is_lent() && r2_now_ns() < until)
        look_for(R2_NS_PER_MS);
    CHECK(is_lent());
}

/* Slow NICs carry too much together, for 2 ms at least. */
TEST(taken_back_in_a_crowd)
{
    for (int i = 0; i < 3; i++) {
        uint64_t until = r2_now_ns() + LIMIT_NS;

        until_lent();
        while (is_lent() && r2_now_ns() < until)
            r2_standin_limit(r2_now_ns(), UINT64_C(1) << 40);
        CHECK(!is_lent());
    }
}

/* It comes no more, at any moment: what it would have done next is done all the same. */
TEST(caller_stops)
{
    int late = 0;

    for (int i = 0; i < ROUNDS; i++) {
        struct worker *w = &workers[i % THREADS];
        long runs = atomic_load(&w->ran);
        uint64_t until;

        for (int k = 0; k < 5; k++) { /* it is woken, and sleeps on as one that is stood in for */
            put(w);
            CHECK(look_until(w, ++runs));
        }
        runs++;
        look_for(check_random() % (600 * R2_NS_PER_US));
        if (i % 2)
            put(w);
        else
            r2_task_kick(&w->task);
        until = r2_now_ns() + TAKES_NS;
        while (atomic_load(&w->ran) < runs && r2_now_ns() < until)
            await_nap();
        CHECK_EQ(atomic_load(&w->ran), runs);
        late += r2_now_ns() > until - TAKES_NS + SOON_NS;
    }
    CHECK_MSG(late < ROUNDS / 2, "%d of %d took more than 20 ms", late, ROUNDS);
}

static void *kicking(void *arg)
{
    long *kicked = arg;
    unsigned gap = 20;

    for (int i = 0; !atomic_load(&stop); i++) {
        *kicked += r2_task_kick(&workers[i % THREADS].task);
        pause_us(gap = (gap * 37 + 11) % 120);
    }
    return NULL;
}

/* Tasks from elsewhere while the caller comes and goes: all run, the last of them, too. */
TEST(tasks_of_others)
{
    uint64_t until = r2_now_ns() + 2 * R2_NS_PER_S;
    long before = SUM(ran), kicked = 0;
    pthread_t thread;

    atomic_store(&stop, false);
    CHECK_EQ(pthread_create(&thread, NULL, kicking, &kicked), 0);
    while (r2_now_ns() < until) {
        look_for(check_random() % R2_NS_PER_MS);
        pause_us(check_random() % 3000);
    }
    atomic_store(&stop, true);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    AWAIT(SUM(ran) == before + kicked);
}

/* All threads are found to be too much for the caller: true, unless that took too long. */
static bool is_crowd(uint64_t until)
{
    bool crowded = false;
    uint64_t now;

    atomic_store(&heavy, true);
    while (!crowded && r2_now_ns() < until) {
        for (int i = 0; i < THREADS; i++)
            put(&workers[i]);
        look_for(R2_NS_PER_US);
        now = r2_now_ns();
        r2_pause_limit(now, 0);
        crowded = !r2_pause_limited(now);
    }
    atomic_store(&heavy, false);
    return crowded;
}

static bool crowd_ends(uint64_t until)
{
    bool crowded = true;

    while (crowded && r2_now_ns() < until) {
        uint64_t now = r2_now_ns();

        r2_pause_limit(now, 0);
        crowded = !r2_pause_limited(now);
        await_nap();
    }
    return !crowded;
}

/* More than one thread can carry: the I/O threads take it over, and it comes back to the caller
 * when that is over. */
TEST(too_much)
{
    uint64_t until = r2_now_ns() + LIMIT_NS;

    CHECK(is_crowd(until));
    CHECK(!r2_standin_look());
    CHECK(crowd_ends(until));
    caller_does_it(THREADS);
}

/* It does as soon as slow NICs are what is waited for, and nothing is too much. */
static bool looks_once(void)
{
    uint64_t until = r2_now_ns() + LIMIT_NS;
    bool looked;

    do {
        r2_pause_limit(r2_now_ns(), 0);
        looked = r2_standin_look();
    } while (!looked && r2_now_ns() < until);
    return looked;
}

/* No slow NIC, or one I/O thread, the others' sockets being their own: not all is this caller's. */
TEST(not_limited)
{
    AWAIT(!r2_pause_limited(r2_now_ns()));
    CHECK(!r2_standin_look());
    CHECK(looks_once());
    r2_io_use(1);
    r2_pause_limit(r2_now_ns(), 0);
    CHECK(!r2_standin_look());
    r2_io_use(THREADS);
    CHECK(looks_once());
}

/* A thread without sockets is not looked after. */
TEST(without_sockets)
{
    struct worker *w = &workers[0];

    CHECK(r2_io_lends(r2_io_at(0)));
    CHECK_EQ(r2_io_add(r2_io_at(0), &w->fd), -EEXIST);
    r2_io_del(&w->fd);
    CHECK(!r2_io_lends(r2_io_at(0)));
    r2_io_del(&w->fd);
    CHECK_EQ(r2_io_add(r2_io_at(0), &w->fd), 0);
    CHECK(r2_io_lends(r2_io_at(0)));
    CHECK(looks_once());
    for (int i = 0; i < THREADS; i++)
        r2_io_del(&workers[i].fd);
    r2_pause_limit(r2_now_ns(), 0);
    CHECK(!r2_standin_look());
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(r2_io_add(r2_io_at(i), &workers[i].fd), 0);
}

int main(int argc, char **argv)
{
    begin();
    return check_main(argc, argv);
}
