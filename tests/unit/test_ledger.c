/* engine/ledger (rung 1): bounds that a random model does not reach. All else is
 * test_ledger_model.c's. */
#include "check.h"

#include "engine/core/ledger.h"

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

TEST(send_bad_acks)
{
    struct r2_send_ledger l;

    r2_send_init(&l, 1000);
    CHECK_EQ(r2_send_ack(&l, 0, 128, NULL, NULL), -EPROTO); /* never handed out */
    CHECK_EQ(r2_send_ack(&l, 0, l.total, NULL, NULL), -EPROTO);
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

TEST(recv_bad_claims)
{
    struct r2_recv_ledger l;

    r2_recv_init(&l, 1000);
    CHECK_EQ(r2_recv_set_total(&l, 1000), 0);
    CHECK_EQ(r2_recv_claim(&l, 1, 127, 0, 1, 0, false), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 0, 127, 0, 1, 0, false), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 0, 0, 0, 1, 0, false), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 896, 128, 0, 1, 0, false), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 1024, 128, 0, 1, 0, false), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, UINT64_MAX - 127, 128, 0, 1, 0, false), -EPROTO);
    CHECK_EQ(r2_recv_claim(&l, 128, UINT32_MAX, 0, 1, 0, false), -EPROTO);
    CHECK(!r2_recv_writing(&l));
    CHECK_EQ(r2_recv_claim(&l, 896, 104, 0, 1, 0, false), 0);
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
        CHECK_EQ(r2_recv_claim(&l, 512 + 1024 * i, 256, (uint16_t)(i % 2), 5 + i, 0, false), 0);
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
