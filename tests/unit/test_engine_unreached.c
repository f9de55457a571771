/* NICs that reach nobody from the start, over a scripted transport (rung 2): operators are told,
 * once, and only where such a NIC was meant to protect the job. It cannot prove what a firewall
 * looks like to sockets: test_lab_health.py. Three NICs. They are loopback's, about which there is
 * nothing to say, but for the looks that the test takes on I/O thread 0: between those of one go
 * there are none of the engine's own. */
#include "unreached_bed.h"

static unsigned near; /* bit per NIC: all peers' NICs are in its subnet */

static void set_wired(bool wired)
{
    for (int i = 0; i < r2_local.n; i++) {
        r2_local.nics[i].loopback = !wired;
        r2_local.nics[i].prefixlen = near >> i & 1 ? 8 : 24;
    }
}

static void wired_looks(int times)
{
    set_wired(true);
    while (times--)
        r2_nicreach_look();
    set_wired(false);
}

static void looks(int times)
{
    CHECK(remote_command(wired_looks, times));
}

/* The best pair of the NIC was tried, and is not up. */
static bool failed(int lnic, int rnic)
{
    const struct r2_path *path;
    bool yes;

    r2_peer_lock(r.conn->peer);
    path = r2_path_find(r.conn->peer, lnic, rnic, R2_VIA_TCP);
    yes = path && path->role == R2_ROLE_FIRST && !r2_path_is_up(path) && path->attempt.fails;
    pthread_mutex_unlock(&r.conn->peer->lock);
    return yes;
}

static void wait_failed(int lnic, int rnic)
{
    for (int ms = 0; ms < WAIT_MS && !failed(lnic, rnic); ms++) /* an attempt takes 1 s */
        fake_pass_ms(1);
    CHECK(failed(lnic, rnic));
}

/* A peer with three NICs, of which the first serves and the others were tried. */
static void begin(void)
{
    remote_new(&r, true, 3);
    CHECK(remote_open(&r, 1));
    wait_failed(1, 1);
    wait_failed(2, 2);
}

/* Its next attempt, or the one that is under way, succeeds. */
static struct r2_ep *come_up(int nic)
{
    struct r2_ep *ep = NULL;

    for (int ms = 0; ms < WAIT_MS && !ep; ms++) {
        struct r2_ep *newest = fake_newest(r.id, nic, R2_VIA_TCP);

        if (newest)
            ep = remote_path(&r, nic, newest->params.gen - 1);
        else
            fake_pass_ms(1);
    }
    CHECK(ep);
    return ep;
}

static void nothing(int nic)
{
    looks(2 * LOOKS);
    CHECK_STR(cause_of(nic), "");
    CHECK_EQ(warned(nic, WORD), 0);
}

/* ---- cases: of NIC 1 nothing is said before the last one */

static void plain_looks(int times)
{
    while (times--)
        r2_nicreach_look();
}

TEST(loopback)
{
    begin();
    CHECK(remote_command(plain_looks, 2 * LOOKS));
    CHECK_STR(cause_of(1), "");
    CHECK_EQ(warned(1, WORD), 0);
    remote_end(&r);
}

static void set_aside(int nic)
{
    atomic_store(&r2_eng.nic_state[nic].weight, 0);
}

static void count_in(int nic)
{
    atomic_store(&r2_eng.nic_state[nic].weight, R2_WEIGHT_FULL);
}

static void wait_trusted(int nic)
{
    FAKE_AWAIT(WAIT_MS, r2_nic_trusted(nic));
}

static void forget_rnics(int from)
{
    struct r2_peer *p = r.conn->peer;

    r2_peer_lock(p);
    for (int i = from; i < p->n_rnics; i++)
        p->rnics[i].known = false;
    r2_peer_unlock(p);
}

/* The other end has fewer NICs: only one of ours that is in the same subnet was to reach it. */
TEST(fewer_there)
{
    remote_new(&r, true, 1);
    CHECK(remote_open(&r, 1));
    forget_rnics(1); /* the handle is of this process, and names as many NICs as it has */
    wait_failed(1, 0);
    wait_failed(2, 0);
    looks(2 * LOOKS);
    CHECK(!marked(2));
    near = 1u << 2;
    looks(2 * LOOKS);
    near = 0;
    CHECK(!marked(1));
    CHECK_EQ(warned(1, WORD), 0);
    CHECK(marked(2));
    CHECK_EQ(warned(2, WORD), 1);
    remote_end(&r);
}

/* Of weight 0, or drained. */
TEST(not_counted_on)
{
    begin();
    CHECK(remote_command(set_aside, 1));
    nothing(1);
    CHECK(remote_command(remote_drain, 1));
    CHECK(remote_command(count_in, 1));
    looks(2 * LOOKS);
    CHECK(!marked(1));
    CHECK_EQ(warned(1, WORD), 0);
    CHECK(remote_command(remote_undrain, 1));
    wait_trusted(1);
    remote_end(&r);
}

