/* The application's side.
 *
 * lookup is on the path of every collective, so that without a change under way it takes no lock:
 * it compares its index with a fence. The argument is Dekker's, all four accesses seq_cst:
 *     application:  advance: next := i          service:  fence := N
 *                   lookup:  read fence                   read next
 * A promise of N is made only if the service read next < N. Then, in the one order of all seq_cst
 * operations, "next := N" comes after that read and so after "fence := N". A lookup of collective N
 * reads the fence after its own "next := N". So it sees N, or what replaced it under the member
 * lock, and takes the lock. Nothing is promised for an index that a lookup has passed without it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agree/internal.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/random.h"

/* --- unique ids --------------------------------------------------------------------------- */

int r2_agree_id_sign(uint8_t id[R2_AGREE_ID], char *why)
{
    static const uint8_t zero[R2_AGREE_TAIL];
    struct r2_agree_tail tail;
    char text[R2_AGREE_WHY] = "";
    int rc;

    if (atomic_load(&r2_agree_inert)) {
        snprintf(text, sizeof(text), "a forked child has no thread for the agreement");
        rc = -EPERM;
        goto out;
    }
    if (memcmp(id + R2_AGREE_ID - R2_AGREE_TAIL, zero, sizeof(zero)) != 0) {
        snprintf(text, sizeof(text), "the unused part of the id that NCCL made is not empty");
        rc = -EEXIST;
        goto out;
    }
    rc = r2_agree_service_listen(&tail.addr, text, sizeof(text));
    if (rc != 0) {
        goto out;
    }
    rc = r2_random_bytes(tail.token, sizeof(tail.token));
    if (rc == 0) {
        rc = r2_agree_service_sign(tail.token);
    }
    if (rc == 0) {
        rc = r2_agree_tail_encode(id, &tail);
    }
    if (rc != 0) {
        snprintf(text, sizeof(text), "cannot sign the id: %s", strerror(-rc));
    }
out:
    if (why) {
        memcpy(why, text, sizeof(text));
    }
    return rc;
}

/* --- creation ----------------------------------------------------------------------------- */

static struct r2_agree *r2_agree_new(const struct r2_agree_config *config)
{
    struct r2_agree *a = calloc(1, sizeof(*a));

    if (!a) {
        return NULL;
    }
    a->rank = config->rank;
    a->nranks = config->nranks;
    a->node = config->node;
    a->settings = config->settings;
    a->timeout_ns = config->timeout_ns ? config->timeout_ns : r2_settings_get()->agree_timeout_ns;
    snprintf(a->name, sizeof(a->name), "%s", config->name ? config->name : "communicator");
    a->ops = config->ops;
    a->user = config->user;
    a->deadline_ns = UINT64_MAX;
    a->tell_ns = UINT64_MAX;
    r2_list_init(&a->node_all);
    r2_list_init(&a->node_dirty);
    r2_lock_init(&a->lock);
    r2_cond_init(&a->wake);
    atomic_init(&a->fence, UINT64_MAX);
    return a;
}

static void r2_agree_off(struct r2_agree *a, const char *why)
{
    a->state = R2_AGREE_OFF;
    a->started = true; /* there is nothing to start */
    snprintf(a->why, sizeof(a->why), "%s", why);
}

/* Makes the machine, or leaves the member off. */
static int r2_agree_arm(struct r2_agree *a)
{
    uint64_t *promises = NULL;

    if (a->rank == R2_AGREE_LEADER) {
        promises = calloc(((size_t)a->nranks + 63) / 64, sizeof(*promises));
        a->report_seen = calloc((size_t)a->nranks, sizeof(*a->report_seen));
        if (!promises || !a->report_seen) {
            free(promises);
            return -ENOMEM;
        }
    }
    r2_agree_machine_init(&a->machine, a->rank, a->nranks, promises);
    a->key = r2_agree_key(a->token, (uint32_t)a->rank);
    a->state = R2_AGREE_IDLE;
    return 0;
}

