/* Transports side by side and one-sided endpoints, over a scripted transport (rung 2): keys in the
 * clear-to-send, memory that a NIC could not register, sockets as the last resort, fences that the
 * hardware does not confirm. What it cannot prove: that queue pairs do as the script does. */
#include <errno.h>

#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (256 * KB)

static uint8_t data[2 * MSG];
static struct remote r;
static struct r2_mr *mr;

static int cts(struct r2_ep *ep, uint64_t seq, uint64_t addr, uint32_t key0, uint32_t key1)
{
    struct {
        struct r2_msg_cts m;
        uint32_t keys[2];
    } __attribute__((packed))
    c = {.m = {.conn = r.conn_id, .seq = seq, .size = MSG, .addr = addr, .keys = 2},
         .keys = {key0, key1}};

    return fake_ctrl(ep, R2_F_CTS, &c, sizeof(c));
}

static struct r2_req *isend(struct r2_mr *with)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, with, &req), 0);
    CHECK(req);
    return req;
}

/* Takes and acknowledges what the endpoint is given; returns the bytes. */
static uint64_t carry(struct r2_ep *ep, struct r2_ep *via, uint32_t key)
{
    struct r2_bulk c;
    uint64_t bytes = 0;

    while (fake_next(ep, &c)) {
        CHECK_EQ(c.remote_key, key);
        if (key)
            CHECK_EQ(c.remote_addr, 0x10000 + c.offset);
        CHECK(fake_chunk_sent(ep, &c));
        CHECK_EQ(remote_ack_range(via, &r, c.seq, c.offset, c.len), 0);
        bytes += c.len;
    }
    return bytes;
}

static void begin(bool out)
{
    remote_new(&r, out, 2);
    CHECK(remote_open(&r, 2));
    CHECK_EQ(r2_engine_reg(r.conn, data, sizeof(data), 1, &mr), 0);
}

TEST(cts_carries_keys)
{
    struct {
        struct r2_msg_cts m;
        uint32_t keys[2];
    } __attribute__((packed)) c;
    struct r2_req *req = NULL;
    struct r2_ep *a;

    begin(false);
    a = fake_find(r.id, 0, 0, 0);
    CHECK_EQ(r2_engine_irecv(r.conn, data + 128, MSG, 0, mr, &req), 0);
    CHECK_GE(remote_hear(a, R2_F_CTS, &c, sizeof(c)), 0);
    CHECK_EQ(c.m.addr, (uint64_t)(uintptr_t)(data + 128));
    CHECK_EQ(c.m.keys, 2);
    CHECK_EQ(c.keys[0], fake_key(0));
    CHECK_EQ(c.keys[1], fake_key(1));
    CHECK_EQ(c.m.flags, 0);
    remote_end(&r);
}

TEST(chunks_carry_keys)
{
    struct r2_ep *a, *b;
    struct r2_req *req;
    uint64_t sum = 0;

    begin(true);
    a = remote_via(&r, 0, R2_VIA_VERBS, 1000);
    b = remote_via(&r, 1, R2_VIA_VERBS, 1000);
    CHECK(a && b);
    req = isend(mr);
    CHECK_EQ(cts(a, 0, 0x10000, 7, 8), 0);
    for (int i = 0; i < 100 && sum < MSG; i++)
        sum += carry(a, a, 7) + carry(b, a, 8);
    CHECK_EQ(sum, MSG);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    remote_end(&r);
}

/* A NIC that could not register the memory, on either side, is no path for it. */
TEST(no_key_no_path)
{
    struct r2_ep *a, *b;
    struct r2_req *req;
    uint64_t sum = 0;

    begin(true);
    a = remote_via(&r, 0, R2_VIA_VERBS, 1000);
    b = remote_via(&r, 1, R2_VIA_VERBS, 1000);
    CHECK(a && b);
    req = isend(mr);
    CHECK_EQ(cts(a, 0, 0x10000, 0, 8), 0); /* the receiver's NIC 0 has none */
    for (int i = 0; i < 100 && sum < MSG; i++) {
        CHECK_EQ(carry(a, a, 7), 0);
        sum += carry(b, a, 8);
    }
    CHECK_EQ(sum, MSG);
    CHECK_EQ(remote_test(req, 0, NULL), 1);

    fake_unregistered = 2; /* the sender's NIC 1 has none */
    req = isend(mr);
    CHECK_EQ(cts(a, 1, 0x10000, 7, 8), 0);
    for (int i = 0; i < 100 && sum < 2 * MSG; i++) {
        CHECK_EQ(carry(b, a, 8), 0);
        sum += carry(a, a, 7);
    }
    CHECK_EQ(sum, 2 * MSG);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    fake_unregistered = 0;
    remote_end(&r);
}

