/* What ranks have called, beside each other. Rung 1. */
#include "comms/calls.h"

#include <pthread.h>
#include <string.h>

#include "check.h"

#define KIB UINT64_C(1024)

static struct r2_calls_log a, b;
static struct r2_calls_difference d;

static bool differ(const struct r2_calls_log *one, const struct r2_calls_log *other)
{
    struct r2_calls calls[2];

    CHECK(r2_calls_read(one, &calls[0]) && r2_calls_read(other, &calls[1]));
    return r2_calls_differ(&calls[0], &calls[1], &d);
}

/* The same call of both ranks. */
static void both(uint64_t number, uint64_t bytes, bool taken)
{
    r2_calls_note(&a, number, bytes, taken);
    r2_calls_note(&b, number, bytes, taken);
}

static void fresh(void)
{
    memset(&a, 0, sizeof(a));
    memset(&b, 0, sizeof(b));
}

TEST(equal_calls_do_not_differ)
{
    fresh();
    CHECK(!differ(&a, &b)); /* none */
    for (uint64_t n = 1; n < 40; n++) {
        both(2 * n, n * 100 * KIB, n > 2);
        CHECK(!differ(&a, &b));
        r2_calls_note(&a, 2 * n + 1, KIB, n % 2); /* b has not come to it */
        CHECK(!differ(&a, &b) && !differ(&b, &a));
        r2_calls_note(&b, 2 * n + 1, KIB, n % 2);
    }
}

/* A group that NCCL refused comes again in another way, and may be shorter. */
TEST(what_is_forgotten_does_not_differ)
{
    fresh();
    both(1, 300 * KIB, true);
    for (uint64_t n = 2; n < 5; n++)
        r2_calls_note(&b, n, R2_CALLS_GROUPED, false);
    r2_calls_note(&a, 2, 300 * KIB, true);
    CHECK(differ(&a, &b));
    r2_calls_forget(&b);
    r2_calls_note(&b, 2, 300 * KIB, true);
    r2_calls_note(&a, 3, 300 * KIB, true);
    CHECK(!differ(&a, &b) && !differ(&b, &a));
    r2_calls_note(&b, 3, 200 * KIB, false);
    CHECK(differ(&a, &b));
    CHECK(d.number == 3);
}

TEST(the_first_difference_is_named)
{
    fresh();
    both(1, 300 * KIB, true);
    r2_calls_note(&a, 2, 255 * KIB, false);
    r2_calls_note(&b, 2, 256 * KIB, true);
    both(3, 512 * KIB, true);
    both(4, KIB, false);
    CHECK(differ(&a, &b));
    CHECK(d.number == 2 && d.taken_bytes == 256 * KIB && d.left_bytes == 255 * KIB && !d.first);
    CHECK(differ(&b, &a));
    CHECK(d.number == 2 && d.taken_bytes == 256 * KIB && d.left_bytes == 255 * KIB && d.first);
}

/* The first one is forgotten, but not that one rank has more of them. */
TEST(a_difference_is_not_forgotten)
{
    fresh();
    r2_calls_note(&a, 1, 256 * KIB, true);
    r2_calls_note(&b, 1, 255 * KIB, false);
    for (uint64_t n = 2; n < 30; n++) {
        both(n, 512 * KIB, true);
        CHECK(differ(&a, &b) && d.first);
    }
}

/* Sizes on one side of the limit are not compared: NCCL's may work all the same, and R2CCL finds
 * its own. */
TEST(only_who_has_it_counts)
{
    fresh();
    r2_calls_note(&a, 1, 4, false);
    r2_calls_note(&b, 1, 8, false);
    r2_calls_note(&a, 2, 512 * KIB, true);
    r2_calls_note(&b, 2, 513 * KIB, true);
    CHECK(!differ(&a, &b));
}

#define NOTES 200000

static void *note_all(void *arg)
{
    (void)arg;
    for (uint64_t n = 1; n <= NOTES; n++)
        r2_calls_note(&a, n, 3 * n, true);
    return NULL;
}

/* What is read is whole. */
TEST(read_while_it_is_noted)
{
    struct r2_calls calls;
    pthread_t thread;

    fresh();
    CHECK_EQ(pthread_create(&thread, NULL, note_all, NULL), 0);
    while (r2_calls_count(&a) < NOTES) {
        if (!r2_calls_read(&a, &calls))
            continue;
        for (int i = 0; i < R2_CALLS; i++) {
            CHECK_EQ(calls.of[i].bytes, 3 * calls.of[i].number);
            CHECK_EQ(calls.of[i].taken, calls.of[i].number);
            CHECK(calls.of[i].number + (uint64_t)i == calls.of[0].number || !calls.of[i].number);
        }
    }
    pthread_join(thread, NULL);
}
