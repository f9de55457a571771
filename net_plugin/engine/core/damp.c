#include "engine/core/damp.h"

#include <math.h>

static double halvings(uint64_t ns, const struct r2_damp_rules *rules)
{
    return rules->half_life_ns ? (double)ns / (double)rules->half_life_ns : INFINITY;
}

static double penalty_at(const struct r2_damp *d, const struct r2_damp_rules *rules, uint64_t now)
{
    return now > d->at_ns && d->penalty > 0 ? d->penalty * exp2(-halvings(now - d->at_ns, rules))
                                            : d->penalty;
}

/* What fades to the reuse threshold in the longest time allowed; where that time is short, what
 * suppresses all the same: then the time alone ends it. */
static double ceiling(const struct r2_damp_rules *rules)
{
    double most = rules->reuse * exp2(halvings(rules->max_suppress_ns, rules));
    double least = (double)rules->suppress + R2_DAMP_PER_FAILURE;

    most = most > least ? most : least;
    return most < UINT32_MAX ? most : UINT32_MAX;
}

bool r2_damp_failure(struct r2_damp *d, const struct r2_damp_rules *rules, uint64_t now_ns)
{
    d->penalty = penalty_at(d, rules, now_ns) + R2_DAMP_PER_FAILURE;
    if (d->penalty > ceiling(rules))
        d->penalty = ceiling(rules);
    d->at_ns = now_ns;
    if (d->suppressed || !rules->suppress || d->penalty <= rules->suppress)
        return false;
    d->suppressed = true;
    return true;
}

bool r2_damp_tick(struct r2_damp *d, const struct r2_damp_rules *rules, uint64_t now_ns)
{
    if (!d->suppressed || (penalty_at(d, rules, now_ns) >= rules->reuse &&
                           now_ns < d->at_ns + rules->max_suppress_ns))
        return false;
    d->suppressed = false;
    return true;
}

void r2_damp_clear(struct r2_damp *d)
{
    d->penalty = 0;
    d->suppressed = false;
}

void r2_damp_release(struct r2_damp *d)
{
    d->suppressed = false;
}

uint32_t r2_damp_penalty(const struct r2_damp *d, const struct r2_damp_rules *rules,
                         uint64_t now_ns)
{
    return (uint32_t)penalty_at(d, rules, now_ns);
}

uint64_t r2_damp_reuse_at(const struct r2_damp *d, const struct r2_damp_rules *rules,
                          uint64_t now_ns)
{
    uint64_t last = d->at_ns + rules->max_suppress_ns;
    double left;

    if (!d->suppressed)
        return 0;
    last = last > now_ns ? last : now_ns;
    left = log2(penalty_at(d, rules, now_ns) / rules->reuse) * (double)rules->half_life_ns;
    if (left >= (double)(last - now_ns)) /* a reuse of 0 is never reached */
        return last;
    return now_ns + (left > 0 ? (uint64_t)left + 1 : 0);
}
