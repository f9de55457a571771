/* The lowest rank of a communicator: it plans, and with R2CCL_PLAN=on leads its ranks there. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comms/follow_inside.h"
#include "real/nest.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/log.h"
#include "util/thread.h"

#define R2_SHARE_WHOLE 65536         /* of a report */
#define TYPICAL (UINT64_C(64) << 20) /* size that a plan is judged by until one was seen */
/* How long a switch that is ready waits for operations of stock to be measured against. */
#define MEASURE_NS (5 * R2_NS_PER_S)
#define LOOK_NS R2_NS_PER_S /* ... before it looks whether they come */

static bool on(void)
{
    return r2_settings_get()->plan == R2_PLAN_SETTING_ON;
}

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

/* A name for what the nodes have left. */
static uint64_t state_of(const struct r2_follow *f)
{
    uint64_t state = UINT64_C(0xcbf29ce484222325);

    for (int n = 0; n < f->nnodes; n++)
        state = (state ^ (uint64_t)(f->nodes[n].capacity * f->nodes[n].share)) *
                UINT64_C(0x100000001b3);
    return state;
}

static void say(struct r2_follow *f, const struct r2_plan *plan)
{
    char text[40] = "";

    if (!on() && plan->schedule != R2_PLAN_STOCK)
        snprintf(text, sizeof(text), "shadow: tree, %.0f %% less time", plan->gain * 100);
    r2_comm_row_plan(f->comm, on() ? NULL : text, plan->reason);
    r2_watch_journal(plan->reason);
    R2_INFO("communicator %016llx, plan of R2CCL_PLAN=%s: %s", (unsigned long long)f->comm->id,
            on() ? "on" : "shadow", plan->reason);
}

static void say_not(struct r2_follow *f, const char *why)
{
    char text[120];

    snprintf(text, sizeof(text), "plan not taken: %s", why);
    r2_comm_row_plan(f->comm, NULL, text);
    r2_watch_journal(text);
}

/* ---- planning */

/* What the plan in force takes now, as predicted: its parts one by one, which is never too little.
 */
static double running_ns(const struct r2_follow *f, const struct r2_plan_input *input,
                         double stock_ns)
{
    double ns = 0;

    if (!f->policy.current || !f->running.norders)
        return stock_ns;
    for (int k = 0; k < f->running.norders; k++) {
        uint32_t end =
            k + 1 < f->running.norders ? f->running.orders[k + 1].boundary : R2_PLAN_UNIT;

        ns += r2_plan_tree_ns(input, f->running.orders[k].nodes) *
              (end - f->running.orders[k].boundary) / R2_PLAN_UNIT;
    }
    return ns;
}

/* Gain of `plan` over what runs. Back to stock when nothing is degraded any more, whatever the
 * prediction: it is what the user knows. */
static double gain_of(const struct r2_follow *f, const struct r2_plan_input *input,
                      const struct r2_plan *plan)
{
    double before = running_ns(f, input, plan->stock_ns);
    double after = plan->schedule == R2_PLAN_STOCK ? plan->stock_ns : plan->tree_ns;

    if (plan->schedule == R2_PLAN_STOCK && plan->degraded == 0)
        return 1;
    return before > 0 ? 1 - after / before : 0;
}

/* R2CCL_PLAN=on: it becomes the target. False: not now. */
static bool aim(struct r2_follow *f, const struct r2_plan *plan, uint64_t key, uint64_t now)
{
    if (key == 0) {
        r2_lead_back(&f->lead, plan->reason);
        return r2_steer_want(&f->steer, 0, true, now);
    }
    for (int r = 0; r < f->nranks; r++)
        if (f->words[r] & (R2_FOLLOW_UNABLE | R2_FOLLOW_STOP))
            return false;
    if (f->steer.step != R2_STEER_IDLE || f->steer.stop)
        return false;
    if (r2_lead_target(&f->lead, plan, key))
        return false;
    if (!r2_steer_want(&f->steer, key, r2_lead_has(&f->lead), now))
        return false;
    if (r2_policy_urgent(&f->policy))
        r2_steer_relieve(&f->steer);
    f->lost_node = -1;
    f->withdrawn = false;
    return true;
}

static void keep(struct r2_plan *kept, struct r2_plan *plan)
{
    r2_plan_free(kept);
    *kept = *plan;
    *plan = (struct r2_plan){0};
}

/* One after the other, parts take no less than all of it in the best of their orders. */
int r2_leader_orders(void)
{
    int orders = (int)r2_settings_get()->plan_orders;

    if (orders > 1 && r2_device_cuda()) {
        R2_WARN_ONCE("R2CCL_PLAN_ORDERS=%d: on a CUDA stream the parts of an operation run one "
                     "after the other, which gains nothing; plans have one order",
                     orders);
        return 1;
    }
    return orders;
}

