/* Locks that are waited for awake, for so long. Threads of this program (rung 2). */
#define _GNU_SOURCE
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/resource.h>

#include "util/clock.h"
#include "util/lock.h"

#define THREADS 4
#define EACH 20000
#define TRIES 200

static pthread_mutex_t lock;
static atomic_int turn; /* of test_short: 1 have it, 2 it is had, 3 give it back, 0 it was */

static void *count(void *arg)
{
    uint64_t *n = arg;

    for (int i = 0; i < EACH; i++) {
        r2_lock_awake(&lock, (uint64_t)(i % 3) * R2_NS_PER_US);
        ++*n;
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

TEST(one_at_a_time)
{
    pthread_t threads[THREADS];
    uint64_t n = 0;

    r2_lock_init(&lock);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, count, &n), 0);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(n, (uint64_t)THREADS * EACH);
    pthread_mutex_destroy(&lock);
}

static void *hold(void *ns)
{
    for (int i = 0; i < TRIES; i++) {
        uint64_t until;

        while (atomic_load(&turn) != 1)
            sched_yield();
        pthread_mutex_lock(&lock);
        atomic_store(&turn, 2);
        while (atomic_load(&turn) != 3) /* the other one is at the lock */
            sched_yield();
        until = r2_now_ns() + *(uint64_t *)ns;
        while (r2_now_ns() < until)
            ;
        pthread_mutex_unlock(&lock);
        atomic_store(&turn, 0);
    }
    return NULL;
}

static uint64_t slept(void)
{
    struct rusage ru;

    CHECK_EQ(getrusage(RUSAGE_THREAD, &ru), 0);
    return (uint64_t)ru.ru_nvcsw;
}

/* How many of TRIES waits for a lock that is held for `held` ns slept. */
static uint64_t waits_asleep(uint64_t held, uint64_t ns)
{
    uint64_t n = 0, before;
    pthread_t thread;

    r2_lock_init(&lock);
    CHECK_EQ(pthread_create(&thread, NULL, hold, &held), 0);
    for (int i = 0; i < TRIES; i++) {
        atomic_store(&turn, 1);
        while (atomic_load(&turn) != 2)
            sched_yield();
        before = slept();
        atomic_store(&turn, 3);
        r2_lock_awake(&lock, ns);
        n += slept() > before;
        pthread_mutex_unlock(&lock);
        while (atomic_load(&turn))
            sched_yield();
    }
    CHECK_EQ(pthread_join(thread, NULL), 0);
    pthread_mutex_destroy(&lock);
    return n;
}

/* Longer than the C library's own waiting lasts. A holder may be without a core, so not all. */
TEST(short_ones_awake)
{
    CHECK_SKIP_EMULATED("its processor time is the emulator's");
    if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
        CHECK_SKIP("the holder needs a core of its own");
    CHECK_LT(waits_asleep(100 * R2_NS_PER_US, 100 * R2_NS_PER_MS), TRIES / 2);
}

TEST(long_ones_asleep)
{
    CHECK_SKIP_EMULATED("its processor time is the emulator's");
    CHECK_LT(TRIES / 2, waits_asleep(1 * R2_NS_PER_MS, 20 * R2_NS_PER_US));
}
