#include "plan/plan.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan/schedule.h"
#include "plan/shard.h"
#include "plan/sizes.h"

#define MAGIC UINT32_C(0x34504352)
#define HEALTHY 0.999
#define LEAST_GAIN 0.05
#define NOTABLE (R2_SCHEDULE_UNIT / 100) /* a smaller change of a weight is none */

/* As measured with GPUs on one host; docs/measurements.md has how far times are from the model. */
#define HOP_NS 20e3
#define MESSAGE_NS 2e3
/* Assumed, not measured: less than NVLink has between eight GPUs, more than PCIe. */
#define WITHIN 200e9

const char *r2_plan_name(enum r2_plan_schedule schedule)
{
    static const char *const names[] = {"stock", "direct", "r2ccl-allreduce"};

    return names[schedule < R2_PLAN_SCHEDULES ? schedule : R2_PLAN_STOCK];
}

/* ---- what is shipped */

size_t r2_plan_bytes(int p)
{
    return offsetof(struct r2_plan, weights) + (size_t)p * sizeof(uint32_t);
}

void r2_plan_stock(struct r2_plan *plan, int p)
{
    *plan = (struct r2_plan){.magic = MAGIC, .p = (uint32_t)p, .from_bytes = UINT64_MAX};
}

static void equal_weights(struct r2_plan *plan)
{
    for (uint32_t r = 0; r < plan->p; r++)
        plan->weights[r] = R2_SCHEDULE_UNIT * (r + 1) / plan->p - R2_SCHEDULE_UNIT * r / plan->p;
}

void r2_plan_equal(struct r2_plan *plan, int p)
{
    r2_plan_stock(plan, p);
    plan->schedule = R2_PLAN_DIRECT;
    plan->from_bytes = 0;
    equal_weights(plan);
}

int r2_plan_read(struct r2_plan *plan, const void *data, size_t len, int p)
{
    uint64_t sum = 0;

    if (p < 1 || p > R2_PLAN_MOST || len != r2_plan_bytes(p))
        return -EPROTO;
    *plan = (struct r2_plan){0};
    memcpy(plan, data, len);
    for (int r = 0; r < p; r++)
        sum += plan->weights[r];
    if (plan->magic != MAGIC || plan->p != (uint32_t)p || plan->schedule >= R2_PLAN_SCHEDULES)
        return -EPROTO;
    if (plan->schedule != R2_PLAN_STOCK && sum != R2_SCHEDULE_UNIT)
        return -EPROTO;
    if (plan->schedule == R2_PLAN_R2CCL &&
        (plan->slow >= plan->p || plan->tail >= R2_SCHEDULE_UNIT || p < R2_PLAN_LEAST))
        return -EPROTO;
    return 0;
}

bool r2_plan_same(const struct r2_plan *a, const struct r2_plan *b)
{
    if (a->schedule != b->schedule || a->p != b->p)
        return false;
    if (a->schedule == R2_PLAN_STOCK)
        return true;
    if (a->from_bytes != b->from_bytes)
        return false;
    if (a->schedule == R2_PLAN_R2CCL)
        return a->slow == b->slow && a->tail == b->tail;
    for (uint32_t r = 0; r < a->p; r++)
        if (a->weights[r] > b->weights[r] + NOTABLE || b->weights[r] > a->weights[r] + NOTABLE)
            return false;
    return true;
}

/* ---- the choice */

const char *r2_plan_never(int nodes)
{
    if (nodes < 2)
        return "all ranks are on one node";
    if (nodes < R2_PLAN_LEAST)
        return "on two nodes NCCL's ring is at the bound";
    return nodes > R2_PLAN_MOST ? "more than 256 nodes" : NULL;
}

static void to_shard(const struct r2_plan_input *in, struct r2_shard_input *model,
                     struct r2_shard_node *nodes)
{
    for (int i = 0; i < in->p; i++) {
        double rate = in->nodes[i].capacity * in->nodes[i].share;

        nodes[i] = (struct r2_shard_node){.out = rate, .in = rate};
    }
    *model = (struct r2_shard_input){.p = in->p,
                                     .nodes = nodes,
                                     .per_node = in->per_node > 0 ? in->per_node : 1,
                                     .bytes = in->bytes,
                                     .hop_ns = HOP_NS,
                                     .message_ns = MESSAGE_NS,
                                     .within = WITHIN};
}

static void count_degraded(struct r2_plan_choice *c, const struct r2_plan_input *in)
{
    for (int i = 0; i < in->p; i++) {
        c->degraded += in->nodes[i].share < HEALTHY;
        c->worst = in->nodes[i].share < in->nodes[c->worst].share ? i : c->worst;
    }
}

static size_t executor_piece(const struct r2_shard_input *model, const uint32_t *weights)
{
    struct r2_sizes_window w = r2_sizes_window(model->p, 0, model->per_node);

    return r2_sizes_piece(w.slot, model->p, model->bytes / (uint64_t)model->per_node, weights);
}

static double direct_ns(const struct r2_shard_input *model, const uint32_t *weights)
{
    struct r2_shard_input with = *model;

    if (model->p > 1)
        with.piece = executor_piece(model, weights);
    return r2_shard_ns(&with, weights);
}

