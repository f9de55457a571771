/* The planner: the ring under balance against the end-node tree. Which orders, and how much of the
 * data by each, is a matrix game of orders against nodes (game.h): each new order puts the nodes
 * that the last solution found most expensive at the lightest positions, until none helps. */
#include "plan/plan.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/game.h"

#define R2_PLAN_HEALTHY 0.999
#define R2_PLAN_GAIN_OF_ORDER 1.02 /* another communicator must make the data part 2 % faster */

struct r2_search {
    const struct r2_plan_input *in;
    int p, columns;
    int *positions;           /* lightest first */
    int *half_loads;          /* [p]: of each position */
    int *orders;              /* [R2_GAME_COLUMNS][p]: node at each position */
    double *load;             /* [p][R2_GAME_COLUMNS]: ns per byte */
    double *packed;           /* [p][columns] for the solver */
    double *price;            /* [p] */
    struct r2_ranked *ranked; /* [p] */
    double fraction[R2_GAME_COLUMNS];
    double value;
    int chosen[R2_PLAN_ORDERS], nchosen;
    double part[R2_PLAN_ORDERS];
};

struct r2_ranked {
    double weight;
    int node;
};

static double r2_plan_rate(const struct r2_plan_input *in, int node)
{
    return in->nodes[node].capacity * in->nodes[node].share / 1e9; /* bytes per ns */
}

static double r2_plan_slowest(const struct r2_plan_input *in, double *sum)
{
    double least = INFINITY;

    *sum = 0;
    for (int i = 0; i < in->nnodes; i++) {
        least = fmin(least, r2_plan_rate(in, i));
        *sum += r2_plan_rate(in, i);
    }
    return least;
}

static double r2_plan_ring_fixed(const struct r2_plan_input *in)
{
    return 2.0 * (in->nnodes - 1) * in->cost.hop_ns / in->cost.ring_efficiency;
}

static double r2_plan_ring_slope(const struct r2_plan_input *in)
{
    double sum;

    return 2.0 * (in->nnodes - 1) / in->nnodes / r2_plan_slowest(in, &sum) /
           in->cost.ring_efficiency;
}

static double r2_plan_tree_fixed(const struct r2_plan_input *in)
{
    int depth = 0;

    while ((1 << depth) < in->nnodes) {
        depth++;
    }
    return 2.0 * depth * in->cost.hop_ns / in->cost.tree_efficiency;
}

double r2_plan_ring_ns(const struct r2_plan_input *in)
{
    return in->nnodes < 2 ? 0 : r2_plan_ring_fixed(in) + r2_plan_ring_slope(in) * (double)in->bytes;
}

double r2_plan_tree_ns(const struct r2_plan_input *in, const int *order)
{
    double worst = 0;

    for (int i = 0; i < in->nnodes; i++) {
        worst = fmax(worst, 0.5 * r2_plan_tree_load(in->nnodes, i) /
                                r2_plan_rate(in, order ? order[i] : i));
    }
    return in->nnodes < 2
               ? 0
               : r2_plan_tree_fixed(in) + worst * (double)in->bytes / in->cost.tree_efficiency;
}

double r2_plan_bound_ns(const struct r2_plan_input *in)
{
    double sum;
    double least = r2_plan_slowest(in, &sum);

    return in->nnodes < 2 ? 0 : (double)in->bytes * fmax(1 / least, 2.0 * (in->nnodes - 1) / sum);
}

/* --- search ------------------------------------------------------------------------------- */

static int r2_search_compare(const void *a, const void *b)
{
    const struct r2_ranked *x = a;
    const struct r2_ranked *y = b;

    if (x->weight != y->weight) {
        return x->weight > y->weight ? -1 : 1;
    }
    return x->node - y->node;
}

/* The order that puts the heaviest of s->ranked at the lightest position, and so on: no order makes
 * sum weight * load smaller. False: it is there already. */
static bool r2_search_add(struct r2_search *s)
{
    int *order = s->orders + (size_t)s->columns * (size_t)s->p;

    qsort(s->ranked, (size_t)s->p, sizeof(*s->ranked), r2_search_compare);
    for (int i = 0; i < s->p; i++) {
        order[s->positions[i]] = s->ranked[i].node;
    }
    for (int k = 0; k < s->columns; k++) {
        if (memcmp(order, s->orders + (size_t)k * (size_t)s->p, (size_t)s->p * sizeof(int)) == 0) {
            return false;
        }
    }
    for (int i = 0; i < s->p; i++) {
        s->load[order[i] * R2_GAME_COLUMNS + s->columns] =
            0.5 * s->half_loads[i] / r2_plan_rate(s->in, order[i]);
    }
    s->columns++;
    return true;
}

