/* In which order a connection spills over from its home NIC, on NICs of a made-up sysfs tree, over
 * a scripted transport (rung 2). The order itself: test_topology. It cannot prove that real NICs
 * are where their paths below /sys/devices say. */
#include "check.h"
#include "engine/sched/sched.h"
#include "near_bed.h"

#define CHUNK (64u * 1024)
#define EACH 8 /* chunks that a path takes while nothing is known of it */

static uint8_t data[EACH * NICS * CHUNK];
/* The NICs whose lanes are asked for one more message of so many chunks, as bits. */
static unsigned asked(unsigned chunks)
{
    struct r2_req *req = NULL;
    unsigned nics = 0;
    int before[NICS];

    begin();
    for (int i = 0; i < NICS; i++)
        before[i] = atomic_load(&ep[i]->kicks);
    CHECK_EQ(r2_engine_isend(r.conn, data, (size_t)chunks * CHUNK, 0, NULL, &req), 0);
    CHECK(req);
    CHECK_EQ(remote_cts(ep[0], &r, 0, (uint64_t)chunks * CHUNK), 0);
    for (int i = 0; i < NICS; i++)
        nics |= (unsigned)(atomic_load(&ep[i]->kicks) > before[i]) << i;
    remote_end(&r);
    return nics;
}

/* I/O thread 0 looks every 20 ms. */
static void await_left(const struct r2_peer *peer, unsigned nics)
{
    for (int i = 0; i < 1000 && atomic_load(&peer->leave.leaves) != nics; i++)
        usleep(1000);
    CHECK_EQ(atomic_load(&peer->leave.leaves), nics);
}

TEST(nearer_ones_first)
{
    CHECK_EQ(asked(EACH), 1u << 0);
    CHECK_EQ(asked(EACH + 1), 1u << 0 | 1u << 2);                   /* the same switch */
    CHECK_EQ(asked(2 * EACH + 1), 1u << 0 | 1u << 2 | 1u << 3);     /* the same NUMA node */
    CHECK_EQ(asked(3 * EACH + 1), 1u << 0 | 1u << 2 | 1u << 3 | 2); /* across */
}

/* A message, while so much is under way on the paths, which take chunk_us for each chunk; `before`:
 * how often their lanes had been asked. */
static void send_beside(const uint64_t inflight[], uint64_t chunk_us, uint32_t chunks, int before[])
{
    struct r2_req *req = NULL;

    for (int i = 0; i < NICS; i++)
        remote_rate(ep[i], chunk_us * R2_NS_PER_US);
    r2_peer_lock(r.conn->peer);
    for (int i = 0; i < NICS; i++) {
        struct r2_path *path = ep[i]->params.owner;

        path->rate.startup = path->rate.probing_rtt = false;
        path->rate.inflight = inflight[i];
        r2_path_tell_inflight(path);
        path->flow.chunk_at = r2_peer_now(r.conn->peer); /* else it is tried with one */
        before[i] = atomic_load(&ep[i]->kicks);
    }
    r2_peer_unlock(r.conn->peer);
    CHECK_EQ(r2_engine_isend(r.conn, data, (size_t)chunks * CHUNK, 0, NULL, &req), 0);
    CHECK_EQ(remote_cts(ep[1], &r, 0, (uint64_t)chunks * CHUNK), 0);
}

/* Whoever is done sooner comes first, however far it is. */
TEST(a_busy_one_does_not)
{
    int before[NICS];

    begin();
    send_beside((const uint64_t[NICS]){1u << 30, 0, 1024}, 64, 1, before); /* NIC 0 has no room */
    CHECK_EQ(atomic_load(&ep[0]->kicks), before[0]);
    CHECK_EQ(atomic_load(&ep[1]->kicks), before[1]);
    CHECK_EQ(atomic_load(&ep[2]->kicks), before[2]);
    CHECK_GT(atomic_load(&ep[3]->kicks), before[3]); /* idle, and nearer than NIC 1 */
    remote_end(&r);
}

/* NIC 0 has a chunk under way and room for more. A connection's own NIC takes it all the same; one
 * that has none asks whoever is done sooner. */
