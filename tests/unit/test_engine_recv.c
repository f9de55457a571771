/* The engine as receiver, over a scripted transport (rung 2). The test is the sender: it sends
 * chunks and small messages, right ones and wrong ones, and loses paths. What it cannot prove: that
 * sockets do as the script does. */
#include "control/impl.h"
#include "journal_look.h"
#include "recv_bed.h"

static void message(struct r2_ep *ep, uint64_t seq)
{
    for (uint64_t off = 0; off < MSG; off += CHUNK)
        chunk(ep, seq, off);
}

static void hear_cts(struct r2_ep *ep, uint64_t seq, uint64_t size)
{
    struct r2_msg_cts m;

    CHECK_GE(remote_hear(ep, R2_F_CTS, &m, sizeof(m)), 0);
    CHECK_EQ(m.seq, seq);
    CHECK_EQ(m.size, size);
}

TEST(done_needs_kernel)
{
    struct r2_msg_ack ack;
    struct r2_req *req;
    size_t size = 0;

    begin(1);
    a->manual_sent = true;
    req = irecv(sink, MSG);
    hear_cts(a, 0, MSG);
    message(a, 0);
    CHECK_EQ(remote_test(req, 20, NULL), 0); /* not even taken */
    fake_pull(a);
    CHECK_EQ(remote_test(req, 20, NULL), 0); /* taken, not in the kernel */
    do
        CHECK_GE(remote_hear(a, R2_F_ACK, &ack, sizeof(ack)), 0);
    while (ack.cumulative != 1);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    fake_sent(a);
    CHECK_EQ(remote_test(req, 0, &size), 1);
    CHECK_EQ(size, MSG);
    CHECK_MEM(sink, source, MSG);
    remote_end(&r);
}

TEST(stash)
{
    struct r2_msg_ack ack;
    struct r2_req *req;
    size_t size = 0;

    begin(1);
    CHECK_EQ(remote_eager(a, &r, 0, source, 1000), 0);
    CHECK_EQ(remote_eager(a, &r, 1, source + 1000, 0), 0);
    CHECK_EQ(remote_eager(a, &r, 0, source + 7, 1000), 0); /* twice: the first one counts */
    CHECK_GE(remote_hear(a, R2_F_ACK, &ack, sizeof(ack)), 0);
    req = irecv(sink, 2000);
    fake_pull(a);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, &size), 1);
    CHECK_EQ(size, 1000);
    CHECK_MEM(sink, source, 1000);
    CHECK_EQ(sink[1000], 0);
    req = irecv(sink, 2000);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, &size), 1);
    CHECK_EQ(size, 0);
    CHECK_EQ(remote_eager(a, &r, 0, source + 9, 1000), 0); /* long received */
    CHECK_MEM(sink, source, 1000);
    for (uint64_t s = 2; s < 2 + R2_EAGER_AHEAD; s++)
        CHECK_EQ(remote_eager(a, &r, s, source, 10), 0);
    CHECK_EQ(remote_eager(a, &r, 2 + R2_EAGER_AHEAD, source, 10), -EPROTO); /* beyond the credit */
    remote_end(&r);
}

/* Some event of that kind and cause is in the journal. */
static bool journaled(enum r2_seg_event event, const char *cause)
{
    const struct r2_segment *seg = r2_eng.ctl->seg;

    for (uint64_t i = journal_tail(seg); i < journal_head(seg); i++) {
        const struct r2_seg_journal_entry *e = journal_entry(seg, i);

        if (e && e->event == (uint32_t)event && strncmp(e->cause, cause, strlen(cause)) == 0)
            return true;
    }
    return false;
}

TEST(eager_too_large)
{
    struct r2_req *req;

    begin(1);
    req = irecv(sink, 100);
    remote_eager(a, &r, 0, source, 1000);
    CHECK_EQ(remote_test(req, 0, NULL), -EMSGSIZE);
    CHECK_EQ(sink[100], 0);
    CHECK(journaled(R2_EV_CONNECTION_FAILED, "receiving: Message too long"));
    remote_end(&r);
}

