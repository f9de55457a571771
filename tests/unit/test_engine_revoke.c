/* What was cleared to send is taken back, over a scripted transport (rung 2): the receiver asks,
 * the sender stops and answers, and nobody's path is touched; whoever does not answer is fenced.
 * What it cannot prove: that queue pairs do as the script does (test_verbs_revoke). */
#include <errno.h>
#include <pthread.h>

#include "check.h"
#include "enginelib/remote.h"

#define KB 1024u
#define MSG (256 * KB)

static uint8_t data[MSG];
static struct remote r;
static struct r2_mr *mr;
static struct r2_ep *a, *b;

struct answer {
    struct r2_msg_revoke m;
    struct r2_msg_lane lane[2];
} __attribute__((packed));

/* The answer is waited for as long as a busy machine may take for it, unless none comes. */
static void begin(bool out)
{
    r2_revoke_wait_ns = 20 * R2_NS_PER_S;
    remote_new(&r, out, 2);
    CHECK(remote_open(&r, 2));
    CHECK_EQ(r2_engine_reg(r.conn, data, sizeof(data), 1, &mr), 0);
    for (int ms = 0; out && ms < 1000; ms++) {
        if (fake_newest(r.id, 0, R2_VIA_VERBS) && fake_newest(r.id, 1, R2_VIA_VERBS))
            break;
        fake_pass_ms(1);
    }
    a = out ? fake_newest(r.id, 0, R2_VIA_VERBS) : fake_find(r.id, 0, 0, 0);
    b = out ? fake_newest(r.id, 1, R2_VIA_VERBS) : fake_find(r.id, 1, 1, 0);
    CHECK(a && b);
    remote_forget(a);
    remote_forget(b);
    atomic_store(&fake_revoked, false);
}

/* Frame of that type over either path: the path, NULL if none came. */
static struct r2_ep *hear(uint8_t type, void *body, size_t cap, int ms)
{
    for (int t = 0; t <= ms; t++) {
        if (remote_hear_ms(a, type, body, cap, 0) >= 0)
            return a;
        if (remote_hear_ms(b, type, body, cap, 0) >= 0)
            return b;
        fake_pass_ms(1);
    }
    return NULL;
}

/* ---- the receiver's half */

static atomic_int dereg_rc;
static pthread_t dereg_thread;
static struct r2_req *recv_req;

static void *dereg_main(void *arg)
{
    (void)arg;
    atomic_store(&dereg_rc, r2_engine_dereg(r.conn, mr));
    return NULL;
}

/* A receive is posted, and its memory deregistered: another thread is at it from now on. */
static void take_back(void)
{
    struct r2_msg_revoke m;

    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, mr, &recv_req), 0);
    atomic_store(&dereg_rc, 1);
    CHECK_EQ(pthread_create(&dereg_thread, NULL, dereg_main, NULL), 0);
    CHECK(hear(R2_F_REVOKE, &m, sizeof(m), 3000));
    CHECK_EQ(m.conn, r.conn_id);
}

static int over(int ms)
{
    for (int t = 0; t < ms && atomic_load(&dereg_rc) == 1; t++)
        fake_pass_ms(1);
    return atomic_load(&dereg_rc);
}

static void finish(bool fenced)
{
    CHECK_EQ(over(5000), 0);
    pthread_join(dereg_thread, NULL);
    CHECK_EQ(atomic_load(&a->cleared), fenced);
    CHECK_EQ(atomic_load(&b->cleared), fenced);
    CHECK_EQ(atomic_load(&fake_revoked), fenced);
    CHECK_EQ(remote_test(recv_req, 0, NULL), -ECANCELED);
    CHECK(remote_up(&r, 0));
    CHECK(remote_up(&r, 1));
    remote_end(&r);
}

/* The sender's answers. */
static void nothing_was_sent(struct r2_ep *ep)
{
    struct r2_msg_revoke yes = {.conn = r.conn_id};

    CHECK_EQ(fake_ctrl(ep, R2_F_REVOKED, &yes, sizeof(yes)), 0);
}

static void one_chunk_on_its_way(void)
{
    struct answer yes = {.m = {.conn = r.conn_id, .lanes = 1},
                         .lane = {{.sender_nic = 1,
                                   .receiver_nic = 1,
                                   .transport = R2_VIA_VERBS,
                                   .gen = b->params.gen,
                                   .chunks = 1}}};

    CHECK_EQ(fake_ctrl(a, R2_F_REVOKED, &yes, sizeof(yes.m) + sizeof(yes.lane[0])), 0);
}

/* Nothing was sent, and the sender says so: no force is needed, no key has to die. */
TEST(answered)
{
    begin(false);
    take_back();
    nothing_was_sent(a);
    finish(false);
}

/* The question, or its answer, went down with a path: it is asked again, so that nobody is fenced
 * who would have answered. The wait is by the heartbeats' deadline here. */
