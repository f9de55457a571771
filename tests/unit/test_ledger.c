/* engine/ledger (rung 1): one behaviour after the other. The random model is in
 * test_ledger_model.c. */
#include "check.h"

#include "engine/core/ledger.h"

#define KIB 1024

struct reports {
    unsigned count;
    struct r2_send_report list[64];
};

static void collect(void *arg, const struct r2_send_report *report)
{
    struct reports *r = arg;

    CHECK_LT(r->count, 64);
    r->list[r->count++] = *report;
}

static struct r2_chunk next(struct r2_send_ledger *l, uint32_t max, uint16_t path, uint32_t gen)
{
    struct r2_chunk c;

    CHECK(r2_send_next(l, max, path, gen, 1000 + l->next_id, &c));
    return c;
}

static void expect_chunk(struct r2_chunk c, uint64_t off, uint32_t len)
{
    CHECK_EQ(c.off, off);
    CHECK_EQ(c.len, len);
}

static void expect_none(struct r2_send_ledger *l)
{
    struct r2_chunk c;

    CHECK(r2_send_idle(l));
    CHECK(!r2_send_next(l, 1 << 20, 0, 1, 0, &c));
}

/* Two neighbours are lost, one of them has a copy under way: what is repeated ends at its border.
 */
TEST(send_cut_at_a_copy)
{
    struct r2_send_ledger l;
    struct r2_chunk c, copy;

    for (int which = 0; which < 3; which++) {
        r2_send_init(&l, 3 * KIB);
        for (int i = 0; i < 3; i++) {
            c = next(&l, KIB, 0, 1);
            expect_chunk(c, (uint64_t)i * KIB, KIB);
            CHECK_EQ(r2_send_released(&l, c.off, c.len, 0, 1), 0);
        }
        CHECK(!r2_send_doubled(&l));
        CHECK(r2_send_again(&l, (uint32_t)which, 1, 1, 0, &copy));
        expect_chunk(copy, (uint64_t)which * KIB, KIB);
        CHECK_EQ(r2_send_path_down(&l, 0, 1, NULL), 3 * KIB);
        CHECK(r2_send_doubled(&l)); /* until its own path is down */
        if (which)                  /* before the copy */
            expect_chunk(next(&l, 8 * KIB, 1, 1), 0, (uint32_t)which * KIB);
        expect_chunk(next(&l, 512, 1, 1), (uint64_t)which * KIB, 512); /* pieces of its own bytes */
        expect_chunk(next(&l, 8 * KIB, 1, 1), (uint64_t)which * KIB + 512, 512);
        if (which < 2)
            expect_chunk(next(&l, 8 * KIB, 1, 1), (uint64_t)(which + 1) * KIB,
                         (uint32_t)(2 - which) * KIB);
        expect_none(&l);
        r2_send_free(&l);
        CHECK(!l.copies); /* the next message in its place does not look for any */
    }
}

TEST(send_plain)
{
    struct reports got = {0};
    struct r2_rate_stamp stamp = {.delivered = 77, .clean = true};
    struct r2_send_ledger l;
    struct r2_chunk c;

    r2_send_init(&l, 1000);
    CHECK(!r2_send_idle(&l) && !r2_send_complete(&l));
    CHECK(!r2_send_next(&l, 127, 3, 9, 0, &c));
    c = next(&l, 300, 3, 9); /* 300 is no multiple of 128 */
    expect_chunk(c, 0, 256);
    r2_send_stamp(&l, &c, &stamp);
    expect_chunk(next(&l, 512, 4, 1), 256, 512);
    expect_chunk(next(&l, 231, 3, 9), 768, 128);
    expect_chunk(next(&l, 104, 3, 9), 896, 104); /* the message's end needs no alignment */
    expect_none(&l);
    CHECK_EQ(r2_send_ack(&l, 0, 256, collect, &got), 256);
    CHECK_EQ(got.count, 1);
    CHECK_EQ(got.list[0].path, 3);
    CHECK_EQ(got.list[0].gen, 9);
    CHECK_EQ(got.list[0].bytes, 256);
    CHECK_EQ(got.list[0].stamp.delivered, 77);
    CHECK_EQ(got.list[0].t_sent_ns, 1000);
    CHECK(got.list[0].complete && got.list[0].stamp.clean);
    CHECK_EQ(r2_send_ack(&l, 0, 256, collect, &got), 0);
    CHECK_EQ(got.count, 1);
    CHECK_EQ(r2_send_ack_all(&l, collect, &got), 744);
    CHECK_EQ(got.count, 4);
    CHECK(!r2_send_complete(&l));
    CHECK_EQ(r2_send_released(&l, 0, 256, 3, 9), 0);
    CHECK_EQ(r2_send_released(&l, 0, 256, 3, 9), -ENOENT);
    CHECK_EQ(r2_send_released(&l, 256, 512, 3, 1), -ENOENT);
    CHECK_EQ(r2_send_released(&l, 256, 512, 4, 2), -ENOENT);
    CHECK_EQ(r2_send_released(&l, 256, 256, 4, 1), -ENOENT);
    CHECK_EQ(r2_send_released(&l, 256, 512, 4, 1), 0);
    CHECK_EQ(r2_send_released(&l, 768, 128, 3, 9), 0);
    CHECK(!r2_send_complete(&l));
    CHECK_EQ(r2_send_released(&l, 896, 104, 3, 9), 0);
    CHECK(r2_send_complete(&l));
    r2_send_free(&l);
}