/* A receive that fails is no secret until the application closes: the sender hears it at once,
 * again after a loss, and no more once it has acknowledged. */
TEST(failure_is_told)
{
    struct r2_msg_close_ack ack = {0};
    struct r2_msg_close m;
    struct r2_bulk c;
    struct r2_req *req;

    begin(2);
    req = irecv(sink, CHUNK);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 1); /* a chunk of a message of MSG bytes */
    CHECK_EQ(remote_test(req, 0, NULL), -EMSGSIZE);
    CHECK_GE(remote_hear(a, R2_F_CLOSE, &m, sizeof(m)), 0);
    CHECK_EQ(m.conn, r.conn_id);
    CHECK_EQ(m.from_sender, 0);
    CHECK_EQ(m.cumulative, 0);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_CLOSE, &m, sizeof(m)), 0);
    CHECK_EQ(m.conn, r.conn_id);
    ack.conn = r.conn_id;
    CHECK_EQ(fake_ctrl(b, R2_F_CLOSE_ACK, &ack, sizeof(ack)), 0);
    a = remote_path(&r, 0, a->params.gen);
    CHECK(a);
    remote_forget(b);
    fake_fail(a, ECONNRESET, false);
    CHECK_EQ(remote_hear_ms(b, R2_F_CLOSE, NULL, 0, 50), -1);
    r2_engine_close(r.conn);
    CHECK_GE(remote_hear(b, R2_F_CLOSE, NULL, 0), 0); /* the application's own, as ever */
    r2_engine_close_listen(r.listen);
    CHECK_EQ(fake_ctrl(b, R2_F_CLOSE_ACK, &ack, sizeof(ack)), 0);
    fake_forget(r.id);
}

/* What the engine holds is counted, and given back. */
TEST(memory_counted)
{
    uint64_t before, open;

    begin(1);
    open = r2_mem_now();
    CHECK_GE(open, sizeof(struct r2_peer) + sizeof(struct r2_path) + sizeof(struct r2_conn));
    before = open;
    for (uint64_t s = 0; s < 4; s++)
        CHECK_EQ(remote_eager(a, &r, s, source, 5000), 0);
    CHECK_GE(r2_mem_now(), before + 4u * 5000);
    for (int s = 0; s < 4; s++)
        irecv(sink, MSG);
    CHECK_LT(r2_mem_now(), before + 5000);
    for (int i = 0; i < 200; i++) { /* the gauge follows within a round of the housekeeping */
        if (__atomic_load_n(&r2_eng.g->memory_bytes, __ATOMIC_RELAXED) == r2_mem_now())
            break;
        fake_pass_ms(5);
    }
    CHECK_EQ(__atomic_load_n(&r2_eng.g->memory_bytes, __ATOMIC_RELAXED), r2_mem_now());
    remote_end(&r);
    CHECK_LT(r2_mem_now(), open);
}

TEST(dead_generation_drained)
{
    struct r2_bulk c;
    struct r2_req *req;
    int rc = 0;

    begin(2);
    req = irecv(sink, MSG);
    atomic_store(&a->hold_shut, true);
    CHECK_EQ(remote_down(b, a), 0);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 1); /* its bytes are in the socket still */
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    atomic_store(&a->hold_shut, false);
    message(b, 0);
    for (int i = 0; i < 300 && rc == 0; i++) { /* its acknowledgement may be late */
        fake_pull(b);
        rc = remote_test(req, 10, NULL);
    }
    CHECK_EQ(rc, 1);
    CHECK_MEM(sink, source, MSG);
    remote_end(&r);
}

