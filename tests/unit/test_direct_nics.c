/* How long a direct AllReduce takes against the lower bound when nodes have lost NICs, in virtual
 * time over simulated NICs (rung 2): what windows, and the choice of a NIC for each chunk, cost. */
#include "nics_sim.h"

#define MIB ((uint64_t)1 << 20)
#ifdef __SANITIZE_THREAD__ /* takes ten times as long, and there is one thread */
#define SEEDS 1
#else
#define SEEDS 3
#endif
#define OPERATIONS 20 /* the first half makes rates known */
#define PAYLOAD (8948.0 / 9014.0)

/* Some operations after ranks have so many NICs left: what the second half takes of the bound. */
static double ratio(const int nics[], double gbit, uint64_t bytes)
{
    double took = 0, each[NSIM_RANKS];
    struct r2_shard_node nodes[NSIM_RANKS];
    struct r2_shard_input in = {.p = NSIM_RANKS, .nodes = nodes, .bytes = bytes};
    struct r2_schedule_data data = {.p = NSIM_RANKS, .count = bytes / 4, .elem = 4};
    uint32_t weights[NSIM_RANKS];

    for (int i = 0; i < NSIM_RANKS; i++) {
        each[i] = nics[i] * gbit * 1e9 / 8 * PAYLOAD;
        nodes[i] = (struct r2_shard_node){.out = each[i], .in = each[i]};
    }
    CHECK(r2_shard_weights(&in, weights));
    data.piece = r2_sizes_piece(r2_sizes_window(NSIM_RANKS, 0, 1).slot, NSIM_RANKS, bytes, weights);
    nsim_plan(nics, &data, weights);
    for (int i = 0; i < OPERATIONS; i++) {
        double t = nsim_run();

        took += i < OPERATIONS / 2 ? 0 : t / (OPERATIONS - OPERATIONS / 2);
    }
    nsim_drain();
    return took / (r2_shard_bound_ns(&in) / 1e9);
}

TEST(close_to_the_bound)
{
    static const struct {
        int nics[NSIM_RANKS]; /* that are left */
        double gbit, most;
    } cases[] = {{{2, 1, 2, 2}, 4, 1.012}, {{2, 1, 1, 2}, 4, 1.01},  {{4, 3, 4, 4}, 2, 1.018},
                 {{4, 3, 4, 4}, 1, 1.03},  {{4, 3, 3, 4}, 2, 1.012}, {{4, 2, 3, 4}, 2, 1.028},
                 {{4, 2, 2, 4}, 2, 1.028}, {{4, 2, 2, 4}, 25, 1.02}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        double got;

        nsim_open(cases[i].gbit * 1e9 / 8, 1);
        got = ratio(cases[i].nics, cases[i].gbit, 64 * MIB);
        nsim_close();
        CHECK_MSG(got < cases[i].most, "case %zu: %.4f of the bound", i, got);
    }
}

/* NICs come back. Their paths are new, those of the others have much in flight. None of them stays
 * slow for that. */
TEST(nics_come_back)
{
    static const int half[] = {4, 2, 2, 4}, after[][NSIM_RANKS] = {{4, 3, 3, 4}, {4, 4, 4, 4}};

    for (size_t i = 0; i < 2; i++) {
        for (unsigned seed = 1; seed <= SEEDS; seed++) {
            double got;

            nsim_open(2e9 / 8, seed);
            ratio(half, 2, 64 * MIB);
            got = ratio(after[i], 2, 64 * MIB);
            nsim_close();
            CHECK_MSG(got < 1.015, "case %zu, seed %u: %.4f of the bound", i, seed, got);
        }
    }
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
