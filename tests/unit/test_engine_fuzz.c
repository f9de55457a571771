/* A hostile but authenticated process (rung 2): random frames, valid frames with bytes changed, and
 * random chunks, to the engine as receiver and as sender, between honest work. No crash, no hang,
 * bounded memory; a refused frame ends its path, and the next one comes up. Under a sanitizer this
 * also proves that nothing outside the buffers is read or written. */
#include <malloc.h>

#include "check.h"
#include "enginelib/remote.h"

#define ROUNDS 10000
#define BUF (64 * 1024)

static uint8_t guard[3 * BUF]; /* the middle is the receive buffer */
static struct remote r;
static struct r2_ep *ep;

static uint64_t strange(void)
{
    static const uint64_t edges[] = {0, 1, 127, 128, 4096, BUF, UINT32_MAX, INT64_MAX, UINT64_MAX};

    switch (check_below(4)) {
    case 0:
        return edges[check_below(sizeof(edges) / sizeof(edges[0]))];
    case 1:
        return UINT64_MAX - check_below(300);
    case 2:
        return check_random();
    default:
        return check_below(40);
    }
}

/* Our own NIC's address, the peer's (the same in this bed), or any. */
static struct r2_wire_addr some_nic(void)
{
    struct r2_wire_addr a = {.family = 4};

    if (check_below(3))
        fake_ops.address((int)check_below(3), &a);
    else
        a.family = (uint8_t)check_random();
    return a;
}

/* A frame that could be meant well: right connection, small numbers. */
static size_t plausible(uint8_t type, uint8_t *body)
{
    uint64_t seq = check_below(40);
    size_t len = 0;

#define PUT(...)                                                                                   \
    do {                                                                                           \
        memcpy(body, &(__VA_ARGS__), sizeof(__VA_ARGS__));                                         \
        len = sizeof(__VA_ARGS__);                                                                 \
    } while (0)
    memset(body, 0, 256);
    if (type == R2_F_OPEN)
        PUT((struct r2_msg_open){.conn = 100 + seq,
                                 .listen = r.listen_id,
                                 .eager = 8192,
                                 .must_exist = (uint8_t)check_below(2)});
    else if (type == R2_F_OPEN_ACK)
        PUT((struct r2_msg_open_ack){.conn = r.conn_id});
    else if (type == R2_F_CTS)
        PUT((struct r2_msg_cts){.conn = r.conn_id, .seq = seq, .size = strange()});
    else if (type == R2_F_EAGER)
        PUT((struct r2_msg_eager){.conn = r.conn_id, .seq = seq});
    else if (type == R2_F_ACK)
        PUT((struct r2_msg_ack){.conn = r.conn_id, .cumulative = strange()});
    else if (type == R2_F_DOWN || type == R2_F_FENCED)
        PUT((struct r2_msg_path){.sender_nic = (uint8_t)check_below(20),
                                 .receiver_nic = (uint8_t)check_below(20),
                                 .gen = (uint32_t)check_below(8)});
    else if (type == R2_F_CLOSE)
        PUT((struct r2_msg_close){
            .conn = 100 + seq, .cumulative = strange(), .from_sender = !r.out});
    else if (type == R2_F_CLOSE_ACK)
        PUT((struct r2_msg_close_ack){.conn = r.conn_id, .from_sender = r.out});
    else if (type == R2_F_TEST || type == R2_F_TEST_ACK)
        PUT((struct r2_msg_test){.gen = (uint32_t)check_below(8), .bytes = (uint32_t)strange()});
    else if (type == R2_F_INFO)
        PUT((struct r2_msg_info){.pid = 1, .number = (uint32_t)check_below(4)});
    else if (type == R2_F_SEEN)
        PUT((struct r2_msg_seen){.nic = some_nic()});
    else if (type == R2_F_HEARD)
        PUT((struct r2_msg_heard){.number = (uint32_t)strange()});
#undef PUT
    return len;
}

static void add_tail(uint8_t type, uint8_t *body, size_t *len)
{
    uint32_t n = (uint32_t)check_below(type == R2_F_EAGER ? 2000 : 16);
    size_t at = type == R2_F_EAGER  ? offsetof(struct r2_msg_eager, size)
                : type == R2_F_ACK  ? offsetof(struct r2_msg_ack, ranges)
                : type == R2_F_CTS  ? offsetof(struct r2_msg_cts, keys)
                : type == R2_F_INFO ? offsetof(struct r2_msg_info, nics)
                : type == R2_F_SEEN ? offsetof(struct r2_msg_seen, seen)
                                    : 0;
    size_t each = type == R2_F_EAGER  ? 1
                  : type == R2_F_ACK  ? sizeof(struct r2_ack_range)
                  : type == R2_F_CTS  ? 4
                  : type == R2_F_SEEN ? sizeof(struct r2_wire_seen)
                                      : sizeof(struct r2_info_nic);

    if (!at)
        return;
    memcpy(body + at, &n, sizeof(n));
    for (size_t i = 0; i < n * each; i += 8) {
        uint64_t v = strange();

        memcpy(body + *len + i, &v, 8);
    }
    *len += n * each;
}

