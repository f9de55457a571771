/* A process closes its connections; the peer dies before it acknowledges CLOSE. The survivor's
 * peers are forgotten: nothing of them may be touched afterwards (run it under ASan or TSan).
 *
 *   R2CCL_NICS=127.0.1.1,127.0.2.1 R2CCL_IO_THREADS=4 attack_exit [rounds]
 */
#define _GNU_SOURCE
#include "attack.h"

static void move(struct r2_conn *c, bool send)
{
    static char buf[1 << 20];
    struct r2_req *r = NULL;
    int rc = send ? r2_engine_isend(c, buf, sizeof(buf), 0, NULL, &r)
                  : r2_engine_irecv(c, buf, sizeof(buf), 0, NULL, &r);

    if (rc)
        die("post", rc);
    if (!done_within(10000, r))
        die("test", ETIMEDOUT);
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
    char go;
    struct r2_conn *a, *b;
    pid_t pid = attack_child(argv);

    a = make(true);
    b = make(false);
    move(a, true);
    move(b, false);
    xfer(&go, 1, false);
    if (!getenv("ATTACK_NOSTOP")) {
        kill(pid, SIGSTOP);
        waitpid(pid, NULL, WUNTRACED);
        r2_engine_close(a);
        r2_engine_close(b);
        pause_us(20000);
        kill(pid, SIGKILL);
    } else {
        r2_engine_close(a);
        kill(pid, SIGKILL);
        r2_engine_close(b);
    }
    waitpid(pid, NULL, 0);
    close(fd);
    until_pathless(400);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 5;

    if (attack_begin())
        child();
    for (int i = 0; i < rounds; i++)
        one_round(argv);
    r2_engine_finalize(ctx);
    printf("ok\n");
    return 0;
}
