/* One communicator: meeting, reporting, and what the planner would do. */
#define _GNU_SOURCE
#include "comms/follow.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agree/agree.h"
#include "api/call.h"
#include "comms/inside.h"
#include "comms/watch.h"
#include "plan/plan.h"
#include "plan/policy.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/log.h"

#define ELIGIBLE (UINT64_C(1) << 20) /* bytes */
#define TYPICAL (UINT64_C(64) << 20) /* size that a plan is judged by until one was seen */
#define WIRE 1                       /* of what must be equal on all ranks */

struct r2_follow {
    struct r2_agree *agree;
    struct r2_comm *comm; /* outlives it */
    int rank, nranks;
    uint64_t node;
    _Atomic(uint64_t) bytes; /* of the largest eligible operation */
    struct r2_watch_entry entry;

    pthread_mutex_t lock; /* guards the rest */
    bool ready;
    uint32_t told; /* share last reported + 1; 0: none */
    /* leader */
    int nnodes;
    int *rank_node; /* [nranks] */
    struct r2_plan_node *nodes;
    struct r2_policy policy;
};

static uint64_t hash_text(const char *text, uint64_t hash)
{
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * UINT64_C(0x100000001b3);
    return hash;
}

/* As NCCL tells nodes apart: NCCL_HOSTID, or host name and boot id. */
static uint64_t node_key(void)
{
    const char *id = getenv("NCCL_HOSTID");
    char text[256] = "";
    FILE *file;

    if (id && *id)
        return hash_text(id, UINT64_C(0xcbf29ce484222325));
    gethostname(text, 128);
    file = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (file) {
        size_t at = strlen(text), n = fread(text + at, 1, 64, file);

        text[at + n] = '\0';
        fclose(file);
    }
    return hash_text(text, UINT64_C(0xcbf29ce484222325));
}

bool r2_follow_wanted(void)
{
    return r2_settings_get()->plan == R2_PLAN_SETTING_SHADOW;
}

void r2_follow_sign(struct r2_nccl_id *id)
{
    char why[R2_AGREE_WHY] = "";

    if (r2_agree_id_sign((uint8_t *)id->bytes, why))
        R2_WARN_ONCE("communicators made here have no plans: %s", why);
}

/* ---- what shim/agree tells; service thread */

static int number_nodes(const struct r2_agree_member *members, int nranks, int *rank_node)
{
    int nodes = 0;

    for (int r = 0; r < nranks; r++) {
        int at = 0;

        while (at < r && members[at].node != members[r].node)
            at++;
        rank_node[r] = at < r ? rank_node[at] : nodes++;
    }
    return nodes;
}

static void on_ready(void *user, const struct r2_agree_member *members, int nranks)
{
    struct r2_follow *f = user;
    int here = 0;

    if (nranks < 1 || nranks != f->nranks)
        return;
    for (int r = 0; r < nranks; r++)
        here += members[r].node == f->node;
    pthread_mutex_lock(&f->lock);
    f->rank_node = calloc((size_t)nranks, sizeof(*f->rank_node));
    f->nnodes = f->rank_node ? number_nodes(members, nranks, f->rank_node) : 0;
    f->nodes = calloc((size_t)f->nnodes + 1, sizeof(*f->nodes));
    for (int n = 0; f->nodes && n < f->nnodes; n++)
        f->nodes[n].share = 1;
    f->ready = f->nodes != NULL;
    pthread_mutex_unlock(&f->lock);
    r2_comm_row_nodes(f->comm, f->nnodes, here);
    r2_watch_wake();
}

static void on_off(void *user, const char *why)
{
    struct r2_follow *f = user;

    R2_WARN_ONCE("a communicator of %d ranks has no plans: %s", f->nranks, why);
    r2_comm_row_plan(f->comm, NULL, why);
}

/* The node of a rank is as bad off as the last of its ranks said. */
static void on_reported(void *user, int rank, const struct r2_agree_report *report)
{
    struct r2_follow *f = user;

    pthread_mutex_lock(&f->lock);
    if (f->ready && rank >= 0 && rank < f->nranks) {
        struct r2_plan_node *node = &f->nodes[f->rank_node[rank]];

        node->capacity = (double)report->capacity;
        node->share = (double)report->share / 65536;
        r2_policy_event(&f->policy, r2_now_ns());
    }
    pthread_mutex_unlock(&f->lock);
    r2_watch_wake();
}

static int on_accept(void *user, uint64_t epoch, const void *plan, size_t len, void **object)
{
    (void)user, (void)epoch, (void)plan, (void)len, (void)object;
    return -EOPNOTSUPP; /* nothing here can carry a plan out yet */
}

static const struct r2_agree_ops ops = {
    .ready = on_ready, .off = on_off, .reported = on_reported, .accept = on_accept};

/* ---- planning; the watching thread */

static uint64_t key_of(const struct r2_plan *plan)
{
    uint64_t key = UINT64_C(0xcbf29ce484222325);

    if (plan->schedule == R2_PLAN_STOCK)
        return 0;
    for (int o = 0; o < plan->norders; o++)
        for (int n = 0; n < plan->nnodes; n++)
            key = (key ^ (uint64_t)plan->orders[o].nodes[n]) * UINT64_C(0x100000001b3);
    return key ? key : 1;
}

static void say(struct r2_follow *f, const struct r2_plan *plan)
{
    char text[40] = "";

    if (plan->schedule != R2_PLAN_STOCK)
        snprintf(text, sizeof(text), "shadow: tree, %.0f %% less time", plan->gain * 100);
    r2_comm_row_plan(f->comm, text, plan->reason);
    r2_watch_journal(plan->reason);
    R2_INFO("communicator %016llx, plan of R2CCL_PLAN=shadow: %s",
            (unsigned long long)r2_comms_id(f->comm), plan->reason);
}

