/* engine/core/trial (rung 1): rules, and together with the measured rate and the judge on a
 * simulated shaper that saves up a burst: a path that its siblings' speed leaves nothing is still
 * judged, soon and rightly. What it cannot prove: timing of real NICs and threads. */
#include "check.h"

#include "engine/core/grey.h"
#include "engine/core/pathrate.h"
#include "engine/core/trial.h"

#define US UINT64_C(1000)
#define MS UINT64_C(1000000)
#define SEC UINT64_C(1000000000)
#define MB UINT64_C(1000000)
#define CHUNK (64u * 1024)
#define STEP (100 * US)

TEST(rules)
{
    struct r2_trial t = {0};
    uint64_t now = 9 * SEC;

    CHECK(r2_trial_may(&t, false, 0, now)); /* never used */
    r2_trial_took(&t, false, 0, CHUNK, now);
    CHECK(!r2_trial_may(&t, false, now, now)); /* and its first chunk is no trial */
    CHECK(!r2_trial_may(&t, false, now, now + R2_TRIAL_SELDOM));
    CHECK(r2_trial_may(&t, false, now, now + R2_TRIAL_SELDOM + 1));
    CHECK(r2_trial_may(&t, true, now, now)); /* in doubt, and not tried yet */
    r2_trial_took(&t, true, now, CHUNK, now);
    CHECK(r2_trial_may(&t, true, now, now + R2_TRIAL_NS - 1));
    CHECK(r2_trial_may(&t, false, now, now + R2_TRIAL_NS - 1));
    CHECK(!r2_trial_may(&t, true, now, now + R2_TRIAL_NS));
    CHECK(!r2_trial_may(&t, true, now, now + R2_TRIAL_SOON));
    CHECK(r2_trial_may(&t, true, now, now + R2_TRIAL_SOON + 1));
    CHECK(!r2_trial_may(&t, false, now, now + R2_TRIAL_SOON + 1));
    for (uint64_t bytes = CHUNK; bytes < R2_TRIAL_BYTES; bytes += CHUNK) {
        CHECK(r2_trial_may(&t, true, now, now));
        r2_trial_took(&t, true, now, CHUNK, now);
    }
    CHECK(!r2_trial_may(&t, true, now, now));
    CHECK(r2_trial_may(&t, true, now, now + R2_TRIAL_SOON + 1));
    r2_trial_took(&t, true, now, CHUNK, now + R2_TRIAL_SOON + 1); /* counts from nothing again */
    CHECK(r2_trial_may(&t, true, now, now + R2_TRIAL_SOON + 2));
}

/* A path over a token bucket, one chunk at a time, beside a sibling that never pauses. */
struct sim {
    uint64_t rate, burst, link_free, stall;
    uint64_t sent, due; /* due: 0 none under way */
    uint64_t took_bytes, chunk_at;
    struct r2_rate_stamp stamp;
    struct r2_pathrate pr;
    struct r2_grey g, sibling;
    struct r2_trial trial;
};

static struct sim s;
static uint64_t now;

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static bool doubted(void)
{
    return s.g.factor < R2_GREY_FULL || r2_pathrate_rate(&s.pr) < s.g.best_rate / 2;
}

/* As send.c's leave_to_faster where the sibling has 25 MB/s: it would be done in less than half of
 * the time. */
static bool left_to_sibling(void)
{
    uint64_t rate = r2_pathrate_rate(&s.pr);

    return rate && rate < 12 * MB;
}

static void send_chunk(void)
{
    uint64_t saved = s.burst * SEC / s.rate;

    s.link_free = later(s.link_free, now - saved) + CHUNK * SEC / s.rate;
    s.due = later(s.link_free, now + 50 * US) + s.stall;
    s.sent = now;
    r2_trial_took(&s.trial, doubted(), s.chunk_at, CHUNK, now);
    s.chunk_at = now;
    r2_pathrate_on_send(&s.pr, CHUNK, now, &s.stamp);
}

static void acked(void)
{
    r2_pathrate_on_ack(&s.pr, CHUNK, &s.stamp, s.sent, now);
    r2_grey_moved(&s.g, CHUNK, now - s.sent, false, now);
    r2_grey_chunk(&s.g, CHUNK, now - s.sent, r2_pathrate_rate(&s.pr), now);
    s.due = 0;
    s.took_bytes += CHUNK;
}

/* Runs for `ns`, or until the judge changes the path's factor. Returns the time spent. */
static uint64_t run(uint64_t ns, bool until_judged)
{
    uint64_t from = now, one = CHUNK * SEC / (25 * MB) / STEP * STEP;
    struct r2_grey *all[] = {&s.g, &s.sibling};

    while (now - from < ns) {
        uint64_t changed = 0;

        now += STEP;
        if (s.due && s.due <= now)
            acked();
        if (!s.due && (!left_to_sibling() || r2_trial_may(&s.trial, doubted(), s.chunk_at, now)))
            send_chunk();
        if (now % one == 0) {
            r2_grey_moved(&s.sibling, CHUNK, one, false, now);
            r2_grey_chunk(&s.sibling, CHUNK, one, 25 * MB, now);
        }
        if (now % (25 * MS) == 0)
            changed = r2_grey_judge(all, 2, now);
        if (until_judged && changed & 1)
            break;
    }
    CHECK_EQ(s.sibling.factor, R2_GREY_FULL);
    return now - from;
}

