/* Whether a process still exists, over a scripted transport (rung 2): when its message that it
 * has given this one up counts, and whose refusals are needed. What refusals prove is
 * test_engine_liveness.c's, who may say that word test_tcp_proof.c's. */
#include "liveness_bed.h"

/* With the state that it follows from: what happens to the NIC meanwhile derives it anew. */
static void set_word(int nic, enum r2_nic_word word)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];

    pthread_mutex_lock(&r2_eng.nic_lock);
    s->health.state = word == R2_NIC_FAILED   ? R2_HEALTH_FAILED
                      : word == R2_NIC_DAMPED ? R2_HEALTH_DAMPED
                                              : R2_HEALTH_HEALTHY;
    atomic_store(&s->word, (unsigned char)word);
    pthread_mutex_unlock(&r2_eng.nic_lock);
}

/* Both are lost, with that word about NICs of ours (bits). What refuses (bits) does not prove at
 * once that the process is gone, but does when it goes on. */
static void not_at_once(bool out, unsigned ours, enum r2_nic_word word, unsigned refusing)
{
    uint64_t t0;
    int rc;

    begin(out, 2);
    for (int i = 0; i < 2; i++) {
        if (ours >> i & 1)
            set_word(i, word);
    }
    lose_one(0);
    lose_one(1);
    t0 = r2_now_ns();
    CHECK_GE(refuse(refusing, ECONNREFUSED, 1200, &rc), 2);
    CHECK_EQ(rc, 0);
    refuse(refusing, ECONNREFUSED, 6000, &rc);
    CHECK_EQ(rc, -ECONNRESET);
    CHECK_GE(r2_now_ns() - t0, 2 * R2_NS_PER_S);
    set_word(0, R2_NIC_USABLE);
    set_word(1, R2_NIC_USABLE);
    remote_end(&r);
}

/* Our NIC that leads to the other one is left alone because it failed too often: now it is tried.
 */
TEST(the_other_one_by_a_damped_nic)
{
    for (int out = 0; out < 2; out++)
        not_at_once(out, 2, R2_NIC_DAMPED, 1);
}

/* It lost its link when it failed too often, as most do: no refusal can come that way. */
TEST(damped_without_a_link)
{
    for (int out = 0; out < 2; out++) {
        uint64_t t0;
        int rc;

        begin(out, 2);
        /* Were its link down only, it would be taken for up. */
        atomic_store(&r2_eng.nic_state[1].place, R2_PLACE_MISSING);
        set_word(1, R2_NIC_DAMPED);
        lose_one(0);
        lose_one(1);
        t0 = r2_now_ns();
        refuse(1, ECONNREFUSED, 6000, &rc);
        CHECK_EQ(rc, -ECONNRESET);
        CHECK_LT(r2_now_ns() - t0, 2 * R2_NS_PER_S);
        CHECK(!r2_nic_is_up(1));
        atomic_store(&r2_eng.nic_state[1].place, R2_PLACE_UP);
        set_word(1, R2_NIC_USABLE);
        remote_end(&r);
    }
}

/* No NIC of ours works, so what comes over them is no proof that nothing else could come. */
TEST(no_nic_has_a_say)
{
    for (int out = 0; out < 2; out++)
        not_at_once(out, 3, R2_NIC_FAILED, 3);
}

/* What is out between NICs of that number ends with the process's word that it has given this one
 * up. Goes on until the request ends or `ms` are over. Returns how often; `rc` as remote_test. */
static int given_up(int nic, int ms, int *rc)
{
    int times = 0;

    *rc = 0;
    for (uint64_t end = r2_now_ns() + (uint64_t)ms * R2_NS_PER_MS; !*rc && r2_now_ns() < end;) {
        struct r2_ep *e = trial(nic);

        if (e) {
            atomic_store(&e->there, true);
            atomic_store(&e->given_up, true);
            end_trial(e, ENOTRECOVERABLE);
            times++;
        }
        *rc = remote_test(req, 2, NULL);
    }
    return times;
}

/* Nothing is waited for. */
TEST(given_up)
{
    for (int out = 0; out < 2; out++) {
        int rc;

        lose(out, 2);
        CHECK_GE(given_up(1, 5000, &rc), 1);
        CHECK_EQ(rc, -ECONNRESET);
        remote_end(&r);
    }
}

