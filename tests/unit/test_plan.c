/* Which schedule is chosen, and the plan that ranks agree on (plan/plan.c). Rung 1. It cannot prove
 * that the model holds: docs/measurements.md has what was measured. */
#include <errno.h>
#include <math.h>

#include "check.h"
#include "plan/plan.h"

#define MIB (UINT64_C(1) << 20)
#define UNIT 65536
#define SPEED 1e9

static struct r2_plan_choice choose(int p, const double *shares, uint64_t bytes,
                                    enum r2_plan_wish wish)
{
    struct r2_plan_node nodes[R2_PLAN_MOST];
    struct r2_plan_input in = {
        .p = p, .nodes = nodes, .bytes = bytes, .from_bytes = MIB, .wish = wish};
    struct r2_plan_choice c;

    for (int i = 0; i < p; i++)
        nodes[i] = (struct r2_plan_node){SPEED, shares[i]};
    r2_plan_choose(&c, &in);
    return c;
}

TEST(half_of_one_node)
{
    const double shares[] = {1, 0.5, 1, 1};
    struct r2_plan_choice c = choose(4, shares, 256 * MIB, R2_PLAN_BEST);
    double n = 256.0 * (1 << 20);

    CHECK_EQ(c.plan.schedule, R2_PLAN_DIRECT);
    CHECK(fabs(c.bound_ns - n / (SPEED / 2) * 1e9) < 1e6);
    CHECK(c.direct_ns > c.bound_ns && c.direct_ns < 1.05 * c.bound_ns);
    CHECK(c.stock_ns > 1.49 * c.bound_ns && c.stock_ns < 1.52 * c.bound_ns);
    CHECK(c.gain > 0.3);
    CHECK_EQ(c.plan.weights[1], 0); /* at the bound it has no room to own anything */
    CHECK_EQ(c.degraded, 1);
    CHECK_EQ(c.worst, 1);
    CHECK(strstr(c.why, "direct: 1 of 4 nodes degraded, node 1 keeps 50 %"));
    CHECK(c.plan.from_bytes >= MIB && c.plan.from_bytes < 256 * MIB);
}

/* The more nodes, the smaller the executor's pieces; fast NICs wait for the cores. Each rank of a
 * node has cores of its own; the steps within the node come on top. */
TEST(messages_of_many_nodes)
{
    const struct {
        int p;
        double piece;
    } cases[] = {{4, 128 << 10}, {10, 64 << 10}, {18, 32 << 10}, {34, 16 << 10}};

    for (int k = 0; k < 8; k++) {
        int p = cases[k / 2].p, per_node = k % 2 ? 8 : 1;
        struct r2_plan_node nodes[R2_PLAN_MOST];
        struct r2_plan_input in = {
            .p = p, .nodes = nodes, .per_node = per_node, .bytes = (uint64_t)per_node * 1024 * MIB};
        struct r2_plan_choice c;
        double rounds = ceil(1024.0 * (1 << 20) / p / cases[k / 2].piece);
        double within = 2.0 * (per_node - 1) * 1024 * MIB / 200;

        for (int i = 0; i < p; i++)
            nodes[i] = (struct r2_plan_node){1e15, 1};
        r2_plan_choose(&c, &in);
        CHECK_MSG(fabs((c.direct_ns - within) / (rounds * 4 * (p - 1) * 2e3) - 1) < 0.01,
                  "%d nodes: %.0f ns", p, c.direct_ns);
    }
}

TEST(no_plan)
{
    const double healthy[] = {1, 1, 1, 1}, two[] = {1, 0.5}, none[] = {1, 0, 1};
    struct r2_plan_choice c = choose(4, healthy, 256 * MIB, R2_PLAN_BEST);

    CHECK_EQ(c.plan.schedule, R2_PLAN_STOCK);
    CHECK(strstr(c.why, "all 4 nodes are healthy"));
    c = choose(2, two, 256 * MIB, R2_PLAN_BEST);
    CHECK_EQ(c.plan.schedule, R2_PLAN_STOCK);
    CHECK(strstr(c.why, "two nodes"));
    c = choose(3, none, 256 * MIB, R2_PLAN_BEST);
    CHECK_EQ(c.plan.schedule, R2_PLAN_STOCK);
    CHECK(strstr(c.why, "node 1 has no NIC left"));
}

/* Small operations gain nothing, and a loss so small neither; a mode takes its schedule anyway. */
TEST(no_gain)
{
    const double shares[] = {1, 0.98, 1, 1}, half[] = {1, 0.5, 1, 1};
    struct r2_plan_choice c = choose(4, shares, 256 * MIB, R2_PLAN_BEST);

    CHECK_EQ(c.plan.schedule, R2_PLAN_STOCK);
    CHECK(strstr(c.why, "stock: 1 of 4"));
    CHECK_EQ(choose(4, shares, 256 * MIB, R2_PLAN_WISH_DIRECT).plan.schedule, R2_PLAN_DIRECT);
    CHECK_EQ(choose(4, half, MIB / 2, R2_PLAN_BEST).plan.schedule, R2_PLAN_STOCK);
}

