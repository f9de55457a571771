/* What the engine does when a lane that others relied on takes no more (`blocked`), over a scripted
 * transport (rung 2). That lanes say so, and which are asked then: test_tcp_lane_choice. */
#include "send_bed.h"

#define KB 1024u
#define CHUNK (32 * KB)
#define MSG (256 * KB)

static uint8_t data[MSG];

static struct r2_req *isend(size_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, data, size, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

static struct r2_path *path_of(const struct r2_ep *ep)
{
    return ep->params.owner;
}

/* Who is asked then is `want`: bit 0 path a, bit 1 path b. The peer's tick may ask besides, now and
 * then. */
static bool asks(struct r2_ep *ep, int want)
{
    int seen = -1;

    for (int i = 0; i < 20 && seen != want; i++) {
        int of_a = atomic_load(&a->kicks), of_b = atomic_load(&b->kicks);

        r2_up_blocked(path_of(ep), ep);
        seen = (atomic_load(&a->kicks) > of_a) | (atomic_load(&b->kicks) > of_b) << 1;
    }
    return seen == want;
}

TEST(its_other_lanes_are_asked)
{
    struct r2_bulk c;

    begin(2);
    CHECK(asks(a, 0)); /* nothing waits */
    isend(MSG);
    CHECK(asks(a, 0)); /* nor may it be sent */
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    CHECK(asks(a, 1));
    CHECK(asks(b, 2));
    while (fake_next(a, &c) || fake_next(b, &c)) {
        CHECK(fake_chunk_sent(a, &c) || fake_chunk_sent(b, &c));
        CHECK_EQ(remote_ack_range(a, &r, 0, c.offset, c.len), 0);
    }
    CHECK(asks(a, 0));
    remote_end(&r);
}

/* A path that may take nothing more for other reasons is no help: others are asked. */
TEST(else_another_path)
{
    begin(2);
    isend(MSG);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    r2_peer_lock(path_of(a)->peer);
    path_of(a)->flow.busy_until = r2_now_ns() + 60 * R2_NS_PER_S;
    r2_peer_unlock(path_of(a)->peer);
    CHECK(asks(a, 2));
    remote_end(&r);
}

/* What is held back by a slow path waits for a copy over another one. */
TEST(copies_wait_too)
{
    struct r2_bulk c;

    begin(2);
    remote_rate(a, 10 * R2_NS_PER_MS);
    remote_rate(b, 10 * R2_NS_PER_US);
    isend(CHUNK);
    CHECK_EQ(remote_cts(a, &r, 0, CHUNK), 0);
    r2_peer_lock(path_of(b)->peer);
    path_of(b)->flow.busy_until = r2_now_ns() + 60 * R2_NS_PER_S;
    r2_peer_unlock(path_of(b)->peer);
    CHECK(fake_next(a, &c));
    CHECK(fake_chunk_sent(a, &c));
    r2_peer_lock(path_of(b)->peer);
    path_of(b)->flow.busy_until = 0;
    CHECK(r2_list_empty(&path_of(b)->peer->ready));
    path_of(a)->watch.factor = R2_GREY_FULL / 10;
    path_of(a)->watch.judged_at = r2_now_ns();
    CHECK(r2_tail_waits(path_of(b)->peer, r2_now_ns()));
    r2_peer_unlock(path_of(b)->peer);
    CHECK(asks(b, 2));
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_CHUNK=32K R2CCL_RAMP=0");
    return check_main(argc, argv);
}
