/* Two processes over one engine each: this program, and itself once more as its child (side 1),
 * with a socket pair between them for handles and turns. One thread; what fails ends the process.
 */
#ifndef R2_TESTS_STRESS_ATTACK_H
#define R2_TESTS_STRESS_ATTACK_H

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../pause.h"
#include "engine/loop/loop.h"
#include "util/clock.h"

static int fd, side;
static struct r2_ctx *ctx;

static void die(const char *what, int rc)
{
    fprintf(stderr, "%s[%d]: %s: %s\n", program_invocation_short_name, side, what,
            strerror(rc < 0 ? -rc : rc));
    _exit(1);
}

static void xfer(void *buf, size_t len, bool out)
{
    ssize_t n = out ? send(fd, buf, len, MSG_NOSIGNAL) : recv(fd, buf, len, MSG_WAITALL);

    if (n != (ssize_t)len)
        die("xfer", errno);
}

/* Until no path is up, for so long. */
__attribute__((unused)) static void until_pathless(int ms)
{
    (void)WITHIN_MS(ms, !__atomic_load_n(&r2_eng.g->paths_up, __ATOMIC_RELAXED));
}

static struct r2_conn *make(bool send)
{
    char handle[R2_HANDLE_BYTES];
    struct r2_listen *l = NULL;
    struct r2_conn *c = NULL;
    int rc = 0;

    if (send) {
        xfer(handle, sizeof(handle), false);
    } else {
        rc = r2_engine_listen(ctx, 0, handle, &l);
        if (rc)
            die("listen", rc);
        xfer(handle, sizeof(handle), true);
    }
    if (!WITHIN_MS(10000,
                   (rc = send ? r2_engine_connect(ctx, 0, handle, &c) : r2_engine_accept(l, &c)) ||
                       c) ||
        rc)
        die("connect", rc ? rc : ETIMEDOUT);
    r2_engine_close_listen(l);
    return c;
}

static bool done_within(int ms, struct r2_req *r)
{
    int done = 0, rc = 0;

    (void)WITHIN_MS(ms, (rc = r2_engine_test(r, &done, NULL)) || done);
    if (rc)
        die("test", rc);
    return done;
}

/* Starts side 1, which finds its end of the socket pair in ATTACK_FD. */
static pid_t attack_child(char **argv)
{
    int sv[2];
    char text[16];
    pid_t pid;

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv) < 0)
        die("socketpair", errno);
    pid = fork();
    if (pid == 0) {
        snprintf(text, sizeof(text), "%d", sv[1]);
        setenv("ATTACK_FD", text, 1);
        close(sv[0]);
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    if (pid < 0)
        die("fork", errno);
    close(sv[1]);
    fd = sv[0];
    return pid;
}

/* Whether this is side 1; the engine is started on both. */
static bool attack_begin(void)
{
    int rc;

    if (getenv("ATTACK_FD")) {
        fd = atoi(getenv("ATTACK_FD"));
        side = 1;
    }
    rc = r2_engine_init(&ctx, 1, NULL);
    if (rc)
        die("init", rc);
    return side;
}

#endif
