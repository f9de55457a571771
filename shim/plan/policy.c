#include "plan/policy.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define R2_POLICY_WHY 80

void r2_policy_init(struct r2_policy *p, const struct r2_policy_config *config)
{
    *p = (struct r2_policy){.config = *config};
}

static unsigned r2_policy_seen(const struct r2_policy_speeds *s)
{
    unsigned n = 0;

    for (int c = 0; c < R2_POLICY_CLASSES; c++) {
        n += s->seen[c];
    }
    return n;
}

void r2_policy_again(struct r2_policy *p, uint64_t now_ns)
{
    if (!p->dirty) {
        p->dirty = true;
        p->dirty_since_ns = now_ns;
    }
}

void r2_policy_event(struct r2_policy *p, uint64_t now_ns)
{
    r2_policy_again(p, now_ns);
    if (r2_policy_seen(&p->stock) >= R2_POLICY_LEAST && p->predicted > 0) {
        p->before = p->stock;
        p->predicted_before = p->predicted;
    }
    p->stock = p->plan = (struct r2_policy_speeds){0};
    p->predicted = 0;
    p->event_ns = now_ns;
    p->slow_once = false; /* the second look must be at the same state */
}

static bool r2_policy_flaps(const struct r2_policy *p, uint64_t cause, uint64_t now_ns)
{
    uint64_t window = R2_POLICY_HOLDS * p->config.hold_ns;
    unsigned n = p->nhasty < R2_POLICY_CAUSES ? p->nhasty : R2_POLICY_CAUSES, found = 0;

    for (unsigned i = 0; i < n; i++) {
        found += p->hasty[i].cause == cause && now_ns < p->hasty[i].at_ns + window;
    }
    return found >= R2_POLICY_HASTE;
}

void r2_policy_outlook(struct r2_policy *p, uint64_t cause, bool lost, double plan_ns,
                       double stock_ns, uint64_t now_ns)
{
    bool worse = p->current && plan_ns > stock_ns; /* no NIC left: both are infinite */

    if (!worse) {
        p->urgent = false;
    } else if (lost && !r2_policy_flaps(p, cause, now_ns)) {
        p->urgent = true;
        p->cause = cause;
    }
}

bool r2_policy_urgent(const struct r2_policy *p)
{
    return p->urgent;
}

void r2_policy_state(struct r2_policy *p, uint64_t state, double stock_ns_per_byte)
{
    p->state = state;
    p->predicted = isfinite(stock_ns_per_byte) ? stock_ns_per_byte : 0;
}

unsigned r2_policy_measured(const struct r2_policy *p)
{
    return r2_policy_seen(&p->stock);
}

/* ---- speeds */

static int r2_policy_class(uint64_t bytes)
{
    int c = 0;

    for (bytes >>= 20; bytes > 1 && c < R2_POLICY_CLASSES - 1; bytes >>= 1) {
        c++;
    }
    return c;
}

static void r2_policy_put(struct r2_policy_speeds *s, int c, uint64_t bytes, double rate)
{
    s->bytes[c] = bytes;
    s->rate[c][s->next[c]] = (float)rate;
    s->next[c] = (s->next[c] + 1) % R2_POLICY_SAMPLES;
    s->seen[c] += s->seen[c] < R2_POLICY_SAMPLES;
}

