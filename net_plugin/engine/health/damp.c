#include "engine/health/damp.h"

#include <math.h>

static double halvings(uint64_t ns, const struct r2_damp_rules *rules)
{
    return rules->half_life_ns ? (double)ns / (double)rules->half_life_ns : INFINITY;
}

static double penalty_at(const struct r2_damp *d, const struct r2_damp_rules *rules, uint64_t now)
{
    return now > d->at_ns ? d->penalty * exp2(-halvings(now - d->at_ns, rules)) : d->penalty;
}

/* What fades to the reuse threshold in the longest time allowed. */
static double ceiling(const struct r2_damp_rules *rules)
{
    double most = rules->reuse * exp2(halvings(rules->max_suppress_ns, rules));

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
    if (!d->suppressed || penalty_at(d, rules, now_ns) >= rules->reuse)
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
    double left;

    if (!d->suppressed)
        return 0;
    left = log2(penalty_at(d, rules, now_ns) / rules->reuse);
    return now_ns + (left > 0 ? (uint64_t)(left * (double)rules->half_life_ns) + 1 : 0);
}
