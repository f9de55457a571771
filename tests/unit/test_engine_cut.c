/* How a message is cut where several I/O threads could carry it at once, over a scripted transport
 * (rung 2). Whose threads a path's lanes are: test_tcp_few. That it is quicker is no test's matter:
 * docs/decisions.md 42. */
#include "engine/cut.h"
#include "send_bed.h"

#define KB 1024u
#define MSG (512 * KB)
#define THREADS 4 /* in use, of 9 */
#define FAST UINT64_C(5000000000)
#define SLOW UINT64_C(1250000000) /* 10 Gbit/s: less than a core carries */

static uint8_t data[MSG];
static uint64_t next; /* message */

static struct r2_path *path_of(const struct r2_ep *ep)
{
    return ep->params.owner;
}

static void set_rate(struct r2_ep *ep, uint64_t rate)
{
    struct r2_pathrate *pr = &path_of(ep)->rate;

    r2_peer_lock(path_of(ep)->peer);
    memset(pr->bucket, 0, sizeof(pr->bucket));
    pr->bucket[pr->bucket_now] = rate;
    pr->startup = pr->probing_rtt = false;
    r2_peer_unlock(path_of(ep)->peer);
}

/* A path at this rate, threads that are awake, and whether one is idle. */
static void start(uint64_t rate, uint64_t threads, bool idle)
{
    begin(1);
    set_rate(a, rate);
    atomic_store(&fake_threads, threads);
    atomic_store(&fake_idle, idle);
    next = 0;
}

static void send_one(size_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, data, size, 0, NULL, &req), 0);
    CHECK(req);
    CHECK_EQ(remote_cts(a, &r, next++, size), 0);
}

/* Takes the next chunk and says how long it is; 0: there is none. */
static uint32_t take(void)
{
    struct r2_bulk c;

    if (!fake_next(a, &c))
        return 0;
    CHECK(fake_chunk_sent(a, &c));
    return c.len;
}

static void test_each_thread_has_a_part(void)
{
    int kicks;

    start(FAST, 0x0f, true);
    kicks = atomic_load(&a->kicks);
    send_one(MSG);
    CHECK_GE(atomic_load(&a->kicks) - kicks, 4); /* the peer's tick may ask besides */
    for (int i = 0; i < 4; i++)
        CHECK_EQ(take(), 128 * KB);
    CHECK_EQ(take(), 0);
    remote_end(&r);
}

static void test_no_part_is_too_small(void)
{
    start(FAST, 0x3f, true);
    send_one(128 * KB);
    CHECK_EQ(take(), 64 * KB);
    CHECK_EQ(take(), 64 * KB);
    remote_end(&r);
}

/* What waits is one message, but what is under way keeps threads busy as well. */
static void test_what_is_under_way_counts(void)
{
    start(FAST, 0x0f, true);
    send_one(MSG);
    while (take())
        ;
    send_one(MSG);
    CHECK_EQ(take(), 256 * KB);
    CHECK_EQ(take(), 256 * KB);
    send_one(MSG);
    CHECK_EQ(take(), MSG); /* 384 KiB, and the rest would be less than half of that */
    send_one(MSG);
    CHECK_EQ(take(), MSG);
    remote_end(&r);
}

static void test_what_waits_counts(void)
{
    start(FAST, 0x0f, true);
    for (int i = 0; i < 4; i++)
        send_one(MSG);
    CHECK_EQ(take(), MSG);
    remote_end(&r);
}

static void whole(uint64_t rate, uint64_t threads, bool idle)
{
    start(rate, threads, idle);
    send_one(MSG);
    CHECK_EQ(take(), MSG);
    remote_end(&r);
}

static void test_busy_threads_get_no_parts(void)
{
    whole(FAST, 0x0f, false);
}

static void test_one_thread_takes_all(void)
{
    whole(FAST, 0x04, true);
    whole(FAST, 0, true);
}

static void test_slow_nics_are_no_sooner_done(void)
{
    whole(SLOW, 0x0f, true);
}

/* Three threads; and nine, where little traffic keeps to few lanes. */
static void test_few_cores_and_many(void)
{
    r2_io_use(3);
    whole(FAST, 0x07, true);
    r2_io_use(9);
    whole(FAST, 0x0f, true);
    r2_io_use(THREADS);
}

/* Only the threads of the NIC that is asked first have parts: here it is slow, the other one not.
 */
