/* engine/core/health: the table (every pair of state and event, and every walk up to a length),
 * ramp, back-off, and flap damping (rung 1). */
#include "check.h"

#include <math.h>

#include "engine/core/damp.h"
#include "engine/core/health.h"

#define MS UINT64_C(1000000)
#define SEC UINT64_C(1000000000)

static const struct {
    enum r2_health_state state;
    enum r2_health_event event;
    enum r2_health_state next;
} rows[] = {
#define R2_NEXT(state, event, next) {R2_HEALTH_##state, R2_HEALTH_EV_##event, R2_HEALTH_##next},
#include "engine/core/health.def"
};
#define ROWS (int)(sizeof(rows) / sizeof(rows[0]))

/* Every pair does what its row says, and only what a row says; no pair has two. */
TEST(every_pair)
{
    int used = 0;

    for (int s = 0; s < R2_HEALTH_STATES; s++) {
        for (int e = 0; e < R2_HEALTH_EVENTS; e++) {
            struct r2_health h = {.state = (enum r2_health_state)s, .since_ns = 5};
            int row = -1;

            for (int i = 0; i < ROWS; i++) {
                if ((int)rows[i].state != s || (int)rows[i].event != e)
                    continue;
                CHECK_EQ(row, -1);
                row = i;
            }
            CHECK_EQ(r2_health_step(&h, (enum r2_health_event)e, 9), row >= 0);
            CHECK_EQ(h.since_ns, row >= 0 ? 9 : 5);
            CHECK_EQ(h.state, row >= 0 ? (int)rows[row].next : s);
            used += row >= 0;
        }
    }
    CHECK_EQ(used, ROWS);
}

/* What the design promises, for every state and every sequence of up to 6 events. */
static void walk(enum r2_health_state s, int depth)
{
    for (int e = 0; e < R2_HEALTH_EVENTS && depth; e++) {
        enum r2_health_event ev = (enum r2_health_event)e;
        struct r2_health h = {.state = s};
        bool moved = r2_health_step(&h, ev, 9);
        enum r2_health_state n = h.state;

        CHECK(moved || n == s);

        if (ev == R2_HEALTH_EV_DRAIN)
            CHECK_EQ(n, R2_HEALTH_DRAINED); /* the operator's word always counts */
        if (s == R2_HEALTH_DRAINED && ev != R2_HEALTH_EV_UNDRAIN)
            CHECK_EQ(n, R2_HEALTH_DRAINED); /* ... until the operator takes it back */
        if (s == R2_HEALTH_DAMPED && ev != R2_HEALTH_EV_DRAIN && ev != R2_HEALTH_EV_REUSE)
            CHECK_EQ(n, R2_HEALTH_DAMPED);
        if (ev == R2_HEALTH_EV_LOSS)
            CHECK(!r2_health_carries(n)); /* what is lost is not used */
        if (ev == R2_HEALTH_EV_SUPPRESS && s != R2_HEALTH_DRAINED)
            CHECK_EQ(n, R2_HEALTH_DAMPED);
        if (ev == R2_HEALTH_EV_SILENCE)
            CHECK_EQ(r2_health_carries(n), r2_health_carries(s)); /* silence is not failure */
        if (!r2_health_carries(s) && r2_health_carries(n))
            CHECK_EQ(ev, R2_HEALTH_EV_PROVEN); /* only test chunks let data in again */
        if (n == R2_HEALTH_HEALTHY && s != R2_HEALTH_HEALTHY && s != R2_HEALTH_SUSPECT)
            CHECK(s == R2_HEALTH_RAMPING || s == R2_HEALTH_UNREACHED);
        if (n == R2_HEALTH_UNREACHED && s != n) /* a failure is not forgotten */
            CHECK(ev == R2_HEALTH_EV_CLOSE && r2_health_carries(s));
        walk(n, depth - 1);
    }
}

TEST(every_walk)
{
    for (int s = 0; s < R2_HEALTH_STATES; s++)
        walk((enum r2_health_state)s, 6);
}

