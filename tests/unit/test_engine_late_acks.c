/* Acknowledgements of small messages whose sender has done with them (engine/message/acks.c), over
 * a scripted transport (rung 2): the engine as their receiver, with two I/O threads. */
#include "recv_bed.h"

#define SIZE 100

static int eager(struct r2_ep *ep, uint64_t seq, uint32_t flags)
{
    struct {
        struct r2_msg_eager m;
        uint8_t data[SIZE];
    } f = {.m = {.conn = r.conn_id, .seq = seq, .size = SIZE, .flags = flags}};

    memcpy(f.data, source + seq * SIZE, SIZE);
    return fake_ctrl(ep, R2_F_EAGER, &f, sizeof(f.m) + SIZE);
}

static uint8_t *place(uint64_t seq)
{
    return sink + seq * SIZE;
}

static void check_message(uint64_t seq)
{
    CHECK(memcmp(place(seq), source + seq * SIZE, SIZE) == 0);
}

/* The acknowledgements that come say, in the end, that all below `cum` are here. */
static void hear_all(struct r2_ep *ep, uint64_t cum)
{
    struct r2_msg_ack m = {0};

    while (m.cumulative < cum)
        CHECK_GE(remote_hear(ep, R2_F_ACK, &m, sizeof(m)), 0);
    CHECK_EQ(m.cumulative, cum);
}

/* Transports take what there is to say, also what came after the frame that a test waited for.
 * Asked anew it may be in doubt again: a lock is taken. */
static void said_soon(void)
{
    struct r2_ep *eps[] = {a, b};
    bool unsaid = true;

    for (int i = 0; i < REMOTE_WAIT_MS && (unsaid = r2_acks_unsaid()); i++) {
        for (int k = 0; k < (b ? 2 : 1); k++) {
            fake_pull(eps[k]);
            fake_sent(eps[k]);
        }
        fake_pass_ms(1);
    }
    CHECK(!unsaid);
}

