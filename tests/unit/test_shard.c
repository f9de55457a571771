/* The cost model of the AllReduce schedules against published points, known bounds and, where the
 * model says what a rank carries, against the schedule itself. Rung 1. */
#include <math.h>

#include "check.h"
#include "plan/schedule.h"
#include "plan/shard.h"

#define MIB ((uint64_t)1 << 20)
#define NEAR(got, want, by)                                                                        \
    CHECK_MSG(fabs((got) - (want)) <= (by), "%s is %.6g, not %.6g", #got, (double)(got),           \
              (double)(want))

static struct r2_shard_node nodes[R2_SCHEDULE_RANKS];

/* p nodes of 1 GB/s, of which `slow` have `share` left. */
static struct r2_shard_input some(int p, int slow, double share, uint64_t bytes)
{
    for (int i = 0; i < p; i++)
        nodes[i] = (struct r2_shard_node){.out = i < slow ? share * 1e9 : 1e9,
                                          .in = i < slow ? share * 1e9 : 1e9};
    return (struct r2_shard_input){.p = p, .nodes = nodes, .bytes = bytes, .piece = 1024};
}

static double healthy_ring(int p, uint64_t bytes)
{
    struct r2_shard_node all[64];
    struct r2_shard_input in = {.p = p, .nodes = all, .bytes = bytes};

    for (int i = 0; i < p; i++)
        all[i] = (struct r2_shard_node){1e9, 1e9};
    return r2_shard_ring_ns(&in);
}

static double best_direct(const struct r2_shard_input *in)
{
    uint32_t weights[R2_SCHEDULE_RANKS];

    CHECK(r2_shard_weights(in, weights));
    return r2_shard_ns(in, weights);
}

TEST(four_nodes_of_8_gbit_have_the_known_bounds)
{
    struct r2_shard_input in = some(4, 1, 0.5, 256 * MIB);

    NEAR(r2_shard_bound_ns(&in) / 1e6, 536.9, 0.05);
    NEAR(r2_shard_ring_ns(&in) / 1e6, 805.3, 0.05);
    in = some(4, 1, 0.75, 256 * MIB);
    NEAR(r2_shard_bound_ns(&in) / 1e6, 429.5, 0.05);
    in = some(4, 0, 1, 256 * MIB);
    NEAR(r2_shard_bound_ns(&in) / 1e6, 402.7, 0.05);
    NEAR(r2_shard_ring_ns(&in) / 1e6, 402.7, 0.05);
}

/* p, slow nodes, what they have left; bound and ring as ratios to the ring of healthy nodes. */
TEST(bounds_are_those_of_the_table_and_direct_meets_them)
{
    static const struct {
        int p, slow;
        double share, bound, ring;
    } rows[] = {
        {8, 1, .875, 1.016, 1.143},  {8, 1, .5, 1.143, 2},        {8, 2, .875, 1.032, 1.143},
        {8, 2, .5, 1.143, 2},        {8, 4, .875, 1.067, 1.143},  {8, 4, .5, 1.333, 2},
        {16, 1, .875, 1.008, 1.143}, {16, 1, .5, 1.067, 2},       {16, 2, .875, 1.016, 1.143},
        {16, 2, .5, 1.067, 2},       {16, 4, .875, 1.032, 1.143}, {16, 4, .5, 1.143, 2},
        {32, 1, .875, 1.004, 1.143}, {32, 1, .5, 1.032, 2},       {32, 2, .875, 1.008, 1.143},
        {32, 4, .875, 1.016, 1.143}, {32, 4, .5, 1.067, 2},       {4, 1, .9, 1.026, 1.111},
        {4, 1, .75, 1.067, 1.333},   {4, 1, .5, 1.333, 2},        {8, 1, .75, 1.032, 1.333},
        {16, 1, .75, 1.016, 1.333},  {64, 1, .75, 1.004, 1.333},  {64, 1, .5, 1.016, 2},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct r2_shard_input in = some(rows[i].p, rows[i].slow, rows[i].share, 1024 * MIB);
        double whole = healthy_ring(rows[i].p, 1024 * MIB), bound = r2_shard_bound_ns(&in);

        NEAR(bound / whole, rows[i].bound, 0.0007);
        NEAR(r2_shard_ring_ns(&in) / whole, rows[i].ring, 0.0007);
        NEAR(best_direct(&in) / bound, 1, 0.002);
    }
}

