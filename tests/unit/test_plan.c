/* The planner against independent constructions (rung 1): trees built by recursion, the optimum by
 * brute force over all orders, and the formulas of the model. It cannot prove that a plan is
 * faster. */
#include <math.h>

#include "check.h"
#include "plan/game.h"
#include "plan/plan.h"

#define MIB ((uint64_t)1 << 20)
#define NEAR(a, b) CHECK_MSG(fabs((a) - (b)) <= 1e-6 * fabs(b), "%s is %.9g, not %.9g", #a, a, b)

/* --- trees -------------------------------------------------------------------------------- */

/* Another construction of the same tree, by cutting ranges: below a parent hangs, of each side, the
 * number that is divisible by the highest power of two. */
static int cut(int low, int high)
{
    int best = low;

    for (int i = low; i < high; i++) {
        best = __builtin_ctz((unsigned)i) > __builtin_ctz((unsigned)best) ? i : best;
    }
    return best;
}

static void hang(int low, int high, int parent, int *up)
{
    int root;

    if (low >= high) {
        return;
    }
    root = cut(low, high);
    up[root] = parent;
    hang(low, root, root, up);
    hang(root + 1, high, root, up);
}

static void reference(int p, int tree, int *up)
{
    int first[R2_PLAN_NODES];

    first[0] = -1;
    hang(1, p, 0, first);
    for (int i = 0; i < p; i++) {
        int from = tree == 0 ? i : p % 2 == 0 ? p - 1 - i : (i + p - 1) % p;
        int to = first[from];

        up[i] = tree == 0 || to < 0 ? to : p % 2 == 0 ? p - 1 - to : (to + 1) % p;
    }
}

static void test_trees_match_recursion(void)
{
    for (int p = 1; p <= 300; p++) {
        int sum = 0;

        for (int tree = 0; tree < 2; tree++) {
            int up[R2_PLAN_NODES];
            int down[R2_PLAN_NODES] = {0};

            reference(p, tree, up);
            for (int i = 0; i < p; i++) {
                CHECK_EQ(r2_plan_tree_link(p, tree, i).up, up[i]);
                down[up[i] < 0 ? 0 : up[i]] += up[i] >= 0;
            }
            for (int i = 0; i < p; i++) {
                struct r2_plan_link link = r2_plan_tree_link(p, tree, i);

                CHECK_EQ((link.down[0] >= 0) + (link.down[1] >= 0), down[i]);
                for (int k = 0; k < 2; k++) {
                    CHECK(link.down[k] < 0 || up[link.down[k]] == i);
                }
            }
        }
        for (int i = 0; i < p; i++) {
            sum += r2_plan_tree_load(p, i);
        }
        CHECK_EQ(sum, 4 * (p - 1)); /* 2(p-1) n in total */
    }
}

/* The table of schedules.md: which positions are light. */
static void test_light_positions(void)
{
    for (int p = 3; p <= 300; p++) {
        int order[R2_PLAN_NODES];

        for (int i = 0; i < p; i++) {
            bool end = i == 0 || i == p - 1;
            int want = p % 2 == 0 ? (end ? 2 : 4) : i == 1 ? 2 : end ? 3 : 4;

            CHECK_EQ(r2_plan_tree_load(p, i), want);
        }
        r2_plan_light_positions(p, order);
        CHECK_EQ(order[0], p % 2 == 0 ? 0 : 1);
        CHECK_EQ(order[1], p % 2 == 0 ? p - 1 : 0);
        for (int i = 1; i < p; i++) {
            CHECK_LE(r2_plan_tree_load(p, order[i - 1]), r2_plan_tree_load(p, order[i]));
        }
    }
}

/* --- the solver --------------------------------------------------------------------------- */

/* Both sides of the game must agree on its value: that proves it optimal. */
static void test_game_is_optimal(void)
{
    for (unsigned long round = 0; round < check_rounds(3000); round++) {
        int rows = 1 + (int)check_below(40);
        int columns = 1 + (int)check_below(R2_GAME_COLUMNS);
        double load[40 * R2_GAME_COLUMNS], f[R2_GAME_COLUMNS], price[40];
        double sum = 0, prices = 0, worst = 0, value, least = INFINITY;

        for (int i = 0; i < rows * columns; i++) {
            load[i] = check_below(3) == 0 ? 1 + (double)check_below(3)
                                          : 0.01 + (double)check_below(1000) / 100;
        }
        value = r2_game_solve(load, rows, columns, f, price);
        for (int i = 0; i < rows; i++) {
            double mine = 0;

            for (int k = 0; k < columns; k++) {
                mine += load[i * columns + k] * f[k];
            }
            CHECK(price[i] > -1e-9);
            prices += price[i];
            worst = fmax(worst, mine);
        }
        for (int k = 0; k < columns; k++) {
            double his = 0;

            for (int i = 0; i < rows; i++) {
                his += load[i * columns + k] * price[i];
            }
            CHECK(f[k] > -1e-9);
            sum += f[k];
            least = fmin(least, his);
        }
        NEAR(sum, 1.0);
        NEAR(prices, 1.0);
        NEAR(worst, value);
        NEAR(least, value);
    }
}

