/* A process closes its connections; the peer dies before it acknowledges CLOSE. The survivor's
 * peers are forgotten: nothing of them may be touched afterwards (run it under ASan or TSan).
 *
 *   R2CCL_NICS=127.0.1.1,127.0.2.1 R2CCL_IO_THREADS=4 attack_exit [rounds]
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

static void move(struct r2_conn *c, bool send)
{
    static char buf[1 << 20];
    struct r2_req *r = NULL;
    int done = 0, rc = send ? r2_engine_isend(c, buf, sizeof(buf), 0, NULL, &r)
                            : r2_engine_irecv(c, buf, sizeof(buf), 0, NULL, &r);

    if (rc)
        die("post", rc);
    for (int i = 0; !done; i++) {
        rc = r2_engine_test(r, &done, NULL);
        if (rc || i > 100000)
            die("test", rc ? rc : ETIMEDOUT);
        usleep(50);
    }
}

static void child(void)
{
    char go;
    struct r2_conn *a = make(false), *b = make(true);

    move(a, false);
    move(b, true);
    xfer(&go, 1, true);
    for (;;)
        pause();
}

static void one_round(char **argv)
{
    int sv[2];
    pid_t pid;
    char text[16], go;
    struct r2_conn *a, *b;

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
    close(sv[1]);
    fd = sv[0];
    a = make(true);
    b = make(false);
    move(a, true);
    move(b, false);
    xfer(&go, 1, false);
    if (!getenv("ATTACK_NOSTOP")) {
        kill(pid, SIGSTOP);
        usleep(20000);
        r2_engine_close(a);
        r2_engine_close(b);
        usleep(20000);
        kill(pid, SIGKILL);
    } else {
        r2_engine_close(a);
        kill(pid, SIGKILL);
        r2_engine_close(b);
    }
    waitpid(pid, NULL, 0);
    close(fd);
    usleep(getenv("ATTACK_WAIT") ? (useconds_t)atoi(getenv("ATTACK_WAIT")) : 400000);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 5, rc;

    if (getenv("ATTACK_FD")) {
        fd = atoi(getenv("ATTACK_FD"));
        side = 1;
    }
    rc = r2_engine_init(&ctx, 1, NULL);
    if (rc)
        die("init", rc);
    if (side)
        child();
    for (int i = 0; i < rounds; i++)
        one_round(argv);
    r2_engine_finalize(ctx);
    printf("ok\n");
    return 0;
}