/* Under the lock. */
static void plan_now(struct r2_follow *f, uint64_t now)
{
    uint64_t bytes = atomic_load_explicit(&f->bytes, memory_order_relaxed);
    struct r2_plan_input input = {
        .nnodes = f->nnodes,
        .nodes = f->nodes,
        .nranks = f->nranks,
        .rank_node = f->rank_node,
        .bytes = bytes ? bytes : TYPICAL,
        .min_bytes = ELIGIBLE,
        .min_gain = f->policy.config.min_gain,
        .max_orders = R2_PLAN_ORDERS,
        .cost = R2_PLAN_COST_DEFAULT,
    };
    struct r2_plan plan;
    char why[80];

    for (int n = 0; n < f->nnodes; n++)
        if (f->nodes[n].capacity <= 0)
            return; /* a node has not spoken yet; its report is an event */
    if (r2_plan_make(&plan, &input) == 0) {
        uint64_t key = key_of(&plan);

        if (r2_policy_judge(&f->policy, key, plan.gain, now, why)) {
            r2_policy_committed(&f->policy, key, now);
            say(f, &plan);
        }
    }
    r2_plan_free(&plan);
}

/* Tells the leader what is new about this node; the leader plans. */
static void look(struct r2_watch_entry *entry, uint64_t capacity, uint32_t share, uint64_t now)
{
    struct r2_follow *f = (struct r2_follow *)((char *)entry - offsetof(struct r2_follow, entry));
    uint64_t next;

    pthread_mutex_lock(&f->lock);
    if (f->ready && capacity && f->told != share + 1) {
        struct r2_agree_report report = {.capacity = capacity, .share = share};

        pthread_mutex_unlock(&f->lock);
        int rc = r2_agree_report(f->agree, &report);
        pthread_mutex_lock(&f->lock);
        if (rc == 0)
            f->told = share + 1;
    }
    if (f->ready && f->rank == 0 && r2_policy_poll(&f->policy, now, &next) == R2_POLICY_PLAN)
        plan_now(f, now);
    pthread_mutex_unlock(&f->lock);
}

/* ---- life */

static struct r2_follow *make(struct r2_comm *comm, int rank, int nranks)
{
    struct r2_follow *f = calloc(1, sizeof(*f));
    struct r2_policy_config config = R2_POLICY_DEFAULT;

    if (!f)
        return NULL;
    f->comm = comm;
    f->rank = rank;
    f->nranks = nranks;
    f->node = node_key();
    f->entry.look = look;
    pthread_mutex_init(&f->lock, NULL);
    r2_policy_init(&f->policy, &config);
    return f;
}

static struct r2_follow *begin(struct r2_follow *f, int rc)
{
    if (rc) {
        R2_WARN_ONCE("a communicator has no plans: %s", strerror(-rc));
        pthread_mutex_destroy(&f->lock);
        free(f);
        return NULL;
    }
    r2_watch_add(&f->entry);
    return f;
}

static struct r2_agree_config config_of(struct r2_follow *f)
{
    return (struct r2_agree_config){
        .rank = f->rank,
        .nranks = f->nranks,
        .node = f->node,
        .settings = WIRE,
        .ops = &ops,
        .user = f,
    };
}

struct r2_follow *r2_follow_new(struct r2_comm *comm, const struct r2_nccl_id *id, int rank,
                                int nranks)
{
    struct r2_follow *f = nranks > 1 ? make(comm, rank, nranks) : NULL;
    struct r2_agree_config config;

    if (!f)
        return NULL;
    config = config_of(f);
    config.id = id ? (const uint8_t *)id->bytes : NULL;
    return begin(f, r2_agree_create(&f->agree, &config));
}

struct r2_follow *r2_follow_child(struct r2_comm *comm, struct r2_follow *parent, uint64_t salt,
                                  int rank, int nranks)
{
    struct r2_follow *f = make(comm, rank, nranks);
    struct r2_agree_config config;

    if (!f) {
        r2_follow_skip(parent, salt);
        return NULL;
    }
    config = config_of(f);
    return begin(f, r2_agree_derive(&f->agree, parent->agree, salt, &config));
}

void r2_follow_skip(struct r2_follow *parent, uint64_t salt)
{
    r2_agree_derive(NULL, parent->agree, salt, NULL);
}

void r2_follow_before(struct r2_follow *f, enum r2_seg_collective kind, uint64_t bytes)
{
    bool eligible = kind == R2_SEG_COLL_ALL_REDUCE && bytes >= ELIGIBLE;
    struct r2_agree_view view;

    if (eligible && bytes > atomic_load_explicit(&f->bytes, memory_order_relaxed))
        atomic_store_explicit(&f->bytes, bytes, memory_order_relaxed);
    /* Nobody promises a plan, so this never waits; whatever it says, NCCL runs as it is. */
    (void)r2_agree_lookup(f->agree, eligible, &view);
}

void r2_follow_after(struct r2_follow *f, uint64_t n)
{
    r2_agree_advance(f->agree, n);
}

void r2_follow_abort(struct r2_follow *f)
{
    r2_agree_abort(f->agree);
}

void r2_follow_free(struct r2_follow *f)
{
    r2_watch_remove(&f->entry); /* not looked at any more */
    r2_agree_destroy(f->agree); /* no callbacks any more */
    pthread_mutex_destroy(&f->lock);
    free(f->rank_node);
    free(f->nodes);
    free(f);
}
