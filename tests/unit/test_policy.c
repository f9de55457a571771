/* When to plan, and where a plan is slower than stock (plan/policy.c). Rung 1. */
#include "check.h"
#include "plan/policy.h"

#define S UINT64_C(1000000000)
#define HOLD (10 * S)
#define MIB (UINT64_C(1) << 20)

static struct r2_policy fresh(void)
{
    struct r2_policy p;

    r2_policy_init(&p, HOLD);
    return p;
}

static void sample(struct r2_policy *p, bool planned, uint64_t bytes, uint64_t ns, int n)
{
    for (int i = 0; i < n; i++)
        r2_policy_sample(p, planned, bytes, ns, S);
}

TEST(events_coalesce)
{
    struct r2_policy p = fresh();

    CHECK(!r2_policy_due(&p, 5 * S));
    for (uint64_t i = 0; i < 4; i++) /* a storm: one round, a moment after the first */
        r2_policy_event(&p, true, 10 * S + i * S / 20);
    CHECK(!r2_policy_due(&p, 10 * S + R2_POLICY_COALESCE_NS - 1));
    CHECK(r2_policy_due(&p, 10 * S + R2_POLICY_COALESCE_NS));
    CHECK(!r2_policy_due(&p, 100 * S));
}

/* A loss does not wait; what comes back waits until the last change has held. */
TEST(a_return_waits)
{
    struct r2_policy p = fresh();

    r2_policy_changed(&p, true, 100 * S);
    r2_policy_event(&p, false, 101 * S);
    CHECK(!r2_policy_due(&p, 110 * S - 1));
    CHECK(r2_policy_due(&p, 110 * S));
    r2_policy_event(&p, false, 120 * S);
    CHECK(r2_policy_due(&p, 120 * S + R2_POLICY_COALESCE_NS));
    r2_policy_changed(&p, false, 200 * S);
    r2_policy_event(&p, true, 201 * S);
    CHECK(r2_policy_due(&p, 201 * S + R2_POLICY_COALESCE_NS));
}

/* Slower in a class of sizes: given up there and below, not above. */
TEST(slower_sizes_are_given_up)
{
    struct r2_policy p = fresh();

    sample(&p, false, 4 * MIB, 100, R2_POLICY_LEAST);
    sample(&p, false, 64 * MIB, 1000, R2_POLICY_LEAST);
    r2_policy_changed(&p, true, S);
    sample(&p, true, 4 * MIB, 150, R2_POLICY_SKIP); /* the first ones say nothing */
    sample(&p, true, 4 * MIB, 106, R2_POLICY_SAMPLES - 1);
    CHECK_EQ(p.from, 0);
    sample(&p, true, 4 * MIB, 106, 1);
    CHECK_EQ(p.from, 8 * MIB);
    CHECK(r2_policy_due(&p, 2 * S));
    sample(&p, true, 64 * MIB, 1049, R2_POLICY_SAMPLES); /* within the noise */
    CHECK_EQ(p.from, 8 * MIB);
    CHECK(!r2_policy_trial(&p));
    r2_policy_event(&p, true, 3 * S); /* another state, which knows nothing of it */
    CHECK_EQ(p.from, 0);
}

TEST(one_slow_operation_is_none)
{
    struct r2_policy p = fresh();

    sample(&p, false, 4 * MIB, 100, R2_POLICY_LEAST);
    r2_policy_changed(&p, true, S);
    sample(&p, true, 4 * MIB, 90, R2_POLICY_SKIP + R2_POLICY_SAMPLES / 2 + 1);
    sample(&p, true, 4 * MIB, 100000, R2_POLICY_SAMPLES / 2 - 1);
    CHECK_EQ(p.from, 0);
}

/* Where stock was not measured in this state, the plan makes way for it once. */
TEST(trial)
{
    struct r2_policy p = fresh();

    r2_policy_changed(&p, true, S);
    sample(&p, true, 64 * MIB, 1000, R2_POLICY_SKIP + R2_POLICY_SAMPLES);
    CHECK(r2_policy_trial(&p) && r2_policy_due(&p, S));
    r2_policy_changed(&p, false, 2 * S);
    sample(&p, false, 64 * MIB, 1500, R2_POLICY_SKIP + R2_POLICY_LEAST - 1);
    CHECK(r2_policy_trial(&p));
    sample(&p, false, 64 * MIB, 1500, 1);
    CHECK(!r2_policy_trial(&p) && r2_policy_due(&p, 2 * S));
    CHECK_EQ(p.from, 0);
    r2_policy_changed(&p, true, 3 * S);
    sample(&p, true, 128 * MIB, 1000, R2_POLICY_SKIP + R2_POLICY_SAMPLES);
    CHECK(!r2_policy_trial(&p)); /* once in a state */
    r2_policy_event(&p, true, 4 * S);
    sample(&p, true, 64 * MIB, 1000, R2_POLICY_SAMPLES);
    CHECK(r2_policy_trial(&p));
}

/* An application that has no operation meanwhile gets its plan back. */
TEST(trial_ends)
{
    struct r2_policy p = fresh();

    r2_policy_changed(&p, true, S);
    sample(&p, true, 64 * MIB, 1000, R2_POLICY_SKIP + R2_POLICY_SAMPLES);
    CHECK(r2_policy_due(&p, 2 * S));
    r2_policy_changed(&p, false, 2 * S);
    CHECK(!r2_policy_due(&p, 2 * S + R2_POLICY_TRIAL_NS - 1));
    CHECK(r2_policy_trial(&p));
    CHECK(r2_policy_due(&p, 2 * S + R2_POLICY_TRIAL_NS));
    CHECK(!r2_policy_trial(&p));
}
