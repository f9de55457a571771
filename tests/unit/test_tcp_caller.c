/* What callers do to the engine, over real sockets on loopback (rung 3): the log goes where nobody
 * reads it, threads are cancelled in the middle of a call, a context serves several communicators.
 * What it cannot prove: NCCL's own logger. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdarg.h>
#include <sys/socket.h>

#include "tcp_bed.h"
#include "util/clock.h"

#define SIZE (256u * 1024)

static uint8_t out[SIZE], in[SIZE];

static void moves(void)
{
    struct r2_req *s, *r;

    bed_post(out, in, SIZE, &s, &r);
    CHECK(bed_done(&s, &r, 20000));
    CHECK_EQ(memcmp(out, in, SIZE), 0);
}

/* More messages than 16 bits can number, small ones and such as wait for a clear-to-send; each has
 * its number in it. */
TEST(numbers_beyond_16_bits)
{
    enum { FLIGHT = 8, LARGE = 16 << 10 };
    struct r2_req *s[FLIGHT] = {0}, *t[FLIGHT] = {0};

    bed_listen();
    bed_connect();
    for (uint32_t i = 0; i < (1u << 16) + 100 + FLIGHT; i++) {
        uint32_t k = i % FLIGHT, len = i % 64 == 63 ? LARGE : 8, was;
        uint8_t *from = out + (size_t)k * LARGE, *to = in + (size_t)k * LARGE;
        uint64_t until = r2_now_ns() + 20 * R2_NS_PER_S;

        while (s[k] || t[k])
            CHECK(bed_done(&s[k], &t[k], 0) || r2_now_ns() < until);
        memcpy(&was, to, sizeof(was));
        CHECK(i < FLIGHT || was == i - FLIGHT);
        memcpy(from, &i, sizeof(i));
        while (!t[k])
            CHECK_EQ(r2_engine_irecv(rx, to, LARGE, 0, NULL, &t[k]), 0);
        while (!s[k])
            CHECK_EQ(r2_engine_isend(tx, from, len, 0, NULL, &s[k]), 0);
    }
    for (int k = 0; k < FLIGHT; k++)
        CHECK(bed_done(&s[k], &t[k], 20000));
    end();
}

/* ---- a log that waits */

static pthread_mutex_t reader = PTHREAD_MUTEX_INITIALIZER; /* held: nobody reads */
static atomic_int lines;

static void slow_log(int level, unsigned long flags, const char *file, int line, const char *fmt,
                     ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)fmt;
    pthread_mutex_lock(&reader);
    atomic_fetch_add(&lines, 1);
    pthread_mutex_unlock(&reader);
}

/* Every connection of this process breaks, and both ends have something to say about it. */
static int break_connections(void)
{
    int broken = 0;

    for (int fd = 3; fd < 256; fd++) {
        struct sockaddr_storage sa;
        socklen_t len = sizeof(sa);

        if (getpeername(fd, (struct sockaddr *)&sa, &len) == 0 && sa.ss_family == AF_INET &&
            shutdown(fd, SHUT_RDWR) == 0)
            broken++;
    }
    return broken;
}

TEST(nobody_reads_the_log)
{
    int before;

    bed_listen();
    bed_connect();
    moves();
    r2_log_set(slow_log);
    CHECK(r2_log_settle(5 * R2_NS_PER_S));
    before = atomic_load(&lines);
    pthread_mutex_lock(&reader);
    CHECK_GT(break_connections(), 0);
    for (int i = 0; i < 5; i++)
        moves();
    CHECK(!r2_log_settle(R2_NS_PER_MS)); /* somebody did wait */
    pthread_mutex_unlock(&reader);
    CHECK(r2_log_settle(10 * R2_NS_PER_S));
    CHECK_GT(atomic_load(&lines), before);
    r2_log_set(NULL);
    end();
}

/* ---- cancelled threads */

static struct r2_mr *mr;
static struct r2_listen *second;
static int step;

/* The wish is there before the first call; nothing that is begun may be left half done. */
static void *cancelled(void *arg)
{
    char handle[R2_HANDLE_BYTES];
    struct r2_req *req = NULL;
    int old;

    (void)arg;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old);
    pthread_cancel(pthread_self());
    pthread_setcancelstate(old, NULL);
    CHECK_EQ(r2_engine_listen(ctx, 0, handle, &second), 0);
    for (int i = 0; i < 100000 && !(tx && rx); i++) {
        if (!tx)
            CHECK_EQ(r2_engine_connect(ctx, 0, listen_handle, &tx), 0);
        if (!rx)
            CHECK_EQ(r2_engine_accept(listen_here, &rx), 0);
        sched_yield();
    }
    step++;
    CHECK(tx && rx);
    CHECK_EQ(r2_engine_reg(rx, in, SIZE, R2_MEMORY_TYPE_HOST, &mr), 0);
    CHECK_EQ(r2_engine_irecv(rx, in, SIZE, 0, mr, &req), 0);
    step++;
    CHECK_EQ(r2_engine_dereg(rx, mr), 0); /* fails the receive */
    step++;
    CHECK_EQ(r2_engine_close_listen(second), 0);
    CHECK_EQ(r2_engine_close(tx), 0);
    CHECK_EQ(r2_engine_close(rx), 0);
    step++;
    pthread_testcancel();
    step++;
    return NULL;
}