TEST(asked_again)
{
    struct r2_msg_revoke m;

    begin(false);
    r2_revoke_wait_ns = 0;
    take_back();
    remote_forget(a);
    remote_forget(b);
    CHECK(hear(R2_F_REVOKE, &m, sizeof(m), 1000));
    CHECK_EQ(m.conn, r.conn_id);
    nothing_was_sent(a);
    finish(false);
}

/* The path that took the question may be dead and nobody knows yet: it is repeated over every one,
 * so that an answer does not wait until that is known. */
TEST(asked_again_everywhere)
{
    struct r2_msg_revoke m;

    begin(false);
    take_back();
    remote_forget(a);
    remote_forget(b);
    CHECK_GE(remote_hear_ms(a, R2_F_REVOKE, &m, sizeof(m), 2000), 0);
    CHECK_GE(remote_hear_ms(b, R2_F_REVOKE, &m, sizeof(m), 2000), 0);
    nothing_was_sent(b);
    finish(false);
}

/* The sender names a chunk: it may still be on its way into the memory until its head has come. */
TEST(chunk_on_its_way)
{
    struct answer nonsense = {.lane = {{.sender_nic = 9, .receiver_nic = 9}}};
    struct r2_bulk c;

    begin(false);
    nonsense.m = (struct r2_msg_revoke){.conn = r.conn_id, .lanes = 1};
    take_back();
    one_chunk_on_its_way();
    CHECK_EQ(fake_ctrl(a, R2_F_REVOKED, &nonsense, sizeof(nonsense.m) + sizeof(nonsense.lane[0])),
             0);
    CHECK_EQ(over(60), 1); /* not yet, also after an answer that names no path */
    c = remote_chunk(&r, 0, 0, 32 * KB, MSG);
    CHECK_EQ(fake_claim(b, &c), 1); /* drained: the receive is cancelled */
    finish(false);
}

/* No answer: the NICs are asked to fence, and the keys must die. */
TEST(unanswered)
{
    begin(false);
    r2_revoke_wait_ns = 100 * R2_NS_PER_MS;
    take_back();
    finish(true);
}

/* An answer that names a chunk which never comes is none. */
TEST(chunk_that_never_comes)
{
    struct answer yes;

    begin(false);
    r2_revoke_wait_ns = 500 * R2_NS_PER_MS;
    take_back();
    yes = (struct answer){.m = {.conn = r.conn_id, .lanes = 1},
                          .lane = {{.transport = R2_VIA_VERBS, .gen = a->params.gen, .chunks = 1}}};
    CHECK_EQ(fake_ctrl(a, R2_F_REVOKED, &yes, sizeof(yes.m) + sizeof(yes.lane[0])), 0);
    finish(true);
}

/* The sender counts the newest generation of a path only. What an older one took along, whose queue
 * pair has not confirmed its end, may still land. */
TEST(older_generation_unconfirmed)
{
    struct r2_ep *old;
    struct r2_bulk c;

    begin(false);
    old = b;
    atomic_store(&old->unconfirmed, true);
    fake_fail(old, EIO, false);
    b = remote_path(&r, 1, old->params.gen);
    CHECK(b && b != old);
    take_back();
    one_chunk_on_its_way();
    c = remote_chunk(&r, 0, 0, 32 * KB, MSG);
    CHECK_EQ(fake_claim(b, &c), 1);
    CHECK_EQ(over(100), 1);
    atomic_store(&old->unconfirmed, false);
    fake_shut_over(old);
    finish(false);
}

/* The sender has closed, which says the same: nothing is asked. */
TEST(closed_sender)
{
    struct r2_msg_close gone = {.from_sender = 1 | R2_CLOSE_IDLE};
    struct r2_msg_revoke m;

    begin(false);
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, mr, &recv_req), 0);
    gone.conn = r.conn_id;
    CHECK_EQ(fake_ctrl(a, R2_F_CLOSE, &gone, sizeof(gone)), 0);
    CHECK_EQ(remote_test(recv_req, 1000, NULL), -ECONNRESET);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    r.conn = NULL;
    CHECK(!hear(R2_F_REVOKE, &m, sizeof(m), 20));
    CHECK(!atomic_load(&a->cleared) && !atomic_load(&b->cleared));
    CHECK(!atomic_load(&fake_revoked));
    fake_forget(r.id);
}

/* ---- the sender's half */

static int cts(struct r2_ep *ep, uint64_t seq)
{
    struct {
        struct r2_msg_cts m;
        uint32_t keys[2];
    } __attribute__((packed))
    c = {.m = {.conn = r.conn_id, .seq = seq, .size = MSG, .addr = 0x10000, .keys = 2},
         .keys = {7, 8}};

    return fake_ctrl(ep, R2_F_CTS, &c, sizeof(c));
}