/* From everywhere there is a way back to healthy. */
TEST(a_way_back)
{
    for (int s = 0; s < R2_HEALTH_STATES; s++) {
        bool seen[R2_HEALTH_STATES] = {false};

        seen[s] = true;
        for (int round = 0; round < R2_HEALTH_STATES; round++) {
            for (int i = 0; i < ROWS; i++) {
                if (seen[rows[i].state])
                    seen[rows[i].next] = true;
            }
        }
        CHECK(seen[R2_HEALTH_HEALTHY]);
        CHECK(r2_health_word((enum r2_health_state)s)[0] != '?');
    }
    CHECK(!r2_health_carries((enum r2_health_state)99));
}

TEST(ramp)
{
    uint32_t last = 0;

    CHECK_EQ(r2_health_ramp(0, 0), 1000);
    CHECK_EQ(r2_health_ramp(3 * SEC, 3 * SEC), 1000);
    CHECK_EQ(r2_health_ramp(UINT64_MAX, 3 * SEC), 1000);
    CHECK_EQ(r2_health_ramp(0, 3 * SEC), 50);
    for (uint64_t t = 0; t <= 3 * SEC; t += 10 * MS) {
        uint32_t w = r2_health_ramp(t, 3 * SEC);

        CHECK(w >= last && w >= 50 && w <= 1000);
        CHECK_LE(w - last, 60);
        last = w;
    }
    CHECK(r2_health_ramp(1500 * MS, 3 * SEC) > 500 && r2_health_ramp(1500 * MS, 3 * SEC) < 550);
    CHECK_EQ(r2_health_ramp(1, 2), 50); /* shorter than its own unit: no division by 0 */
}

TEST(backoff)
{
    uint64_t last = 0;

    for (unsigned n = 0; n < 100; n++) {
        uint64_t wait = r2_health_backoff(n, SEC);

        CHECK(wait >= last && wait >= 10 * MS && wait <= SEC);
        last = wait;
    }
    CHECK_EQ(last, SEC);
    CHECK_EQ(r2_health_backoff(0, MS), MS);
    CHECK_EQ(r2_health_backoff(UINT32_MAX, SEC), SEC);
}

/* Never more than what was to be waited, never less than four fifths, and all of that range. */
TEST(jitter)
{
    static const uint64_t waits[] = {0, 1, 4, 10 * MS, SEC, UINT64_MAX};

    for (unsigned i = 0; i < sizeof(waits) / sizeof(*waits); i++) {
        uint64_t least = UINT64_MAX, most = 0, low = waits[i] - waits[i] / 5;

        for (int n = 0; n < 10000; n++) {
            uint64_t wait = r2_health_jitter(waits[i], check_random());

            CHECK(wait <= waits[i] && wait >= low);
            least = wait < least ? wait : least;
            most = wait > most ? wait : most;
        }
        CHECK_LE(least - low, waits[i] / 50);
        CHECK_LE(waits[i] - most, waits[i] / 50);
    }
}

static const struct r2_damp_rules rules = {
    .suppress = 3000, .reuse = 1000, .half_life_ns = 60 * SEC, .max_suppress_ns = 600 * SEC};

TEST(damp_rare)
{
    struct r2_damp d = {0};

    for (int i = 1; i <= 200; i++) /* once a minute is no flapping */
        CHECK(!r2_damp_failure(&d, &rules, (uint64_t)i * 60 * SEC));
    CHECK_LE(r2_damp_penalty(&d, &rules, 200 * 60 * SEC), 2000);
    CHECK_EQ(r2_damp_reuse_at(&d, &rules, 200 * 60 * SEC), 0);
    CHECK(!r2_damp_tick(&d, &rules, 10000 * 60 * SEC));
}

TEST(damp_flaps)
{
    struct r2_damp d = {0};
    uint64_t now = SEC, until;
    int n = 0;

    while (!r2_damp_failure(&d, &rules, now)) {
        n++;
        now += 200 * MS;
    }
    CHECK_EQ(n, 3); /* the fourth one is too many */
    until = r2_damp_reuse_at(&d, &rules, now);
    CHECK(until > now + 100 * SEC && until < now + 130 * SEC);
    CHECK(!r2_damp_tick(&d, &rules, until - MS));
    CHECK(d.suppressed);
    CHECK(r2_damp_tick(&d, &rules, until + MS));
    CHECK(!d.suppressed && !r2_damp_tick(&d, &rules, until + 2 * MS));
    /* It is remembered: fewer failures suppress it the next time, and for longer than a first
     * failure would. */
    now = until + MS;
    CHECK(!r2_damp_failure(&d, &rules, now));
    CHECK(!r2_damp_failure(&d, &rules, now + 1));
    CHECK(r2_damp_failure(&d, &rules, now + 2));
}

