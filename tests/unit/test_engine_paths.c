/* Paths and peers over a scripted transport (rung 2): silence, refusals, words about NICs, time
 * limits, and memory that is taken back. Heartbeats are 25 ms, the time without a path 2 s. */
#include "await.h"
#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (64 * KB)
#define CHUNK (16 * KB)

static uint8_t data[2 * MSG];
static struct remote r;
static struct r2_ep *a, *b; /* paths of NIC 0 and NIC 1 */

static void begin(bool out, int paths)
{
    remote_new(&r, out, 2);
    CHECK(remote_open(&r, paths));
    a = fake_find(r.id, 0, 0, 0);
    b = paths > 1 ? fake_find(r.id, 1, 1, 0) : NULL;
    CHECK(a && (b || paths < 2));
}

/* A request in flight makes the peer busy. */
static struct r2_req *post(void)
{
    struct r2_req *req = NULL;

    if (r.out)
        CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, NULL, &req), 0);
    else
        CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

TEST(one_silent_path)
{
    for (int out = 0; out < 2; out++) {
        begin(out, 2);
        post();
        atomic_store(&a->silent, true);
        CHECK(remote_wait_flag(&a->is_shut));
        CHECK(remote_up(&r, 1));
        CHECK(!remote_suspect(&r));
        remote_end(&r);
    }
}

/* Of a new path's frames INFO is the first, whatever has waited for a path. */
TEST(info_goes_first)
{
    for (int out = 0; out < 2; out++) {
        struct r2_ep *ep;

        begin(out, 1);
        post();
        fake_fail(a, ECONNRESET, false);
        ep = remote_unproven(&r, 0, a->params.gen);
        CHECK(ep);
        CHECK_EQ(remote_hear(ep, R2_F_INFO, NULL, 0), 0);
        remote_end(&r);
    }
}

static bool wait_suspect(bool yes)
{
    for (int i = 0; i < REMOTE_WAIT_MS && remote_suspect(&r) != yes; i++)
        fake_pass_ms(1);
    return remote_suspect(&r) == yes;
}

TEST(all_silent)
{
    struct r2_req *req;

    begin(true, 2);
    req = post();
    atomic_store(&a->silent, true);
    atomic_store(&b->silent, true);
    CHECK(wait_suspect(true));
    fake_pass_ms(500); /* far more than three heartbeats */
    CHECK(remote_up(&r, 0));
    CHECK(remote_up(&r, 1));
    CHECK(!atomic_load(&a->is_shut) && !atomic_load(&b->is_shut));
    for (int i = 0; i < REMOTE_WAIT_MS && !atomic_load(&a->is_shut) && !atomic_load(&b->is_shut);
         i++)
        fake_pass_ms(1);
    /* After a second one path is made anew, one only. */
    CHECK(atomic_load(&a->is_shut) != atomic_load(&b->is_shut));
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);

    begin(false, 2); /* the accepting side only waits */
    req = post();
    atomic_store(&a->silent, true);
    atomic_store(&b->silent, true);
    CHECK(wait_suspect(true));
    fake_pass_ms(500);
    CHECK(!atomic_load(&a->is_shut) && !atomic_load(&b->is_shut));
    atomic_store(&a->silent, false);
    atomic_store(&b->silent, false);
    CHECK(wait_suspect(false));
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

/* The observer is held up for longer than its own interval each time: it must not judge. */
TEST(late_observer)
{
    begin(true, 2);
    post();
    atomic_store(&b->health_ms, 220);
    AWAIT(atomic_load(&b->asked) >= 2);
    atomic_store(&a->silent, true);
    AWAIT(atomic_load(&b->asked) >= 8);
    CHECK(remote_up(&r, 0));
    CHECK(!atomic_load(&a->is_shut));
    atomic_store(&b->health_ms, 0);
    CHECK(remote_wait_flag(&a->is_shut));
    remote_end(&r);
}

TEST(nic_word)
{
    struct r2_ep *a2;

    begin(true, 2);
    post();
    CHECK_EQ(remote_nic(b, 0, false, 5), 0);
    CHECK(remote_wait_flag(&a->is_shut));
    fake_pass_ms(100);
    CHECK_EQ(remote_state(&r, 0), R2_PATH_WAIT); /* no attempt while the peer says it is down */
    CHECK_EQ(remote_nic(b, 0, true, 4), 0);      /* older word: not believed */
    fake_pass_ms(100);
    CHECK_EQ(remote_state(&r, 0), R2_PATH_WAIT);
    CHECK_EQ(remote_nic(b, 0, true, 6), 0);
    a2 = remote_path(&r, 0, a->params.gen);
    CHECK(a2);
    CHECK(remote_up(&r, 0));
    CHECK_EQ(remote_nic(b, R2_MAX_NICS - 1, true, 6), 0); /* never heard of */
    remote_end(&r);
}

