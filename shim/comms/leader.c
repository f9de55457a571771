#define _GNU_SOURCE
#include "comms/leader.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comms/inside.h"
#include "comms/watch.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"

#define WHOLE 65536                  /* of a report's share */
#define TYPICAL (UINT64_C(64) << 20) /* what is predicted for until a size was seen */
#define AGAIN_NS (250 * R2_NS_PER_MS)
#define SOON_NS (20 * R2_NS_PER_MS)

/* ---- planning; `lock` is held */

/* Once: log, journal and, where they say something new about it, the communicator's row. */
static void say(struct r2_leader *l, const char *plan, const char *why)
{
    if (strcmp(l->said, why) == 0)
        return;
    snprintf(l->said, sizeof(l->said), "%s", why);
    r2_comm_row_plan(l->comm, plan, why);
    r2_watch_journal(why);
    R2_INFO("communicator %016llx: plan: %s", (unsigned long long)l->comm->id, why);
}

static bool stopped(const struct r2_leader *l)
{
    for (int r = 0; r < l->nranks; r++)
        if (l->words[r] & R2_LEADER_STOP)
            return true;
    return false;
}

static uint64_t most(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* A NIC may be lost to one process only: a node is as badly off as the worst of its ranks. */
static void look_at_nodes(const struct r2_leader *l, struct r2_plan_node *nodes)
{
    for (int n = 0; n < l->p; n++)
        nodes[n] = (struct r2_plan_node){.share = 1};
    for (int r = 0; r < l->nranks; r++) {
        struct r2_plan_node *node = &nodes[l->rank_node[r]];
        const struct r2_plan_node *says = &l->ranks[r];

        if (node->capacity <= 0 || says->capacity * says->share < node->capacity * node->share)
            *node = *says;
    }
}

/* What is to run, and why. */
static void choose(struct r2_leader *l, struct r2_plan_choice *choice)
{
    struct r2_plan_node nodes[R2_PLAN_MOST];
    uint64_t bytes = atomic_load_explicit(&l->bytes, memory_order_relaxed);
    struct r2_plan_input input = {.p = l->p,
                                  .nodes = nodes,
                                  .per_node = l->nranks / l->p,
                                  .bytes = bytes ? bytes : TYPICAL,
                                  .from_bytes = r2_leader_always() ? R2_VOTE_FROM : R2_LEADER_FROM,
                                  .wish = r2_leader_wish()};
    const char *why = NULL;

    look_at_nodes(l, nodes);
    r2_plan_choose(choice, &input);
    if (stopped(l))
        why = "stock: an operator said plan off";
    else if (!bytes && !r2_leader_always())
        why = "stock: there was no AllReduce of 1 MiB or more yet"; /* ranks need not connect */
    else if (choice->plan.schedule == R2_PLAN_STOCK || input.wish != R2_PLAN_BEST)
        return;
    else if (r2_policy_trial(&l->policy))
        why = "stock, for a few operations: they are timed beside direct";
    else if (l->policy.from > input.bytes)
        why = "stock: direct was measured, and was slower";
    choice->plan.from_bytes = most(choice->plan.from_bytes, l->policy.from);
    if (why) {
        r2_plan_stock(&choice->plan, l->p);
        snprintf(choice->why, sizeof(choice->why), "%s", why);
    }
}

static void shadow(struct r2_leader *l, const struct r2_plan_choice *c)
{
    char text[40] = "";

    if (c->plan.schedule != R2_PLAN_STOCK)
        snprintf(text, sizeof(text), "shadow: %s, %.0f %% less time",
                 r2_plan_name(c->plan.schedule), c->gain * 100);
    say(l, text, c->why);
}

static void propose(struct r2_leader *l, const struct r2_plan *plan, uint64_t now)
{
    if (r2_agree_propose(l->agree, plan, r2_plan_bytes(l->p)) == 0) {
        l->asked = *plan;
        l->asked_at = l->events;
        l->asking = true;
    } else {
        r2_policy_again(&l->policy, now + AGAIN_NS);
    }
}

/* Ranks connect when a plan needs it for the first time. */
static void pursue(struct r2_leader *l, const struct r2_plan_choice *c, uint64_t now)
{
    if (c->plan.schedule == R2_PLAN_STOCK) {
        propose(l, &c->plan, now);
        return;
    }
    switch (r2_vote_state(l->vote)) {
    case R2_VOTE_OPEN:
        if (!r2_leader_always())
            r2_agree_invite(l->agree);
        l->invited_ns = l->invited_ns ? l->invited_ns : now;
        r2_policy_again(&l->policy, now + SOON_NS + (now - l->invited_ns) / 8);
        break;
    case R2_VOTE_YES:
        propose(l, &c->plan, now);
        break;
    case R2_VOTE_NO: /* the vote has said why */
        break;
    }
}

/* What runs is what the planner wants, and its times count. They do not if it was agreed for
 * another state of the nodes: agreed once more it has another epoch. */
static bool in_force(const struct r2_leader *l, const struct r2_plan *plan)
{
    return r2_plan_same(plan, &l->force) &&
           (l->policy.epoch || !l->policy.planned || r2_leader_wish() != R2_PLAN_BEST);
}

static void plan(struct r2_leader *l, uint64_t now)
{
    struct r2_plan_choice choice;

    choose(l, &choice);
    if (!r2_leader_carries()) {
        shadow(l, &choice);
    } else if (!in_force(l, &choice.plan)) {
        if (r2_vote_state(l->vote) != R2_VOTE_NO) /* else that has said why */
            say(l, NULL, choice.why);
        pursue(l, &choice, now);
    } else if (choice.degraded > 0) {
        say(l, NULL, choice.why);
    }
}

/* ---- what ranks tell */

/* Its calls beside rank 0's, those of all when it is that one. Lock held. */
static void compare(struct r2_leader *l, int rank)
{
    for (int r = rank ? rank : 1; r < (rank ? rank + 1 : l->nranks) && !l->differs; r++)
        if (r2_calls_differ(&l->told[0].calls, &l->told[r].calls, &l->difference))
            l->differs = r;
}

/* The slowest rank's median of a class; 0 where a rank has none. Lock held. */
static float slowest(const struct r2_leader *l, bool planned, int class)
{
    float most = 0;

    for (int r = 0; r < l->nranks; r++) {
        float median = l->told[r].medians.of[planned][class];

        if (l->told[r].epoch != l->policy.epoch || median <= 0)
            return 0;
        most = median > most ? median : most;
    }
    return most;
}

/* A collective is over when the slowest rank has its result. In a ring others may have theirs long
 * before. Lock held. */
static void look_at_times(struct r2_leader *l, uint64_t now)
{
    struct r2_medians most;

    for (int c = 0; c < R2_TIMES_CLASSES; c++) {
        most.of[false][c] = slowest(l, false, c);
        most.of[true][c] = slowest(l, true, c);
    }
    r2_policy_measured(&l->policy, &most, now);
}

/* The operation never ends: an error takes its place on all ranks. */
static void end_unequal(struct r2_leader *l, int rank)
{
    const struct r2_calls_difference *d = &l->difference;
    char left[32] = "calls in a group", line[160];

    if (d->left_bytes != R2_CALLS_GROUPED)
        snprintf(left, sizeof(left), "%llu bytes", (unsigned long long)d->left_bytes);
    snprintf(line, sizeof(line),
             "operation %llu is not the same AllReduce on all ranks: %llu bytes on rank %d use "
             "R2CCL, %s on rank %d use NCCL",
             (unsigned long long)d->number - 1, (unsigned long long)d->taken_bytes,
             d->first ? 0 : rank, left, d->first ? rank : 0);
    R2_WARN("communicator %016llx: %s. All ranks must give the same count, type and operation, in "
            "the same order, and all or none in a group or by ncclAllReduceConfig",
            (unsigned long long)l->comm->id, line);
    r2_watch_journal_failed(line);
    r2_comms_broken(l->comm, "ranks gave AllReduces that are not the same");
    r2_vote_failed(l->vote);
}

void r2_leader_reported(struct r2_leader *l, int rank, const struct r2_agree_report *report)
{
    uint64_t now = r2_now_ns();
    double share = (double)report->share / WHOLE;

    if (rank < 0 || rank >= l->nranks)
        return;
    pthread_mutex_lock(&l->lock);
    if (l->words[rank] != report->flags)
        r2_policy_again(&l->policy, now);
    l->words[rank] = report->flags;
    if (report->capacity > 0) {
        struct r2_plan_node *node = &l->ranks[rank];
        double before = node->capacity * node->share, after = (double)report->capacity * share;
        bool first = node->capacity <= 0;

        l->unknown -= first;
        *node = (struct r2_plan_node){.capacity = (double)report->capacity, .share = share};
        if (after != before) {
            r2_policy_event(&l->policy, first || after < before, now);
            l->events++;
        }
    }
    memcpy(&l->told[rank], report->words, sizeof(l->told[rank]));
    compare(l, rank);
    if (l->policy.epoch && l->told[rank].epoch == l->policy.epoch)
        look_at_times(l, now);
    pthread_mutex_unlock(&l->lock);
    r2_watch_wake();
}

/* What was proposed before a change of the nodes belongs to the state before. */
void r2_leader_decided(struct r2_leader *l, uint64_t epoch, bool committed)
{
    uint64_t now = r2_now_ns();

    pthread_mutex_lock(&l->lock);
    if (l->asking && committed) {
        l->force = l->asked;
        r2_policy_changed(&l->policy, l->force.schedule != R2_PLAN_STOCK,
                          l->asked_at == l->events ? epoch : 0, now);
    }
    l->asking = false;
    r2_policy_again(&l->policy, committed ? now : now + AGAIN_NS);
    pthread_mutex_unlock(&l->lock);
    r2_watch_wake();
}

/* ---- the watching thread */

uint64_t r2_leader_turn(struct r2_leader *l, uint64_t now)
{
    uint64_t next, bytes = atomic_load_explicit(&l->bytes, memory_order_relaxed);
    int differs;

    pthread_mutex_lock(&l->lock);
    if (bytes > 2 * l->planned_bytes) { /* a size that plans were not made for */
        l->planned_bytes = bytes;
        r2_policy_again(&l->policy, now);
    }
    if (!l->asking && l->p && l->unknown == 0 && r2_policy_due(&l->policy, now)) {
        l->rounds++;
        plan(l, now);
    }
    next = l->policy.plan_ns;
    differs = l->differs;
    l->differs = differs ? -1 : 0;
    pthread_mutex_unlock(&l->lock);
    if (differs > 0)
        end_unequal(l, differs);
    return next;
}

void r2_leader_saw(struct r2_leader *l, uint64_t bytes)
{
    if (bytes > atomic_load_explicit(&l->bytes, memory_order_relaxed))
        atomic_store_explicit(&l->bytes, bytes, memory_order_relaxed);
}

void r2_leader_counts(struct r2_leader *l, uint32_t *events, uint32_t *rounds)
{
    pthread_mutex_lock(&l->lock);
    *events = l->events;
    *rounds = l->rounds;
    pthread_mutex_unlock(&l->lock);
}

/* ---- life */

struct r2_leader *r2_leader_new(struct r2_comm *comm, struct r2_vote *vote, int nranks)
{
    struct r2_leader *l = calloc(1, sizeof(*l));

    if (!l)
        return NULL;
    l->ranks = calloc((size_t)nranks, sizeof(*l->ranks));
    l->words = calloc((size_t)nranks, sizeof(*l->words));
    l->told = calloc((size_t)nranks, sizeof(*l->told));
    if (!l->ranks || !l->words || !l->told) {
        free(l->ranks);
        free(l->words);
        free(l->told);
        free(l);
        return NULL;
    }
    l->comm = comm;
    l->vote = vote;
    l->nranks = l->unknown = nranks;
    r2_lock_init(&l->lock);
    r2_policy_init(&l->policy, r2_settings_get()->plan_hold_ns);
    return l;
}

void r2_leader_bind(struct r2_leader *l, struct r2_agree *agree)
{
    l->agree = agree;
}

bool r2_leader_ready(struct r2_leader *l, const int *rank_node, int nodes)
{
    l->rank_node = malloc((size_t)l->nranks * sizeof(*rank_node));
    if (!l->rank_node)
        return false;
    memcpy(l->rank_node, rank_node, (size_t)l->nranks * sizeof(*rank_node));
    l->p = nodes;
    (r2_leader_always() ? r2_plan_equal : r2_plan_stock)(&l->force, nodes);
    if (r2_leader_always())
        l->force.from_bytes = R2_VOTE_FROM;
    return true;
}

void r2_leader_free(struct r2_leader *l)
{
    if (!l)
        return;
    pthread_mutex_destroy(&l->lock);
    free(l->ranks);
    free(l->words);
    free(l->told);
    free(l->rank_node);
    free(l);
}
