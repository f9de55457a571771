#define _GNU_SOURCE
#include "schedules/second.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "real/nest.h"
#include "schedules/force.h"
#include "schedules/second_inside.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"
#include "util/thread.h"

#define WAIT_NS (5 * R2_NS_PER_S) /* for one in the making, when its parent is destroyed */
#define LOOK_NS (200 * R2_NS_PER_MS)

void r2_second_drop(struct r2_second *c)
{
    if (atomic_fetch_sub_explicit(&c->holders, 1, memory_order_acq_rel) != 1)
        return;
    r2_device_mark_free(&c->mark, c->config.device);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->wake);
    free(c);
}

/* ---- making and ending one, on its own thread */

static int call_end(struct r2_second *c, r2_nccl_comm handle, bool abort)
{
    int (*fn)(r2_nccl_comm) =
        c->config.real->fn[abort ? R2_API_ncclCommAbort : R2_API_ncclCommDestroy];
    int result = R2_NCCL_OK;

    r2_call_nest();
    if (fn && handle)
        result = fn(handle);
    r2_call_unnest();
    return result;
}

static int call_init(struct r2_second *c, r2_nccl_comm *out, bool *forced)
{
    int (*with)(r2_nccl_comm *, int, struct r2_nccl_id, int, struct r2_nccl_config *) =
        c->config.real->fn[R2_API_ncclCommInitRankConfig];
    int (*plain)(r2_nccl_comm *, int, struct r2_nccl_id, int) =
        c->config.real->fn[R2_API_ncclCommInitRank];
    int result;

    r2_call_nest();
    r2_force_begin();
    if (c->config.has_config && with)
        result = with(out, c->config.nranks, c->id, c->rank, &c->config.config);
    else
        result = plain(out, c->config.nranks, c->id, c->rank);
    *forced = r2_force_end();
    r2_call_unnest();
    return result;
}

static void *make_main(void *arg)
{
    struct r2_second *c = arg;
    void (*changed)(void) = c->config.changed;
    uint64_t begin = r2_now_ns(), before, after;
    r2_nccl_comm handle = NULL;
    bool entered, abandoned, forced = true;
    int result = R2_NCCL_SYSTEM;

    pthread_setname_np(pthread_self(), "r2ccl-make");

    entered = r2_device_enter(c->config.device) == 0;
    if (entered) {
        before = r2_device_free_bytes();
        result = call_init(c, &handle, &forced);
        after = r2_device_free_bytes();
        c->bytes = before > after ? before - after : 0;
    }
    if (result != R2_NCCL_OK)
        R2_WARN("rank %d: the communicator of a plan could not be made (NCCL says %d): the plan is "
                "dropped, traffic goes on without it",
                c->rank, result);
    else if (!forced)
        R2_WARN("rank %d: NCCL did not ask R2CCL's tuner for the communicator of a plan: the plan "
                "is dropped, traffic goes on without it",
                c->rank);
    handle = result == R2_NCCL_OK ? handle : NULL;
    pthread_mutex_lock(&c->lock);
    c->make_ns = r2_now_ns() - begin;
    abandoned = c->abandoned || !forced;
    c->handle = abandoned ? NULL : handle;
    c->state = c->abandoned ? R2_SECOND_ENDED : c->handle ? R2_SECOND_MADE : R2_SECOND_FAILED;
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->lock);
    if (abandoned && handle)
        call_end(c, handle, true);
    if (entered)
        r2_device_leave();
    r2_second_drop(c);
    if (changed)
        changed();
    return NULL;
}

/* Before NCCL frees what others may be asking it about: another thread may have taken the handle a
 * moment ago (PyTorch's watchdog asks for asynchronous errors all the time). */
static void await_others(struct r2_second *c, bool abort)
{
    pthread_mutex_lock(&c->lock);
    while (c->askers > 0 || (c->callers > 0 && !abort))
        pthread_cond_wait(&c->wake, &c->lock);
    pthread_mutex_unlock(&c->lock);
}

static struct r2_second *make(struct r2_seconds *s, const struct r2_plan_comm *plan)
{
    struct r2_second *c = calloc(1, sizeof(*c));

