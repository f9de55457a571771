/* One peer with two paths over the scripted transport, for tests of the health of paths and NICs.
 * The ramp takes 600 ms, half of a penalty fades in 1 s, a path is left alone from its third
 * failure on. */
#ifndef R2_TESTS_HEALTH_BED_H
#define R2_TESTS_HEALTH_BED_H

#include "await.h"
#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (512 * KB)

static uint8_t data[2 * MSG];
static struct remote r;
static struct r2_ep *ep[2];

static inline void begin(bool out)
{
    remote_new(&r, out, 2);
    CHECK(remote_open(&r, 2));
    for (int i = 0; i < 2; i++) {
        ep[i] = fake_find(r.id, i, i, 0);
        CHECK(ep[i]);
    }
}

static inline struct r2_path *path_of(int nic)
{
    return r2_path_find(r.conn->peer, nic, nic, 0);
}

static inline enum r2_health_state health_of(int nic)
{
    enum r2_health_state s;

    r2_peer_lock(r.conn->peer);
    s = path_of(nic)->health.state;
    pthread_mutex_unlock(&r.conn->peer->lock);
    return s;
}

static inline uint64_t since_of(int nic)
{
    uint64_t t;

    r2_peer_lock(r.conn->peer);
    t = path_of(nic)->health.since_ns;
    pthread_mutex_unlock(&r.conn->peer->lock);
    return t;
}

static inline uint32_t weight_of(int nic)
{
    uint32_t w;

    r2_peer_lock(r.conn->peer);
    w = path_of(nic)->share.weight;
    pthread_mutex_unlock(&r.conn->peer->lock);
    return w;
}

static inline double penalty_of(int nic)
{
    double d;

    r2_peer_lock(r.conn->peer);
    d = path_of(nic)->damp.penalty;
    pthread_mutex_unlock(&r.conn->peer->lock);
    return d;
}

static inline bool wait_health(int nic, enum r2_health_state want, int ms)
{
    for (int i = 0; i < ms && health_of(nic) != want; i++)
        fake_pass_ms(1);
    return health_of(nic) == want;
}

static inline struct r2_req *post(uint32_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r.out ? r2_engine_isend(r.conn, data, size, 0, NULL, &req)
                   : r2_engine_irecv(r.conn, data, size, 0, NULL, &req),
             0);
    CHECK(req);
    return req;
}

static inline struct r2_ep *again(int nic, uint32_t above)
{
    struct r2_ep *e = remote_unproven(&r, nic, above);

    CHECK(e);
    return e;
}

static inline enum r2_seg_nic_state nic_row(int nic)
{
    const struct r2_seg_nic *row = &r2_control_segment(r2_eng.ctl)->nics[nic];

    return (enum r2_seg_nic_state)__atomic_load_n(&row->state, __ATOMIC_RELAXED);
}

static inline bool wait_nic(int nic, enum r2_seg_nic_state want)
{
    for (int i = 0; i < 5000 && nic_row(nic) != want; i++)
        fake_pass_ms(1);
    return nic_row(nic) == want;
}

static inline int bed_main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_HEARTBEAT=50 heartbeat_idle=50 heartbeat_misses=50 "
                     "R2CCL_RAMP=600ms damp_suppress=2100 R2CCL_DAMP=10s R2CCL_LOCATE=0 "
                     "R2CCL_GREY=0");
    return check_main(argc, argv);
}

#endif
