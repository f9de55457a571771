/* What a process says to one that it has given up, over real sockets on loopback (rung 3): both
 * ends are in this process. Who may say it is test_tcp_proof.c's, when it is heeded
 * test_engine_liveness.c's. What it cannot prove: two hosts. */
#define _GNU_SOURCE
#include <errno.h>

#include "tcp_bed.h"

static uint8_t data[64 * 1024];

/* 0: not within `ms`. */
static int await_end(struct r2_req *req, int ms)
{
    int done = 0, rc = 0;

    WHILE_MS (ms, !rc && !done)
        rc = r2_engine_test(req, &done, NULL);
    return rc ? rc : done;
}

static void give_up(struct r2_peer *p)
{
    r2_peer_lock(p);
    r2_peer_gone(p, -ETIMEDOUT, "test");
    r2_peer_unlock(p);
}

/* One end is given up by the other, and learns it long before R2CCL_NO_PATH_TIMEOUT. */
static void given_up(bool sender)
{
    struct r2_req *req = NULL;

    bed_listen();
    bed_connect();
    if (sender)
        CHECK_EQ(r2_engine_isend(tx, data, sizeof(data), 0, NULL, &req), 0);
    else
        CHECK_EQ(r2_engine_irecv(rx, data, sizeof(data), 0, NULL, &req), 0);
    CHECK(req);
    give_up(sender ? rx->peer : tx->peer);
    CHECK_EQ(await_end(req, 20000), -ECONNRESET);
    end();
}

static void test_sender(void)
{
    given_up(true);
}

static void test_receiver(void)
{
    given_up(false);
}

static const struct check_test tests[] = {
    {"sender", test_sender},
    {"receiver", test_receiver},
    {0},
};

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_NO_PATH_TIMEOUT", "60s", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LOG", "none", 1);
    return check_main(argc, argv, tests);
}
