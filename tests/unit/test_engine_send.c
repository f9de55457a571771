/* The engine as sender, over a scripted transport (rung 2). The test is the receiver: it grants
 * clear-to-send, acknowledges, fences. What it cannot prove: that sockets do as the script does. */
#include "send_bed.h"

#define KB 1024u
#define MSG (256 * KB)

static uint8_t data[4 * MSG];

static struct r2_req *isend(size_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, data, size, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

/* All chunks that the path takes; a path's window may be smaller than the message. */
static int pull(struct r2_ep *ep, struct r2_bulk *out, int max)
{
    int n = 0;

    while (n < max && fake_next(ep, &out[n]))
        n++;
    return n;
}

static void ack_chunk(struct r2_ep *via, const struct r2_bulk *c)
{
    CHECK_EQ(remote_ack_range(via, &r, c->seq, c->offset, c->len), 0);
}

/* Sends the whole message over `ep`, acknowledging each chunk; `sent`: lanes let go. */
static void carry(struct r2_ep *ep, uint64_t size, bool sent, struct r2_bulk *last)
{
    uint64_t bytes = 0;

    while (bytes < size) {
        CHECK(fake_next(ep, last));
        bytes += last->len;
        if (bytes < size || sent)
            CHECK(fake_chunk_sent(ep, last));
        ack_chunk(ep, last);
    }
}

TEST(done_needs_ack_and_lane)
{
    struct r2_bulk c[64];
    struct r2_req *req;
    int n;

    begin(1);
    req = isend(64 * KB);
    CHECK(!fake_next(a, &c[0])); /* not cleared to send */
    CHECK_EQ(remote_cts(a, &r, 0, 64 * KB), 0);
    n = pull(a, c, 64);
    CHECK_GT(n, 0);
    for (int i = 0; i < n; i++)
        CHECK(fake_chunk_sent(a, &c[i]));
    CHECK_EQ(remote_test(req, 20, NULL), 0); /* sent, not acknowledged */
    for (int i = 0; i < n; i++)
        ack_chunk(a, &c[i]);
    CHECK_EQ(remote_test(req, 0, NULL), 1);

    req = isend(64 * KB);
    CHECK_EQ(remote_cts(a, &r, 1, 64 * KB), 0);
    carry(a, 64 * KB, false, &c[0]);
    CHECK_EQ(remote_test(req, 20, NULL), 0); /* acknowledged, a lane still reads */
    CHECK(fake_chunk_sent(a, &c[0]));
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    remote_end(&r);
}

TEST(acks_any_order_any_path)
{
    struct r2_bulk c;
    struct r2_req *req, *next;
    uint64_t bytes = 0;

    begin(2);
    req = isend(MSG);
    next = isend(MSG);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    while (bytes < MSG) {
        CHECK(fake_next(a, &c));
        CHECK(fake_chunk_sent(a, &c));
        CHECK_EQ(c.seq, 0);
        bytes += c.len;
        ack_chunk(b, &c); /* said over another path, and again */
        ack_chunk(a, &c);
        if (bytes < MSG)
            CHECK_EQ(remote_ack_range(b, &r, 0, 0, bytes), 0); /* overlaps all before */
        if (bytes < MSG)
            CHECK_EQ(remote_test(req, 0, NULL), 0);
    }
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    CHECK_EQ(remote_ack_range(a, &r, 0, 0, MSG), 0); /* stale: the request is gone */
    CHECK_EQ(remote_ack(a, &r, 1), 0);
    CHECK_EQ(remote_test(next, 5, NULL), 0);

    CHECK_EQ(remote_cts(b, &r, 1, MSG), 0);
    for (bytes = 0; bytes < MSG; bytes += c.len) {
        struct r2_ep *from = fake_next(b, &c) ? b : a; /* the faster one */

        CHECK(from == b || fake_next(a, &c));
        CHECK(fake_chunk_sent(from, &c));
        CHECK_EQ(c.seq, 1);
        if (bytes + c.len < MSG)
            ack_chunk(b, &c);
    }
    CHECK_EQ(remote_ack(b, &r, 1), 0);
    CHECK_EQ(remote_test(next, 5, NULL), 0);
    CHECK_EQ(remote_ack(b, &r, 2), 0); /* cumulative */
    CHECK_EQ(remote_test(next, 0, NULL), 1);
    remote_end(&r);
}

TEST(requeued_only_when_fenced)
{
    struct r2_bulk c[8], again;
    struct r2_req *req;
    struct r2_msg_path down;
    uint64_t missing = 0, bytes = 0;
    int n;

    begin(2);
    req = isend(MSG);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    n = pull(a, c, 8);
    CHECK_GE(n, 2);
    ack_chunk(b, &c[0]);
    for (int i = 1; i < n; i++)
        missing += c[i].len;
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, &down, sizeof(down)), 0);
    CHECK_EQ(down.gen, a->params.gen);
    CHECK_EQ(down.sender_nic, 0);
    /* Repeated until fenced, and nothing of the generation goes out meanwhile. */
    CHECK_GE(remote_hear(b, R2_F_DOWN, &down, sizeof(down)), 0);
    CHECK_EQ(down.gen, a->params.gen);
    while (fake_next(b, &again)) {
        for (int i = 0; i < n; i++)
            CHECK(again.offset + again.len <= c[i].offset ||
                  again.offset >= c[i].offset + c[i].len);
        CHECK(fake_chunk_sent(b, &again));
        ack_chunk(b, &again);
        bytes += again.len;
    }
    CHECK_EQ(bytes + missing + c[0].len, MSG);
    CHECK_EQ(remote_fenced(b, a), 0);
    CHECK_EQ(remote_fenced(b, a), 0); /* idempotent */
    for (bytes = 0; bytes < missing; bytes += again.len) {
        CHECK(fake_next(b, &again));
        CHECK(again.offset >= c[0].offset + c[0].len || again.offset + again.len <= c[0].offset);
        CHECK(again.data == data + again.offset);
        CHECK(fake_chunk_sent(b, &again));
        ack_chunk(b, &again);
    }
    CHECK_EQ(bytes, missing);
    CHECK(!fake_next(b, &again));
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    remote_end(&r);
}