/* Memory that no NIC can reach goes through sockets, though queue pairs are up. */
TEST(stranded_memory)
{
    struct r2_ep *a, *tcp;
    struct r2_req *req;
    uint64_t sum = 0;

    begin(true);
    a = remote_via(&r, 0, R2_VIA_VERBS, 1000);
    CHECK(a);
    CHECK(!remote_via(&r, 0, R2_VIA_TCP, 50)); /* nobody needs it */
    req = isend(NULL);
    CHECK_EQ(cts(a, 0, 0x10000, 7, 8), 0);
    CHECK_EQ(carry(a, a, 7), 0);
    tcp = remote_via(&r, 0, R2_VIA_TCP, 2000);
    CHECK(tcp);
    CHECK(fake_up(tcp));
    for (int i = 0; i < 1000 && sum < MSG; i++) {
        sum += carry(tcp, a, 7); /* sockets do not look at the key */
        fake_pass_ms(1);
    }
    CHECK_EQ(sum, MSG);
    CHECK_EQ(remote_test(req, 100, NULL), 1);
    remote_end(&r);
}

/* The receiver says FENCED only when the transport has confirmed it. */
TEST(unconfirmed_fence)
{
    struct r2_msg_path m;
    struct r2_ep *a, *b;

    begin(false);
    a = fake_find(r.id, 0, 0, 0);
    b = fake_find(r.id, 1, 1, 0);
    CHECK(a && b);
    remote_forget(b);
    atomic_store(&a->unconfirmed, true);
    CHECK_EQ(remote_down(b, a), 0);
    CHECK_EQ(remote_hear_ms(b, R2_F_FENCED, &m, sizeof(m), 300), -1);
    CHECK_GT(atomic_load(&a->waiting), 0); /* it was asked */
    CHECK_EQ(remote_down(b, a), 0);        /* asking again changes nothing */
    CHECK_EQ(remote_hear_ms(b, R2_F_FENCED, &m, sizeof(m), 100), -1);
    fake_shut_over(a);
    CHECK_GE(remote_hear(b, R2_F_FENCED, &m, sizeof(m)), 0);
    CHECK_EQ(m.gen, a->params.gen);
    remote_end(&r);
}

/* FENCED speaks for all generations up to its own, so an older one that is not confirmed holds it
 * back. */
TEST(fence_of_older)
{
    struct r2_ep *a, *b, *newer;
    struct r2_msg_path m = {0};

    begin(false);
    a = fake_find(r.id, 0, 0, 0);
    b = fake_find(r.id, 1, 1, 0);
    CHECK(a && b);
    atomic_store(&a->unconfirmed, true);
    newer = remote_unproven(&r, 0, a->params.gen);
    CHECK(newer);
    fake_fail(newer, ECONNRESET, false);
    CHECK(remote_wait_flag(&newer->is_shut));
    remote_forget(b);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(remote_down(b, newer), 0);
        while (remote_hear_ms(b, R2_F_FENCED, &m, sizeof(m), 100) >= 0)
            CHECK_LT(m.gen, a->params.gen);
    }
    fake_shut_over(a);
    while (m.gen != newer->params.gen)
        CHECK_GE(remote_hear(b, R2_F_FENCED, &m, sizeof(m)), 0);
    remote_end(&r);
}

/* Paths of NIC 0 and NIC 1; the end of the first, told by DOWN of attempts that never came, is not
 * confirmed. */
static void end_told_late(struct r2_ep **a, struct r2_ep **b, struct r2_msg_path *m)
{
    begin(false);
    *a = fake_find(r.id, 0, 0, 0);
    *b = fake_find(r.id, 1, 1, 0);
    CHECK(*a && *b);
    remote_forget(*b);
    atomic_store(&(*a)->unconfirmed, true);
    *m = (struct r2_msg_path){
        .sender_nic = 0, .receiver_nic = 0, .transport = (*a)->params.transport};
    m->gen = (*a)->params.gen + 3;
    CHECK_EQ(fake_ctrl(*b, R2_F_DOWN, m, sizeof(*m)), 0);
}

static void not_fenced(struct r2_ep *via, uint32_t gen, int ms)
{
    struct r2_msg_path said;

    while (remote_hear_ms(via, R2_F_FENCED, &said, sizeof(said), ms) >= 0)
        CHECK_LT(said.gen, gen);
}