static int r2_agree_make(struct r2_agree **out, const struct r2_agree_config *config,
                         const uint8_t *token, const uint8_t *family,
                         const struct r2_agree_addr *root, const char *why)
{
    struct r2_agree *a;
    int rc = 0;

    *out = NULL;
    if (config->nranks < 1 || config->rank < 0 || config->rank >= config->nranks) {
        return -EINVAL;
    }
    a = r2_agree_new(config);
    if (!a) {
        return -ENOMEM;
    }
    if (config->nranks > R2_AGREE_RANKS) {
        why = "too many ranks";
    }
    if (why || config->nranks == 1) {
        r2_agree_off(a, why ? why : "one rank needs no agreement");
    } else {
        memcpy(a->token, token, sizeof(a->token));
        memcpy(a->family, family, sizeof(a->family));
        a->root = *root;
        rc = r2_agree_arm(a);
    }
    if (rc != 0) {
        r2_agree_member_free(a);
        return rc;
    }
    *out = a;
    return 0;
}

int r2_agree_create(struct r2_agree **out, const struct r2_agree_config *config)
{
    struct r2_agree_tail tail = {0};
    const char *why = NULL;

    switch (config->id ? r2_agree_tail_decode(config->id, &tail) : -ENOENT) {
    case 0:
        break;
    case -EPROTO:
        why = "the unique id was signed by another version of R2CCL";
        break;
    default:
        why = "the unique id does not come from a process with the shim";
    }
    return r2_agree_make(out, config, tail.token, tail.token, &tail.addr, why);
}

int r2_agree_derive(struct r2_agree **out, struct r2_agree *parent, uint64_t salt,
                    const struct r2_agree_config *config)
{
    uint64_t n = atomic_fetch_add(&parent->children, 1);
    uint8_t token[R2_AGREE_TOKEN];
    bool usable;

    if (!out) {
        return 0;
    }
    pthread_mutex_lock(&parent->lock);
    usable = parent->state != R2_AGREE_OFF || parent->nranks == 1;
    pthread_mutex_unlock(&parent->lock);
    r2_agree_token_derive(token, parent->token, n, salt);
    return r2_agree_make(out, config, token, parent->family, &parent->root,
                         usable ? NULL : "plan changes are off for the parent communicator");
}

/* --- lookup ------------------------------------------------------------------------------- */

static void r2_agree_view(const struct r2_agree *a, uint64_t index, struct r2_agree_view *view)
{
    *view = (struct r2_agree_view){
        .index = index, .epoch = a->force.epoch, .at = a->force.at, .object = a->object};
}

/* Member lock held: the machine's plan in force becomes the application's. */
static void r2_agree_switch(struct r2_agree *a)
{
    if (a->machine.force.epoch == a->force.epoch) {
        return;
    }
    a->force = a->machine.force;
    a->object = NULL;
    for (int i = 0; i < a->nobjects; i++) {
        if (a->objects[i].epoch == a->force.epoch) {
            a->object = a->objects[i].object;
        }
    }
    r2_agree_member_drop(a, a->force.epoch, true, a->force.epoch);
    a->stats.epoch = a->force.epoch;
    a->stats.at = a->force.at;
}

static void r2_agree_wait_until(struct r2_agree *a, uint64_t deadline)
{
    struct timespec ts = {.tv_sec = (time_t)(deadline / R2_NS_PER_S),
                          .tv_nsec = (long)(deadline % R2_NS_PER_S)};

    pthread_cond_timedwait(&a->wake, &a->lock, &ts);
}

static void r2_agree_time_out(struct r2_agree *a)
{
    r2_agree_machine_fail(&a->machine);
    a->state = R2_AGREE_FAILED;
    snprintf(a->why, sizeof(a->why),
             "no rank could tell within %.1f s what became of plan %llu, which this rank has "
             "promised",
             (double)a->timeout_ns / 1e9, (unsigned long long)a->machine.promise.epoch);
}