TEST(done_before_it_is_said)
{
    struct r2_msg_ack m;
    struct r2_req *req;

    begin(1);
    a->manual_sent = true; /* the kernel takes nothing */
    req = irecv(place(0), SIZE);
    CHECK_EQ(eager(a, 0, R2_EAGER_BUFFERED), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    check_message(0);
    req = irecv(place(1), SIZE); /* a sender that waits is told first */
    remote_forget(a);
    CHECK_EQ(eager(a, 1, 0), 0);
    do { /* the first one's time may be over in between, and then it is said by itself */
        CHECK_GE(remote_hear_ms(a, R2_F_ACK, &m, sizeof(m), 0), 0);
    } while (m.cumulative == 1);
    CHECK_EQ(m.cumulative, 2);
    CHECK_EQ(remote_test(req, 60, NULL), 0);
    fake_sent(a);
    CHECK_EQ(remote_test(req, 1000, NULL), 1);
    remote_end(&r);
}

TEST(all_are_said)
{
    begin(1);
    for (uint64_t s = 0; s < 100; s++) {
        struct r2_req *req = irecv(place(s), SIZE);

        CHECK_EQ(eager(a, s, R2_EAGER_BUFFERED), 0);
        CHECK_EQ(remote_test(req, 1000, NULL), 1);
        check_message(s);
        if (check_random() % 8 == 0)
            fake_pass_ms(1);
    }
    hear_all(a, 100);
    said_soon();
    remote_end(&r);
}

TEST(stashed)
{
    struct r2_req *req;

    begin(1);
    CHECK_EQ(eager(a, 0, R2_EAGER_BUFFERED), 0);
    hear_all(a, 1);
    req = irecv(place(0), SIZE);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    check_message(0);
    remote_end(&r);
}

/* One that overtook another is not done before it: after a loss its place has to be said again, or
 * it would be sent again. */
TEST(overtaking)
{
    struct {
        struct r2_msg_ack m;
        struct r2_ack_range range[4];
    } __attribute__((packed)) f;
    struct r2_req *first, *second;
    struct r2_msg_path down;
    bool said = false;

    begin(2);
    first = irecv(place(0), SIZE);
    second = irecv(place(1), SIZE);
    CHECK_EQ(eager(b, 1, R2_EAGER_BUFFERED), 0);
    CHECK_GE(remote_hear(b, R2_F_ACK, &f, sizeof(f)), 0);
    CHECK_EQ(f.m.ranges, 1);
    CHECK_EQ(f.range[0].seq, 1);
    remote_forget(b);
    down = (struct r2_msg_path){.sender_nic = 0, .receiver_nic = 0, .gen = a->params.gen};
    fake_fail(a, ECONNRESET, false);
    CHECK_EQ(fake_ctrl(b, R2_F_DOWN, &down, sizeof(down)), 0);
    while (!said) {
        CHECK_GE(remote_hear(b, R2_F_ACK, &f, sizeof(f)), 0);
        for (uint32_t i = 0; i < f.m.ranges; i++)
            said |= f.range[i].seq == 1 && f.range[i].len == SIZE;
    }
    CHECK_EQ(eager(b, 0, R2_EAGER_BUFFERED), 0);
    CHECK_EQ(remote_test(first, 1000, NULL), 1);
    hear_all(b, 2);
    said_soon();
    CHECK_EQ(remote_test(second, 1000, NULL), 1);
    check_message(0);
    check_message(1);
    remote_end(&r);
}

/* What an exit waits for: from the moment that a receive is done until the kernel has what says so,
 * or there is no way to say it. */
TEST(unsaid)
{
    struct r2_req *req;

    begin(2);
    said_soon();
    a->manual_sent = true;
    b->manual_sent = true;
    req = irecv(place(0), SIZE);
    CHECK_EQ(eager(a, 0, R2_EAGER_BUFFERED), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    CHECK(r2_acks_unsaid());
    CHECK_GE(remote_hear(a, R2_F_ACK, NULL, 0), 0);
    fake_pass_ms(20);
    CHECK(r2_acks_unsaid());
    said_soon();
    req = irecv(place(1), SIZE);
    CHECK_EQ(eager(a, 1, R2_EAGER_BUFFERED), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    fake_fail(a, ECONNRESET, false);
    CHECK(r2_acks_unsaid()); /* the other path says it */
    fake_fail(b, ECONNRESET, false);
    said_soon();
    remote_end(&r);
}

/* A credit that waits for company is nothing that an exit owes anybody. */
TEST(held)
{
    struct r2_msg_cts cts = {0};
    struct r2_path *path;
    bool unsaid = true, still = true;

    begin(1);
    said_soon();
    path = a->params.owner;
    cts.conn = r.conn_id;
    r2_peer_lock(path->peer);
    r2_out_frame(path, R2_F_CTS, &cts, sizeof(cts), NULL, 0);
    r2_out_hold(path, 0, r2_now_ns() + R2_NS_PER_S);
    r2_peer_unlock(path->peer);
    for (int i = 0; i < 100 && unsaid && still; i++) { /* once may be in doubt: a lock is taken */
        unsaid = r2_acks_unsaid();
        r2_peer_lock(path->peer);
        still = path->outbox.due > R2_OUT_NOW; /* another frame may have taken it along */
        r2_peer_unlock(path->peer);
        fake_pass_ms(1);
    }
    CHECK(!unsaid || !still);
    r2_peer_lock(path->peer);
    path->outbox.due = 0;
    r2_peer_unlock(path->peer);
    CHECK_GE(remote_hear(a, R2_F_CTS, NULL, 0), 0);
    said_soon();
    remote_end(&r);
}

/* Closing says what has not been said. */
TEST(close_says_it)
{
    struct r2_msg_close m;
    struct r2_req *req;

    begin(1);
    req = irecv(place(0), SIZE);
    CHECK_EQ(eager(a, 0, R2_EAGER_BUFFERED), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    a->manual_sent = true;
    CHECK_EQ(r2_engine_close(r.conn), 0);
    CHECK_GE(remote_hear(a, R2_F_CLOSE, &m, sizeof(m)), 0);
    CHECK_EQ(m.cumulative, 1);
    CHECK(r2_acks_unsaid()); /* the transport has it, the kernel has not */
    said_soon();
    r2_engine_close_listen(r.listen);
    fake_forget(r.id);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_RAMP=0 R2CCL_IO_THREADS=2");
    return check_main(argc, argv);
}
