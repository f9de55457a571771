/* Heartbeats of paths that are in use and of paths that are not, over a scripted transport (rung
 * 2). A path that was given nothing is asked seldom although the application waits. Silence of one
 * that is in use is known all the same. An old answer proves nothing. One miss is enough for a
 * verdict here, so that none of the later ones can come to the help of an old answer. What it
 * cannot prove: that kernels answer in time. */
#include "check.h"
#include "enginelib/remote.h"

#define MSG (64u << 20)
#define BEAT_MS 100
#define SELDOM_MS 2000

static uint8_t *data;
static struct remote r;
static struct r2_ep *ep[2];
static struct r2_req *req;

static struct r2_path *path_of(int nic)
{
    return ep[nic]->params.owner;
}

static uint64_t beats(int nic)
{
    uint64_t n = 0;

    fake_pull(ep[nic]);
    for (int i = 0; i < ep[nic]->n_frames; i++)
        n += ep[nic]->frames[i].type == R2_F_HEARTBEAT;
    return n;
}

static uint64_t beats_in(int nic, unsigned ms)
{
    uint64_t before = beats(nic);

    fake_pass_ms(ms);
    return beats(nic) - before;
}

/* Two paths, and a message that waits for its clear-to-send: the peer is busy, nothing moves. */
static void begin(void)
{
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    for (int i = 0; i < 2; i++) {
        ep[i] = fake_find(r.id, i, i, 0);
        CHECK(ep[i]);
    }
    req = NULL;
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK(req);
    for (int i = 0; i < 60 && beats_in(0, 3 * BEAT_MS) + beats_in(1, 3 * BEAT_MS); i++) {
    }
}

/* A chunk goes out over the path and stays unacknowledged. */
static void use(int nic, struct r2_bulk *b)
{
    CHECK_EQ(remote_cts(ep[nic], &r, 0, MSG), 0);
    CHECK(fake_next(ep[nic], b));
    CHECK(fake_chunk_sent(ep[nic], b));
}

TEST(calm_paths_are_asked_seldom)
{
    struct r2_bulk b;
    uint64_t n;

    begin();
    for (int i = 0; i < 2; i++)
        CHECK_LE(beats_in(i, SELDOM_MS), 2);
    use(1, &b);
    n = beats_in(1, 10 * BEAT_MS);
    CHECK_GE(n, 5);
    CHECK_LE(beats_in(0, 5 * BEAT_MS), 2); /* the other one is as calm as before */
    CHECK_EQ(remote_ack_range(ep[1], &r, b.seq, b.offset, b.len), 0);
    CHECK_GE(beats_in(1, 8 * BEAT_MS), 4); /* it may be used again in a moment */
    fake_pass_ms(6 * BEAT_MS);
    CHECK_LE(beats_in(1, SELDOM_MS), 2);
    remote_end(&r);
}

/* Frames count as well: what they say may be lost. */
TEST(frames_count)
{
    struct r2_msg_close m = {.conn = 99};
    uint64_t n;

    begin();
    n = beats(1);
    r2_peer_lock(path_of(1)->peer);
    CHECK_EQ(r2_out_frame(path_of(1), R2_F_CLOSE, &m, sizeof(m), NULL, 0), 0);
    r2_peer_unlock(path_of(1)->peer);
    for (int i = 0; i < 5 * BEAT_MS && beats(1) == n; i++)
        fake_pass_ms(1);
    CHECK_GT(beats(1), n);
    remote_end(&r);
}

/* The path in use goes silent; the other one, last asked a while ago, is asked now, and its answer
 * lets the verdict fall long before its own turn. */
TEST(silence_in_use)
{
    struct r2_bulk b;
    uint64_t from;

    begin();
    use(1, &b);
    fake_pass_ms(BEAT_MS);
    from = r2_now_ns();
    atomic_store(&ep[1]->silent, true);
    CHECK(remote_wait_flag(&ep[1]->is_shut));
    CHECK_LT(r2_now_ns() - from, SELDOM_MS * R2_NS_PER_MS);
    CHECK(remote_up(&r, 0));
    remote_end(&r);
}

/* A path goes silent while nothing is on it, just after it was asked. From the moment when it is
 * given something its silence is judged at the pace of paths in use, not when its turn comes. */
TEST(silent_before_it_is_used)
{
    struct r2_bulk b;
    uint64_t n, from;

    begin();
    fake_pass_ms(12 * BEAT_MS);
    n = beats(1);
    for (int i = 0; i < 2 * SELDOM_MS && beats(1) == n; i++)
        fake_pass_ms(1);
    CHECK_GT(beats(1), n);
    atomic_store(&ep[1]->silent, true);
    from = r2_now_ns();
    use(1, &b);
    CHECK(remote_wait_flag(&ep[1]->is_shut));
    CHECK_LT(r2_now_ns() - from, SELDOM_MS / 2 * R2_NS_PER_MS); /* 0.2 s */
    CHECK(remote_up(&r, 0));
    remote_end(&r);
}

/* Both go silent at once. The answer that the calm one gave before is no proof that the peer is
 * there: no path is failed for it, and the peer is suspect. */
TEST(old_answers_prove_nothing)
{
    struct r2_bulk b;

    begin();
    use(1, &b);
    fake_pass_ms(BEAT_MS);
    for (int i = 0; i < 2; i++)
        atomic_store(&ep[i]->silent, true);
    for (int i = 0; i < 3 * SELDOM_MS && !remote_suspect(&r); i++) {
        CHECK(!atomic_load(&ep[0]->is_shut) && !atomic_load(&ep[1]->is_shut));
        fake_pass_ms(1);
    }
    CHECK(remote_suspect(&r));
    for (int i = 0; i < 2; i++) {
        CHECK(!atomic_load(&ep[i]->is_shut));
        atomic_store(&ep[i]->silent, false);
    }
    FAKE_AWAIT(REMOTE_WAIT_MS, !remote_suspect(&r));
    remote_end(&r);
}

int main(int argc, char **argv)
{
    data = calloc(1, MSG);
    CHECK(data);
    remote_engine(2, "R2CCL_HEARTBEAT=100 heartbeat_idle=2000 heartbeat_misses=1 "
                     "R2CCL_GREY=0");
    return check_main(argc, argv);
}
