#define _GNU_SOURCE
#include "direct/direct.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "direct/ahead.h"
#include "nccl/nccl.h"
#include "plan/sizes.h"
#include "reduce/reduce.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"
#include "util/thread.h"

/* For all connections to be made; and after one has ended, as a peer's does that gives up. */
#define CONNECT_NS (30 * R2_NS_PER_S)
#define ENDED_NS (3 * R2_NS_PER_S)

/* A thread that finds nothing to do yields for a while, then naps: for a part of the time that it
 * has waited. The engine's own threads move the data meanwhile. */
#define YIELD_NS (50 * R2_NS_PER_US)
#define NAP_PART 8
#define NAP_LEAST_NS (20 * R2_NS_PER_US)
#define NAP_MOST_NS (200 * R2_NS_PER_US)

struct operation {
    struct operation *next;
    struct r2_direct_call call;
    struct r2_schedule schedule;
    size_t credit; /* posted on a lane */
    uint64_t base; /* steps of all operations before */
    uint64_t word; /* see r2_links_sign */
};

struct r2_direct {
    struct r2_direct_config config;
    struct r2_links *links; /* the progress thread's, once it runs */
    struct r2_exec *exec;
    struct operation *current; /* the last that was begun; the progress thread's */
    bool moving;               /* it has not landed */
    void *window;
    bool ready;              /* all connections are there; the progress thread's */
    uint64_t idle_ns;        /* since then nothing moved; 0: something did */
    unsigned host_copies[2]; /* r2_direct_host's */
    struct r2_links_card card;
    atomic_bool stop;

    pthread_mutex_t lock;
    pthread_cond_t wake; /* the progress thread: work; and who waits: it has landed, or ended */
    enum r2_direct_state state;
    int error;
    struct operation *first, **last;
    uint64_t given, landed, ended; /* operations */
    uint64_t steps;                /* of those given */
    bool running;
};

/* ---- the host's memory */

static void *host_alloc(void *user, size_t len)
{
    void *memory = NULL;

    (void)user;
    return posix_memalign(&memory, 4096, len) ? NULL : memory;
}

static void host_free(void *user, void *memory, size_t len)
{
    (void)user;
    (void)len;
    free(memory);
}

static int host_copy(void *user, const struct r2_direct_call *call, bool out, bool written,
                     void *slot, uint64_t offset, size_t len)
{
    unsigned *done = user;

    if (out)
        memcpy(slot, (const char *)(written ? call->out : call->in) + offset, len);
    else
        memcpy((char *)call->out + offset, slot, len);
    done[out]++;
    return 1;
}

static int host_copied(void *user, bool out)
{
    unsigned *done = user;
    int n = (int)done[out];

    done[out] = 0;
    return n;
}

const struct r2_direct_device r2_direct_host = {
    .alloc = host_alloc, .free = host_free, .copy = host_copy, .copied = host_copied};

/* ---- what the machine begins */

static int do_post(void *user, enum r2_lane_kind kind, int peer, void *data, size_t len)
{
    struct r2_direct *d = user;

    return r2_links_post(d->links, kind, peer, data, len, d->current->word);
}

static int do_posted(void *user, enum r2_lane_kind kind, int peer)
{
    struct r2_direct *d = user;

    return r2_links_posted(d->links, kind, peer);
}

static int do_copy(void *user, bool out, bool written, void *slot, uint64_t offset, size_t len)
{
    struct r2_direct *d = user;

    /* Not when it is sent: the next operation may have begun then. */
    if (out)
        r2_links_sign(slot, len, d->current->word);
    return d->config.device->copy(d->config.user, &d->current->call, out, written, slot, offset,
                                  len);
}

static int do_copied(void *user, bool out)
{
    struct r2_direct *d = user;

    return d->config.device->copied(d->config.user, out);
}

static void do_add(void *user, void *sum, const void *const *in, int n, size_t count)
{
    struct r2_direct *d = user;

    r2_reduce(sum, in, n, count, d->current->call.type, d->current->call.op);
    r2_links_sign(sum, count * d->current->schedule.elem, d->current->word);
}

static const struct r2_exec_ops ops = {do_post, do_posted, do_copy, do_copied, do_add};

/* ---- the progress thread */

static void changed(struct r2_direct *d)
{
    if (d->config.changed)
        d->config.changed(d->config.caller);
}

