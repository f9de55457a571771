/* Questions that are not answered: a bound for all, others' answers count. Rung 2: real threads.
 * Drivers that do not answer are an ioctl() of this program's own; it cannot prove which calls of
 * real drivers hang. */
#define _GNU_SOURCE
#include <linux/sockios.h>
#include <net/if.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/syscall.h>

#include "await.h"
#include "check.h"
#include "topology/device.h"
#include "topology/nics.h"
#include "util/ask.h"
#include "util/clock.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t go = PTHREAD_COND_INITIALIZER;
static bool stuck;
static int inside, requests;

static void wait_inside(void)
{
    pthread_mutex_lock(&lock);
    inside++;
    while (stuck)
        pthread_cond_wait(&go, &lock);
    inside--;
    pthread_mutex_unlock(&lock);
}

static void set_stuck(bool is)
{
    pthread_mutex_lock(&lock);
    stuck = is;
    pthread_cond_broadcast(&go);
    pthread_mutex_unlock(&lock);
}

static int count(const int *what)
{
    int n;

    pthread_mutex_lock(&lock);
    n = *what;
    pthread_mutex_unlock(&lock);
    return n;
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list ap;
    void *arg;

    va_start(ap, request);
    arg = va_arg(ap, void *);
    va_end(ap);
    if (request == SIOCETHTOOL) {
        pthread_mutex_lock(&lock);
        requests++;
        pthread_mutex_unlock(&lock);
        wait_inside();
    }
    return (int)syscall(SYS_ioctl, fd, request, arg);
}

struct item {
    int number, square;
};

static void square(void *arg)
{
    struct item *it = arg;

    if (it->number % 5 == 3)
        wait_inside();
    it->square = it->number * it->number;
}

static int ask(struct item *items, int n, bool *answered, int seconds, uint64_t *took)
{
    atomic_int left = seconds;
    uint64_t begun = r2_now_ns();
    int silent;

    for (int i = 0; i < n; i++)
        items[i] = (struct item){.number = i};
    silent = r2_ask_all(items, sizeof(*items), n, square, answered, &left);
    *took = r2_now_ns() - begun;
    return silent;
}

TEST(all_answer)
{
    struct item items[20];
    bool answered[20];
    uint64_t took;

    CHECK_EQ(ask(items, 20, answered, 10, &took), 0);
    for (int i = 0; i < 20; i++)
        CHECK(answered[i] && items[i].square == i * i);
    CHECK_EQ(ask(items, 0, answered, 10, &took), 0);
}

/* Items 3 and 8 of 10: the others are answered, those stay as they were, also when their answer
 * comes later. */
TEST(some_do_not)
{
    struct item items[10];
    bool answered[10];
    uint64_t took;

    set_stuck(true);
    CHECK_EQ(ask(items, 10, answered, 4, &took), 2);
    CHECK_GE(took, 4 * R2_NS_PER_S - R2_NS_PER_S / 10);
    CHECK_LT(took, 20 * R2_NS_PER_S);
    CHECK_EQ(count(&inside), 2);
    set_stuck(false);
    AWAIT(count(&inside) == 0);
    await_nap();
    for (int i = 0; i < 10; i++) {
        CHECK_EQ(answered[i], i % 5 != 3);
        CHECK_EQ(items[i].square, answered[i] ? i * i : 0);
    }
}

/* All seconds are used up: still a moment for those who answer. */
TEST(no_time_left)
{
    struct item items[2];
    bool answered[2];
    uint64_t took;

    CHECK_EQ(ask(items, 2, answered, 0, &took), 0);
}

/* The driver of the only interface is silent: it is a NIC all the same, of which less is known, and
 * the second question is not even put. */
TEST(silent_driver)
{
    struct r2_settings set = {0};
    struct r2_nic nics[R2_MAX_NICS];
    char err[256];
    uint64_t begun = r2_now_ns();
    int asked;

    snprintf(set.nics, sizeof(set.nics), "127.0.1.1,127.0.2.1");
    set_stuck(true);
    CHECK_EQ(r2_nics_find(&set, nics, R2_MAX_NICS, err, sizeof(err)), 2);
    CHECK_GE(r2_now_ns() - begun, (R2_DEVICE_SECONDS - 1) * R2_NS_PER_S);
    CHECK_LT(r2_now_ns() - begun, 40 * R2_NS_PER_S);
    for (int i = 0; i < 2; i++)
        CHECK(nics[i].silent && !nics[i].speed_known && !nics[i].rdma[0]);
    begun = r2_now_ns();
    CHECK_EQ(r2_nics_find(&set, nics, R2_MAX_NICS, err, sizeof(err)), 2);
    CHECK_LT(r2_now_ns() - begun, 9 * R2_NS_PER_S); /* not so long again */
    asked = count(&requests);
    set_stuck(false);
    CHECK_GT(asked, 0);
    AWAIT(count(&inside) == 0);
}
