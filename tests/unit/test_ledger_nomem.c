/* engine/ledger when memory runs out (rung 1): a call that fails has changed nothing, and what must
 * happen when a path fails needs no memory. The ledger is compiled in here with an allocator that
 * fails on demand. */
#include "check.h"

#include <stdlib.h>

static bool alloc_forbidden; /* a call that must not need memory is running */
static unsigned alloc_fail;  /* of 100 */
static unsigned long alloc_failed;

static void *test_realloc(void *p, size_t size)
{
    CHECK(!alloc_forbidden);
    if (check_below(100) < alloc_fail) {
        alloc_failed++;
        return NULL;
    }
    return realloc(p, size);
}

#define realloc test_realloc
#include "../../net_plugin/engine/core/ledger.c"
#include "../../net_plugin/engine/core/ranges.c"
#undef realloc

#define UNITS 400
#define NO_MEMORY_NEEDED(call)                                                                     \
    do {                                                                                           \
        alloc_forbidden = true;                                                                    \
        call;                                                                                      \
        alloc_forbidden = false;                                                                   \
    } while (0)

static void expect_same(const struct r2_ranges *a, const struct r2_ranges *b)
{
    CHECK_EQ(a->bytes, b->bytes);
    CHECK_EQ(a->count, b->count);
    for (uint32_t i = 0; i < a->count; i++) {
        CHECK_EQ(r2_ranges_at(a, i)->off, r2_ranges_at(b, i)->off);
        CHECK_EQ(r2_ranges_at(a, i)->end, r2_ranges_at(b, i)->end);
    }
}

/* A copy with memory of its own, for comparison. */
static void ranges_copy(struct r2_ranges *to, const struct r2_ranges *from)
{
    unsigned fail = alloc_fail;

    alloc_fail = 0;
    r2_ranges_init(to);
    for (uint32_t i = 0; i < from->count; i++) {
        const struct r2_range *r = r2_ranges_at(from, i);

        CHECK_EQ(r2_ranges_add(to, r->off, r->end - r->off), 0);
    }
    alloc_fail = fail;
}

static void sender_step(struct r2_send_ledger *l)
{
    struct r2_ranges queue;
    struct r2_ranges acked;
    struct r2_chunk c;
    uint64_t next = l->next;
    uint32_t count = l->count;
    uint64_t off = check_below(l->next / 128 + 1) * 128;
    uint64_t len = l->next - off < 256 ? l->next - off : 128 * (1 + check_below(2));
    uint16_t path = (uint16_t)check_below(4);

    ranges_copy(&queue, &l->queue);
    ranges_copy(&acked, &l->acked);
    switch (check_below(8)) {
    case 0 ... 3:
        if (!r2_send_next(l, 128 * (uint32_t)(1 + check_below(3)), path, 1, 0, &c)) {
            CHECK_EQ(l->next, next);
            CHECK_EQ(l->count, count);
            expect_same(&l->queue, &queue);
        } else if (check_below(4)) {
            NO_MEMORY_NEEDED(r2_send_released(l, c.off, c.len, path, 1));
        }
        break;
    case 4 ... 6:
        if (r2_send_ack(l, off, len, NULL, NULL) < 0) {
            CHECK_EQ(l->count, count);
            expect_same(&l->queue, &queue);
            expect_same(&l->acked, &acked);
        } else {
            CHECK(r2_ranges_contains(&l->acked, off, len));
        }
        break;
    default:
        if (check_below(4) == 0) {
            NO_MEMORY_NEEDED(r2_send_path_down(l, path, 1, NULL));
        }
    }
    r2_ranges_free(&queue);
    r2_ranges_free(&acked);
}

TEST(sender)
{
    alloc_failed = 0;
    for (unsigned long n = 0; n < check_rounds(30); n++) {
        struct r2_send_ledger l;

        alloc_fail = 10 + (unsigned)check_below(80);
        r2_send_init(&l, UNITS * 128);
        for (int i = 0; i < 1500; i++) {
            sender_step(&l);
        }
        /* Nothing was forgotten: what is left can still be sent. */
        alloc_fail = 0;
        NO_MEMORY_NEEDED(for (uint16_t p = 0; p < 4; p++) { r2_send_path_down(&l, p, 1, NULL); });
        CHECK_EQ(l.acked.bytes + r2_send_waiting_bytes(&l), UNITS * 128);
        r2_send_free(&l);
    }
    CHECK_GT(alloc_failed, 0);
}

static void receiver_step(struct r2_recv_ledger *l)
{
    uint64_t off = check_below(UNITS) * 128;
    uint32_t count = l->count;
    uint64_t done = l->done.bytes;

    if (check_below(2) || l->count == 0) {
        if (r2_recv_claim(l, off, 128, 0, 1, 0, false) != 0) {
            CHECK_EQ(l->count, count);
            CHECK_EQ(l->done.bytes, done);
        } else {
            CHECK_EQ(l->count, count + 1);
        }
    } else {
        struct r2_recv_claim c = *r2_recv_claim_at(l, (uint32_t)check_below(l->count));
        int err = 1;

        if (check_below(3)) {
            NO_MEMORY_NEEDED(err = r2_recv_done(l, c.off, c.len, c.path, c.gen));
            CHECK_EQ(l->done.bytes, done + c.len);
        } else {
            NO_MEMORY_NEEDED(err = r2_recv_release(l, c.off, c.len, c.path, c.gen));
            CHECK_EQ(l->done.bytes, done);
        }
        CHECK_EQ(err, 0);
    }
}

TEST(receiver)
{
    alloc_failed = 0;
    for (unsigned long n = 0; n < check_rounds(30); n++) {
        struct r2_recv_ledger l;

        alloc_fail = 10 + (unsigned)check_below(80);
        r2_recv_init(&l, UNITS * 128);
        CHECK_EQ(r2_recv_set_total(&l, UNITS * 128), 0);
        for (int i = 0; i < 1500; i++) {
            receiver_step(&l);
        }
        r2_recv_free(&l);
    }
    CHECK_GT(alloc_failed, 0);
}