/* --- plans -------------------------------------------------------------------------------- */

static struct r2_plan_node nodes[R2_PLAN_NODES];
static int rank_node[R2_PLAN_NODES * 8];

static struct r2_plan_input input(int p, int per_node, double gbps)
{
    struct r2_plan_input in = {.nnodes = p,
                               .nodes = nodes,
                               .nranks = p * per_node,
                               .rank_node = rank_node,
                               .bytes = 256 * MIB,
                               .min_bytes = MIB,
                               .min_gain = 0.05,
                               .max_orders = R2_PLAN_ORDERS,
                               .cost = {.ring_efficiency = 1, .tree_efficiency = 1}};

    for (int i = 0; i < p; i++) {
        nodes[i] = (struct r2_plan_node){gbps / 8 * 1e9, 1};
    }
    for (int r = 0; r < p * per_node; r++) {
        rank_node[r] = r / per_node;
    }
    return in;
}

/* Load of a node over all orders of a plan, in units of the data. */
static double load_of(const struct r2_plan *plan, int node)
{
    double load = 0;

    for (int k = 0; k < plan->norders; k++) {
        uint32_t end = k + 1 < plan->norders ? plan->orders[k + 1].boundary : R2_PLAN_UNIT;

        for (int i = 0; i < plan->nnodes; i++) {
            if (plan->orders[k].nodes[i] == node) {
                load += 0.5 * r2_plan_tree_load(plan->nnodes, i) *
                        (end - plan->orders[k].boundary) / R2_PLAN_UNIT;
            }
        }
    }
    return load;
}

/* The plan's own prediction follows from its orders; nothing is lost or doubled in them. */
static void check_plan(const struct r2_plan *plan, const struct r2_plan_input *in)
{
    double worst = 0;

    CHECK_EQ(plan->schedule, R2_PLAN_TREE);
    CHECK_GE(plan->norders, 1);
    CHECK_LE(plan->norders, in->max_orders);
    CHECK_EQ(plan->orders[0].boundary, 0);
    for (int k = 0; k < plan->norders; k++) {
        unsigned char seen[R2_PLAN_NODES * 8] = {0};

        CHECK(k == 0 || plan->orders[k].boundary >= plan->orders[k - 1].boundary);
        for (int r = 0; r < in->nranks; r++) {
            CHECK(!seen[plan->orders[k].ranks[r]]++);
            /* a node's ranks stand together, nodes in the order's order */
            CHECK_EQ(rank_node[plan->orders[k].ranks[r]],
                     plan->orders[k].nodes[r / (in->nranks / in->nnodes)]);
        }
    }
    for (int i = 0; i < in->nnodes; i++) {
        worst = fmax(worst, load_of(plan, i) * (double)in->bytes /
                                (nodes[i].capacity * nodes[i].share / 1e9));
    }
    CHECK_MSG(fabs(worst / in->cost.tree_efficiency - plan->tree_ns) <= 1e-3 * plan->tree_ns,
              "the orders take %.6g ns, the plan says %.6g", worst, plan->tree_ns);
    CHECK(plan->tree_ns >= plan->bound_ns * (1 - 1e-9));
}

/* max(2n/B, l n/B) of schedules.md, and its measured setting: 4 nodes, 8 Gbit/s, 256 MiB. */
static void test_one_degraded_node(void)
{
    for (int p = 3; p <= 64; p++) {
        for (int victim = 0; victim < p; victim++) {
            struct r2_plan_input in = input(p, 2, 8);
            double n_over_b = (double)in.bytes; /* 1 byte per ns */
            struct r2_plan plan;

            nodes[victim].share = 0.5;
            CHECK_EQ(r2_plan_make(&plan, &in), 0);
            check_plan(&plan, &in);
            CHECK_EQ(plan.norders, 1);
            NEAR(plan.tree_ns, 2 * n_over_b);
            NEAR(plan.stock_ns, 2.0 * 2 * (p - 1) / p * n_over_b);
            NEAR(plan.bound_ns, fmax(2, 2 * (p - 1) / (p - 0.5)) * n_over_b);
            CHECK_EQ(plan.orders[0].nodes[p % 2 == 0 ? 0 : 1], victim);
            r2_plan_free(&plan);
        }
    }
}

