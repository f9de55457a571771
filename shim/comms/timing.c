#define _GNU_SOURCE
#include "comms/timing.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comms/watch.h"
#include "util/log.h"
#include "util/thread.h"

#define LOOK_MS 250

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards these */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static struct r2_timing *all; /* others add at its head, the thread alone takes away */
static bool running;

/* Whose the events are. FREE: anybody's who takes them; ASKED: the thread's, for a moment; OWNER:
 * r2_timing_free destroys them; LEFT: the thread has to; GONE: they are destroyed. Each step is
 * acquire and release: who takes them sees what was done to them before. */
enum { FREE, ASKED, OWNER, LEFT, GONE };

static bool step(struct r2_timing *t, int from, int to)
{
    return atomic_compare_exchange_strong_explicit(&t->turn, &from, to, memory_order_acq_rel,
                                                   memory_order_acquire);
}

static void destroy_events(struct r2_timing *t)
{
    for (int i = 0; i < R2_TIMING_WATCHES; i++)
        r2_device_watch_free(&t->watches[i]);
}

static void ask(struct r2_timing *t)
{
    bool any = false, news = false;

    for (int i = 0; i < R2_TIMING_WATCHES; i++)
        any |= r2_device_watch_asks(&t->watches[i]);
    if (!any || r2_device_enter(t->device))
        return;
    for (int i = 0; i < R2_TIMING_WATCHES; i++)
        news |= r2_device_watch_poll(&t->watches[i]);
    r2_device_leave();
    if (news)
        r2_watch_wake();
}

/* The thread's part for `t`; no lock is held. True: it is over. */
static bool attend(struct r2_timing *t)
{
    if (step(t, FREE, ASKED)) {
        ask(t);
        if (step(t, ASKED, FREE))
            return false; /* else it was left to us meanwhile */
    }
    if (step(t, LEFT, GONE)) {
        if (r2_device_enter(t->device) == 0) { /* else they are gone with the device */
            destroy_events(t);
            r2_device_leave();
        }
    }
    return atomic_load_explicit(&t->turn, memory_order_acquire) == GONE;
}

/* Which comes after `t`, the first for NULL. */
static struct r2_timing *after(struct r2_timing *t)
{
    struct r2_timing *next;

    pthread_mutex_lock(&lock);
    next = t ? t->next : all;
    pthread_mutex_unlock(&lock);
    return next;
}

static void take_away(struct r2_timing *t)
{
    pthread_mutex_lock(&lock);
    for (struct r2_timing **at = &all; *at; at = &(*at)->next) {
        if (*at == t) {
            *at = t->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
    free(t);
}

static void *poll_all(void *arg)
{
    const struct timespec pause = {.tv_nsec = LOOK_MS * 1000000L};

    (void)arg;
    pthread_setname_np(pthread_self(), "r2ccl-time");
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!all)
            pthread_cond_wait(&wake, &lock);
        pthread_mutex_unlock(&lock);
        for (struct r2_timing *t = after(NULL), *next; t; t = next) {
            bool over = attend(t);

            next = after(t);
            if (over)
                take_away(t);
        }
        nanosleep(&pause, NULL);
    }
    return NULL;
}

static bool start(void)
{
    int rc = r2_thread_start(poll_all, NULL);

    if (rc)
        R2_WARN_ONCE("no thread that times operations (%s): plans are not measured", strerror(rc));
    return rc == 0;
}

static bool add(struct r2_timing *t)
{
    bool there;

    pthread_mutex_lock(&lock);
    running = running || start();
    there = running;
    if (there) {
        t->next = all;
        all = t;
        pthread_cond_signal(&wake);
    }
    pthread_mutex_unlock(&lock);
    return there;
}

struct r2_timing *r2_timing_new(int device)
{
    struct r2_timing *t = calloc(1, sizeof(*t));

    if (t)
        t->device = device;
    return t;
}

/* Relaxed: a watch's state says what is in it. An older count changes only the order in which times
 * are taken. */
static unsigned count(struct r2_timing *t)
{
    return atomic_load_explicit(&t->timed, memory_order_relaxed);
}

void r2_timing_start(struct r2_timing *t, const uint64_t note[R2_TIMING_NOTES], void *stream)
{
    struct r2_device_watch *watch = &t->watches[count(t) % R2_TIMING_WATCHES];

    t->now = NULL;
    if (r2_device_watch_start(watch, stream))
        return;
    memcpy(watch->note, note, sizeof(watch->note));
    t->now = watch;
}

void r2_timing_stop(struct r2_timing *t, void *stream, bool good)
{
    if (!t->now)
        return;
    if (t->now->device && !t->polled)
        t->polled = add(t); /* not again, where no thread can be started: a watch stays in use */
    r2_device_watch_stop(t->now, stream, good);
    t->now = NULL;
    atomic_store_explicit(&t->timed, count(t) + 1, memory_order_relaxed);
}

bool r2_timing_take(struct r2_timing *t, uint64_t *ns, uint64_t note[R2_TIMING_NOTES])
{
    unsigned oldest = count(t);

    for (unsigned i = 0; i < R2_TIMING_WATCHES; i++)
        if (r2_device_watch_take(&t->watches[(oldest + i) % R2_TIMING_WATCHES], ns, note))
            return true;
    return false;
}

void r2_timing_abort(struct r2_timing *t)
{
    if (t)
        atomic_store_explicit(&t->aborted, true, memory_order_relaxed); /* says only: do not call */
}

void r2_timing_free(struct r2_timing *t)
{
    if (!t)
        return;
    if (!t->polled) { /* no thread knows it: none was needed, or none could be started */
        if (!atomic_load_explicit(&t->aborted, memory_order_relaxed))
            destroy_events(t);
        free(t);
    } else if (!atomic_load_explicit(&t->aborted, memory_order_relaxed) && step(t, FREE, OWNER)) {
        destroy_events(t);
        step(t, OWNER, GONE); /* the thread's from here on */
    } else {
        while (!step(t, ASKED, LEFT) && !step(t, FREE, LEFT))
            ; /* the thread is between the two: a few instructions */
    }
}