static int tell_places(struct r2_ep *ep, uint8_t last_byte, uint32_t number)
{
    struct remote_info info;

    remote_info(&r, &info);
    info.m.number = number;
    info.nics[0].addr.ip[3] = last_byte;
    return remote_say_info(ep, &info);
}

/* The peer's NIC has another address: what was connected to the old one ends, and the next attempt
 * goes to the new one. Older word changes nothing. */
TEST(nic_moved)
{
    struct r2_ep *a2;

    begin(true, 2);
    post();
    CHECK_EQ(tell_places(b, 222, 7), 0);
    CHECK(remote_wait_flag(&a->is_shut));
    CHECK(!atomic_load(&b->is_shut));
    a2 = remote_path(&r, 0, a->params.gen);
    CHECK(a2);
    CHECK_EQ(a2->params.remote_addr.ip[3], 222);
    CHECK_EQ(tell_places(b, 111, 6), 0);
    fake_fail(a2, ECONNRESET, false);
    a2 = remote_path(&r, 0, a2->params.gen);
    CHECK(a2);
    CHECK_EQ(a2->params.remote_addr.ip[3], 222);
    CHECK_EQ(tell_places(b, 222, 7), 0);
    CHECK_EQ(tell_places(a2, 222, 7), 0);
    fake_pass_ms(50);
    CHECK(remote_up(&r, 0));
    CHECK(!atomic_load(&a2->is_shut));
    remote_end(&r);
}

/* A question that falls into a hole does not keep the others from being asked. */
TEST(probe_unanswered)
{
    struct r2_ep *probe = NULL;

    begin(false, 1);
    post();
    fake_fail(a, ECONNRESET, false);
    for (int i = 0; i < REMOTE_WAIT_MS && !(probe = fake_probe(r.id)); i++)
        fake_pass_ms(1);
    CHECK(probe);
    atomic_store(&probe->connected, true); /* its process is only slow */
    fake_pass_ms(500);
    CHECK(fake_probe(r.id) == probe);
    atomic_store(&probe->connected, false);
    for (int i = 0; i < 500 && fake_probe(r.id) == probe; i++)
        fake_pass_ms(1);
    CHECK(fake_probe(r.id) && fake_probe(r.id) != probe);
    CHECK(remote_wait_flag(&probe->is_shut));
    remote_end(&r);
}

TEST(no_path_timeout)
{
    for (int out = 0; out < 2; out++) {
        struct r2_req *req, *more = NULL;
        uint64_t t0;

        begin(out, 1);
        req = post();
        fake_policy(r.id, -EHOSTUNREACH);
        t0 = r2_now_ns();
        if (out) {
            struct r2_ep *other = fake_find(r.id, 1, 1, 0);

            CHECK(other);
            fake_fail(other, EHOSTUNREACH, false);
        }
        fake_fail(a, ECONNRESET, false);
        CHECK_EQ(remote_test(req, 10000, NULL), -ETIMEDOUT);
        CHECK_GE(r2_now_ns() - t0, 2 * R2_NS_PER_S);
        CHECK_LT(r2_engine_irecv(r.conn, data, MSG, 0, NULL, &more), 0);
        remote_end(&r);
    }
}

/* Sockets are up, and may not carry the message to a device's memory: operators see that it waits,
 * and for what, until it ends with an error. */
TEST(no_path_for_device_memory)
{
    struct r2_msg_cts m = {.seq = 0, .size = MSG, .flags = R2_CTS_DEVICE};
    enum r2_seg_waits_for what = R2_SEG_WAITS_FOR_PATH;
    uint64_t t0 = r2_now_ns(), since = 0;
    struct r2_req *req;

    begin(true, 1);
    req = post();
    m.conn = r.conn_id;
    CHECK_EQ(fake_ctrl(a, R2_F_CTS, &m, sizeof(m)), 0);
    for (int i = 0; i < 1500 && !since; i++) {
        fake_pass_ms(1);
        since = remote_waits(&r, &what);
    }
    CHECK_GE(since, t0);
    CHECK_EQ(what, R2_SEG_WAITS_FOR_DEVICE_PATH);
    CHECK(remote_up(&r, 0));
    CHECK_EQ(remote_test(req, 10000, NULL), -ETIMEDOUT);
    for (int i = 0; i < 1500 && since; i++) {
        fake_pass_ms(1);
        since = remote_waits(&r, &what);
    }
    CHECK_EQ(since, 0);
    remote_end(&r);
}