static double r2_policy_median(const struct r2_policy_speeds *s, int c)
{
    float sorted[R2_POLICY_SAMPLES];
    unsigned n = s->seen[c];

    for (unsigned i = 0; i < n; i++) {
        unsigned at = i;

        for (; at > 0 && sorted[at - 1] > s->rate[c][i]; at--) {
            sorted[at] = sorted[at - 1];
        }
        sorted[at] = s->rate[c][i];
    }
    return n % 2 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

/* Whether there are R2_POLICY_SAMPLES operations of the plan in classes that stock was measured in
 * as well; what both take on average for these. */
static bool r2_policy_sums(const struct r2_policy_speeds *plan,
                           const struct r2_policy_speeds *stock, double *plan_ns, double *stock_ns)
{
    unsigned operations = 0;

    *plan_ns = *stock_ns = 0;
    for (int c = 0; c < R2_POLICY_CLASSES; c++) {
        double weight = (double)plan->seen[c] * (double)plan->bytes[c];

        if (plan->seen[c] < R2_POLICY_LEAST || stock->seen[c] < R2_POLICY_LEAST) {
            continue;
        }
        operations += plan->seen[c];
        *plan_ns += weight * r2_policy_median(plan, c);
        *stock_ns += weight * r2_policy_median(stock, c);
    }
    if (operations < R2_POLICY_SAMPLES) {
        return false;
    }
    *plan_ns /= operations;
    *stock_ns /= operations;
    return true;
}

enum r2_policy_known r2_policy_compare(const struct r2_policy *p, double *plan_ns, double *stock_ns)
{
    if (r2_policy_sums(&p->plan, &p->stock, plan_ns, stock_ns)) {
        return R2_POLICY_MEASURED;
    }
    if (p->predicted <= 0 || p->predicted_before <= 0 ||
        !r2_policy_sums(&p->plan, &p->before, plan_ns, stock_ns)) {
        return R2_POLICY_UNKNOWN;
    }
    *stock_ns *= p->predicted / p->predicted_before;
    return R2_POLICY_ESTIMATED;
}

static bool r2_policy_slower(const struct r2_policy *p)
{
    double plan, stock;

    if (!p->current) {
        return false;
    }
    switch (r2_policy_compare(p, &plan, &stock)) {
    case R2_POLICY_MEASURED:
        return plan > stock * R2_POLICY_SURE;
    case R2_POLICY_ESTIMATED:
        return plan > stock * R2_POLICY_UNSURE;
    default:
        return false;
    }
}

/* Looked at again when R2_POLICY_SAMPLES more have been taken. */
static bool r2_policy_slower_twice(struct r2_policy *p)
{
    if (p->slow_once && p->taken - p->slow_at < R2_POLICY_SAMPLES) {
        return false;
    }
    if (!r2_policy_slower(p)) {
        p->slow_once = false;
        return false;
    }
    if (!p->slow_once) {
        p->slow_once = true;
        p->slow_at = p->taken;
        return false;
    }
    return true;
}

enum r2_policy_verdict r2_policy_poll(struct r2_policy *p, uint64_t now_ns, uint64_t *next_ns)
{
    uint64_t ready;

    *next_ns = UINT64_MAX;
    if (r2_policy_slower_twice(p)) {
        return R2_POLICY_WITHDRAW;
    }
    if (!p->dirty) {
        return R2_POLICY_WAIT;
    }
    ready = p->dirty_since_ns + p->config.coalesce_ns;
    if (p->switched && !p->urgent && ready < p->switched_ns + p->config.hold_ns) {
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
        if (p->banned[i].key == key && p->banned[i].state == p->state) {
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
    if (r2_policy_banned(p, key)) {
        return;
    }
    p->banned[p->nbanned++ % (sizeof(p->banned) / sizeof(p->banned[0]))] =
        (struct r2_policy_ban){key, p->state};
}

void r2_policy_committed(struct r2_policy *p, uint64_t key, uint64_t now_ns)
{
    if (p->urgent) {
        p->hasty[p->nhasty++ % R2_POLICY_CAUSES] = (struct r2_policy_change){p->cause, now_ns};
        p->urgent = false;
    }
    p->current = key;
    p->switched = true;
    p->switched_ns = now_ns;
    p->plan = (struct r2_policy_speeds){0};
    p->skip = R2_POLICY_SKIP;
    p->slow_once = false;
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
    p->taken += key != 0;
    r2_policy_put(key ? &p->plan : &p->stock, r2_policy_class(bytes), bytes, rate);
}