    if (!c)
        return NULL;
    c->config = s->config;
    memcpy(c->net_name, s->net_name, sizeof(c->net_name));
    c->config.config.net_name = c->net_name[0] ? c->net_name : NULL;
    c->key = plan->key;
    memcpy(c->id.bytes, plan->id, sizeof(c->id.bytes));
    for (int r = 0; r < s->config.nranks; r++)
        if (plan->ranks[r] == (uint32_t)s->config.rank)
            c->rank = r;
    atomic_init(&c->holders, 2);
    pthread_mutex_init(&c->lock, NULL);
    r2_cond_init(&c->wake);
    if (r2_thread_start(make_main, c)) {
        c->state = R2_SECOND_FAILED;
        r2_second_drop(c);
    }
    return c;
}

/* Lock held. Takes the handle of a made one away from everybody else; NULL: it has none. */
static r2_nccl_comm take_locked(struct r2_second *c)
{
    if (c->state != R2_SECOND_MADE)
        return NULL;
    c->state = R2_SECOND_ENDED;
    pthread_cond_broadcast(&c->wake);
    return c->handle;
}

/* If its thread still makes it, that will end it. */
static r2_nccl_comm take(struct r2_second *c)
{
    r2_nccl_comm handle;

    pthread_mutex_lock(&c->lock);
    c->abandoned = true;
    handle = take_locked(c);
    pthread_mutex_unlock(&c->lock);
    return handle;
}

/* ---- the set */

struct r2_seconds *r2_seconds_new(const struct r2_seconds_config *config)
{
    struct r2_seconds *s = calloc(1, sizeof(*s));

    if (!s)
        return NULL;
    s->config = *config;
    if (config->net_name)
        snprintf(s->net_name, sizeof(s->net_name), "%s", config->net_name);
    s->config.net_name = NULL;
    s->config.config.name = NULL;
    s->config.config.net_name = NULL;
    pthread_mutex_init(&s->lock, NULL);
    return s;
}

static struct r2_second *find(struct r2_seconds *s, uint64_t key)
{
    struct r2_second *c = s->all;

    while (c && (c->key != key || c->dropped))
        c = c->next;
    return c;
}

static bool same(const struct r2_second *c, const struct r2_plan_comm *plan)
{
    return c->key == plan->key && !memcmp(c->id.bytes, plan->id, sizeof(plan->id));
}

static bool listed(const struct r2_second *c, const struct r2_plan_table *t)
{
    for (int i = 0; i < t->ncomms; i++)
        if (same(c, &t->comms[i]))
            return true;
    return false;
}

/* Lock held. */
static void nap(struct r2_second *c, uint64_t ns)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    ns += (uint64_t)until.tv_nsec;
    until.tv_sec += (time_t)(ns / R2_NS_PER_S);
    until.tv_nsec = (long)(ns % R2_NS_PER_S);
    pthread_cond_timedwait(&c->wake, &c->lock, &until);
}

/* Whether nothing runs on it any more, or it is gone with its device. */
static bool idle(const struct r2_second *c)
{
    int rc = r2_device_enter(c->config.device);
    bool over = rc == -ENODEV || (rc == 0 && r2_device_mark_over(&c->mark));

    if (rc == 0)
        r2_device_leave();
    return over;
}

/* NCCL's destroy waits for what is on the streams, and who waits there is out of an abort's reach.
 * So it is taken when nothing is, and until then whoever aborts may take it, or ask about it. */
static r2_nccl_comm take_idle(struct r2_second *c)
{
    uint64_t pause = R2_NS_PER_MS;
    r2_nccl_comm handle = NULL;

    pthread_mutex_lock(&c->lock);
    while (c->state == R2_SECOND_MADE && !c->theirs) {
        bool over;

        pthread_mutex_unlock(&c->lock);
        over = idle(c);
        pthread_mutex_lock(&c->lock);
        if (over && !c->theirs)
            handle = take_locked(c);
        else
            nap(c, pause);
        pause = pause < LOOK_NS ? pause * 2 : pause;
    }
    pthread_mutex_unlock(&c->lock);
    return handle;
}

/* On a thread of ours, not by whoever drops it last: the driver may answer late, and the set drops
 * it under its lock. */
static void forget_mark(struct r2_second *c)
{
    if (r2_device_enter(c->config.device)) {
        c->mark.event = NULL; /* it is gone with its device */
    } else {
        r2_device_mark_free(&c->mark, c->config.device);
        r2_device_leave();
    }
}

static void *end_main(void *arg)
{
    struct r2_second *c = arg;
    r2_nccl_comm handle;

    pthread_setname_np(pthread_self(), "r2ccl-end");
    handle = take_idle(c);
    if (handle) {
        await_others(c, false);
        if (r2_device_enter(c->config.device) == 0) {
            call_end(c, handle, false);
            r2_device_leave();
        }
    }
    forget_mark(c);
    r2_second_drop(c);
    return NULL;
}

