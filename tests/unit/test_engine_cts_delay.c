/* The engine as receiver, over a scripted transport (rung 2): clear-to-sends that are not urgent
 * wait for other frames of their path, and not for long. What it cannot
 * prove: that they save a call on a socket (tests/bench). */

#include "await.h"
#include "recv_bed.h"

#define TURNS 6
#define SMALL 64
#define STREAK 8
#define SOON_MS 2   /* when somebody polls */
#define TICK_MS 300 /* when nobody does */

static int flushes(void)
{
    return atomic_load(&a->flushes);
}

/* Frames were handed over at once by what the macro's caller does. The peer's tick may do so as
 * well, at any moment: what is wanted must be seen in most turns. */
static bool at_once(struct r2_req **req, uint8_t *to)
{
    int before = flushes();

    *req = irecv(to, MSG);
    return flushes() != before;
}

static void arrive(uint64_t seq)
{
    for (uint64_t off = 0; off < MSG; off += CHUNK)
        chunk(a, seq, off);
    fake_pull(a);
}

/* Nothing else is to come: the sender waits for the word. */
TEST(first_word_leaves_at_once)
{
    struct r2_req *req;

    begin(1);
    for (uint64_t seq = 0; seq < 3; seq++) {
        CHECK(at_once(&req, sink + seq * MSG));
        CHECK_GE(remote_hear_ms(a, R2_F_CTS, NULL, 0, 0), 0);
        arrive(seq);
        CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    }
    CHECK_MEM(sink, source, 3 * MSG);
    remote_end(&r);
}

/* ... those behind it go along with the acknowledgement of what it brings. */
TEST(goes_along)
{
    int held = 0, cts, ack;
    struct r2_req *first, *second;

    for (int turn = 0; turn < TURNS; turn++) {
        struct r2_bulk c;
        int before;

        begin(1);
        CHECK(at_once(&first, sink));
        remote_forget(a);
        for (uint64_t off = 0; off < MSG - CHUNK; off += CHUNK)
            chunk(a, 0, off);
        CHECK_EQ(claim_chunk(a, 0, MSG - CHUNK, &c), 0);
        remote_forget(a);
        before = flushes();
        second = irecv(sink + MSG, MSG);
        if (flushes() == before) {
            CHECK(remote_place(a, &c, source));
            CHECK(flushes() != before);
            held += flushes() == before + 1;
        } else {
            CHECK(remote_place(a, &c, source));
        }
        cts = remote_hear_ms(a, R2_F_CTS, NULL, 0, 0);
        ack = remote_hear_ms(a, R2_F_ACK, NULL, 0, 0);
        CHECK_GE(cts, 0);
        CHECK_GT(ack, cts);
        CHECK_EQ(remote_test(first, REMOTE_WAIT_MS, NULL), 1);
        arrive(1);
        CHECK_EQ(remote_test(second, REMOTE_WAIT_MS, NULL), 1);
        CHECK_MEM(sink, source, 2 * MSG);
        remote_end(&r);
    }
    CHECK_GT(held, TURNS / 2);
}

/* Whoever polls lets it go when it has waited long enough; with nobody polling the peer's tick. */
TEST(does_not_wait_long)
{
    struct r2_req *first, *second, *third;
    int soon = 0;

    for (int turn = 0; turn < TURNS; turn++) {
        int before;

        begin(1);
        CHECK(at_once(&first, sink));
        before = flushes();
        second = irecv(sink + MSG, MSG);
        if (flushes() == before) {
            await_nap();
            remote_test(first, 0, NULL);
            soon += flushes() != before;
        }
        fake_pass_ms(60); /* the first heartbeat is said at the first tick */
        fake_pull(a);
        before = flushes();
        third = irecv(sink + 2 * MSG, MSG);
        FAKE_AWAIT(TICK_MS, flushes() != before);
        remote_forget(a);
        for (uint64_t seq = 0; seq < 3; seq++)
            arrive(seq);
        CHECK_EQ(remote_test(first, REMOTE_WAIT_MS, NULL), 1);
        CHECK_EQ(remote_test(second, REMOTE_WAIT_MS, NULL), 1);
        CHECK_EQ(remote_test(third, REMOTE_WAIT_MS, NULL), 1);
        remote_end(&r);
    }
    CHECK_GT(soon, TURNS / 2);
}

static struct r2_req *small_ones(uint64_t from, uint64_t to)
{
    struct r2_req *req = NULL;

    for (uint64_t seq = from; seq < to; seq++) {
        req = irecv(sink, MSG);
        CHECK_EQ(remote_eager(a, &r, seq, source, SMALL), 0);
        fake_pull(a);
        CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    }
    return req;
}

static void large(uint64_t seq)
{
    for (uint64_t off = 0; off < MSG; off += CHUNK) {
        struct r2_bulk c = remote_chunk(&r, seq, off, CHUNK, MSG);

        CHECK_EQ(fake_claim(a, &c), 0);
        CHECK(remote_place(a, &c, source));
    }
    fake_pull(a);
}

/* A sender of small messages does not wait for the word, and then a large one does. */
TEST(after_small_messages)
{
    struct r2_req *req;
    int held = 0;

    for (int turn = 0; turn < TURNS; turn++) {
        begin(1);
        small_ones(0, STREAK - 1);
        CHECK(at_once(&req, sink)); /* not enough of them yet */
        CHECK_EQ(remote_eager(a, &r, STREAK - 1, source, SMALL), 0);
        fake_pull(a);
        CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
        held += !at_once(&req, sink);
        CHECK_GE(remote_hear(a, R2_F_CTS, NULL, 0), 0);
        large(STREAK);
        CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
        CHECK(at_once(&req, sink));
        large(STREAK + 1);
        CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
        remote_end(&r);
    }
    CHECK_GT(held, TURNS / 2);
}

int main(int argc, char **argv)
{
    remote_engine(1, "R2CCL_HEARTBEAT=60s");
    return check_main(argc, argv);
}