TEST(dead_lane_still_reads)
{
    struct r2_bulk c[8], again;
    struct r2_req *req;

    begin(2);
    req = isend(64 * KB);
    CHECK_EQ(remote_cts(a, &r, 0, 64 * KB), 0);
    CHECK_GE(pull(a, c, 8), 1);
    atomic_store(&a->hold_shut, true);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_fenced(b, a), 0);
    carry(b, 64 * KB, true, &again);
    CHECK_EQ(remote_test(req, 20, NULL), 0); /* acknowledged, but a lane of the dead path reads */
    atomic_store(&a->hold_shut, false);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    remote_end(&r);
}

TEST(no_down_after_fenced)
{
    begin(2);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_fenced(b, a), 0);
    remote_forget(b);
    CHECK_EQ(remote_hear_ms(b, R2_F_DOWN, NULL, 0, 250), -1);
    remote_end(&r);
}

TEST(second_failure_during_replay)
{
    struct r2_bulk c[8], d[8], e;
    struct r2_ep *a2;
    struct r2_req *req;
    uint64_t bytes = 0;
    int n, m;

    begin(2);
    req = isend(MSG);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    n = pull(a, c, 8);
    CHECK_GE(n, 1);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_fenced(b, a), 0);
    m = pull(b, d, 8);
    CHECK_GE(m, 1);
    CHECK_EQ(d[0].offset, c[0].offset); /* what is to be sent again goes first */
    ack_chunk(b, &d[0]);
    CHECK(fake_chunk_sent(b, &d[0]));
    a2 = remote_path(&r, 0, a->params.gen);
    CHECK(a2);
    fake_fail(b, ECONNRESET, false);
    CHECK_GE(remote_hear(a2, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_fenced(a2, b), 0);
    for (bytes = d[0].len; bytes < MSG; bytes += e.len) {
        CHECK(fake_next(a2, &e));
        CHECK_NE(e.offset, d[0].offset);
        CHECK(fake_chunk_sent(a2, &e));
        ack_chunk(a2, &e);
    }
    CHECK_EQ(bytes, MSG);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    remote_end(&r);
}