/* For the largest size that was seen. False: a node has not spoken yet; its report is an event. */
static bool input_of(const struct r2_follow *f, struct r2_plan_input *input)
{
    uint64_t bytes = atomic_load_explicit(&f->bytes, memory_order_relaxed);

    *input = (struct r2_plan_input){
        .nnodes = f->nnodes,
        .nodes = f->nodes,
        .nranks = f->nranks,
        .rank_node = f->rank_node,
        .bytes = bytes ? bytes : TYPICAL,
        .min_bytes = R2_FOLLOW_ELIGIBLE,
        .min_gain = f->policy.config.min_gain,
        .max_orders = f->orders,
        .cost = R2_PLAN_COST_DEFAULT,
    };
    for (int n = 0; n < f->nnodes; n++)
        if (f->nodes[n].capacity <= 0)
            return false;
    return true;
}

static void plan_now(struct r2_follow *f, uint64_t now)
{
    struct r2_plan_input input, typical; /* states are compared at one size */
    struct r2_plan plan;
    char why[80];
    uint64_t key;

    if (!input_of(f, &input))
        return;
    typical = input;
    typical.bytes = TYPICAL;
    if (r2_plan_make(&plan, &input) == 0) {
        key = key_of(&plan);
        r2_policy_state(&f->policy, state_of(f), r2_plan_ring_ns(&typical) / (double)TYPICAL);
        if (r2_policy_judge(&f->policy, key, gain_of(f, &input, &plan), now, why)) {
            if (!on()) {
                r2_policy_committed(&f->policy, key, now);
                say(f, &plan);
            } else if (aim(f, &plan, key, now)) {
                say(f, &plan);
                if (key)
                    keep(&f->next, &plan); /* it runs once the switch is agreed */
            } else if (f->steer.step != R2_STEER_IDLE) {
                r2_policy_again(&f->policy, now); /* when this step is through */
            }
        } else if (on() && key && key != f->policy.current && !f->withdrawn) {
            say_not(f, why);
        }
    }
    r2_plan_free(&plan);
}

/* ---- leading */

/* NCCL makes an id on a thread of its own, which nobody waits for: it may take a while, and nothing
 * tells it to stop. Its thread's and the communicator's; the last of them frees it. */
struct r2_leader_errand {
    atomic_int holders;
    atomic_int state;
    int (*get)(struct r2_nccl_id *); /* NCCL's */
    struct r2_nccl_id id;            /* the thread's until GOT, which is a release */
};
enum { GETTING, GOT, FAILED };

static void drop(struct r2_leader_errand *e)
{
    /* As of every count of holders: who frees sees what the others did. */
    if (e && atomic_fetch_sub_explicit(&e->holders, 1, memory_order_acq_rel) == 1)
        free(e);
}

static void *errand_main(void *arg)
{
    struct r2_leader_errand *e = arg;
    int result;

    pthread_setname_np(pthread_self(), "r2ccl-id");
    r2_call_nest();
    result = e->get ? e->get(&e->id) : R2_NCCL_USAGE;
    r2_call_unnest();
    if (result != R2_NCCL_OK)
        R2_WARN_ONCE("no unique id for the communicator of a plan (NCCL says %d): no plans",
                     result);
    atomic_store_explicit(&e->state, result == R2_NCCL_OK ? GOT : FAILED, memory_order_release);
    r2_watch_wake();
    drop(e);
    return NULL;
}

static struct r2_leader_errand *errand(struct r2_real *real)
{
    struct r2_leader_errand *e = calloc(1, sizeof(*e));

    if (!e)
        return NULL;
    atomic_init(&e->holders, 2);
    atomic_init(&e->state, GETTING);
    e->get = real->fn[R2_API_ncclGetUniqueId];
    if (r2_thread_start(errand_main, e)) {
        free(e); /* again at the next look */
        return NULL;
    }
    return e;
}

bool r2_leader_fetch(struct r2_follow *f, struct r2_nccl_id *id)
{
    if (!f->errand)
        f->errand = errand(f->comm->real);
    if (!f->errand || atomic_load_explicit(&f->errand->state, memory_order_acquire) != GOT)
        return false;
    *id = f->errand->id;
    drop(f->errand);
    f->errand = NULL;
    return true;
}

/* Whether every communicator of the target has an id; otherwise one is being fetched. */
static bool ids_there(struct r2_follow *f)
{
    struct r2_lead_comm *comm;

    while ((comm = r2_lead_idless(&f->lead)) != NULL) {
        if (!r2_leader_fetch(f, &comm->id))
            return false;
        comm->has_id = true;
    }
    return true;
}

static bool makes(enum r2_steer_step step)
{
    return step == R2_STEER_MAKE || step == R2_STEER_RELIEF;
}

