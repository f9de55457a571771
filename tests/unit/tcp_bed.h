/* Two ends in one process over real sockets on loopback (rung 3): tx sends, rx receives. One test
 * thread; every wait is bounded. */
#ifndef R2_TESTS_TCP_BED_H
#define R2_TESTS_TCP_BED_H

#include <sys/wait.h>

#include "await.h"
#include "check.h"
#include "engine/loop/loop.h"

static struct r2_ctx *ctx;
static struct r2_listen *listen_here;
static struct r2_conn *tx, *rx;
static char listen_handle[R2_HANDLE_BYTES];

static void bed_listen(void)
{
    CHECK_EQ(r2_engine_init(&ctx, 1, NULL), 0);
    CHECK_EQ(r2_engine_listen(ctx, 0, listen_handle, &listen_here), 0);
}

/* Goes on until both ends are there. */
static void bed_meet(void)
{
    WHILE_MS (10000, !(tx && rx)) {
        if (!tx)
            CHECK_EQ(r2_engine_connect(ctx, 0, listen_handle, &tx), 0);
        if (!rx)
            CHECK_EQ(r2_engine_accept(listen_here, &rx), 0);
    }
    CHECK(tx && rx);
}

__attribute__((unused)) static void bed_connect(void)
{
    tx = rx = NULL;
    bed_meet();
}

__attribute__((unused)) static void end(void)
{
    r2_engine_close(tx);
    r2_engine_close(rx);
    r2_engine_close_listen(listen_here);
    r2_engine_finalize(ctx);
}

/* In a process of its own, since settings are read once; it must not have threads yet. */
__attribute__((unused)) static void bed_alone(void (*run)(void *), void *arg)
{
    int status = 0;
    pid_t pid = fork();

    CHECK(pid >= 0);
    if (pid == 0) {
        alarm(60);
        run(arg);
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
}

/* Random bytes from `out` to `in`. */
__attribute__((unused)) static void bed_post(uint8_t *out, uint8_t *in, uint32_t len,
                                             struct r2_req **sending, struct r2_req **receiving)
{
    for (uint32_t i = 0; i < len; i += 8)
        memcpy(out + i, &(uint64_t){check_random()}, 8);
    memset(in, 0, len);
    CHECK_EQ(r2_engine_irecv(rx, in, len, 0, NULL, receiving), 0);
    CHECK_EQ(r2_engine_isend(tx, out, len, 0, NULL, sending), 0);
    CHECK(*sending && *receiving);
}

static bool bed_over(struct r2_req **req)
{
    int done = 0;

    if (*req)
        CHECK_EQ(r2_engine_test(*req, &done, NULL), 0);
    *req = done ? NULL : *req;
    return !*req;
}

/* Until both are done, and thus NULL; false after `ms`. */
__attribute__((unused)) static bool bed_done(struct r2_req **sending, struct r2_req **receiving,
                                             int ms)
{
    return WITHIN_MS(ms, (int)bed_over(sending) & (int)bed_over(receiving));
}

#endif