/* A reconnect that fails must not make the engine believe that the older generation is fenced. */
TEST(failed_reconnect_keeps_fence)
{
    struct r2_bulk c[8], d;
    struct r2_msg_path down = {0};
    struct r2_ep *a2;
    struct r2_req *req;
    int n;

    begin(2);
    req = isend(64 * KB);
    CHECK_EQ(remote_cts(a, &r, 0, 64 * KB), 0);
    n = pull(a, c, 8);
    CHECK_GE(n, 1);
    for (int i = 0; i < n; i++)
        CHECK(fake_chunk_sent(a, &c[i]));
    fake_fail(a, ECONNRESET, false);
    a2 = fake_find(r.id, 0, 0, a->params.gen);
    CHECK(a2);
    fake_fail(a2, EHOSTUNREACH, false);
    for (int i = 0; i < 8 && down.gen != a2->params.gen; i++)
        CHECK_GE(remote_hear(b, R2_F_DOWN, &down, sizeof(down)), 0);
    CHECK_GE(down.gen, a2->params.gen);
    while (fake_next(b, &d)) {
        for (int i = 0; i < n; i++)
            CHECK_NE(d.offset, c[i].offset);
        CHECK(fake_chunk_sent(b, &d));
        ack_chunk(b, &d);
    }
    CHECK_EQ(remote_test(req, 20, NULL), 0);
    CHECK_EQ(remote_fenced(b, a), 0); /* word of the older generation is enough for its bytes */
    CHECK(fake_next(b, &d));
    CHECK_EQ(d.offset, c[0].offset);
    remote_end(&r);
}

/* Traffic on both paths, so that it is known what they can do. */
static uint64_t warm_up(void)
{
    uint64_t from = r2_now_ns(), seq = 0;

    for (; r2_now_ns() - from < 500 * R2_NS_PER_MS; seq++) {
        struct r2_req *req = isend(MSG);
        uint64_t acked = 0;

        CHECK_EQ(remote_cts(a, &r, seq, MSG), 0);
        while (acked < MSG) {
            struct r2_bulk c[2];
            int n = fake_next(a, &c[0]), m = fake_next(b, &c[n]);

            add_time(300 * R2_NS_PER_US);
            for (int i = 0; i < n + m; i++) {
                CHECK(fake_chunk_sent(n && i == 0 ? a : b, &c[i]));
                ack_chunk(n && i == 0 ? a : b, &c[i]);
                acked += c[i].len;
            }
        }
        CHECK_EQ(remote_test(req, 0, NULL), 1);
    }
    return seq;
}

/* A faster path that is spared for a while takes nothing, so nothing is left to it. */
TEST(tail_is_not_left_to_the_spared)
{
    struct r2_path *fast;
    struct r2_bulk c;
    struct r2_req *req;

    for (int spared = 0; spared < 2; spared++) {
        begin(2);
        fast = b->params.owner;
        remote_rate(a, 10 * R2_NS_PER_MS);
        remote_rate(b, 10 * R2_NS_PER_US);
        r2_peer_lock(fast->peer);
        ((struct r2_path *)a->params.owner)->flow.chunk_at = r2_now_ns(); /* no trial is due */
        fast->flow.busy_until = spared ? r2_now_ns() + 60 * R2_NS_PER_S : 0;
        r2_peer_unlock(fast->peer);
        req = isend(64 * KB);
        CHECK_EQ(remote_cts(a, &r, 0, 64 * KB), 0);
        CHECK_EQ(fake_next(a, &c), spared);
        if (!spared)
            CHECK(fake_next(b, &c));
        CHECK_EQ(remote_test(req, 0, NULL), 0);
        remote_end(&r);
    }
}

/* Whichever path takes a chunk first is the slow one; the other one is `*fast`. */
static struct r2_ep *first_chunk(struct r2_bulk *c, struct r2_ep **fast)
{
    for (int i = 0; i < 2000; i++) {
        *fast = b;
        if (fake_next(a, c))
            return a;
        *fast = a;
        if (fake_next(b, c))
            return b;
        fake_pass_ms(1);
    }
    CHECK_MSG(false, "neither path takes a chunk");
    return NULL;
}

/* A message of which all but the first chunk has arrived; that one sits on a path that has become
 * slow. `copy`: it went over the other path as well, already. */
static struct r2_req *hold_back(struct r2_bulk *held, struct r2_bulk *copy, struct r2_ep **slow,
                                struct r2_ep **fast)
{
    struct r2_req *req;
    struct r2_bulk c;
    uint64_t seq;