bool r2_leader_waits(struct r2_follow *f, uint64_t now)
{
    unsigned measured = r2_policy_measured(&f->policy);
    uint64_t waited = now - f->steer.since_ns;

    if (f->wait_ns != f->steer.since_ns || measured < f->wait_measured) {
        f->wait_ns = f->steer.since_ns;
        f->wait_measured = measured;
    }
    if (!r2_settings_get()->plan_withdraw || f->policy.current || waited >= MEASURE_NS ||
        measured >= R2_POLICY_SAMPLES || f->next.stock_ns * R2_POLICY_LEAST >= (double)MEASURE_NS)
        return false;
    /* The host may be seconds ahead of its device: what is known now was begun long ago, and comes
     * in bursts. */
    if (f->timing && measured + r2_timing_awaited(f->timing) >= R2_POLICY_LEAST)
        return true;
    /* A prediction takes NICs' own word for their speed. If it goes on as in the first second: */
    return waited < LOOK_NS ||
           f->wait_measured + (measured - f->wait_measured) * MEASURE_NS / waited >=
               R2_POLICY_LEAST;
}

static void steer(struct r2_follow *f, uint64_t now)
{
    enum r2_steer_step step = r2_steer_due(&f->steer, now);
    void *plan = NULL;
    size_t len = 0;

    if (f->steer.lost) {
        r2_policy_ban(&f->policy, f->steer.lost);
        r2_watch_journal("plan: a rank could not make its communicator; traffic stays as it is");
        f->steer.lost = 0;
    }
    if (step == R2_STEER_IDLE || (makes(step) && !ids_there(f)))
        return;
    if (step == R2_STEER_SWITCH && r2_leader_waits(f, now))
        return;
    if (r2_lead_encode(&f->lead, step, &plan, &len) == 0 &&
        r2_agree_propose(f->agree, plan, len) == 0)
        r2_steer_asked(&f->steer);
    free(plan);
}

/* A node has changed, or what runs: is that still better than nothing? */
static void look_ahead(struct r2_follow *f, uint64_t now)
{
    struct r2_plan_input input;
    double stock;

    if (!input_of(f, &input))
        return;
    stock = r2_plan_ring_ns(&input);
    r2_policy_outlook(&f->policy, (uint64_t)f->changed_node, f->changed_lost,
                      running_ns(f, &input, stock), stock, now);
    if (r2_policy_urgent(&f->policy))
        r2_policy_again(&f->policy, now);
}

void r2_leader_decided(struct r2_follow *f, uint64_t epoch, bool committed)
{
    uint64_t now = r2_now_ns(), before = f->steer.current;
    enum r2_steer_step step = f->steer.step;

    if (r2_steer_decided(&f->steer, epoch, committed, now) == R2_STEER_IDLE) {
        if (makes(step)) { /* wanted again when the planner says so */
            r2_lead_forget(&f->lead);
            r2_policy_again(&f->policy, now);
        }
        return;
    }
    r2_lead_through(&f->lead, step);
    if (step == R2_STEER_DROP)
        r2_policy_again(&f->policy, now); /* something else, or the same once more */
    if (step == R2_STEER_SWITCH || ((step == R2_STEER_BACK || step == R2_STEER_RELIEF) && before)) {
        r2_policy_committed(&f->policy, f->steer.current, now);
        r2_policy_again(&f->policy, now); /* looks meanwhile took what was in force for its end */
    }
    if (step == R2_STEER_SWITCH) { /* nodes may have changed since it was aimed at */
        keep(&f->running, &f->next);
        f->changed_lost = f->lost_node >= 0;
        f->changed_node = f->changed_lost ? f->lost_node : f->changed_node;
        look_ahead(f, now);
    }
    f->switch_epoch = epoch;            /* every plan has the entries of what runs */
    for (int r = 0; r < f->nranks; r++) /* a rank may have said so before we knew */
        if (f->steer.step == R2_STEER_MADE &&
            (f->words[r] & R2_FOLLOW_EPOCH) == (epoch & R2_FOLLOW_EPOCH))
            r2_steer_made(&f->steer, r, epoch, f->words[r] & R2_FOLLOW_FAILED, now);
}

/* A NIC may be lost to one process only (a fault that an operator injects, a drain): the node is as
 * bad off as the worst of its ranks. */
static double share_of_node(const struct r2_follow *f, int node)
{
    uint32_t least = R2_SHARE_WHOLE;

    for (int r = 0; r < f->nranks; r++)
        if (f->rank_node[r] == node && f->shares[r] < least)
            least = f->shares[r];
    return (double)least / R2_SHARE_WHOLE;
}