TEST(send_partial_acks)
{
    struct reports got = {0};
    struct r2_send_ledger l;

    r2_send_init(&l, 4 * KIB);
    next(&l, 2 * KIB, 0, 1);
    next(&l, 2 * KIB, 1, 1);
    CHECK_EQ(r2_send_ack(&l, 1024, 2048, collect, &got), 2048); /* half of each */
    CHECK_EQ(got.count, 2);
    CHECK_EQ(got.list[0].bytes, 1024);
    CHECK_EQ(got.list[1].bytes, 1024);
    CHECK(!got.list[0].complete && !got.list[1].complete);
    CHECK_EQ(r2_send_ack(&l, 0, 2048, collect, &got), 1024);
    CHECK_EQ(got.count, 3);
    CHECK_EQ(got.list[2].path, 0);
    CHECK_EQ(got.list[2].bytes, 1024);
    CHECK(got.list[2].complete);
    CHECK_EQ(r2_send_path_down(&l, 1, 1, NULL), 1024); /* exactly what is missing */
    expect_chunk(next(&l, 1 << 20, 0, 1), 3072, 1024);
    r2_send_free(&l);
}

TEST(send_bad_acks)
{
    struct r2_send_ledger l;

    r2_send_init(&l, 1000);
    CHECK_EQ(r2_send_ack(&l, 0, 128, NULL, NULL), -EPROTO); /* never handed out */
    CHECK_EQ(r2_send_ack_all(&l, NULL, NULL), -EPROTO);
    next(&l, 512, 0, 1);
    CHECK_EQ(r2_send_ack(&l, 0, 640, NULL, NULL), -EPROTO);
    CHECK_EQ(r2_send_ack(&l, 1, 127, NULL, NULL), -EPROTO);
    CHECK_EQ(r2_send_ack(&l, 0, 100, NULL, NULL), -EPROTO);
    CHECK_EQ(r2_send_ack(&l, UINT64_MAX - 127, 128, NULL, NULL), -EPROTO);
    CHECK_EQ(r2_send_ack(&l, 128, UINT64_MAX - 127, NULL, NULL), -EPROTO);
    CHECK_EQ(r2_send_ack(&l, 1024, 128, NULL, NULL), -EPROTO);
    CHECK_EQ(r2_send_ack(&l, 0, 0, NULL, NULL), 0);
    CHECK_EQ(l.acked.bytes, 0);
    CHECK_EQ(r2_send_ack(&l, 128, 128, NULL, NULL), 128);
    CHECK_EQ(l.acked.bytes, 128);
    r2_send_free(&l);
}

