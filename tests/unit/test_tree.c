/* NCCL's double binary tree (rung 1), three constructions: shim/plan/tree.c (bit arithmetic), the
 * stand-in's (ranges), and the drawing for 14 nodes that NCCL's documentation of it gives. The
 * light positions that plans use come from the first. It cannot prove that NCCL builds them so:
 * tests/gpu/nccl_trees.py does. */
#include "../hostnccl/tree.c"
#include "check.h"
#include "plan/plan.h"

enum { MOST = 256 };

static void test_published_drawing(void)
{
    static const int up[14] = {-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12};

    for (int i = 0; i < 14; i++) {
        CHECK_EQ(hn_tree_node(14, 0, i).up, up[i]);
        CHECK_EQ(r2_plan_tree_link(14, 0, i).up, up[i]);
        CHECK_EQ(hn_tree_node(14, 1, 13 - i).up, up[i] < 0 ? -1 : 13 - up[i]);
    }
}

static void test_two_constructions(void)
{
    for (int n = 1; n <= MOST; n++) {
        for (int t = 0; t < 2; t++) {
            for (int i = 0; i < n; i++) {
                struct hn_tree ours = hn_tree_node(n, t, i);
                struct r2_plan_link plan = r2_plan_tree_link(n, t, i);

                CHECK_MSG(ours.up == plan.up && ours.down[0] == plan.down[0] &&
                              ours.down[1] == plan.down[1] && ours.down[2] == -1,
                          "%d nodes, tree %d, node %d: %d %d/%d and %d %d/%d", n, t, i, ours.up,
                          ours.down[0], ours.down[1], plan.up, plan.down[0], plan.down[1]);
            }
        }
    }
}

/* What a tree must be, whoever built it: links agree in both directions, every node reaches the
 * root, and nobody is inner in both trees of an even number. */
static void test_are_trees(void)
{
    for (int n = 1; n <= MOST; n++) {
        int inner[MOST] = {0};

        for (int t = 0; t < 2; t++) {
            int roots = 0;

            for (int i = 0; i < n; i++) {
                struct hn_tree link = hn_tree_node(n, t, i);
                int at = i, steps = 0;

                roots += link.up < 0;
                inner[i] += link.down[0] >= 0 && link.up >= 0;
                for (int d = 0; d < 2; d++) {
                    CHECK(link.down[d] < n);
                    CHECK(link.down[d] < 0 || hn_tree_node(n, t, link.down[d]).up == i);
                }
                while (hn_tree_node(n, t, at).up >= 0) {
                    at = hn_tree_node(n, t, at).up;
                    CHECK(++steps <= hn_tree_depth(n));
                }
            }
            CHECK_EQ(roots, 1);
        }
        for (int i = 0; n % 2 == 0 && i < n; i++) {
            CHECK(inner[i] <= 1);
        }
    }
}

/* The light positions, counted on the stand-in's tree: loads in halves of the data. */
static void test_light_positions(void)
{
    for (int n = 2; n <= 64; n++) {
        int order[64], load[64], total = 0;

        for (int i = 0; i < n; i++) {
            load[i] = 0;
            for (int t = 0; t < 2; t++) {
                struct hn_tree link = hn_tree_node(n, t, i);

                load[i] += (link.up >= 0) + (link.down[0] >= 0) + (link.down[1] >= 0);
            }
            CHECK_EQ(r2_plan_tree_load(n, i), load[i]);
            total += load[i];
        }
        CHECK_EQ(total, 4 * (n - 1));
        r2_plan_light_positions(n, order);
        for (int i = 1; i < n; i++) {
            CHECK(load[order[i - 1]] <= load[order[i]]);
        }
        if (n % 2 == 0) {
            CHECK_EQ(order[0], 0);
            CHECK_EQ(order[1], n - 1);
            CHECK(n < 4 || (load[order[1]] == 2 && load[order[2]] == 4));
        } else {
            CHECK_EQ(order[0], 1);
            CHECK_EQ(load[1], 2);
        }
    }
}

/* Several ranks per node, in any order: a chain hangs on the first rank of each node. */
static void test_ranks(void)
{
    for (int round = 0; round < 200; round++) {
        int nodes = 1 + (int)check_below(9), n = 0, first[9], node_of[64], last[9];

        for (int i = 0; i < nodes; i++) {
            first[i] = n;
            node_of[n++] = i;
            if (check_below(2) && n < 40) {
                node_of[n] = node_of[check_below((uint64_t)n)];
                n++;
            }
        }
        for (int t = 0; t < 2; t++) {
            memset(last, -1, sizeof(last));
            for (int r = 0; r < n; r++) {
                struct hn_tree rank = hn_tree_rank(n, node_of, t, r);
                struct hn_tree node = hn_tree_node(nodes, t, node_of[r]);
                bool head = first[node_of[r]] == r;

                CHECK_EQ(rank.up, !head ? last[node_of[r]] : node.up >= 0 ? first[node.up] : -1);
                for (int d = 0; d < HN_ARITY; d++) {
                    CHECK(rank.down[d] < 0 || hn_tree_rank(n, node_of, t, rank.down[d]).up == r);
                }
                last[node_of[r]] = r;
            }
        }
    }
}

static const struct check_test tests[] = {
    {"published_drawing", test_published_drawing},
    {"two_constructions", test_two_constructions},
    {"are_trees", test_are_trees},
    {"light_positions", test_light_positions},
    {"ranks", test_ranks},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
