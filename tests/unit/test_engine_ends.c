/* The engine over a scripted transport (rung 2): what a connection leaves to others when it ends in
 * the middle of its work, and when a peer counts as gone. It cannot prove what sockets do. */
#include <errno.h>

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

TEST(close_gives_room)
{
    room_after(false);
}

TEST(dereg_gives_room)
{
    room_after(true);
}

/* Control frames get through and test chunks never do (a hole for large packets): attempts that
 * prove nothing do not prolong the wait for a path. */
TEST(unproven_paths_end_the_wait)
{
    uint64_t waits = __atomic_load_n(&r2_eng.n->no_path_waits, __ATOMIC_RELAXED);
    struct r2_req *req;
    uint32_t gen;
    int rc = 0;

    begin(1);
    req = isend(r.conn, NULL);
    gen = a->params.gen;
    fake_fail(a, ECONNRESET, false);
    for (int i = 0; i < 60 && !rc; i++) {
        struct r2_ep *ep =
            remote_state(&r, 0) == R2_PATH_CONNECTING ? fake_find(r.id, 0, 0, gen) : NULL;

        if (ep && fake_up(ep))
            gen = ep->params.gen;
        rc = remote_test(req, 200, NULL);
    }
    CHECK_EQ(rc, -ETIMEDOUT);
    CHECK_EQ(__atomic_load_n(&r2_eng.n->no_path_waits, __ATOMIC_RELAXED), waits + 1);
    remote_end(&r);
}

/* The last path is lost while nothing is under way: who asks first waits, and that is told. */
TEST(wait_begins_late)
{
    uint64_t waits = __atomic_load_n(&r2_eng.n->no_path_waits, __ATOMIC_RELAXED);
    struct r2_req *req;

    begin(1);
    fake_fail(a, ECONNRESET, false);
    CHECK_EQ(__atomic_load_n(&r2_eng.n->no_path_waits, __ATOMIC_RELAXED), waits);
    req = isend(r.conn, NULL);
    isend(r.conn, NULL);
    CHECK_EQ(__atomic_load_n(&r2_eng.n->no_path_waits, __ATOMIC_RELAXED), waits + 1);
    CHECK_EQ(remote_test(req, 6000, NULL), -ETIMEDOUT);
    remote_end(&r);
}

/* An OPEN that was said again, and comes when all is over with its connection: there is nothing to
 * make anew. Another connection is made, even after many. */
TEST(open_after_the_end)
{
    struct r2_msg_close close = {.conn = 77, .from_sender = 1};
    struct r2_msg_close_ack closed = {.conn = 77};
    struct r2_msg_open again = {.conn = 77, .eager = 8192};
    struct r2_msg_open_ack ack;
    struct r2_conn *ghost = NULL;

    remote_new(&r, false, 2);
    CHECK(remote_open(&r, 1));
    a = fake_find(r.id, 0, 0, 0);
    again.listen = r.listen_id;
    for (uint64_t id = 77; id < 77 + 300; id++) {
        close.conn = closed.conn = again.conn = id;
        CHECK_EQ(fake_ctrl(a, R2_F_CLOSE, &close, sizeof(close)), 0);
        CHECK_EQ(r2_engine_close(r.conn), 0);
        CHECK_GE(remote_hear(a, R2_F_CLOSE, NULL, 0), 0);
        CHECK_EQ(fake_ctrl(a, R2_F_CLOSE_ACK, &closed, sizeof(closed)), 0);
        CHECK_EQ(fake_ctrl(a, R2_F_OPEN, &again, sizeof(again)), 0);
        CHECK_GE(remote_hear(a, R2_F_OPEN_ACK, &ack, sizeof(ack)), 0);
        CHECK_EQ(ack.status, ECONNRESET);
        CHECK_EQ(r2_engine_accept(r.listen, &ghost), 0);
        CHECK(!ghost);
        again.conn = id + 1;
        CHECK_EQ(fake_ctrl(a, R2_F_OPEN, &again, sizeof(again)), 0);
        CHECK_GE(remote_hear(a, R2_F_OPEN_ACK, &ack, sizeof(ack)), 0);
        CHECK_EQ(ack.status, 0);
        CHECK_EQ(r2_engine_accept(r.listen, &r.conn), 0);
        CHECK(r.conn);
        remote_forget(a);
    }
    r.conn_id = 77 + 300;
    remote_end(&r);
}

/* How many endpoints to the process are there after `ms`. `reached`: its kernel takes them. */
static int attempts(int ms, bool reached)
{
    for (uint64_t end = r2_now_ns() + (uint64_t)ms * R2_NS_PER_MS; r2_now_ns() < end;) {
        pthread_mutex_lock(&fake_all_lock);
        for (struct r2_ep *ep = fake_all; ep; ep = ep->next) {
            if (memcmp(ep->params.remote_process, r.id, 16) == 0)
                atomic_store(&ep->connected, reached);
        }
        pthread_mutex_unlock(&fake_all_lock);
        fake_pass_ms(1);
    }
    return fake_count(r.id);
}