/* Member lock held. */
static int r2_agree_lookup_locked(struct r2_agree *a, uint64_t index)
{
    uint64_t since = 0;

    for (;;) {
        enum r2_agree_at at = r2_agree_machine_at(&a->machine, index);
        uint64_t now;

        if (a->life != R2_LIFE_ON || a->told) {
            return a->life != R2_LIFE_ON ? -ECANCELED : -EREMOTEIO;
        }
        if (at == R2_AGREE_GO) {
            r2_agree_switch(a);
            r2_agree_member_fence(a);
            return 0;
        }
        now = r2_now_ns();
        if (at == R2_AGREE_WAIT && since && now >= since + a->timeout_ns) {
            r2_agree_time_out(a);
            at = R2_AGREE_FAIL;
        }
        if (at == R2_AGREE_FAIL) {
            r2_agree_member_fence(a);
            return -ETIMEDOUT;
        }
        if (!since) {
            since = now;
            a->waiting_since = since;
            pthread_mutex_unlock(&a->lock);
            r2_agree_service_kick(a); /* it asks around */
            pthread_mutex_lock(&a->lock);
        } else {
            r2_agree_wait_until(a, since + a->timeout_ns);
        }
    }
}

static int r2_agree_lookup_slow(struct r2_agree *a, uint64_t index, struct r2_agree_view *view)
{
    uint64_t took;
    bool kick;
    int rc;

    pthread_mutex_lock(&a->lock);
    rc = r2_agree_lookup_locked(a, index);
    if (a->waiting_since) {
        took = r2_now_ns() - a->waiting_since;
        a->waiting_since = 0;
        a->stats.waits++;
        a->stats.wait_ns += took;
        a->stats.wait_max_ns = took > a->stats.wait_max_ns ? took : a->stats.wait_max_ns;
        pthread_cond_broadcast(&a->wake); /* destroy may wait for us */
    }
    kick = a->ngarbage > 0 || rc == -ETIMEDOUT;
    pthread_mutex_unlock(&a->lock);
    if (kick) {
        r2_agree_service_kick(a);
    }
    r2_agree_view(a, index, view);
    return rc;
}

static const char *r2_agree_no_start(int rc)
{
    switch (rc) {
    case -EEXIST:
        return "another communicator of this process has the same id and rank";
    case -EADDRINUSE:
        return "no port of R2CCL_PORT_RANGE is free to listen on: widen it by one per process";
    case -ENODEV:
        return "no interface to listen on: NCCL_SOCKET_IFNAME names the one to take";
    default:
        return "no memory, thread or descriptor for the agreement";
    }
}

/* The first eligible operation. */
static void r2_agree_start(struct r2_agree *a)
{
    int rc;

    a->started = true;
    pthread_mutex_lock(&a->lock);
    a->state = R2_AGREE_JOINING;
    pthread_mutex_unlock(&a->lock);
    rc = r2_agree_service_add(a);
    if (rc == 0) {
        atomic_store(&a->known, true);
        r2_agree_service_kick(a); /* also for what abort wanted meanwhile */
        return;
    }
    pthread_mutex_lock(&a->lock);
    r2_agree_off(a, r2_agree_no_start(rc));
    pthread_mutex_unlock(&a->lock);
    if (a->ops && a->ops->off) {
        a->ops->off(a->user, a->why);
    }
}

int r2_agree_lookup(struct r2_agree *a, bool eligible, struct r2_agree_view *view)
{
    uint64_t index = atomic_load_explicit(&a->next, memory_order_relaxed); /* our own */

    if (atomic_load_explicit(&r2_agree_inert, memory_order_relaxed)) {
        *view = (struct r2_agree_view){.index = index};
        return 0;
    }
    if (eligible && !a->started) {
        r2_agree_start(a);
    }
    if (index >= atomic_load(&a->fence)) {
        return r2_agree_lookup_slow(a, index, view);
    }
    r2_agree_view(a, index, view);
    return 0;
}

void r2_agree_advance(struct r2_agree *a, uint64_t n)
{
    atomic_fetch_add(&a->next, n); /* seq_cst: see above */
}

uint64_t r2_agree_index(const struct r2_agree *a)
{
    return atomic_load_explicit(&a->next, memory_order_relaxed); /* its own */
}