TEST(send_path_down)
{
    struct r2_send_replay replayed = {.bytes = 5, .chunks = 1};
    struct reports got = {0};
    struct r2_send_ledger l;

    r2_send_init(&l, 8 * KIB);
    for (uint16_t i = 0; i < 4; i++) {
        next(&l, KIB, i % 2, 3);
    }
    CHECK_EQ(r2_send_waiting_bytes(&l), 4 * KIB);
    CHECK_EQ(r2_send_path_down(&l, 0, 2, &replayed), 0); /* an older generation */
    CHECK_EQ(r2_send_path_down(&l, 7, 9, &replayed), 0);
    CHECK_EQ(r2_send_path_down(&l, 0, 3, &replayed), 2 * KIB);
    CHECK_EQ(r2_send_path_down(&l, 0, 3, &replayed), 0);
    CHECK_EQ(replayed.bytes, 5 + 2 * KIB);
    CHECK_EQ(replayed.chunks, 1 + 2);
    CHECK_EQ(r2_send_waiting_bytes(&l), 6 * KIB);
    expect_chunk(next(&l, 512, 1, 3), 0, 512);       /* lowest first, before anything new */
    expect_chunk(next(&l, 4 * KIB, 1, 3), 512, 512); /* not across what is in flight */
    CHECK_EQ(r2_send_path_down(&l, 1, 4, NULL), 3 * KIB);
    /* An acknowledgement over any path takes bytes out of the queue; lost ones report nothing. */
    CHECK_EQ(r2_send_ack(&l, 1024, 1024, collect, &got), 1024);
    CHECK_EQ(got.count, 0);
    expect_chunk(next(&l, 8 * KIB, 2, 1), 0, 1024);
    expect_chunk(next(&l, 8 * KIB, 2, 1), 2048, 2048);
    expect_chunk(next(&l, 8 * KIB, 2, 1), 4096, 4096);
    CHECK_EQ(r2_send_ack_all(&l, collect, &got), 7 * KIB);
    CHECK_EQ(got.count, 3);
    CHECK(!r2_send_complete(&l)); /* the dead lanes still read */
    CHECK_EQ(r2_send_released(&l, 0, 1024, 2, 1), 0);
    CHECK_EQ(r2_send_released(&l, 2048, 2048, 2, 1), 0);
    CHECK_EQ(r2_send_released(&l, 4096, 4096, 2, 1), 0);
    for (uint16_t i = 0; i < 4; i++) {
        CHECK(!r2_send_complete(&l));
        CHECK_EQ(r2_send_released(&l, i * KIB, KIB, i % 2, 3), 0);
    }
    CHECK_EQ(r2_send_released(&l, 0, 512, 1, 3), 0);
    CHECK_EQ(r2_send_released(&l, 512, 512, 1, 3), 0);
    CHECK(r2_send_complete(&l));
    r2_send_free(&l);
}

TEST(send_empty)
{
    struct reports got = {0};
    struct r2_send_ledger l;

    r2_send_init(&l, 0);
    CHECK(!r2_send_idle(&l) && !r2_send_complete(&l));
    CHECK_EQ(r2_send_ack_all(&l, NULL, NULL), -EPROTO);
    expect_chunk(next(&l, 0, 0, 1), 0, 0);
    expect_none(&l);
    CHECK_EQ(r2_send_path_down(&l, 0, 1, NULL), 0);
    CHECK(!r2_send_idle(&l));
    expect_chunk(next(&l, KIB, 1, 1), 0, 0);
    CHECK_EQ(r2_send_ack(&l, 0, 0, collect, &got), 0);
    CHECK_EQ(r2_send_ack_all(&l, collect, &got), 0);
    CHECK_EQ(got.count, 1);
    CHECK_EQ(got.list[0].path, 1);
    CHECK(got.list[0].complete);
    expect_none(&l);
    CHECK(!r2_send_complete(&l));
    CHECK_EQ(r2_send_released(&l, 0, 0, 0, 1), 0);
    CHECK_EQ(r2_send_released(&l, 0, 0, 1, 1), 0);
    CHECK(r2_send_complete(&l));
    CHECK_EQ(r2_send_path_down(&l, 1, 1, NULL), 0);
    CHECK(r2_send_complete(&l) && r2_send_idle(&l));
    r2_send_free(&l);
}

/* Many chunks, acknowledged in a wild order, with several losses: arrays grow and shrink. */
TEST(send_many)
{
    const uint64_t total = 2000 * 128 + 5;
    struct r2_send_ledger l;
    uint64_t acked = 0;

    r2_send_init(&l, total);
    for (unsigned i = 0; i < 2000; i++) {
        expect_chunk(next(&l, 128, i % 3, 1), i * 128ull, 128);
    }
    expect_chunk(next(&l, 128, 0, 1), 2000 * 128, 5);
    for (unsigned i = 0; i < 2000; i++) {
        CHECK_EQ(r2_send_released(&l, i * 128ull, 128, i % 3, 1), 0);
    }
    CHECK_EQ(r2_send_released(&l, 2000 * 128, 5, 0, 1), 0);
    for (unsigned i = 0; i < 2000; i += 2) {
        acked += (uint64_t)r2_send_ack(&l, i * 1234ull % 2000 * 128, 128, NULL, NULL);
    }
    CHECK_EQ(l.acked.bytes, acked);
    for (uint16_t path = 0; path < 3; path++) {
        r2_send_path_down(&l, path, 1, NULL);
    }
    CHECK_EQ(l.count, 0);
    CHECK_EQ(r2_send_waiting_bytes(&l), total - acked);
    while (!r2_send_idle(&l)) {
        struct r2_chunk c = next(&l, 1 << 20, 0, 2);

        CHECK(r2_ranges_overlap(&l.acked, c.off, c.len) == 0);
        CHECK_EQ(r2_send_released(&l, c.off, c.len, 0, 2), 0);
    }
    CHECK_EQ(r2_send_ack_all(&l, NULL, NULL), (int64_t)(total - acked));
    CHECK(r2_send_complete(&l));
    r2_send_free(&l);
}