/* Solves with the orders `pick`; 0 or -ENOMEM. */
static int r2_search_solve(struct r2_search *s, const int *pick, int n, double *value,
                           double *fraction)
{
    for (int i = 0; i < s->p; i++) {
        for (int k = 0; k < n; k++) {
            s->packed[i * n + k] = s->load[i * R2_GAME_COLUMNS + pick[k]];
        }
    }
    *value = r2_game_solve(s->packed, s->p, n, fraction, s->price);
    return *value < 0 ? -ENOMEM : 0;
}

static int r2_search_all(struct r2_search *s)
{
    int all[R2_GAME_COLUMNS];
    double fraction[R2_GAME_COLUMNS];
    double value;

    for (int i = 0; i < s->p; i++) {
        s->ranked[i] = (struct r2_ranked){1 / r2_plan_rate(s->in, i), i};
    }
    for (int k = 0; k < R2_GAME_COLUMNS; k++) {
        all[k] = k;
    }
    while (s->columns < R2_GAME_COLUMNS && r2_search_add(s)) {
        if (r2_search_solve(s, all, s->columns, &value, fraction) != 0) {
            return -ENOMEM;
        }
        memcpy(s->fraction, fraction, sizeof(fraction));
        for (int i = 0; i < s->p; i++) {
            s->ranked[i] = (struct r2_ranked){s->price[i] / r2_plan_rate(s->in, i), i};
        }
    }
    return 0;
}

/* The `n` orders with the largest fractions; for one, the best on its own. */
static int r2_search_best(struct r2_search *s, int n, int *pick, double *value, double *fraction)
{
    bool taken[R2_GAME_COLUMNS] = {0};

    if (n == 1) {
        *value = INFINITY;
        for (int k = 0; k < s->columns; k++) {
            double worst = 0;

            for (int i = 0; i < s->p; i++) {
                worst = fmax(worst, s->load[i * R2_GAME_COLUMNS + k]);
            }
            if (worst < *value) {
                *value = worst;
                pick[0] = k;
            }
        }
        fraction[0] = 1;
        return 0;
    }
    for (int i = 0; i < n; i++) {
        pick[i] = -1;
        for (int k = 0; k < s->columns; k++) {
            if (!taken[k] && (pick[i] < 0 || s->fraction[k] > s->fraction[pick[i]])) {
                pick[i] = k;
            }
        }
        taken[pick[i]] = true;
    }
    return r2_search_solve(s, pick, n, value, fraction);
}

/* As few orders as come close to the best. */
static int r2_search_choose(struct r2_search *s)
{
    int most = s->in->max_orders < s->columns ? s->in->max_orders : s->columns;
    int pick[R2_PLAN_ORDERS];
    double fraction[R2_GAME_COLUMNS];
    double value;

    s->value = INFINITY;
    for (int n = 1; n <= most; n++) {
        if (r2_search_best(s, n, pick, &value, fraction) != 0) {
            return -ENOMEM;
        }
        if (value * R2_PLAN_GAIN_OF_ORDER < s->value) {
            s->value = value;
            s->nchosen = 0;
            for (int k = 0; k < n; k++) {
                if (fraction[k] > 1e-6) {
                    s->chosen[s->nchosen] = pick[k];
                    s->part[s->nchosen++] = fraction[k];
                }
            }
        }
    }
    return 0;
}

/* --- the plan ----------------------------------------------------------------------------- */

static int r2_search_open(struct r2_search *s, const struct r2_plan_input *in)
{
    size_t p = (size_t)in->nnodes;

    *s = (struct r2_search){.in = in, .p = in->nnodes};
    s->positions = calloc(p, sizeof(*s->positions));
    s->half_loads = calloc(p, sizeof(*s->half_loads));
    s->orders = calloc(p * R2_GAME_COLUMNS, sizeof(*s->orders));
    s->load = calloc(p * R2_GAME_COLUMNS, sizeof(*s->load));
    s->packed = calloc(p * R2_GAME_COLUMNS, sizeof(*s->packed));
    s->price = calloc(p, sizeof(*s->price));
    s->ranked = calloc(p, sizeof(*s->ranked));
    if (!s->positions || !s->half_loads || !s->orders || !s->load || !s->packed || !s->price ||
        !s->ranked) {
        return -ENOMEM;
    }
    r2_plan_light_positions(s->p, s->positions);
    for (int i = 0; i < s->p; i++) {
        s->half_loads[i] = r2_plan_tree_load(s->p, i);
    }
    return 0;
}