void r2_leader_reported(struct r2_follow *f, int rank, const struct r2_agree_report *report)
{
    struct r2_plan_node *node = &f->nodes[f->rank_node[rank]];
    double share;
    uint64_t now = r2_now_ns();
    uint32_t changed = f->words[rank] ^ report->flags;

    f->shares[rank] = report->share;
    f->words[rank] = report->flags;
    share = share_of_node(f, f->rank_node[rank]);
    if (node->capacity != (double)report->capacity || node->share != share) {
        f->changed_lost = (double)report->capacity * share < node->capacity * node->share;
        if (f->changed_lost)
            f->lost_node = f->rank_node[rank];
        f->withdrawn = false;
        node->capacity = (double)report->capacity;
        node->share = share;
        r2_policy_event(&f->policy, now);
        f->events++;
        f->changed_node = f->rank_node[rank];
        look_ahead(f, now);
    } else if (changed & (R2_FOLLOW_STOP | R2_FOLLOW_UNABLE)) {
        r2_policy_again(&f->policy, now);
    }
    if (report->flags & R2_FOLLOW_STOP) {
        f->withdrawn = false;
        r2_lead_back(&f->lead, "an operator said plan off: NCCL's own choice");
        r2_steer_want(&f->steer, 0, true, now);
    }
    if (f->steer.step == R2_STEER_MADE &&
        (report->flags & R2_FOLLOW_EPOCH) == (f->steer.make_epoch & R2_FOLLOW_EPOCH))
        r2_steer_made(&f->steer, rank, f->steer.make_epoch, report->flags & R2_FOLLOW_FAILED, now);
}

/* Measured operations, of stock or of what runs now. */
static void sample(struct r2_follow *f)
{
    uint64_t note[R2_TIMING_NOTES], epoch, ns;

    for (int i = 0; i < R2_TIMING_WATCHES; i++) {
        if (!f->timing || !r2_timing_take(f->timing, &ns, note))
            return;
        epoch = note[R2_TIMING_EPOCH];
        if (note[R2_TIMING_BEGUN] < f->policy.event_ns)
            continue; /* nodes were in another state */
        if (r2_settings_get()->plan_withdraw && (!epoch || epoch == f->switch_epoch))
            r2_policy_sample(&f->policy, epoch ? f->policy.current : 0, note[R2_TIMING_BYTES], ns);
    }
}

/* Banned at once: what is measured until the way back is agreed does not change it. */
static void withdraw(struct r2_follow *f, uint64_t now)
{
    double plan_ns = 0, stock_ns = 0;
    enum r2_policy_known known;
    char why[R2_PLAN_REASON];

    known = r2_policy_compare(&f->policy, &plan_ns, &stock_ns);
    snprintf(why, sizeof(why), "withdrawn: %.3f ms, stock %.3f ms (%d operations or more%s)",
             plan_ns / 1e6, stock_ns / 1e6, R2_POLICY_SAMPLES,
             known == R2_POLICY_ESTIMATED ? "; stock's is an estimate" : "");
    r2_policy_ban(&f->policy, f->policy.current);
    f->withdrawn = true; /* what was measured says more than that it is not taken again */
    r2_lead_back(&f->lead, why);
    r2_watch_journal(why);
    R2_INFO("communicator %016llx: plan %s", (unsigned long long)f->comm->id, why);
    r2_steer_want(&f->steer, 0, true, now);
}

void r2_leader_turn(struct r2_follow *f, uint64_t now)
{
    uint64_t next;

    if (on())
        sample(f);
    switch (r2_policy_poll(&f->policy, now, &next)) {
    case R2_POLICY_PLAN:
        f->rounds++;
        plan_now(f, now);
        break;
    case R2_POLICY_WITHDRAW:
        if (on() && !f->steer.stop && f->steer.step == R2_STEER_IDLE)
            withdraw(f, now);
        break;
    default:
        break;
    }
    if (on())
        steer(f, now);
}

int r2_leader_init(struct r2_follow *f)
{
    f->made = calloc(((size_t)f->nranks + 63) / 64, sizeof(*f->made));
    f->words = calloc((size_t)f->nranks, sizeof(*f->words));
    f->shares = calloc((size_t)f->nranks, sizeof(*f->shares));
    f->orders = r2_leader_orders();
    f->lost_node = -1;
    f->timing = on() ? r2_timing_new(f->device) : NULL; /* without, plans are not measured */
    if (!f->made || !f->words || !f->shares)
        return -ENOMEM;
    for (int r = 0; r < f->nranks; r++)
        f->shares[r] = R2_SHARE_WHOLE; /* until it speaks */
    r2_steer_init(&f->steer, f->nranks, f->made);
    r2_lead_init(&f->lead, f->nranks, (int)r2_settings_get()->plan_keep);
    return 0;
}

void r2_leader_free(struct r2_follow *f)
{
    drop(f->errand);
    r2_timing_free(f->timing);
    r2_plan_free(&f->running);
    r2_plan_free(&f->next);
    r2_lead_free(&f->lead);
    free(f->made);
    free(f->words);
    free(f->shares);
}