static void set_up(uint64_t burst)
{
    memset(&s, 0, sizeof(s));
    now = 50 * SEC;
    s.rate = 25 * MB;
    s.burst = burst;
    s.link_free = now;
    r2_pathrate_init(&s.pr);
    r2_grey_init(&s.g, 0);
    r2_grey_init(&s.sibling, 0);
    run(2 * SEC, false);
    CHECK_EQ(s.g.factor, R2_GREY_FULL);
    CHECK_GT(s.g.best_rate, 18 * MB);
}

TEST(fallen_is_named)
{
    static const uint64_t bursts[] = {0, 16 * 1024, 80 * 1024, 256 * 1024};

    for (unsigned i = 0; i < 4; i++) {
        uint64_t named, well;

        set_up(bursts[i]);
        s.rate = 2500 * 1000;
        named = run(3 * SEC, true);
        CHECK_LE(named, SEC);
        CHECK_EQ(s.g.why, R2_GREY_SLOW);
        run(3 * SEC, false); /* and it stays so, whatever is saved up between trials */
        CHECK_EQ(s.g.why, R2_GREY_SLOW);
        s.rate = 25 * MB;
        well = run(3 * SEC, true);
        while (s.g.factor < R2_GREY_FULL && well < 3 * SEC)
            well += run(3 * SEC, true);
        CHECK_LE(well, 1500 * MS);
        CHECK_EQ(s.g.why, R2_GREY_WELL);
        printf("# burst %" PRIu64 ": named after %" PRIu64 " ms, well after %" PRIu64 " ms\n",
               bursts[i], named / MS, well / MS);
    }
}

/* Some chunks are late because a thread was kept waiting. The path is soon in use again, and
 * nothing is said. */
TEST(moment_is_over)
{
    for (uint64_t burst = 0; burst <= 80 * 1024; burst += 80 * 1024) {
        uint64_t before;

        set_up(burst);
        s.stall = 40 * MS;
        for (int i = 0; i < 60 && !left_to_sibling(); i++)
            run(10 * MS, false);
        CHECK(left_to_sibling());
        s.stall = 0;
        run(400 * MS, false);
        CHECK(!left_to_sibling());
        before = s.took_bytes;
        run(SEC, false);
        CHECK_GE(s.took_bytes - before, 20 * MB);
        CHECK_EQ(s.g.factor, R2_GREY_FULL);
    }
}

/* What trials cost others: the path is busy for a small part of the time only. */
TEST(trials_are_short)
{
    uint64_t busy = 0, from;

    set_up(80 * 1024);
    s.rate = 2500 * 1000;
    run(2 * SEC, false);
    for (from = now; now - from < 5 * SEC;) {
        run(STEP, false);
        busy += s.due ? STEP : 0;
    }
    CHECK_LE(busy, 5 * SEC / 2);
    CHECK_GE(busy, 5 * SEC / 10);
}

static void one_by_one(struct r2_pathrate *pr, unsigned n, uint64_t took, uint64_t apart)
{
    for (unsigned i = 0; i < n; i++) {
        struct r2_rate_stamp stamp;

        r2_pathrate_on_send(pr, CHUNK, now, &stamp);
        r2_pathrate_on_ack(pr, CHUNK, &stamp, now, now + took);
        now += took + apart;
    }
}

static void expect_rate(const struct r2_pathrate *pr, uint64_t least, uint64_t most)
{
    uint64_t rate = r2_pathrate_rate(pr);

    CHECK_MSG(rate >= least && rate <= most, "rate %" PRIu64, rate);
}

/* A path that has been measured slow has room for one chunk; its rate is found again all the same,
 * but pauses between chunks say nothing. */
TEST(one_at_a_time)
{
    struct r2_pathrate pr;

    now = 50 * SEC;
    r2_pathrate_init(&pr);
    one_by_one(&pr, 60, 2600 * US, 50 * US);
    expect_rate(&pr, 21 * MB, 26 * MB);
    one_by_one(&pr, 6, 26 * MS, 50 * US);
    expect_rate(&pr, 2 * MB, 5 * MB);
    one_by_one(&pr, 400, 50 * US, 30 * MS); /* what a shaper saves up meanwhile */
    expect_rate(&pr, 2 * MB, 5 * MB);
    one_by_one(&pr, 12, 2600 * US, 50 * US);
    expect_rate(&pr, 21 * MB, 26 * MB);
    one_by_one(&pr, 200, 2600 * US, 7 * MS); /* waiting for others is not being slow */
    expect_rate(&pr, 21 * MB, 26 * MB);
}