static void r2_search_close(struct r2_search *s)
{
    free(s->positions);
    free(s->half_loads);
    free(s->orders);
    free(s->load);
    free(s->packed);
    free(s->price);
    free(s->ranked);
}

static int r2_plan_invalid(struct r2_plan *plan, const char *what)
{
    snprintf(plan->reason, sizeof(plan->reason), "no plan: %s", what);
    return -EINVAL;
}

static int r2_plan_check(struct r2_plan *plan, const struct r2_plan_input *in)
{
    if (in->nnodes < 1 || in->nnodes > R2_PLAN_NODES) {
        return r2_plan_invalid(plan, "the number of nodes is out of range");
    }
    if (in->max_orders < 1 || in->max_orders > R2_PLAN_ORDERS || in->nranks < in->nnodes) {
        return r2_plan_invalid(plan, "the number of orders or ranks is out of range");
    }
    if (!(in->cost.ring_efficiency > 0 && in->cost.ring_efficiency <= 1 &&
          in->cost.tree_efficiency > 0 && in->cost.tree_efficiency <= 1 && in->cost.hop_ns >= 0 &&
          in->min_gain >= 0 && in->min_gain < 1)) {
        return r2_plan_invalid(plan, "an efficiency or the least gain is out of range");
    }
    for (int i = 0; i < in->nnodes; i++) {
        if (!(in->nodes[i].capacity > 0 && in->nodes[i].capacity < 1e18 &&
              in->nodes[i].share >= 0 && in->nodes[i].share <= 1)) {
            return r2_plan_invalid(plan, "a node's bandwidth is out of range");
        }
    }
    for (int i = 0; i < in->nranks; i++) {
        if (in->rank_node[i] < 0 || in->rank_node[i] >= in->nnodes) {
            return r2_plan_invalid(plan, "a rank is on no node");
        }
    }
    return 0;
}

/* From which size on the tree, ns = fixed + slope * size, has the gain; 0: never. */
static uint64_t r2_plan_from(const struct r2_plan_input *in, double tree_slope)
{
    double keep = 1 - in->min_gain;
    double won = keep * r2_plan_ring_slope(in) - tree_slope;
    double lost = r2_plan_tree_fixed(in) - keep * r2_plan_ring_fixed(in);

    if (won <= 0) {
        return 0;
    }
    if (lost <= 0 || lost / won < (double)in->min_bytes) {
        return in->min_bytes ? in->min_bytes : 1;
    }
    return lost / won < 1e18 ? (uint64_t)ceil(lost / won) : 0;
}

static int r2_plan_fill_order(struct r2_plan_order *o, const struct r2_plan_input *in,
                              const int *nodes, uint32_t boundary)
{
    int n = 0;

    o->boundary = boundary;
    o->nodes = calloc((size_t)in->nnodes, sizeof(*o->nodes));
    o->ranks = calloc((size_t)in->nranks, sizeof(*o->ranks));
    if (!o->nodes || !o->ranks) {
        return -ENOMEM;
    }
    memcpy(o->nodes, nodes, (size_t)in->nnodes * sizeof(*nodes));
    for (int i = 0; i < in->nnodes; i++) {
        for (int r = 0; r < in->nranks; r++) {
            if (in->rank_node[r] == nodes[i]) {
                o->ranks[n++] = r;
            }
        }
    }
    return 0;
}

static int r2_plan_fill_orders(struct r2_plan *plan, const struct r2_search *s)
{
    double before = 0;

    for (int k = 0; k < s->nchosen; k++) {
        plan->norders = k + 1;
        if (r2_plan_fill_order(&plan->orders[k], s->in, s->orders + (size_t)s->chosen[k] * s->p,
                               (uint32_t)lround(before * R2_PLAN_UNIT)) != 0) {
            return -ENOMEM;
        }
        before += s->part[k];
    }
    return 0;
}

