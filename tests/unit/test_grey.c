/* engine/core/grey on simulated paths (rung 1): does it find the one that is slow or lossy, soon,
 * and no other? It cannot prove what real paths show: tests/py/test_grey.py. */
#include "grey_sim.h"

TEST(slow_and_back)
{
    char reason[R2_GREY_REASON];

    for (int paths = 2; paths <= PATHS; paths++) {
        set_up(paths, 125 * MB, 0);
        run(2 * SEC, -1);
        expect_full(-1);
        fall(&sims[0], 12 * MB + 500000);
        CHECK_LE(run(SEC, 0), 750 * MS);
        run(SEC, -1);
        CHECK_GE(sims[0].g.factor, 80);
        CHECK_LE(sims[0].g.factor, 200);
        expect_full(0);
        r2_grey_reason(&sims[0].g, reason, sizeof(reason));
        CHECK_MSG(strncmp(reason, "slow: 1", 7) == 0, "%s", reason);
        CHECK(strstr(reason, "of its best (1")); /* what its siblings show, or its own */

        sims[0].every = 60 * MS; /* a limited path has few chunks to show that it is well */
        fall(&sims[0], 12 * MB + 500000);
        run(3 * SEC, -1);
        CHECK_LE(sims[0].g.factor, 300);
        fall(&sims[0], 125 * MB);
        CHECK_LE(run(2 * SEC, 0), SEC);
        CHECK_EQ(sims[0].g.factor, R2_GREY_FULL);
        CHECK_EQ(sims[0].g.why, R2_GREY_WELL);
        CHECK_LE(sims[0].changes, 4);
    }
}

TEST(unequal_by_design)
{
    set_up(4, 125 * MB, 1250 * MB);
    fall(&sims[1], 375 * MB);
    sims[2].rtt = 2 * MS;
    sims[3].noise = 800 * US;
    fall(&sims[2], 125 * MB);
    run(20 * SEC, -1);
    for (int i = 0; i < count; i++)
        CHECK_EQ(sims[i].changes, 0);
    set_up(4, 125 * MB, 0);
    fall(&sims[0], 20 * MB); /* what siblings show is no measure for what it never was */
    run(20 * SEC, -1);
    CHECK_LE(sims[0].g.best_rate, 20 * MB);
    expect_full(-1);
}

static uint32_t beside(int self)
{
    struct r2_grey *all[PATHS];

    for (int i = 0; i < count; i++)
        all[i] = &sims[i].g;
    return r2_grey_beside(all, count, self);
}

/* A path that never was faster is seen beside its siblings, in proportion to what is announced. */
TEST(beside_siblings)
{
    set_up(4, 125 * MB, 0);
    fall(&sims[3], 12 * MB);
    sims[0].limited = true; /* has shown that it can do that much at least */
    CHECK_EQ(beside(3), 0);
    run(5 * SEC, -1);
    CHECK_GE(beside(3), 60);
    CHECK_LE(beside(3), 130);
    CHECK_EQ(beside(0), 0); /* has not had enough to do */
    CHECK_GE(beside(1), 900);
    fall(&sims[3], 125 * MB);
    run(5 * SEC, -1);
    CHECK_GE(beside(3), 900);
    set_up(2, 125 * MB, 1250 * MB);
    sims[1].g.announced = 125 * MB;
    fall(&sims[1], 12 * MB);
    run(5 * SEC, -1);
    CHECK_GE(beside(1), 800);
    set_up(1, 125 * MB, 0);
    run(SEC, -1);
    CHECK_EQ(beside(0), 0);
}

TEST(idle_is_not_judged)
{
    set_up(3, 125 * MB, 0);
    run(2 * SEC, -1);
    sims[1].next = UINT64_MAX; /* nothing to do any more */
    run(5 * SEC, -1);
    CHECK_EQ(sims[1].changes, 0);
    chunk_out(&sims[1], now);
    sims[1].every = 40 * MS; /* and then very little */
    run(5 * SEC, -1);
    for (int i = 0; i < count; i++)
        CHECK_EQ(sims[i].changes, 0);
    sims[0].next = sims[2].next = UINT64_MAX;
    fall(&sims[1], 5 * MB); /* slow, but alone: there is nobody to compare with */
    run(5 * SEC, -1);
    CHECK_EQ(sims[1].changes, 0);
}

