/* NCCL's double binary tree at the level of nodes, rebuilt from its published description: in the
 * first tree, node 0 is the root with one child; any other node's height is that of its lowest set
 * bit, its parent has that bit cleared and the next one set (or, beyond the end, only cleared), its
 * children lie half a bit to either side. The second tree is the mirror image for an even number of
 * nodes and a rotation by one for an odd one. */
#include <stdlib.h>

#include "plan/plan.h"

static struct r2_plan_link r2_tree_first(int p, int node)
{
    struct r2_plan_link link = {-1, {-1, -1}};
    int bit = 1;
    int half;

    while (bit < p && !(node & bit)) {
        bit <<= 1;
    }
    if (node == 0) {
        link.down[0] = p > 1 ? bit >> 1 : -1; /* bit: the first power of two that is not below p */
        return link;
    }
    link.up = (node ^ bit) | (bit << 1);
    if (link.up >= p) {
        link.up = node ^ bit;
    }
    half = bit >> 1;
    if (half > 0) {
        link.down[0] = node - half;
        while (half > 0 && node + half >= p) {
            half >>= 1;
        }
        link.down[1] = half > 0 ? node + half : -1;
    }
    return link;
}

struct r2_plan_link r2_plan_tree_link(int p, int tree, int node)
{
    struct r2_plan_link link;
    int *ends[3] = {&link.up, &link.down[0], &link.down[1]};

    if (tree == 0) {
        return r2_tree_first(p, node);
    }
    link = r2_tree_first(p, p % 2 == 0 ? p - 1 - node : (node - 1 + p) % p);
    for (int i = 0; i < 3; i++) {
        if (*ends[i] >= 0) {
            *ends[i] = p % 2 == 0 ? p - 1 - *ends[i] : (*ends[i] + 1) % p;
        }
    }
    return link;
}

int r2_plan_tree_load(int p, int position)
{
    int load = 0;

    for (int tree = 0; tree < 2; tree++) {
        struct r2_plan_link link = r2_plan_tree_link(p, tree, position);

        load += (link.up >= 0) + (link.down[0] >= 0) + (link.down[1] >= 0);
    }
    return load;
}

void r2_plan_light_positions(int p, int *order)
{
    int n = 0;

    for (int load = 0; n < p; load++) {
        for (int i = 0; i < p; i++) {
            if (r2_plan_tree_load(p, i) == load) {
                order[n++] = i;
            }
        }
    }
}
