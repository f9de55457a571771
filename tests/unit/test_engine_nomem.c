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
#include "../../net_plugin/engine/outbox.c"
#undef realloc

#include "check.h"
#include "enginelib/remote.h"

/* A path that comes up and cannot say its first frame is down again: nothing more is done with it,
 * and another attempt is made. */
static void test_up_without_memory(void)
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
    ready = path->ctrl_ready;
    state = (int)path->state;
    r2_peer_unlock(path->peer);
    atomic_store(&no_memory, false);
    CHECK(!ready);
    CHECK(state != R2_PATH_UP);
    CHECK(fake_find(r.id, 0, 0, ep->params.gen));
    CHECK(remote_open(&r, 1));
    remote_end(&r);
}

static const struct check_test tests[] = {
    {"up_without_memory", test_up_without_memory},
    {0},
};

int main(int argc, char **argv)
{
    remote_engine(1, NULL);
    return check_main(argc, argv, tests);
}