/* No chunk any more; the answer when the NICs have let go of those under way, and it names them. */
TEST(sender_stops)
{
    struct r2_msg_revoke ask;
    struct answer said;
    struct r2_req *req = NULL;
    struct r2_bulk c[2], more;
    int before;

    begin(true);
    CHECK_EQ(r2_engine_isend(r.conn, data, MSG, 0, mr, &req), 0);
    CHECK_EQ(cts(a, 0), 0);
    CHECK(fake_next(a, &c[0]));
    CHECK(fake_next(a, &c[1]));
    CHECK(fake_chunk_sent(a, &c[1]));
    ask = (struct r2_msg_revoke){.conn = r.conn_id};
    CHECK_EQ(fake_ctrl(a, R2_F_REVOKE, &ask, sizeof(ask)), 0);
    CHECK(!fake_next(a, &more));
    CHECK(!fake_next(b, &more));
    CHECK(!hear(R2_F_REVOKED, &said, sizeof(said), 50)); /* one chunk is with a NIC */
    CHECK_EQ(cts(a, 0), 0);                              /* that was on its way */
    CHECK(!fake_next(a, &more));
    before = atomic_load(&a->flushes) + atomic_load(&b->flushes);
    CHECK(fake_chunk_sent(a, &c[0]));
    CHECK_LT(before, atomic_load(&a->flushes) + atomic_load(&b->flushes)); /* sent at once */
    CHECK(hear(R2_F_REVOKED, &said, sizeof(said), 1000));
    CHECK_EQ(said.m.conn, r.conn_id);
    CHECK_EQ(said.m.lanes, 1);
    CHECK_EQ(said.lane[0].gen, a->params.gen);
    CHECK_EQ(said.lane[0].transport, R2_VIA_VERBS);
    CHECK_EQ(said.lane[0].chunks, 2);
    CHECK(!fake_next(a, &more));
    CHECK_EQ(remote_close(a, &r, 0), 0);
    CHECK_EQ(remote_test(req, 1000, NULL), -ECONNRESET);
    remote_end(&r);
}

/* The way that a question came is alive; what another one does is not known. */
TEST(answer_goes_back)
{
    struct r2_msg_revoke ask, said;

    begin(true);
    ask = (struct r2_msg_revoke){.conn = r.conn_id};
    CHECK_EQ(fake_ctrl(a, R2_F_REVOKE, &ask, sizeof(ask)), 0);
    CHECK_GE(remote_hear_ms(a, R2_F_REVOKED, &said, sizeof(said), 1000), 0);
    CHECK_EQ(remote_hear_ms(b, R2_F_REVOKED, &said, sizeof(said), 0), -1);
    CHECK_EQ(fake_ctrl(b, R2_F_REVOKE, &ask, sizeof(ask)), 0);
    CHECK_GE(remote_hear_ms(b, R2_F_REVOKED, &said, sizeof(said), 1000), 0);
    CHECK_EQ(remote_hear_ms(a, R2_F_REVOKED, &said, sizeof(said), 0), -1);
    remote_end(&r);
}

/* Its own CLOSE says it, too. */
TEST(sender_closes)
{
    struct {
        struct r2_msg_close m;
        struct r2_msg_lane lane[2];
    } __attribute__((packed)) said;
    struct r2_req *req = NULL;
    struct r2_bulk c;

    begin(true);
    CHECK_EQ(r2_engine_isend(r.conn, data, 32 * KB, 0, mr, &req), 0);
    CHECK_EQ(cts(a, 0), 0);
    CHECK(fake_next(a, &c));
    CHECK(fake_chunk_sent(a, &c));
    CHECK_EQ(remote_ack(a, &r, 1), 0);
    CHECK_EQ(remote_test(req, 1000, NULL), 1);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    r.conn = NULL;
    CHECK(hear(R2_F_CLOSE, &said, sizeof(said), 1000));
    CHECK_EQ(said.m.from_sender, 1 | R2_CLOSE_IDLE);
    CHECK_EQ(said.m.lanes, 1);
    CHECK_EQ(said.lane[0].gen, a->params.gen);
    CHECK_EQ(said.lane[0].chunks, 1);
    fake_forget(r.id);
}

/* ---- no NIC is blamed */

static uint32_t penalty_after(int err)
{
    struct r2_damp_rules rules;
    struct r2_path *path;
    uint32_t penalty;

    begin(true);
    path = a->params.owner;
    fake_fail(a, err, false);
    r2_peer_lock(path->peer);
    rules = r2_damp_rules();
    penalty = r2_damp_penalty(&path->damp, &rules, r2_now_ns());
    r2_peer_unlock(path->peer);
    remote_end(&r);
    return penalty;
}

/* The peer took its memory back, by a key that is gone or by its word: that counts as no failure of
 * the path; an error of a NIC does. */
TEST(no_blame)
{
    CHECK_EQ(penalty_after(EACCES), 0);
    CHECK_EQ(penalty_after(ECANCELED), 0);
    CHECK_GT(penalty_after(EIO), 0);
}

int main(int argc, char **argv)
{
    fake_offers = R2_OFFER_ROCE;
    remote_engine(2, "R2CCL_CHUNK=32K");
    return check_main(argc, argv);
}
