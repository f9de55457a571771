/* Messages whose numbers share a slot, over a scripted transport (rung 2): what is kept for one of
 * them says nothing about the other (invariant "full identity"). The test is the peer. What it
 * cannot prove: that sockets do as the script does. */
#include <errno.h>
#include <stdio.h>

#include "recv_bed.h"

static atomic_bool named; /* a warning has told which message */

__attribute__((format(printf, 5, 6))) static void hear_log(int level, unsigned long flags,
                                                           const char *file, int line,
                                                           const char *fmt, ...)
{
    char text[512];
    va_list args;

    (void)flags, (void)file, (void)line;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (level == R2_LOG_WARN && strstr(text, "message 0 of connection 77 comes as a small message"))
        atomic_store(&named, true);
}

static void whole(struct r2_req *req, size_t want)
{
    size_t size = 0;
    int rc = 0;

    for (int i = 0; i < 300 && rc == 0; i++) {
        fake_pull(a);
        rc = remote_test(req, 10, &size);
    }
    CHECK_EQ(rc, 1);
    CHECK_EQ(size, want);
}

/* A peer writes where it was not cleared to, a window behind where it was. */
TEST(window_of_receives)
{
    struct r2_req *req;
    struct r2_bulk c;

    begin(1);
    req = irecv(sink, MSG);
    c = remote_chunk(&r, R2_WINDOW, 0, CHUNK, MSG);
    CHECK_EQ(fake_claim(a, &c), -EPROTO);
    CHECK_EQ(remote_eager(a, &r, R2_WINDOW, source, 1000), -EPROTO);
    c = remote_chunk(&r, UINT64_C(1) << 32, 0, CHUNK, MSG);
    CHECK_EQ(fake_claim(a, &c), -EPROTO);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    CHECK_EQ(sink[0], 0);
    for (uint64_t off = 0; off < MSG; off += CHUNK)
        chunk(a, 0, off);
    whole(req, MSG);
    CHECK_MEM(sink, source, MSG);
    remote_end(&r);
}

#define SMALL 8192u /* what comes in chunks, and as a small message of that size */

static void half(uint64_t seq)
{
    struct r2_bulk c = remote_chunk(&r, seq, 0, SMALL / 2, SMALL);

    CHECK_EQ(fake_claim(a, &c), 0);
    CHECK(remote_place(a, &c, source));
}

/* The connection has failed: the receive that is posted, and any later one. */
static void broken(struct r2_req *req)
{
    struct r2_req *later = NULL;

    if (req)
        CHECK_EQ(remote_test(req, 0, NULL), -EPROTO);
    CHECK_EQ(r2_engine_irecv(r.conn, sink, MSG, 0, NULL, &later), -EPROTO);
    CHECK(remote_up(&r, 0)); /* another one would bring the same */
    remote_end(&r);
}

/* One message that is said as a small one and in chunks: each half could wait for the rest for
 * ever, whichever came first. */
TEST(both_ways)
{
    struct r2_req *req;
    struct r2_bulk c;

    begin(1); /* a chunk that is arriving just then */
    req = irecv(sink, MSG);
    c = remote_chunk(&r, 0, 0, SMALL, SMALL);
    CHECK_EQ(fake_claim(a, &c), 0);
    CHECK_EQ(remote_eager(a, &r, 0, source, 100), 0);
    CHECK(remote_place(a, &c, source));
    broken(req);
    begin(1); /* one that is in its place */
    req = irecv(sink, MSG);
    half(0);
    CHECK_EQ(remote_eager(a, &r, 0, source, SMALL), 0);
    broken(req);
    begin(1); /* the small message first */
    CHECK_EQ(remote_eager(a, &r, 0, source, SMALL), 0);
    c = remote_chunk(&r, 0, 0, SMALL / 2, SMALL);
    CHECK_EQ(fake_claim(a, &c), 1);
    broken(NULL);
    CHECK(r2_log_settle(REMOTE_WAIT_MS * R2_NS_PER_MS));
    CHECK(atomic_load(&named));
}

