/* The stand-in's double binary tree (rung 1), beside the drawing for 14 nodes that NCCL's
 * documentation of it gives. It cannot prove that NCCL builds them so. */
#include "../hostnccl/tree.c"
#include "check.h"

enum { MOST = 256 };

static void test_published_drawing(void)
{
    static const int up[14] = {-1, 2, 4, 2, 8, 6, 4, 6, 0, 10, 12, 10, 8, 12};

    for (int i = 0; i < 14; i++) {
        CHECK_EQ(hn_tree_node(14, 0, i).up, up[i]);
        CHECK_EQ(hn_tree_node(14, 1, 13 - i).up, up[i] < 0 ? -1 : 13 - up[i]);
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
    {"are_trees", test_are_trees},
    {"ranks", test_ranks},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