TEST(bad_chunks)
{
    struct r2_bulk c;
    struct r2_req *req;

    begin(1);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), -EPROTO); /* not cleared to send */
    req = irecv(sink, MSG);
    CHECK_EQ(claim_chunk(a, 1, 0, &c), -EPROTO);
    c = remote_chunk(&r, 0, MSG, CHUNK, MSG);
    CHECK_EQ(fake_claim(a, &c), -EPROTO); /* behind the end */
    c = remote_chunk(&r, 0, UINT64_MAX - 127, CHUNK, MSG);
    CHECK_EQ(fake_claim(a, &c), -EPROTO);
    c = remote_chunk(&r, 0, 1, CHUNK, MSG);
    CHECK_EQ(fake_claim(a, &c), -EPROTO); /* off the lines */
    chunk(a, 0, 0);
    c = remote_chunk(&r, 0, CHUNK, CHUNK, 2 * CHUNK);
    CHECK_EQ(fake_claim(a, &c), -EPROTO);  /* another total */
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 1); /* twice: drained */
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    c = remote_chunk(&r, 0, CHUNK, CHUNK, MSG);
    c.conn = 999; /* nobody's: drained, as what is left of a closed connection */
    CHECK_EQ(fake_claim(a, &c), 1);
    remote_end(&r);

    begin(1);
    req = irecv(sink, MSG);
    c = remote_chunk(&r, 0, 0, CHUNK, 2 * MSG);
    CHECK_EQ(fake_claim(a, &c), 1); /* larger than the receive */
    CHECK_EQ(remote_test(req, 0, NULL), -EMSGSIZE);
    remote_end(&r);
}

TEST(claim_excludes)
{
    struct r2_bulk c, d;
    struct r2_req *req;

    begin(2);
    req = irecv(sink, MSG);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 0);
    CHECK_LT(claim_chunk(b, 0, 0, &d), 0); /* another path writes there */
    CHECK(remote_place(a, &c, source));
    CHECK_EQ(claim_chunk(b, 0, 0, &d), 1);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

TEST(dropped_then_replayed)
{
    struct r2_bulk c, held;
    struct r2_req *req;

    begin(2);
    req = irecv(sink, MSG);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 0);
    memset(c.data, 0xaa, CHUNK / 2); /* half written */
    CHECK(fake_dropped(a, &c, false));
    chunk(b, 0, 0);
    CHECK_EQ(claim_chunk(a, 0, CHUNK, &held), 0);
    memset(held.data, 0xbb, CHUNK / 2);
    fake_fail(a, ECONNRESET, false); /* shut gives the claim back */
    CHECK_GE(remote_hear(b, R2_F_FENCED, NULL, 0), 0);
    chunk(b, 0, CHUNK);
    chunk(b, 0, 2 * CHUNK);
    CHECK_EQ(remote_test(req, 5, NULL), 0);
    chunk(b, 0, 3 * CHUNK);
    fake_pull(b);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, source, MSG);
    remote_end(&r);
}