static void fenced_up_to(struct r2_ep *via, uint32_t gen)
{
    struct r2_msg_path said = {0};

    while (said.gen < gen)
        CHECK_GE(remote_hear(via, R2_F_FENCED, &said, sizeof(said)), 0);
}

/* The word that is about the endpoint itself comes last. */
TEST(older_down_unconfirmed)
{
    struct r2_ep *a, *b;
    struct r2_msg_path m;
    uint32_t last;

    end_told_late(&a, &b, &m);
    last = m.gen;
    not_fenced(b, a->params.gen, 200);
    m.gen = a->params.gen;
    CHECK_EQ(fake_ctrl(b, R2_F_DOWN, &m, sizeof(m)), 0);
    not_fenced(b, a->params.gen, 300);
    fake_shut_over(a);
    fenced_up_to(b, last);
    remote_end(&r);
}

/* The path's next life ends, and that is confirmed, before the end of this one is. */
TEST(next_life_ends_first)
{
    struct r2_ep *a, *b, *newer;
    struct r2_msg_path m;

    end_told_late(&a, &b, &m);
    not_fenced(b, a->params.gen, 100);
    newer = remote_unproven(&r, 0, m.gen);
    CHECK(newer);
    fake_fail(newer, ECONNRESET, false);
    CHECK(remote_wait_flag(&newer->is_shut));
    not_fenced(b, a->params.gen, 300);
    fake_shut_over(a);
    fenced_up_to(b, m.gen);
    remote_end(&r);
}

/* Memory of a message that may still be written: the transport is told so. */
TEST(detach_of_cleared)
{
    struct r2_req *req = NULL;
    struct r2_ep *a;

    begin(false);
    a = fake_find(r.id, 0, 0, 0);
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, mr, &req), 0);
    CHECK_EQ(r2_engine_dereg(r.conn, mr), 0);
    CHECK(atomic_load(&a->cleared));
    CHECK_EQ(remote_test(req, 0, NULL), -ECANCELED);
    remote_end(&r);
}

/* What a path had written when it was fenced was never heard of. It may be on its way to the device
 * still, over newer bytes. So its NIC flushes, too, before the next message is shown.
 */
TEST(fenced_path_flushes)
{
    struct r2_req *req = NULL, *flush = NULL;
    struct r2_ep *lost, *left;
    struct r2_bulk b;

    begin(false);
    mr->device = true;
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, mr, &req), 0);
    left = remote_via(&r, 0, R2_VIA_VERBS, REMOTE_WAIT_MS);
    lost = remote_via(&r, 1, R2_VIA_VERBS, REMOTE_WAIT_MS);
    CHECK(left && lost);
    b = remote_chunk(&r, 0, 0, 64 * KB, MSG);
    CHECK_EQ(fake_claim(lost, &b), 0);
    fake_fail(lost, EIO, false);
    CHECK_GE(remote_hear(left, R2_F_FENCED, NULL, 0), 0);
    for (uint64_t at = 0; at < MSG; at += b.len) {
        b = remote_chunk(&r, 0, at, 64 * KB, MSG);
        CHECK_EQ(fake_claim(left, &b), 0);
        CHECK(fake_done(left, &b));
    }
    fake_pull(left); /* the acknowledgement is on its way */
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    atomic_store(&fake_flush_asked, 0);
    CHECK_EQ(r2_engine_iflush(r.conn, data, mr, &flush), 0);
    CHECK(flush);
    CHECK_EQ(atomic_load(&fake_flush_asked), 3);
    CHECK_EQ(remote_test(flush, REMOTE_WAIT_MS, NULL), 1);
    CHECK_EQ(r2_engine_iflush(r.conn, data, mr, &flush), 0);
    CHECK(!flush); /* all has been shown */
    r2_engine_dereg(r.conn, mr);
    remote_end(&r);
}

/* A flush of the connection asks these NICs (bits), and all has been shown afterwards. */
static void flushes(struct r2_conn *c, struct r2_mr *of, unsigned nics)
{
    struct r2_req *flush = NULL;

    atomic_store(&fake_flush_asked, 0);
    CHECK_EQ(r2_engine_iflush(c, data, of, &flush), 0);
    CHECK_EQ(atomic_load(&fake_flush_asked), nics);
    CHECK_EQ(flush != NULL, nics != 0);
    if (flush)
        CHECK_EQ(remote_test(flush, REMOTE_WAIT_MS, NULL), 1);
}

