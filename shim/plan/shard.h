/* How long an AllReduce takes by each schedule of schedule.h, how long it takes at least, and the
 * weights with which `direct` comes closest. Pure: no clock, socket or thread.
 *
 * The model: a node has a full-duplex port; the network between the ports is free. Cores count by
 * the messages that they handle: with `direct` each rank of a node those of its slice. Its k ranks
 * first bring their data together, and share it last: 2 (k - 1)/k n at the rate within the node,
 * and a hop each time. Nothing of that overlaps with the network. The ring's steps do.
 * - No schedule takes less than max(n / least rate, 2 (p - 1) n / sum of rates), for each of the
 *   two directions. n: the bytes of one rank's data.
 * - `direct`: a rank that owns the share w sends and receives n (1 + (p - 2) w). For p >= 3 some
 *   weights meet the bound if each node's two directions are equal. Of C rounds the first is filled
 *   before sums flow: times 1 + 1/C.
 * - The ring: 2 (q - 1)/q n at the least rate, over all q ranks.
 * - R2CCL-AllReduce: the published model, for one slow node.
 * Times do not count what the wire's headers take: the caller gives rates of payload.
 *
 * Units: bytes, bytes per second, nanoseconds, weights and shares in 1/R2_SCHEDULE_UNIT.
 * Threads: any. Memory: none. Errors: a rate of 0 makes times infinite; r2_shard_weights says so.
 */
#ifndef R2_PLAN_SHARD_H
#define R2_PLAN_SHARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct r2_shard_node {
    double out, in; /* what the NICs that are left carry each way */
};

struct r2_shard_input {
    int p; /* 1..R2_SCHEDULE_RANKS */
    const struct r2_shard_node *nodes;
    int per_node;      /* ranks of each; 0: one */
    uint64_t bytes;    /* of one rank's data */
    size_t piece;      /* largest message */
    double hop_ns;     /* from one rank to the next, without the bytes */
    double message_ns; /* of a core, for each message sent or received; `direct` only */
    double within;     /* bytes/s between the ranks of a node; 0: takes no time; `direct` only */
};

double r2_shard_bound_ns(const struct r2_shard_input *input);

/* The best weights of `direct`, which sum up to R2_SCHEDULE_UNIT. They depend on the ratios of the
 * rates alone. With two ranks all weights are equally good: halves. False: a node has no rate. */
bool r2_shard_weights(const struct r2_shard_input *input, uint32_t *weights);

double r2_shard_ns(const struct r2_shard_input *input, const uint32_t *weights);

double r2_shard_ring_ns(const struct r2_shard_input *input);

/* The tail of R2CCL-AllReduce: what `slow` has lost against the slowest of the others. */
uint32_t r2_shard_tail(const struct r2_shard_input *input, int slow);
double r2_shard_r2ccl_ns(const struct r2_shard_input *input, int slow, uint32_t tail,
                         unsigned int chunks);

#endif