static void test_other_nics_threads_are_not_counted(void)
{
    int stranger;

    begin(2);
    stranger = path_of(a)->lnic == r.conn->home;
    set_rate(stranger ? a : b, SLOW);
    set_rate(stranger ? b : a, FAST);
    atomic_store(&fake_threads, 0x0f);
    atomic_store(&fake_idle, true);
    next = 0;
    send_one(MSG);
    r2_peer_lock(path_of(a)->peer);
    CHECK_EQ(path_of(a)->peer->cut, MSG);
    r2_peer_unlock(path_of(a)->peer);
    remote_end(&r);
}

/* Others carry what it does not. */
static void test_home_is_gone(void)
{
    struct r2_ep *home, *other;
    struct r2_peer *p;

    begin(2);
    set_rate(a, FAST);
    set_rate(b, FAST);
    atomic_store(&fake_threads, 0x0f);
    atomic_store(&fake_idle, true);
    next = 0;
    p = path_of(a)->peer;
    home = path_of(a)->lnic == r.conn->home ? a : b;
    other = home == a ? b : a;
    fake_fail(home, ECONNRESET, false);
    remote_fenced(other, home);
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &(struct r2_req *){NULL}), 0);
    CHECK_EQ(remote_cts(other, &r, next++, MSG), 0);
    r2_peer_lock(p);
    CHECK_EQ(r2_cut(p), 128 * KB);
    r2_peer_unlock(p);
    remote_end(&r);
}

/* No thread copies for them. */
static void test_queue_pairs_are_not_cut_for(void)
{
    struct r2_peer *p;

    start(FAST, 0x0f, true);
    p = path_of(a)->peer;
    send_one(MSG);
    r2_peer_lock(p);
    CHECK_EQ(r2_cut(p), 128 * KB);
    path_of(a)->transport = R2_VIA_VERBS;
    CHECK_EQ(r2_cut(p), r2_cut_max());
    path_of(a)->transport = R2_VIA_TCP;
    r2_peer_unlock(p);
    remote_end(&r);
}

/* R2CCL_SPLIT, while no peer is there that reads it. */
static void split(uint64_t bytes)
{
    ((struct r2_settings *)(uintptr_t)r2_eng.set)->split = bytes;
}

/* 0 and too much say never. */
static void test_settings(void)
{
    uint64_t before = r2_eng.set->split;

    split(0);
    whole(FAST, 0x0f, true);
    split(r2_eng.set->chunk);
    whole(FAST, 0x0f, true);
    split((200 << 10) + 1);
    start(FAST, 0x3f, true);
    send_one(MSG);
    CHECK_EQ(take(), 200 * KB);
    CHECK_EQ(take(), 200 * KB);
    CHECK_EQ(take(), 112 * KB);
    remote_end(&r);
    split(1);
    start(FAST, 0x0f, true);
    send_one(3); /* less than a byte for each */
    CHECK_EQ(take(), 3);
    remote_end(&r);
    start(FAST, 0x3f, true);
    send_one(48 * KB);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(take(), 16 * KB);
    remote_end(&r);
    split(before);
}

static const struct check_test tests[] = {
    {"each_thread_has_a_part", test_each_thread_has_a_part},
    {"no_part_is_too_small", test_no_part_is_too_small},
    {"what_is_under_way_counts", test_what_is_under_way_counts},
    {"what_waits_counts", test_what_waits_counts},
    {"busy_threads_get_no_parts", test_busy_threads_get_no_parts},
    {"one_thread_takes_all", test_one_thread_takes_all},
    {"slow_nics_are_no_sooner_done", test_slow_nics_are_no_sooner_done},
    {"few_cores_and_many", test_few_cores_and_many},
    {"other_nics_threads_are_not_counted", test_other_nics_threads_are_not_counted},
    {"home_is_gone", test_home_is_gone},
    {"queue_pairs_are_not_cut_for", test_queue_pairs_are_not_cut_for},
    {"settings", test_settings},
    {0},
};

int main(int argc, char **argv)
{
    static const char *const env[] = {"R2CCL_IO_THREADS", "9", "R2CCL_RAMP", "0",
                                      "R2CCL_EAGER",      "0", NULL};

    remote_engine(2, env);
    r2_io_use(THREADS);
    return check_main(argc, argv, tests);
}
