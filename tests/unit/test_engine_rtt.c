/* Frames that messages wait for, over a scripted transport (rung 2): they do not take a path whose
 * round trips lag behind, at neither end, and take it again when it does not. */
#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (512 * KB)
#define QUICK_US 300
#define SLOW_US 20000

static uint8_t data[MSG], source[MSG];
static struct remote r;
static struct r2_ep *ep[2]; /* of NIC 0, the connection's home, and of NIC 1 */

static void begin(bool out)
{
    remote_new(&r, out, 2);
    CHECK(remote_open(&r, 2));
    for (int i = 0; i < 2; i++) {
        ep[i] = fake_find(r.id, i, i, 0);
        CHECK(ep[i]);
        atomic_store(&ep[i]->rtt_us, QUICK_US);
    }
}

static bool lags(int nic)
{
    const struct r2_path *path;
    bool yes;

    r2_peer_lock(r.conn->peer);
    path = r2_path_find(r.conn->peer, nic, nic, R2_VIA_TCP);
    yes = r2_path_high_rtt(path);
    pthread_mutex_unlock(&r.conn->peer->lock);
    return yes;
}

static void set_rtt(int nic, int us, bool to_lag)
{
    atomic_store(&ep[nic]->rtt_us, us);
    FAKE_AWAIT(REMOTE_WAIT_MS, lags(nic) == to_lag);
}

/* The next small message goes out over that NIC, and over no other. */
static void eager_over(int nic)
{
    struct r2_req *req = NULL;

    remote_forget(ep[0]);
    remote_forget(ep[1]);
    CHECK_EQ(r2_engine_isend(r.conn, data, 64, 0, NULL, &req), 0);
    CHECK(req);
    CHECK_GE(remote_hear(ep[nic], R2_F_EAGER, NULL, 0), 0);
    CHECK_EQ(remote_hear_ms(ep[!nic], R2_F_EAGER, NULL, 0, 0), -1);
}

TEST(small_messages)
{
    struct r2_req *req = NULL;

    begin(true);
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &req), 0); /* so the peer is busy */
    eager_over(0);
    set_rtt(0, SLOW_US, true);
    eager_over(1);
    set_rtt(1, SLOW_US, false); /* nobody is quicker now */
    set_rtt(0, SLOW_US, false);
    eager_over(0);
    set_rtt(1, QUICK_US, false);
    set_rtt(0, SLOW_US, true);
    set_rtt(0, QUICK_US, false);
    eager_over(0);
    remote_end(&r);
}

/* Chunks that the lagging path has brought are acknowledged over the other one as well. */
TEST(clear_to_send_and_acknowledgements)
{
    struct r2_req *req = NULL;
    struct r2_bulk b;

    begin(false);
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK(req);
    CHECK_GE(remote_hear(ep[0], R2_F_CTS, NULL, 0), 0);
    b = remote_chunk(&r, 0, 0, 64 * KB, MSG);
    CHECK_EQ(fake_claim(ep[0], &b), 0);
    CHECK(remote_place(ep[0], &b, source));
    CHECK_GE(remote_hear(ep[0], R2_F_ACK, NULL, 0), 0);

    set_rtt(0, SLOW_US, true);
    remote_forget(ep[0]);
    remote_forget(ep[1]);
    b = remote_chunk(&r, 0, 64 * KB, 64 * KB, MSG);
    CHECK_EQ(fake_claim(ep[0], &b), 0);
    CHECK(remote_place(ep[0], &b, source));
    CHECK_GE(remote_hear(ep[1], R2_F_ACK, NULL, 0), 0);
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK(req);
    CHECK_GE(remote_hear(ep[1], R2_F_CTS, NULL, 0), 0);
    CHECK_EQ(remote_hear_ms(ep[0], R2_F_ACK, NULL, 0, 0), -1);
    CHECK_EQ(remote_hear_ms(ep[0], R2_F_CTS, NULL, 0, 0), -1);
    remote_end(&r);
}

/* A path that lags is better than one that does not answer, and than none. */
TEST(lagging_is_better_than_dead)
{
    struct r2_req *req = NULL;

    begin(true);
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &req), 0);
    set_rtt(0, SLOW_US, true);
    fake_fail(ep[1], ECONNRESET, false);
    eager_over(0);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_HEARTBEAT=20");
    return check_main(argc, argv);
}
