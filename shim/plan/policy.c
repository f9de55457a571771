#include "plan/policy.h"

#include <string.h>

void r2_policy_init(struct r2_policy *p, uint64_t hold_ns)
{
    *p = (struct r2_policy){.hold_ns = hold_ns, .plan_ns = UINT64_MAX};
}

void r2_policy_again(struct r2_policy *p, uint64_t at_ns)
{
    p->plan_ns = at_ns < p->plan_ns ? at_ns : p->plan_ns;
}

void r2_policy_event(struct r2_policy *p, bool lost, uint64_t now_ns)
{
    uint64_t at = now_ns + R2_POLICY_COALESCE_NS;

    if (!lost && p->changed_ns && at < p->changed_ns + p->hold_ns)
        at = p->changed_ns + p->hold_ns;
    r2_policy_again(p, at);
    p->stock = p->plan = (struct r2_policy_times){0};
    p->trial = R2_TRIAL_NONE;
    p->from = 0;
    p->event_ns = now_ns;
}

/* ---- times */

static int class_of(uint64_t bytes)
{
    int c = 0;

    for (bytes >>= 20; bytes > 1 && c < R2_POLICY_CLASSES - 1; bytes >>= 1)
        c++;
    return c;
}

static void put(struct r2_policy_times *t, int c, double each)
{
    t->each[c][t->next[c]] = (float)each;
    t->next[c] = (t->next[c] + 1) % R2_POLICY_SAMPLES;
    t->seen[c] += t->seen[c] < R2_POLICY_SAMPLES;
}

static double median(const struct r2_policy_times *t, int c)
{
    float sorted[R2_POLICY_SAMPLES];
    unsigned n = t->seen[c];

    for (unsigned i = 0; i < n; i++) {
        unsigned at = i;

        for (; at > 0 && sorted[at - 1] > t->each[c][i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = t->each[c][i];
    }
    return n % 2 ? sorted[n / 2] : n ? (sorted[n / 2 - 1] + sorted[n / 2]) / 2 : 0;
}

/* ---- what they say */

static bool known(const struct r2_policy *p, int c)
{
    return p->plan.seen[c] >= R2_POLICY_SAMPLES;
}

/* Classes that the plan was measured in, and stock was not. */
static bool stock_lacks(const struct r2_policy *p)
{
    for (int c = 0; c < R2_POLICY_CLASSES; c++)
        if (known(p, c) && p->stock.seen[c] < R2_POLICY_LEAST)
            return true;
    return false;
}

/* The first size behind the classes in which the plan was slower. */
static uint64_t slower_below(const struct r2_policy *p)
{
    uint64_t from = 0;

    for (int c = 0; c < R2_POLICY_CLASSES; c++)
        if (known(p, c) && p->stock.seen[c] >= R2_POLICY_LEAST &&
            median(&p->plan, c) > R2_POLICY_SLOWER * median(&p->stock, c))
            from = c == R2_POLICY_CLASSES - 1 ? UINT64_MAX : UINT64_C(2) << (20 + c);
    return from;
}

static void judge(struct r2_policy *p, uint64_t now_ns)
{
    uint64_t from = slower_below(p);

    if (from > p->from) {
        p->from = from;
        r2_policy_again(p, now_ns);
    }
    if (p->planned && p->trial == R2_TRIAL_NONE && stock_lacks(p)) {
        p->trial = R2_TRIAL_WANTED;
        r2_policy_again(p, now_ns);
    }
    if (p->trial == R2_TRIAL_RUNS && !stock_lacks(p)) {
        p->trial = R2_TRIAL_OVER;
        r2_policy_again(p, now_ns);
    }
}

void r2_policy_sample(struct r2_policy *p, bool planned, uint64_t bytes, uint64_t ns,
                      uint64_t now_ns)
{
    if (bytes == 0)
        return;
    if (p->skip > 0) {
        p->skip--;
        return;
    }
    put(planned ? &p->plan : &p->stock, class_of(bytes), (double)ns / (double)bytes);
    judge(p, now_ns);
}

bool r2_policy_trial(const struct r2_policy *p)
{
    return p->trial == R2_TRIAL_WANTED || p->trial == R2_TRIAL_RUNS;
}

void r2_policy_changed(struct r2_policy *p, bool planned, uint64_t now_ns)
{
    p->planned = planned;
    p->changed_ns = now_ns;
    p->skip = R2_POLICY_SKIP;
    if (p->trial == R2_TRIAL_WANTED && !planned) {
        p->trial = R2_TRIAL_RUNS;
        p->trial_ns = now_ns;
        r2_policy_again(p, now_ns + R2_POLICY_TRIAL_NS);
    }
}

bool r2_policy_due(struct r2_policy *p, uint64_t now_ns)
{
    if (now_ns < p->plan_ns)
        return false;
    p->plan_ns = UINT64_MAX;
    if (p->trial == R2_TRIAL_RUNS && now_ns >= p->trial_ns + R2_POLICY_TRIAL_NS)
        p->trial = R2_TRIAL_OVER;
    return true;
}
