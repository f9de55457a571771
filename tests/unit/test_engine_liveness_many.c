/* Whether the process of a peer with many NICs still exists, over a scripted transport (rung 2),
 * asked by the accepting side. What one NIC's refusal proves is test_engine_liveness.c's. */
#include <errno.h>

#include "check.h"
#include "enginelib/remote.h"

#define NICS 8
#define MSG (64 * 1024u)

static uint8_t data[MSG];
static struct remote r;
static struct r2_req *req;

static void lose_all(void)
{
    req = NULL;
    remote_new(&r, false, NICS);
    CHECK(remote_open(&r, NICS));
    CHECK_EQ(r2_engine_irecv(r.conn, data, MSG, 0, NULL, &req), 0);
    CHECK(req);
    for (int i = 0; i < NICS; i++) {
        struct r2_ep *e = fake_find(r.id, i, i, 0);

        CHECK(e);
        fake_fail(e, ECONNRESET, false);
    }
}

/* Questions (R) or attempts (S) that are out, from one of our NICs or any (-1); the last of them.
 */
static int questions(int nic, struct r2_ep **last)
{
    int n = 0;

    pthread_mutex_lock(&fake_all_lock);
    for (struct r2_ep *e = fake_all; e; e = e->next) {
        if (memcmp(e->params.remote_process, r.id, 16) == 0 && e->params.probe == !r.out &&
            (nic < 0 || e->params.local_nic == nic) && !atomic_load(&e->is_shut)) {
            *last = e;
            n++;
        }
    }
    pthread_mutex_unlock(&fake_all_lock);
    return n;
}

/* Each has to refuse twice, and a silent one is waited for: one after the other they would take
 * seconds. Before the first refusal one at a time is enough. */
TEST(all_are_asked_at_once)
{
    struct r2_ep *e = NULL;
    int most = 0;
    uint64_t end;

    lose_all();
    for (int i = 0; i < REMOTE_WAIT_MS && !questions(-1, &e); i++)
        fake_pass_ms(1);
    CHECK(e);
    CHECK_LE(questions(-1, &e), 2);
    fake_fail(e, ECONNREFUSED, true);
    for (end = r2_now_ns() + 1500 * R2_NS_PER_MS; most < NICS - 1 && r2_now_ns() < end;) {
        int n = questions(-1, &e);

        most = n > most ? n : most;
        fake_pass_ms(1);
    }
    CHECK_GE(most, NICS - 2);
    remote_end(&r);
}

/* All refuse: it is gone. */
TEST(all_refuse)
{
    int rc = 0, refused = 0;

    lose_all();
    for (uint64_t end = r2_now_ns() + 6 * R2_NS_PER_S; !rc && r2_now_ns() < end;) {
        struct r2_ep *e = NULL;

        if (questions(-1, &e)) {
            fake_fail(e, ECONNREFUSED, true);
            refused++;
        }
        rc = remote_test(req, 1, NULL);
    }
    CHECK_EQ(rc, -ECONNRESET);
    CHECK_GE(refused, 2 * NICS);
    remote_end(&r);
}

/* S: a process that was never reached. Its host refuses once at each NIC and is silent then: a
 * firewall, say, whose rules come late. Attempts that nobody answers are no refusals. */
TEST(refused_once_then_silent)
{
    bool refused[NICS] = {false};
    struct r2_conn *conn = NULL;
    struct r2_ctx *ctx;
    int many = 0;

    remote_new(&r, true, NICS);
    CHECK_EQ(r2_engine_init(&ctx, 2, NULL), 0);
    for (uint64_t end = r2_now_ns() + 4 * R2_NS_PER_S; r2_now_ns() < end;) {
        for (int i = 0; i < NICS; i++) {
            struct r2_ep *e;

            if (refused[i] || !questions(i, &e))
                continue;
            fake_fail(e, ECONNREFUSED, true);
            refused[i] = true;
            many++;
        }
        CHECK_EQ(r2_engine_connect(ctx, 0, r.handle, &conn), 0);
        CHECK(!conn);
        fake_pass_ms(2);
    }
    CHECK_EQ(many, NICS);
    CHECK_EQ(r2_engine_finalize(ctx), 0);
    remote_end(&r);
}

int main(int argc, char **argv)
{
    remote_engine(NICS, remote_outlives);
    return check_main(argc, argv);
}
