/* What the planner would choose, for r2ccl-ctl plan predict: the one model, asked from outside a
 * job. Only in the library for LD_PRELOAD. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "api/call.h"
#include "comms/leader.h"
#include "plan/plan.h"

#define PER_NODE_MOST 1024

enum { STOCK, DIRECT, R2CCL, BOUND, GAIN, FIGURES };

/* figures: ns of each schedule and of the bound (NAN: not to be had), and the gain. The number of
 * the schedule, or -EINVAL. */
R2_EXPORT int r2ccl_plan_predict(int p, const double *capacity, const double *share, int per_node,
                                 uint64_t bytes, int wish, double figures[FIGURES],
                                 uint32_t *weights, uint64_t *from_bytes, char *why, size_t room);
int r2ccl_plan_predict(int p, const double *capacity, const double *share, int per_node,
                       uint64_t bytes, int wish, double figures[FIGURES], uint32_t *weights,
                       uint64_t *from_bytes, char *why, size_t room)
{
    struct r2_plan_node nodes[R2_PLAN_MOST];
    struct r2_plan_input in = {.p = p,
                               .nodes = nodes,
                               .per_node = per_node,
                               .bytes = bytes,
                               .from_bytes = R2_LEADER_FROM,
                               .wish = (enum r2_plan_wish)wish};
    struct r2_plan_choice c;

    if (p < 1 || p > R2_PLAN_MOST || per_node < 1 || per_node > PER_NODE_MOST || bytes == 0 ||
        wish < R2_PLAN_BEST || wish > R2_PLAN_ALWAYS_DIRECT)
        return -EINVAL;
    for (int i = 0; i < p; i++) {
        if (!(capacity[i] > 0 && capacity[i] < 1e18 && share[i] >= 0 && share[i] <= 1))
            return -EINVAL;
        nodes[i] = (struct r2_plan_node){capacity[i], share[i]};
    }
    r2_plan_choose(&c, &in);
    figures[STOCK] = c.stock_ns;
    figures[DIRECT] = c.direct_ns;
    figures[R2CCL] = c.r2ccl_ns;
    figures[BOUND] = c.bound_ns;
    figures[GAIN] = c.gain;
    memcpy(weights, c.plan.weights, (size_t)p * sizeof(*weights));
    *from_bytes = c.plan.from_bytes;
    snprintf(why, room, "%s", c.why);
    return (int)c.plan.schedule;
}
