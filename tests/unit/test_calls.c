/* What ranks have called, beside each other. Rung 1: pure. */
#include "comms/calls.h"

#include "check.h"

#define KIB UINT64_C(1024)

static struct r2_calls a, b;
static struct r2_calls_difference d;

/* The same call of both ranks. */
static void both(uint64_t number, uint64_t bytes, bool taken)
{
    r2_calls_add(&a, number, bytes, taken);
    r2_calls_add(&b, number, bytes, taken);
}

static void fresh(void)
{
    a = b = (struct r2_calls){0};
}

TEST(equal_calls_do_not_differ)
{
    fresh();
    CHECK(!r2_calls_differ(&a, &b, &d)); /* none */
    for (uint64_t n = 1; n < 40; n++) {
        both(2 * n, n * 100 * KIB, n > 2);
        CHECK(!r2_calls_differ(&a, &b, &d));
        r2_calls_add(&a, 2 * n + 1, KIB, n % 2); /* b has not come to it */
        CHECK(!r2_calls_differ(&a, &b, &d) && !r2_calls_differ(&b, &a, &d));
        r2_calls_add(&b, 2 * n + 1, KIB, n % 2);
    }
}

TEST(the_first_difference_is_named)
{
    fresh();
    both(1, 300 * KIB, true);
    r2_calls_add(&a, 2, 255 * KIB, false);
    r2_calls_add(&b, 2, 256 * KIB, true);
    both(3, 512 * KIB, true);
    both(4, KIB, false);
    CHECK(r2_calls_differ(&a, &b, &d));
    CHECK(d.number == 2 && d.taken_bytes == 256 * KIB && d.left_bytes == 255 * KIB && !d.first);
    CHECK(r2_calls_differ(&b, &a, &d));
    CHECK(d.number == 2 && d.taken_bytes == 256 * KIB && d.left_bytes == 255 * KIB && d.first);
}

/* The first one is forgotten, but not that one rank has more of them. */
TEST(a_difference_is_not_forgotten)
{
    fresh();
    r2_calls_add(&a, 1, 256 * KIB, true);
    r2_calls_add(&b, 1, 255 * KIB, false);
    for (uint64_t n = 2; n < 30; n++) {
        both(n, 512 * KIB, true);
        CHECK(r2_calls_differ(&a, &b, &d) && d.first);
    }
}

/* Sizes on one side of the limit are not compared: NCCL's may work all the same, and R2CCL finds
 * its own. */
TEST(only_who_has_it_counts)
{
    fresh();
    r2_calls_add(&a, 1, 4, false);
    r2_calls_add(&b, 1, 8, false);
    r2_calls_add(&a, 2, 512 * KIB, true);
    r2_calls_add(&b, 2, 513 * KIB, true);
    CHECK(!r2_calls_differ(&a, &b, &d));
}