/* FENCED only after the endpoint let go of the buffers, behind what has arrived, on one path. */
TEST(fenced_last)
{
    struct r2_msg_path fenced;
    struct {
        struct r2_msg_ack m;
        struct r2_ack_range range[8];
    } __attribute__((packed)) ack;
    struct r2_bulk held;
    struct r2_ep *a2;
    struct r2_req *req;
    int at_ack, at_fenced;

    begin(2);
    req = irecv(sink, MSG);
    chunk(a, 0, 0);
    CHECK_EQ(claim_chunk(a, 0, CHUNK, &held), 0);
    remote_forget(b);
    atomic_store(&a->hold_shut, true);
    CHECK_EQ(remote_down(b, a), 0);
    CHECK_EQ(remote_down(b, a), 0);
    for (int i = 0; i < REMOTE_WAIT_MS && !atomic_load(&a->waiting); i++)
        fake_pass_ms(1);
    CHECK_EQ(atomic_load(&a->waiting), 1);
    CHECK_EQ(remote_down(b, a), 0);         /* asked again while it is being shut */
    a2 = remote_path(&r, 0, b->params.gen); /* a reason to repeat what is fenced */
    CHECK(a2);
    CHECK_EQ(remote_hear_ms(a2, R2_F_FENCED, NULL, 0, 50), -1);
    CHECK_EQ(remote_hear_ms(b, R2_F_FENCED, NULL, 0, 50), -1);
    remote_forget(a2);
    atomic_store(&a->hold_shut, false);
    at_fenced = remote_hear(a2, R2_F_FENCED, &fenced, sizeof(fenced));
    CHECK_GE(at_fenced, 0);
    CHECK(atomic_load(&a->is_shut));
    CHECK_EQ(fenced.gen, a->params.gen);
    at_ack = remote_hear_ms(a2, R2_F_ACK, &ack, sizeof(ack), 0);
    CHECK_GE(at_ack, 0);
    CHECK_LT(at_ack, at_fenced);
    CHECK_EQ(ack.m.ranges, 1); /* what has arrived, and not what was held */
    CHECK_EQ(ack.range[0].offset, 0);
    CHECK_EQ(ack.range[0].len, CHUNK);
    remote_forget(a2);
    CHECK_EQ(remote_down(b, a), 0); /* said again for who did not hear it */
    CHECK_GE(remote_hear(a2, R2_F_FENCED, NULL, 0), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

/* DOWN of an older generation comes over another path behind DOWN of attempts that never reached
 * us, while the older endpoint is being shut: it is not fenced before that is over. */
TEST(older_down_after_newer)
{
    struct r2_msg_path m = {.sender_nic = 0, .receiver_nic = 0}, fenced = {0};
    struct r2_bulk held;
    struct r2_ep *other;

    begin(2);
    irecv(sink, MSG);
    CHECK_EQ(claim_chunk(a, 0, CHUNK, &held), 0); /* a lane reads into the buffer */
    remote_forget(b);
    atomic_store(&a->hold_shut, true);
    m.gen = a->params.gen + 3;
    CHECK_EQ(fake_ctrl(b, R2_F_DOWN, &m, sizeof(m)), 0);
    for (int i = 0; i < REMOTE_WAIT_MS && !atomic_load(&a->waiting); i++)
        fake_pass_ms(1);
    CHECK_EQ(atomic_load(&a->waiting), 1);
    CHECK_EQ(remote_down(b, a), 0);
    other = remote_path(&r, 0, m.gen); /* a reason to repeat what is fenced */
    CHECK(other);
    while (remote_hear_ms(other, R2_F_FENCED, &fenced, sizeof(fenced), 100) >= 0)
        CHECK_LT(fenced.gen, a->params.gen);
    while (remote_hear_ms(b, R2_F_FENCED, &fenced, sizeof(fenced), 50) >= 0)
        CHECK_LT(fenced.gen, a->params.gen);
    remote_forget(other);
    atomic_store(&a->hold_shut, false);
    while (fenced.gen < m.gen)
        CHECK_GE(remote_hear(other, R2_F_FENCED, &fenced, sizeof(fenced)), 0);
    CHECK(atomic_load(&a->is_shut));
    remote_end(&r);
}

TEST(unknown_generation_fenced)
{
    struct r2_msg_path m = {.sender_nic = 0, .receiver_nic = 0}, fenced;
    struct r2_ep *old;

    begin(2);
    m.gen = a->params.gen + 5; /* the attempt never reached us */
    CHECK_EQ(fake_ctrl(b, R2_F_DOWN, &m, sizeof(m)), 0);
    do
        CHECK_GE(remote_hear(b, R2_F_FENCED, &fenced, sizeof(fenced)), 0);
    while (fenced.gen != m.gen);
    old = fake_accept(r.id, 0, 0, m.gen); /* it arrives late: refused */
    CHECK(!old);
    CHECK(fake_accept(r.id, 0, 0, m.gen + 1));
    remote_end(&r);
}

TEST(resync_repeats)
{
    struct {
        struct r2_msg_ack m;
        struct r2_ack_range range[8];
    } __attribute__((packed)) ack;
    struct r2_msg_cts cts;
    struct r2_ep *a2;
    struct r2_req *req, *second;

    begin(1);
    req = irecv(sink, MSG);
    second = irecv(sink + MSG, MSG);
    hear_cts(a, 0, MSG);
    hear_cts(a, 1, MSG);
    chunk(a, 0, CHUNK);
    message(a, 1);
    fake_fail(a, ECONNRESET, false);
    a2 = remote_path(&r, 0, a->params.gen);
    CHECK(a2);
    hear_cts(a2, 0, MSG); /* of the one that has not arrived */
    CHECK_GE(remote_hear(a2, R2_F_ACK, &ack, sizeof(ack)), 0);
    CHECK_EQ(ack.m.cumulative, 0);
    CHECK_EQ(ack.m.ranges, 2);
    CHECK_EQ(ack.range[0].seq, 0);
    CHECK_EQ(ack.range[0].offset, CHUNK);
    CHECK_EQ(ack.range[0].len, CHUNK);
    CHECK_EQ(ack.range[1].seq, 1);
    CHECK_EQ(ack.range[1].len, MSG);
    CHECK_GE(remote_hear(a2, R2_F_FENCED, NULL, 0), 0);
    while (remote_hear_ms(a2, R2_F_CTS, &cts, sizeof(cts), 0) >= 0)
        CHECK_EQ(cts.seq, 0); /* the other one has arrived */
    chunk(a2, 0, 0);
    chunk(a2, 0, 2 * CHUNK);
    chunk(a2, 0, 3 * CHUNK);
    fake_pull(a2);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_EQ(remote_test(second, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, source, 2 * MSG);
    remote_end(&r);
}

/* The acknowledgement was taken by a path that died: it is said again before the receive is done.
 */
TEST(lost_ack)
{
    struct r2_msg_ack ack = {0};
    struct r2_req *req;

    begin(2);
    a->manual_sent = true;
    b->manual_sent = true;
    req = irecv(sink, MSG);
    message(a, 0);
    fake_pull(a);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_FENCED, NULL, 0), 0);
    CHECK_EQ(remote_test(req, 20, NULL), 0);
    CHECK_GE(remote_hear_ms(b, R2_F_ACK, &ack, sizeof(ack), 0), 0);
    CHECK_EQ(ack.cumulative, 1);
    fake_sent(b);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    remote_end(&r);
}

TEST(sender_closes)
{
    struct r2_req *req, *late = NULL;

    begin(1);
    CHECK_EQ(remote_eager(a, &r, 0, source, 500), 0);
    CHECK_EQ(remote_close(a, &r, 1), 0);
    CHECK_GE(remote_hear(a, R2_F_CLOSE_ACK, NULL, 0), 0);
    req = irecv(sink, MSG); /* the stashed one */
    fake_pull(a);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, source, 500);
    CHECK_EQ(r2_engine_irecv(r.conn, sink, MSG, 0, NULL, &late), -ECONNRESET);
    remote_end(&r);

    begin(1);
    req = irecv(sink, MSG);
    late = irecv(sink + MSG, MSG);
    message(a, 0);
    CHECK_EQ(remote_close(a, &r, 1), 0); /* one message, whole; a second receive waits in vain */
    CHECK_EQ(remote_test(late, 0, NULL), -ECONNRESET);
    fake_pull(a);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    remote_end(&r);

    begin(1);
    req = irecv(sink, MSG);
    chunk(a, 0, 0);
    CHECK_EQ(remote_close(a, &r, 1), 0); /* with unfinished work */
    CHECK_EQ(remote_test(req, 0, NULL), -ECONNRESET);
    remote_end(&r);
}

