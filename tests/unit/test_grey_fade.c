/* engine/core/grey: what a path is held to fades when its siblings show no more than it does, and
 * only then. Simulated paths (rung 1). */
#include "grey_sim.h"

/* One NIC was faster than the others for a while, then all have the same limit for good. It is not
 * slow beside them, what it is held to fades, and a real fall is measured by the new limit. */
TEST(limit_for_good)
{
    set_up(4, 50 * MB, 0);
    sims[0].rtt = sims[0].noise = 5 * US;
    fall(&sims[0], 1300 * MB);
    run(2 * SEC, -1);
    CHECK_GT(sims[0].g.best_rate, 1000 * MB);
    fall(&sims[0], 50 * MB);
    run(R2_GREY_HALF_LIFE + 2 * SEC, -1); /* what it showed counts for 2 s */
    CHECK_LT(sims[0].g.best_rate, 700 * MB);
    run(5 * SEC, -1);
    CHECK_LE(sims[0].g.best_rate, 60 * MB);
    CHECK_GT(sims[0].g.best_rate, 40 * MB);
    for (int i = 0; i < count; i++)
        CHECK_EQ(sims[i].changes, 0);
    fall(&sims[0], 30 * MB); /* no tenth of 1300, but more than half of 50 */
    run(5 * SEC, -1);
    CHECK_EQ(sims[0].changes, 0);
    fall(&sims[0], 5 * MB);
    CHECK_LE(run(2 * SEC, 0), 750 * MS);
    run(SEC, -1);
    CHECK_GE(sims[0].g.factor, 80);
    CHECK_LE(sims[0].g.factor, 200);
    expect_full(0);
}

/* Siblings show what it should carry: at a tenth it is slow for as long as they do, however long.
 */
TEST(slow_for_long)
{
    for (int paths = 2; paths <= PATHS; paths++) {
        set_up(paths, 125 * MB, 0);
        run(2 * SEC, -1);
        fall(&sims[0], 12 * MB + 500000);
        CHECK_LE(run(SEC, 0), 750 * MS);
        run(600 * SEC, -1);
        expect_full(0);
        if (paths == PATHS) /* and a second one: there are still two that show it */
            fall(&sims[1], 12 * MB);
        run(60 * SEC, -1);
        for (int i = 0; i < (paths == PATHS ? 2 : 1); i++) {
            CHECK_EQ(sims[i].g.why, R2_GREY_SLOW);
            CHECK_LE(sims[i].g.factor, 200);
            CHECK_GT(sims[i].g.best_rate, 100 * MB);
        }
    }
}

/* What idle paths do, or such that wait for the application, is no evidence: not of what they can
 * do, and not of what their sibling could. */
TEST(no_evidence)
{
    uint64_t best;

    set_up(3, 125 * MB, 0);
    run(2 * SEC, -1);
    best = sims[0].g.best_rate;
    for (int i = 0; i < count; i++) {
        sims[i].limited = true;
        fall(&sims[i], 20 * MB);
    }
    run(60 * SEC, -1);
    for (int i = 0; i < count; i++)
        CHECK_GE(sims[i].g.best_rate, best - MB);
    expect_full(-1);
    sims[0].limited =
        false; /* it falls, and has much to do; the others do not show what they can */
    fall(&sims[0], 5 * MB);
    run(60 * SEC, -1);
    CHECK_GE(sims[0].g.best_rate, best - MB);
    CHECK_EQ(sims[0].g.why, R2_GREY_SLOW);
    sims[1].next = UINT64_MAX; /* nothing at all */
    run(60 * SEC, -1);
    CHECK_GE(sims[0].g.best_rate, best - MB);
    CHECK_GE(sims[1].g.best_rate, best - MB);
}

/* Two fall, as on a card with two ports, and nobody knows what the others could carry: they have
 * been made anew, or never had to do all they can. They are no less for that, and what is slow
 * beside them stays slow; the two would show each other that nothing more is to be had. */
static void two_fall(int paths, bool anew, bool at_once)
{
    set_up(paths, 125 * MB, 0);
    for (int i = 2; i < count; i++)
        sims[i].limited = !anew;
    sims[1].limited = false;
    run(2 * SEC, -1);
    for (int i = 2; i < count; i++) {
        if (anew)
            r2_grey_restart(&sims[i].g);
        sims[i].limited = true; /* they empty the queue */
    }
    fall(&sims[0], 12 * MB);
    if (!at_once)
        CHECK_LE(run(SEC, 0), 750 * MS);
    fall(&sims[1], 12 * MB);
    CHECK_LE(run(SEC, 1), 750 * MS);
    run(60 * SEC, -1);
    for (int i = 0; i < count; i++) {
        CHECK_EQ(sims[i].g.why, i < 2 ? R2_GREY_SLOW : R2_GREY_WELL);
        CHECK_EQ(sims[i].changes, i < 2);
    }
    for (int i = 0; i < 2; i++)
        CHECK_GT(sims[i].g.best_rate, 100 * MB);
    for (int i = 2; i < count; i++) { /* as slow as they are: now nothing more is to be had */
        sims[i].limited = false;
        fall(&sims[i], 12 * MB);
    }
    run(10 * SEC, -1);
    expect_full(-1);
    for (int i = 0; i < 2; i++)
        CHECK_LT(sims[i].g.best_rate, 20 * MB);
}

TEST(two_fall)
{
    for (int i = 0; i < 8; i++)
        two_fall(3 + i / 4, i % 2, i / 2 % 2);
}
