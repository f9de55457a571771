/* Which schedule an AllReduce of a communicator takes, how long each would take, and the plan that
 * its ranks agree on. Pure: no clock, socket, thread or setting. The model is plan/shard.h's.
 *
 * A plan holds for operations of from_bytes or more; smaller ones are NCCL's own. Ranks compute
 * nothing again from what the planner thought: weights are integers, and shipped.
 *
 * Units: bytes, bytes per second each way, nanoseconds. p is the number of nodes. What a node's
 * ranks do among themselves is free.
 */
#ifndef R2_PLAN_PLAN_H
#define R2_PLAN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define R2_PLAN_MOST 256 /* nodes of a plan */
#define R2_PLAN_LEAST 3  /* with fewer nodes NCCL's ring is at the bound */
#define R2_PLAN_WHY 160
#define R2_PLAN_CHUNKS 16 /* of the tail of r2ccl-allreduce */

enum r2_plan_schedule { /* numbers are shipped */
                        R2_PLAN_STOCK = 0,
                        R2_PLAN_DIRECT = 1,
                        R2_PLAN_R2CCL = 2,
                        R2_PLAN_SCHEDULES
};
const char *r2_plan_name(enum r2_plan_schedule schedule);

/* What ranks agree on: the first r2_plan_bytes(p) bytes of it. */
struct r2_plan {
    uint32_t magic, p;
    uint32_t schedule;
    uint32_t slow; /* r2ccl-allreduce: the slow node, and what of the data is its tail */
    uint32_t tail; /* in 1/65536 */
    uint64_t from_bytes;
    uint32_t weights[R2_PLAN_MOST]; /* direct: what each node owns, in 1/65536 */
};

/* NCCL's own choice; direct with equal weights. */
void r2_plan_stock(struct r2_plan *plan, int p);
void r2_plan_equal(struct r2_plan *plan, int p);
size_t r2_plan_bytes(int p);
/* 0, or -EPROTO: it is none for p nodes. */
int r2_plan_read(struct r2_plan *plan, const void *data, size_t len, int p);
/* Whether all operations run alike under both, but for weights that differ by less than 1 %. */
bool r2_plan_same(const struct r2_plan *a, const struct r2_plan *b);

/* ---- the choice */

enum r2_plan_wish {
    R2_PLAN_BEST,          /* what is predicted to gain, where a node has lost bandwidth */
    R2_PLAN_WISH_DIRECT,   /* ... but of these two this one */
    R2_PLAN_WISH_R2CCL,    /* ... this one */
    R2_PLAN_ALWAYS_DIRECT, /* healthy or not */
};

struct r2_plan_node {
    double capacity; /* with every NIC healthy; 0: not known */
    double share;    /* what is left of it, 0..1 */
};

struct r2_plan_input {
    int p;
    const struct r2_plan_node *nodes;
    int per_node;        /* ranks of each; 0: one */
    uint64_t bytes;      /* the size to predict for */
    uint64_t from_bytes; /* no plan for smaller ones */
    enum r2_plan_wish wish;
};

struct r2_plan_choice {
    struct r2_plan plan;
    double stock_ns, direct_ns, r2ccl_ns, bound_ns; /* of input->bytes; NAN: not to be had */
    double gain;                                    /* 1 - chosen / stock */
    int degraded, worst;                            /* nodes; the one that has least left */
    char why[R2_PLAN_WHY];                          /* one line */
};

/* Of 1 to R2_PLAN_MOST nodes whose capacities are known. */
void r2_plan_choose(struct r2_plan_choice *choice, const struct r2_plan_input *input);

/* Why communicators on so many nodes have no plan; NULL: they may have one. */
const char *r2_plan_never(int nodes);

#endif
