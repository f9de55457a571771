/* Shares of paths where not all can carry a message, over a scripted transport (rung 2): the share
 * of a path that cannot is nobody's to wait for. What it cannot prove: what weights do to speed
 * (tests/bench/ramp, grey). */
#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (512 * KB)
#define MESSAGES 20
#define LIMIT_MS 1500

static uint8_t data[MSG];
static struct remote r;

static int cts(struct r2_ep *ep, uint64_t seq)
{
    struct {
        struct r2_msg_cts m;
        uint32_t keys[3];
    } __attribute__((packed))
    c = {.m = {.conn = r.conn_id, .seq = seq, .size = MSG, .addr = 0x10000, .keys = 3},
         .keys = {0, 8, 9}}; /* the receiver's NIC 0 could not register it */

    return fake_ctrl(ep, R2_F_CTS, &c, sizeof(c));
}

static uint64_t carry(struct r2_ep *ep)
{
    struct r2_bulk c;
    uint64_t bytes = 0;

    while (fake_next(ep, &c)) {
        CHECK(fake_chunk_sent(ep, &c));
        CHECK_EQ(remote_ack_range(ep, &r, c.seq, c.offset, c.len), 0);
        bytes += c.len;
    }
    return bytes;
}

static struct r2_ep *path(int nic)
{
    struct r2_ep *ep = remote_via(&r, nic, R2_VIA_VERBS, 2000);

    CHECK(ep);
    return ep;
}

/* Two NICs of less than full weight are all there is for the memory; the third one, of full weight,
 * cannot reach it. What they do not get is not kept for that one. */
TEST(limited_carriers)
{
    struct r2_ep *a, *b, *c;
    struct r2_mr *mr;
    uint64_t sent[2] = {0}, from;

    remote_new(&r, true, 3);
    CHECK(remote_open(&r, 3));
    CHECK_EQ(r2_engine_reg(r.conn, data, sizeof(data), 1, &mr), 0);
    a = path(0);
    b = path(1);
    c = path(2);
    CHECK_EQ(remote_word(a, 1, R2_NIC_USABLE, 500, 5), 0);
    CHECK_EQ(remote_word(a, 2, R2_NIC_USABLE, 300, 5), 0);
    from = r2_now_ns();
    for (uint64_t seq = 0; seq < MESSAGES; seq++) {
        struct r2_req *req = NULL;
        uint64_t sum = 0;

        CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, mr, &req), 0);
        CHECK_EQ(cts(a, seq), 0);
        while (sum < MSG) {
            uint64_t one = carry(b), two = carry(c);

            CHECK_EQ(carry(a), 0);
            sent[0] += one;
            sent[1] += two;
            sum += one + two;
            if (!one && !two)
                fake_pass_ms(1);
            CHECK_MSG(r2_now_ns() - from < LIMIT_MS * R2_NS_PER_MS,
                      "after %d ms %u KiB of message %u wait for a path that cannot carry them",
                      LIMIT_MS, (unsigned)((MSG - sum) / KB), (unsigned)seq);
        }
        CHECK_EQ(remote_test(req, 1000, NULL), 1);
    }
    CHECK(sent[0] && sent[1]);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    fake_offers = R2_OFFER_ROCE;
    remote_engine(3, "R2CCL_CHUNK=32K R2CCL_RAMP=0");
    return check_main(argc, argv);
}
