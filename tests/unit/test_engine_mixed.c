/* Nodes of which some NICs have RDMA and some have not, over a scripted transport (rung 2): which
 * pairs sockets join while queue pairs serve, how their weights share the bytes, what the last
 * resort is, and who stands by. What it cannot prove: that real NICs do as the script does. */
#include <errno.h>
#include <sys/wait.h>

#include "await.h"
#include "check.h"
#include "engine/nic/nics.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (8192 * KB)

static uint8_t data[MSG];
static struct remote r;
static struct r2_mr *mr;

static bool pair_is(const struct r2_ep *ep, int lnic, int rnic, int via)
{
    return memcmp(ep->params.remote_process, r.id, 16) == 0 && ep->params.local_nic == lnic &&
           ep->params.remote_nic == rnic && ep->params.transport == via && !ep->params.probe &&
           !atomic_load(&ep->is_shut);
}

static struct r2_ep *pair_now(int lnic, int rnic, int via)
{
    struct r2_ep *ep, *found = NULL;

    pthread_mutex_lock(&fake_all_lock);
    for (ep = fake_all; ep && !found; ep = ep->next)
        found = pair_is(ep, lnic, rnic, via) ? ep : NULL;
    pthread_mutex_unlock(&fake_all_lock);
    return found;
}

static struct r2_ep *pair(int lnic, int rnic, int via)
{
    struct r2_ep *ep = pair_now(lnic, rnic, via);

    for (int ms = 0; ms < REMOTE_WAIT_MS && !ep; ms++) {
        fake_pass_ms(1);
        ep = pair_now(lnic, rnic, via);
    }
    CHECK_MSG(ep, "nothing joins NIC %d to %d by transport %d", lnic, rnic, via);
    return ep;
}

static void serves(struct r2_ep *ep)
{
    CHECK(fake_up(ep));
    CHECK(remote_prove(&r, ep));
}

static bool spare(const struct r2_ep *ep)
{
    struct r2_path *path = ep->params.owner;
    bool is;

    r2_peer_lock(path->peer);
    is = path->role == R2_ROLE_SPARE;
    /* Operators see it. */
    CHECK_EQ(__atomic_load_n(&r2_control_segment(r2_eng.ctl)->paths[path->shown.row].spare,
                             __ATOMIC_RELAXED),
             is);
    r2_peer_unlock(path->peer);
    return is;
}

/* Bits: NICs without RDMA. One pair of NICs with it is up, and a connection. */
static struct r2_ep *begin(unsigned here, unsigned there)
{
    atomic_store(&fake_plain, there); /* the handle is the remote process's */
    remote_plain = there;
    remote_new(&r, true, 2);
    atomic_store(&fake_plain, here);
    CHECK(remote_open(&r, 1));
    CHECK_EQ(r2_engine_reg(r.conn, data, sizeof(data), 1, &mr), 0);
    return pair(0, 0, R2_VIA_VERBS);
}

static struct r2_req *isend(void)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, mr, &req), 0);
    CHECK(req);
    return req;
}

static void clear(struct r2_ep *ep, uint64_t seq)
{
    struct {
        struct r2_msg_cts m;
        uint32_t keys[2];
    } __attribute__((packed))
    c = {.m = {.conn = r.conn_id, .seq = seq, .size = MSG, .addr = 0x10000, .keys = 2},
         .keys = {7, 0}};

    CHECK_EQ(fake_ctrl(ep, R2_F_CTS, &c, sizeof(c)), 0);
}

static struct r2_req *post(struct r2_ep *ep, uint64_t seq)
{
    struct r2_req *req = isend();

    clear(ep, seq);
    return req;
}

/* Both ask in turn until all is sent; bytes that the second one got. */
static uint64_t share_of(struct r2_ep *ep, struct r2_ep *other, struct r2_req *req)
{
    uint64_t mine = 0;
    struct r2_bulk c;
    int done = 0;

    WHILE_MS (REMOTE_WAIT_MS, !(done = remote_test(req, 0, NULL))) {
        for (int turn = 0; turn < 2; turn++) {
            struct r2_ep *from = turn ? other : ep;

            if (!fake_next(from, &c))
                continue;
            CHECK(fake_chunk_sent(from, &c));
            CHECK_EQ(remote_ack_range(ep, &r, c.seq, c.offset, c.len), 0);
            mine += turn ? c.len : 0;
        }
    }
    CHECK_EQ(done, 1);
    return mine;
}

