/* A fork in the middle of a connection, over real sockets on loopback (rung 3): the child may do
 * nothing and holds nothing; the parent goes on. What it cannot prove: that no moment of the
 * parent's threads is a bad one to fork in. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tcp_bed.h"

#define BYTES (2u * 1024 * 1024)
#define FDS 4096

static uint8_t out[BYTES], in[BYTES];
static char lasting[FDS][128]; /* what the engine holds for long; "": nothing */

/* What a descriptor is, if it is of a kind that the engine holds for long: sockets of streams, what
 * its threads wait at, and its segments. Its threads open others for a moment. */
static bool holds(int fd, char what[128])
{
    char path[64];
    int type = 0;
    socklen_t len = sizeof(type);

    memset(what, 0, 128);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (readlink(path, what, 127) <= 0)
        return false;
    if (strncmp(what, "socket:", 7) == 0)
        return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) == 0 && type == SOCK_STREAM;
    return strncmp(what, "anon_inode:", 11) == 0 || strstr(what, "/r2ccl-node.") ||
           strcmp(strrchr(what, '/') ? strrchr(what, '/') + 1 : what,
                  r2_control_name(r2_eng.ctl) + (r2_control_name(r2_eng.ctl)[0] == '/')) == 0;
}

/* Notes them, or (`again`) forgets those that are not there any more. How many there are. */
static int note(bool again)
{
    int n = 0;

    for (int fd = 3; fd < FDS; fd++) {
        char what[128];
        bool is = holds(fd, what);

        if (!again && is)
            memcpy(lasting[fd], what, sizeof(what));
        else if (!is || strcmp(what, lasting[fd]) != 0)
            lasting[fd][0] = '\0';
        n += lasting[fd][0] != '\0';
    }
    return n;
}

/* How many of them are open here. */
static int left(void)
{
    int n = 0;

    for (int fd = 3; fd < FDS; fd++) {
        char path[64], what[128] = "";

        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        if (!lasting[fd][0] || readlink(path, what, sizeof(what) - 1) <= 0 ||
            strcmp(what, lasting[fd]) != 0)
            continue;
        n++;
        fprintf(stderr, "  descriptor %d of the parent is open: %s\n", fd, what);
    }
    return n;
}

/* In the child, whose exit code says what is wrong. */
#define WANT(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fprintf(stderr, "in the child, line %d: %s\n", __LINE__, #cond);                       \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

static void may_do_nothing(struct r2_req *under_way)
{
    char handle[R2_HANDLE_BYTES];
    struct r2_listen *l = NULL;
    struct r2_req *req = NULL;
    struct r2_conn *c = NULL;
    struct r2_ctx *more = NULL;
    struct r2_mr *mr = NULL;
    int done = 0;

    alarm(20); /* locks may be held by threads that are not here */
    WANT(r2_engine_isend(tx, out, 64, 0, NULL, &req) == -EPERM && !req);
    WANT(r2_engine_isend(tx, out, BYTES, 0, NULL, &req) == -EPERM && !req);
    WANT(r2_engine_irecv(rx, in, BYTES, 0, NULL, &req) == -EPERM && !req);
    WANT(r2_engine_test(under_way, &done, NULL) == -EPERM && !done);
    WANT(r2_engine_reg(tx, out, BYTES, R2_MEMORY_TYPE_HOST, &mr) == -EPERM && !mr);
    WANT(r2_engine_init(&more, 1, NULL) == -EPERM && !more);
    WANT(r2_engine_listen(ctx, 0, handle, &l) == -EPERM && !l);
    WANT(r2_engine_connect(ctx, 0, listen_handle, &c) == -EPERM && !c);
    WANT(r2_engine_accept(listen_here, &c) == -EPERM && !c);
    WANT(r2_engine_close(tx) == 0);
    WANT(r2_engine_close(rx) == 0);
    WANT(r2_engine_close_listen(listen_here) == 0);
    WANT(r2_engine_finalize(ctx) == 0);
    r2_count(&r2_eng.n->messages_sent, 1000000); /* its segment is nobody's */
}

/* Forks; the child stays until `go[1]` is closed here. */
static pid_t fork_now(struct r2_req *under_way, int go[2], int ready[2])
{
    pid_t pid;
    char byte;

    CHECK_EQ(pipe2(go, O_CLOEXEC), 0);
    CHECK_EQ(pipe2(ready, O_CLOEXEC), 0);
    fflush(NULL);
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        close(go[1]);
        may_do_nothing(under_way);
        WANT(left() == 0);
        alarm(0); /* the parent has its own limit, and its end closes the pipe */
        WANT(write(ready[1], "r", 1) == 1);
        WANT(read(go[0], &byte, 1) == 0);
        _exit(0);
    }
    close(ready[1]);
    close(go[0]);
    /* Whatever is wrong there closes the pipe, too. */
    CHECK_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return pid;
}

static void message(uint32_t len)
{
    struct r2_req *s = NULL, *r = NULL;

    bed_post(out, in, len, &s, &r);
    CHECK(bed_done(&s, &r, 20000));
    CHECK_MEM(in, out, len);
}

static uint64_t sent(void)
{
    return __atomic_load_n(&r2_eng.n->messages_sent, __ATOMIC_RELAXED);
}

/* The object of shared memory that others look at is there, and not called ended. */
static void segment_stays(const char *name)
{
    const struct r2_segment *seg = r2_control_segment(r2_eng.ctl);
    char path[128];
    struct stat st;

    CHECK(name[0]);
    CHECK_STR(r2_control_name(r2_eng.ctl), name);
    snprintf(path, sizeof(path), "/dev/shm/%s", name[0] == '/' ? name + 1 : name);
    CHECK_MSG(stat(path, &st) == 0, "%s: %s", path, strerror(errno));
    CHECK_GT(st.st_size, 0);
    CHECK_EQ(__atomic_load_n(&seg->header.ended_real_ns, __ATOMIC_RELAXED), 0);
}

/* Messages are under way, one forks, and while the child is there, and when it has gone, nothing is
 * different for the parent. */
TEST(in_the_middle)
{
    int go[2], ready[2], status = -1;
    struct r2_req *s, *r;
    char name[128];
    uint64_t was;
    pid_t pid;

    bed_listen();
    bed_connect();
    message(BYTES);
    snprintf(name, sizeof(name), "%s", r2_control_name(r2_eng.ctl));
    segment_stays(name);
    note(false);
    for (int i = 0; i < 50; i++) { /* what is open for a moment only is not meant */
        message(BYTES);
        CHECK_GT(note(true), 8);
    }
    was = sent();
    r = NULL;
    CHECK_EQ(r2_engine_irecv(rx, in, BYTES, 0, NULL, &r), 0);
    CHECK(r);
    pid = fork_now(r, go, ready);
    s = NULL;
    CHECK_EQ(r2_engine_isend(tx, out, BYTES, 0, NULL, &s), 0);
    CHECK(s);
    CHECK(bed_done(&s, &r, 20000));
    CHECK_MEM(in, out, BYTES);
    message(64);
    segment_stays(name);
    close(go[1]);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    message(BYTES);
    segment_stays(name);
    CHECK_EQ(sent(), was + 3);
    r2_peer_lock(tx->peer);
    CHECK_EQ(tx->peer->life, R2_PEER_ALIVE);
    CHECK_GT(tx->peer->n_up, 0);
    r2_peer_unlock(tx->peer);
    end();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "1", 1);
    setenv("R2CCL_LOG", "none", 1);
    return check_main(argc, argv);
}
