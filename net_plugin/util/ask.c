#define _GNU_SOURCE
#include "util/ask.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "util/clock.h"
#include "util/lock.h"
#include "util/thread.h"

#define STEP_NS UINT64_C(1000000000)
#define THREADS 8

/* The last of the threads frees it; the lock guards all but what is constant. */
struct asked {
    pthread_mutex_t lock;
    pthread_cond_t more;
    int refs;
    bool over; /* nobody waits any more */
    int n, next, done;
    uint64_t put_at; /* when the last question was put */
    size_t size;
    void (*ask)(void *item);
    bool *answered;
    unsigned char *items;
};

/* With the lock, which it lets go of. */
static void put(struct asked *a)
{
    bool last = --a->refs == 0;

    pthread_mutex_unlock(&a->lock);
    if (!last)
        return;
    pthread_mutex_destroy(&a->lock);
    pthread_cond_destroy(&a->more);
    free(a->answered);
    free(a->items);
    free(a);
}

static void *ask_main(void *arg)
{
    _Alignas(max_align_t) unsigned char item[R2_ASK_SIZE];
    struct asked *a = arg;

    pthread_setname_np(pthread_self(), "r2ccl-ask");
    pthread_mutex_lock(&a->lock);
    while (!a->over && a->next < a->n) {
        int i = a->next++;

        a->put_at = r2_now_ns();
        memcpy(item, a->items + (size_t)i * a->size, a->size);
        pthread_mutex_unlock(&a->lock);
        a->ask(item);
        pthread_mutex_lock(&a->lock);
        if (a->over)
            break;
        memcpy(a->items + (size_t)i * a->size, item, a->size);
        a->answered[i] = true;
        a->done++;
        pthread_cond_signal(&a->more);
    }
    put(a);
    return NULL;
}

/* One thread more, if there can be. Under the lock. */
static void start(struct asked *a)
{
    a->refs++;
    if (r2_thread_start(ask_main, a))
        a->refs--;
}

/* False: not all within a step. Under the lock. */
static bool step(struct asked *a, uint64_t ns)
{
    uint64_t until = r2_now_ns() + ns;
    struct timespec ts = {.tv_sec = (time_t)(until / 1000000000u),
                          .tv_nsec = (long)(until % 1000000000u)};
    int rc = 0;

    while (rc == 0 && a->done < a->n)
        rc = pthread_cond_timedwait(&a->more, &a->lock, &ts);
    return a->done == a->n;
}

/* Under the lock. */
static void wait_for(struct asked *a, atomic_int *steps)
{
    bool all = false;
    int threads = 1;

    if (atomic_load(steps) <= 0) /* others have used it up: these are asked all the same */
        all = step(a, STEP_NS);
    while (!all && a->refs > 1 && atomic_load(steps) > 0) {
        all = step(a, STEP_NS);
        if (all)
            break;
        atomic_fetch_sub(steps, 1);
        if (a->next < a->n && r2_now_ns() - a->put_at > STEP_NS / 2 && threads++ < THREADS)
            start(a);
    }
}

int r2_ask_all(void *items, size_t size, int n, void (*ask)(void *item), bool *answered,
               atomic_int *steps)
{
    struct asked *a = calloc(1, sizeof(*a));
    int silent = n;

    memset(answered, 0, sizeof(*answered) * (size_t)n);
    if (!a || size > R2_ASK_SIZE || n <= 0) {
        free(a);
        return n;
    }
    pthread_mutex_init(&a->lock, NULL);
    r2_cond_init(&a->more);
    a->refs = 1;
    a->n = n;
    a->size = size;
    a->ask = ask;
    a->answered = calloc((size_t)n, sizeof(*a->answered));
    a->items = malloc((size_t)n * size);
    pthread_mutex_lock(&a->lock);
    if (a->answered && a->items) {
        memcpy(a->items, items, (size_t)n * size);
        start(a);
        wait_for(a, steps);
        memcpy(answered, a->answered, sizeof(*answered) * (size_t)n);
        for (int i = 0; i < n; i++) {
            if (answered[i])
                memcpy((unsigned char *)items + (size_t)i * size, a->items + (size_t)i * size,
                       size);
        }
        silent = n - a->done;
    }
    a->over = true;
    put(a);
    return silent;
}
