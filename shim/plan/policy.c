#include "plan/policy.h"

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
    p->epoch = 0;
    p->slowest = (struct r2_medians){0};
    p->trial = R2_TRIAL_NONE;
    p->from = 0;
}

/* ---- what times say */

/* Classes that the plan was measured in, and stock was not. */
static bool stock_lacks(const struct r2_policy *p)
{
    for (int c = 0; c < R2_TIMES_CLASSES; c++)
        if (p->slowest.of[true][c] > 0 && p->slowest.of[false][c] <= 0)
            return true;
    return false;
}

/* The first size behind the classes in which the plan was slower. */
static uint64_t slower_below(const struct r2_policy *p)
{
    uint64_t from = 0;

    for (int c = 0; c < R2_TIMES_CLASSES; c++)
        if (p->slowest.of[false][c] > 0 &&
            p->slowest.of[true][c] > R2_POLICY_SLOWER * p->slowest.of[false][c])
            from = r2_times_behind(c);
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

static void keep(float kept[], const float known[])
{
    for (int c = 0; c < R2_TIMES_CLASSES; c++)
        kept[c] = known[c] > 0 ? known[c] : kept[c];
}

void r2_policy_measured(struct r2_policy *p, const struct r2_medians *slowest, uint64_t now_ns)
{
    keep(p->slowest.of[false], slowest->of[false]);
    keep(p->slowest.of[true], slowest->of[true]);
    judge(p, now_ns);
}

bool r2_policy_trial(const struct r2_policy *p)
{
    return p->trial == R2_TRIAL_WANTED || p->trial == R2_TRIAL_RUNS;
}

void r2_policy_changed(struct r2_policy *p, bool planned, uint64_t epoch, uint64_t now_ns)
{
    p->planned = planned;
    p->changed_ns = now_ns;
    p->epoch = epoch;
    if (p->trial == R2_TRIAL_WANTED && !planned) {
        p->trial = R2_TRIAL_RUNS;
        p->trial_ns = now_ns;
        r2_policy_again(p, now_ns);
    }
}

bool r2_policy_due(struct r2_policy *p, uint64_t now_ns)
{
    if (now_ns < p->plan_ns)
        return false;
    p->plan_ns = UINT64_MAX;
    if (p->trial == R2_TRIAL_RUNS && now_ns >= p->trial_ns + R2_POLICY_TRIAL_NS)
        p->trial = R2_TRIAL_OVER;
    else if (p->trial == R2_TRIAL_RUNS) /* whatever this was due for, that has an end */
        r2_policy_again(p, p->trial_ns + R2_POLICY_TRIAL_NS);
    return true;
}