TEST(modes)
{
    const double one[] = {1, 0.75, 1, 1, 1, 1}, two[] = {1, 0.75, 1, 0.5, 1, 1};
    const double healthy[] = {1, 1};
    struct r2_plan_choice c = choose(6, one, 256 * MIB, R2_PLAN_WISH_R2CCL);

    CHECK_EQ(c.plan.schedule, R2_PLAN_R2CCL);
    CHECK_EQ(c.plan.slow, 1);
    CHECK(c.plan.tail > UNIT / 4 - 10 && c.plan.tail < UNIT / 4 + 10);
    CHECK(c.r2ccl_ns < c.stock_ns && c.r2ccl_ns > c.direct_ns);
    /* It is for one slow node. */
    CHECK_EQ(choose(6, two, 256 * MIB, R2_PLAN_WISH_R2CCL).plan.schedule, R2_PLAN_DIRECT);
    c = choose(2, healthy, 256 * MIB, R2_PLAN_ALWAYS_DIRECT);
    CHECK_EQ(c.plan.schedule, R2_PLAN_DIRECT);
    CHECK_EQ(c.plan.weights[0], UNIT / 2);
}

/* In any state the prediction of what is chosen is between the bound and stock, and the weights sum
 * up to the whole. */
TEST(random_states)
{
    for (int round = 0; round < 2000; round++) {
        int p = 3 + (int)check_below(62);
        double shares[64];
        struct r2_plan_choice c;
        uint64_t sum = 0;

        for (int i = 0; i < p; i++)
            shares[i] = check_below(3) ? 1 : (double)(1 + check_below(8)) / 8;
        c = choose(p, shares, MIB << check_below(11), R2_PLAN_BEST);
        for (int i = 0; i < p; i++)
            sum += c.plan.weights[i];
        CHECK_EQ(sum, UNIT);
        CHECK(c.bound_ns <= c.stock_ns);
        if (c.plan.schedule == R2_PLAN_DIRECT)
            CHECK(c.direct_ns >= c.bound_ns && c.direct_ns <= 0.95 * c.stock_ns);
    }
}

TEST(read)
{
    struct r2_plan plan, copy;

    r2_plan_equal(&plan, 5);
    CHECK_EQ(r2_plan_read(&copy, &plan, r2_plan_bytes(5), 5), 0);
    CHECK(r2_plan_same(&plan, &copy));
    CHECK_EQ(r2_plan_read(&copy, &plan, r2_plan_bytes(5), 4), -EPROTO);
    CHECK_EQ(r2_plan_read(&copy, &plan, r2_plan_bytes(5) - 1, 5), -EPROTO);
    plan.weights[0]++;
    CHECK_EQ(r2_plan_read(&copy, &plan, r2_plan_bytes(5), 5), -EPROTO);
    plan.weights[0]--;
    plan.schedule = R2_PLAN_SCHEDULES;
    CHECK_EQ(r2_plan_read(&copy, &plan, r2_plan_bytes(5), 5), -EPROTO);
    plan.schedule = R2_PLAN_R2CCL;
    plan.slow = 5;
    CHECK_EQ(r2_plan_read(&copy, &plan, r2_plan_bytes(5), 5), -EPROTO);
    plan.slow = 4;
    CHECK_EQ(r2_plan_read(&copy, &plan, r2_plan_bytes(5), 5), 0);
    plan.magic ^= 1;
    CHECK_EQ(r2_plan_read(&copy, &plan, r2_plan_bytes(5), 5), -EPROTO);
}

TEST(same)
{
    struct r2_plan a, b;

    r2_plan_equal(&a, 4);
    b = a;
    b.weights[0] += UNIT / 200;
    b.weights[1] -= UNIT / 200;
    CHECK(r2_plan_same(&a, &b));
    b.weights[0] += UNIT / 100;
    CHECK(!r2_plan_same(&a, &b));
    b = a;
    b.from_bytes = MIB;
    CHECK(!r2_plan_same(&a, &b));
    r2_plan_stock(&b, 4);
    CHECK(!r2_plan_same(&a, &b));
}

TEST(never)
{
    CHECK(r2_plan_never(3) == NULL);
    CHECK(strstr(r2_plan_never(2), "two nodes"));
    CHECK(strstr(r2_plan_never(1), "one node"));
    CHECK(strstr(r2_plan_never(300), "256"));
}