static void weigh(int nic, unsigned permille)
{
    r2_peer_lock(r.conn->peer);
    atomic_store(&r2_eng.nic_state[nic].weight, permille);
    r2_peer_weigh(r.conn->peer);
    r2_peer_unlock(r.conn->peer);
}

static void begin_ramped(struct r2_ep *ep)
{
    struct r2_path *path = ep->params.owner;

    for (int ms = 0; ms < REMOTE_WAIT_MS; ms++) {
        bool free;

        r2_peer_lock(path->peer);
        free = r2_path_may(path) >= R2_MAY_UNLIMITED;
        r2_peer_unlock(path->peer);
        if (free)
            return;
        fake_pass_ms(1);
    }
    CHECK_MSG(false, "it does not get its full weight");
}

/* Queue pairs of the one NIC and sockets of the other share by weight: alike, a third, nothing. */
TEST(shares)
{
    static const struct {
        unsigned weight, least, most; /* of 100 */
    } turns[] = {{1000, 35, 65}, {500, 20, 45}, {0, 0, 0}, {1000, 35, 65}};
    struct r2_ep *rdma = begin(2, 2), *tcp = pair(1, 1, R2_VIA_TCP);
    uint64_t posted = 0;

    serves(tcp);
    begin_ramped(tcp);
    for (uint64_t i = 0; i < sizeof(turns) / sizeof(turns[0]); i++) {
        uint64_t got = 101;

        weigh(1, turns[i].weight);
        /* A path that this thread did not serve in time, on a busy machine, counts as slow. */
        for (int tries = 0; tries < 5 && (got < turns[i].least || got > turns[i].most); tries++)
            got = share_of(rdma, tcp, post(rdma, posted++)) * 100 / MSG;
        CHECK_MSG(got >= turns[i].least && got <= turns[i].most, "weight %u: %u of 100",
                  turns[i].weight, (unsigned)got);
    }
    CHECK(!pair_now(0, 0, R2_VIA_TCP) && !pair_now(0, 1, R2_VIA_TCP));
    remote_end(&r);
}

/* Whichever end has NICs without RDMA, those that are left are joined by sockets, by rail. */
TEST(one_end_is_mixed)
{
    for (unsigned end = 0; end < 2; end++) {
        struct r2_ep *tcp;

        begin(end ? 2 : 0, end ? 0 : 2);
        tcp = pair(1, 1, R2_VIA_TCP);
        serves(tcp);
        fake_pass_ms(100);
        CHECK(!spare(tcp));
        CHECK(!pair_now(0, 0, R2_VIA_TCP) && !pair_now(0, 1, R2_VIA_TCP));
        remote_end(&r);
    }
}

/* All NICs have RDMA: no socket while it serves. */
TEST(nobody_is_mixed)
{
    begin(0, 0);
    serves(pair(1, 1, R2_VIA_VERBS));
    fake_pass_ms(150);
    for (int pairs = 0; pairs < 4; pairs++)
        CHECK(!pair_now(pairs & 1, pairs >> 1, R2_VIA_TCP));
    remote_end(&r);
}

static void nothing(int unused)
{
    (void)unused;
}

/* The first pairs are up and about to be tested, and the peer's task has run since; `at`: not
 * later. */
static void first_pairs_are_tested(uint64_t *at)
{
    remote_new(&r, true, 2);
    CHECK_EQ(r2_engine_connect(remote_ctx(), 0, r.handle, &r.conn), 0);
    pair(0, 0, R2_VIA_VERBS);
    pair(1, 1, R2_VIA_VERBS);
    *at = r2_now_ns();
    for (int i = 0; i < 2; i++)
        CHECK(remote_unproven(&r, i, 0));
    CHECK(remote_command(nothing, 0));
    CHECK(remote_command(nothing, 0)); /* the task woke itself */
}

static uint32_t shown(int nic)
{
    const struct r2_path *path = pair(nic, nic, R2_VIA_VERBS)->params.owner;

    return __atomic_load_n(&r2_control_segment(r2_eng.ctl)->paths[path->shown.row].state,
                           __ATOMIC_RELAXED);
}

/* A test of queue pairs takes a round trip: other pairs are not tried for that, only where it takes
 * longer. Operators see no path that is up. */
