/* R2CCL_SPREAD=home over a scripted transport (rung 2): a connection's bytes stay on its home NIC,
 * however fast the others are, and move when it dies. What it cannot prove: timing of real NICs. */
#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (128 * KB)
#define SMALL (32 * KB) /* one chunk */

static uint8_t data[MSG];
static struct remote r;
static struct r2_ep *a, *b; /* paths of NIC 0, the home, and NIC 1 */

static struct r2_path *path_of(const struct r2_ep *ep)
{
    return ep->params.owner;
}

/* `known`: the other NIC's path has carried something before. */
static void begin(struct r2_req **req, bool known)
{
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 2));
    a = fake_find(r.id, 0, 0, 0);
    b = fake_find(r.id, 1, 1, 0);
    CHECK(a && b);
    remote_rate(a, 10 * R2_NS_PER_MS);
    if (known) {
        remote_rate(b, 10 * R2_NS_PER_US);
        CHECK_GT(r2_pathrate_rate(&path_of(b)->rate), 10 * r2_pathrate_rate(&path_of(a)->rate));
    }
    *req = NULL;
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, req), 0);
    CHECK(*req);
}

static void test_slow_home_carries_all(void)
{
    struct r2_req *req;
    struct r2_bulk c;
    uint64_t bytes = 0;

    begin(&req, true);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    while (bytes < MSG) { /* it may not leave them to a path that will not take them */
        CHECK(!fake_next(b, &c));
        CHECK(fake_next(a, &c));
        bytes += c.len;
        CHECK(fake_chunk_sent(a, &c));
        CHECK_EQ(remote_ack_range(a, &r, 0, c.offset, c.len), 0);
    }
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    remote_end(&r);
}

static void call(struct r2_ep *ep, unsigned permille)
{
    r2_peer_lock(path_of(ep)->peer);
    r2_path_set_grey(path_of(ep), permille, "test");
    r2_peer_unlock(path_of(ep)->peer);
}

/* Once it is called slow nothing stays with it; when it is well again all comes home. An idle path
 * pulls only when it is asked. */
static void test_known_slow_home_is_left(void)
{
    struct r2_req *req, *next = NULL;
    struct r2_bulk c;
    int kicks;

    for (int known = 1; known >= 0; known--) {
        begin(&req, known);
        kicks = atomic_load(&b->kicks);
        CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
        CHECK_EQ(atomic_load(&b->kicks), kicks);
        CHECK(!fake_next(b, &c));
        call(a, 100);
        CHECK_GT(atomic_load(&b->kicks), kicks);
        CHECK(fake_next(b, &c));
        CHECK(fake_chunk_sent(b, &c));
        call(a, R2_WEIGHT_FULL);
        CHECK(!fake_next(b, &c));
        CHECK(fake_next(a, &c));
        remote_end(&r);

        begin(&req, known); /* a small message that the slow NIC has room for */
        CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
        for (uint64_t bytes = 0; bytes < MSG; bytes += c.len) {
            CHECK(fake_next(a, &c));
            CHECK(fake_chunk_sent(a, &c));
            CHECK_EQ(remote_ack_range(a, &r, 0, c.offset, c.len), 0);
        }
        CHECK_EQ(remote_test(req, 0, NULL), 1);
        call(a, 100);
        kicks = atomic_load(&b->kicks);
        CHECK_EQ(r2_engine_isend(r.conn, data, SMALL, 0, NULL, &next), 0);
        CHECK_EQ(remote_cts(a, &r, 1, SMALL), 0);
        CHECK_GT(atomic_load(&b->kicks), kicks);
        CHECK(fake_next(b, &c));
        remote_end(&r);
        next = NULL;
    }
}

static void test_others_stand_in(void)
{
    struct r2_req *req;
    struct r2_bulk c;

    begin(&req, true);
    fake_fail(a, ECONNRESET, false);
    CHECK(remote_wait_state(&r, 0, R2_PATH_WAIT) || remote_state(&r, 0) == R2_PATH_CONNECTING);
    CHECK_EQ(remote_cts(b, &r, 0, MSG), 0);
    CHECK(fake_next(b, &c));
    remote_end(&r);
}

static const struct check_test tests[] = {
    {"slow_home_carries_all", test_slow_home_carries_all},
    {"known_slow_home_is_left", test_known_slow_home_is_left},
    {"others_stand_in", test_others_stand_in},
    {0},
};

int main(int argc, char **argv)
{
    static const char *const env[] = {"R2CCL_CHUNK", "32K", "R2CCL_SPREAD", "home", NULL};

    remote_engine(2, env);
    return check_main(argc, argv, tests);
}