static int one_frame(void)
{
    static uint8_t body[16384];
    uint8_t type = (uint8_t)(1 + check_below(R2_F_LAST)), *exact;
    size_t len = plausible(type, body);
    int rc;

    add_tail(type, body, &len);
    for (uint64_t n = check_below(4); n && len; n--)
        body[check_below(len < 64 ? len : 64)] = (uint8_t)check_random();
    if (check_below(50) == 0)
        len = check_below(200);
    if (check_below(50) == 0)
        type = (uint8_t)check_random();
    exact = malloc(len ? len : 1); /* ASan sees a read behind its end */
    CHECK(exact);
    memcpy(exact, body, len);
    rc = r2_wire_check(type, exact, len);
    if (rc == 0)
        rc = fake_ctrl(ep, type, exact, len);
    free(exact);
    return rc;
}

static int one_chunk(void)
{
    struct r2_bulk c = remote_chunk(&r, check_below(4), check_below(600) * 128,
                                    (uint32_t)check_below(BUF / 128) * 128, BUF);
    int rc;

    if (check_below(3) == 0)
        c.offset = strange(); /* no address space is larger */
    if (check_below(3) == 0)
        c.total = strange();
    if (check_below(3) == 0)
        c.len = (uint32_t)strange();
    if (check_below(5) == 0)
        c.seq = strange();
    if (check_below(5) == 0)
        c.conn = check_below(2) ? strange() : R2_CONN_TEST;
    rc = fake_claim(ep, &c);
    if (rc)
        return rc;
    if (c.conn == R2_CONN_TEST)
        CHECK_LE(c.len, BUF); /* beside all messages */
    else
        CHECK_LE(c.offset + c.len, BUF); /* the engine's word that it lies inside */
    memset(c.data, 0x5a, c.len);
    if (check_below(2))
        fake_done(ep, &c);
    else
        fake_dropped(ep, &c, check_below(2));
    return 0;
}

static void post_some(void)
{
    struct r2_req *req = NULL;
    int rc = r.out ? r2_engine_isend(r.conn, guard + BUF, check_below(2) ? 100 : BUF, 0, NULL, &req)
                   : r2_engine_irecv(r.conn, guard + BUF, BUF, 0, NULL, &req);

    CHECK_LE(rc, 0);
}

/* A path made anew; the engine that connects may have been told never to: a fresh process then. */
static void renew(void)
{
    struct r2_ep *old = ep;

    fake_fail(old, EPROTO, false);
    CHECK(remote_wait_flag(&old->is_shut));
    ep = r.out ? NULL : remote_path(&r, 0, old->params.gen);
}

static void fresh(bool out, bool first)
{
    if (!first)
        remote_end(&r);
    remote_new(&r, out, 1);
    CHECK(remote_open(&r, 1));
    ep = fake_find(r.id, 0, 0, 0);
    CHECK(ep);
    for (int n = 0; n < 4; n++)
        post_some();
}

static void hostile(bool out)
{
    unsigned long rounds = check_rounds(ROUNDS), refused = 0;
    size_t before = 0;

    for (unsigned long i = 0; i < rounds; i++) {
        if (i % 500 == 0 || !ep)
            fresh(out, i == 0);
        if (i == rounds / 4)
            before = mallinfo2().uordblks;
        if (((!out && check_below(3) == 0) ? one_chunk() : one_frame()) < 0) {
            refused++;
            if (check_below(100) == 0)
                renew();
        }
        if (ep && check_below(20) == 0) {
            fake_pull(ep);
            remote_forget(ep);
        }
    }
    CHECK_GT(refused, rounds / 100);
    CHECK_LT(mallinfo2().uordblks, before + (32u << 20));
    remote_end(&r);
    for (size_t i = 0; i < BUF; i++)
        CHECK(guard[i] == 0 && guard[2 * BUF + i] == 0);
}

TEST(hostile_sender)
{
    hostile(false);
}

TEST(hostile_receiver)
{
    hostile(true);
}

/* Honest work still gets through afterwards. */
TEST(honest_afterwards)
{
    struct r2_req *req = NULL;

    remote_new(&r, false, 1);
    CHECK(remote_open(&r, 1));
    ep = fake_find(r.id, 0, 0, 0);
    CHECK_EQ(r2_engine_irecv(r.conn, guard + BUF, 100, 0, NULL, &req), 0);
    CHECK_EQ(remote_eager(ep, &r, 0, "honest", 7), 0);
    fake_pull(ep);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_STR((char *)guard + BUF, "honest");
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(1, "R2CCL_LOG=none");
    return check_main(argc, argv);
}
