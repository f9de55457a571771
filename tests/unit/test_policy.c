/* When to plan, to switch, to take a plan back (plan/policy.c). Rung 1. */
#include <math.h>

#include "check.h"
#include "plan/policy.h"

#define S UINT64_C(1000000000)

static struct r2_policy fresh(void)
{
    struct r2_policy_config config = R2_POLICY_DEFAULT;
    struct r2_policy p;

    r2_policy_init(&p, &config);
    return p;
}

static void test_events_coalesce(void)
{
    struct r2_policy p = fresh();
    uint64_t next;

    CHECK_EQ(r2_policy_poll(&p, 5 * S, &next), R2_POLICY_WAIT);
    CHECK(next == UINT64_MAX);
    for (uint64_t i = 0; i < 10; i++) { /* a storm: one round */
        r2_policy_event(&p, 10 * S + i * S / 20);
        CHECK_EQ(r2_policy_poll(&p, 10 * S + i * S / 20, &next), R2_POLICY_WAIT);
        CHECK_EQ(next, 11 * S);
    }
    CHECK_EQ(r2_policy_poll(&p, 11 * S - 1, &next), R2_POLICY_WAIT);
    CHECK_EQ(r2_policy_poll(&p, 11 * S, &next), R2_POLICY_PLAN);
    CHECK_EQ(r2_policy_poll(&p, 11 * S, &next), R2_POLICY_WAIT);
    CHECK(next == UINT64_MAX);
}

static void test_plan_holds(void)
{
    struct r2_policy p = fresh();
    uint64_t next;

    r2_policy_committed(&p, 7, 100 * S);
    r2_policy_event(&p, 101 * S);
    CHECK_EQ(r2_policy_poll(&p, 103 * S, &next), R2_POLICY_WAIT);
    CHECK_EQ(next, 110 * S);
    CHECK_EQ(r2_policy_poll(&p, 110 * S - 1, &next), R2_POLICY_WAIT);
    CHECK_EQ(r2_policy_poll(&p, 110 * S, &next), R2_POLICY_PLAN);
    r2_policy_event(&p, 120 * S); /* the hold is over: only the window counts */
    CHECK_EQ(r2_policy_poll(&p, 120 * S, &next), R2_POLICY_WAIT);
    CHECK_EQ(next, 121 * S);
}

/* A loss that makes the plan worse than stock does not wait; what it gains otherwise does, and so
 * does a change back meanwhile. */
static void test_new_loss_does_not_wait(void)
{
    for (int i = 0; i < 4; i++) {
        struct r2_policy p = fresh();
        uint64_t next;

        r2_policy_committed(&p, i < 3 ? 7 : 0, 100 * S);
        r2_policy_event(&p, 101 * S);
        r2_policy_outlook(&p, 2, true, 5, i == 1 ? 5 : 4, 101 * S);
        if (i == 2) {
            r2_policy_event(&p, 101 * S + S / 2);
            r2_policy_outlook(&p, 2, true, 3, 4, 101 * S + S / 2);
        }
        CHECK_EQ(r2_policy_poll(&p, 102 * S - 1, &next), R2_POLICY_WAIT);
        CHECK_EQ(next, i ? 110 * S : 102 * S);
        CHECK_EQ(r2_policy_poll(&p, 102 * S, &next), i ? R2_POLICY_WAIT : R2_POLICY_PLAN);
        CHECK_EQ(r2_policy_urgent(&p), i == 0);
        r2_policy_again(&p, 102 * S); /* it was not agreed: as urgent as before */
        CHECK_EQ(r2_policy_poll(&p, 103 * S, &next), i ? R2_POLICY_WAIT : R2_POLICY_PLAN);
    }
}

/* What comes back makes the plan worse than stock as well, and waits: it may go again. A loss
 * before it that does not wait still does not. */
static void test_return_waits(void)
{
    for (int lost = 0; lost < 2; lost++) {
        struct r2_policy p = fresh();
        uint64_t next;

        r2_policy_committed(&p, 7, 100 * S);
        r2_policy_event(&p, 101 * S);
        if (lost)
            r2_policy_outlook(&p, 3, true, 5, 4, 101 * S);
        r2_policy_outlook(&p, 2, false, 5, 4, 101 * S);
        CHECK_EQ(r2_policy_urgent(&p), lost);
        CHECK_EQ(r2_policy_poll(&p, 102 * S, &next), lost ? R2_POLICY_PLAN : R2_POLICY_WAIT);
        CHECK(lost || next == 110 * S);
    }
}

/* The plan for what node `node` leaves is taken, and the node loses more. When was the plan
 * replaced? */
