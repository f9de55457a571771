#define _GNU_SOURCE
#include "schedules/second.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api/call.h"
#include "device/device.h"
#include "schedules/force.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"
#include "util/thread.h"

#define WAIT_NS (5 * R2_NS_PER_S) /* for one in the making, when its parent is destroyed */

enum state { MAKING, MADE, FAILED, ENDED };

/* One communicator. Shared by the set and its thread; the last one frees it. */
struct second {
    struct second *next;
    atomic_int holders;
    struct r2_seconds_config config;
    char net_name[64];
    uint64_t key;
    struct r2_nccl_id id;
    int rank;            /* in its own order */
    r2_nccl_comm ending; /* the handle, with the thread that ends the set */
    atomic_bool suspended;
    bool agreed; /* a plan in force has named it: all ranks have it. Under the set's lock */

    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t wake;
    enum state state;
    bool abandoned, pinned;
    r2_nccl_comm handle;
    int askers;  /* threads that ask NCCL about it, which takes no time: its end waits for them */
    int callers; /* ... that have NCCL do something to it: its end waits, an abort does not */
    uint64_t bytes, make_ns;
};

struct r2_seconds {
    struct r2_seconds_config config;
    char net_name[64];
    pthread_mutex_t lock; /* guards the rest; taken before a second's */
    struct second *all;
    uint64_t epoch; /* of the newest plan */
    bool lacking;   /* one of it could not even be begun */
    bool ended;
    uint64_t make_ns;
};

static void drop(struct second *c)
{
    if (atomic_fetch_sub_explicit(&c->holders, 1, memory_order_acq_rel) != 1)
        return;
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->wake);
    free(c);
}

/* ---- making and ending one, on its own thread */

static int call_end(struct second *c, r2_nccl_comm handle, bool abort)
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

static int call_init(struct second *c, r2_nccl_comm *out, bool *forced)
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
    struct second *c = arg;
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
    c->state = c->abandoned ? ENDED : c->handle ? MADE : FAILED;
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->lock);
    if (abandoned && handle)
        call_end(c, handle, true);
    if (entered)
        r2_device_leave();
    drop(c);
    if (changed)
        changed();
    return NULL;
}

/* Before NCCL frees what others may be asking it about: another thread may have taken the handle a
 * moment ago (PyTorch's watchdog asks for asynchronous errors all the time). */
static void await_others(struct second *c, bool abort)
{
    pthread_mutex_lock(&c->lock);
    while (c->askers > 0 || (c->callers > 0 && !abort))
        pthread_cond_wait(&c->wake, &c->lock);
    pthread_mutex_unlock(&c->lock);
}

static struct second *make(struct r2_seconds *s, const struct r2_plan_comm *plan)
{
    struct second *c = calloc(1, sizeof(*c));

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
        c->state = FAILED;
        drop(c);
    }
    return c;
}

/* Takes the handle of a made one away from everybody else; NULL: it has none, and its thread, if
 * it still makes it, will end it. */