/* The same message twice, in one way, is what a lost path leaves behind; also where the word that
 * it has arrived waits yet. Only the numbers count: its neighbours come in the other way. */
TEST(one_way_twice)
{
    struct r2_req *req, *next;
    struct r2_bulk c;

    begin(1);
    a->manual_sent = true;
    req = irecv(sink, MSG);
    next = irecv(sink + MSG, MSG);
    CHECK_EQ(remote_eager(a, &r, 0, source, 100), 0);
    CHECK_EQ(remote_eager(a, &r, 0, source + 1, 100), 0);
    for (uint64_t off = 0; off < MSG; off += CHUNK)
        chunk(a, 1, off);
    CHECK_EQ(remote_eager(a, &r, 2, source + 2 * MSG, 100), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    a->manual_sent = false;
    fake_pull(a);
    fake_sent(a);
    whole(req, 100);
    whole(next, MSG);
    CHECK_MEM(sink, source, 100);
    CHECK_MEM(sink + MSG, source + MSG, MSG);
    req = irecv(sink, MSG);
    whole(req, 100);
    CHECK_MEM(sink, source + 2 * MSG, 100);
    for (uint64_t s = 3; s <= R2_EAGER_AHEAD; s++) {
        req = irecv(sink, MSG);
        CHECK_EQ(remote_eager(a, &r, s, source + s, 100), 0);
        whole(req, 100);
    }
    CHECK_EQ(remote_eager(a, &r, R2_EAGER_AHEAD + 1, source, 100), 0); /* in message 1's place */
    CHECK_EQ(claim_chunk(a, 1, 0, &c), 1);
    req = irecv(sink, MSG);
    whole(req, 100);
    CHECK_MEM(sink, source, 100);
    remote_end(&r);
}

/* ---- the sender */

static struct r2_req *isend(size_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, source, size, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

/* Message `seq` goes in chunks over path a; `last` is the last one, which nobody has acknowledged.
 */
static void goes(uint64_t seq, struct r2_bulk *last)
{
    uint64_t bytes = 0;

    while (bytes < MSG) {
        CHECK(fake_next(a, last));
        CHECK_EQ(last->seq, seq);
        bytes += last->len;
        CHECK(fake_chunk_sent(a, last));
        if (bytes < MSG)
            CHECK_EQ(remote_ack_range(a, &r, seq, last->offset, last->len), 0);
    }
}

/* The word that message 0 may go, and the word that it has arrived, are not those of the message a
 * window behind it. */
TEST(window_of_sends)
{
    struct r2_bulk c, late;
    struct r2_req *req;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 1));
    a = fake_find(r.id, 0, 0, 0);
    CHECK(a);
    req = isend(MSG);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    goes(0, &late);
    CHECK_EQ(remote_ack(a, &r, 1), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    for (uint64_t s = 1; s < R2_WINDOW; s++) {
        req = isend(100);
        CHECK_EQ(remote_cts(a, &r, s, 8192), 0);
        CHECK_EQ(remote_ack(a, &r, s + 1), 0);
        CHECK_EQ(remote_test(req, 0, NULL), 1);
    }
    req = isend(MSG);
    CHECK(!fake_next(a, &c));               /* not cleared */
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0); /* once more, of the old one */
    CHECK(!fake_next(a, &c));
    CHECK_EQ(remote_cts(a, &r, R2_WINDOW, MSG), 0);
    goes(R2_WINDOW, &c);
    CHECK_EQ(remote_ack_range(a, &r, 0, late.offset, late.len), 0); /* twice */
    CHECK_EQ(remote_ack_range(a, &r, 0, c.offset, c.len), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    CHECK_EQ(remote_ack_range(a, &r, R2_WINDOW, c.offset, c.len), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, NULL);
    r2_log_set(hear_log);
    return check_main(argc, argv);
}
