/* Control sockets that take next to nothing at a time: what they do not take goes when there is
 * room, and what is left to their thread is sent by it, though nobody else looks. Real sockets on
 * loopback (rung 3). */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include "tcp_bed.h"
#include "transport/tcp/tcp.h"
#include "util/clock.h"

#define MOST 12
#define LEN (32u << 10)
#define STUCK_NS (8 * R2_NS_PER_S)

static uint8_t out[MOST][LEN], in[MOST][LEN];
static _Atomic(uint64_t) full; /* times that a socket took nothing */

/* In place of libc's: the socket has room again before the caller hears that it had none, as it may
 * for a thread that loses its core here. */
ssize_t send(int fd, const void *data, size_t len, int flags)
{
    ssize_t n = sendto(fd, data, len, flags, NULL, 0);
    struct pollfd room = {.fd = fd, .events = POLLOUT};

    if (n < 0 && errno == EAGAIN) {
        atomic_fetch_add(&full, 1);
        poll(&room, 1, 1);
        errno = EAGAIN;
    }
    return n;
}

static struct r2_lane *control(const struct r2_conn *c)
{
    struct r2_lane *lane = r2_ep_lane(c->peer->paths[0]->ep, 0);

    CHECK(lane != NULL);
    return lane;
}

static void small(const struct r2_conn *c)
{
    int one = 1; /* the kernel makes it its least */

    CHECK_EQ(setsockopt(control(c)->io.fd, SOL_SOCKET, SO_SNDBUF, &one, sizeof(one)), 0);
}

static void look(struct r2_req **r, int *left)
{
    int done = 0;

    if (!*r)
        return;
    CHECK_EQ(r2_engine_test(*r, &done, NULL), 0);
    *left += !done;
    *r = done ? NULL : *r;
}

/* Some small messages at once, some larger than what the socket takes. */
static void burst(void)
{
    struct r2_req *sending[MOST] = {0}, *receiving[MOST] = {0};
    int n = 1 + (int)(check_random() % MOST), left = 1;
    uint32_t len = 8 + (uint32_t)(check_random() % (check_random() % 3 ? 64 : LEN - 8));
    uint64_t from = r2_now_ns();

    for (int i = 0; i < n; i++) {
        memcpy(out[i], &(uint64_t){check_random()}, 8);
        for (int k = 0; !receiving[i] && k < 1000; k++)
            CHECK_EQ(r2_engine_irecv(rx, in[i], LEN, 0, NULL, &receiving[i]), 0);
        for (int k = 0; !sending[i] && k < 1000; k++)
            CHECK_EQ(r2_engine_isend(tx, out[i], len, 0, NULL, &sending[i]), 0);
        CHECK(sending[i] && receiving[i]);
    }
    while (left) {
        left = 0;
        for (int i = 0; i < n; i++) {
            look(&sending[i], &left);
            look(&receiving[i], &left);
        }
        CHECK_LT(r2_now_ns() - from, STUCK_NS);
    }
    for (int i = 0; i < n; i++)
        CHECK_MEM(in[i], out[i], 8);
}

static void bursts(void *unused)
{
    uint64_t until = r2_now_ns() + 2 * R2_NS_PER_S;

    (void)unused;
    bed_listen();
    bed_connect();
    burst();
    small(tx);
    small(rx);
    while (r2_now_ns() < until)
        burst();
    CHECK_LT(0, atomic_load(&full));
    end();
}

/* Whoever left a frame has taken the word that there is one, and lost its core. While a message
 * waits the peer's tick has it sent. */
static void left_behind(void *unused)
{
    struct r2_req *s = NULL, *receiving = NULL;
    struct r2_path *path;
    bool left = true;

    (void)unused;
    bed_listen();
    bed_connect();
    CHECK_EQ(r2_engine_isend(tx, out[0], LEN, 0, NULL, &s), 0);
    path = tx->peer->paths[0];
    WHILE_MS (3000, left) { /* what comes with the beginning has been said */
        r2_peer_lock(tx->peer);
        left = path->outbox.len > path->outbox.off;
        pthread_mutex_unlock(&tx->peer->lock);
    }
    CHECK(!left);
    r2_peer_lock(tx->peer);
    r2_out_info(path);
    CHECK_LT(path->outbox.off, path->outbox.len);
    path->outbox.due = 0;
    left = true;
    pthread_mutex_unlock(&tx->peer->lock);
    WHILE_MS (3000, left) {
        r2_peer_lock(tx->peer);
        left = path->outbox.len > path->outbox.off;
        pthread_mutex_unlock(&tx->peer->lock);
    }
    CHECK(!left);
    for (int i = 0; i < 1000 && !receiving; i++)
        CHECK_EQ(r2_engine_irecv(rx, in[0], LEN, 0, NULL, &receiving), 0);
    CHECK(bed_done(&s, &receiving, 20000));
    end();
}

struct how {
    bool help; /* whoever polls looks at control sockets */
    void (*what)(void *unused);
};

static void as_said(void *arg)
{
    const struct how *how = arg;

    ((struct r2_settings *)(uintptr_t)r2_settings_get())->help_progress = how->help;
    how->what(NULL);
}

static void with(const char *threads, bool help, void (*what)(void *unused))
{
    struct how how = {help, what};

    setenv("R2CCL_IO_THREADS", threads, 1);
    bed_alone(as_said, &how);
}

TEST(one_thread)
{
    with("1", true, bursts);
}

TEST(several_threads)
{
    with("2", false, bursts);
}

TEST(left_behind)
{
    with("1", true, left_behind);
    with("2", false, left_behind);
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1", 1);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_EAGER", "32K", 1);
    setenv("R2CCL_BUFFERED", "0", 1);
    setenv("R2CCL_HEARTBEAT", "20s", 1); /* no other frames that take these along */
    return check_main(argc, argv);
}