static void test_measured_setting(void)
{
    struct r2_plan_input in = input(4, 1, 8);

    nodes[3].share = 0.5;
    NEAR(r2_plan_bound_ns(&in) / 1e6, 536.870912);
    NEAR(r2_plan_tree_ns(&in, NULL) / 1e6, 536.870912); /* node 3 stands at the end */
    nodes[3].share = 1;
    nodes[1].share = 0.5;
    NEAR(r2_plan_tree_ns(&in, NULL) / 1e6, 2 * 536.870912); /* an inner node */
    NEAR(r2_plan_ring_ns(&in) / 1e6, 2 * 402.653184);
    nodes[1].share = 1;
    NEAR(r2_plan_ring_ns(&in) / 1e6, 402.653184);
}

/* k degraded nodes carry (2 - 2/k) n each, even numbers of nodes. */
static void test_many_degraded_nodes(void)
{
    for (int p = 6; p <= 32; p += 2) {
        for (int k = 2; k <= 8 && k < p; k += 2) {
            struct r2_plan_input in = input(p, 1, 8);
            struct r2_plan plan;

            for (int i = 0; i < k; i++) {
                nodes[(i * 3) % p == 0 && i ? i : (i * 3) % p].share = 0.4;
            }
            CHECK_EQ(r2_plan_make(&plan, &in), 0);
            CHECK(plan.degraded <= k);
            if (plan.degraded == k) {
                double want = fmax(2, (2 - 2.0 / k) / 0.4) * (double)in.bytes;

                CHECK_MSG(plan.tree_ns <= want * 1.025, "p %d k %d: %.4g ns, the model %.4g", p, k,
                          plan.tree_ns, want);
                CHECK(plan.schedule == R2_PLAN_TREE || want * 1.025 > plan.stock_ns * 0.95);
            }
            if (plan.schedule == R2_PLAN_TREE) {
                check_plan(&plan, &in);
            }
            r2_plan_free(&plan);
        }
    }
}

/* All permutations of few nodes: no single order is better than the planner's. */
static double best_order(const struct r2_plan_input *in, int *order, int n)
{
    double best = n == in->nnodes ? r2_plan_tree_ns(in, order) : INFINITY;

    for (int i = n; i < in->nnodes; i++) {
        int tmp = order[n];

        order[n] = order[i];
        order[i] = tmp;
        best = fmin(best, best_order(in, order, n + 1));
        order[i] = order[n];
        order[n] = tmp;
    }
    return best;
}

static void test_single_order_is_best(void)
{
    for (unsigned long round = 0; round < check_rounds(60); round++) {
        int p = 3 + (int)check_below(5);
        struct r2_plan_input in = input(p, 1, 100);
        int order[R2_PLAN_NODES];
        struct r2_plan plan;

        in.max_orders = 1;
        in.min_gain = 0;
        in.min_bytes = 1;
        for (int i = 0; i < p; i++) {
            nodes[i].share = (1 + (double)check_below(8)) / 8;
            order[i] = i;
        }
        CHECK_EQ(r2_plan_make(&plan, &in), 0);
        NEAR(plan.tree_ns, plan.degraded ? best_order(&in, order, 0) : plan.stock_ns);
        r2_plan_free(&plan);
    }
}

/* Lower bound over all mixtures of orders, from the game's other side: with prices w per node, no
 * order costs less than the sorted matching of w/B with the loads. Even p has a closed form:
 * node i must be light for a part y_i >= 2 - t B_i, the parts sum to at most 2. */
static double best_mixture_even(const struct r2_plan_input *in)
{
    double low = r2_plan_bound_ns(in), high = low * 100;

    for (int step = 0; step < 200; step++) {
        double t = (low + high) / 2;
        double need = 0;
        bool fits = true;

        for (int i = 0; i < in->nnodes; i++) {
            double carried =
                t * nodes[i].capacity * nodes[i].share / 1e9 / (double)in->bytes; /* of the data */

            fits &= carried >= 1;
            need += fmax(0, 2 - carried);
        }
        if (fits && need <= 2) {
            high = t;
        } else {
            low = t;
        }
    }
    return high;
}