/* A path came up after it was asked: what was opened over it may be newer than the answer. */
TEST(given_up_before_the_last_path)
{
    for (int out = 0; out < 2; out++) {
        struct r2_ep *e, *up;

        lose(out, 2);
        e = await_trial(1);
        up = back(0);
        lost[0] = up->params.gen;
        atomic_store(&e->there, true);
        atomic_store(&e->given_up, true);
        if (!out) /* while it is up, and when it is not any more */
            end_trial(up, ECONNRESET);
        end_trial(e, ENOTRECOVERABLE);
        CHECK_EQ(remote_test(req, 300, NULL), 0);
        if (out)
            CHECK(remote_up(&r, 0));
        remote_end(&r);
    }
    /* S: an attempt from before the last loss. */
    for (int i = 0; i < 3; i++) {
        struct r2_ep *e;

        begin(true, 2);
        lose_one(1);
        e = await_trial(1);
        lose_one(0);
        atomic_store(&e->given_up, true);
        end_trial(e, ENOTRECOVERABLE);
        CHECK_EQ(remote_test(req, 300, NULL), 0);
        remote_end(&r);
    }
}

/* S: a connection that is being opened may be one that the process has not heard of yet. It goes
 * on, and is there when that process takes a path again; those that are open end at once. */
TEST(given_up_while_one_is_opened)
{
    struct r2_msg_close_ack closed = {.from_sender = 1};
    struct r2_msg_open_ack ack = {0};
    struct r2_conn *conn = NULL;
    struct r2_msg_open m;
    struct r2_ctx *ctx;
    struct r2_ep *ep;
    int rc;

    lose(true, 1);
    CHECK_EQ(r2_engine_init(&ctx, 2, NULL), 0);
    CHECK_EQ(r2_engine_connect(ctx, 0, r.handle, &conn), 0);
    CHECK(!conn);
    CHECK_GE(given_up(0, 5000, &rc), 1);
    CHECK_EQ(rc, -ECONNRESET);
    CHECK_EQ(r2_engine_connect(ctx, 0, r.handle, &conn), 0);
    CHECK(!conn);
    ep = back(0);
    CHECK_LE(0, remote_hear(ep, R2_F_OPEN, &m, sizeof(m)));
    CHECK(m.conn != r.conn_id);
    ack.conn = closed.conn = m.conn;
    CHECK_EQ(fake_ctrl(ep, R2_F_OPEN_ACK, &ack, sizeof(ack)), 0);
    CHECK_EQ(r2_engine_connect(ctx, 0, r.handle, &conn), 0);
    CHECK(conn);
    CHECK_EQ(r2_engine_close(conn), 0);
    CHECK_EQ(r2_engine_finalize(ctx), 0);
    fake_ctrl(ep, R2_F_CLOSE_ACK, &closed, sizeof(closed)); /* nothing of it is left */
    remote_end(&r);
}

/* ... but not by an answer from before the last loss: they may be newer. */
TEST(given_up_before_the_last_path_while_one_is_opened)
{
    struct r2_conn *conn = NULL;
    struct r2_ep *e;
    struct r2_ctx *ctx;
    int rc;

    begin(true, 2);
    lose_one(1);
    CHECK_EQ(r2_engine_init(&ctx, 2, NULL), 0);
    CHECK_EQ(r2_engine_connect(ctx, 0, r.handle, &conn), 0);
    e = await_trial(1);
    lose_one(0);
    atomic_store(&e->given_up, true);
    end_trial(e, ENOTRECOVERABLE);
    CHECK_EQ(remote_test(req, 300, NULL), 0);
    CHECK_EQ(r2_engine_finalize(ctx), 0);
    CHECK_GE(given_up(0, 5000, &rc), 1); /* nothing of it is left */
    CHECK_EQ(rc, -ECONNRESET);
    remote_end(&r);
}

/* Those that say what is known of our NICs come first: a path that is back grows for seconds, and
 * then says that its NIC works. */
int main(int argc, char **argv)
{
    remote_engine(2, remote_outlives);
    return check_main(argc, argv);
}
