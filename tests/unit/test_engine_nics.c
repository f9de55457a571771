/* What paths and verdicts say about a NIC, over a scripted transport (rung 2). */
#include "health_bed.h"

/* No path of a NIC answers while the peer does on another: suspect, probing, and back. */
TEST(nic_none_answers)
{
    begin(true);
    post(MSG);
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
    fake_fail(ep[0], ECONNRESET, false);
    CHECK(wait_nic(0, R2_SEG_NIC_PROBING));
    CHECK_EQ(nic_row(1), R2_SEG_NIC_HEALTHY);
    CHECK(remote_path(&r, 0, ep[0]->params.gen));
    CHECK(wait_nic(0, R2_SEG_NIC_RAMPING));
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
    remote_end(&r);
}

/* All paths to the only peer fail: that says nothing about any NIC. */
TEST(nobody_is_blamed)
{
    begin(true);
    post(MSG);
    fake_fail(ep[0], ECONNRESET, false);
    fake_fail(ep[1], ECONNRESET, false);
    fake_pass_ms(700);
    CHECK(nic_row(0) == R2_SEG_NIC_HEALTHY || nic_row(0) == R2_SEG_NIC_SUSPECT);
    CHECK(nic_row(1) == R2_SEG_NIC_HEALTHY || nic_row(1) == R2_SEG_NIC_SUSPECT);
    remote_end(&r);
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY) && wait_nic(1, R2_SEG_NIC_HEALTHY));
}

static void *give_verdict(void *arg)
{
    (void)arg;
    r2_nicstate_located(0, "test says so", r2_now_ns());
    return NULL;
}

/* The one who has the verdict is held up while it tells peers: time passes, but the NIC is not
 * taken back before its failure was told and its paths were failed. */
TEST(verdict_is_told)
{
    struct remote_info m;
    struct r2_peer **peers;
    pthread_t teller;

    begin(true);
    post(MSG);
    remote_forget(ep[1]);
    peers = r2_peers_all();
    CHECK(peers && peers[0]);
    for (int i = 0; peers[i]; i++)
        r2_peer_lock(peers[i]);
    CHECK_EQ(pthread_create(&teller, NULL, give_verdict, NULL), 0);
    AWAIT(atomic_load(&r2_eng.nic_state[0].telling));
    atomic_fetch_add(&fake_held, 1);
    fake_pass_ms(150);
    atomic_fetch_sub(&fake_held, 1);
    for (int i = 0; peers[i]; i++)
        r2_peer_unlock(peers[i]);
    r2_peers_put(&peers);
    CHECK_EQ(pthread_join(teller, NULL), 0);
    CHECK_GE(remote_hear(ep[1], R2_F_INFO, &m, sizeof(m)), 0);
    CHECK_EQ(m.nics[0].word, R2_NIC_FAILED);
    CHECK(remote_wait_flag(&ep[0]->is_shut));
    CHECK(remote_path(&r, 0, ep[0]->params.gen));
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
    remote_nic_back(0);
    remote_end(&r);
    r2_nicstate_forgive(0, r2_now_ns());
}

/* A peer's operator says so: it is tried again at the next tick, long before its penalty fades. */
TEST(forgiven_by_a_peer)
{
    struct r2_nic_state *nic = &r2_eng.nic_state[1];

    begin(true);
    pthread_mutex_lock(&r2_eng.nic_lock);
    nic->health.state = R2_HEALTH_DAMPED;
    nic->damp = (struct r2_damp){.penalty = 1e6, .at_ns = r2_now_ns(), .suppressed = true};
    pthread_mutex_unlock(&r2_eng.nic_lock);
    fake_pass_ms(150);
    CHECK_EQ(r2_nic_health(1).state, R2_HEALTH_DAMPED);
    r2_nic_forget(1);
    FAKE_AWAIT(2000, r2_nic_health(1).state != R2_HEALTH_DAMPED);
    CHECK(wait_nic(1, R2_SEG_NIC_HEALTHY));
    remote_end(&r);
}

static bool is_spare(const struct r2_ep *of)
{
    const struct r2_path *path = of->params.owner;
    bool is;

    r2_peer_lock(path->peer);
    is = path->role == R2_ROLE_SPARE;
    r2_peer_unlock(path->peer);
    return is;
}

/* A pair that stood in for a better one, which is back, and then is lost: it is tried until it
 * works. Else the peer, which may have no other path on that NIC, would take it for broken. */
TEST(lost_spare_is_tried)
{
    struct r2_ep *spare;

    begin(true);
    post(MSG);
    fake_fail(ep[0], ECONNRESET, false);
    spare = fake_find(r.id, 0, 1, 0);
    CHECK(spare && fake_up(spare) && remote_prove(&r, spare));
    CHECK(remote_path(&r, 0, ep[0]->params.gen));
    FAKE_AWAIT(REMOTE_WAIT_MS, is_spare(spare));
    fake_fail(spare, ECONNRESET, false);
    spare = fake_find(r.id, 0, 1, spare->params.gen);
    CHECK(spare && fake_up(spare) && remote_prove(&r, spare));
    CHECK(is_spare(spare));
    remote_end(&r);
}

static void fail_by_verdict(int nic)
{
    r2_nicstate_located(nic, "test says so", r2_now_ns());
}

/* Broken by verdict, and the only NIC of the peer's that it reaches is drained: nothing says that
 * it works before that one is given back and a path is. */
TEST(failed_beside_a_drained_one)
{
    uint32_t tried;

    begin(true);
    post(MSG);
    CHECK(remote_command(fail_by_verdict, 0));
    CHECK(wait_nic(0, R2_SEG_NIC_FAILED));
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_DRAINED, 1000, 5), 0);
    fake_pass_ms(8000);
    CHECK_EQ(nic_row(0), R2_SEG_NIC_FAILED);
    r2_peer_lock(r.conn->peer);
    tried = path_of(0)->gen;
    r2_peer_unlock(r.conn->peer);
    CHECK_EQ(remote_word(ep[1], 0, R2_NIC_USABLE, 1000, 6), 0);
    CHECK(remote_path(&r, 0, tried));
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
    remote_end(&r);
}

/* The operator's command, and what comes of it. */
static int drain(int nic)
{
    struct r2_seg_command *slot = &r2_control_segment(r2_eng.ctl)->commands[0];

    *slot = (struct r2_seg_command){.verb = R2_SEG_VERB_DRAIN_NIC};
    snprintf(slot->nic, sizeof(slot->nic), "%.39s", r2_nic_name(nic));
    __atomic_store_n(&slot->state, R2_SEG_CMD_POSTED, __ATOMIC_RELEASE);
    FAKE_AWAIT(1000, __atomic_load_n(&slot->state, __ATOMIC_ACQUIRE) > R2_SEG_CMD_RUNNING);
    return slot->code;
}

/* The only NIC with a path to the peer is not drained, nor while that path is made anew. */
TEST(sole_way_is_not_drained)
{
    begin(true);
    post(MSG);
    fake_fail(ep[1], ECONNRESET, false);
    CHECK_EQ(drain(0), -EBUSY);
    fake_fail(ep[0], ECONNRESET, false);
    CHECK_EQ(drain(0), -EBUSY);
    CHECK(remote_path(&r, 1, ep[1]->params.gen));
    CHECK_EQ(drain(0), 0);
    CHECK(remote_command(remote_undrain, 0));
    remote_end(&r);
    CHECK(wait_nic(0, R2_SEG_NIC_HEALTHY));
}

int main(int argc, char **argv)
{
    return bed_main(argc, argv);
}
