/* Ends of real sockets on loopback (rung 3). A path fails while it is being accepted, a forked
 * child still holds a socket, and payload was damaged on its way (R2CCL_VERIFY). The damage is done
 * to what recvmsg returns: TCP's own checksum keeps it off a loopback wire. */
#define _GNU_SOURCE
#include <netinet/in.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "tcp_bed.h"
#include "transport/tcp/tcp.h"

#define MSG (1024u * 1024)

static uint8_t out[MSG], in[MSG];

/* Chunks whose payload is to be damaged, and how many were. */
static atomic_int damage, damaged;

/* Bulk lanes alone call it (rx.c). */
ssize_t recvmsg(int fd, struct msghdr *msg, int flags)
{
    ssize_t n = syscall(SYS_recvmsg, fd, msg, flags);
    uint8_t *payload = msg->msg_iov[0].iov_base;

    if (n > 4096 && msg->msg_iov[0].iov_len > 4096 && atomic_load(&damage) > 0 &&
        atomic_fetch_sub(&damage, 1) > 0) {
        payload[2000] ^= 1;
        atomic_fetch_add(&damaged, 1);
    }
    return n;
}

static struct r2_transport_events hooked;
static const struct r2_transport_events *real;
static atomic_int nudged;

/* As a nudge of another thread that comes before the engine's answer does. */
static void *accepted(struct r2_ep *ep, const struct r2_ep_params *params)
{
    void *owner = real->accepted(ep, params);

    if (owner && atomic_fetch_sub(&nudged, 1) > 0)
        r2_ep_fail(ep, ENETDOWN);
    return owner;
}

static void begin(int nudges)
{
    bed_listen();
    if (!real) {
        real = r2_tcp.ev;
        hooked = *real;
        hooked.accepted = accepted;
        r2_tcp.ev = &hooked;
    }
    atomic_store(&nudged, nudges);
    bed_connect();
}

static void move(void)
{
    struct r2_req *s = NULL, *t = NULL;

    bed_post(out, in, MSG, &s, &t);
    CHECK(bed_done(&s, &t, 20000));
    CHECK_MEM(in, out, MSG);
}

/* The path fails, and is made anew; nobody is called in vain. */
TEST(failed_before_it_has_an_owner)
{
    begin(1);
    CHECK_LE(atomic_load(&nudged), 0);
    move();
    end();
}

/* The peer learns the end although a child has the socket, too; a reset stays one. */
TEST(close_with_a_child)
{
    for (int abort = 0; abort < 2; abort++) {
        struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(0x7f000101)}};
        struct timeval patience = {.tv_sec = 2};
        socklen_t len = sizeof(at);
        int host = socket(AF_INET, SOCK_STREAM, 0), fd, child, peer;
        char byte;

        CHECK_EQ(bind(host, (struct sockaddr *)&at, len), 0);
        CHECK_EQ(getsockname(host, (struct sockaddr *)&at, &len), 0);
        CHECK_EQ(listen(host, 1), 0);
        fd = socket(AF_INET, SOCK_STREAM, 0);
        CHECK_EQ(connect(fd, (struct sockaddr *)&at, len), 0);
        peer = accept(host, NULL, NULL);
        CHECK_GE(peer, 0);
        CHECK_EQ(setsockopt(peer, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)), 0);
        child = dup(fd);
        CHECK_GE(child, 0);
        atomic_fetch_add(&r2_tcp.sockets, 1);
        r2_tcp_close_fd(fd, abort);
        errno = 0;
        CHECK_EQ(recv(peer, &byte, 1, 0), abort ? -1 : 0);
        CHECK_EQ(errno, abort ? ECONNRESET : 0);
        close(child);
        close(peer);
        close(host);
    }
}

/* Damaged chunks are not placed: they are counted, and come again. */
TEST(damaged_chunks)
{
    uint64_t bad;

    begin(0);
    move();
    bad = r2_eng.n->crc_errors;
    for (int i = 1; i <= 3; i++) {
        atomic_store(&damage, 1);
        for (int m = 0; m < 50 && atomic_load(&damaged) < i; m++)
            move();
        CHECK_EQ(atomic_load(&damaged), i);
        CHECK_EQ(r2_eng.n->crc_errors - bad, (uint64_t)i);
    }
    move();
    end();
}

int main(int argc, char **argv)
{
    setenv("NCCL_IB_DISABLE", "1", 1); /* also where a stand-in for libibverbs is set */
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_VERIFY", "1", 1);
    setenv("R2CCL_GREY", "0", 1); /* no copies: each damaged chunk is one that counts */
    setenv("R2CCL_LANES", "1", 1);
    setenv("R2CCL_IO_THREADS", "3", 1);
    return check_main(argc, argv);
}
