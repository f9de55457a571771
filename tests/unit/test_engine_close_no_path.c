/* What becomes of connections that have nothing under way while their peer is out of reach, over a
 * scripted transport (rung 2). That one is closed is not acknowledged then, and not waited for
 * longer than R2CCL_NO_PATH_TIMEOUT, here 1 s; one that stays open waits for nothing. It cannot
 * prove what a host that fell silent does to real sockets. */
#include <errno.h>
#include <string.h>

#include "check.h"
#include "enginelib/remote.h"

#define FORGOTTEN_MS 40000 /* a peer without connections is kept for 10 s */

static uint8_t data[64];

static bool wait_forgotten(const struct remote *r)
{
    for (int i = 0; i < FORGOTTEN_MS && remote_there(r); i++)
        fake_pass_ms(1);
    return !remote_there(r);
}

/* Its host answers nothing any more. */
static void silence(struct remote *r)
{
    fake_policy(r->id, -EHOSTUNREACH);
    for (int i = 0; i < r->nics; i++) {
        struct r2_ep *ep = remote_up(r, i) ? fake_find(r->id, i, i, 0) : NULL;

        if (ep)
            fake_fail(ep, ETIMEDOUT, false);
    }
}

static uint64_t open_connections(void)
{
    return __atomic_load_n(&r2_eng.g->connections_open, __ATOMIC_RELAXED);
}

/* A sender, a receiver, and one whose peer was never reached, as after an abort. */
TEST(nobody_acknowledges)
{
    uint64_t before = open_connections();
    struct remote out, in, never;
    struct r2_conn *none = NULL;

    remote_new(&out, true, 1);
    CHECK(remote_open(&out, 1));
    remote_new(&in, false, 1);
    CHECK(remote_open(&in, 1));
    remote_new(&never, true, 1);
    fake_policy(never.id, -EHOSTUNREACH);
    CHECK_EQ(r2_engine_connect(remote_ctx(), 0, never.handle, &none), 0);
    CHECK(remote_there(&out) && remote_there(&in) && remote_there(&never));
    silence(&out);
    silence(&in);
    CHECK_EQ(r2_engine_close(out.conn), 0);
    CHECK_EQ(r2_engine_close(in.conn), 0);
    CHECK_EQ(r2_engine_finalize(remote_ctx()), 0); /* closes what is half made */
    CHECK(wait_forgotten(&out));
    CHECK(wait_forgotten(&in));
    CHECK(wait_forgotten(&never));
    CHECK_EQ(open_connections(), before);
}

/* Another connection to the same peer, on which nothing is under way, outlives that: the peer is
 * not gone, and a path that comes back serves it. */
TEST(idle_ones_stay)
{
    struct r2_msg_cts cts = {.size = 1};
    struct r2_msg_close gone;
    struct r2_conn *first;
    struct r2_req *req = NULL;
    struct r2_ep *ep;
    struct remote r;
    uint64_t id;

    remote_new(&r, true, 1);
    CHECK(remote_open(&r, 1));
    first = r.conn;
    id = r.conn_id;
    ep = fake_find(r.id, 0, 0, 0);
    CHECK(remote_more(&r, ep));
    silence(&r);
    CHECK_EQ(r2_engine_close(first), 0);
    for (int i = 0; i < FORGOTTEN_MS; i++) {
        struct r2_conn *left;

        r2_peer_lock(r.conn->peer);
        left = r2_conn_find(r.conn->peer, id);
        pthread_mutex_unlock(&r.conn->peer->lock);
        if (!left)
            break;
        fake_pass_ms(1);
        CHECK_LT(i, FORGOTTEN_MS - 1);
    }
    fake_policy(r.id, 0);
    ep = remote_path(&r, 0, ep->params.gen);
    CHECK(ep);
    CHECK_EQ(r2_engine_isend(r.conn, data, sizeof(data), 0, NULL, &req), 0);
    CHECK(req);
    CHECK_GE(remote_hear(ep, R2_F_EAGER, NULL, 0), 0);
    CHECK_EQ(remote_ack(ep, &r, 1), 0);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    cts.conn = id;
    CHECK_EQ(fake_ctrl(ep, R2_F_CTS, &cts, sizeof(cts)), 0); /* it was there all the time */
    CHECK_GE(remote_hear(ep, R2_F_CLOSE, &gone, sizeof(gone)), 0);
    CHECK_EQ(gone.conn, id);
    remote_end(&r);
}