/* A peer that is slow to answer, with its kernel at work, is waited for: one attempt after the
 * other would only make it slower. Where nobody has answered, another attempt may find a way. */
TEST(slow_process_is_waited_for)
{
    remote_new(&r, true, 2);
    CHECK_EQ(r2_engine_connect(r.listen->ctx, 0, r.handle, &r.conn), 0);
    CHECK(!r.conn);
    CHECK_EQ(attempts(2500, true), 2); /* one for each NIC, and no other pair is tried */
    CHECK(remote_open(&r, 2));
    remote_end(&r);
    remote_new(&r, true, 2);
    CHECK_EQ(r2_engine_connect(r.listen->ctx, 0, r.handle, &r.conn), 0);
    CHECK_GT(attempts(1500, false), 4);
    fake_policy(r.id, -ECONNREFUSED);
    for (int i = 0; i < 100; i++)
        fake_forget(r.id);
}

/* A path that may still have to bring what another one brought meanwhile is spared, as long as
 * there is another one. */
TEST(the_only_path_is_not_spared)
{
    struct r2_path *path;
    struct r2_bulk c;

    begin(2);
    isend(r.conn, NULL);
    path = a->params.owner;
    r2_peer_lock(path->peer);
    path->flow.busy_until = r2_now_ns() + 60 * R2_NS_PER_S;
    r2_peer_unlock(path->peer);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    CHECK(!fake_next(a, &c));
    fake_fail(fake_find(r.id, 1, 1, 0), ECONNRESET, false);
    CHECK(fake_next(a, &c));
    remote_end(&r);
}

/* A handle comes from outside, and so does its cookie: it may not name what others have. */
TEST(cookie_of_another)
{
    uint8_t forged[R2_HANDLE_BYTES];
    struct r2_conn *again = NULL;

    begin(1);
    memcpy(forged, r.handle, sizeof(forged));
    memcpy(forged + 48, &r.conn->id, 8); /* behind magic, four bytes, process, secret, listen */
    CHECK_LT(r2_engine_connect(remote_ctx(), 0, forged, &again), 0);
    CHECK(!again);
    memcpy(forged, r.handle, sizeof(forged));
    memset(forged + 48, 0, 8);
    CHECK_EQ(r2_engine_connect(remote_ctx(), 0, forged, &again), 0); /* a second one, under way */
    forged[8] ^= 1; /* its cookie, of another process */
    CHECK_EQ(r2_engine_connect(remote_ctx(), 0, forged, &again), -EINVAL);
    forged[8] ^= 1;
    forged[40] ^= 1; /* of another listener */
    CHECK_EQ(r2_engine_connect(remote_ctx(), 0, forged, &again), -EINVAL);
    forged[40] ^= 1;
    CHECK_EQ(r2_engine_connect(remote_ctx(), 0, forged, &again), 0);
    CHECK(!again);
    remote_end(&r);
}

/* Processes with different builds do not understand each other by halves. */
TEST(handle_of_another_version)
{
    uint8_t forged[R2_HANDLE_BYTES];
    struct r2_conn *again = NULL;

    begin(1);
    memcpy(forged, r.handle, sizeof(forged));
    memset(forged + 48, 0, 8); /* the cookie: a fresh one */
    CHECK_EQ(forged[4], R2_WIRE_VERSION);
    forged[4]--;
    CHECK_EQ(r2_engine_connect(remote_ctx(), 0, forged, &again), -EINVAL);
    CHECK(!again);
    remote_end(&r);
}

/* The connecting side is up before the accepting one knows it, and its test chunks travel on other
 * sockets. */
TEST(test_chunks_before_up)
{
    struct r2_msg_test m = {.bytes = 64};
    struct r2_bulk b = {.conn = R2_CONN_TEST, .len = 64, .total = 64};
    struct r2_ep *ep;

    remote_new(&r, false, 2);
    CHECK(remote_open(&r, 2));
    ep = fake_find(r.id, 0, 0, 0);
    fake_fail(ep, ECONNRESET, false);
    CHECK(remote_wait_state(&r, 0, R2_PATH_WAIT));
    m.gen = r.gen = r.gen + 1;
    ep = fake_accept(r.id, 0, 0, m.gen);
    CHECK(ep);
    CHECK_EQ(fake_claim(ep, &b), 0);
    CHECK(fake_done(ep, &b));
    CHECK(fake_up(ep));
    CHECK_EQ(fake_ctrl(ep, R2_F_TEST, &m, sizeof(m)), 0);
    CHECK_GE(remote_hear(ep, R2_F_TEST_ACK, &m, sizeof(m)), 0);
    CHECK_EQ(m.bytes, 64);
    remote_end(&r);
}