/* A busy machine: chunks come up to 20 ms late, on all paths. */
TEST(noise)
{
    for (int k = 0; k < 5; k++) {
        set_up(4, 125 * MB, 0);
        run(2 * SEC, -1);
        for (int i = 0; i < count; i++) {
            sims[i].noise = 20 * MS;
            sims[i].every = i % 2 ? 15 * MS : 0;
        }
        run(60 * SEC, -1);
        for (int i = 0; i < count; i++)
            CHECK_EQ(sims[i].changes, 0);
    }
}

TEST(stuck)
{
    uint64_t from;
    bool seen = false;

    set_up(3, 125 * MB, 0);
    run(2 * SEC, -1);
    sims[0].rate = 1;
    from = now;
    while (!seen && now - from < SEC) {
        r2_grey_waiting(&sims[0].g, 256 * KIB, now - from, now);
        run(25 * MS, -1);
        seen = sims[0].g.factor < R2_GREY_FULL;
    }
    CHECK(seen);
    CHECK_EQ(sims[0].g.factor, R2_GREY_LEAST);
    expect_full(0);
}

TEST(announced)
{
    set_up(2, 1000 * MB, 200 * MB); /* better than it says */
    run(2 * SEC, -1);
    fall(&sims[0], 130 * MB);
    run(2 * SEC, -1);
    expect_full(-1);
    fall(&sims[0], 90 * MB);
    run(2 * SEC, -1);
    CHECK_LT(sims[0].g.factor, R2_GREY_FULL);
}

TEST(restart_remembers)
{
    set_up(2, 125 * MB, 0);
    run(2 * SEC, -1);
    r2_grey_restart(&sims[0].g);
    CHECK_EQ(sims[0].g.factor, R2_GREY_FULL);
    fall(&sims[0], 10 * MB); /* it came back slow */
    CHECK_LE(run(SEC, 0), 750 * MS);
    CHECK_LT(sims[0].g.factor, 200);
}

/* A machine with no core to spare: acknowledgements are seen in heaps when the thread runs, and the
 * measured rate, a maximum, shows many times what the link can. The link's rate stays the best. */
TEST(seen_in_heaps)
{
    struct r2_grey *all[PATHS];
    uint64_t due[PATHS], sent[PATHS], one = 64 * KIB * SEC / (12 * MB), spike = 0;

    set_up(PATHS, 12 * MB, 0);
    for (int i = 0; i < PATHS; i++) {
        all[i] = &sims[i].g;
        due[i] = sent[i] = now;
    }
    for (uint64_t end = now + 20 * SEC; now < end;) {
        now += 2 * MS + check_below(check_below(4) ? 20 * MS : 90 * MS);
        for (int i = 0; i < PATHS; i++) {
            int heap = 0;

            for (; due[i] + one <= now; heap++) {
                uint64_t took = now - sent[i];

                sent[i] = due[i];
                due[i] += one;
                r2_grey_moved(&sims[i].g, 64 * KIB, took, false, now);
                r2_grey_chunk(&sims[i].g, 64 * KIB, took, heap || now < spike ? 270 * MB : 12 * MB,
                              now);
            }
            spike = heap > 1 ? now + 200 * MS : spike;
        }
        sims[0].changes += r2_grey_judge(all, PATHS, now) != 0;
    }
    for (int i = 0; i < PATHS; i++) {
        CHECK_GT(sims[i].g.best_rate, 5 * MB);
        CHECK_LT(sims[i].g.best_rate, 20 * MB);
        CHECK_EQ(sims[i].changes, 0);
    }
}

/* The threads of one path are kept waiting, again and again: its chunks come late, but its delivery
 * rate, a maximum, is what it was. */
