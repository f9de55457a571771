#include "plan/policy.h"

#include <stdio.h>
#include <string.h>

#define R2_POLICY_WHY 80

void r2_policy_init(struct r2_policy *p, const struct r2_policy_config *config)
{
    *p = (struct r2_policy){.config = *config};
}

void r2_policy_event(struct r2_policy *p, uint64_t now_ns)
{
    if (!p->dirty) {
        p->dirty = true;
        p->dirty_since_ns = now_ns;
    }
    p->stock_rate = p->plan_rate = p->predicted_stock_rate = 0;
    p->stock_samples = p->plan_samples = 0;
}

void r2_policy_predict(struct r2_policy *p, double stock_ns_per_byte)
{
    p->predicted_stock_rate = stock_ns_per_byte;
}

static bool r2_policy_slower(const struct r2_policy *p)
{
    double stock = p->stock_samples >= R2_POLICY_SAMPLES ? p->stock_rate : p->predicted_stock_rate;

    return p->current && p->plan_samples >= R2_POLICY_SAMPLES && stock > 0 && p->plan_rate > stock;
}

enum r2_policy_verdict r2_policy_poll(struct r2_policy *p, uint64_t now_ns, uint64_t *next_ns)
{
    uint64_t ready;

    *next_ns = UINT64_MAX;
    if (r2_policy_slower(p)) {
        return R2_POLICY_WITHDRAW;
    }
    if (!p->dirty) {
        return R2_POLICY_WAIT;
    }
    ready = p->dirty_since_ns + p->config.coalesce_ns;
    if (p->switched && ready < p->switched_ns + p->config.hold_ns) {
        ready = p->switched_ns + p->config.hold_ns;
    }
    if (now_ns < ready) {
        *next_ns = ready;
        return R2_POLICY_WAIT;
    }
    p->dirty = false;
    return R2_POLICY_PLAN;
}

static bool r2_policy_banned(const struct r2_policy *p, uint64_t key)
{
    for (unsigned i = 0; i < sizeof(p->banned) / sizeof(p->banned[0]); i++) {
        if (p->banned[i] == key) {
            return key != 0;
        }
    }
    return false;
}

bool r2_policy_judge(struct r2_policy *p, uint64_t key, double gain, uint64_t now_ns, char *why)
{
    (void)now_ns;
    if (key == p->current) {
        snprintf(why, R2_POLICY_WHY, "it is in force already");
    } else if (r2_policy_banned(p, key)) {
        snprintf(why, R2_POLICY_WHY, "it was slower than stock when it was tried");
    } else if (!(gain > p->config.min_gain)) {
        snprintf(why, R2_POLICY_WHY, "its predicted gain of %.1f %% is not above %.1f %%",
                 gain * 100, p->config.min_gain * 100);
    } else {
        snprintf(why, R2_POLICY_WHY, "predicted gain %.1f %%", gain * 100);
        return true;
    }
    return false;
}

void r2_policy_ban(struct r2_policy *p, uint64_t key)
{
    p->banned[p->nbanned++ % (sizeof(p->banned) / sizeof(p->banned[0]))] = key;
}

void r2_policy_committed(struct r2_policy *p, uint64_t key, uint64_t now_ns)
{
    if (p->current && key == 0 && r2_policy_slower(p)) {
        r2_policy_ban(p, p->current);
    }
    p->current = key;
    p->switched = true;
    p->switched_ns = now_ns;
    p->plan_rate = 0;
    p->plan_samples = 0;
    p->skip = R2_POLICY_SKIP;
}

/* A mean over the last operations: each counts for 1/20, the first ones for more. */
static void r2_policy_average(double *rate, unsigned *samples, double value)
{
    unsigned n = *samples < R2_POLICY_SAMPLES ? *samples + 1 : R2_POLICY_SAMPLES;

    *rate += (value - *rate) / n;
    *samples = n;
}

void r2_policy_sample(struct r2_policy *p, uint64_t key, uint64_t bytes, uint64_t ns)
{
    double rate = bytes ? (double)ns / (double)bytes : 0;

    if (bytes == 0 || key != p->current) { /* begun before a switch, or nothing to measure */
        return;
    }
    if (p->skip > 0) {
        p->skip--;
        return;
    }
    if (key) {
        r2_policy_average(&p->plan_rate, &p->plan_samples, rate);
    } else {
        r2_policy_average(&p->stock_rate, &p->stock_samples, rate);
    }
}
