/* Injected faults (rung 1): what they allow to move, and when. */
#include "check.h"
#include "io/fault.h"
#include "util/clock.h"

#define NIC 3

static size_t allow(int dir, size_t want, uint64_t *retry)
{
    *retry = 0;
    return r2_fault_allow(NIC, dir, want, retry);
}

static void set(struct r2_fault f)
{
    r2_fault_set(NIC, &f);
}

static void text_is(const char *want)
{
    char text[80];

    r2_fault_text(NIC, text, sizeof(text));
    CHECK_STR(text, want);
}

TEST(after_operations)
{
    uint64_t retry;

    set((struct r2_fault){.kind = R2_SEG_FAULT_BLACKHOLE, .tx = true, .rx = true, .after_ops = 3});
    for (int i = 0; i < 2; i++) {
        r2_fault_op();
        CHECK_EQ(r2_fault_allow(NIC, R2_FAULT_TX, 1 << 20, &retry), 1 << 20);
        CHECK(!r2_fault_is(NIC, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX));
    }
    r2_fault_op();
    CHECK(r2_fault_is(NIC, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX));
    CHECK_EQ(r2_fault_allow(NIC, R2_FAULT_TX, 1, &retry), 0);
    r2_fault_clear(NIC);
    r2_fault_op();
    CHECK(r2_fault_none(NIC));
}

TEST(directions)
{
    uint64_t retry = 1;

    set((struct r2_fault){.kind = R2_SEG_FAULT_BLACKHOLE, .tx = true});
    CHECK_EQ(allow(R2_FAULT_TX, 100, &retry), 0);
    CHECK_EQ(retry, 0); /* not before a nudge */
    CHECK_EQ(allow(R2_FAULT_RX, 100, &retry), 100);
    CHECK_EQ(r2_fault_allow(NIC + 1, R2_FAULT_TX, 100, &retry), 100); /* another NIC */
    CHECK(r2_fault_is(NIC, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX));
    CHECK(!r2_fault_is(NIC, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_RX));
    CHECK(!r2_fault_is(NIC, R2_SEG_FAULT_ERROR, R2_FAULT_TX));
    text_is("blackhole tx");
    set((struct r2_fault){.kind = R2_SEG_FAULT_ERROR, .tx = true, .rx = true});
    CHECK_EQ(allow(R2_FAULT_RX, 100, &retry), 0);
    text_is("error both");
    r2_fault_clear(NIC);
    CHECK_EQ(allow(R2_FAULT_TX, 100, &retry), 100);
}

TEST(after_bytes)
{
    uint64_t retry;

    set((struct r2_fault){
        .kind = R2_SEG_FAULT_BLACKHOLE, .tx = true, .rx = true, .after_bytes = 1000});
    r2_fault_tick(NIC, r2_now_ns());
    text_is("blackhole both (armed)");
    CHECK_EQ(allow(R2_FAULT_TX, 600, &retry), 600);
    CHECK(!r2_fault_is(NIC, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX));
    CHECK(!r2_fault_tick(NIC, r2_now_ns()));
    CHECK_EQ(allow(R2_FAULT_RX, 600, &retry), 600);
    CHECK(r2_fault_tick(NIC, r2_now_ns())); /* it has begun; said once */
    CHECK(!r2_fault_tick(NIC, r2_now_ns()));
    CHECK_EQ(allow(R2_FAULT_TX, 1, &retry), 0);
    r2_fault_clear(NIC);
}

/* The time counts from when the fault strikes, not from the command. */
TEST(until_after_bytes)
{
    uint64_t before, retry;

    set((struct r2_fault){
        .kind = R2_SEG_FAULT_BLACKHOLE, .tx = true, .after_bytes = 100, .for_ns = R2_NS_PER_S});
    r2_fault_tick(NIC, r2_now_ns());
    CHECK(!r2_fault_tick(NIC, r2_now_ns() + 5 * R2_NS_PER_S));
    text_is("blackhole tx (armed)");
    before = r2_now_ns();
    allow(R2_FAULT_TX, 100, &retry);
    CHECK(r2_fault_tick(NIC, before));
    CHECK(!r2_fault_tick(NIC, before + R2_NS_PER_S - 1));
    text_is("blackhole tx");
    CHECK(r2_fault_tick(NIC, r2_now_ns() + R2_NS_PER_S));
    text_is("");
}