TEST(a_first_test_is_waited_for)
{
    bool early = true, others = true;
    uint64_t at;

    for (int i = 0; i < 50 && others; i++) {
        if (i)
            fake_forget(r.id);
        first_pairs_are_tested(&at);
        others = pair_now(0, 1, R2_VIA_VERBS) || pair_now(1, 0, R2_VIA_VERBS);
        early = r2_now_ns() - at < 90 * R2_NS_PER_MS; /* else the machine was busy */
        CHECK(!others || !early);
    }
    CHECK(early);
    CHECK(!others);
    CHECK_EQ(shown(0), R2_SEG_PATH_CONNECTING);
    CHECK(remote_prove(&r, pair(0, 0, R2_VIA_VERBS)));
    CHECK_EQ(shown(0), R2_SEG_PATH_UP);
    pair(1, 0, R2_VIA_VERBS);
    fake_forget(r.id);
}

/* RDMA is gone: the sockets of its NIC join those that never ended, and stand by when it is back.
 */
TEST(last_resort_and_back)
{
    struct r2_ep *rdma = begin(2, 2), *tcp = pair(1, 1, R2_VIA_TCP), *resort, *back;

    serves(tcp);
    fake_fail(rdma, EIO, false);
    resort = pair(0, 0, R2_VIA_TCP);
    serves(resort);
    fake_pass_ms(50);
    CHECK(!spare(resort) && !spare(tcp));
    back = pair(0, 0, R2_VIA_VERBS);
    CHECK(back != rdma);
    serves(back);
    FAKE_AWAIT(REMOTE_WAIT_MS, spare(resort));
    CHECK(!spare(tcp));
    CHECK(!atomic_load(&tcp->is_shut));
    remote_end(&r);
}

/* Queue pairs write to where the message's bytes belong, whenever the NIC gets round to it: so not
 * while a copy of some on sockets could end the message before, and not what its receiver keeps
 * elsewhere. */
TEST(queue_pairs_write_alone)
{
    struct r2_ep *rdma = begin(2, 2), *tcp = pair(1, 1, R2_VIA_TCP);
    struct r2_path *sockets = tcp->params.owner;
    struct r2_chunk copy;
    struct r2_bulk c, d;
    struct r2_req *req;

    serves(tcp);
    begin_ramped(tcp);
    req = post(rdma, 0);
    CHECK(fake_next(tcp, &c));
    r2_peer_lock(r.conn->peer);
    CHECK(r2_send_again(&req->led.send, 0, (uint16_t)(sockets->index + 7), 1, 0, &copy));
    r2_peer_unlock(r.conn->peer);
    CHECK(!fake_next(rdma, &d));
    r2_peer_lock(r.conn->peer); /* the copy's path is down */
    CHECK_EQ(
        r2_send_released(&req->led.send, copy.off, copy.len, (uint16_t)(sockets->index + 7), 1), 0);
    r2_send_path_down(&req->led.send, (uint16_t)(sockets->index + 7), 1, NULL);
    r2_peer_unlock(r.conn->peer);
    CHECK(fake_next(rdma, &d));
    CHECK(fake_chunk_sent(rdma, &d));
    CHECK(fake_chunk_sent(tcp, &c));
    remote_end(&r);
}

/* NICs that nobody has named stand by where others have RDMA. */
TEST(stands_by_unless_named)
{
    static const struct {
        const char *nics;
        unsigned plain;
        bool first, second, bare;
    } rows[] = {
        {"", 2, false, true, false},
        {"", 3, false, false, false},
        {"", 0, false, false, false},
        {"^eth9", 1, true, false, false},
        {"eth0,eth1", 2, false, false, false},
        {"eth*,^eth9", 2, false, false, false},
        {"eth1,mlx5_0:1", 2, false, true, true},
    };
    static struct r2_settings other;
    int status;
    pid_t pid = fork(); /* settings do not change under a running engine */

    for (size_t i = 0; pid == 0 && i < sizeof(rows) / sizeof(rows[0]); i++) {
        other = *r2_settings_get();
        snprintf(other.nics, sizeof(other.nics), "%s", rows[i].nics);
        r2_eng.set = &other;
        atomic_store(&fake_plain, rows[i].plain);
        r2_local.nics[0].bare = rows[i].bare;
        if (r2_nic_stands_by(0) != rows[i].first || r2_nic_stands_by(1) != rows[i].second)
            _exit(1 + (int)i);
    }
    if (pid == 0)
        _exit(0);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_MSG(WEXITSTATUS(status) == 0, "row %d of the table", WEXITSTATUS(status) - 1);
}

int main(int argc, char **argv)
{
    fake_offers = R2_OFFER_ROCE;
    remote_engine(2, "R2CCL_CHUNK=64K R2CCL_RAMP=10ms");
    return check_main(argc, argv);
}