static void r2_plan_explain(struct r2_plan *plan, const struct r2_plan_input *in, int worst)
{
    char what[120];
    double gain = plan->stock_ns > 0 ? 1 - plan->tree_ns / plan->stock_ns : 0;

    snprintf(what, sizeof(what), "%d of %d nodes degraded, node %d keeps %.0f %%", plan->degraded,
             in->nnodes, worst, in->nodes[worst].share * 100);
    if (plan->schedule == R2_PLAN_TREE) {
        snprintf(plan->reason, sizeof(plan->reason),
                 "tree, %d order%s: %s; predicted %.3f ms against %.3f ms of the ring for "
                 "%" PRIu64 " bytes (%.0f %% less; bound %.3f ms)",
                 plan->norders, plan->norders > 1 ? "s" : "", what, plan->tree_ns / 1e6,
                 plan->stock_ns / 1e6, in->bytes, gain * 100, plan->bound_ns / 1e6);
    } else if (in->bytes < in->min_bytes) {
        snprintf(plan->reason, sizeof(plan->reason),
                 "stock: %" PRIu64 " bytes are less than the %" PRIu64 " that plans begin at (%s)",
                 in->bytes, in->min_bytes, what);
    } else {
        snprintf(plan->reason, sizeof(plan->reason),
                 "stock: %s; the tree's predicted %.3f ms are not %.0f %% less than the ring's "
                 "%.3f ms for %" PRIu64 " bytes",
                 what, plan->tree_ns / 1e6, in->min_gain * 100, plan->stock_ns / 1e6, in->bytes);
    }
}

/* Fills in what holds without a search; true when that is all there is to say. */
static bool r2_plan_trivial(struct r2_plan *plan, const struct r2_plan_input *in, int *worst)
{
    *worst = 0;
    for (int i = 0; i < in->nnodes; i++) {
        plan->degraded += in->nodes[i].share < R2_PLAN_HEALTHY;
        *worst = in->nodes[i].share < in->nodes[*worst].share ? i : *worst;
    }
    if (in->nodes[*worst].share <= 0) {
        plan->stock_ns = plan->tree_ns = plan->bound_ns = INFINITY;
        snprintf(plan->reason, sizeof(plan->reason), "stock: node %d has no NIC left", *worst);
        return true;
    }
    plan->stock_ns = plan->tree_ns = r2_plan_ring_ns(in);
    plan->bound_ns = r2_plan_bound_ns(in);
    if (in->nnodes < 2) {
        snprintf(plan->reason, sizeof(plan->reason), "stock: all ranks are on one node");
    } else if (plan->degraded == 0) {
        snprintf(plan->reason, sizeof(plan->reason), "stock: all %d nodes are healthy", in->nnodes);
    }
    return plan->reason[0] != '\0';
}

int r2_plan_make(struct r2_plan *plan, const struct r2_plan_input *in)
{
    struct r2_search s = {0};
    double slope;
    int worst;
    int rc;

    memset(plan, 0, sizeof(*plan));
    rc = r2_plan_check(plan, in);
    plan->nnodes = in->nnodes;
    plan->nranks = in->nranks;
    if (rc != 0 || r2_plan_trivial(plan, in, &worst)) {
        return rc;
    }
    rc = r2_search_open(&s, in);
    rc = rc == 0 ? r2_search_all(&s) : rc;
    rc = rc == 0 ? r2_search_choose(&s) : rc;
    if (rc != 0) {
        goto out;
    }
    slope = s.value / in->cost.tree_efficiency;
    plan->tree_ns = r2_plan_tree_fixed(in) + slope * (double)in->bytes;
    plan->from_bytes = r2_plan_from(in, slope);
    if (plan->from_bytes > 0 && in->bytes >= plan->from_bytes) {
        plan->schedule = R2_PLAN_TREE;
        plan->gain = 1 - plan->tree_ns / plan->stock_ns;
        rc = r2_plan_fill_orders(plan, &s);
    }
    r2_plan_explain(plan, in, worst);
out:
    r2_search_close(&s);
    if (rc != 0) {
        r2_plan_free(plan);
        snprintf(plan->reason, sizeof(plan->reason), "no plan: out of memory");
    }
    return rc;
}

void r2_plan_free(struct r2_plan *plan)
{
    for (int k = 0; k < plan->norders; k++) {
        free(plan->orders[k].nodes);
        free(plan->orders[k].ranks);
        plan->orders[k] = (struct r2_plan_order){0};
    }
    plan->norders = 0;
    plan->schedule = R2_PLAN_STOCK;
}