/* Off the application's thread. A made one stays in the set until it is ended; where there is no
 * thread for that now it is tried again later. False: it was none, and is the set's no more. */
static bool retire(struct r2_second *c)
{
    bool made;

    pthread_mutex_lock(&c->lock);
    made = c->state == R2_SECOND_MADE;
    c->abandoned = !made;
    pthread_mutex_unlock(&c->lock);
    if (!made) {
        r2_second_drop(c);
        return false;
    }
    atomic_fetch_add_explicit(&c->holders, 1, memory_order_relaxed);
    c->dropped = r2_thread_start(end_main, c) == 0; /* which has that hold */
    if (!c->dropped)
        r2_second_drop(c);
    return true;
}

static enum r2_second_state state_of(struct r2_second *c)
{
    enum r2_second_state state;

    pthread_mutex_lock(&c->lock);
    state = c->state;
    pthread_mutex_unlock(&c->lock);
    return state;
}

/* Whether the set keeps one when a plan comes into force. */
static bool keeps(struct r2_second *c, const struct r2_plan_table *t)
{
    bool stays = !c->dropped && (listed(c, t) || c->pinned);

    /* Also of one that no thread ends yet: at the other ranks it is gone, and a suspend would wait
     * there for them. It does not come back: what is made again has another id. */
    c->agreed &= stays;
    if (stays || !c->dropped)
        return stays || retire(c);
    if (state_of(c) == R2_SECOND_MADE)
        return true;
    r2_second_drop(c);
    return false;
}

/* A plan with entries is in force only where every rank has made what they name. */
static void agree(struct r2_seconds *s, const struct r2_plan_table *t)
{
    for (int e = 0; e < t->nentries; e++) {
        for (int i = 0; t->entries[e].schedule == R2_PLAN_TREE && i < t->entries[e].segments; i++) {
            struct r2_second *c = find(s, t->comms[t->entries[e].comm[i]].key);

            if (c)
                c->agreed = true;
        }
    }
}

void r2_seconds_follow(struct r2_seconds *s, const struct r2_plan_table *t, uint64_t epoch)
{
    struct r2_second **at;

    pthread_mutex_lock(&s->lock);
    s->epoch = epoch;
    s->lacking = false;
    for (at = &s->all; *at;) {
        struct r2_second *c = *at, *next = c->next; /* it may be gone once it is retired */

        if (keeps(c, t))
            at = &c->next;
        else
            *at = next;
    }
    for (int i = 0; i < t->ncomms && !s->ended; i++) {
        struct r2_second *c = find(s, t->comms[i].key);

        if (c && same(c, &t->comms[i]))
            continue;
        c = make(s, &t->comms[i]);
        if (!c) {
            s->lacking = true;
            continue;
        }
        c->next = s->all; /* in front of a pinned one of the same order */
        s->all = c;
    }
    agree(s, t);
    pthread_mutex_unlock(&s->lock);
}

uint64_t r2_seconds_made(struct r2_seconds *s, bool *failed)
{
    uint64_t epoch;
    bool making = false;

    pthread_mutex_lock(&s->lock);
    *failed = s->lacking || s->ended;
    for (struct r2_second *c = s->all; c; c = c->next) {
        enum r2_second_state state = state_of(c);

        if (c->dropped)
            continue;
        making |= state == R2_SECOND_MAKING;
        *failed |= state == R2_SECOND_FAILED || state == R2_SECOND_ENDED;
    }
    epoch = making && !*failed ? 0 : s->epoch;
    pthread_mutex_unlock(&s->lock);
    return epoch;
}