TEST(unknown_connection)
{
    struct r2_msg_open open = {.conn = 555, .listen = r.listen_id, .must_exist = 1};
    struct r2_msg_close close = {.conn = 556, .from_sender = 1};
    struct r2_msg_open_ack ack;
    struct r2_msg_close_ack gone;
    struct r2_bulk c;

    begin(1);
    open.listen = r.listen_id;
    CHECK_EQ(fake_ctrl(a, R2_F_OPEN, &open, sizeof(open)), 0);
    CHECK_GE(remote_hear(a, R2_F_OPEN_ACK, &ack, sizeof(ack)), 0);
    CHECK_EQ(ack.status, ECONNRESET); /* said again after its end: not made anew */
    open.must_exist = 0;
    open.listen = 999999;
    CHECK_EQ(fake_ctrl(a, R2_F_OPEN, &open, sizeof(open)), 0);
    CHECK_GE(remote_hear(a, R2_F_OPEN_ACK, &ack, sizeof(ack)), 0);
    CHECK_EQ(ack.status, ECONNREFUSED);
    CHECK_EQ(fake_ctrl(a, R2_F_CLOSE, &close, sizeof(close)), 0);
    CHECK_GE(remote_hear(a, R2_F_CLOSE_ACK, &gone, sizeof(gone)), 0);
    CHECK_EQ(gone.conn, 556);
    c = remote_chunk(&r, 0, 0, CHUNK, MSG);
    c.conn = 555;
    CHECK_EQ(fake_claim(a, &c), 1);
    CHECK_EQ(fake_ctrl(a, R2_F_FENCED, (uint8_t[sizeof(struct r2_msg_path)]){0},
                       sizeof(struct r2_msg_path)),
             -EPROTO); /* a receiver's word, said by a sender */
    remote_end(&r);
}