static uint64_t flap(struct r2_policy *p, uint64_t node, uint64_t now)
{
    uint64_t at = now + S, next;

    r2_policy_event(p, now);
    r2_policy_outlook(p, node, true, 5, 4, now);
    CHECK_EQ(r2_policy_poll(p, now, &next), R2_POLICY_WAIT);
    at = next;
    CHECK_EQ(r2_policy_poll(p, at, &next), R2_POLICY_PLAN);
    r2_policy_committed(p, p->current + 1, at);
    return at - now;
}

static void test_flaps_are_held(void)
{
    struct r2_policy p = fresh();

    r2_policy_committed(&p, 7, 100 * S);
    CHECK_EQ(flap(&p, 2, 101 * S), S);
    CHECK_EQ(flap(&p, 2, 103 * S), S);
    CHECK_EQ(flap(&p, 2, 105 * S), 9 * S); /* held from 104 s on */
    CHECK_EQ(flap(&p, 3, 115 * S), S);     /* another node is no flap of this one */
    CHECK_EQ(flap(&p, 2, 117 * S), 9 * S);
    CHECK_EQ(flap(&p, 2, 163 * S), S); /* the first of them is forgotten, */
    CHECK_EQ(flap(&p, 2, 165 * S), S); /* the second */
    CHECK_EQ(flap(&p, 2, 167 * S), 9 * S);
}

/* Both are infinite when a node has no NIC left: no plan is better than another. */
static void test_nothing_left_is_not_urgent(void)
{
    struct r2_policy p = fresh();

    r2_policy_committed(&p, 7, 100 * S);
    r2_policy_event(&p, 101 * S);
    r2_policy_outlook(&p, 2, true, (double)INFINITY, (double)INFINITY, 101 * S);
    CHECK(!r2_policy_urgent(&p));
}

static void test_switch_needs_gain(void)
{
    struct r2_policy p = fresh();
    char why[80];

    CHECK(!r2_policy_judge(&p, 7, 0.05, S, why));
    CHECK_STR(why, "its predicted gain of 5.0 % is not above 5.0 %");
    CHECK(r2_policy_judge(&p, 7, 0.051, S, why));
    r2_policy_committed(&p, 7, S);
    CHECK(!r2_policy_judge(&p, 7, 0.5, S, why));
    CHECK_STR(why, "it is in force already");
}

static void test_withdraws_what_is_slow(void)
{
    struct r2_policy p = fresh();
    uint64_t next;
    char why[80];

    r2_policy_event(&p, 0);
    CHECK_EQ(r2_policy_poll(&p, S, &next), R2_POLICY_PLAN);
    for (int i = 0; i < R2_POLICY_SAMPLES; i++) {
        r2_policy_sample(&p, 0, 1000, 2000);
    }
    r2_policy_committed(&p, 7, S);
    for (int i = 0; i < R2_POLICY_SAMPLES + R2_POLICY_SKIP; i++) {
        CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
        r2_policy_sample(&p, 0, 1000, 90000); /* not of this plan: begun before it */
        r2_policy_sample(&p, 7, 1000, 2120);
    }
    for (int i = 0; i < R2_POLICY_SAMPLES; i++) { /* and once more */
        CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
        r2_policy_sample(&p, 7, 1000, 2120);
    }
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WITHDRAW);
    r2_policy_ban(&p, 7);
    r2_policy_committed(&p, 0, 3 * S);
    CHECK_EQ(r2_policy_poll(&p, 4 * S, &next), R2_POLICY_WAIT);
    CHECK(!r2_policy_judge(&p, 7, 0.5, 20 * S, why));
    CHECK_STR(why, "it was slower than stock when it was tried");
    CHECK(r2_policy_judge(&p, 8, 0.5, 20 * S, why));
}

static void test_keeps_what_is_fast(void)
{
    struct r2_policy p = fresh();
    uint64_t next;

    for (int i = 0; i < R2_POLICY_SAMPLES; i++) {
        r2_policy_sample(&p, 0, 1000, 2000);
    }
    r2_policy_committed(&p, 7, S);
    for (int i = 0; i < R2_POLICY_SKIP; i++) {
        r2_policy_sample(&p, 7, 1000, 500000); /* NCCL connects */
    }
    for (int i = 0; i < 5 * R2_POLICY_SAMPLES; i++) {
        r2_policy_sample(&p, 7, 1000, i % 2 ? 1500 : 2300); /* noise around something faster */
        CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
    }
}

