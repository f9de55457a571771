/* Two ends of one process over real sockets on loopback (rung 3): a message that does not fit its
 * receive, and a listener whose process has no descriptors for a while. What it cannot prove: two
 * hosts. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "tcp_bed.h"
#include "transport/tcp/tcp.h"

#define BIG (64u * 1024)
#define SMALL 1024u

static uint8_t out[BIG], in[BIG];

static void begin(void)
{
    bed_listen();
    bed_connect();
}

static struct r2_req *isend(uint32_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(tx, out, size, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

static struct r2_req *irecv(uint32_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_irecv(rx, in, size, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

/* 1: done; 0: not within 3 s; -errno */
static int ended(struct r2_req *req)
{
    int done = 0, rc = 0;

    WHILE_MS (3000, !rc && !done)
        rc = r2_engine_test(req, &done, NULL);
    return rc ? rc : done;
}

/* A receive for a small message needs no clear-to-send, and the sender of a large one waits for it.
 * A later one may have said its own. */
TEST(too_large_for_a_small_receive)
{
    for (int later = 0; later < 2; later++) {
        struct r2_req *s, *r, *more = NULL;

        begin();
        r = irecv(SMALL);
        if (later)
            more = irecv(BIG);
        s = isend(BIG);
        CHECK_EQ(ended(s), -EMSGSIZE);
        CHECK_LT(ended(r), 0);
        if (more)
            CHECK_LT(ended(more), 0);
        end();
    }
}

/* Who connects while no descriptor is left is accepted when there are some again, without a further
 * attempt of anybody's to wake the listener. */
TEST(no_descriptors_for_a_while)
{
    struct sockaddr_storage sa;
    struct rlimit was, none;
    socklen_t len = sizeof(sa);
    int fd, next;

    begin();
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_GE(fd, 0);
    CHECK_EQ(getsockname(r2_tcp.listeners[0].fd, (struct sockaddr *)&sa, &len), 0);
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &was), 0);
    AWAIT(atomic_load(&r2_tcp.pending) == 0); /* lanes still come in */
    next = dup(0);
    CHECK_GE(next, 0);
    close(next);
    none = was;
    none.rlim_cur = (rlim_t)next;
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
    CHECK_EQ(connect(fd, (struct sockaddr *)&sa, len), 0);
    STAYS_MS(250, atomic_load(&r2_tcp.pending) == 0);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &was), 0);
    AWAIT(atomic_load(&r2_tcp.pending) == 1);
    close(fd);
    end();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.0.1", 1);
    setenv("R2CCL_IO_THREADS", "1", 1);
    setenv("R2CCL_SHM", "0", 1);
    return check_main(argc, argv);
}