bool r2_seconds_ready(struct r2_seconds *s, const struct r2_plan_table *t)
{
    bool ready;

    pthread_mutex_lock(&s->lock);
    ready = !s->ended;
    for (int e = 0; e < t->nentries; e++) {
        for (int i = 0; t->entries[e].schedule == R2_PLAN_TREE && i < t->entries[e].segments; i++) {
            const struct r2_plan_comm *comm = &t->comms[t->entries[e].comm[i]];
            struct r2_second *c = find(s, comm->key);

            ready = ready && c && same(c, comm) && state_of(c) == R2_SECOND_MADE;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return ready;
}

r2_nccl_comm r2_seconds_get(struct r2_seconds *s, uint64_t key)
{
    r2_nccl_comm handle = NULL;
    struct r2_second *c;

    pthread_mutex_lock(&s->lock);
    c = find(s, key);
    if (c) {
        pthread_mutex_lock(&c->lock);
        handle = c->state == R2_SECOND_MADE ? c->handle : NULL;
        pthread_mutex_unlock(&c->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return handle;
}

void r2_seconds_pin(struct r2_seconds *s, uint64_t key)
{
    struct r2_second *c;

    pthread_mutex_lock(&s->lock);
    c = find(s, key);
    if (c)
        c->pinned = true;
    pthread_mutex_unlock(&s->lock);
}

void r2_seconds_mark(struct r2_seconds *s, uint64_t key, void *stream)
{
    struct r2_second *c;

    pthread_mutex_lock(&s->lock);
    c = find(s, key);
    if (c && c->pinned)
        c = NULL; /* it is not dropped */
    if (c)
        atomic_fetch_add_explicit(&c->holders, 1, memory_order_relaxed);
    pthread_mutex_unlock(&s->lock);
    if (!c)
        return;
    r2_device_mark_set(&c->mark, c->config.device, stream);
    r2_second_drop(c);
}

void r2_seconds_stats(struct r2_seconds *s, struct r2_seconds_stats *out)
{
    *out = (struct r2_seconds_stats){0};
    pthread_mutex_lock(&s->lock);
    for (struct r2_second *c = s->all; c; c = c->next) {
        pthread_mutex_lock(&c->lock);
        out->made += c->state == R2_SECOND_MADE;
        out->making += c->state == R2_SECOND_MAKING;
        out->bytes += c->state == R2_SECOND_MADE ? c->bytes : 0;
        s->make_ns = c->make_ns > s->make_ns ? c->make_ns : s->make_ns;
        pthread_mutex_unlock(&c->lock);
    }
    out->make_ns = s->make_ns;
    pthread_mutex_unlock(&s->lock);
}

/* Until it is not in the making any more, at most to `deadline`. */
static void await(struct r2_second *c, uint64_t deadline)
{
    pthread_mutex_lock(&c->lock);
    while (c->state == R2_SECOND_MAKING && r2_now_ns() < deadline)
        nap(c, 20 * R2_NS_PER_MS);
    pthread_mutex_unlock(&c->lock);
}

void r2_seconds_end(struct r2_seconds *s, bool abort)
{
    uint64_t deadline = r2_now_ns() + WAIT_NS;
    struct r2_second *all;

    pthread_mutex_lock(&s->lock);
    s->aborted |= abort && !s->ended;
    s->ended = true;
    all = s->all;
    s->all = NULL;
    pthread_mutex_unlock(&s->lock);
    /* All of them first: a thread that waits in one must not find the next. */
    for (struct r2_second *c = all; c; c = c->next) {
        if (!abort)
            await(c, deadline);
        c->ending = take(c);
    }
    for (struct r2_second *c = all; c; c = c->next) {
        if (c->ending) {
            await_others(c, abort);
            call_end(c, c->ending, abort);
        }
    }
    /* Freed later: that asks the driver, which may be waiting for what an abort has yet to end. */
    pthread_mutex_lock(&s->lock);
    while (all) {
        struct r2_second *c = all;

        all = c->next;
        c->next = s->over;
        s->over = c;
    }
    pthread_mutex_unlock(&s->lock);
}

void r2_seconds_again(struct r2_seconds *s)
{
    for (struct r2_second *c = s->over; c; c = c->next)
        if (c->ending)
            call_end(c, c->ending, true);
}

static void drop_all(struct r2_second *c)
{
    while (c) {
        struct r2_second *next = c->next;

        r2_second_drop(c);
        c = next;
    }
}

static void *drop_main(void *all)
{
    pthread_setname_np(pthread_self(), "r2ccl-end");
    for (struct r2_second *c = all; c; c = c->next)
        if (!c->dropped) /* else another one does */
            forget_mark(c);
    drop_all(all);
    return NULL;
}

/* Whether the driver is asked when they are dropped. */
static bool any_marked(const struct r2_second *c)
{
    while (c && (c->dropped || !c->mark.event))
        c = c->next;
    return c != NULL;
}

void r2_seconds_free(struct r2_seconds *s)
{
    if (!s)
        return;
    /* The driver may wait for kernels of other communicators, which the thread that has aborted
     * this one aborts next. */
    if (!s->aborted || !any_marked(s->over) || r2_thread_start(drop_main, s->over))
        drop_all(s->over);
    pthread_mutex_destroy(&s->lock);
    free(s);
}
