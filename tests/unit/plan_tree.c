/* Prints the trees that plans count on, for scripts that compare them with NCCL's:
 *
 *     plan_tree NODES      one line per tree and node: tree node up down down; then the positions
 * by load, lightest first: light POSITION LOAD (in halves of the data) */
#include <stdio.h>
#include <stdlib.h>

#include "plan/plan.h"

int main(int argc, char **argv)
{
    int order[R2_PLAN_NODES];
    int nodes = argc == 2 ? atoi(argv[1]) : 0;

    if (nodes < 1 || nodes > R2_PLAN_NODES) {
        fprintf(stderr, "usage: plan_tree NODES, 1 to %d\n", R2_PLAN_NODES);
        return 2;
    }
    for (int tree = 0; tree < 2; tree++) {
        for (int i = 0; i < nodes; i++) {
            struct r2_plan_link link = r2_plan_tree_link(nodes, tree, i);

            printf("%d %d %d %d %d\n", tree, i, link.up, link.down[0], link.down[1]);
        }
    }
    r2_plan_light_positions(nodes, order);
    for (int i = 0; i < nodes; i++) {
        printf("light %d %d\n", order[i], r2_plan_tree_load(nodes, order[i]));
    }
    return 0;
}