/* Offsets beyond 4 GiB. */
TEST(send_huge)
{
    const uint64_t total = (UINT64_C(1) << 40) + 1;
    struct r2_send_ledger l;
    struct r2_chunk c;

    r2_send_init(&l, total);
    for (int i = 0; i < 256; i++) {
        c = next(&l, UINT32_MAX, 0, 1);
        CHECK_EQ(c.len, UINT32_MAX - 127);
        CHECK_EQ(r2_send_released(&l, c.off, c.len, 0, 1), 0);
        CHECK_EQ(r2_send_ack(&l, c.off, c.len, NULL, NULL), c.len);
    }
    c = next(&l, UINT32_MAX, 0, 1);
    expect_chunk(c, UINT64_C(256) * (UINT32_MAX - 127), 256 * 128 + 1);
    expect_none(&l);
    r2_send_free(&l);
}

/* ---- Receiver ---------------------------------------------------------------------------- */

TEST(recv_plain)
{
    struct r2_recv_ledger l;

    r2_recv_init(&l, 2000);
    CHECK_EQ(r2_recv_claim(&l, 0, 128, 0, 1, 0), -EPROTO); /* the total comes first */
    CHECK_EQ(r2_recv_set_total(&l, 2001), -EMSGSIZE);
    CHECK_EQ(r2_recv_set_total(&l, 1000), 0);
    CHECK_EQ(r2_recv_set_total(&l, 1000), 0);
    CHECK_EQ(r2_recv_set_total(&l, 999), -EPROTO);
    CHECK(!r2_recv_complete(&l));
    CHECK_EQ(r2_recv_claim(&l, 512, 488, 1, 1, 2), 0);
    CHECK_EQ(r2_recv_claim(&l, 0, 512, 0, 1, 0), 0);
    CHECK_EQ(r2_recv_claim(&l, 0, 512, 0, 1, 1), -EBUSY);
    CHECK_EQ(r2_recv_done(&l, 0, 512, 1, 1), -ENOENT);
    CHECK_EQ(r2_recv_done(&l, 0, 512, 0, 2), -ENOENT);
    CHECK_EQ(r2_recv_done(&l, 0, 256, 0, 1), -ENOENT);
    CHECK_EQ(r2_recv_done(&l, 512, 488, 1, 1), 0);
    CHECK_EQ(r2_recv_done(&l, 512, 488, 1, 1), -ENOENT);
    CHECK_EQ(r2_recv_claim(&l, 512, 488, 2, 1, 0), 1);
    CHECK_EQ(r2_recv_claim(&l, 640, 128, 2, 1, 0), 1); /* part of what is done */
    CHECK_EQ(r2_ranges_first_gap(&l.done, 0), 0);
    CHECK(r2_recv_writing(&l));
    CHECK_EQ(r2_recv_done(&l, 0, 512, 0, 1), 0);
    CHECK_EQ(r2_ranges_first_gap(&l.done, 0), 1000);
    CHECK_EQ(l.done.bytes, 1000);
    CHECK(r2_recv_complete(&l) && !r2_recv_writing(&l));
    r2_recv_free(&l);
}

