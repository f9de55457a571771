/* engine/core/heartbeat (rung 1): deadlines that follow the round trips, and the limit per
 * process. */
#include "check.h"

#include "engine/core/heartbeat.h"

#define MS UINT64_C(1000000)
#define SEC UINT64_C(1000000000)

TEST(misses)
{
    CHECK_EQ(r2_hb_misses(100 * MS, 3, 0, 0), 3);
    CHECK_EQ(r2_hb_misses(100 * MS, 3, 200000, 50000), 3);
    CHECK_EQ(r2_hb_misses(100 * MS, 3, 100 * MS, 50 * MS), 3); /* 300 ms: as set */
    CHECK_EQ(r2_hb_misses(100 * MS, 3, 100 * MS, 51 * MS), 4);
    CHECK_EQ(r2_hb_misses(100 * MS, 3, 600 * MS, 0), 6);
    CHECK_EQ(r2_hb_misses(100 * MS, 3, 60 * SEC, 0), 30); /* bounded */
    CHECK_EQ(r2_hb_misses(100 * MS, 3, 0, 60 * SEC), 30);
    CHECK_EQ(r2_hb_misses(100 * MS, 3, UINT64_MAX, UINT64_MAX), 30);
    CHECK_EQ(r2_hb_misses(0, 3, SEC, 0), 3);
    for (int i = 0; i < 20000; i++) { /* never below what is set, never above its bound, monotone */
        uint64_t interval = 1 + check_below(SEC), srtt = check_random() >> check_below(64);
        uint64_t var = check_random() >> check_below(64);
        int set = 1 + (int)check_below(100), got = r2_hb_misses(interval, set, srtt, var);

        CHECK(got >= set && got <= set * R2_HB_STRETCH);
        CHECK_LE(got, r2_hb_misses(interval, set, srtt < UINT64_MAX / 2 ? 2 * srtt : srtt, var));
        CHECK_LE(r2_hb_misses(2 * interval, set, srtt, var), got);
    }
}

/* A path goes dead at time 0, at every phase of its heartbeats, while bytes are out. The timer
 * ticks every 25 ms, or later for what else there is to do, or when r2_hb_next says. When is that
 * known? */
static void dead_path(uint64_t phase, bool traffic, bool hasty, uint64_t *known, uint64_t *waited)
{
    struct r2_hb_watch w = {
        .interval = 100 * MS, .misses = 3, .srtt = MS / 5, .var = MS / 10, .hasty = hasty};
    uint64_t base = 10 * SEC, looked = base - phase, sent = looked, next = 0;
    bool answered = true; /* the last one was, before */

    for (uint64_t t = base + check_below(25 * MS);; t += next < 25 * MS ? next : 25 * MS) {
        enum r2_hb_look look;

        t += traffic || next < 33 * MS ? 0 : check_below(8 * MS);
        w.look_age = t - looked;
        w.beat_age = t - sent;
        w.quiet = traffic ? t - base + 1 : 0;
        look = r2_hb_look(&w);
        CHECK_LT(t, base + SEC);
        if (look != R2_HB_NOT_YET && answered) {
            w.asked = look == R2_HB_EARLY || w.asked;
            sent = looked = t;
            answered = false;
        } else if (look == R2_HB_DUE) {
            looked = t;
            if (++w.unanswered == w.misses) {
                *known = t - base;
                *waited = t - sent;
                return;
            }
        }
        w.look_age = t - looked;
        w.beat_age = t - sent;
        next = r2_hb_next(&w);
        CHECK(next > 0);
    }
}

TEST(along)
{
    struct r2_hb_watch w = {.interval = 1000 * MS, .misses = 3, .look_age = 499 * MS};

    CHECK_EQ(r2_hb_along(&w), R2_HB_NOT_YET);
    w.look_age = 500 * MS;
    CHECK_EQ(r2_hb_along(&w), R2_HB_ALONG);
    w.unanswered = 1; /* its next look is a judgement, and that keeps its time */
    CHECK_EQ(r2_hb_along(&w), R2_HB_NOT_YET);
}

TEST(dead_path)
{
    uint64_t sum[2] = {0};

    for (uint64_t phase = 0; phase < 100 * MS; phase += MS) {
        uint64_t known, waited;

        for (int hasty = 0; hasty < 2; hasty++) {
            dead_path(phase, true, hasty, &known, &waited);
            CHECK_LE(known, 307 * MS);
            CHECK_GE(known + 1, hasty ? 250 * MS : 275 * MS);
            CHECK_GE(waited, 250 * MS); /* as long as TCP needs to send a lost segment again */
            sum[hasty] += known;
        }
        dead_path(phase, false, true, &known, &waited);
        CHECK_GE(waited, 300 * MS);
        CHECK_LE(waited, 301 * MS); /* however late the looks before were */
        CHECK_LE(known, 433 * MS);
    }
    CHECK_LE(sum[0], 100 * 285 * MS);
    CHECK_LE(sum[1], 100 * 279 * MS);
}

/* A heartbeat that was sent before the silence began says nothing about it: its answer may have
 * been lost with the bytes' own. */