static void set_state(struct r2_direct *d, enum r2_direct_state state, int error)
{
    pthread_mutex_lock(&d->lock);
    d->state = state;
    d->error = error;
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
    changed(d);
}

/* The next operation, if there is one. */
static void take(struct r2_direct *d)
{
    struct operation *o;

    pthread_mutex_lock(&d->lock);
    o = d->first;
    if (o) {
        d->first = o->next;
        d->last = d->first ? d->last : &d->first;
    }
    pthread_mutex_unlock(&d->lock);
    if (!o)
        return;
    r2_exec_begin(d->exec, &o->schedule, o->credit);
    free(d->current);
    d->current = o;
    d->moving = true;
}

static void landed(struct r2_direct *d)
{
    uint64_t number;

    d->moving = false;
    pthread_mutex_lock(&d->lock);
    number = ++d->landed;
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
    if (d->config.landed)
        d->config.landed(d->config.caller, number);
}

/* What has landed has been sent, too. */
static void ended(struct r2_direct *d)
{
    pthread_mutex_lock(&d->lock);
    d->ended = d->landed;
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
}

static bool busy(const struct r2_direct *d)
{
    return d->moving || !r2_exec_ended(d->exec);
}

static size_t window_len(const struct r2_direct *d)
{
    return r2_sizes_bytes(&d->config.memory);
}

static int join(struct r2_direct *d)
{
    int rc = r2_links_turn(d->links);

    if (rc == 0 && d->idle_ns &&
        r2_now_ns() - d->idle_ns > (r2_links_ended(d->links) ? ENDED_NS : CONNECT_NS))
        return -ETIMEDOUT;
    if (rc == 1)
        rc = r2_links_register(d->links, d->window, window_len(d));
    else
        return rc;
    if (rc)
        return rc;
    d->ready = true;
    set_state(d, R2_DIRECT_READY, 0);
    return 1;
}

/* 1: something moved. */
static int work(struct r2_direct *d)
{
    int rc;

    if (!d->ready)
        return join(d);
    if (!d->moving)
        take(d);
    if (!busy(d))
        return 0;
    rc = r2_exec_turn(d->exec);
    if (rc >= 0 && d->moving && r2_exec_landed(d->exec)) {
        landed(d);
        rc = 1; /* the next one may begin */
    }
    if (rc >= 0 && !busy(d)) {
        ended(d);
        rc = 1;
    }
    return rc;
}

/* Nothing moved: the processor is others', and the sooner again the sooner something may. */
static void rest(struct r2_direct *d)
{
    uint64_t now = r2_now_ns(), idle;
    struct timespec nap = {0};

    d->idle_ns = d->idle_ns ? d->idle_ns : now;
    idle = now - d->idle_ns;
    if (idle < YIELD_NS) {
        sched_yield();
        return;
    }
    idle /= NAP_PART;
    idle = idle < NAP_LEAST_NS ? NAP_LEAST_NS : idle > NAP_MOST_NS ? NAP_MOST_NS : idle;
    nap.tv_nsec = (long)idle;
    clock_nanosleep(CLOCK_MONOTONIC, 0, &nap, NULL);
}

static bool stopped(struct r2_direct *d)
{
    /* Relaxed: the flag is all there is to see. */
    return atomic_load_explicit(&d->stop, memory_order_relaxed);
}

static void await_work(struct r2_direct *d)
{
    pthread_mutex_lock(&d->lock);
    while (!stopped(d) &&
           (d->state == R2_DIRECT_LISTENING || (d->state == R2_DIRECT_READY && !d->first))) {
        d->idle_ns = 0;
        pthread_cond_wait(&d->wake, &d->lock);
    }
    pthread_mutex_unlock(&d->lock);
}

