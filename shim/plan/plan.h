/* Which schedule an AllReduce of a communicator should take, given what bandwidth its nodes have
 * left, and how long each would take. Pure: no clock, socket, thread or setting; the same input
 * gives the same output. schedules.md's T, the end-node tree, against the ring under balance.
 *
 * Units: bytes, bytes per second each way, nanoseconds; data is the size of the send buffer of one
 * rank. p is the number of nodes. The model is the node-level one: intra-node traffic is free.
 *
 * Threads: none. Memory: a plan owns its arrays (r2_plan_free). Errors: -EINVAL with a line in
 * plan->reason, -ENOMEM.
 */
#ifndef R2_PLAN_PLAN_H
#define R2_PLAN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define R2_PLAN_NODES 1024
#define R2_PLAN_ORDERS 8 /* most communicators beside the application's */
#define R2_PLAN_REASON 240
#define R2_PLAN_UNIT 65536 /* shares of data are in 1/65536 */

/* --- light positions of NCCL's double binary tree ------------------------------------------- */

/* Parent of `node` and up to two children in the first (tree 0) or second (tree 1) tree over p
 * nodes, -1 where there is none. 0 <= node < p. */
struct r2_plan_link {
    int up;
    int down[2];
};
struct r2_plan_link r2_plan_tree_link(int p, int tree, int node);

/* Load of a position: how many times the data its node sends (and receives) in an AllReduce over
 * both trees, each of which has half the data. In units of 1/2: 2 is light, 4 is full. */
int r2_plan_tree_load(int p, int position);

/* The positions 0..p-1 by load, lightest first, ties by position, into `order`. */
void r2_plan_light_positions(int p, int *order);

/* --- planner -------------------------------------------------------------------------------- */

enum r2_plan_schedule {
    R2_PLAN_STOCK = 0, /* NCCL's own choice on the application's communicator, plugin balances */
    R2_PLAN_TREE = 1,  /* T: Tree forced on communicators in other rank orders */
};

struct r2_plan_node {
    double capacity; /* with every NIC healthy */
    double share;    /* what is left of it, 0..1; 0: no path left (no plan helps) */
};

/* Predicted time = (fixed + bytes / rate) / efficiency. */
struct r2_plan_cost {
    double ring_efficiency, tree_efficiency; /* measured / model, 0 < e <= 1 */
    double hop_ns;                           /* per step of a schedule */
};
#define R2_PLAN_COST_DEFAULT                                                                       \
    {                                                                                              \
        .ring_efficiency = 0.98, .tree_efficiency = 0.88, .hop_ns = 20e3                           \
    }

struct r2_plan_input {
    int nnodes; /* 1..R2_PLAN_NODES; with 1 there is nothing to plan */
    const struct r2_plan_node *nodes;
    int nranks;
    const int *rank_node; /* [nranks]: node of each rank, 0..nnodes-1 */
    uint64_t bytes;       /* the size to predict for */
    uint64_t min_bytes;   /* smaller operations stay stock; R2CCL: 1 MiB */
    double min_gain;      /* predicted gain that a switch needs, 0.05 */
    int max_orders;       /* 1..R2_PLAN_ORDERS */
    struct r2_plan_cost cost;
};

/* One part of the data on one communicator. */
struct r2_plan_order {
    int *ranks;        /* [nranks]: old rank at each new rank */
    int *nodes;        /* [nnodes]: node at each position */
    uint32_t boundary; /* its part begins here, in 1/R2_PLAN_UNIT of the elements */
};

struct r2_plan {
    enum r2_plan_schedule schedule;
    int norders; /* 0 for stock */
    struct r2_plan_order orders[R2_PLAN_ORDERS];
    int nnodes, nranks;
    uint64_t from_bytes;                      /* the schedule pays from this size on */
    double stock_ns, tree_ns, bound_ns, gain; /* for input->bytes; gain = 1 - chosen/stock */
    int degraded;                             /* nodes with share < 1 */
    char reason[R2_PLAN_REASON];              /* one line */
};

int r2_plan_make(struct r2_plan *plan, const struct r2_plan_input *input);
void r2_plan_free(struct r2_plan *plan);

/* The three models, for any order; ns for `bytes`. `order` [nnodes] is the node at each position,
 * NULL for 0, 1, 2, ... */
double r2_plan_ring_ns(const struct r2_plan_input *input);
double r2_plan_tree_ns(const struct r2_plan_input *input, const int *order);
double r2_plan_bound_ns(const struct r2_plan_input *input);

#endif
