/* What a process says to one that it has given up, over real sockets on loopback (rung 3): two
 * processes, so that each has a secret of its own; in one, a tag under the wrong one of the two
 * would do. Who may say it is test_tcp_proof.c's, when it is heeded test_engine_liveness.c's. What
 * it cannot prove: two hosts. */
#define _GNU_SOURCE
#include <errno.h>

#include "two_bed.h"

static uint8_t data[64 * 1024];

static void speaks(struct r2_conn *c)
{
    AWAIT(atomic_load(&sh->waiting));
    r2_peer_lock(c->peer);
    r2_peer_gone(c->peer, -ETIMEDOUT, "test");
    r2_peer_unlock(c->peer);
    AWAIT(atomic_load(&sh->over));
}

static void hears(struct r2_conn *c)
{
    struct r2_req *req = NULL;
    int rc = 0, done = 0;

    if (c == tx)
        CHECK_EQ(r2_engine_isend(tx, data, sizeof(data), 0, NULL, &req), 0);
    else
        CHECK_EQ(r2_engine_irecv(rx, data, sizeof(data), 0, NULL, &req), 0);
    CHECK(req);
    atomic_store(&sh->waiting, 1);
    AWAIT((rc = r2_engine_test(req, &done, NULL)) || done);
    CHECK_EQ(rc, -ECONNRESET);
    atomic_store(&sh->over, 1);
}

static bool sender_speaks; /* before there are two */

/* One gives the other up, which learns it long before R2CCL_NO_PATH_TIMEOUT. */
static void run_one(bool sender)
{
    struct r2_conn *c = two_meet(sender);

    if (sender == sender_speaks)
        speaks(c);
    else
        hears(c);
    two_part(sender);
}

TEST(sender_hears)
{
    sender_speaks = false;
    two_processes(run_one);
}

TEST(receiver_hears)
{
    sender_speaks = true;
    two_processes(run_one);
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_NO_PATH_TIMEOUT", "120s", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LOG", "none", 1);
    return check_main(argc, argv);
}