TEST(direct_meets_the_bound_for_any_mix_of_rates)
{
    for (int round = 0; round < 2000; round++) {
        struct r2_shard_input in = some(3 + (int)(check_random() % 62), 0, 1, 1024 * MIB);
        double bound, got;

        for (int i = 0; i < in.p; i++)
            nodes[i].out = nodes[i].in = 1e8 + (double)(check_random() % 1000000) * 1e4;
        bound = r2_shard_bound_ns(&in);
        got = best_direct(&in);
        CHECK_MSG(got >= bound * 0.999999 && got <= bound * 1.01, "%d nodes: %.6f of the bound",
                  in.p, got / bound);
    }
}

/* No other weights are better: a unit moved from one rank to another never helps. */
TEST(no_neighbouring_weights_are_better)
{
    struct r2_shard_input in = some(6, 2, 0.8, 1024 * MIB);
    uint32_t weights[6];
    double best;

    nodes[3].in = 0.9e9;
    CHECK(r2_shard_weights(&in, weights));
    best = r2_shard_ns(&in, weights);
    for (int i = 0; i < 36; i++) {
        int from = i / 6, to = i % 6;

        if (from == to || weights[from] < 300)
            continue;
        weights[from] -= 300;
        weights[to] += 300;
        CHECK_GT(r2_shard_ns(&in, weights), best);
        weights[from] += 300;
        weights[to] -= 300;
    }
}

TEST(a_node_with_half_its_rate_owns_nothing_of_four)
{
    struct r2_shard_input in = some(4, 1, 0.5, MIB);
    uint32_t weights[4];

    CHECK(r2_shard_weights(&in, weights));
    CHECK_EQ(weights[0], 0);
    CHECK_EQ(weights[1] + weights[2] + weights[3], 65536);
    CHECK(weights[1] >= 21845 && weights[1] <= 21846);
    in = some(2, 1, 0.5, MIB);
    CHECK(r2_shard_weights(&in, weights));
    CHECK_EQ(weights[0], 32768);
    in = some(4, 1, 0, MIB);
    CHECK(!r2_shard_weights(&in, weights));
    CHECK(isinf(r2_shard_bound_ns(&in)));
}

/* The authors' model at six nodes with a third of one lost, as ratios to the healthy ring. */
TEST(r2ccl_allreduce_takes_what_its_authors_say)
{
    static const double want[] = {1.600, 1.450, 1.375, 1.338, 1.319};
    struct r2_shard_input in = some(6, 1, 2.0 / 3, 1024 * MIB);
    uint32_t tail = r2_shard_tail(&in, 0);

    NEAR(tail / 65536.0, 1.0 / 3, 0.0001);
    for (int i = 0; i < 5; i++)
        NEAR(r2_shard_r2ccl_ns(&in, 0, tail, 1u << i) / healthy_ring(6, 1024 * MIB), want[i],
             0.0007);
    in = some(8, 1, 0.5, 1024 * MIB);
    NEAR(r2_shard_r2ccl_ns(&in, 0, r2_shard_tail(&in, 0), 100000) / healthy_ring(8, 1024 * MIB),
         1.571, 0.0007);
    in = some(8, 0, 1, 1024 * MIB);
    CHECK_EQ(r2_shard_tail(&in, 0), 0);
    NEAR(r2_shard_r2ccl_ns(&in, 0, 0, 4), healthy_ring(8, 1024 * MIB), 1);
}

/* The model's bytes, messages and rounds are those of the schedule. */
TEST(the_model_counts_what_the_schedule_sends)
{
    struct r2_shard_input in = some(5, 2, 0.7, 16 * MIB);
    struct r2_schedule_data data = {.p = 5, .count = 4 * MIB, .elem = 4, .piece = 64 << 10};
    static struct r2_schedule s;
    uint32_t weights[5];
    double worst = 0;

    CHECK(r2_shard_weights(&in, weights));
    in.piece = data.piece;
    in.message_ns = 1e6; /* so that they alone count */
    for (int i = 0; i < 5; i++) {
        double messages = 0;

        CHECK_EQ(r2_schedule_direct(&s, &data, i, weights), 0);
        for (uint64_t k = 0; k < s.n_steps; k++) {
            struct r2_step step;

            r2_schedule_step(&s, k, &step);
            messages += step.n_in + step.n_out + (step.up >= 0) + (step.down >= 0);
        }
        worst = fmax(worst, messages);
    }
    NEAR(r2_shard_ns(&in, weights) / (worst * in.message_ns), 1, 0.01);
}