/* The other side of that: the sender has forgotten how many messages there were. What was
 * acknowledged can still be received, nothing behind it can. */
TEST(forgotten_by_the_sender)
{
    struct r2_req *req = NULL, *late = NULL;
    uint8_t sink[sizeof(data)] = {0};
    struct r2_ep *ep;
    struct remote r;

    memset(data, 7, sizeof(data));
    remote_new(&r, false, 1);
    CHECK(remote_open(&r, 1));
    ep = fake_find(r.id, 0, 0, 0);
    CHECK_EQ(remote_eager(ep, &r, 0, data, sizeof(data)), 0);
    CHECK_EQ(remote_close(ep, &r, 0), 0);
    CHECK_EQ(r2_engine_irecv(r.conn, sink, sizeof(sink), 0, NULL, &req), 0);
    CHECK(req);
    fake_pull(ep);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    CHECK_MEM(sink, data, sizeof(data));
    CHECK_EQ(r2_engine_irecv(r.conn, sink, sizeof(sink), 0, NULL, &late), -ECONNRESET);
    remote_end(&r);
}

/* Every path has been silent for longer than that, and nobody minded: who posts a receive now waits
 * as long as who posted it before. */
TEST(the_wait_begins_with_the_work)
{
    struct r2_req *req = NULL;
    uint8_t sink[64];
    struct r2_ep *ep;
    struct remote r;
    uint64_t t0;

    remote_new(&r, false, 1);
    CHECK(remote_open(&r, 1));
    ep = fake_find(r.id, 0, 0, 0);
    atomic_store(&ep->silent, true);
    FAKE_AWAIT(REMOTE_WAIT_MS, remote_suspect(&r));
    fake_pass_ms(1500);
    t0 = r2_now_ns();
    CHECK_EQ(r2_engine_irecv(r.conn, sink, sizeof(sink), 0, NULL, &req), 0);
    CHECK_EQ(remote_test(req, 20000, NULL), -ETIMEDOUT);
    CHECK_GE(r2_now_ns() - t0, 900 * R2_NS_PER_MS);
    remote_end(&r);
}

/* The application closes while the question is out whether the peer still exists: nobody answers
 * it, which its patience ends, or the answer comes after that. It ends, and so does the peer. (One
 * that is out when the peer goes: test_engine_liveness, gone_while_one_asks.) */
TEST(while_a_question_is_out)
{
    uint64_t before = open_connections();
    struct remote r[2];

    for (int i = 0; i < 2; i++) {
        struct r2_ep *probe = NULL;
        struct r2_req *req = NULL;

        remote_new(&r[i], false, 1);
        CHECK(remote_open(&r[i], 1));
        CHECK_EQ(r2_engine_irecv(r[i].conn, data, sizeof(data), 0, NULL, &req), 0);
        fake_fail(fake_find(r[i].id, 0, 0, 0), ECONNRESET, false);
        for (int ms = 0; ms < REMOTE_WAIT_MS && !(probe = fake_probe(r[i].id)); ms++)
            fake_pass_ms(1);
        CHECK(probe);
        CHECK_EQ(r2_engine_close(r[i].conn), 0);
        r2_engine_close_listen(r[i].listen);
        if (i == 1)
            fake_fail(probe, EALREADY, false);
        CHECK(i == 1 || remote_wait_flag(&probe->is_shut));
    }
    CHECK(wait_forgotten(&r[0]));
    CHECK(wait_forgotten(&r[1]));
    CHECK(!fake_probe_at(r[0].id, 0, 0) && !fake_probe_at(r[1].id, 0, 0));
    CHECK_EQ(open_connections(), before);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_RAMP=0 R2CCL_NO_PATH_TIMEOUT=1s R2CCL_HEARTBEAT=25ms "
                     "heartbeat_idle=25ms");
    return check_main(argc, argv);
}
