/* When to plan, and where a plan is slower than what it replaced. Pure; times are arguments.
 *
 * A loss is planned for at once, after a moment in which its companions arrive. What comes back
 * waits until the last change has held for a while: a NIC that flaps changes the plan no more often
 * than that.
 *
 * Measured: operations under stock and under the plan, in the same state of the nodes, by size
 * (plan/times.h). What ran before the plan for this state was agreed does not count. Where the plan
 * is slower in a class, it is given up for that size and all below: `from` grows. Where stock was
 * not measured in a class in which the plan was, the plan makes way for a few operations, once in a
 * state.
 */
#ifndef R2_PLAN_POLICY_H
#define R2_PLAN_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/times.h"

#define R2_POLICY_SLOWER 1.05
#define R2_POLICY_COALESCE_NS UINT64_C(100000000) /* after a change of the nodes */
#define R2_POLICY_TRIAL_NS UINT64_C(10000000000)  /* stock is measured no longer */

enum r2_policy_trial { R2_TRIAL_NONE, R2_TRIAL_WANTED, R2_TRIAL_RUNS, R2_TRIAL_OVER };

struct r2_policy {
    uint64_t hold_ns;
    uint64_t plan_ns;    /* plan again then; UINT64_MAX: no need */
    uint64_t changed_ns; /* when what runs was agreed last; 0: never */
    bool planned;        /* a plan is in force, no stock */
    /* in this state of the nodes */
    uint64_t epoch; /* of what runs; 0: it was agreed for another state */
    struct r2_medians slowest;
    enum r2_policy_trial trial;
    uint64_t trial_ns; /* since then it runs */
    uint64_t from;     /* the plan was slower below */
};

void r2_policy_init(struct r2_policy *p, uint64_t hold_ns);
/* A node has less bandwidth, or more. Speeds measured so far belong to another state. */
void r2_policy_event(struct r2_policy *p, bool lost, uint64_t now_ns);
/* Plan again then, though the nodes are as they were. */
void r2_policy_again(struct r2_policy *p, uint64_t at_ns);
/* Whether to plan now; true once. */
bool r2_policy_due(struct r2_policy *p, uint64_t now_ns);
/* Whether stock is to run, so that it is measured. */
bool r2_policy_trial(const struct r2_policy *p);
/* A plan (or stock, false) is in force, `epoch` from 1. */
void r2_policy_changed(struct r2_policy *p, bool planned, uint64_t epoch, uint64_t now_ns);
/* What is known of operations under p->epoch, which is not 0: the slowest rank's median of each
 * class, 0 where a rank has none. */
void r2_policy_measured(struct r2_policy *p, const struct r2_medians *slowest, uint64_t now_ns);

#endif
