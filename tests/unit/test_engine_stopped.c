/* The engine over a scripted transport (rung 2): time in which its process was stopped is no time
 * that it has waited. That a process which really was stopped finds it so is not shown here
 * (tests/py/test_silence.py). */
#include <errno.h>

#include "check.h"
#include "enginelib/remote.h"

static uint8_t data[1024 * 1024];
static struct remote r;

static bool has_waited_since(struct r2_peer *p, uint64_t since)
{
    bool so;

    r2_peer_lock(p);
    so = p->no_path_since >= since;
    r2_peer_unlock(p);
    return so;
}

/* A process that was stopped without a path has not waited meanwhile. */
TEST(sleep_is_no_wait)
{
    struct r2_ep *a;
    struct r2_peer *p;
    struct r2_req *req = NULL;
    uint64_t since;
    int rc = 0;

    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 1));
    a = fake_find(r.id, 0, 0, 0);
    CHECK(a);
    p = r.conn->peer;
    CHECK_EQ(r2_engine_isend(r.conn, data, sizeof(data), 0, NULL, &req), 0);
    CHECK(req);
    fake_fail(a, ECONNRESET, false);
    r2_peer_lock(p);
    since = p->no_path_since;
    p->no_path_since -= 100 * R2_NS_PER_S; /* as if it had been stopped for so long just now */
    p->last_tick -= 100 * R2_NS_PER_S;
    r2_peer_unlock(p);
    CHECK(since);
    r2_peer_wake(p);
    for (int ms = 0; ms < REMOTE_WAIT_MS && !rc && !has_waited_since(p, since); ms++)
        rc = remote_test(req, 1, NULL);
    CHECK_EQ(rc, 0);
    CHECK(has_waited_since(p, since));
    CHECK(remote_path(&r, 0, a->params.gen));
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_RAMP=0 R2CCL_NO_PATH_TIMEOUT=6s");
    return check_main(argc, argv);
}
