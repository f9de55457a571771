/* The engine over a scripted transport (rung 2): what a connection leaves to others when it ends in
 * the middle of its work, and when a peer counts as gone. It cannot prove what sockets do. */
#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (1024 * KB)

static uint8_t data[MSG];
static struct remote r;
static struct r2_ep *a;

static void begin(int paths)
{
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, paths));
    a = fake_find(r.id, 0, 0, 0);
    CHECK(a);
}

static struct r2_req *isend(struct r2_conn *c, struct r2_mr *mr)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(c, data, MSG, 0, mr, &req), 0);
    CHECK(req);
    return req;
}

/* Everything that the path's window lets through has left the lanes, and is not acknowledged. */
static int fill_window(struct r2_ep *ep)
{
    struct r2_bulk b;
    int n = 0;

    while (fake_next(ep, &b)) {
        CHECK(fake_chunk_sent(ep, &b));
        n++;
    }
    return n;
}

static void room_after(bool by_dereg)
{
    struct r2_mr *mr = NULL;
    struct r2_conn *first;
    struct r2_req *req;
    struct r2_bulk b;

    begin(1);
    first = r.conn;
    CHECK_EQ(r2_engine_reg(first, data, MSG, R2_MEMORY_TYPE_HOST, &mr), 0);
    req = isend(first, mr);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    CHECK_GT(fill_window(a), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    CHECK(remote_more(&r, a));
    isend(r.conn, NULL);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    CHECK(!fake_next(a, &b)); /* the window is full */
    if (by_dereg)
        CHECK_EQ(r2_engine_dereg(first, mr), 0);
    else
        CHECK_EQ(r2_engine_close(first), 0);
    CHECK(fake_next(a, &b)); /* nobody will acknowledge what the first one has sent */
    CHECK_EQ(b.conn, r.conn_id);
    CHECK_GT(fill_window(a), 0);
    if (by_dereg)
        CHECK_EQ(r2_engine_close(first), 0);
    remote_end(&r);
}

static void test_close_gives_room(void)
{
    room_after(false);
}

static void test_dereg_gives_room(void)
{
    room_after(true);
}

static const struct check_test tests[] = {
    {"close_gives_room", test_close_gives_room},
    {"dereg_gives_room", test_dereg_gives_room},
    {0},
};

int main(int argc, char **argv)
{
    static const char *const env[] = {"R2CCL_CHUNK", "32K", "R2CCL_RAMP", "0", NULL};

    remote_engine(2, env);
    return check_main(argc, argv, tests);
}