static void *run(void *arg)
{
    struct r2_direct *d = arg;
    int rc = 0;

    pthread_setname_np(pthread_self(), "r2ccl-direct");
    while (rc >= 0) {
        if (!busy(d))
            await_work(d);
        rc = stopped(d) ? -ECANCELED : work(d);
        if (rc > 0)
            d->idle_ns = 0;
        else if (rc == 0)
            rest(d);
    }
    rc = r2_links_reason(d->links, rc);
    /* The peers end by this, too. */
    r2_links_free(d->links);
    d->links = NULL;
    set_state(d, R2_DIRECT_FAILED, rc);
    pthread_mutex_lock(&d->lock);
    d->running = false;
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

/* ---- life */

static int make_exec(struct r2_direct *d)
{
    struct r2_exec_config config = {.p = d->config.p,
                                    .slots = d->window,
                                    .piece = d->config.memory.slot + R2_SIZES_BEHIND,
                                    .n_slots = d->config.memory.n_slots,
                                    .ops = &ops,
                                    .user = d};

    return r2_exec_new(&d->exec, &config);
}

static void unmake(struct r2_direct *d)
{
    r2_links_free(d->links);
    r2_exec_free(d->exec);
    if (d->window)
        d->config.device->free(d->config.user, d->window, window_len(d));
    free(d->current);
    while (d->first) {
        struct operation *o = d->first;

        d->first = o->next;
        free(o);
    }
    pthread_mutex_destroy(&d->lock);
    pthread_cond_destroy(&d->wake);
    free(d);
}

static int make(struct r2_direct *d)
{
    struct r2_direct_config *c = &d->config;
    int rc = r2_links_new(&d->links, c->net, c->id, c->rank, c->p);

    if (rc)
        return rc;
    d->card = *r2_links_own(d->links);
    d->window = c->device->alloc(c->user, window_len(d));
    if (!d->window)
        return -ENOMEM;
    rc = make_exec(d);
    if (rc)
        return rc;
    d->running = true;
    return -r2_thread_start(run, d);
}

int r2_direct_new(struct r2_direct **out, const struct r2_direct_config *config)
{
    struct r2_direct *d;
    int rc;

    *out = NULL;
    if (config->p < 2 || config->p > R2_DIRECT_RANKS)
        return -EINVAL;
    d = calloc(1, sizeof(*d));
    if (!d)
        return -ENOMEM;
    d->config = *config;
    if (!config->per_node)
        d->config.per_node = 1;
    if (!config->memory.n_slots)
        d->config.memory = r2_sizes_window(config->p, config->nic_rate, d->config.per_node);
    if (!config->device) {
        d->config.device = &r2_direct_host;
        d->config.user = d->host_copies;
    }
    d->last = &d->first;
    r2_lock_init(&d->lock);
    r2_cond_init(&d->wake);
    rc = make(d);
    if (rc)
        unmake(d);
    else
        *out = d;
    return rc;
}

const struct r2_links_card *r2_direct_card(const struct r2_direct *d)
{
    return &d->card;
}

int r2_direct_meet(struct r2_direct *d, int rank, const void *card, size_t len)
{
    /* The thread does not touch the cards before r2_direct_connect. */
    return rank >= 0 && rank < d->config.p ? r2_links_connect(d->links, rank, card, len) : -EINVAL;
}

void r2_direct_connect(struct r2_direct *d)
{
    pthread_mutex_lock(&d->lock);
    if (d->state == R2_DIRECT_LISTENING)
        d->state = R2_DIRECT_CONNECTING;
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
}

enum r2_direct_state r2_direct_state(struct r2_direct *d, int *error)
{
    enum r2_direct_state state;

    pthread_mutex_lock(&d->lock);
    state = d->state;
    if (error)
        *error = d->error;
    pthread_mutex_unlock(&d->lock);
    return state;
}

/* ---- operations */

/* Of all ranks alike. */
static enum r2_schedule_kind kind_of(const struct r2_direct *d, const struct r2_direct_call *call)
{
    int p = d->config.p, own = d->config.memory.n_slots,
        least = r2_sizes_window(p, 0, d->config.per_node).n_slots;
    int rounds = (own < least ? own : least) / r2_sizes_round(p);

    return call->op == R2_NCCL_AVG || rounds < r2_exec_least(call->schedule) ? R2_SCHEDULE_DIRECT
                                                                             : call->schedule;
}

static int plan(const struct r2_direct *d, struct operation *o)
{
    const struct r2_direct_call *call = &o->call;
    struct r2_schedule *s = &o->schedule;
    size_t elem = r2_nccl_type_size(call->type);
    enum r2_schedule_kind kind = kind_of(d, call);
    uint32_t equal[R2_DIRECT_RANKS];
    const uint32_t *weights = kind == R2_SCHEDULE_DIRECT && call->weights ? call->weights : equal;
    struct r2_schedule_data data = {.p = d->config.p, .count = call->count, .elem = elem};
    int p = d->config.p, rank = d->config.rank;

    for (int r = 0; r < p; r++)
        equal[r] = (uint32_t)(R2_SCHEDULE_UNIT * (r + 1) / p - R2_SCHEDULE_UNIT * r / p);
    data.piece = r2_sizes_piece(d->config.memory.slot, p, call->count * elem, weights);
    o->credit = d->config.credit
                    ? d->config.credit
                    : r2_sizes_credit(p, rank, weights, d->card.nics, d->config.nic_rate);
    switch (kind) {
    case R2_SCHEDULE_DIRECT:
        return r2_schedule_direct(s, &data, rank, weights);
    case R2_SCHEDULE_RING:
        return r2_schedule_ring(s, &data, rank);
    case R2_SCHEDULE_R2CCL:
        return r2_schedule_r2ccl(s, &data, rank, call->slow, call->tail, call->chunks);
    }
    return -EINVAL;
}

static int queue_all(struct r2_direct *d, const struct operation *o, uint64_t number)
{
    const struct r2_direct_device *device = d->config.device;
    struct r2_ahead ahead = {device, d->config.user, &o->call, &o->schedule, d->exec, o->base};
    int rc = device->start(d->config.user, &o->call);

    rc = rc ? rc : r2_ahead_queue(&ahead);
    return rc ? rc : device->gate(d->config.user, &o->call, number);
}

/* What all ranks have to agree about. */
static uint64_t word_of(const struct r2_direct_call *call, uint64_t number)
{
    const uint64_t parts[] = {number, call->count, call->whole, (uint64_t)call->type,
                              (uint64_t)call->op};
    uint64_t word = 0;

    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        word = (word ^ parts[i]) * UINT64_C(0x9e3779b97f4a7c15);
        word ^= word >> 32;
    }
    return word;
}

