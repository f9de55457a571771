/* A path that was slow when it was new, over a scripted transport (rung 2): small messages go to
 * its sibling, and yet it is tried again. What it cannot prove: timing of real NICs. */
#include "check.h"
#include "enginelib/remote.h"

#define MSG (64u << 10)

static uint8_t data[MSG];
static struct remote r;
static struct r2_ep *ep[2];

/* Sends a message of one chunk; the NIC whose path takes it, the home NIC asked first. */
static int taker(uint64_t seq)
{
    struct r2_req *req = NULL;
    struct r2_bulk b;
    int nic = 0;

    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK_EQ(remote_cts(ep[0], &r, seq, MSG), 0);
    while (nic < 2 && !fake_next(ep[nic], &b))
        nic++;
    CHECK_LT(nic, 2);
    CHECK(fake_chunk_sent(ep[nic], &b));
    CHECK_EQ(remote_ack_range(ep[nic], &r, b.seq, b.offset, b.len), 0);
    CHECK_EQ(remote_test(req, 1000, NULL), 1);
    return nic;
}

/* Two paths, of which the home NIC's is a thousand times slower; how many messages it took. */
static uint64_t begin(void)
{
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    for (int i = 0; i < 2; i++) {
        ep[i] = fake_find(r.id, i, i, 0);
        CHECK(ep[i]);
    }
    CHECK_EQ(taker(0), 0);
    remote_rate(ep[0], 10 * R2_NS_PER_MS);
    remote_rate(ep[1], 10 * R2_NS_PER_US);
    return 1;
}

TEST(slow_once)
{
    uint64_t seq, from;
    int nic;

    seq = begin();
    from = r2_now_ns();
    CHECK_EQ(taker(seq++), 1);
    do {
        fake_pass_ms(10);
        nic = taker(seq++);
    } while (nic != 0 && r2_now_ns() - from < 5 * R2_NS_PER_S);
    CHECK_EQ(nic, 0);
    CHECK_GT(r2_now_ns() - from, 400 * R2_NS_PER_MS); /* seldom: it may really be slow */
    remote_end(&r);
}

static int unanswered(int nic)
{
    struct r2_path *path = ep[nic]->params.owner;
    int n;

    r2_peer_lock(path->peer);
    n = path->hb.unanswered;
    r2_peer_unlock(path->peer);
    return n;
}

/* A path whose heartbeat is overdue may be dead: a trial's chunks would wait for the verdict. It
 * has one again when it answers. */
TEST(none_while_overdue)
{
    uint64_t seq, from;
    int nic;

    seq = begin();
    atomic_store(&ep[0]->silent, true);
    for (from = r2_now_ns(); !unanswered(0) && r2_now_ns() - from < 3 * R2_NS_PER_S;)
        fake_pass_ms(5);
    CHECK_GT(unanswered(0), 0);
    for (from = r2_now_ns(); r2_now_ns() - from < 2 * R2_TRIAL_SELDOM; fake_pass_ms(10))
        CHECK_EQ(taker(seq++), 1);
    CHECK(remote_up(&r, 0));
    atomic_store(&ep[0]->silent, false);
    from = r2_now_ns();
    do {
        fake_pass_ms(10);
        nic = taker(seq++);
    } while (nic != 0 && r2_now_ns() - from < 5 * R2_NS_PER_S);
    CHECK_EQ(nic, 0);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_CHUNK=64K R2CCL_HEARTBEAT=50 heartbeat_idle=50 "
                     "heartbeat_misses=100");
    return check_main(argc, argv);
}