TEST(slow)
{
    uint64_t t0 = r2_now_ns(), retry, bytes = 0, paid;

    set((struct r2_fault){.kind = R2_SEG_FAULT_SLOW, .tx = true, .rate = 10 * 1000 * 1000});
    while (r2_now_ns() - t0 < 200 * R2_NS_PER_MS) {
        size_t n = allow(R2_FAULT_TX, 1 << 20, &retry);

        bytes += n;
        if (!n)
            CHECK_GT(retry, t0);
    }
    paid = (r2_now_ns() - t0) / 100;            /* 10 bytes per us */
    CHECK_LE(bytes, paid + 200 * 1000 + 65536); /* burst of 20 ms, one piece over */
    CHECK_GE(bytes, paid / 2);
    CHECK_EQ(allow(R2_FAULT_RX, 1 << 20, &retry), 1 << 20);
    text_is("slow 10000000 B/s tx");
    r2_fault_clear(NIC);
}

TEST(loss)
{
    uint64_t retry, now;

    set((struct r2_fault){.kind = R2_SEG_FAULT_LOSS, .tx = true, .rx = true, .loss_ppm = 1000000});
    CHECK_EQ(allow(R2_FAULT_TX, 100, &retry), 0); /* every piece is lost */
    now = r2_now_ns();
    CHECK_GT(retry, now);
    CHECK_LE(retry, now + 200 * R2_NS_PER_MS);
    set((struct r2_fault){.kind = R2_SEG_FAULT_LOSS, .tx = true, .rx = true, .loss_ppm = 0});
    for (int i = 0; i < 1000; i++) {
        size_t n = allow(R2_FAULT_RX, 100000, &retry);

        CHECK_GT(n, 0);
        CHECK_LE(n, 65536);
    }
    text_is("loss 0 ppm both");
    r2_fault_clear(NIC);
}

/* What was allowed and did not move is not counted: readers ask for all that they could take, and
 * find a few bytes or none. */
TEST(unmoved)
{
    uint64_t retry, moved = 0;

    set((struct r2_fault){.kind = R2_SEG_FAULT_SLOW, .rx = true, .rate = 10 * 1000 * 1000});
    for (int i = 0; i < 10000; i++) {
        size_t ok = allow(R2_FAULT_RX, 1 << 20, &retry);

        CHECK_GT(ok, 0);
        r2_fault_unmoved(NIC, R2_FAULT_RX, ok);
    }
    for (int i = 0; i < 10; i++) { /* nothing is gained by it: the burst is what it was */
        size_t ok = allow(R2_FAULT_RX, 1 << 20, &retry);

        moved += ok;
    }
    CHECK_LE(moved, 200 * 1000 + 2 * 65536);
    set((struct r2_fault){.kind = R2_SEG_FAULT_LOSS, .tx = true, .loss_ppm = 1000000});
    CHECK_EQ(allow(R2_FAULT_TX, 100, &retry), 0);
    set((struct r2_fault){.kind = R2_SEG_FAULT_BLACKHOLE, .tx = true, .after_bytes = 1000});
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(allow(R2_FAULT_TX, 900, &retry), 900);
        r2_fault_unmoved(NIC, R2_FAULT_TX, 900);
    }
    CHECK_EQ(allow(R2_FAULT_TX, 1000, &retry), 1000);
    CHECK_EQ(allow(R2_FAULT_TX, 1, &retry), 0);
    r2_fault_clear(NIC);
    r2_fault_unmoved(NIC, R2_FAULT_TX, 1);
}
