/* How long a direct AllReduce takes against the lower bound, in virtual time over simulated ports
 * (rung 2): what the schedule, the pieces, the credit and the window cost. It cannot show what TCP,
 * the engine and several NICs add. */
#include "direct_sim.h"
#include "plan/shard.h"
#include "plan/sizes.h"

#define MIB ((uint64_t)1 << 20)
#define NICS 2
#define RATE 1e9          /* of a healthy node */
#define QUEUE (4.0 * MIB) /* what may wait at a port */
#define FAST 12500000000  /* bytes/s: 100 Gbit/s */
#define NEAR 1.02         /* of the bound */

static struct r2_shard_node nodes[SIM_RANKS];
static uint32_t weights[SIM_RANKS];

/* p nodes, of which `slow` have `share` left. */
static struct r2_shard_input some(int p, int slow, double share, uint64_t bytes)
{
    for (int r = 0; r < p; r++)
        nodes[r].out = nodes[r].in = r < slow ? share * RATE : RATE;
    return (struct r2_shard_input){.p = p, .nodes = nodes, .bytes = bytes};
}

static struct r2_schedule_data open_ports(const struct r2_shard_input *in)
{
    struct r2_sizes_window w = r2_sizes_window(in->p, 0, 1);
    struct r2_exec_config config = {.piece = w.slot, .n_slots = w.n_slots};
    struct r2_schedule_data data = {.p = in->p, .count = in->bytes / 4, .elem = 4};

    CHECK(r2_shard_weights(in, weights));
    data.piece = r2_sizes_piece(w.slot, in->p, in->bytes, weights);
    sim_open(in->p, 50e-6, &config);
    for (int r = 0; r < in->p; r++) {
        sim.out[r] = nodes[r].out;
        sim.in[r] = nodes[r].in;
        sim.ranks[r].credit = r2_sizes_credit(in->p, r, weights, NICS, 0);
    }
    return data;
}

/* Time against the bound. What waits before a port fits its queue. */
static double ratio(const struct r2_shard_input *in)
{
    struct r2_schedule_data data = open_ports(in);
    double took;

    for (int r = 0; r < in->p; r++)
        CHECK_EQ(r2_schedule_direct(&sim.ranks[r].schedule, &data, r, weights), 0);
    took = sim_run();
    for (int r = 0; r < in->p; r++)
        CHECK_MSG(sim.ports[r].most * sim.in[r] < QUEUE, "%.0f bytes wait at rank %d",
                  sim.ports[r].most * sim.in[r], r);
    sim_close();
    return took / (r2_shard_bound_ns(in) / 1e9);
}

TEST(close_to_the_bound)
{
    static const struct {
        int p, slow;
        double share;
    } cases[] = {{2, 1, .5},  {4, 0, 1},   {4, 1, .75}, {4, 1, .5}, {4, 2, .5},
                 {4, 2, .75}, {8, 1, .75}, {8, 3, .5},  {16, 1, .5}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct r2_shard_input in = some(cases[i].p, cases[i].slow, cases[i].share, 64 * MIB);
        double got = ratio(&in);

        CHECK_MSG(got < NEAR, "%d nodes, %d at %.3f: %.4f of the bound", cases[i].p, cases[i].slow,
                  cases[i].share, got);
    }
}

TEST(who_has_lost_nics_posts_for_those_left)
{
    static const uint32_t equal[] = {16384, 16384, 16384, 16384};
    static const uint32_t one_half[] = {0, 21845, 21845, 21846},
                          two_halves[] = {0, 0, 32768, 32768};
    static const uint32_t one_of_four[] = {6554, 19661, 19661, 19660};
    static const uint32_t one_of_eight[] = {0, 9362, 9362, 9362, 9362, 9362, 9363, 9363};

    CHECK_EQ(r2_sizes_credit(4, 0, equal, 2, 0), R2_SIZES_CREDIT / 6);
    CHECK_EQ(r2_sizes_credit(4, 3, one_half, 2, 0), R2_SIZES_CREDIT / 6);
    /* Two pieces on each lane, for one NIC. */
    CHECK_EQ(r2_sizes_credit(4, 0, one_half, 2, 0), MIB / 4);
    CHECK_EQ(r2_sizes_credit(4, 1, two_halves, 2, 0), MIB / 4);
    /* Four for three NICs, six for four or five of eight. */
    CHECK_EQ(r2_sizes_credit(4, 0, one_of_four, 4, 0), MIB / 2);
    CHECK_EQ(r2_sizes_credit(4, 0, one_half, 8, 0), 3 * MIB / 4);
    /* Of 100 Gbit/s twice as much, of 5 Tbit/s eight times. */
    CHECK_EQ(r2_sizes_credit(4, 0, one_of_four, 4, FAST), MIB);
    CHECK_EQ(r2_sizes_credit(4, 0, one_of_four, 4, 50 * FAST), 4 * MIB);
    /* 1 MiB for about one NIC on seven lanes. */
    CHECK_EQ(r2_sizes_credit(8, 0, one_of_eight, 2, 0) * 100 / MIB, 15);
}

/* Ranks need not know each other's NICs: only the number of slots is a rank's own affair. */
TEST(slots_are_alike_on_all_ranks)
{
    for (int p = 2; p <= 1024; p++) {
        struct r2_sizes_window slow = r2_sizes_window(p, 0, 1), fast = r2_sizes_window(p, FAST, 1);
        struct r2_sizes_window shared = r2_sizes_window(p, 0, 2);

        CHECK_EQ(slow.slot, fast.slot);
        CHECK_EQ(slow.slot, shared.slot);
        CHECK_GE(fast.n_slots, 2 * slow.n_slots);
        CHECK_LE(shared.n_slots, slow.n_slots / (p == 4 ? 2 : 1));
        CHECK_GE(shared.n_slots, r2_sizes_round(p) < 256 ? 4 * r2_sizes_round(p) : 1);
        CHECK_GE(slow.n_slots, r2_sizes_round(p) < 256 ? 4 * r2_sizes_round(p) : 1);
    }
}

/* Nodes of four different rates. */
TEST(any_mix_of_rates)
{
    struct r2_shard_input in = some(6, 2, .75, 64 * MIB);
    double got;

    nodes[1].out = nodes[1].in = .5 * RATE;
    nodes[4].out = nodes[4].in = .875 * RATE;
    got = ratio(&in);
    CHECK_MSG(got < NEAR, "%.4f of the bound", got);
}

/* R2CCL-AllReduce takes what its authors' model says, with their case of six nodes. */
TEST(r2ccl_is_near_its_model)
{
    for (int p = 4; p <= 6; p += 2) {
        struct r2_shard_input in = some(p, 1, p == 6 ? 2.0 / 3 : .5, 64 * MIB);
        uint32_t tail = r2_shard_tail(&in, 0);

        for (unsigned chunks = 1; chunks <= 16; chunks *= 4) {
            struct r2_schedule_data data = open_ports(&in);
            double model = r2_shard_r2ccl_ns(&in, 0, tail, chunks) / 1e9, took;

            for (int r = 0; r < p; r++) {
                sim.ranks[r].credit = R2_SIZES_CREDIT / (2 * (size_t)(p - 1)); /* no weights */
                CHECK_EQ(r2_schedule_r2ccl(&sim.ranks[r].schedule, &data, r, 0, tail, chunks), 0);
            }
            took = sim_run();
            sim_close();
            CHECK_MSG(took > model * .99 && took < model * 1.08, "%d nodes, %u chunks: %.3f", p,
                      chunks, took / model);
        }
    }
}
