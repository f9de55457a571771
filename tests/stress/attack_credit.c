/* The receiver gives credit for small messages once for every few of them. One such frame is lost
 * with all paths: the credit must be said again, or the sender stops at the 17th message.
 *
 *   R2CCL_NICS=127.0.1.1,127.0.2.1 attack_credit     exit 0: all messages arrived
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/engine.h"
#include "engine/fault.h"
#include "util/clock.h"

static int fd, side;
static struct r2_ctx *ctx;

static void die(const char *what, int rc)
{
    fprintf(stderr, "attack_exit[%d]: %s: %s\n", side, what, strerror(rc < 0 ? -rc : rc));
    _exit(1);
}

static void xfer(void *buf, size_t len, bool out)
{
    ssize_t n = out ? send(fd, buf, len, MSG_NOSIGNAL) : recv(fd, buf, len, MSG_WAITALL);

    if (n != (ssize_t)len)
        die("xfer", errno);
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
    for (int i = 0; !c; i++) {
        rc = send ? r2_engine_connect(ctx, 0, handle, &c) : r2_engine_accept(l, &c);
        if (rc || i > 50000)
            die("connect", rc ? rc : ETIMEDOUT);
        usleep(100);
    }
    r2_engine_close_listen(l);
    return c;
}

static void sync2(void)
{
    char go = 1;

    xfer(&go, 1, true);
    xfer(&go, 1, false);
}

static bool wait_done(struct r2_req *r, int seconds)
{
    int done = 0;

    for (int i = 0; !done && i < seconds * 20000; i++) {
        int rc = r2_engine_test(r, &done, NULL);

        if (rc)
            die("test", rc);
        usleep(50);
    }
    return done;
}

static int credit(void)
{
    char buf[2048];
    struct r2_conn *c = make(side == 0);

    for (int m = 0; m < 40; m++) {
        struct r2_req *r = NULL;
        struct r2_fault f = {.tx = true, .kind = R2_FAULT_BLACKHOLE};
        int ndev;

        r2_engine_devices(&ndev);
        sync2();
        if (side == 1 && m == 8) /* the credit of message 8 gets stuck, then lost */
            for (int i = 0; i < ndev; i++)
                r2_fault_set(i, &f);
        if (side == 1)
            r2_engine_irecv(c, buf, sizeof(buf), 0, NULL, &r);
        sync2();
        if (side == 0)
            r2_engine_isend(c, buf, sizeof(buf), 0, NULL, &r);
        if (side == 1 && m == 8) {
            usleep(50000);
            f.kind = R2_FAULT_ERROR;
            f.rx = true;
            for (int i = 0; i < ndev; i++)
                r2_fault_set(i, &f);
            usleep(100000);
            for (int i = 0; i < ndev; i++)
                r2_fault_clear(i);
        }
        if (!wait_done(r, 8)) {
            fprintf(stderr, "side %d: message %d hangs\n", side, m);
            _exit(3);
        }
    }
    printf("side %d ok\n", side);
    return 0;
}

int main(int argc, char **argv)
{
    int sv[2];
    char text[16];

    (void)argc;
    if (getenv("ATTACK_FD")) {
        fd = atoi(getenv("ATTACK_FD"));
        side = 1;
    } else {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv) < 0)
            die("socketpair", errno);
        if (fork() == 0) {
            snprintf(text, sizeof(text), "%d", sv[1]);
            setenv("ATTACK_FD", text, 1);
            close(sv[0]);
            execv("/proc/self/exe", argv);
            _exit(127);
        }
        close(sv[1]);
        fd = sv[0];
    }
    if (r2_engine_init(&ctx, 1, NULL))
        die("init", EIO);
    return credit();
}