TEST(back_before_timeout)
{
    struct r2_req *req;
    struct r2_bulk c;
    struct r2_ep *a2;

    begin(false, 1);
    req = post();
    fake_fail(a, ECONNRESET, false);
    fake_pass_ms(1000);
    a2 = remote_path(&r, 0, a->params.gen);
    CHECK(a2);
    fake_pass_ms(1500);
    for (uint64_t off = 0; off < MSG; off += CHUNK) {
        c = remote_chunk(&r, 0, off, CHUNK, MSG);
        CHECK_EQ(fake_claim(a2, &c), 0);
        CHECK(fake_done(a2, &c));
    }
    fake_pull(a2);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), 1);
    remote_end(&r);
}

/* deregMr returns when nobody can touch the memory, whoever has a chunk of it in hand. */
TEST(dereg_detaches)
{
    struct r2_req *req = NULL;
    struct r2_mr *mr;
    struct r2_bulk c;

    begin(true, 2);
    CHECK_EQ(r2_engine_reg(r.conn, data, MSG, 1, &mr), 0);
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, mr, &req), 0);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    CHECK(fake_next(a, &c));
    CHECK_EQ(r2_engine_dereg(r.conn, mr), 0);
    CHECK_EQ(atomic_load(&a->detached), 1);
    CHECK_EQ(atomic_load(&b->detached), 1);
    CHECK_EQ(a->n_tx, 0);
    CHECK_EQ(remote_test(req, 0, NULL), -ECANCELED);
    CHECK(!fake_next(a, &c));
    remote_end(&r);

    begin(false, 2);
    CHECK_EQ(r2_engine_reg(r.conn, data, MSG, 1, &mr), 0);
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, mr, &req), 0);
    c = remote_chunk(&r, 0, 0, CHUNK, MSG);
    CHECK_EQ(fake_claim(b, &c), 0);
    CHECK_EQ(r2_engine_dereg(r.conn, mr), 0);
    CHECK_EQ(atomic_load(&b->detached), 1);
    CHECK_EQ(b->n_rx, 0);
    CHECK_EQ(remote_test(req, 0, NULL), -ECANCELED);
    c = remote_chunk(&r, 0, CHUNK, CHUNK, MSG);
    CHECK_EQ(fake_claim(b, &c), 1); /* drained, not written */
    remote_end(&r);
}

/* An endpoint that is dead, but not yet shut, still has the memory in hand. */
TEST(dereg_of_dying)
{
    struct r2_req *req = NULL;
    struct r2_mr *mr;
    struct r2_bulk c;

    begin(false, 2);
    CHECK_EQ(r2_engine_reg(r.conn, data, MSG, 1, &mr), 0);
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, mr, &req), 0);
    c = remote_chunk(&r, 0, 0, CHUNK, MSG);
    CHECK_EQ(fake_claim(a, &c), 0);
    atomic_store(&a->hold_shut, true);
    fake_fail(a, ECONNRESET, false);
    for (int i = 0; i < REMOTE_WAIT_MS && !atomic_load(&a->waiting); i++)
        fake_pass_ms(1);
    CHECK_EQ(r2_engine_dereg(r.conn, mr), 0);
    CHECK_EQ(atomic_load(&a->detached), 1);
    CHECK_EQ(a->n_rx, 0);
    atomic_store(&a->hold_shut, false);
    CHECK_EQ(remote_test(req, 0, NULL), -ECANCELED);
    remote_end(&r);
}

/* Memory of finished requests is nobody's: other work goes on. */
TEST(dereg_of_idle)
{
    struct r2_req *req = NULL;
    struct r2_mr *mr;

    begin(false, 1);
    CHECK_EQ(r2_engine_reg(r.conn, data + MSG, MSG, 1, &mr), 0);
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK_EQ(r2_engine_dereg(r.conn, mr), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 0);
    remote_end(&r);
}

TEST(generations_grow)
{
    struct r2_ep *newer;

    begin(false, 2);
    CHECK(!fake_accept(r.id, 0, 0, a->params.gen)); /* again, or late */
    CHECK(!fake_accept(r.id, 0, 0, 0));
    newer = remote_path(&r, 0, b->params.gen);
    CHECK(newer);
    CHECK(remote_wait_flag(&a->is_shut)); /* the connecting side has given it up */
    CHECK(remote_up(&r, 0));
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(2, "R2CCL_HEARTBEAT=25 heartbeat_idle=25 R2CCL_NO_PATH_TIMEOUT=2s");
    return check_main(argc, argv);
}