TEST(recv_overlaps)
{
    struct r2_recv_ledger l;

    r2_recv_init(&l, 4096);
    CHECK_EQ(r2_recv_set_total(&l, 4096), 0);
    CHECK_EQ(r2_recv_claim(&l, 1024, 1024, 0, 1, 0), 0);
    CHECK_EQ(r2_recv_claim(&l, 896, 256, 1, 1, 0), -EBUSY);
    CHECK_EQ(r2_recv_claim(&l, 1920, 256, 1, 1, 0), -EBUSY);
    CHECK_EQ(r2_recv_claim(&l, 0, 4096, 1, 1, 0), -EBUSY);
    CHECK_EQ(r2_recv_claim(&l, 1152, 128, 1, 1, 0), -EBUSY);
    CHECK_EQ(r2_recv_claim(&l, 896, 128, 1, 1, 0), 0); /* neighbours do not overlap */
    CHECK_EQ(r2_recv_claim(&l, 2048, 128, 1, 1, 1), 0);
    CHECK_EQ(r2_recv_done(&l, 1024, 1024, 0, 1), 0);
    CHECK_EQ(r2_recv_claim(&l, 1024, 2048, 2, 1, 0), -EBUSY); /* done, claimed and open */
    CHECK_EQ(r2_recv_claim(&l, 1536, 1024, 2, 1, 0), -EBUSY);
    CHECK_EQ(r2_recv_release(&l, 2048, 128, 1, 2), -ENOENT);
    CHECK_EQ(r2_recv_release(&l, 2048, 128, 1, 1), 0);
    CHECK_EQ(r2_recv_claim(&l, 1536, 1024, 2, 1, 0), -EBUSY); /* partly done */
    CHECK_EQ(r2_recv_claim(&l, 2048, 2048, 2, 1, 0), 0);
    CHECK_EQ(l.done.bytes, 1024);
    r2_recv_free(&l);
}

TEST(recv_bad_claims)
{
    struct r2_recv_ledger l;

    r2_recv_init(&l, 1000);
    CHECK_EQ(r2_recv_set_total(&l, 1000), 0);
    CHECK_EQ(r2_recv_claim(&l, 1, 127, 0, 1, 0), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 0, 127, 0, 1, 0), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 0, 0, 0, 1, 0), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 896, 128, 0, 1, 0), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 1024, 128, 0, 1, 0), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, UINT64_MAX - 127, 128, 0, 1, 0), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 128, UINT32_MAX, 0, 1, 0), -EPROTO);
    CHECK(!r2_recv_writing(&l));
    CHECK_EQ(r2_recv_claim(&l, 896, 104, 0, 1, 0), 0);
    r2_recv_free(&l);
}

TEST(recv_empty)
{
    struct r2_recv_ledger l;

    r2_recv_init(&l, 100);
    CHECK(!r2_recv_complete(&l));
    CHECK_EQ(r2_recv_set_total(&l, 0), 0);
    CHECK(r2_recv_complete(&l));
    CHECK_EQ(r2_recv_claim(&l, 0, 0, 0, 1, 0), 1);
    CHECK_EQ(r2_recv_claim(&l, 0, 100, 0, 1, 0), -EPROTO);
    r2_recv_free(&l);
    r2_recv_init(&l, 0);
    CHECK_EQ(r2_recv_set_total(&l, 1), -EMSGSIZE);
    CHECK_EQ(r2_recv_set_total(&l, 0), 0);
    CHECK(r2_recv_complete(&l));
    r2_recv_free(&l);
}

struct walk {
    unsigned count;
    unsigned stop_after;
    struct r2_range list[16];
};

static bool walk_one(void *arg, uint64_t off, uint64_t len)
{
    struct walk *w = arg;

    CHECK_LT(w->count, 16);
    w->list[w->count++] = (struct r2_range){off, off + len};
    return w->count != w->stop_after;
}

TEST(recv_walks)
{
    struct walk w = {0};
    struct r2_recv_ledger l;

    r2_recv_init(&l, 8192);
    CHECK_EQ(r2_recv_set_total(&l, 4000), 0);
    for (unsigned i = 0; i < 3; i++) {
        CHECK_EQ(r2_recv_claim(&l, 512 + 1024 * i, 256, (uint16_t)(i % 2), 5 + i, 0), 0);
    }
    for (unsigned i = 0; i < 3; i++) {
        CHECK_EQ(r2_recv_done(&l, 512 + 1024 * i, 256, (uint16_t)(i % 2), 5 + i), 0);
    }
    r2_recv_arrived(&l, walk_one, &w);
    CHECK_EQ(w.count, 3);
    CHECK_EQ(w.list[2].off, 512 + 2048);
    CHECK_EQ(w.list[2].end, 768 + 2048);
    w = (struct walk){.stop_after = 1};
    r2_recv_arrived(&l, walk_one, &w);
    CHECK_EQ(w.count, 1);
    r2_recv_free(&l);
}