TEST(lines)
{
    struct r2_req *req = NULL, *plain;
    struct r2_bulk c;

    begin(1);
    CHECK_EQ(r2_engine_irecv_lines(r.conn, sink, MSG, 0, NULL, &req), 0);
    plain = irecv(sink + MSG, MSG);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 0);
    CHECK_EQ(c.flags & R2_BULK_LINES, R2_BULK_LINES);
    CHECK(remote_place(a, &c, source));
    CHECK_EQ(claim_chunk(a, 1, 0, &c), 0);
    CHECK_EQ(c.flags & R2_BULK_LINES, 0);
    CHECK(remote_place(a, &c, source + MSG));
    CHECK(req && plain);
    remote_end(&r);
}

/* What has arrived whole, and waits only for its acknowledgement to reach the kernel, is received
 * although the connection fails then. */
TEST(whole_before_the_failure)
{
    struct r2_req *whole, *part, *small;

    begin(1);
    a->manual_sent = true;
    whole = irecv(sink, MSG);
    part = irecv(sink + MSG, MSG);
    small = irecv(sink + 2 * MSG, 100);
    message(a, 0);
    chunk(a, 1, 0);
    CHECK_EQ(remote_test(whole, 20, NULL), 0);
    remote_eager(a, &r, 2, source, 1000); /* larger than its receive */
    CHECK_EQ(remote_test(small, 0, NULL), -EMSGSIZE);
    CHECK_EQ(remote_test(part, 0, NULL), -EMSGSIZE);
    CHECK_EQ(remote_test(whole, 0, NULL), 1);
    CHECK_MEM(sink, source, MSG);
    remote_end(&r);
}

/* Closed with a receive under way, which a lane writes just then: it lets go before the memory
 * does, and nothing is written afterwards. Closing an idle one troubles no endpoint. */
TEST(close_in_a_chunk)
{
    struct r2_bulk c;

    begin(2);
    irecv(sink, MSG);
    chunk(a, 0, 0);
    CHECK_EQ(claim_chunk(a, 0, CHUNK, &c), 0);
    CHECK_EQ(atomic_load(&a->detached), 0);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    CHECK_EQ(atomic_load(&a->detached), 1);
    CHECK_EQ(atomic_load(&b->detached), 1);
    CHECK(!fake_done(a, &c));                  /* the lane has none any more */
    CHECK_EQ(claim_chunk(a, 0, CHUNK, &c), 1); /* and gets none: what comes is drained */
    CHECK_EQ(r2_engine_close_listen(r.listen), 0);
    fake_forget(r.id);

    begin(1);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    CHECK_EQ(atomic_load(&a->detached), 0);
    CHECK_EQ(r2_engine_close_listen(r.listen), 0);
    fake_forget(r.id);
}

int main(int argc, char **argv)
{
    remote_engine(2, NULL);
    return check_main(argc, argv);
}