    begin(2);
    seq = warm_up();
    req = isend(MSG);
    CHECK_EQ(remote_cts(a, &r, seq, MSG), 0);
    *slow = first_chunk(held, fast);
    CHECK_EQ(held->flags & R2_BULK_COPY, 0);
    *copy = (struct r2_bulk){0};
    for (uint64_t bytes = held->len; bytes < MSG;) {
        struct r2_ep *by = fake_next(*fast, &c) ? *fast : *slow; /* whichever wants it more */

        CHECK(by == *fast || fake_next(*slow, &c));
        CHECK(fake_chunk_sent(by, &c));
        ack_chunk(by, &c);
        bytes += c.flags & R2_BULK_COPY ? 0 : c.len;
        *copy = c.flags & R2_BULK_COPY ? c : *copy;
    }
    return req;
}

/* The last chunk of a message sits on a path that has become slow: it goes over the other one as
 * well. Done when it is acknowledged and neither lane reads it; a lost copy is missed by nobody. */
static void tail(bool lose)
{
    struct r2_bulk held, c, copy;
    struct r2_ep *slow, *fast;
    struct r2_req *req;
    uint64_t before = __atomic_load_n(&r2_eng.n->tail_resent_bytes, __ATOMIC_RELAXED);

    req = hold_back(&held, &copy, &slow, &fast);
    for (int i = 0; i < 2000 && !copy.len; i++) { /* once it is overdue */
        fake_pass_ms(1);
        CHECK(!fake_next(slow, &copy)); /* not over the slow path itself */
        fake_next(fast, &copy);
    }
    CHECK(copy.flags & R2_BULK_COPY);
    CHECK_EQ(copy.offset, held.offset);
    CHECK_EQ(copy.len, held.len);
    CHECK(copy.data == held.data);
    CHECK(!fake_next(fast, &c)); /* once */
    CHECK_EQ(__atomic_load_n(&r2_eng.n->tail_resent_bytes, __ATOMIC_RELAXED) - before, copy.len);
    if (lose) { /* with its path: the original stays answerable, nothing is queued again */
        fake_fail(fast, ECONNRESET, false);
        CHECK_GE(remote_hear(slow, R2_F_DOWN, NULL, 0), 0);
        CHECK_EQ(remote_fenced(slow, fast), 0);
        CHECK(!fake_next(slow, &c));
        CHECK_EQ(remote_test(req, 20, NULL), 0);
        ack_chunk(slow, &held);
    } else {
        fake_chunk_sent(fast, &copy);
        ack_chunk(fast, &copy);
    }
    CHECK_EQ(remote_test(req, 20, NULL), 0); /* a lane still reads the original */
    CHECK(fake_chunk_sent(slow, &held));
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    remote_end(&r);
}

TEST(tail_is_sent_again)
{
    tail(false);
    tail(true);
}

/* The receiver takes its memory back just then: of what was cleared to send nothing goes out any
 * more, and a copy is no exception. */
TEST(no_copy_of_what_was_revoked)
{
    struct r2_msg_revoke ask;
    struct r2_bulk held, c, copy;
    struct r2_ep *slow, *fast;
    struct r2_req *req;

    for (int i = 0;; i++) { /* until the copy has not gone out already */
        req = hold_back(&held, &copy, &slow, &fast);
        if (!copy.len)
            break;
        CHECK_LT(i, 10);
        remote_end(&r);
    }
    ask = (struct r2_msg_revoke){.conn = r.conn_id};
    CHECK_EQ(fake_ctrl(slow, R2_F_REVOKE, &ask, sizeof(ask)), 0);
    for (int i = 0; i < 300; i++) {
        fake_pass_ms(1);
        CHECK(!fake_next(slow, &c));
        CHECK(!fake_next(fast, &c));
    }
    CHECK_EQ(remote_close(slow, &r, 0), 0);
    CHECK_EQ(remote_test(req, 1000, NULL), -ECONNRESET);
    remote_end(&r);
}