TEST(cancelled_between_calls_only)
{
    pthread_t t;
    void *how;

    bed_listen();
    tx = rx = NULL;
    CHECK_EQ(pthread_create(&t, NULL, cancelled, NULL), 0);
    CHECK_EQ(pthread_join(t, &how), 0);
    CHECK(how == PTHREAD_CANCELED);
    CHECK_EQ(step, 4);
    bed_connect(); /* no lock was left behind */
    moves();
    end();
}

/* ---- contexts of several communicators */

/* As NCCL 2.28.3 does with ncclCommSplit and splitShare: the parent is finalized, the child goes on
 * with the same context. */
TEST(a_context_outlives_its_finalize)
{
    struct r2_listen *again = NULL;
    struct r2_conn *first_tx, *first_rx;

    bed_listen();
    bed_connect();
    moves();
    CHECK_EQ(r2_engine_finalize(ctx), 0); /* connections are in use: it is shared */
    first_tx = tx;
    first_rx = rx;
    tx = rx = NULL;
    CHECK_EQ(r2_engine_connect(ctx, 0, listen_handle, &tx), 0); /* half made ... */
    CHECK_EQ(r2_engine_finalize(ctx), 0);
    bed_meet(); /* ... and made after it all the same */
    moves();
    r2_engine_close(first_tx);
    r2_engine_close(first_rx);
    r2_engine_close(tx);
    r2_engine_close(rx);
    CHECK_EQ(r2_engine_finalize(ctx), 0); /* nobody's any more: takes the listen along */
    CHECK(r2_list_empty(&ctx->listens));
    CHECK_EQ(r2_engine_listen(ctx, 0, listen_handle, &again), 0);
    listen_here = again;
    bed_connect();
    moves();
    end();
    CHECK_EQ(r2_engine_finalize(ctx), 0);
}

static atomic_bool enough;

static void *finalizes(void *arg)
{
    while (!atomic_load(&enough)) {
        CHECK_EQ(r2_engine_finalize(arg), 0);
        sched_yield();
    }
    return NULL;
}

/* The parent is finalized while the child asks whether its first connection is made: the child
 * finds it gone, or it is not closed before the child has looked. (ASan and TSan tell.) */
TEST(finalized_while_it_connects)
{
    char spare[R2_HANDLE_BYTES];
    struct r2_listen *closed;
    struct r2_conn *made;
    struct r2_ctx *child;
    int gone = 0, rc;
    pthread_t thread;

    bed_listen();
    CHECK_EQ(r2_engine_init(&child, 2, NULL), 0);
    atomic_store(&enough, false);
    CHECK_EQ(pthread_create(&thread, NULL, finalizes, child), 0);
    for (int turn = 0; turn < 500 || !gone; turn++) { /* their other ends stay in the backlog */
        char handle[R2_HANDLE_BYTES];

        memcpy(handle, listen_handle, sizeof(handle));
        for (rc = 0, made = NULL; !rc && !made;)
            rc = r2_engine_connect(child, 0, handle, &made);
        CHECK(!rc || rc == -EINVAL);
        gone += rc != 0;
        if (made)
            CHECK_EQ(r2_engine_close(made), 0);
        CHECK_LT(turn, 5000);
    }
    atomic_store(&enough, true);
    pthread_join(thread, NULL);
    CHECK_EQ(r2_engine_listen(child, 0, spare, &closed), 0);
    CHECK_EQ(r2_engine_finalize(child), 0);
    CHECK_EQ(r2_engine_accept(closed, &made), -EINVAL);
    CHECK_EQ(r2_engine_close_listen(closed), 0);
    CHECK(r2_list_empty(&child->conns));
    CHECK_EQ(r2_engine_close_listen(listen_here), 0);
    CHECK_EQ(r2_engine_finalize(ctx), 0);
}

/* ---- a handle from another plugin, or another build of this one */

static char heard[1024];

__attribute__((format(printf, 5, 6))) static void hear(int level, unsigned long flags,
                                                       const char *file, int line, const char *fmt,
                                                       ...)
{
    va_list args;

    (void)flags, (void)file, (void)line;
    va_start(args, fmt);
    if (level == R2_LOG_WARN)
        vsnprintf(heard, sizeof(heard), fmt, args);
    va_end(args);
}

/* Refused at once, with a word to the user about what to do. */
static void refused(size_t byte, char value, const char *word)
{
    char handle[R2_HANDLE_BYTES];

    memcpy(handle, listen_handle, sizeof(handle));
    handle[byte] = value;
    heard[0] = '\0';
    tx = NULL;
    CHECK_EQ(r2_engine_connect(ctx, 0, handle, &tx), -EINVAL);
    CHECK(!tx);
    CHECK(r2_log_settle(20 * R2_NS_PER_S));
    CHECK(strstr(heard, word));
}

TEST(handles_of_others)
{
    bed_listen();
    CHECK(r2_log_settle(20 * R2_NS_PER_S));
    r2_log_set(hear);
    refused(0, (char)~listen_handle[0], "all ranks need R2CCL");
    refused(4, (char)(listen_handle[4] + 1), "install the same build on all nodes");
    refused(6, 120, "damaged");
    CHECK(r2_log_settle(20 * R2_NS_PER_S));
    r2_log_set(NULL);
    bed_connect();
    end();
}

int main(int argc, char **argv)
{
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("R2CCL_IO_THREADS", "1", 1);
    setenv("R2CCL_SHM", "0", 1);
    return check_main(argc, argv);
}
