/* Messages whose numbers share a slot, over a scripted transport (rung 2): what is kept for one of
 * them says nothing about the other (wall 4). The test is the peer. What it cannot prove: that
 * sockets do as the script does. */
#include <errno.h>

#include "recv_bed.h"

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
static void test_window_of_receives(void)
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

/* A small message is stashed for a receive that is served otherwise: by chunks that came first. It
 * is not given to a later receive. */
static void test_stash_of_another(void)
{
    struct r2_bulk c[MSG / CHUNK];
    struct r2_req *req;

    begin(1);
    for (uint64_t i = 0; i < MSG / CHUNK; i++)
        CHECK_EQ(claim_chunk(a, 0, i * CHUNK, &c[i]), 0);
    CHECK_EQ(remote_eager(a, &r, 0, source + 2 * MSG, 1000), 0);
    for (uint64_t i = 0; i < MSG / CHUNK; i++)
        CHECK(remote_place(a, &c[i], source));
    req = irecv(sink, MSG);
    whole(req, MSG);
    CHECK_MEM(sink, source, MSG);
    for (uint64_t s = 1; s < R2_EAGER_AHEAD; s++) {
        req = irecv(sink, MSG);
        CHECK_EQ(remote_eager(a, &r, s, source + s, 100), 0);
        whole(req, 100);
        CHECK_MEM(sink, source + s, 100);
    }
    memset(sink, 0, sizeof(sink));
    req = irecv(sink, MSG);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    CHECK_EQ(sink[0], 0);
    CHECK_EQ(remote_eager(a, &r, R2_EAGER_AHEAD, source + MSG, 100), 0);
    whole(req, 100);
    CHECK_MEM(sink, source + MSG, 100);
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
static void test_window_of_sends(void)
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

static const struct check_test tests[] = {
    {"window_of_receives", test_window_of_receives},
    {"stash_of_another", test_stash_of_another},
    {"window_of_sends", test_window_of_sends},
    {0},
};

int main(int argc, char **argv)
{
    static const char *const env[] = {"R2CCL_UNASKED", "128K", NULL};

    remote_engine(2, env);
    return check_main(argc, argv, tests);
}
