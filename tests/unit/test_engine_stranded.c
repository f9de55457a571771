/* Messages whose memory is registered with some NICs only, over a scripted transport (rung 2): the
 * rules about who takes chunks (home NIC, spares, weight 0) never leave them waiting for ever. What
 * it cannot prove: that queue pairs do as the script does. */
#include <errno.h>

#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (256 * KB)

static uint8_t data[MSG];
static struct remote r;
static struct r2_mr *mr;

static void begin(void)
{
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    CHECK_EQ(r2_engine_reg(r.conn, data, sizeof(data), 1, &mr), 0);
}

static struct r2_req *post(struct r2_ep *ep, uint64_t seq, struct r2_mr *with, uint32_t key0,
                           uint32_t key1)
{
    struct {
        struct r2_msg_cts m;
        uint32_t keys[2];
    } __attribute__((packed))
    c = {.m = {.conn = r.conn_id, .seq = seq, .size = MSG, .addr = 0x10000, .keys = 2},
         .keys = {key0, key1}};
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, with, &req), 0);
    CHECK(req);
    CHECK_EQ(fake_ctrl(ep, R2_F_CTS, &c, sizeof(c)), 0);
    return req;
}

/* Bytes that the endpoint is given within 1 s, acknowledged at once. */
static uint64_t carry(struct r2_ep *ep, struct r2_ep *via)
{
    struct r2_bulk c;
    uint64_t bytes = 0;

    for (int ms = 0; ms < 1000 && bytes < MSG; ms++) {
        while (fake_next(ep, &c)) {
            CHECK(fake_chunk_sent(ep, &c));
            CHECK_EQ(remote_ack_range(via, &r, c.seq, c.offset, c.len), 0);
            bytes += c.len;
        }
        fake_pass_ms(1);
    }
    return bytes;
}

/* The home NIC lives, but the receiver could not register the buffer with its NIC of that rail. */
TEST(home_without_key)
{
    struct r2_ep *a, *b;
    struct r2_req *req;
    struct r2_bulk c;

    begin();
    a = remote_via(&r, 0, R2_VIA_VERBS, 1000);
    b = remote_via(&r, 1, R2_VIA_VERBS, 1000);
    CHECK(a && b);
    req = post(a, 0, mr, 0, 8);
    CHECK_EQ(carry(b, a), MSG);
    CHECK_EQ(remote_test(req, 100, NULL), 1);
    req = post(a, 1, mr, 7, 8); /* registered with both: home again */
    fake_pass_ms(60);
    CHECK(!fake_next(b, &c));
    CHECK_EQ(carry(a, a), MSG);
    CHECK_EQ(remote_test(req, 100, NULL), 1);
    remote_end(&r);
}

/* As the operator's word does. */
static void weigh(struct r2_ep *ep, unsigned permille)
{
    r2_peer_lock(r.conn->peer);
    atomic_store(&r2_eng.nic_state[ep->params.local_nic].weight, permille);
    r2_peer_weigh(r.conn->peer);
    r2_peer_kick(r.conn->peer);
    r2_peer_unlock(r.conn->peer);
}

/* One message after the other, each when the one before is over, so that the connection has nothing
 * to send in between: none waits for the peer's next tick. */
TEST(every_message_at_once)
{
    struct r2_ep *a, *b;
    struct r2_bulk c;

    begin();
    a = remote_via(&r, 0, R2_VIA_VERBS, 1000);
    b = remote_via(&r, 1, R2_VIA_VERBS, 1000);
    CHECK(a && b);
    for (uint64_t seq = 0; seq < 8; seq++) {
        bool with = seq % 4 == 3; /* registered with both: home again, at once */
        struct r2_ep *way = with ? a : b;
        int kicks = atomic_load(&way->kicks);
        struct r2_req *req = post(a, seq, mr, with ? 7 : 0, 8);

        CHECK_GT(atomic_load(&way->kicks), kicks);
        CHECK(!fake_next(with ? b : a, &c));
        CHECK(fake_next(way, &c));
        CHECK(fake_chunk_sent(way, &c));
        CHECK_EQ(remote_ack_range(a, &r, c.seq, c.offset, c.len), 0);
        CHECK_EQ(carry(way, a), MSG - c.len);
        CHECK_EQ(remote_test(req, 100, NULL), 1);
        fake_pass_ms(40); /* ticks pass, and nothing waits */
    }
    remote_end(&r);
}

/* Only the warm spare of weight 0 has a key. */
TEST(weight_zero_alone)
{
    struct r2_ep *a, *b;
    struct r2_req *req;

    begin();
    a = remote_via(&r, 0, R2_VIA_VERBS, 1000);
    b = remote_via(&r, 1, R2_VIA_VERBS, 1000);
    CHECK(a && b);
    weigh(b, 0);
    req = post(a, 0, mr, 0, 8);
    CHECK_EQ(carry(b, a), MSG);
    CHECK_EQ(remote_test(req, 100, NULL), 1);
    weigh(b, R2_WEIGHT_FULL);
    remote_end(&r);
}

/* Sockets that stood in before, and stand by now, are the only way for memory without keys. */
TEST(sockets_that_stand_by)
{
    struct r2_ep *a, *b, *tcp, *again;
    struct r2_req *req;
    bool spare;
    int kicks;

    begin();
    a = remote_via(&r, 0, R2_VIA_VERBS, 1000);
    b = remote_via(&r, 1, R2_VIA_VERBS, 1000);
    CHECK(a && b);
    fake_fail(a, EIO, false);
    fake_fail(b, EIO, false);
    tcp = remote_via(&r, 0, R2_VIA_TCP, 2000);
    CHECK(tcp);
    CHECK(fake_up(tcp));
    again = remote_via(&r, 0, R2_VIA_VERBS, 3000);
    CHECK(again && again != a);
    CHECK(fake_up(again));
    CHECK(remote_prove(&r, again));
    fake_pass_ms(150); /* the planner's turn */
    r2_peer_lock(((struct r2_path *)tcp->params.owner)->peer);
    spare = ((struct r2_path *)tcp->params.owner)->role == R2_ROLE_SPARE;
    r2_peer_unlock(((struct r2_path *)tcp->params.owner)->peer);
    CHECK(spare);
    kicks = atomic_load(&tcp->kicks);
    req = post(again, 0, NULL, 0, 0);
    for (int ms = 0; ms < 1000 && atomic_load(&tcp->kicks) == kicks; ms++)
        fake_pass_ms(1);
    CHECK_GT(atomic_load(&tcp->kicks), kicks); /* it is asked: nobody else would */
    CHECK_EQ(carry(tcp, again), MSG);
    CHECK_EQ(remote_test(req, 100, NULL), 1);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    fake_offers = R2_OFFER_ROCE;
    remote_engine(2, "R2CCL_CHUNK=32K R2CCL_MODE=migrate");
    return check_main(argc, argv);
}
