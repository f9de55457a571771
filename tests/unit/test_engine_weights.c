/* Weights of paths over a scripted transport (rung 2): who may take chunks, who is asked instead,
 * warm spares, and verdicts about NICs. */
#include "check.h"

#include "engine/locate/locate.h"
#include "enginelib/remote.h"
#include "topology/nics.h"

#define MSG (64u << 20)

static uint8_t *data;
static struct remote r;
static struct r2_ep *ep[3];

/* In the place of topology/again.c. NICs at loopback addresses that are not known as loopback's
 * (remote_wired) are in no table of the kernel. They must not be lost whenever somebody looks. */
int r2_nic_find_again(const struct r2_net_tables *tables, const struct r2_nic *nics, int n,
                      int which, const struct r2_nic *first, int family, struct r2_nic *out)
{
    (void)tables, (void)n, (void)first, (void)family;
    *out = nics[which];
    return 0;
}

static void begin(int paths)
{
    remote_new(&r, true, 3);
    for (int i = 0; i < 3; i++)
        atomic_store(&r2_eng.nic_state[i].weight, R2_WEIGHT_FULL); /* what a case before left */
    CHECK(remote_open(&r, paths));
    for (int i = 0; i < paths; i++) {
        ep[i] = fake_find(r.id, i, i, 0);
        CHECK(ep[i]);
    }
}

static struct r2_path *path_of(int nic)
{
    return r2_path_find(r.conn->peer, nic, nic, R2_VIA_TCP);
}

static int unanswered(int nic)
{
    int n;

    r2_peer_lock(r.conn->peer);
    n = path_of(nic)->hb.unanswered;
    pthread_mutex_unlock(&r.conn->peer->lock);
    return n;
}

/* As the operator's word does. */
static void weigh(int nic, unsigned permille)
{
    r2_peer_lock(r.conn->peer);
    atomic_store(&r2_eng.nic_state[nic].weight, permille);
    r2_peer_weigh(r.conn->peer);
    r2_peer_kick(r.conn->peer);
    r2_peer_unlock(r.conn->peer);
}

static struct r2_req *post(void)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK(req);
    CHECK_EQ(remote_cts(ep[0], &r, 0, MSG), 0);
    return req;
}

/* How long this program was away between a chunk and its acknowledgement is no path's speed. */
static void forget_rates(void)
{
    r2_peer_lock(r.conn->peer);
    for (int i = 0; i < r.conn->peer->n_paths; i++)
        r2_pathrate_forget(&r.conn->peer->paths[i]->rate);
    r2_peer_unlock(r.conn->peer);
}

/* One chunk over the path, acknowledged at once; its length, 0 if the path gets none. */
static uint32_t one(int nic)
{
    struct r2_bulk b;

    forget_rates();
    if (!fake_next(ep[nic], &b))
        return 0;
    CHECK(fake_chunk_sent(ep[nic], &b));
    CHECK_EQ(remote_ack_range(ep[nic], &r, b.seq, b.offset, b.len), 0);
    return b.len;
}

/* What a path carried beside its siblings says nothing of its NIC once it is down. */
TEST(down_is_not_behind)
{
    uint64_t now = r2_now_ns();
    struct r2_peer *p;

    begin(2);
    p = r.conn->peer;
    r2_peer_lock(p);
    for (int i = 0; i < 2; i++) {
        remote_shows(path_of(i), 1000000000, i ? 50000000 : 1000000000);
        path_of(i)->watch.judged_at = now;
    }
    r2_peer_watch_grey(p, now);
    CHECK_GT(r2_grey_nic_behind(1), 0);
    r2_peer_unlock(p);
    fake_fail(ep[1], ECONNRESET, false);
    CHECK_EQ(r2_grey_nic_behind(1), 0);
    remote_end(&r);
}

/* A warm spare carries nothing, so it shows nothing, neither that more is to be had nor that it is
 * not: what a path is held to fades beside the siblings that do carry, and only those. */
TEST(spare_is_no_sibling)
{
    begin(3);
    for (int spare = 1; spare >= 0; spare--) {
        struct r2_peer *p = r.conn->peer;
        uint64_t best;

        weigh(2, spare ? 0 : R2_WEIGHT_FULL);
        r2_peer_lock(p);
        for (int i = 0; i < 3; i++)
            remote_shows(path_of(i), 1000000000, i == 2 ? 0 : 50000000);
        r2_peer_watch_grey(p, r2_now_ns());
        best = path_of(0)->watch.best_rate;
        r2_peer_unlock(p);
        if (spare)
            CHECK_LT(best, 400000000);
        else
            CHECK_EQ(best, 1000000000);
    }
    remote_end(&r);
}

TEST(limited_share)
{
    uint64_t sent[2] = {0}, declined = 0;
    struct r2_req *req;

    begin(2);
    weigh(1, 100);
    req = post();
    while (sent[0] + sent[1] < MSG) {
        uint32_t len = one(1);

        sent[1] += len;
        if (!len) {
            int before = atomic_load(&ep[0]->kicks);

            declined++;
            CHECK_EQ(one(1), 0);
            CHECK_GT(atomic_load(&ep[0]->kicks), before); /* the other was asked instead */
            len = one(0);
            sent[0] += len;
            CHECK_GT(len, 0);
        }
    }
    CHECK_GT(declined, 10);
    CHECK_LT(sent[1], MSG / 8);
    CHECK_GT(sent[1], MSG / 16); /* of an eleventh */
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    remote_end(&r);
}

