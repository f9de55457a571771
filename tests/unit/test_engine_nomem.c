/* The engine over a scripted transport (rung 2), with no memory for control frames: the outbox is
 * compiled in here with an allocator that fails on demand. What it cannot prove: other places that
 * need memory. */
#include <stdatomic.h>
#include <stdlib.h>

static atomic_bool no_memory;

static void *test_realloc(void *p, size_t size)
{
    return atomic_load(&no_memory) ? NULL : realloc(p, size);
}

#define realloc test_realloc
#include "../../net_plugin/engine/path/outbox.c"
#undef realloc

#include "check.h"
#include "enginelib/remote.h"

/* A path that comes up and cannot say its first frame is down again: nothing more is done with it,
 * and another attempt is made. */
TEST(up_without_memory)
{
    struct r2_path *path;
    struct r2_ep *ep;
    struct remote r;
    bool ready;
    int state;

    remote_new(&r, true, 1);
    CHECK_EQ(r2_engine_connect(r.listen->ctx, 0, r.handle, &r.conn), 0);
    ep = fake_find(r.id, 0, 0, 0);
    CHECK(ep);
    path = ep->params.owner;
    atomic_store(&no_memory, true);
    CHECK(fake_up(ep));
    r2_peer_lock(path->peer);
    ready = r2_path_is_up(path);
    state = (int)path->state;
    r2_peer_unlock(path->peer);
    atomic_store(&no_memory, false);
    CHECK(!ready);
    CHECK_EQ(state, R2_PATH_WAIT);
    CHECK(fake_find(r.id, 0, 0, ep->params.gen));
    CHECK(remote_open(&r, 1));
    remote_end(&r);
}

/* A message waits for a path. One that comes up and cannot say its first frames was none: the wait
 * goes on from where it began, nothing is called a failure, and nothing up. `first`: not even the
 * first one finds memory; else the second one does not. */
static void wait_goes_on(bool first)
{
    size_t one = sizeof(struct r2_frame) + sizeof(struct r2_msg_info) + sizeof(struct r2_info_nic);
    struct r2_path *path;
    struct r2_peer *p;
    uint64_t since, now_since;
    struct remote r;
    struct r2_ep *ep;
    bool served, up;

    remote_new(&r, true, 1);
    CHECK_EQ(r2_engine_connect(r.listen->ctx, 0, r.handle, &r.conn), 0);
    ep = fake_find(r.id, 0, 0, 0);
    CHECK(ep);
    path = ep->params.owner;
    p = path->peer;
    r2_peer_lock(p);
    since = p->no_path_since;
    if (!first) {
        path->outbox.data = malloc(one);
        path->outbox.cap = one;
        r2_mem_more(one);
    }
    r2_peer_unlock(p);
    CHECK(since);
    fake_pass_ms(2);
    atomic_store(&no_memory, true);
    CHECK(fake_up(ep));
    r2_peer_lock(p);
    now_since = p->no_path_since;
    up = r2_path_is_up(path);
    served = r2_past_carried(path->past) || path->down.at;
    r2_peer_unlock(p);
    atomic_store(&no_memory, false);
    CHECK(!up);
    CHECK_EQ(now_since, since);
    CHECK(!served);
    CHECK(fake_find(r.id, 0, 0, ep->params.gen));
    CHECK(remote_open(&r, 1));
    remote_end(&r);
}

TEST(no_memory_for_the_first_frame)
{
    wait_goes_on(true);
}

TEST(no_memory_for_the_second_frame)
{
    wait_goes_on(false);
}

int main(int argc, char **argv)
{
    remote_engine(1, NULL);
    return check_main(argc, argv);
}