static void process_gone(void)
{
    fake_policy(r.id, -ECONNREFUSED);
    fake_fail(a, ECONNRESET, false);
    for (int ms = 0; ms < REMOTE_WAIT_MS; ms++) {
        bool gone;

        r2_peer_lock(r.conn->peer);
        gone = r.conn->peer->life == R2_PEER_GONE;
        r2_peer_unlock(r.conn->peer);
        if (gone)
            return;
        fake_pass_ms(1);
    }
    CHECK(false);
}

/* What was made before has failed and says why; once it is closed, another one is no victim of
 * that: it is begun with a peer of its own. */
TEST(given_up_is_forgotten)
{
    struct r2_conn *failed, *again = NULL;
    uint8_t handle[R2_HANDLE_BYTES];
    struct r2_ctx *ctx;

    begin(1);
    failed = r.conn;
    ctx = remote_ctx();
    memcpy(handle, r.handle, sizeof(handle));
    process_gone();
    CHECK_EQ(r2_engine_connect(ctx, 0, handle, &again), -ECONNRESET);
    r2_engine_close(failed);
    for (int ms = 0; ms < REMOTE_WAIT_MS && !memcmp(handle, r.handle, sizeof(handle)); ms++) {
        CHECK_EQ(r2_engine_connect(ctx, 0, handle, &again), 0);
        fake_pass_ms(1);
    }
    CHECK(memcmp(handle, r.handle, sizeof(handle))); /* it has its connection's number now */
    r.conn = NULL;
    for (int i = 0; i < 100; i++)
        fake_forget(r.id);
}

static void begin_receiver(void)
{
    remote_new(&r, false, 2);
    CHECK(remote_open(&r, 1));
    a = fake_find(r.id, 0, 0, 0);
    CHECK(a);
}

/* Its sends were acknowledged, so the sender has ended; what waits here is received all the same.
 */