TEST(damp_ceiling)
{
    struct r2_damp d = {0};
    uint64_t now = SEC, until;

    for (int i = 0; i < 100000; i++, now += 10 * MS) {
        r2_damp_failure(&d, &rules, now);
        CHECK(!r2_damp_tick(&d, &rules, now + 1) || i < 3);
    }
    until = r2_damp_reuse_at(&d, &rules, now);
    CHECK(until > now + 590 * SEC && until <= now + 601 * SEC);
    CHECK_LE(r2_damp_penalty(&d, &rules, now), 1000 * 1024);
}

/* A longest time in which not even one failure fades bounds the suppression, and does not switch
 * it off. */
TEST(damp_short)
{
    const struct r2_damp_rules r = {
        .suppress = 3000, .reuse = 1000, .half_life_ns = 60 * SEC, .max_suppress_ns = 5 * SEC};
    struct r2_damp d = {0};

    for (int i = 0; i < 3; i++)
        CHECK(!r2_damp_failure(&d, &r, 1 * SEC));
    CHECK(r2_damp_failure(&d, &r, 1 * SEC));
    CHECK_EQ(r2_damp_reuse_at(&d, &r, 2 * SEC), 6 * SEC);
    CHECK(!r2_damp_tick(&d, &r, 6 * SEC - 1));
    CHECK(!r2_damp_failure(&d, &r, 4 * SEC)); /* it is; the time begins again */
    CHECK(!r2_damp_tick(&d, &r, 9 * SEC - 1));
    CHECK(r2_damp_tick(&d, &r, 9 * SEC));
    CHECK_LE(r2_damp_penalty(&d, &r, 9 * SEC), 4000);
    CHECK(r2_damp_failure(&d, &r, 10 * SEC)); /* it is not forgotten */
}

TEST(damp_words)
{
    const struct r2_damp_rules never = {.suppress = 0, .reuse = 1, .half_life_ns = SEC};
    struct r2_damp d = {0};

    for (int i = 0; i < 5; i++)
        r2_damp_failure(&d, &rules, SEC);
    CHECK(d.suppressed);
    r2_damp_release(&d);
    CHECK(!d.suppressed);
    CHECK_GT(r2_damp_penalty(&d, &rules, SEC), 4900); /* the memory stays */
    CHECK(r2_damp_failure(&d, &rules, SEC));
    r2_damp_clear(&d);
    CHECK(!d.suppressed);
    CHECK_EQ(r2_damp_penalty(&d, &rules, SEC), 0);
    for (int i = 0; i < 100; i++)
        CHECK(!r2_damp_failure(&d, &never, SEC));
}

/* Random failures: the penalty is the sum of what is left of each, as a naive sum has it. */
TEST(damp_model)
{
    for (unsigned long round = 0; round < check_rounds(200); round++) {
        struct r2_damp_rules r = {.suppress = 1 + (uint32_t)check_below(9000),
                                  .reuse = 1 + (uint32_t)check_below(1000),
                                  .half_life_ns = 1 + check_below(100 * SEC),
                                  .max_suppress_ns = UINT64_C(1) << 60};
        struct r2_damp d = {0};
        uint64_t at[64], now = 1;

        for (int i = 0; i < 64; i++) {
            double sum = 0;

            now += check_below(20 * SEC);
            at[i] = now;
            r2_damp_failure(&d, &r, now);
            for (int k = 0; k <= i; k++)
                sum += 1000 * exp2(-(double)(now - at[k]) / (double)r.half_life_ns);
            CHECK_LE(fabs(sum - d.penalty), 1e-6 * sum + 1e-6);
            if (check_below(2) && d.suppressed) {
                uint64_t until = r2_damp_reuse_at(&d, &r, now);

                CHECK(until >= now);
                if (until < now + 30 * SEC) {
                    now = until + MS;
                    CHECK(r2_damp_tick(&d, &r, now));
                }
            }
        }
    }
}
