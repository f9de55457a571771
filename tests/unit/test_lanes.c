/* How many streams of a path carry (engine/core/lanes.h). Rung 1; over a link that loses
 * segments: tests/py/test_lab_lanes.py. */
#include "check.h"
#include "engine/core/lanes.h"

#define MS UINT64_C(1000000)

static struct r2_lanes l;
static uint64_t now, sent, resent;

static void begin(unsigned most)
{
    now = 5;
    sent = resent = 0;
    r2_lanes_init(&l, most);
    CHECK_EQ(l.now, most ? most : 1);
    CHECK(!r2_lanes_sample(&l, sent, resent, now));
}

/* A heartbeat's worth of traffic, `ppm` of it sent again. */
static bool beat(uint64_t segments, uint64_t ppm)
{
    now += 100 * MS;
    sent += segments;
    resent += segments * ppm / 1000000;
    return r2_lanes_sample(&l, sent, resent, now);
}

static int beats_until_changed(uint64_t segments, uint64_t ppm, int most)
{
    for (int i = 1; i <= most; i++) {
        if (beat(segments, ppm)) {
            return i;
        }
    }
    return 0;
}

TEST(losses_halve)
{
    begin(4);
    CHECK_LT(beats_until_changed(5000, 20000, 100), 4);
    CHECK_EQ(l.now, 2);
    CHECK_LT(beats_until_changed(5000, 20000, 100), 4);
    CHECK_EQ(l.now, 1);
    CHECK_EQ(beats_until_changed(5000, 20000, 1000), 0); /* one is the least */
    CHECK_EQ(l.now, 1);
    begin(3);
    CHECK(beats_until_changed(5000, 20000, 100));
    CHECK_EQ(l.now, 1);
}

TEST(few_losses_change_nothing)
{
    begin(4);
    CHECK_EQ(beats_until_changed(5000, 1000, 1000), 0); /* rare */
    begin(4);
    CHECK_EQ(beats_until_changed(50, 20000, 1000), 0); /* many of few: two in a sample */
    CHECK_EQ(l.now, 4);
}

TEST(one_more_after_a_while)
{
    int first, second;

    begin(4);
    CHECK(beats_until_changed(5000, 20000, 100));
    CHECK_EQ(l.now, 2);
    first = beats_until_changed(5000, 0, 1000);
    CHECK_EQ(l.now, 3);
    CHECK(first >= 100 && first < 110); /* 10 s of traffic */
    CHECK(beats_until_changed(5000, 20000, 100));
    CHECK_EQ(l.now, 1);
    second = beats_until_changed(5000, 0, 1000);
    CHECK_EQ(l.now, 2);
    CHECK(second >= 200 && second < 210); /* that was no good: twice as long */
    for (int i = 0; i < 2; i++) {
        CHECK(beats_until_changed(5000, 0, 1000));
    }
    CHECK_EQ(l.now, 4);
    CHECK_EQ(beats_until_changed(5000, 0, 3000), 0); /* not beyond what there is */
}

TEST(the_wait_has_an_end)
{
    begin(2);
    for (int i = 0; i < 20; i++) {
        CHECK(beats_until_changed(5000, 20000, 100));
        CHECK_EQ(l.now, 1);
        CHECK(beats_until_changed(5000, 0, 7000));
        CHECK_EQ(l.now, 2);
    }
    CHECK_EQ(l.wait, R2_LANES_WAIT_MOST);
}

/* What an idle path does not lose says nothing. */
TEST(idle_time_does_not_count)
{
    begin(4);
    CHECK(beats_until_changed(5000, 20000, 100));
    now += 3600000 * MS;
    CHECK(!beat(5000, 0));
    CHECK_EQ(l.now, 2);
    CHECK_EQ(beats_until_changed(0, 0, 1000), 0);
}

/* Counters that begin anew belong to another endpoint. */
TEST(counters_begin_anew)
{
    begin(4);
    for (int i = 0; i < 10; i++) {
        CHECK(!beat(5000, 0));
    }
    sent = 4000;
    resent = 400;
    now += 300 * MS;
    CHECK(!r2_lanes_sample(&l, sent, resent, now));
    CHECK_EQ(l.now, 4);
}