TEST(older_heartbeat)
{
    struct r2_hb_watch w = {.interval = 100 * MS,
                            .misses = 3,
                            .unanswered = 2,
                            .beat_age = 280 * MS,
                            .look_age = 80 * MS,
                            .quiet = 280 * MS};

    CHECK_EQ(r2_hb_look(&w), R2_HB_DUE);
    CHECK_EQ(r2_hb_next(&w), 0);
    w.quiet--;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    CHECK_EQ(r2_hb_next(&w), 20 * MS);
    w.look_age = 100 * MS;
    CHECK_EQ(r2_hb_look(&w), R2_HB_DUE);
    w.hasty = true; /* half an interval later nothing was under way any more */
    w.look_age = 80 * MS;
    w.beat_age = 255 * MS;
    w.quiet = 205 * MS;
    CHECK_EQ(r2_hb_look(&w), R2_HB_DUE);
    w.quiet--;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    w.beat_age = w.quiet = 249 * MS;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    CHECK_EQ(r2_hb_next(&w), MS);
    w.srtt = 30 * MS; /* lost once, it is answered after 260 ms */
    w.beat_age = w.quiet = 259 * MS;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    CHECK_EQ(r2_hb_next(&w), MS);
    w.srtt = 0;
    CHECK_EQ(r2_hb_look(&w), R2_HB_DUE);
    w.stalled = true;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    CHECK_EQ(r2_hb_next(&w), 20 * MS);
    w.stalled = false;
    w.look_age = w.beat_age = 10 * MS; /* it was answered: nothing is urgent any more */
    w.unanswered = 0;
    w.asked = true;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    CHECK(r2_hb_next(&w) == UINT64_MAX);
}

static struct r2_hb_watch later_by(struct r2_hb_watch w, uint64_t ns)
{
    w.beat_age += ns;
    w.look_age += ns;
    w.quiet += w.quiet ? ns : 0;
    return w;
}

/* What it says is when something happens. Of an overdue path nothing happens before; the early
 * question, which every pause of traffic would bring up, does not drive the timer. */
TEST(next_is_when)
{
    for (int i = 0; i < 100000; i++) {
        uint64_t interval = (5 + check_below(200)) * MS, next;
        struct r2_hb_watch w = {
            .interval = interval,
            .misses = 1 + (int)check_below(5),
            .unanswered = (int)check_below(5),
            .beat_age = check_below(6 * interval),
            .look_age = check_below(interval),
            .quiet = check_below(2) ? 1 + check_below(6 * interval) : 0,
            .asked = check_below(2),
            .hasty = check_below(2),
            .srtt = check_below(4) ? 0 : check_below(2 * interval),
            .var = check_below(4) ? 0 : check_below(interval),
        };
        struct r2_hb_watch then;

        next = r2_hb_next(&w);
        if (next == UINT64_MAX) {
            CHECK(!w.unanswered);
            continue;
        }
        then = later_by(w, next);
        CHECK_NE(r2_hb_look(&then), R2_HB_NOT_YET);
        if (w.unanswered && next) {
            then = later_by(w, check_below(next));
            CHECK_EQ(r2_hb_look(&then), R2_HB_NOT_YET);
        } else if (!w.unanswered) {
            CHECK_GE(next, interval / R2_HB_EARLY_STEPS);
        }
    }
}

/* Bytes that nobody acknowledges, while heartbeats are answered: one question more, no verdict. */
TEST(asks_once)
{
    struct r2_hb_watch w = {.interval = 100 * MS,
                            .misses = 3,
                            .beat_age = 60 * MS,
                            .look_age = 60 * MS,
                            .quiet = 30 * MS};

    CHECK_EQ(r2_hb_look(&w), R2_HB_EARLY);
    w.srtt = 20 * MS; /* a long way: 30 ms are nothing */
    w.var = 3 * MS;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    w.srtt = w.var = 0;
    w.asked = true;
    w.quiet = 50 * SEC;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    w.asked = false;
    w.unanswered = 1;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    w.unanswered = 0;
    w.quiet = 0;
    CHECK_EQ(r2_hb_look(&w), R2_HB_NOT_YET);
    w.look_age = 100 * MS;
    CHECK_EQ(r2_hb_look(&w), R2_HB_DUE);
}

static double per_second(const struct r2_hb_load *l, uint64_t active, uint64_t idle)
{
    return (double)l->active * 1e9 / (double)active + (double)l->idle * 1e9 / (double)idle;
}

TEST(limit)
{
    struct r2_hb_load l = {
        .active = 8, .idle = 8, .active_ns = 100 * MS, .idle_ns = SEC, .most = 1000};
    uint64_t active, idle;

    r2_hb_intervals(&l, &active, &idle);
    CHECK_EQ(active, 100 * MS);
    CHECK_EQ(idle, SEC);
    l.active = 50; /* the idle ones make room first: 500 + 1000 -> 500 + 500 */
    l.idle = 1000;
    r2_hb_intervals(&l, &active, &idle);
    CHECK_EQ(active, 100 * MS);
    CHECK_EQ(idle, 2 * SEC);
    l.active = 1024;
    l.idle = 0;
    r2_hb_intervals(&l, &active, &idle);
    CHECK(active > 1023 * MS && active < 1025 * MS);
    for (int i = 0; i < 20000; i++) {
        l = (struct r2_hb_load){.active = (unsigned)check_below(4000),
                                .idle = (unsigned)check_below(4000),
                                .active_ns = (1 + check_below(1000)) * MS,
                                .idle_ns = (1 + check_below(5000)) * MS,
                                .most = 1 + (unsigned)check_below(5000)};
        r2_hb_intervals(&l, &active, &idle);
        CHECK(active >= l.active_ns && idle >= l.idle_ns);
        CHECK_LE(per_second(&l, active, idle), (double)l.most * 1.001);
        if (active > l.active_ns && l.idle)
            CHECK_GE(idle, l.idle_ns * 4);
        if (per_second(&l, l.active_ns, l.idle_ns) <= l.most)
            CHECK(active == l.active_ns && idle == l.idle_ns);
    }
}