/* The path's end is confirmed, and the peer hears of it. */
static void fence(struct r2_ep *lost, struct r2_ep *left)
{
    struct r2_msg_path m = {0};

    fake_fail(lost, EIO, false);
    while (m.gen != lost->params.gen || m.transport != lost->params.transport)
        CHECK_GE(remote_hear(left, R2_F_FENCED, &m, sizeof(m)), 0);
}

/* What a fenced path wrote and did not tell of is for connections that wait for bytes of a device,
 * and for no others: they would pay a flush for each NIC that failed. */
TEST(fence_marks_who_waits)
{
    struct r2_conn *waits, *host, *idle;
    struct r2_mr *device_mr, *host_mr, *idle_mr;
    struct r2_req *req = NULL, *other = NULL;
    struct r2_ep *lost, *left;

    begin(false);
    left = remote_via(&r, 0, R2_VIA_VERBS, REMOTE_WAIT_MS);
    lost = remote_via(&r, 1, R2_VIA_VERBS, REMOTE_WAIT_MS);
    CHECK(left && lost);
    waits = r.conn;
    device_mr = mr;
    CHECK(remote_more(&r, left));
    host = r.conn;
    CHECK_EQ(r2_engine_reg(host, data, sizeof(data), 1, &host_mr), 0);
    CHECK(remote_more(&r, left));
    idle = r.conn;
    CHECK_EQ(r2_engine_reg(idle, data, sizeof(data), 1, &idle_mr), 0);
    device_mr->device = idle_mr->device = true;
    CHECK_EQ(r2_engine_irecv(host, data, MSG, 0, host_mr, &other), 0);
    CHECK_EQ(r2_engine_irecv(waits, data + MSG, MSG, 0, device_mr, &req), 0);
    fence(lost, left);
    flushes(idle, idle_mr, 0);
    flushes(host, device_mr, 0);
    flushes(waits, device_mr, 1u << 1);
    flushes(waits, device_mr, 0);
    r2_engine_close(waits);
    r2_engine_close(host);
    remote_end(&r);
}

static bool alone_within(struct r2_ep *ep, int ms)
{
    for (int t = 0; t < ms && !fake_alone(ep); t++)
        fake_pass_ms(1);
    return fake_alone(ep);
}

/* Which path is the last one that could carry what this one does: not while there is another one
 * that is up; sockets are none where there is memory that they do not carry. */
TEST(alone)
{
    struct r2_ep *a, *b, *socket;

    begin(false);
    a = fake_find(r.id, 0, 0, 0);
    b = fake_find(r.id, 1, 1, 0);
    CHECK(a && b);
    CHECK(!fake_alone(a) && !fake_alone(b));
    fake_fail(b, ECONNRESET, false);
    CHECK(alone_within(a, REMOTE_WAIT_MS));
    fake_offers = 0;
    socket = remote_path(&r, 1, r.gen);
    fake_offers = R2_OFFER_ROCE;
    CHECK(socket && socket->params.transport == R2_VIA_TCP);
    CHECK(fake_alone(a) && !fake_alone(socket));
    remote_end(&r);
    begin(true);
    a = fake_find(r.id, 0, 0, 0);
    b = fake_find(r.id, 1, 1, 0);
    CHECK(a && b && !fake_alone(a));
    fake_fail(b, ECONNRESET, false);
    CHECK(alone_within(a, REMOTE_WAIT_MS));
    remote_end(&r);
}

/* Bytes that came through a socket were written by a thread, and no NIC has to show them. */
TEST(fenced_socket_does_not_flush)
{
    struct r2_req *req = NULL;
    struct r2_ep *left, *socket;

    begin(false);
    left = remote_via(&r, 0, R2_VIA_VERBS, REMOTE_WAIT_MS);
    CHECK(left);
    fake_offers = 0;
    socket = remote_path(&r, 1, r.gen);
    fake_offers = R2_OFFER_ROCE;
    CHECK(socket && socket->params.transport == R2_VIA_TCP);
    mr->device = true;
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, mr, &req), 0);
    fence(socket, left);
    flushes(r.conn, mr, 0);
    r2_engine_dereg(r.conn, mr);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    fake_offers = R2_OFFER_ROCE;
    remote_engine(2, "R2CCL_CHUNK=32K");
    r2_eng.device_memory = true; /* before its threads have anything to read it for */
    return check_main(argc, argv);
}