/* A little slower is noise, and so is slower for a while. */
static void test_noise_is_no_reason(void)
{
    struct r2_policy p = fresh();
    uint64_t next;

    for (int i = 0; i < R2_POLICY_SAMPLES; i++) {
        r2_policy_sample(&p, 0, 1000, 2000);
    }
    r2_policy_committed(&p, 7, S);
    for (int i = 0; i < 10 * R2_POLICY_SAMPLES; i++) {
        bool hiccup = i >= 2 * R2_POLICY_SAMPLES && i < 2 * R2_POLICY_SAMPLES + 15;

        r2_policy_sample(&p, 7, 1000, hiccup ? 4000 : 2080);
        CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
    }
}

static void take(struct r2_policy *p, uint64_t key, uint64_t bytes, uint64_t ns, int times)
{
    for (int i = 0; i < times; i++) {
        r2_policy_sample(p, key, bytes, ns);
    }
}

/* A NIC that is dying slows the plan down; what is slow in the state that it leaves is the first
 * look there. */
static void test_looks_are_at_one_state(void)
{
    struct r2_policy p = fresh();
    uint64_t next;

    r2_policy_state(&p, 1, 1.0);
    take(&p, 0, 1000, 1000, R2_POLICY_SAMPLES);
    r2_policy_committed(&p, 7, S);
    take(&p, 7, 1000, 1500, R2_POLICY_SAMPLES + R2_POLICY_SKIP);
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT); /* slow once, in state 1 */
    r2_policy_event(&p, 3 * S);
    r2_policy_state(&p, 2, 1.0);
    take(&p, 7, 1000, 1500, R2_POLICY_SAMPLES);
    CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), R2_POLICY_WAIT);
    take(&p, 7, 1000, 1500, R2_POLICY_SAMPLES);
    CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), R2_POLICY_WITHDRAW);
}

/* An operator says plan off during a hiccup: nothing was found out about the plan. */
static void test_off_bans_nothing(void)
{
    struct r2_policy p = fresh();
    uint64_t next;
    char why[80];

    take(&p, 0, 1000, 1000, R2_POLICY_SAMPLES);
    r2_policy_committed(&p, 7, S);
    take(&p, 7, 1000, 4000, R2_POLICY_SAMPLES + R2_POLICY_SKIP);
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
    r2_policy_committed(&p, 0, 2 * S);
    CHECK(r2_policy_judge(&p, 7, 0.5, 20 * S, why));
}

/* For a while a node had no NIC: nothing was predicted there, so nothing can be derived from it. */
static void test_no_prediction_is_no_estimate(void)
{
    for (int i = 0; i < 3; i++) {
        struct r2_policy p = fresh();
        double plan, stock;
        uint64_t next;

        r2_policy_state(&p, 1, i == 0 ? (double)INFINITY : i == 1 ? (double)NAN : 1.0);
        take(&p, 0, 1000, 1000, R2_POLICY_SAMPLES);
        r2_policy_event(&p, S);
        r2_policy_state(&p, 2, 1.0);
        r2_policy_committed(&p, 7, 2 * S);
        take(&p, 7, 1000, 1000, R2_POLICY_SKIP);
        for (int k = 0; k < 3; k++) {
            take(&p, 7, 1000, 1000, R2_POLICY_SAMPLES);
            CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), R2_POLICY_WAIT);
        }
        CHECK_EQ(r2_policy_compare(&p, &plan, &stock),
                 i < 2 ? R2_POLICY_UNKNOWN : R2_POLICY_ESTIMATED);
        CHECK(i < 2 || (stock > 999 && stock < 1001));
    }
}

/* Another failure makes old measurements worthless as they are; what the state changed in the
 * prediction makes them an estimate, until there are new ones. */
static void test_baseline_follows_the_state(void)
{
    for (int slow = 0; slow < 2; slow++) {
        struct r2_policy p = fresh();
        uint64_t next;

        r2_policy_state(&p, 1, 0.5);
        take(&p, 0, 1000, 1000, R2_POLICY_SAMPLES); /* healthy */
        r2_policy_event(&p, S);
        CHECK_EQ(r2_policy_measured(&p), 0);
        CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_PLAN);
        r2_policy_committed(&p, 7, 2 * S);
        /* Stock would take 2000 if the prediction doubles; more than 1.15 of it is slower. */
        take(&p, 7, 1000, slow ? 2320 : 2280, R2_POLICY_SAMPLES + R2_POLICY_SKIP);
        CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), R2_POLICY_WAIT); /* nothing to compare with */
        r2_policy_state(&p, 2, 1.0);
        CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), R2_POLICY_WAIT);
        take(&p, 7, 1000, slow ? 2320 : 2280, R2_POLICY_SAMPLES);
        CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), slow ? R2_POLICY_WITHDRAW : R2_POLICY_WAIT);
    }
}

