/* R2CCL_MODE=migrate over a scripted transport (rung 2): a connection's bytes stay on its home NIC;
 * when that dies they move to one other, the nearest (test_engine_order). What it cannot prove:
 * timing of real NICs. */
#include "await.h"
#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (128 * KB)
#define NICS 3

static uint8_t data[MSG];
static struct remote r;
static struct r2_ep *ep[NICS];

static void begin(struct r2_req **req)
{
    remote_new(&r, true, NICS);
    CHECK(remote_open(&r, NICS));
    for (int i = 0; i < NICS; i++) {
        ep[i] = fake_find(r.id, i, i, 0);
        CHECK(ep[i]);
    }
    *req = NULL;
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, req), 0);
    CHECK(*req);
}

static void call(struct r2_ep *e, unsigned permille)
{
    struct r2_path *path = e->params.owner;

    r2_peer_lock(path->peer);
    r2_path_set_grey(path, permille, "test");
    r2_peer_unlock(path->peer);
}

/* The next chunk goes over `nic`, and over no other. */
static void next_goes_over(int nic)
{
    struct r2_bulk c;

    for (int i = 0; i < NICS; i++) {
        if (i != nic)
            CHECK_MSG(!fake_next(ep[i], &c), "a chunk over NIC %d", i);
    }
    CHECK(fake_next(ep[nic], &c));
    CHECK(fake_chunk_sent(ep[nic], &c));
}

TEST(one_stands_in)
{
    struct r2_req *req;
    int kicks[NICS];

    begin(&req);
    CHECK_EQ(remote_cts(ep[0], &r, 0, MSG), 0);
    next_goes_over(0);
    for (int i = 0; i < NICS; i++)
        kicks[i] = atomic_load(&ep[i]->kicks);
    fake_fail(ep[0], ECONNRESET, false);
    CHECK(remote_wait_state(&r, 0, R2_PATH_WAIT) || remote_state(&r, 0) == R2_PATH_CONNECTING);
    AWAIT(atomic_load(&ep[1]->kicks) != kicks[1]);
    CHECK_GT(atomic_load(&ep[1]->kicks), kicks[1]); /* idle paths pull only when asked */
    CHECK_EQ(atomic_load(&ep[2]->kicks), kicks[2]);
    ep[0] = NULL;
    for (int i = 0; i < 2; i++) {
        struct r2_bulk c;

        CHECK(!fake_next(ep[2], &c));
        CHECK(fake_next(ep[1], &c));
        CHECK(fake_chunk_sent(ep[1], &c));
    }
    remote_end(&r);
}

TEST(second_loss)
{
    struct r2_req *req;
    struct r2_bulk c;

    begin(&req);
    fake_fail(ep[0], ECONNRESET, false);
    fake_fail(ep[1], ECONNRESET, false);
    CHECK(remote_wait_state(&r, 0, R2_PATH_WAIT) || remote_state(&r, 0) == R2_PATH_CONNECTING);
    CHECK(remote_wait_state(&r, 1, R2_PATH_WAIT) || remote_state(&r, 1) == R2_PATH_CONNECTING);
    CHECK_EQ(remote_cts(ep[2], &r, 0, MSG), 0);
    CHECK(fake_next(ep[2], &c));
    remote_end(&r);
}

TEST(slow_is_not_lost)
{
    struct r2_req *req;

    begin(&req);
    CHECK_EQ(remote_cts(ep[0], &r, 0, MSG), 0);
    next_goes_over(0);
    call(ep[0], 100);
    next_goes_over(0);
    remote_end(&r);
}

/* However fast the others are: no chunk may be left to a path that will not take it. */
TEST(slow_home_carries_all)
{
    struct r2_req *req;
    uint64_t bytes = 0;
    struct r2_bulk c;

    begin(&req);
    remote_rate(ep[0], 10 * R2_NS_PER_MS);
    for (int i = 1; i < NICS; i++)
        remote_rate(ep[i], 10 * R2_NS_PER_US);
    CHECK_EQ(remote_cts(ep[0], &r, 0, MSG), 0);
    while (bytes < MSG) {
        for (int i = 1; i < NICS; i++)
            CHECK(!fake_next(ep[i], &c));
        CHECK(fake_next(ep[0], &c));
        bytes += c.len;
        CHECK(fake_chunk_sent(ep[0], &c));
        CHECK_EQ(remote_ack_range(ep[0], &r, 0, c.offset, c.len), 0);
    }
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    remote_end(&r);
}

/* The home NIC is not spared for bytes that it owes: nobody else would take them. */
TEST(owing_home_goes_on)
{
    struct r2_req *req;
    struct r2_path *path;

    begin(&req);
    path = ep[0]->params.owner;
    r2_peer_lock(path->peer);
    path->flow.busy_until = r2_now_ns() + 60 * R2_NS_PER_S;
    r2_peer_unlock(path->peer);
    CHECK_EQ(remote_cts(ep[0], &r, 0, MSG), 0);
    next_goes_over(0);
    remote_end(&r);
}

/* What path 0 is held to after a second in which NICs 0 and 1 showed 50 MB/s, and NIC 2 nothing. */
static uint64_t held_to(const struct r2_conn *other, int home)
{
    struct r2_peer *p = r.conn->peer;
    uint64_t best;

    CHECK(other != r.conn && other->peer == p);
    r2_peer_lock(p);
    r.conn->home = (uint8_t)home; /* as if it had been made for that device */
    for (int i = 0; i < NICS; i++)
        remote_shows(ep[i]->params.owner, 1000000000, i == 2 ? 0 : 50000000);
    r2_peer_watch_grey(p, r2_now_ns());
    best = ((struct r2_path *)ep[0]->params.owner)->watch.best_rate;
    r2_peer_unlock(p);
    return best;
}

/* A NIC that no connection keeps to is idle for good: it is no measure of what can be had, or what
 * a path is held to would never fade in this mode. */
TEST(idle_nics_are_no_siblings)
{
    struct r2_req *req;
    struct r2_conn *first;

    begin(&req);
    first = r.conn;
    CHECK(remote_more(&r, ep[0]));
    CHECK_LT(held_to(first, 1), 400000000);
    CHECK_EQ(held_to(first, 2), 1000000000); /* one that may be used could carry anything */
    CHECK_EQ(held_to(first, 0), 1000000000); /* nobody to compare with */
    CHECK_LT(held_to(first, 1), 400000000);
    r2_engine_close(first);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(NICS, "R2CCL_CHUNK=32K R2CCL_MODE=migrate");
    return check_main(argc, argv);
}