TEST(without_a_nic_of_its_own)
{
    for (int own = 0; own < 2; own++) {
        int before[NICS];

        begin();
        r.conn->first = own ? 0 : R2_ANY_NIC;
        send_beside((const uint64_t[NICS]){CHUNK}, 64, 1, before);
        CHECK_EQ(atomic_load(&ep[0]->kicks) > before[0], own);
        CHECK_EQ(atomic_load(&ep[2]->kicks) > before[2], !own);
        remote_end(&r);
    }
}

/* All NICs have 2 ms of work: one that any of them may take waits until one has less. */
TEST(without_a_nic_of_its_own_waits)
{
    for (int own = 0; own < 2; own++) {
        int before[NICS], all = 0;

        begin();
        r.conn->first = own ? 0 : R2_ANY_NIC;
        send_beside((const uint64_t[NICS]){8 * CHUNK, 8 * CHUNK, 8 * CHUNK, 8 * CHUNK}, 250, 1,
                    before);
        for (int i = 0; i < NICS; i++)
            all += atomic_load(&ep[i]->kicks) - before[i];
        CHECK_EQ(all > 0, own);
        remote_end(&r);
    }
}

/* NIC 0 is busy with other peers' chunks, so it leaves one that any NIC may take to an idle one.
 * What paths have in flight is counted for their NICs, to their end. */
TEST(busy_with_other_peers)
{
    for (int own = 0; own < 2; own++) {
        struct r2_bulk bulk;
        int before[NICS];

        begin();
        r.conn->first = own ? 0 : R2_ANY_NIC;
        atomic_fetch_add(&r2_eng.inflight[0], 8 * CHUNK);
        send_beside((const uint64_t[NICS]){0}, 64, EACH * NICS, before);
        CHECK_EQ(r2_up_next_chunk(ep[0]->params.owner, ep[0], &bulk), own);
        CHECK_EQ(atomic_load(&r2_eng.inflight[0]), (own ? 9 : 8) * CHUNK);
        CHECK(r2_up_next_chunk(ep[2]->params.owner, ep[2], &bulk));
        CHECK_EQ(atomic_load(&r2_eng.inflight[2]), CHUNK);
        remote_end(&r);
        CHECK_EQ(atomic_fetch_sub(&r2_eng.inflight[0], 8 * CHUNK), 8 * CHUNK);
        CHECK_EQ(atomic_load(&r2_eng.inflight[2]), 0);
        CHECK_EQ(atomic_load(&r2_eng.rates[2]), 0);
    }
}

/* NIC 0 has less in flight than the others, all to this peer. If it carries to other peers, too,
 * other nodes send to the peer's NIC as well: the chunk is left to another. */
TEST(busy_at_the_peer)
{
    for (int peers = 1; peers <= 3; peers += 2) {
        atomic_int *carry = &r2_eng.nic_state[0].census[R2_CENSUS_OUT];
        struct r2_bulk bulk;
        int before[NICS];

        begin();
        r.conn->first = R2_ANY_NIC;
        CHECK_EQ(atomic_fetch_add(carry, peers - 1), 1);
        for (int i = 1; i < NICS; i++)
            atomic_fetch_add(&r2_eng.inflight[i], 3 * CHUNK);
        send_beside((const uint64_t[NICS]){2 * CHUNK}, 64, EACH * NICS, before);
        CHECK_EQ(r2_up_next_chunk(ep[0]->params.owner, ep[0], &bulk), peers == 1);
        atomic_fetch_sub(carry, peers - 1);
        for (int i = 1; i < NICS; i++)
            atomic_fetch_sub(&r2_eng.inflight[i], 3 * CHUNK);
        remote_end(&r);
    }
}

