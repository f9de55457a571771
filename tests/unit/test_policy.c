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

/* The slowest rank's median, of a class. */
static void told(struct r2_policy *p, bool planned, int class, float median)
{
    struct r2_medians slowest = {0};

    slowest.of[planned][class] = median;
    r2_policy_measured(p, &slowest, S);
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

    r2_policy_changed(&p, true, 1, 100 * S);
    r2_policy_event(&p, false, 101 * S);
    CHECK(!r2_policy_due(&p, 110 * S - 1));
    CHECK(r2_policy_due(&p, 110 * S));
    r2_policy_event(&p, false, 120 * S);
    CHECK(r2_policy_due(&p, 120 * S + R2_POLICY_COALESCE_NS));
    r2_policy_changed(&p, false, 2, 200 * S);
    r2_policy_event(&p, true, 201 * S);
    CHECK(r2_policy_due(&p, 201 * S + R2_POLICY_COALESCE_NS));
}

/* Slower in a class of sizes: given up there and below, not above. */
TEST(slower_sizes_are_given_up)
{
    struct r2_policy p = fresh();

    r2_policy_changed(&p, true, 1, S);
    told(&p, false, 2, 100);
    told(&p, false, 6, 1000);
    told(&p, true, 2, 104); /* within the noise */
    CHECK_EQ(p.from, 0);
    told(&p, true, 2, 106);
    CHECK_EQ(p.from, 8 * MIB);
    CHECK(r2_policy_due(&p, 2 * S));
    r2_policy_changed(&p, true, 2, 2 * S); /* what was measured stays known */
    told(&p, true, 6, 1049);
    CHECK_EQ(p.from, 8 * MIB);
    CHECK(!r2_policy_trial(&p));
    told(&p, true, R2_TIMES_CLASSES - 1, 106);
    told(&p, false, R2_TIMES_CLASSES - 1, 100);
    CHECK(p.from == UINT64_MAX);
    r2_policy_event(&p, true, 3 * S); /* another state, which knows nothing of it */
    CHECK_EQ(p.from, 0);
    CHECK_EQ(p.epoch, 0);
    r2_policy_changed(&p, true, 3, 4 * S);
    told(&p, true, 2, 106);
    CHECK_EQ(p.from, 0);
    CHECK(r2_policy_trial(&p));
}

/* Where stock was not measured in this state, the plan makes way for it once. */
TEST(trial)
{
    struct r2_policy p = fresh();

    r2_policy_changed(&p, true, 1, S);
    told(&p, true, 6, 1000);
    CHECK(r2_policy_trial(&p) && r2_policy_due(&p, S));
    r2_policy_changed(&p, false, 2, 2 * S);
    told(&p, false, 5, 1500); /* another size */
    CHECK(r2_policy_trial(&p));
    told(&p, false, 6, 1500);
    CHECK(!r2_policy_trial(&p) && r2_policy_due(&p, 2 * S));
    CHECK_EQ(p.from, 0);
    r2_policy_changed(&p, true, 3, 3 * S);
    told(&p, true, 7, 1000);
    CHECK(!r2_policy_trial(&p)); /* once in a state */
    r2_policy_event(&p, true, 4 * S);
    r2_policy_changed(&p, true, 4, 4 * S);
    told(&p, true, 6, 1000);
    CHECK(r2_policy_trial(&p));
}

/* An application that has no operation meanwhile gets its plan back. */
TEST(trial_ends)
{
    struct r2_policy p = fresh();

    r2_policy_changed(&p, true, 1, S);
    told(&p, true, 6, 1000);
    CHECK(r2_policy_due(&p, 2 * S));
    r2_policy_changed(&p, false, 2, 2 * S);
    r2_policy_again(&p, 2 * S); /* as the leader does */
    CHECK(r2_policy_due(&p, 2 * S));
    CHECK(!r2_policy_due(&p, 2 * S + R2_POLICY_TRIAL_NS - 1));
    CHECK(r2_policy_trial(&p));
    CHECK(r2_policy_due(&p, 2 * S + R2_POLICY_TRIAL_NS));
    CHECK(!r2_policy_trial(&p));
}

/* ---- times of one rank */

static void sample(struct r2_times *t, uint64_t epoch, bool planned, uint64_t bytes, uint64_t ns,
                   int n)
{
    for (int i = 0; i < n; i++)
        r2_times_add(t, epoch, planned, bytes, ns * bytes);
}

TEST(medians_of_the_first_ones)
{
    struct r2_times t = {0};

    sample(&t, 1, true, 4 * MIB, 9, R2_TIMES_SKIP); /* these say nothing */
    sample(&t, 1, true, 4 * MIB, 2, R2_TIMES_PLAN / 2 + 1);
    sample(&t, 1, true, 4 * MIB, 1000, R2_TIMES_PLAN / 2 - 2);
    sample(&t, 1, false, 2 * MIB - 1, 3, R2_TIMES_STOCK);
    CHECK(t.known.of[false][0] == 3);
    CHECK(t.known.of[true][2] == 0);
    sample(&t, 1, true, 8 * MIB - 1, 1000, 1); /* of the same class */
    CHECK(t.known.of[true][2] == 2);           /* a few slow ones are none */
    sample(&t, 1, true, 4 * MIB, 1000, 100);
    CHECK(t.known.of[true][2] == 2);
    CHECK_EQ(r2_times_behind(2), 8 * MIB);
    sample(&t, 1, true, UINT64_C(1) << 40, 5, R2_TIMES_PLAN);
    CHECK(t.known.of[true][R2_TIMES_CLASSES - 1] == 5);
    CHECK(r2_times_behind(R2_TIMES_CLASSES - 1) == UINT64_MAX);
}

TEST(what_is_known_is_not_timed)
{
    struct r2_times t = {0};
    uint64_t epoch = (UINT64_C(1) << 32) + 7; /* its low half tells it apart */

    CHECK(r2_times_needs(r2_times_done(&t), epoch, true, 4 * MIB));
    sample(&t, epoch, true, 4 * MIB, 2, R2_TIMES_SKIP + R2_TIMES_PLAN);
    CHECK(!r2_times_needs(r2_times_done(&t), epoch, true, 4 * MIB));
    CHECK(r2_times_needs(r2_times_done(&t), epoch, false, 4 * MIB));
    CHECK(r2_times_needs(r2_times_done(&t), epoch, true, 8 * MIB));
    CHECK(r2_times_needs(r2_times_done(&t), epoch + 1, true, 4 * MIB));
    sample(&t, epoch, false, UINT64_C(1) << 40, 2, R2_TIMES_STOCK);
    CHECK(!r2_times_needs(r2_times_done(&t), epoch, false, UINT64_C(1) << 40));
}

TEST(an_epoch_begins_anew)
{
    struct r2_times t = {0};

    sample(&t, 1, true, 4 * MIB, 2, R2_TIMES_SKIP + R2_TIMES_PLAN);
    sample(&t, 2, false, 4 * MIB, 9, R2_TIMES_SKIP);
    CHECK(t.known.of[true][2] == 0);
    sample(&t, 1, true, 4 * MIB, 2, 100); /* late ones */
    sample(&t, 2, false, 4 * MIB, 3, R2_TIMES_STOCK);
    CHECK_EQ(t.epoch, 2);
    CHECK(t.known.of[true][2] == 0);
    CHECK(t.known.of[false][2] == 3);
}