/* The peer says that its NIC is down. */
TEST(down_there)
{
    begin();
    CHECK_EQ(remote_nic(fake_find(r.id, 0, 0, 0), 1, false, 5), 0);
    looks(2 * LOOKS);
    CHECK(!marked(1));
    CHECK_EQ(warned(1, WORD), 0);
    remote_end(&r);
}

/* No NIC reaches the peer any more: none stands out. */
TEST(nobody_serves)
{
    begin();
    fake_fail(fake_find(r.id, 0, 0, 0), ECONNRESET, false);
    looks(2 * LOOKS);
    CHECK(!marked(1));
    CHECK_EQ(warned(1, WORD), 0);
    remote_end(&r);
}

/* All on I/O thread 0, which begins and ends attempts: none does between two lines of these. */
static bool taken; /* the NIC's attempt, by the peer's kernel */

static void look_while_it_waits(int nic)
{
    struct r2_peer *p = r.conn->peer;
    const struct r2_path *path;

    r2_peer_lock(p);
    path = r2_path_find(p, nic, nic, R2_VIA_TCP);
    taken = path->state == R2_PATH_CONNECTING && path->ep;
    if (taken)
        atomic_store(&path->ep->connected, true);
    r2_peer_unlock(p);
    if (taken)
        wired_looks(2 * LOOKS);
}

/* It began so long ago that it is over, and the next one begins. */
static void look_after_it(int nic)
{
    struct r2_peer *p = r.conn->peer;
    struct r2_path *path;
    uint32_t gen;

    r2_peer_lock(p);
    path = r2_path_find(p, nic, nic, R2_VIA_TCP);
    gen = path->gen;
    path->attempt.at -= 60 * R2_NS_PER_S;
    r2_peer_unlock(p);
    r2_peer_get(p); /* the task's */
    r2_peer_task(&p->task);
    taken = path->gen == gen;
    wired_looks(2 * LOOKS);
}

/* The peer's process is stopped: its kernel takes what comes, also over the NIC, and answers on the
 * path that is up. */
TEST(stopped_process)
{
    begin();
    taken = false;
    for (int ms = 0; ms < WAIT_MS && !taken; ms++) {
        CHECK(remote_command(look_while_it_waits, 1));
        fake_pass_ms(1);
    }
    CHECK(taken);
    CHECK(!marked(1));
    CHECK(remote_command(look_after_it, 1));
    CHECK(!taken);
    CHECK(!marked(1));
    CHECK_EQ(warned(1, WORD), 0);
    remote_end(&r);
}

static bool unanswered(const struct r2_ep *ep)
{
    const struct r2_path *path = ep->params.owner;
    bool yes;

    r2_peer_lock(path->peer);
    yes = path->hb.unanswered > 0;
    pthread_mutex_unlock(&path->peer->lock);
    return yes;
}

/* The peer's host stands still: the path that serves is up, and does not answer in this moment. */
TEST(host_stands_still)
{
    struct r2_ep *ep;

    begin();
    ep = fake_find(r.id, 0, 0, 0);
    atomic_store(&ep->silent, true);
    FAKE_AWAIT(WAIT_MS, unanswered(ep));
    looks(2 * LOOKS);
    CHECK(!marked(1));
    CHECK_EQ(warned(1, WORD), 0);
    remote_end(&r);
}

/* Said after ten looks, once, whatever becomes of its state; taken back by the first path. */
TEST(told)
{
    struct r2_ep *ep;

    begin();
    come_up(2);
    looks(LOOKS - 1);
    CHECK(!marked(1));
    looks(LOOKS);
    CHECK(marked(1));
    CHECK(!marked(2)); /* also if it was before */
    CHECK_EQ(
        __atomic_load_n(&r2_eng.ctl->seg->nics[r2_eng.nic_state[1].row].state, __ATOMIC_RELAXED),
        R2_SEG_NIC_HEALTHY);
    CHECK_EQ(warned(1, WORD), 1);
    CHECK(remote_command(remote_drain, 1));
    CHECK(!marked(1)); /* the row has another word */
    CHECK(remote_command(remote_undrain, 1));
    wait_trusted(1);
    wait_failed(1, 1);
    looks(LOOKS);
    CHECK(marked(1));
    CHECK_EQ(warned(1, WORD), 1);
    CHECK_EQ(warned(1, "reaches a peer"), 0);
    ep = come_up(1);
    looks(1);
    CHECK(!marked(1));
    CHECK_EQ(warned(1, "reaches a peer"), 1);
    fake_fail(ep, ECONNRESET, false); /* lost, which is another matter */
    looks(2 * LOOKS);
    CHECK(!marked(1));
    CHECK_EQ(warned(1, WORD), 1);
    CHECK_EQ(warned(1, "reaches a peer"), 1);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(3, "R2CCL_RAMP=100ms R2CCL_DAMP=0 R2CCL_NO_PATH_TIMEOUT=60s R2CCL_GREY=0");
    return check_main(argc, argv);
}