/* Another peer is reached over NIC 0 alone, and gets as much: that NIC is left to it. */
TEST(leaves_a_nic)
{
    struct remote few;
    struct r2_bulk bulk;
    int before[NICS];

    begin();
    remote_new(&few, true, NICS);
    CHECK(remote_open(&few, 1));
    send_beside((const uint64_t[NICS]){0}, 64, EACH * NICS, before);
    for (int i = 1; i < NICS; i++)
        atomic_fetch_add(&r2_eng.inflight[i], 2 * CHUNK);
    for (int any = 0; any < 2; any++) { /* those with a NIC of their own do not count */
        r.conn->first = any ? R2_ANY_NIC : 0;
        CHECK(r2_up_next_chunk(ep[0]->params.owner, ep[0], &bulk));
        CHECK_EQ(atomic_load(&r.conn->peer->leave.bytes), any ? CHUNK : 0);
    }
    atomic_fetch_add(&few.conn->peer->leave.bytes, CHUNK);
    await_left(r.conn->peer, 1);
    CHECK_EQ(atomic_load(&few.conn->peer->leave.leaves), 0);
    for (int i = 0; i < 100; i++) /* nothing is sent: all stays as it is */
        r2_leave_tick();
    await_left(r.conn->peer, 1);
    for (int i = 1; i < NICS; i++)
        atomic_fetch_sub(&r2_eng.inflight[i], 2 * CHUNK);
    remote_end(&few);
    remote_end(&r);
}

/* The other peer got nothing since the last look, but before that. */
TEST(one_look_is_not_all)
{
    struct remote few;

    begin();
    remote_new(&few, true, NICS);
    CHECK(remote_open(&few, 1));
    for (int i = 0; i < 2; i++) {
        atomic_fetch_add(&r.conn->peer->leave.bytes, CHUNK);
        atomic_fetch_add(&few.conn->peer->leave.bytes, i ? 0 : CHUNK);
        for (int looks = 0; looks < 10; looks++) /* another may be under way */
            r2_leave_tick();
        await_left(r.conn->peer, 1);
    }
    remote_end(&few);
    remote_end(&r);
}

/* NIC 0 has least ahead. If it is left to others, it takes a chunk only if these have nothing
 * there.
 */
TEST(a_nic_that_is_left)
{
    for (unsigned left = 0; left < 2; left++) {
        for (unsigned theirs = 0; theirs < 2; theirs++) {
            struct r2_bulk bulk;
            int before[NICS];

            begin();
            r.conn->first = R2_ANY_NIC;
            for (int i = 0; i < 10; i++) /* what was sent before: it would be decided anew */
                r2_leave_tick();
            atomic_store(&r.conn->peer->leave.leaves, left);
            for (unsigned i = 0; i < NICS; i++)
                atomic_fetch_add(&r2_eng.inflight[i], (i ? 8 : theirs) * CHUNK);
            send_beside((const uint64_t[NICS]){0}, 64, EACH * NICS, before);
            CHECK_EQ(r2_up_next_chunk(ep[0]->params.owner, ep[0], &bulk), !(left && theirs));
            CHECK_EQ(r2_up_next_chunk(ep[2]->params.owner, ep[2], &bulk), left && theirs);
            for (unsigned i = 0; i < NICS; i++)
                atomic_fetch_sub(&r2_eng.inflight[i], (i ? 8 : theirs) * CHUNK);
            remote_end(&r);
        }
    }
}

/* The idle ones are slow. The busy one takes the chunk: neither leaves it to the other for ever. */
TEST(busy_but_fast)
{
    static const uint64_t idle[NICS];
    struct r2_bulk bulk;
    int before[NICS], took = 0;

    begin();
    r.conn->first = R2_ANY_NIC;
    atomic_fetch_add(&r2_eng.inflight[0], 8 * CHUNK);
    send_beside(idle, 64, 1, before);
    r2_peer_lock(r.conn->peer);
    for (int i = 1; i < NICS; i++) {
        struct r2_path *path = ep[i]->params.owner;

        path->rate.bucket[0] /= 16;
        r2_path_tell_inflight(path);
    }
    r2_peer_unlock(r.conn->peer);
    for (int i = NICS - 1; i >= 0; i--)
        took += r2_up_next_chunk(ep[i]->params.owner, ep[i], &bulk) << i;
    CHECK_EQ(took, 1);
    remote_end(&r);
    atomic_fetch_sub(&r2_eng.inflight[0], 8 * CHUNK);
}

/* The first chunk of a path is stuck. It has less in flight than the busy one, which does not leave
 * its chunks to it all the same. */
