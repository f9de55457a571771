/* engine/ranges against a bitmap (rung 1): exhaustive on 8 places, random on many. */
#include "check.h"

#include "engine/core/ranges.h"

#define PLACES 96

/* Everything a set can be asked must agree with the bitmap, and its form must be canonical. */
static void expect(const struct r2_ranges *r, const bool *map, unsigned places)
{
    uint64_t total = 0;
    unsigned runs = 0;

    for (unsigned i = 0; i < places; i++) {
        total += map[i];
        runs += map[i] && (i == 0 || !map[i - 1]);
    }
    CHECK_EQ(r->bytes, total);
    CHECK_EQ(r->count, runs);
    for (unsigned i = 0, at = 0; i < runs; i++) {
        while (!map[at]) {
            at++;
        }
        CHECK_EQ(r2_ranges_at(r, i)->off, at);
        while (at < places && map[at]) {
            at++;
        }
        CHECK_EQ(r2_ranges_at(r, i)->end, at);
    }
}

static void expect_queries(const struct r2_ranges *r, const bool *map, unsigned places)
{
    for (unsigned off = 0; off <= places; off++) {
        unsigned gap = off;
        uint64_t sum = 0;

        while (gap < places && map[gap]) {
            gap++;
        }
        CHECK_EQ(r2_ranges_first_gap(r, off), gap);
        for (unsigned end = off; end <= places; end++) {
            uint64_t gap_off = off;
            uint64_t gap_end = 0;
            unsigned stop = gap;

            CHECK_EQ(r2_ranges_overlap(r, off, end - off), sum);
            CHECK_EQ(r2_ranges_contains(r, off, end - off), sum == end - off);
            while (stop < end && !map[stop]) {
                stop++;
            }
            CHECK_EQ(r2_ranges_gap(r, &gap_off, end, &gap_end), gap < end);
            if (gap < end) {
                CHECK_EQ(gap_off, gap);
                CHECK_EQ(gap_end, stop);
            } else {
                CHECK_EQ(gap_off, off);
            }
            sum += end < places && map[end];
        }
    }
}

/* All 256 sets of 8 places x all ranges x add and remove. */
TEST(exhaustive)
{
    for (unsigned set = 0; set < 256; set++) {
        for (unsigned op = 0; op < 2 * 9 * 9; op++) {
            bool map[8];
            struct r2_ranges r;
            unsigned off = op / 2 % 9;
            unsigned end = op / 18;

            if (end < off) {
                continue;
            }
            r2_ranges_init(&r);
            for (unsigned i = 0; i < 8; i++) {
                map[i] = set >> i & 1;
                if (map[i]) {
                    CHECK_EQ(r2_ranges_add(&r, i, 1), 0);
                }
            }
            if (op < 2) {
                expect_queries(&r, map, 8);
            }
            CHECK_EQ(op % 2 ? r2_ranges_remove(&r, off, end - off)
                            : r2_ranges_add(&r, off, end - off),
                     0);
            for (unsigned i = off; i < end; i++) {
                map[i] = op % 2 == 0;
            }
            expect(&r, map, 8);
            r2_ranges_free(&r);
        }
    }
}

TEST(random)
{
    for (unsigned long n = 0; n < check_rounds(40); n++) {
        bool map[PLACES] = {false};
        struct r2_ranges r;

        r2_ranges_init(&r);
        for (int i = 0; i < 400; i++) {
            unsigned off = (unsigned)check_below(PLACES);
            unsigned len = (unsigned)check_below(i % 3 ? 4 : 30);
            bool add = check_below(2);

            len = len < PLACES - off ? len : PLACES - off;
            CHECK_EQ(add ? r2_ranges_add(&r, off, len) : r2_ranges_remove(&r, off, len), 0);
            for (unsigned k = off; k < off + len; k++) {
                map[k] = add;
            }
            expect(&r, map, PLACES);
        }
        expect_queries(&r, map, PLACES);
        r2_ranges_free(&r);
    }
}

TEST(extremes)
{
    uint64_t off = 0;
    uint64_t end = 0;
    struct r2_ranges r;

    r2_ranges_init(&r);
    CHECK_EQ(r2_ranges_add(&r, UINT64_MAX, 1), -EINVAL);
    CHECK_EQ(r2_ranges_add(&r, UINT64_MAX - 1, 1), 0);
    CHECK_EQ(r2_ranges_add(&r, 10, UINT64_MAX), -EINVAL);
    CHECK_EQ(r2_ranges_remove(&r, 10, UINT64_MAX), -EINVAL);
    CHECK(!r2_ranges_contains(&r, UINT64_MAX, 2));
    CHECK(r2_ranges_contains(&r, UINT64_MAX - 1, 1));
    CHECK(!r2_ranges_contains(&r, UINT64_MAX - 2, 1));
    CHECK(r2_ranges_first_gap(&r, UINT64_MAX - 1) == UINT64_MAX);
    CHECK(r2_ranges_first_gap(&r, UINT64_MAX) == UINT64_MAX);
    CHECK(r2_ranges_gap(&r, &off, UINT64_MAX, &end));
    CHECK(off == 0 && end == UINT64_MAX - 1);
    CHECK_EQ(r2_ranges_add(&r, 0, UINT64_MAX - 1), 0);
    CHECK_EQ(r.count, 1);
    CHECK(r.bytes == UINT64_MAX);
    CHECK_EQ(r2_ranges_overlap(&r, 5, UINT64_MAX), (int64_t)(UINT64_MAX - 5));
    CHECK_EQ(r2_ranges_remove(&r, 1, UINT64_MAX - 2), 0);
    CHECK_EQ(r.bytes, 2);
    CHECK_EQ(r2_ranges_reserve(&r, SIZE_MAX), -ENOMEM);
    r2_ranges_free(&r);
}

TEST(reserve)
{
    struct r2_ranges r;

    r2_ranges_init(&r);
    CHECK_EQ(r2_ranges_add(&r, 7, 1), 0);
    CHECK_EQ(r2_ranges_reserve(&r, 1000), 0);
    CHECK_GE(r.cap, 1000);
    CHECK(r2_ranges_contains(&r, 7, 1));
    for (unsigned i = 0; i < 999; i++) {
        CHECK_EQ(r2_ranges_add(&r, 10 + 2 * i, 1), 0);
    }
    CHECK_EQ(r.count, 1000);
    r2_ranges_free(&r);
    CHECK_EQ(r.count, 0);
    CHECK_EQ(r2_ranges_add(&r, 1, 1), 0);
    r2_ranges_free(&r);
}