/* A measurement in the state itself goes before the estimate, also a short one. */
static void test_measured_goes_before_estimated(void)
{
    struct r2_policy p = fresh();
    double plan, stock;
    uint64_t next;

    r2_policy_state(&p, 1, 0.5);
    take(&p, 0, 1000, 1000, R2_POLICY_SAMPLES);
    r2_policy_event(&p, S);
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_PLAN);
    r2_policy_state(&p, 2, 1.0);
    take(&p, 0, 1000, 3000, R2_POLICY_LEAST); /* slower than estimated */
    r2_policy_committed(&p, 7, 2 * S);
    take(&p, 7, 1000, 2990, R2_POLICY_SAMPLES + R2_POLICY_SKIP);
    CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), R2_POLICY_WAIT);
    CHECK_EQ(r2_policy_compare(&p, &plan, &stock), R2_POLICY_MEASURED);
    CHECK(plan > 2989 && plan < 2991 && stock > 2999 && stock < 3001);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), R2_POLICY_WAIT);
        take(&p, 7, 1000, 3160, R2_POLICY_SAMPLES);
    }
    CHECK_EQ(r2_policy_poll(&p, 3 * S, &next), R2_POLICY_WITHDRAW);
}

/* A single operation that a failure held up, or a size of which stock had none, is no reason. */
static void test_only_like_is_compared(void)
{
    struct r2_policy p = fresh();
    uint64_t next;

    take(&p, 0, 1 << 20, 1 << 20, R2_POLICY_SAMPLES); /* 1 ns per byte */
    take(&p, 0, 8 << 20, 4 << 20, R2_POLICY_LEAST);   /* 0.5 */
    r2_policy_committed(&p, 7, S);
    take(&p, 7, 1 << 20, 9 << 20, R2_POLICY_SKIP);
    take(&p, 7, 64 << 20, 999 << 20, R2_POLICY_SAMPLES); /* a size of its own */
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
    take(&p, 7, 1 << 20, 1 << 20, 15);
    take(&p, 7, 1 << 20, INT64_C(5000) << 20, 3); /* held up */
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
    take(&p, 7, 8 << 20, 3 << 20, R2_POLICY_LEAST); /* faster: 20 and more operations together */
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
    take(&p, 7, 8 << 20, 5 << 20, R2_POLICY_SAMPLES); /* and now slower, at the large size */
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WAIT);
    take(&p, 7, 8 << 20, 5 << 20, R2_POLICY_SAMPLES);
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_WITHDRAW);
}

/* What was slower with one NIC lost may be faster with three lost. */
static void test_banned_for_a_state(void)
{
    struct r2_policy p = fresh();
    char why[80];

    r2_policy_state(&p, 11, 1);
    r2_policy_ban(&p, 7);
    CHECK(!r2_policy_judge(&p, 7, 0.5, S, why));
    r2_policy_state(&p, 12, 1);
    CHECK(r2_policy_judge(&p, 7, 0.5, S, why));
    r2_policy_state(&p, 11, 1);
    for (int i = 0; i < 20; i++) {
        r2_policy_ban(&p, 7); /* known already: pushes no other out */
    }
    r2_policy_ban(&p, 8);
    CHECK(!r2_policy_judge(&p, 7, 0.5, S, why));
    CHECK_EQ(p.nbanned, 2);
}

/* An operator's word or a step that failed is no other state: what was measured stays. */
static void test_planning_again_forgets_nothing(void)
{
    struct r2_policy p = fresh();
    uint64_t next;

    take(&p, 0, 1000, 1000, R2_POLICY_SAMPLES);
    r2_policy_again(&p, S);
    CHECK_EQ(r2_policy_measured(&p), R2_POLICY_SAMPLES);
    CHECK_EQ(r2_policy_poll(&p, 2 * S, &next), R2_POLICY_PLAN);
}

static const struct check_test tests[] = {
    {"events_coalesce", test_events_coalesce},
    {"plan_holds", test_plan_holds},
    {"new_loss", test_new_loss_does_not_wait},
    {"return_waits", test_return_waits},
    {"flaps", test_flaps_are_held},
    {"nothing_left", test_nothing_left_is_not_urgent},
    {"switch_needs_gain", test_switch_needs_gain},
    {"withdraws", test_withdraws_what_is_slow},
    {"keeps", test_keeps_what_is_fast},
    {"noise", test_noise_is_no_reason},
    {"baseline", test_baseline_follows_the_state},
    {"measured", test_measured_goes_before_estimated},
    {"like_with_like", test_only_like_is_compared},
    {"banned", test_banned_for_a_state},
    {"again", test_planning_again_forgets_nothing},
    {"looks", test_looks_are_at_one_state},
    {"off", test_off_bans_nothing},
    {"no_prediction", test_no_prediction_is_no_estimate},
    {0},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
