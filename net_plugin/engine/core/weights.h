/* How much of a peer's traffic a path may take. Pure.
 *
 * A path's weight is the product of factors, each per mille of full: what the operator (or the
 * topology: 0 for a NIC far slower than the fastest) gives its NIC, and the ramp after a recovery.
 * A third, for being slow or lossy, is in the weight that is shown only. Chunks are pulled, so
 * weights need not follow the speed of NICs. Paths of the highest weight among their siblings pull
 * as they like. A path below that takes a chunk only while its share of the bytes lately sent to
 * the peer is not above its weighted share. Hence nothing waits for a limited path, and when all
 * weights are equal there is no cost. Weight 0 is a warm spare: it takes chunks only while no
 * sibling has a weight above 0.
 *
 * "Lately" is an exponential window over about R2_SHARE_SPAN bytes, and over time as often as the
 * caller calls r2_share_age.
 *
 * Units: per mille and bytes. Plain structs, nothing to free. The caller serialises access.
 */
#ifndef R2_ENGINE_CORE_WEIGHTS_H
#define R2_ENGINE_CORE_WEIGHTS_H

#include <stdbool.h>
#include <stdint.h>

#define R2_WEIGHT_FULL 1000u
#define R2_SHARE_SPAN (UINT64_C(256) << 20)

/* One path's part. */
struct r2_share {
    uint32_t weight;
    uint32_t epoch;  /* of `recent`: the bytes halve with every epoch of the set */
    uint64_t recent; /* bytes lately taken */
};

/* All usable paths to one peer. */
struct r2_share_set {
    uint32_t max;     /* highest weight */
    uint32_t members; /* paths added */
    uint64_t total;   /* sum of the weights */
    uint64_t recent;  /* bytes lately taken by all */
    uint32_t epoch;
    bool limited; /* a member is below the highest weight and above 0 */
};

/* The product, 0 only if a factor is 0. Factors above full count as full. */
uint32_t r2_weight_of(uint32_t a, uint32_t b);

/* Membership is counted anew: begin, then every usable path once, then end. What was lately sent
 * stays known as long as some path is limited. */
void r2_share_begin(struct r2_share_set *set);
void r2_share_add(struct r2_share_set *set, const struct r2_share *share);
void r2_share_end(struct r2_share_set *set, bool was_limited);
/* Half of what was lately sent is forgotten. */
void r2_share_age(struct r2_share_set *set);

void r2_share_account(struct r2_share_set *set, struct r2_share *share, uint64_t len);
bool r2_share_below(const struct r2_share_set *set, const struct r2_share *share);

/* The path pulls as it likes. */
static inline bool r2_share_free(const struct r2_share_set *set, const struct r2_share *share)
{
    return share->weight >= set->max;
}

/* The path may take a chunk now. */
static inline bool r2_share_may(const struct r2_share_set *set, const struct r2_share *share)
{
    return r2_share_free(set, share) || (share->weight && r2_share_below(set, share));
}

/* The path has taken `len` bytes. */
static inline void r2_share_sent(struct r2_share_set *set, struct r2_share *share, uint64_t len)
{
    if (set->limited)
        r2_share_account(set, share, len);
}

#endif