static void test_mixtures_are_near_the_best(void)
{
    double worst = 1;

    for (unsigned long round = 0; round < check_rounds(400); round++) {
        int p = 4 + 2 * (int)check_below(15);
        struct r2_plan_input in = input(p, 1, 100);
        struct r2_plan plan;
        double best;

        in.min_gain = 0;
        for (int i = 0; i < p; i++) {
            nodes[i].share = check_below(3) ? 1 : (1 + (double)check_below(7)) / 8;
        }
        CHECK_EQ(r2_plan_make(&plan, &in), 0);
        best = best_mixture_even(&in);
        if (plan.schedule == R2_PLAN_TREE) {
            check_plan(&plan, &in);
            CHECK(plan.tree_ns >= best * (1 - 1e-6));
            worst = fmax(worst, plan.tree_ns / best);
        }
        r2_plan_free(&plan);
    }
    printf("# plans of at most %d orders took up to %.3f of the best mixture\n", R2_PLAN_ORDERS,
           worst);
    CHECK(worst < 1.10);
}

static void test_stock_when_it_is_better(void)
{
    struct r2_plan_input in = input(8, 8, 400);
    struct r2_plan plan;

    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_STOCK);
    CHECK_STR(plan.reason, "stock: all 8 nodes are healthy");

    nodes[5].share = 15.0 / 16; /* the ring loses less than the tree costs */
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_STOCK);
    CHECK(strstr(plan.reason, "1 of 8 nodes degraded, node 5 keeps 94 %"));

    nodes[5].share = 0; /* nothing helps */
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_STOCK);
    CHECK_STR(plan.reason, "stock: node 5 has no NIC left");

    nodes[5].share = 0.5;
    in.bytes = MIB - 1;
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_STOCK);
    in.bytes = MIB;
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_TREE);
    CHECK_EQ(plan.from_bytes, MIB);
    r2_plan_free(&plan);

    in = input(1, 8, 400);
    nodes[0].share = 0.5;
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_STOCK);
}

/* The size from which the tree pays is where the two predictions cross. */
static void test_crossover(void)
{
    struct r2_plan_input in = input(4, 1, 8);
    struct r2_plan plan;
    uint64_t from;

    nodes[2].share = 0.6;
    in.cost = (struct r2_plan_cost){1, 0.9, 50e3};
    in.cost.hop_ns = 2e6;
    in.min_gain = 0.05;
    in.nnodes = 3; /* the tree has as many steps as the ring */
    in.nranks = 3;
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_TREE);
    from = plan.from_bytes;
    CHECK_GT(from, in.min_bytes);
    r2_plan_free(&plan);
    in.bytes = from - 1;
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_STOCK);
    CHECK(plan.tree_ns > plan.stock_ns * 0.95);
    in.bytes = from;
    CHECK_EQ(r2_plan_make(&plan, &in), 0);
    CHECK_EQ(plan.schedule, R2_PLAN_TREE);
    CHECK(plan.tree_ns <= plan.stock_ns * 0.95 + 1);
    r2_plan_free(&plan);
}

static void test_bad_input(void)
{
    static const double bad[] = {-1, 0, 1.5, NAN, INFINITY};
    struct r2_plan plan;

    for (int i = 0; i < 5; i++) {
        struct r2_plan_input in = input(4, 1, 8);

        nodes[1].capacity = i == 2 ? 2e18 : bad[i];
        CHECK_EQ(r2_plan_make(&plan, &in), -EINVAL);
        in = input(4, 1, 8);
        nodes[1].share = i == 1 ? 2 : bad[i];
        CHECK_EQ(r2_plan_make(&plan, &in), -EINVAL);
        CHECK_STR(plan.reason, "no plan: a node's bandwidth is out of range");
        in = input(4, 1, 8);
        in.cost.tree_efficiency = bad[i];
        CHECK_EQ(r2_plan_make(&plan, &in), -EINVAL);
    }
    for (int i = 0; i < 4; i++) {
        struct r2_plan_input in = input(4, 1, 8);

        in.nnodes = i == 0 ? R2_PLAN_NODES + 1 : i == 1 ? 0 : 4;
        in.max_orders = i == 2 ? R2_PLAN_ORDERS + 1 : i == 3 ? 0 : 1;
        CHECK_EQ(r2_plan_make(&plan, &in), -EINVAL);
    }
}

static const struct check_test tests[] = {{"trees_match_recursion", test_trees_match_recursion},
                                          {"light_positions", test_light_positions},
                                          {"game_is_optimal", test_game_is_optimal},
                                          {"one_degraded_node", test_one_degraded_node},
                                          {"measured_setting", test_measured_setting},
                                          {"many_degraded_nodes", test_many_degraded_nodes},
                                          {"single_order_is_best", test_single_order_is_best},
                                          {"mixtures", test_mixtures_are_near_the_best},
                                          {"stock_when_it_is_better", test_stock_when_it_is_better},
                                          {"crossover", test_crossover},
                                          {"bad_input", test_bad_input},
                                          {0}};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