TEST(kept_waiting)
{
    struct r2_grey *all[2];

    set_up(2, 25 * MB, 0);
    run(2 * SEC, -1);
    for (int i = 0; i < 2; i++)
        all[i] = &sims[i].g;
    for (uint64_t t = 0; t < 2000; t++) {
        now += 5 * MS;
        r2_grey_chunk(&sims[0].g, 64 * KIB, t % 3 ? 25 * MS : 3 * MS, 24 * MB, now);
        r2_grey_chunk(&sims[1].g, 64 * KIB, 3 * MS, 24 * MB, now);
        if (t % 5 == 0)
            CHECK_EQ(r2_grey_judge(all, 2, now), 0);
    }
    for (uint64_t t = 0; t < 300; t++) { /* and now it has fallen */
        now += 5 * MS;
        r2_grey_chunk(&sims[0].g, 64 * KIB, 25 * MS, 3 * MB, now);
        r2_grey_chunk(&sims[1].g, 64 * KIB, 3 * MS, 24 * MB, now);
        if (t % 5 == 0)
            r2_grey_judge(all, 2, now);
    }
    CHECK_EQ(sims[0].g.why, R2_GREY_SLOW);
    CHECK_EQ(sims[1].g.why, R2_GREY_WELL);
    for (uint64_t t = 0; t < 300; t++) { /* it can as much as ever, only its threads are late */
        now += 5 * MS;
        r2_grey_chunk(&sims[0].g, 64 * KIB, t % 3 ? 25 * MS : 3 * MS, 24 * MB, now);
        r2_grey_chunk(&sims[1].g, 64 * KIB, 3 * MS, 24 * MB, now);
        if (t % 5 == 0)
            r2_grey_judge(all, 2, now);
    }
    CHECK_EQ(sims[0].g.why, R2_GREY_WELL);
}

/* One window of paths 0 and 1: 0's chunks take `took`, its delivery rate is `rate`; 1 is well. */
static uint64_t window(uint64_t took, uint64_t rate)
{
    struct r2_grey *all[2] = {&sims[0].g, &sims[1].g};

    for (int i = 0; i < 6; i++) {
        now += 10 * MS;
        r2_grey_chunk(&sims[0].g, 64 * KIB, took, rate, now);
        r2_grey_chunk(&sims[1].g, 64 * KIB, 3 * MS, 24 * MB, now);
    }
    return r2_grey_judge(all, 2, now);
}

/* A window above the limit, or a delivery rate that is back, contradicts slowness; one in between,
 * with the rate still down, does not: it may be a shaper's savings. */
TEST(count_of_windows)
{
    static const struct {
        uint64_t took, rate;
        enum r2_grey_why why;
        uint32_t least, most;
    } between[] = {
        {4900 * US, 8 * MB, R2_GREY_SLOW, 510, 740},
        {4900 * US, 14 * MB, R2_GREY_WELL, 510, 740},
        {3200 * US, 8 * MB, R2_GREY_WELL, 760, 1000},
    };

    for (size_t k = 0; k < sizeof(between) / sizeof(between[0]); k++) {
        set_up(2, 24 * MB, 0);
        for (int i = 0; i < 10; i++)
            CHECK_EQ(window(3 * MS, 24 * MB), 0);
        for (int i = 0; i < 20; i++) {
            window(7500 * US, 8 * MB);
            CHECK_LT(sims[0].g.share, R2_GREY_BELOW);
            window(between[k].took, between[k].rate);
            CHECK_GE(sims[0].g.share, between[k].least);
            CHECK_LE(sims[0].g.share, between[k].most);
        }
        CHECK_MSG(sims[0].g.why == between[k].why, "case %zu: %d", k, (int)sims[0].g.why);
        CHECK_EQ(sims[1].g.why, R2_GREY_WELL);
    }
}

TEST(loss)
{
    char reason[R2_GREY_REASON];

    set_up(4, 125 * MB, 0);
    run(2 * SEC, -1);
    for (int i = 0; i < count; i++)
        sims[i].loss_ppm = 30000; /* the switch that all share */
    run(4 * SEC, -1);
    expect_full(-1);
    for (int i = 1; i < count; i++)
        sims[i].loss_ppm = 500;
    run(4 * SEC, -1);
    CHECK_EQ(sims[0].g.factor, R2_GREY_LOSSY);
    expect_full(0);
    r2_grey_reason(&sims[0].g, reason, sizeof(reason));
    CHECK_MSG(strncmp(reason, "lossy: ", 7) == 0, "%s", reason);
    sims[0].loss_ppm = 5000; /* between the limits: stays */
    run(4 * SEC, -1);
    CHECK_EQ(sims[0].g.factor, R2_GREY_LOSSY);
    sims[0].loss_ppm = 0;
    run(4 * SEC, -1);
    expect_full(-1);
    CHECK_EQ(sims[0].changes, 2);
}