TEST(eager_credit)
{
    struct r2_req *req[20];

    begin(1);
    for (int i = 0; i < 20; i++)
        req[i] = isend(100);
    for (int i = 0; i < R2_EAGER_AHEAD; i++)
        CHECK_GE(remote_hear(a, R2_F_EAGER, NULL, 0), 0);
    CHECK_EQ(remote_hear_ms(a, R2_F_EAGER, NULL, 0, 60), -1);
    CHECK_EQ(remote_ack(a, &r, 16), 0); /* arrived in the stash: gives no room */
    CHECK_EQ(remote_test(req[15], 0, NULL), 1);
    CHECK_EQ(remote_hear_ms(a, R2_F_EAGER, NULL, 0, 60), -1);
    CHECK_EQ(remote_cts(a, &r, 1, 8192), 0); /* of a message that is long done: only credit */
    for (int i = 0; i < 2; i++)
        CHECK_GE(remote_hear(a, R2_F_EAGER, NULL, 0), 0);
    CHECK_EQ(remote_hear_ms(a, R2_F_EAGER, NULL, 0, 60), -1);
    CHECK_EQ(remote_cts(a, &r, 15, 8192), 0);
    for (int i = 0; i < 2; i++)
        CHECK_GE(remote_hear(a, R2_F_EAGER, NULL, 0), 0);
    CHECK_EQ(remote_ack(a, &r, 20), 0);
    CHECK_EQ(remote_test(req[19], 0, NULL), 1);
    remote_end(&r);
}

TEST(eager_replayed_after_loss)
{
    struct r2_msg_eager m;
    struct r2_req *req;

    begin(2);
    req = isend(100);
    CHECK_GE(remote_hear(a, R2_F_EAGER, NULL, 0), 0);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_hear_ms(b, R2_F_EAGER, NULL, 0, 30), -1);
    CHECK_EQ(remote_fenced(b, a), 0);
    CHECK_GE(remote_hear(b, R2_F_EAGER, &m, sizeof(m)), 0);
    CHECK_EQ(m.size, 100);
    CHECK_EQ(remote_ack(b, &r, 1), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    remote_end(&r);
}

TEST(cts_too_small)
{
    struct r2_req *req;

    begin(1);
    req = isend(64 * KB);
    CHECK_EQ(remote_cts(a, &r, 0, 32 * KB), 0);
    CHECK_EQ(remote_test(req, 0, NULL), -EMSGSIZE);
    CHECK_GE(remote_hear(a, R2_F_CLOSE, NULL, 0), 0); /* the receiver's request ends as well */
    remote_end(&r);

    begin(1); /* the clear-to-send first */
    CHECK_EQ(remote_cts(a, &r, 0, 32 * KB), 0);
    req = isend(64 * KB);
    CHECK_EQ(remote_test(req, 0, NULL), -EMSGSIZE);
    remote_end(&r);
}

TEST(ack_of_unsent)
{
    struct r2_bulk c;
    struct r2_req *req;

    begin(1);
    CHECK_EQ(remote_ack(a, &r, 1), -EPROTO); /* nothing was begun */
    req = isend(MSG);
    CHECK_EQ(remote_ack(a, &r, 2), -EPROTO); /* two messages of one */
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    CHECK(fake_next(a, &c));
    CHECK(c.len < MSG);
    CHECK_EQ(remote_ack_range(a, &r, 0, 0, MSG), -EPROTO);
    CHECK_EQ(remote_ack_range(a, &r, 0, 0, UINT64_MAX), -EPROTO);
    CHECK_EQ(remote_ack_range(a, &r, 0, UINT64_MAX - 127, 256), -EPROTO);
    CHECK_EQ(remote_ack_range(a, &r, 0, 1, 128), -EPROTO);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

/* The receiver closes when it has everything; its last acknowledgements come behind the CLOSE. */
TEST(close_overtakes_acks)
{
    struct r2_bulk c;
    struct r2_req *req, *more = NULL;

    begin(1);
    req = isend(100);
    CHECK_EQ(remote_close(a, &r, 1), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    CHECK_LT(r2_engine_isend(r.conn, data, 100, 0, NULL, &more), 0);
    CHECK_GE(remote_hear(a, R2_F_CLOSE_ACK, NULL, 0), 0);
    CHECK_EQ(remote_close(a, &r, 1), 0); /* repeated */
    CHECK_GE(remote_hear(a, R2_F_CLOSE_ACK, NULL, 0), 0);
    remote_end(&r);

    begin(1);
    req = isend(MSG);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    CHECK(fake_next(a, &c));
    CHECK_EQ(remote_close(a, &r, 0), 0); /* without having it */
    CHECK_EQ(remote_test(req, 0, NULL), -ECONNRESET);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_CHUNK=32K R2CCL_RAMP=0");
    return check_main(argc, argv);
}