static struct r2_req *irecv(uint8_t *to)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_irecv(r.conn, to, MSG, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

TEST(sender_gone)
{
    static uint8_t sink[MSG];
    struct r2_req *req, *late = NULL;

    for (int i = 0; i < 1500; i++)
        data[i] = (uint8_t)check_random();
    for (int closes = 0; closes < 2; closes++) {
        begin_receiver();
        for (uint64_t s = 0; s < 3; s++)
            CHECK_EQ(remote_eager(a, &r, s, data + s * 500, 500), 0);
        req = irecv(sink); /* done, but for the acknowledgement that has not left */
        if (closes)
            CHECK_EQ(remote_close(a, &r, 3), 0);
        process_gone();
        CHECK_EQ(remote_test(req, 0, NULL), 1);
        for (int i = 1; i < 3; i++) {
            memset(sink, 0, 500);
            CHECK_EQ(remote_test(irecv(sink), 0, NULL), 1);
            CHECK_MEM(sink, data + i * 500, 500);
        }
        CHECK_EQ(r2_engine_irecv(r.conn, sink, MSG, 0, NULL, &late), -ECONNRESET);
        remote_end(&r);
    }
    begin_receiver();
    req = irecv(sink);
    process_gone();
    CHECK_EQ(remote_test(req, 0, NULL), -ECONNRESET);
    remote_end(&r);
}

static uint64_t open_now(void)
{
    return __atomic_load_n(&r2_eng.g->connections_open, __ATOMIC_RELAXED);
}

/* Its connection is over once both sides have closed it; nobody is left to say so when the sender,
 * which is done, has let its paths go before the receiver closes, or while it does. */
TEST(receiver_closes_late)
{
    for (int first = 0; first < 2; first++) { /* the receiver's CLOSE leaves first, and is lost */
        uint64_t before = open_now();
        int asked;

        begin_receiver();
        if (first)
            CHECK_EQ(r2_engine_close(r.conn), 0);
        CHECK_EQ(remote_close(a, &r, 0), 0);
        fake_fail(a, ECONNRESET, false);
        if (!first)
            CHECK_EQ(r2_engine_close(r.conn), 0);
        r2_engine_close_listen(r.listen);
        for (int ms = 0; ms < 1000 && open_now() > before; ms++)
            fake_pass_ms(1);
        CHECK_EQ(open_now(), before);
        asked = fake_count(r.id); /* before it closed, it may have looked for the sender */
        fake_pass_ms(500);
        CHECK_EQ(fake_count(r.id), asked);
        fake_forget(r.id);
    }
}

/* Whoever listens no more closes what nobody has accepted: the senders learn it. */
TEST(nobody_accepts)
{
    uint64_t before = open_now();
    struct r2_msg_open open = {0};
    struct r2_msg_close m;

    begin_receiver();
    open.listen = r.listen_id;
    for (int i = 0; i < 2; i++) {
        open.conn = 700 + (uint64_t)i;
        CHECK_EQ(fake_ctrl(a, R2_F_OPEN, &open, sizeof(open)), 0);
    }
    CHECK_EQ(open_now(), before + 3);
    r2_engine_close_listen(r.listen);
    r.listen = NULL;
    for (int i = 0; i < 2; i++) {
        CHECK_GE(remote_hear(a, R2_F_CLOSE, &m, sizeof(m)), 0);
        CHECK_EQ(m.conn, 700 + (uint64_t)i);
        CHECK_EQ(m.from_sender, 0);
    }
    remote_end(&r);
}

/* Each path counts its generations by itself: one that comes and goes uses up nobody else's. */
TEST(generations_do_not_run_out)
{
    unsigned top;

    begin(1);
    top = atomic_exchange(&r2_eng.top_gen, UINT32_MAX - 2);
    for (int i = 0; i < 5; i++) {
        struct r2_ep *ep = a;

        fake_fail(ep, ECONNRESET, false);
        a = remote_path(&r, 0, ep->params.gen);
        CHECK(a);
        CHECK_EQ(a->params.gen, ep->params.gen + 1);
    }
    atomic_store(&r2_eng.top_gen, top + 5);
    remote_end(&r);
}

/* A peer that is met again remembers the paths that were there before. */
TEST(generations_of_a_new_path)
{
    uint32_t gen;

    begin(1);
    fake_fail(a, ECONNRESET, false);
    a = remote_path(&r, 0, a->params.gen);
    CHECK(a);
    gen = a->params.gen;
    remote_end(&r);
    begin(1); /* another peer: any path that is new */
    CHECK_GT(a->params.gen, gen);
    remote_end(&r);
}

static struct r2_req *irecv_of(uint8_t *to, size_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_irecv(r.conn, to, size, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

/* The sender does not wait for the word about a small receive, so it is kept back; a message that
 * is too large for it does wait, so it is said after a while, whatever a later receive has said. */
TEST(kept_word_is_said)
{
    static uint8_t sink[MSG];
    struct r2_msg_cts m;
    struct r2_req *req;
    unsigned said = 0;
    uint64_t posted;

    begin_receiver();
    for (uint64_t s = 0; s < 3; s++) { /* those that come in time cost no frame */
        CHECK_EQ(remote_eager(a, &r, s, data, 500), 0);
        req = irecv_of(sink, 1000);
        fake_pull(a);
        CHECK_EQ(remote_test(req, 1000, NULL), 1);
    }
    CHECK_EQ(remote_hear_ms(a, R2_F_CTS, &m, sizeof(m), 200), -1);
    posted = r2_now_ns();
    irecv_of(sink, 1000);
    irecv_of(sink, MSG);
    for (int i = 0; i < 2; i++) {
        CHECK_GE(remote_hear(a, R2_F_CTS, &m, sizeof(m)), 0);
        CHECK(m.seq == 3 || m.seq == 4);
        said |= 1u << m.seq;
        if (m.seq == 3)
            CHECK_GE(r2_now_ns() - posted, 50 * R2_NS_PER_MS); /* it was kept */
    }
    CHECK_EQ(said, 1u << 3 | 1u << 4);
    CHECK_EQ(remote_hear_ms(a, R2_F_CTS, &m, sizeof(m), 200), -1); /* once */
    remote_end(&r);
}

/* What has arrived stays so: an acknowledgement counts although the path that brings it is given up
 * already. Its receiver may not be there any more to repeat it. */
TEST(ack_of_the_dead)
{
    struct r2_req *req = NULL;
    struct r2_bulk c;
    struct r2_ep *b;

    begin(2);
    b = fake_find(r.id, 1, 1, 0);
    CHECK(b);
    CHECK_EQ(r2_engine_isend(r.conn, data, 64 * KB, 0, NULL, &req), 0);
    CHECK_EQ(remote_cts(a, &r, 0, 64 * KB), 0);
    CHECK_EQ(fill_window(a), 2);
    atomic_store(&a->unconfirmed, true); /* not shut yet: it still hears */
    fake_fail(a, ECONNRESET, false);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    CHECK_EQ(remote_ack(a, &r, 1), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    fake_shut_over(a);
    CHECK_EQ(remote_fenced(b, a), 0);
    CHECK(!fake_next(b, &c)); /* nothing of it is sent again */
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_CHUNK=32K R2CCL_RAMP=0 R2CCL_NO_PATH_TIMEOUT=4s");
    return check_main(argc, argv);
}