/* 0 and its number: it is the progress thread's from then on. */
static int give(struct r2_direct *d, struct operation *o, uint64_t *number)
{
    int rc = 0;

    pthread_mutex_lock(&d->lock);
    if (d->state == R2_DIRECT_FAILED) {
        rc = d->error;
    } else {
        d->steps += o->schedule.n_steps;
        *d->last = o;
        d->last = &o->next;
        *number = ++d->given;
        o->word = word_of(&o->call, *number);
        pthread_cond_broadcast(&d->wake);
    }
    pthread_mutex_unlock(&d->lock);
    return rc;
}

int r2_direct_allreduce(struct r2_direct *d, const struct r2_direct_call *call, uint64_t *number)
{
    struct operation ahead = {.call = *call, .base = d->steps};
    struct operation *o = malloc(sizeof(*o));
    int rc = o ? plan(d, &ahead) : -ENOMEM;

    if (rc == 0) {
        *o = ahead;
        rc = give(d, o, number);
    }
    if (rc) {
        free(o);
        return rc;
    }
    if (!d->config.device->queue)
        return 0;
    rc = queue_all(d, &ahead, *number);
    if (rc)
        r2_direct_abort(d);
    return rc;
}

int r2_direct_wait(struct r2_direct *d, uint64_t number)
{
    int rc;

    pthread_mutex_lock(&d->lock);
    while (d->landed < number && d->state != R2_DIRECT_FAILED)
        pthread_cond_wait(&d->wake, &d->lock);
    rc = d->landed >= number ? 0 : d->error;
    pthread_mutex_unlock(&d->lock);
    return rc;
}

void r2_direct_finish(struct r2_direct *d)
{
    pthread_mutex_lock(&d->lock);
    while (d->ended < d->given && d->state != R2_DIRECT_FAILED)
        pthread_cond_wait(&d->wake, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

void r2_direct_abort(struct r2_direct *d)
{
    pthread_mutex_lock(&d->lock);
    atomic_store_explicit(&d->stop, true, memory_order_relaxed);
    pthread_cond_broadcast(&d->wake);
    pthread_mutex_unlock(&d->lock);
}

void r2_direct_free(struct r2_direct *d)
{
    if (!d)
        return;
    r2_direct_abort(d);
    pthread_mutex_lock(&d->lock);
    while (d->running)
        pthread_cond_wait(&d->wake, &d->lock);
    pthread_mutex_unlock(&d->lock);
    unmake(d);
}