/* The limited path is asked again as soon as the others have sent enough, by nobody but them. */
TEST(limited_is_asked_again)
{
    int before;

    begin(2);
    weigh(1, 300);
    post();
    while (one(1)) {
    }
    before = atomic_load(&ep[1]->kicks);
    for (int i = 0; i < 8; i++)
        CHECK_GT(one(0), 0);
    CHECK_GT(atomic_load(&ep[1]->kicks), before);
    CHECK_GT(one(1), 0);
    remote_end(&r);
}

/* Being slow is told, and limits nothing by itself: the measured rate does (test_pathrate). */
TEST(slow_is_no_limit)
{
    begin(2);
    post();
    r2_peer_lock(r.conn->peer);
    r2_path_set_grey(path_of(1), 100, "test");
    r2_peer_unlock(r.conn->peer);
    for (int i = 0; i < 8; i++)
        CHECK_GT(one(1), 0);
    r2_peer_lock(r.conn->peer);
    CHECK_EQ(path_of(1)->flow.grey, 100);
    r2_peer_unlock(r.conn->peer);
    remote_end(&r);
}

/* Windows of 60 ms of the judge's own time: chunks of path 1 take `took`, 0 is well. */
static void windows(uint64_t *t, int n, uint64_t took, uint64_t rate)
{
    for (int i = 0; i < 6 * n; i++) {
        *t += 10 * R2_NS_PER_MS;
        r2_grey_chunk(&path_of(0)->watch, 64 << 10, 3 * R2_NS_PER_MS, 24000000, *t);
        r2_grey_chunk(&path_of(1)->watch, 64 << 10, took, rate, *t);
        if (i % 6 == 5)
            r2_peer_watch_grey(r.conn->peer, *t);
    }
}

/* Chunks are short while a path is slow, not while it only loses packets; the weight that is told
 * follows from one to the other. */
TEST(slow_and_lossy_in_turn)
{
    uint64_t t = r2_now_ns();
    const struct r2_path *path;

    begin(2);
    r2_peer_lock(r.conn->peer); /* nobody else judges meanwhile */
    path = path_of(1);
    windows(&t, 10, 3 * R2_NS_PER_MS, 24000000);
    for (int i = 0; i < 2; i++)
        r2_grey_segments(&path_of(i)->watch, 1000, 0, t);
    CHECK_EQ(path->flow.grey, R2_WEIGHT_FULL);
    windows(&t, 12, 7500 * R2_NS_PER_US, 8000000);
    for (int i = 0; i < 2; i++)
        r2_grey_segments(&path_of(i)->watch, 2000, i ? 50 : 0, t);
    CHECK(path->rate.known_slow);
    CHECK_LT(path->flow.grey, R2_GREY_LOSSY);
    windows(&t, 4, 3 * R2_NS_PER_MS, 24000000);
    CHECK_EQ(path->watch.why, R2_GREY_LOSS);
    CHECK(!path->rate.known_slow);
    CHECK_EQ(path->flow.grey, R2_GREY_LOSSY);
    windows(&t, 12, 7500 * R2_NS_PER_US, 8000000);
    CHECK_EQ(path->watch.why, R2_GREY_SLOW);
    CHECK(path->rate.known_slow);
    CHECK_LT(path->flow.grey, R2_GREY_LOSSY);
    CHECK_GT(path->flow.grey, R2_GREY_LOSSY / 2);
    r2_peer_unlock(r.conn->peer);
    remote_end(&r);
}

/* A sibling whose heartbeat is overdue holds nobody's share up. */
TEST(silent_sibling)
{
    begin(2);
    weigh(1, 100);
    post();
    while (one(1)) {
    }
    atomic_store(&ep[0]->silent, true);
    for (int i = 0; i < REMOTE_WAIT_MS && !unanswered(0); i++)
        fake_pass_ms(1);
    fake_pass_ms(60); /* the next tick weighs anew; a failure would need 10 heartbeats */
    CHECK(remote_up(&r, 0));
    for (int i = 0; i < 20; i++)
        CHECK_GT(one(1), 0);
    remote_end(&r);
}

static bool nic_back(int nic, int ms)
{
    for (int i = 0; i < ms && r2_nic_word(nic) == R2_NIC_FAILED; i++)
        fake_pass_ms(1);
    return r2_nic_word(nic) != R2_NIC_FAILED;
}

/* A broken NIC's own host still hands over what its processes say to each other by that NIC's
 * address: that proves nothing, an answer from elsewhere does. */
TEST(within_the_node)
{
    struct r2_wire_addr addr;
    struct r2_ep *again;

    for (int within = 1; within >= 0; within--) {
        remote_new(&r, true, 3);
        r.number = within ? -9 : r.number; /* its NICs have the addresses of ours */
        addr = remote_addr(&r, 1);
        CHECK_EQ(r2_nic_own(&addr) == 1, within);
        CHECK(remote_open(&r, 3));
        ep[1] = fake_find(r.id, 1, 1, 0);
        CHECK(ep[1]);
        if (within) {
            r2_nicstate_located(1, "test says so", r2_now_ns());
            CHECK(remote_wait_flag(&ep[1]->is_shut));
            CHECK_EQ(r2_nic_word(1), R2_NIC_FAILED);
            again = remote_path(&r, 1, ep[1]->params.gen);
            CHECK(again);
            CHECK(!nic_back(1, 500));
            CHECK(!atomic_load(&again->is_shut)); /* it serves all the same */
        } else {
            CHECK(nic_back(1, REMOTE_WAIT_MS));
            remote_nic_back(1);
        }
        remote_end(&r);
    }
}

int main(int argc, char **argv)
{
    data = calloc(1, MSG);
    if (!data)
        return 1;
    remote_wired = true;
    remote_engine(3, "R2CCL_HEARTBEAT=50 heartbeat_idle=600s heartbeat_misses=100");
    return check_main(argc, argv);
}
