#define _GNU_SOURCE
#include "comms/watch.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "comms/inside.h"
#include "control/impl.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"
#include "util/thread.h"

#define LOOK_NS (100 * R2_NS_PER_MS)
#define REST_NS (5 * R2_NS_PER_MS) /* between two looks */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list and `running` */
static struct r2_watch_entry *entries;
static bool running;
/* Its own lock: callbacks wake us while we hold the other one and wait for them. */
static pthread_mutex_t sleep_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER; /* until the thread starts */
static bool woken;

static bool carries(uint32_t state)
{
    return state != R2_SEG_NIC_FAILED && state != R2_SEG_NIC_PROBING &&
           state != R2_SEG_NIC_DRAINED && state != R2_SEG_NIC_DAMPED;
}

/* The speeds of all NICs that are no mere spares, and of those that work. While none of them works,
 * spares carry the data. */
static void add_up(uint64_t *capacity, uint32_t *share)
{
    const struct r2_segment *seg = r2_comm_segment();
    uint64_t all = 0, left = 0, spare = 0;

    for (int i = 0; seg && i < R2_SEG_MAX_NICS; i++) {
        const struct r2_seg_nic *nic = &seg->nics[i];
        uint64_t speed, works;
        bool weighs;

        if (!__atomic_load_n(&nic->used, __ATOMIC_ACQUIRE))
            continue;
        speed = __atomic_load_n(&nic->speed_mbps, __ATOMIC_RELAXED);
        weighs = __atomic_load_n(&nic->weight, __ATOMIC_RELAXED) > 0;
        works = carries(__atomic_load_n(&nic->state, __ATOMIC_RELAXED)) ? speed : 0;
        all += weighs ? speed : 0;
        *(weighs ? &left : &spare) += works;
    }
    left = left ? left : spare;
    all = all ? all : spare;
    *capacity = all * 125000;
    *share = all && left < all ? (uint32_t)(left * 65536 / all) : 65536;
}

bool r2_watch_stop(void)
{
    const struct r2_segment *seg = r2_comm_segment();

    return seg && __atomic_load_n(&seg->process.plan_stop, __ATOMIC_RELAXED);
}

static void wait_until(uint64_t at)
{
    struct timespec until = {.tv_sec = (time_t)(at / R2_NS_PER_S),
                             .tv_nsec = (long)(at % R2_NS_PER_S)};

    pthread_mutex_lock(&sleep_lock);
    if (!woken)
        pthread_cond_timedwait(&wake, &sleep_lock, &until);
    woken = false;
    pthread_mutex_unlock(&sleep_lock);
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void *watch(void *arg)
{
    (void)arg;
    pthread_setname_np(pthread_self(), "r2ccl-plan");
    for (uint64_t next = 0;;) {
        uint64_t capacity, now;
        uint32_t share;

        wait_until(next);
        now = r2_now_ns();
        next = now + LOOK_NS;
        add_up(&capacity, &share);
        pthread_mutex_lock(&lock);
        for (struct r2_watch_entry *at = entries; at; at = at->next)
            next = earlier(next, at->look(at, capacity, share, now));
        pthread_mutex_unlock(&lock);
        next = next > now + REST_NS ? next : now + REST_NS;
    }
    return NULL;
}

static void start(void)
{
    int rc;

    pthread_mutex_lock(&sleep_lock);
    pthread_cond_destroy(&wake); /* nobody waits yet */
    r2_cond_init(&wake);
    pthread_mutex_unlock(&sleep_lock);
    rc = r2_thread_start(watch, NULL);
    running = rc == 0;
    if (rc)
        R2_WARN_ONCE("no thread for plans (%s): there are none", strerror(rc));
}

void r2_watch_add(struct r2_watch_entry *entry)
{
    pthread_mutex_lock(&lock);
    entry->next = entries;
    entries = entry;
    if (!running)
        start();
    pthread_mutex_unlock(&lock);
}

void r2_watch_remove(struct r2_watch_entry *entry)
{
    pthread_mutex_lock(&lock);
    for (struct r2_watch_entry **at = &entries; *at; at = &(*at)->next) {
        if (*at == entry) {
            *at = entry->next;
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

void r2_watch_wake(void)
{
    pthread_mutex_lock(&sleep_lock);
    woken = true;
    pthread_cond_signal(&wake);
    pthread_mutex_unlock(&sleep_lock);
}

static void journal(enum r2_seg_event event, const char *text)
{
    struct r2_control ctl = {.seg = r2_comm_segment(), .fd = -1};
    char line[sizeof(((struct r2_seg_journal_entry *)0)->cause)];

    for (bool more = false; ctl.seg && *text; more = true) { /* a reason takes several lines */
        const char *before = more ? "... " : "";
        size_t room = sizeof(line) - 1 - strlen(before), n = r2_row_words(text, room);

        if (text[n]) /* room for the sign that more follows */
            n = r2_row_words(text, room - 4);
        snprintf(line, sizeof(line), "%s%.*s%s", before, (int)n, text, text[n] ? " ..." : "");
        r2_control_journal(&ctl, &(struct r2_control_event){.event = event, .cause = line});
        text += n + strspn(text + n, " ");
    }
}

void r2_watch_journal(const char *text)
{
    journal(R2_EV_PLAN, text);
}

void r2_watch_journal_failed(const char *text)
{
    journal(R2_EV_ERROR, text);
}