TEST(first_chunk_stuck)
{
    struct r2_bulk bulk;
    int before[NICS];

    begin();
    r.conn->first = R2_ANY_NIC;
    send_beside((const uint64_t[NICS]){2 * CHUNK, CHUNK}, 64, EACH, before);
    r2_peer_lock(r.conn->peer);
    for (int i = 1; i < NICS; i++) {
        struct r2_path *path = ep[i]->params.owner;
        uint64_t inflight = path->rate.inflight;

        r2_pathrate_init(&path->rate);
        path->rate.inflight = inflight;
        path->rate.delivered_time_ns = r2_peer_now(r.conn->peer) - 100 * R2_NS_PER_MS;
        path->hb.unanswered = i > 1; /* takes nothing */
    }
    r2_peer_unlock(r.conn->peer);
    CHECK(r2_up_next_chunk(ep[0]->params.owner, ep[0], &bulk));
    remote_end(&r);
}

/* One path as chance has it: what it has in flight, how fast it is, and whether it is well. */
static void draw_path(struct r2_path *path, uint64_t now)
{
    struct r2_pathrate *rate = &path->rate;

    rate->inflight = check_below(2) * check_below(16u * 1024); /* there is room */
    rate->bucket[rate->bucket_now] = check_below(4) ? UINT64_C(1) << (20 + check_below(14)) : 0;
    rate->startup = check_below(3) == 0;
    rate->known_slow = check_below(4) == 0;
    rate->min_rtt_ns = 1 + check_below(R2_NS_PER_MS);
    rate->delivered_time_ns = now - check_below(50 * R2_NS_PER_MS);
    path->hb.unanswered = check_below(4) == 0;
    path->flow.busy_until = check_below(4) ? 0 : now + R2_NS_PER_MS;
    path->flow.chunk_at = path->trial.from = now; /* else it is tried with one */
    path->trial.bytes = R2_TRIAL_BYTES;
}

/* ... and what its NIC has in flight to others. NIC `idle` is well, and has nothing to do. */
static void draw_all(int idle, uint64_t others[])
{
    r2_peer_lock(r.conn->peer);
    for (int i = 0; i < NICS; i++) {
        struct r2_path *path = ep[i]->params.owner;
        uint64_t before = others[i];

        draw_path(path, r2_peer_now(r.conn->peer));
        if (i == idle) {
            path->rate.inflight = path->flow.busy_until = 0;
            path->hb.unanswered = 0;
        }
        r2_path_tell_inflight(path);
        others[i] = check_below(2) * check_below(100 * CHUNK);
        atomic_fetch_add(&r2_eng.inflight[i], others[i] - before);
    }
    r2_peer_unlock(r.conn->peer);
}

/* Whoever leaves a chunk has another path asked. That may leave it as well, once: what is believed
 * of a path in silence falls with time. */
static bool somebody_takes(void)
{
    struct r2_bulk bulk;

    for (int i = 0; i < 2 * NICS; i++) {
        if (r2_up_next_chunk(ep[i % NICS]->params.owner, ep[i % NICS], &bulk))
            return true;
    }
    return false;
}

/* Whatever NICs have in flight, to this peer or to others, and however fast they are: while one is
 * idle and well, nobody leaves a chunk to who leaves it again. */
TEST(nobody_waits_for_another)
{
    uint64_t others[NICS] = {0};
    unsigned long messages = check_rounds(20);

    for (unsigned long n = 0; n < messages; n++) {
        int before[NICS];

        begin();
        r.conn->first = R2_ANY_NIC;
        send_beside((const uint64_t[NICS]){0}, 64, 1 + (uint32_t)check_below(EACH * NICS), before);
        while (r.conn->waiting) {
            int idle = (int)check_below(NICS);

            draw_all(idle, others);
            CHECK_MSG(somebody_takes(), "message %lu: NIC %d is idle", n, idle);
        }
        draw_all(0, others);
        for (int i = 0; i < NICS; i++) {
            atomic_fetch_sub(&r2_eng.inflight[i], others[i]);
            others[i] = 0;
        }
        remote_end(&r);
    }
}

int main(int argc, char **argv)
{
    remote_engine(NICS, "R2CCL_CHUNK=64K R2CCL_RAMP=0");
    place_nics();
    return check_main(argc, argv);
}