static r2_nccl_comm take(struct second *c, bool abandon)
{
    r2_nccl_comm handle = NULL;

    pthread_mutex_lock(&c->lock);
    c->abandoned |= abandon;
    if (c->state == MADE) {
        handle = c->handle;
        c->state = ENDED;
    }
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

static struct second *find(struct r2_seconds *s, uint64_t key)
{
    struct second *c = s->all;

    while (c && c->key != key)
        c = c->next;
    return c;
}

static bool same(const struct second *c, const struct r2_plan_comm *plan)
{
    return c->key == plan->key && !memcmp(c->id.bytes, plan->id, sizeof(plan->id));
}

static bool listed(const struct second *c, const struct r2_plan_table *t)
{
    for (int i = 0; i < t->ncomms; i++)
        if (same(c, &t->comms[i]))
            return true;
    return false;
}

static void *end_main(void *arg)
{
    struct second *c = arg;
    r2_nccl_comm handle = take(c, true);

    pthread_setname_np(pthread_self(), "r2ccl-end");
    await_others(c, false);
    if (r2_device_enter(c->config.device) == 0) {
        call_end(c, handle, false);
        r2_device_leave();
    }
    drop(c);
    return NULL;
}

/* Off the application's thread: NCCL's destroy waits for what is on the streams. False: there is no
 * thread for it now; the set keeps it until there is one, or until it ends. */
static bool retire(struct second *c)
{
    bool made;

    pthread_mutex_lock(&c->lock);
    made = c->state == MADE; /* stays so: who ends one takes it out of the set first */
    c->abandoned = !made;
    pthread_mutex_unlock(&c->lock);
    if (made)
        return r2_thread_start(end_main, c) == 0; /* which has our hold */
    drop(c);
    return true;
}

/* A plan with entries is in force only where every rank has made what they name. */
static void agree(struct r2_seconds *s, const struct r2_plan_table *t)
{
    for (int e = 0; e < t->nentries; e++) {
        for (int i = 0; t->entries[e].schedule == R2_PLAN_TREE && i < t->entries[e].segments; i++) {
            struct second *c = find(s, t->comms[t->entries[e].comm[i]].key);

            if (c)
                c->agreed = true;
        }
    }
}

void r2_seconds_follow(struct r2_seconds *s, const struct r2_plan_table *t, uint64_t epoch)
{
    struct second **at;

    pthread_mutex_lock(&s->lock);
    s->epoch = epoch;
    s->lacking = false;
    for (at = &s->all; *at;) {
        struct second *c = *at, *next = c->next; /* it may be gone once it is retired */
        bool stays = listed(c, t) || c->pinned;

        /* Also of one that no thread ends yet: at the other ranks it is gone, and a suspend would
         * wait there for them. It does not come back: what is made again has another id. */
        c->agreed &= stays;
        if (stays || !retire(c))
            at = &c->next;
        else
            *at = next;
    }
    for (int i = 0; i < t->ncomms && !s->ended; i++) {
        struct second *c = find(s, t->comms[i].key);

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

static enum state state_of(struct second *c)
{
    enum state state;

    pthread_mutex_lock(&c->lock);
    state = c->state;
    pthread_mutex_unlock(&c->lock);
    return state;
}

uint64_t r2_seconds_made(struct r2_seconds *s, bool *failed)
{
    uint64_t epoch;
    bool making = false;

    pthread_mutex_lock(&s->lock);
    *failed = s->lacking || s->ended;
    for (struct second *c = s->all; c; c = c->next) {
        enum state state = state_of(c);

        making |= state == MAKING;
        *failed |= state == FAILED || state == ENDED;
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
            struct second *c = find(s, comm->key);

            ready = ready && c && same(c, comm) && state_of(c) == MADE;
        }
    }
    pthread_mutex_unlock(&s->lock);
    return ready;
}

r2_nccl_comm r2_seconds_get(struct r2_seconds *s, uint64_t key)
{
    r2_nccl_comm handle = NULL;
    struct second *c;

    pthread_mutex_lock(&s->lock);
    c = find(s, key);
    if (c) {
        pthread_mutex_lock(&c->lock);
        handle = c->state == MADE ? c->handle : NULL;
        pthread_mutex_unlock(&c->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return handle;
}

void r2_seconds_pin(struct r2_seconds *s, uint64_t key)
{
    struct second *c;

    pthread_mutex_lock(&s->lock);
    c = find(s, key);
    if (c)
        c->pinned = true;
    pthread_mutex_unlock(&s->lock);
}

void r2_seconds_stats(struct r2_seconds *s, struct r2_seconds_stats *out)
{
    *out = (struct r2_seconds_stats){0};
    pthread_mutex_lock(&s->lock);
    for (struct second *c = s->all; c; c = c->next) {
        pthread_mutex_lock(&c->lock);
        out->made += c->state == MADE;
        out->making += c->state == MAKING;
        out->bytes += c->state == MADE ? c->bytes : 0;
        s->make_ns = c->make_ns > s->make_ns ? c->make_ns : s->make_ns;
        pthread_mutex_unlock(&c->lock);
    }
    out->make_ns = s->make_ns;
    pthread_mutex_unlock(&s->lock);
}

/* NCCL meets all ranks of a communicator to suspend or resume it, so each of them has to come to
 * the same ones, in the same order: those that a plan in force has named, by their keys. One that
 * is being made, or was made here and failed elsewhere, is not among them. */
static bool together(enum r2_api function)
{
    return function == R2_API_ncclCommSuspend || function == R2_API_ncclCommResume;
}

/* Behind those of the same key. */
static void put_by_key(struct second **out, int n, struct second *c)
{
    for (; n > 0 && out[n - 1]->key > c->key; n--)
        out[n] = out[n - 1];
    out[n] = c;
}

/* The made ones, held, so that they can be looked at without the list's lock. */
static int hold(struct r2_seconds *s, struct second **out, int room, bool agreed)
{
    int n = 0;

    pthread_mutex_lock(&s->lock);
    for (struct second *c = s->all; c && n < room; c = c->next) {
        pthread_mutex_lock(&c->lock);
        if (c->state == MADE && (c->agreed || !agreed)) {
            atomic_fetch_add_explicit(&c->holders, 1, memory_order_relaxed);
            put_by_key(out, n++, c);
        }
        pthread_mutex_unlock(&c->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* Before each call, and for this one only: while one call waits, an abort may end all of them. The
 * handle stays as it is from MADE on; only who may use it changes. */
static bool borrow(struct second *c, bool ask)
{
    bool there;

    pthread_mutex_lock(&c->lock);
    there = c->state == MADE;
    if (there)
        *(ask ? &c->askers : &c->callers) += 1;
    pthread_mutex_unlock(&c->lock);
    return there;
}

static void give_back(struct second *c, bool ask)
{
    pthread_mutex_lock(&c->lock);
    *(ask ? &c->askers : &c->callers) -= 1;
    pthread_cond_broadcast(&c->wake);
    pthread_mutex_unlock(&c->lock);
}

/* NCCL resumes only what it has suspended; one may have been made since. Relaxed: whoever suspends
 * and resumes a communicator does so one after the other. */
static bool concerns(const struct second *c, enum r2_api function)
{
    return function != R2_API_ncclCommResume ||
           atomic_load_explicit(&c->suspended, memory_order_relaxed);
}

static void note(struct second *c, enum r2_api function)
{
    if (together(function))
        atomic_store_explicit(&c->suspended, function == R2_API_ncclCommSuspend,
                              memory_order_relaxed);
}

int r2_seconds_fan(struct r2_seconds *s, enum r2_api function, bool has_flags, int flags)
{
    struct second *all[4 * R2_PLAN_ORDERS];
    int n = hold(s, all, 4 * R2_PLAN_ORDERS, together(function)), first = R2_NCCL_OK;
    void *fn = s->config.real->fn[function];

    r2_call_nest();
    for (int i = 0; i < n; i++) {
        if (fn && concerns(all[i], function) && borrow(all[i], false)) {
            int result = has_flags ? ((int (*)(r2_nccl_comm, int))fn)(all[i]->handle, flags)
                                   : ((int (*)(r2_nccl_comm))fn)(all[i]->handle);

            if (result == R2_NCCL_OK)
                note(all[i], function);
            give_back(all[i], false);
            first = first == R2_NCCL_OK ? result : first;
        }
        drop(all[i]);
    }
    r2_call_unnest();
    return first;
}

int r2_seconds_async(struct r2_seconds *s)
{
    int (*fn)(r2_nccl_comm, int *) = s->config.real->fn[R2_API_ncclCommGetAsyncError];
    struct second *all[4 * R2_PLAN_ORDERS];
    int n = hold(s, all, 4 * R2_PLAN_ORDERS, false), first = R2_NCCL_OK;

    r2_call_nest();
    for (int i = 0; i < n; i++) {
        if (fn && first == R2_NCCL_OK && borrow(all[i], true)) {
            int error = R2_NCCL_OK, result = fn(all[i]->handle, &error);

            give_back(all[i], true);
            first = result != R2_NCCL_OK           ? result
                    : error == R2_NCCL_IN_PROGRESS ? R2_NCCL_OK
                                                   : error;
        }
        drop(all[i]);
    }
    r2_call_unnest();
    return first;
}

/* Until it is not in the making any more, at most to `deadline`. */
static void await(struct second *c, uint64_t deadline)
{
    pthread_mutex_lock(&c->lock);
    while (c->state == MAKING && r2_now_ns() < deadline) {
        struct timespec until;

        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += 20 * 1000000L;
        until.tv_sec += until.tv_nsec / 1000000000L;
        until.tv_nsec %= 1000000000L;
        pthread_cond_timedwait(&c->wake, &c->lock, &until);
    }
    pthread_mutex_unlock(&c->lock);
}

void r2_seconds_end(struct r2_seconds *s, bool abort)
{
    uint64_t deadline = r2_now_ns() + WAIT_NS;
    struct second *all;

    pthread_mutex_lock(&s->lock);
    s->ended = true;
    all = s->all;
    s->all = NULL;
    pthread_mutex_unlock(&s->lock);
    /* All of them first: a thread that waits in one must not find the next. */
    for (struct second *c = all; c; c = c->next) {
        if (!abort)
            await(c, deadline);
        c->ending = take(c, true);
    }
    while (all) {
        struct second *c = all;

        all = c->next;
        if (c->ending) {
            await_others(c, abort);
            call_end(c, c->ending, abort);
        }
        drop(c);
    }
}

void r2_seconds_free(struct r2_seconds *s)
{
    if (!s)
        return;
    pthread_mutex_destroy(&s->lock);
    free(s);
}