/* Of the model's bytes. */
static void predict(struct r2_plan_choice *c, const struct r2_shard_input *model)
{
    struct r2_plan *plan = &c->plan;

    c->stock_ns = r2_shard_ring_ns(model);
    c->bound_ns = r2_shard_bound_ns(model);
    c->direct_ns = direct_ns(model, plan->weights);
    if (plan->tail && c->degraded == 1)
        c->r2ccl_ns = r2_shard_r2ccl_ns(model, (int)plan->slow, plan->tail, R2_PLAN_CHUNKS);
}

static double chosen_ns(const struct r2_plan_choice *c, enum r2_plan_schedule schedule)
{
    return schedule == R2_PLAN_R2CCL ? c->r2ccl_ns : c->direct_ns;
}

static bool gains(const struct r2_plan_choice *c, enum r2_plan_schedule schedule)
{
    return chosen_ns(c, schedule) < (1 - LEAST_GAIN) * c->stock_ns;
}

/* The smallest power of two from which the schedule gains; UINT64_MAX: none does. */
static uint64_t first_size(const struct r2_plan_choice *c, const struct r2_shard_input *model,
                           enum r2_plan_schedule schedule, uint64_t from)
{
    struct r2_shard_input at = *model;
    struct r2_plan_choice tried = *c;

    for (at.bytes = from; at.bytes <= UINT64_C(1) << 40; at.bytes *= 2) {
        predict(&tried, &at);
        if (gains(&tried, schedule))
            return at.bytes;
    }
    return UINT64_MAX;
}

static void explain(struct r2_plan_choice *c, const struct r2_plan_input *in,
                    enum r2_plan_schedule schedule)
{
    char what[64];
    double took = chosen_ns(c, schedule) / 1e6, mib = (double)in->bytes / (1 << 20);

    snprintf(what, sizeof(what), "%d of %d nodes degraded, node %d keeps %.0f %%", c->degraded,
             in->p, c->worst, in->nodes[c->worst].share * 100);
    if (c->plan.schedule != R2_PLAN_STOCK)
        snprintf(c->why, sizeof(c->why),
                 "%s: %s; %.1f MiB predicted %.1f ms, ring %.1f, bound %.1f",
                 r2_plan_name(schedule), what, mib, took, c->stock_ns / 1e6, c->bound_ns / 1e6);
    else
        snprintf(c->why, sizeof(c->why), "stock: %s; %.1f MiB predicted %.1f ms by %s, ring %.1f",
                 what, mib, took, r2_plan_name(schedule), c->stock_ns / 1e6);
}

static void weigh(struct r2_plan_choice *c, const struct r2_shard_input *model)
{
    if (!r2_shard_weights(model, c->plan.weights))
        equal_weights(&c->plan);
    c->plan.slow = (uint32_t)c->worst;
    c->plan.tail = r2_shard_tail(model, c->worst);
}

static void always(struct r2_plan_choice *c, const struct r2_plan_input *in)
{
    c->plan.schedule = R2_PLAN_DIRECT;
    c->plan.from_bytes = in->from_bytes;
    if (c->degraded)
        explain(c, in, R2_PLAN_DIRECT);
    else
        snprintf(c->why, sizeof(c->why), "R2CCL_ALLREDUCE=direct");
}

/* Who asks for a schedule by its mode gets it wherever a node is degraded; R2CCL-AllReduce has a
 * model for one slow node only. */
static void best(struct r2_plan_choice *c, const struct r2_plan_input *in,
                 const struct r2_shard_input *model)
{
    enum r2_plan_schedule schedule =
        in->wish == R2_PLAN_WISH_R2CCL && !isnan(c->r2ccl_ns) ? R2_PLAN_R2CCL : R2_PLAN_DIRECT;

    c->plan.from_bytes =
        in->wish == R2_PLAN_BEST ? first_size(c, model, schedule, in->from_bytes) : in->from_bytes;
    if (c->plan.from_bytes <= in->bytes && (in->wish != R2_PLAN_BEST || gains(c, schedule))) {
        c->plan.schedule = schedule;
        c->gain = 1 - chosen_ns(c, schedule) / c->stock_ns;
    }
    explain(c, in, schedule);
}

void r2_plan_choose(struct r2_plan_choice *c, const struct r2_plan_input *in)
{
    struct r2_shard_node nodes[R2_PLAN_MOST];
    struct r2_shard_input model;
    const char *never = r2_plan_never(in->p);

    *c = (struct r2_plan_choice){.direct_ns = NAN, .r2ccl_ns = NAN};
    r2_plan_stock(&c->plan, in->p);
    if (in->p > R2_PLAN_MOST) {
        snprintf(c->why, sizeof(c->why), "stock: %s", never);
        return;
    }
    to_shard(in, &model, nodes);
    count_degraded(c, in);
    weigh(c, &model);
    predict(c, &model);
    if (in->wish == R2_PLAN_ALWAYS_DIRECT)
        always(c, in);
    else if (never)
        snprintf(c->why, sizeof(c->why), "stock: %s", never);
    else if (in->nodes[c->worst].share <= 0)
        snprintf(c->why, sizeof(c->why), "stock: node %d has no NIC left", c->worst);
    else if (c->degraded == 0)
        snprintf(c->why, sizeof(c->why), "stock: all %d nodes are healthy", in->p);
    else
        best(c, in, &model);
}
