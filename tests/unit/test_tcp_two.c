/* What a process says to one that it has given up, over real sockets on loopback (rung 3): two
 * processes, so that each has a secret of its own. With one process at both ends, which
 * test_tcp_gone.c has, a tag under the wrong one of the two would do. What it cannot prove: two
 * hosts. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "tcp_bed.h"

static struct shared {
    char handle[R2_HANDLE_BYTES];
    atomic_int listening, waiting, over;
} * sh;

static uint8_t data[64 * 1024];

#define AWAIT(cond)                                                                                \
    do {                                                                                           \
        uint64_t begun = r2_now_ns();                                                              \
        while (!(cond)) {                                                                          \
            CHECK_MSG(r2_now_ns() - begun < 40 * R2_NS_PER_S, "waited in vain for %s", #cond);     \
            usleep(500);                                                                           \
        }                                                                                          \
    } while (0)

static struct r2_conn *receiver_meets(void)
{
    bed_listen();
    memcpy(sh->handle, listen_handle, sizeof(sh->handle));
    atomic_store(&sh->listening, 1);
    AWAIT(r2_engine_accept(listen_here, &rx) == 0 && rx);
    return rx;
}

static struct r2_conn *sender_meets(void)
{
    AWAIT(atomic_load(&sh->listening));
    memcpy(listen_handle, sh->handle, sizeof(listen_handle));
    CHECK_EQ(r2_engine_init(&ctx, 1, NULL), 0);
    AWAIT(r2_engine_connect(ctx, 0, listen_handle, &tx) == 0 && tx);
    return tx;
}

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

static void run_one(bool sender, bool speaker)
{
    struct r2_conn *c;

    alarm(100);
    c = sender ? sender_meets() : receiver_meets();
    if (speaker)
        speaks(c);
    else
        hears(c);
    r2_engine_close(c);
    if (!sender)
        r2_engine_close_listen(listen_here);
    r2_engine_finalize(ctx);
}

/* One gives the other up, which learns it long before R2CCL_NO_PATH_TIMEOUT. */
static void two(bool sender_speaks)
{
    pid_t pids[2];

    sh = mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(sh != MAP_FAILED);
    fflush(stdout);
    for (int i = 0; i < 2; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0) {
            run_one(i == 1, (i == 1) == sender_speaks);
            fflush(stdout);
            _exit(0);
        }
    }
    for (int i = 0; i < 2; i++) {
        int status = 0;

        CHECK(waitpid(pids[i], &status, 0) == pids[i]);
        CHECK_MSG(status == 0, "the %s ended with status 0x%x", i ? "sender" : "receiver", status);
    }
    munmap(sh, sizeof(*sh));
}

static void test_sender_hears(void)
{
    two(false);
}

static void test_receiver_hears(void)
{
    two(true);
}

static const struct check_test tests[] = {
    {"sender_hears", test_sender_hears},
    {"receiver_hears", test_receiver_hears},
    {0},
};

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_NO_PATH_TIMEOUT", "120s", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_LOG", "none", 1);
    return check_main(argc, argv, tests);
}
