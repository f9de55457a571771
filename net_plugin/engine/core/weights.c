#include "engine/core/weights.h"

#define FORGET 64 /* halvings after which nothing is left of a 64-bit number */

static uint32_t cut(uint32_t factor)
{
    return factor < R2_WEIGHT_FULL ? factor : R2_WEIGHT_FULL;
}

uint32_t r2_weight_of(uint32_t a, uint32_t b)
{
    uint32_t product = cut(a) * cut(b) / R2_WEIGHT_FULL;

    return product || !a || !b ? product : 1;
}

void r2_share_begin(struct r2_share_set *set)
{
    set->max = 0;
    set->members = 0;
    set->total = 0;
    set->limited = false;
}

void r2_share_add(struct r2_share_set *set, const struct r2_share *share)
{
    /* A second weight above 0 means that the lower of the two is limited, whichever came first. */
    if (set->max && share->weight && share->weight != set->max)
        set->limited = true;
    if (share->weight > set->max)
        set->max = share->weight;
    set->members++;
    set->total += share->weight;
}

void r2_share_end(struct r2_share_set *set, bool was_limited)
{
    if (set->limited && !was_limited) { /* nothing was counted meanwhile */
        set->epoch += FORGET;
        set->recent = 0;
    }
}

void r2_share_age(struct r2_share_set *set)
{
    if (!set->limited)
        return;
    set->epoch++;
    set->recent /= 2;
}

static uint64_t recent_of(const struct r2_share_set *set, const struct r2_share *share)
{
    uint32_t age = set->epoch - share->epoch;

    return age < FORGET ? share->recent >> age : 0;
}

void r2_share_account(struct r2_share_set *set, struct r2_share *share, uint64_t len)
{
    share->recent = recent_of(set, share) + len;
    share->epoch = set->epoch;
    set->recent += len;
    if (set->recent > R2_SHARE_SPAN)
        r2_share_age(set);
}

/* recent <= 2 x span and len, weights <= 1000 each: no product overflows. */
bool r2_share_below(const struct r2_share_set *set, const struct r2_share *share)
{
    return recent_of(set, share) * set->total <= share->weight * set->recent;
}