/* --- the rest ----------------------------------------------------------------------------- */

int r2_agree_propose(struct r2_agree *a, const void *plan, size_t len)
{
    uint8_t *copy;
    int rc = 0;

    if (atomic_load(&r2_agree_inert) || a->rank != R2_AGREE_LEADER) {
        return -EPERM;
    }
    if (len > R2_AGREE_PLAN) {
        return -E2BIG;
    }
    copy = malloc(len ? len : 1);
    if (!copy) {
        return -ENOMEM;
    }
    memcpy(copy, plan, len);
    pthread_mutex_lock(&a->lock);
    if (a->life != R2_LIFE_ON || a->state == R2_AGREE_FAILED) {
        rc = -EIO;
    } else if (a->state != R2_AGREE_READY) {
        rc = -EAGAIN;
    } else if (a->wanted || a->phase != R2_PHASE_NONE || a->machine.npending > 0) {
        rc = -EBUSY;
    } else {
        a->wanted = copy;
        a->wanted_len = len;
        copy = NULL;
    }
    pthread_mutex_unlock(&a->lock);
    free(copy);
    if (rc == 0) {
        r2_agree_service_kick(a);
    }
    return rc;
}

int r2_agree_report(struct r2_agree *a, const struct r2_agree_report *report)
{
    int rc = 0;

    if (atomic_load(&r2_agree_inert)) {
        return -EPERM;
    }
    if (report->share > 65536) {
        return -EINVAL;
    }
    pthread_mutex_lock(&a->lock);
    if (a->state != R2_AGREE_READY) {
        rc = -EAGAIN;
    } else {
        a->report = *report;
        a->report_new = true;
    }
    pthread_mutex_unlock(&a->lock);
    if (rc == 0) {
        r2_agree_service_kick(a);
    }
    return rc;
}

static void r2_agree_stop(struct r2_agree *a, bool dying)
{
    pthread_mutex_lock(&a->lock);
    r2_agree_live(a, dying ? R2_LIFE_DYING : R2_LIFE_ABORTED);
    if (a->state != R2_AGREE_OFF && a->state != R2_AGREE_FAILED && !dying) {
        a->state = R2_AGREE_FAILED;
        snprintf(a->why, sizeof(a->why), "the application has aborted the communicator");
    }
    r2_agree_member_fence(a);
    pthread_cond_broadcast(&a->wake);
    pthread_mutex_unlock(&a->lock);
    r2_agree_service_kick(a);
}

void r2_agree_abort(struct r2_agree *a)
{
    if (!atomic_load(&r2_agree_inert)) {
        r2_agree_stop(a, false);
    }
}

void r2_agree_destroy(struct r2_agree *a)
{
    if (!a || atomic_load(&r2_agree_inert)) {
        return; /* in a child the parent's threads, and what they held, are gone: leave it */
    }
    r2_agree_stop(a, true);
    pthread_mutex_lock(&a->lock);
    while (a->waiting_since || (atomic_load(&a->known) && a->life != R2_LIFE_GONE)) {
        pthread_cond_wait(&a->wake, &a->lock);
    }
    pthread_mutex_unlock(&a->lock);
    if (!atomic_load(&a->known)) {
        r2_agree_member_free(a); /* the thread has never heard of it; else it frees it, later */
    }
}

void r2_agree_get_stats(struct r2_agree *a, struct r2_agree_stats *out)
{
    if (atomic_load(&r2_agree_inert)) {
        *out = (struct r2_agree_stats){.state = R2_AGREE_OFF};
        return;
    }
    pthread_mutex_lock(&a->lock);
    *out = a->stats;
    out->state = a->state;
    out->promised = a->machine.promise.epoch;
    out->waiting = a->waiting_since != 0;
    memcpy(out->why, a->why, sizeof(out->why));
    pthread_mutex_unlock(&a->lock);
    out->index = atomic_load(&a->next);
    out->sent = atomic_load_explicit(&a->sent, memory_order_relaxed);
}
