/* What the control segment shows of a path, over a scripted transport (rung 2): how many streams it
 * has; of a damped one its penalty while that fades, and when it is tried again. Half of a penalty
 * fades in 1 s, a path is left alone from its second failure on. */
#include "check.h"
#include "enginelib/remote.h"

static struct remote r;

static const struct r2_seg_path *row_of(int nic)
{
    int row;

    r2_peer_lock(r.conn->peer);
    row = r2_path_find(r.conn->peer, nic, nic, 0)->shown.row;
    pthread_mutex_unlock(&r.conn->peer->lock);
    return &r2_control_segment(r2_eng.ctl)->paths[row];
}

static uint32_t penalty_of(int nic)
{
    return __atomic_load_n(&row_of(nic)->penalty, __ATOMIC_RELAXED);
}

static uint64_t reuse_of(int nic)
{
    return __atomic_load_n(&row_of(nic)->reuse_mono_ns, __ATOMIC_RELAXED);
}

static uint32_t state_of(int nic)
{
    return __atomic_load_n(&row_of(nic)->state, __ATOMIC_RELAXED);
}

TEST(penalty_and_reuse)
{
    struct r2_ep *e;
    uint64_t first, begun;
    uint32_t penalty;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    CHECK_EQ(penalty_of(0), 0);
    CHECK_EQ(reuse_of(0), 0);
    begun = r2_now_ns();
    e = fake_find(r.id, 0, 0, 0);
    CHECK(e);
    fake_fail(e, ECONNRESET, false);
    e = remote_path(&r, 0, e->params.gen);
    CHECK(e);
    fake_fail(e, ECONNRESET, false);
    CHECK_EQ(state_of(0), R2_SEG_PATH_DAMPED);
    for (int ms = 0; ms < 5000 && !reuse_of(0); ms++)
        fake_pass_ms(1);
    first = reuse_of(0);
    penalty = penalty_of(0);
    CHECK_GT(first, begun + R2_NS_PER_S / 2);
    CHECK_LT(first, r2_now_ns() + 10 * R2_NS_PER_S);
    CHECK_GT(penalty, 0);
    CHECK_LT(penalty, 2 * R2_DAMP_PER_FAILURE + 1);
    for (int ms = 0; ms < 5000 && penalty_of(0) == penalty; ms++)
        fake_pass_ms(1);
    CHECK_LT(penalty_of(0), penalty);
    CHECK_EQ(penalty_of(1), 0);
    CHECK_EQ(reuse_of(1), 0);
    FAKE_AWAIT(10000, !reuse_of(0));
    CHECK_GT(r2_now_ns(), first); /* not sooner than was said */
    CHECK(state_of(0) != R2_SEG_PATH_DAMPED);
    remote_end(&r);
}

/* Lanes open one after the other; the path's weight stays. */
TEST(streams)
{
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    for (unsigned n = 4; n > 0; n--) {
        atomic_store(&fake_lanes, n);
        FAKE_AWAIT(10000, __atomic_load_n(&row_of(0)->streams, __ATOMIC_RELAXED) == n);
    }
    atomic_store(&fake_lanes, 4);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_HEARTBEAT=50 heartbeat_idle=50 heartbeat_misses=50 "
                     "damp_suppress=1100 R2CCL_DAMP=20s R2CCL_LOCATE=0 R2CCL_GREY=0");
    /* Sockets stand in for each other also where others must carry memory of devices. Set before
     * its threads have anything to read it for. */
    r2_eng.device_memory = true;
    return check_main(argc, argv);
}
