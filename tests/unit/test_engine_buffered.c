/* Small messages that are done when they are sent (engine/message/buffered.c), over a scripted
 * transport (rung 2): the engine as their sender. What sockets and processes do is
 * test_buffered.py's. */
#include <stdatomic.h>
#include <sys/wait.h>

#include "send_bed.h"
#include "util/log.h"

#define SIZE 100

static uint8_t data[SIZE];

struct heard {
    struct r2_msg_eager m;
    uint8_t data[SIZE];
} __attribute__((packed));

static struct r2_req *isend(uint8_t with)
{
    struct r2_req *req = NULL;

    memset(data, with, SIZE);
    CHECK_EQ(r2_engine_isend(r.conn, data, SIZE, 0, NULL, &req), 0);
    return req;
}

/* A send that is done, whose buffer is used for something else. */
static void send_done(uint8_t with)
{
    struct r2_req *req = isend(with);

    CHECK(req);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    memset(data, 0xee, SIZE);
}

static void hear(struct r2_ep *ep, uint64_t seq, uint8_t with)
{
    struct heard h;

    CHECK_GE(remote_hear(ep, R2_F_EAGER, &h, sizeof(h)), 0);
    CHECK_EQ(h.m.seq, seq);
    CHECK(h.m.flags & R2_EAGER_BUFFERED);
    for (int i = 0; i < SIZE; i++)
        CHECK_EQ(h.data[i], with);
}

static uint64_t open_connections(void)
{
    return __atomic_load_n(&r2_eng.g->connections_open, __ATOMIC_RELAXED);
}

static void wait_connections(uint64_t n)
{
    FAKE_AWAIT(REMOTE_WAIT_MS, open_connections() == n);
}

static void answer_close(struct r2_ep *ep)
{
    struct r2_msg_close_ack ack = {.conn = r.conn_id, .from_sender = 1};

    CHECK_EQ(fake_ctrl(ep, R2_F_CLOSE_ACK, &ack, sizeof(ack)), 0);
}

static void leave(void)
{
    r2_engine_close_listen(r.listen);
    fake_forget(r.id);
}

TEST(replayed_from_the_copy)
{
    begin(2);
    send_done(1);
    send_done(2);
    hear(a, 0, 1);
    hear(a, 1, 2);
    CHECK_EQ(remote_ack(a, &r, 1), 0);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_fenced(b, a), 0);
    hear(b, 1, 2); /* and only that one */
    CHECK_EQ(remote_hear_ms(b, R2_F_EAGER, NULL, 0, 60), -1);
    CHECK_EQ(remote_ack(b, &r, 2), 0);
    remote_end(&r);
}

/* Of a message without bytes nothing is missing, and it is sent again all the same, at once. */
TEST(an_empty_one_again)
{
    struct r2_req *req = NULL;
    struct heard h;

    begin(2);
    CHECK_EQ(r2_engine_isend(r.conn, data, 0, 0, NULL, &req), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    CHECK_GE(remote_hear(a, R2_F_EAGER, &h, sizeof(h)), 0);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_fenced(b, a), 0);
    CHECK_GE(remote_hear_ms(b, R2_F_EAGER, &h, sizeof(h), 0), 0);
    CHECK_EQ(h.m.seq, 0);
    CHECK_EQ(h.m.size, 0);
    CHECK_EQ(remote_ack(b, &r, 1), 0);
    remote_end(&r);
}

/* What has not left is not done: nobody has it but the application. */
TEST(waits_for_credit_and_path)
{
    struct r2_req *req = NULL;

    begin(1);
    for (int i = 0; i < R2_EAGER_AHEAD; i++)
        send_done((uint8_t)i);
    req = isend(77);
    CHECK_EQ(remote_test(req, 60, NULL), 0);
    for (int i = 0; i < R2_EAGER_AHEAD; i++)
        hear(a, (uint64_t)i, (uint8_t)i);
    CHECK_EQ(remote_cts(a, &r, 0, 8192), 0);
    CHECK_EQ(remote_test(req, 1000, NULL), 1);
    hear(a, R2_EAGER_AHEAD, 77);
    CHECK_EQ(remote_ack(a, &r, R2_EAGER_AHEAD + 1), 0);
    CHECK_EQ(remote_cts(a, &r, R2_EAGER_AHEAD, 8192), 0);
    fake_fail(a, ECONNRESET, false);
    req = isend(78);
    CHECK_EQ(remote_test(req, 60, NULL), 0);
    a = remote_path(&r, 0, a->params.gen);
    CHECK(a);
    CHECK_EQ(remote_test(req, 1000, NULL), 1);
    hear(a, R2_EAGER_AHEAD + 1, 78);
    CHECK_EQ(remote_ack(a, &r, R2_EAGER_AHEAD + 2), 0);
    remote_end(&r);
}

/* A request belongs to its message until the acknowledgement, although the application has it back.
 */
TEST(requests_are_not_taken_from_copies)
{
    begin(2);
    CHECK_EQ(remote_cts(a, &r, R2_MAX_REQUESTS, 8192), 0); /* credit for all */
    for (int i = 0; i < R2_MAX_REQUESTS; i++)
        send_done((uint8_t)i);
    CHECK(!isend(99)); /* as NCCL expects when there is no room */
    CHECK_EQ(remote_ack(a, &r, 1), 0);
    send_done(100);
    CHECK(!isend(101));
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_fenced(b, a), 0);
    for (int i = 1; i < R2_MAX_REQUESTS; i++)
        hear(b, (uint64_t)i, (uint8_t)i);
    hear(b, R2_MAX_REQUESTS, 100);
    CHECK_EQ(remote_ack(b, &r, R2_MAX_REQUESTS + 1), 0);
    CHECK_EQ(remote_cts(b, &r, 2 * R2_MAX_REQUESTS, 8192), 0);
    for (int i = 0; i < R2_MAX_REQUESTS; i++) /* all of them are free again, once each */
        send_done((uint8_t)i);
    CHECK(!isend(99));
    CHECK_EQ(remote_ack(b, &r, 2 * R2_MAX_REQUESTS + 1), 0);
    remote_end(&r);
}

/* Nor if one that is acknowledged has not been asked for yet, so that its own is not free. */
TEST(requests_out_of_turn)
{
    struct r2_req *first;

    begin(2);
    CHECK_EQ(remote_cts(a, &r, R2_MAX_REQUESTS, 8192), 0);
    first = isend(0);
    CHECK(first);
    for (int i = 1; i < R2_MAX_REQUESTS; i++)
        send_done((uint8_t)i);
    CHECK_EQ(remote_ack(a, &r, 1), 0);
    CHECK(!isend(99));
    CHECK_EQ(remote_test(first, 0, NULL), 1);
    send_done(100);
    CHECK_EQ(remote_ack(a, &r, R2_MAX_REQUESTS + 1), 0);
    remote_end(&r);
}

TEST(close_lingers)
{
    struct r2_msg_close m;
    uint64_t before = open_connections();

    begin(2);
    send_done(5);
    hear(a, 0, 5);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    CHECK_EQ(remote_hear_ms(a, R2_F_CLOSE, NULL, 0, 60), -1);
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    CHECK_EQ(remote_fenced(b, a), 0);
    hear(b, 0, 5); /* closed for the application, and still not lost */
    CHECK_EQ(remote_hear_ms(b, R2_F_CLOSE, NULL, 0, 60), -1);
    CHECK_EQ(open_connections(), before + 1);
    CHECK_EQ(remote_ack(b, &r, 1), 0);
    CHECK_GE(remote_hear(b, R2_F_CLOSE, &m, sizeof(m)), 0);
    CHECK_EQ(m.cumulative, 1);
    answer_close(b);
    wait_connections(before);
    leave();
}

/* Whoever goes first takes what it has with it, or has not: the connection ends either way. */
static void lingers_until(bool closes, uint64_t has)
{
    uint64_t before = open_connections();

    begin(1);
    send_done(6);
    hear(a, 0, 6);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    if (closes) {
        CHECK_EQ(remote_close(a, &r, has), 0);
        CHECK_GE(remote_hear(a, R2_F_CLOSE_ACK, NULL, 0), 0);
        CHECK_GE(remote_hear(a, R2_F_CLOSE, NULL, 0), 0);
        answer_close(a);
    } else {
        fake_policy(r.id, -ECONNREFUSED);
        fake_fail(a, ECONNRESET, false);
    }
    wait_connections(before);
    leave();
}

TEST(lingers_no_longer_than_the_receiver)
{
    lingers_until(true, 1);
    lingers_until(true, 0);
    lingers_until(false, 0);
}

static atomic_int given_up;

static void on_log(int level, unsigned long flags, const char *file, int line, const char *fmt, ...)
{
    char text[512];
    va_list args;

    (void)level;
    (void)flags;
    (void)file;
    (void)line;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    if (strstr(text, "is given up; requests that wait for it fail"))
        atomic_fetch_add(&given_up, 1);
}

/* A peer that is gone is told of where somebody waits for it. */
TEST(told_to_who_waits)
{
    uint64_t before = open_connections();

    r2_log_set(on_log);
    lingers_until(false, 0);
    CHECK(r2_log_settle(R2_NS_PER_S));
    CHECK_EQ(atomic_load(&given_up), 0);
    begin(1);
    send_done(6); /* nobody but the copy waits, and the connection is in use */
    fake_policy(r.id, -ECONNREFUSED);
    fake_fail(a, ECONNRESET, false);
    for (int i = 0; i < REMOTE_WAIT_MS && atomic_load(&given_up) == 0; i++)
        fake_pass_ms(1);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    wait_connections(before);
    CHECK(r2_log_settle(R2_NS_PER_S));
    r2_log_set(NULL);
    CHECK_EQ(atomic_load(&given_up), 1);
    leave();
}

/* With larger messages under way it is closed as ever: those are cut off. */
TEST(bulk_does_not_linger)
{
    static uint8_t large[64 * 1024];
    struct r2_req *req = NULL;

    begin(1);
    send_done(7);
    CHECK_EQ(r2_engine_isend(r.conn, large, sizeof(large), 0, NULL, &req), 0);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    CHECK_GE(remote_hear(a, R2_F_CLOSE, NULL, 0), 0);
    answer_close(a);
    leave();
}

/* Memory that was deregistered is not the copies'. */
TEST(dereg_leaves_copies)
{
    struct r2_mr *mr = NULL;
    struct r2_req *req = NULL;

    begin(1);
    CHECK_EQ(r2_engine_reg(r.conn, data, SIZE, R2_MEMORY_TYPE_HOST, &mr), 0);
    CHECK_EQ(r2_engine_isend(r.conn, data, SIZE, 0, mr, &req), 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    CHECK_EQ(r2_engine_dereg(r.conn, mr), 0);
    send_done(8); /* the connection works */
    CHECK_EQ(remote_ack(a, &r, 2), 0);
    remote_end(&r);
}

/* ---- a process that ends */

/* argument: how many of its two words the receiver says; 3: the first, and then its NIC is gone */
#define LEAVES "leaves"

static int leaves(const char *words)
{
    begin(1);
    send_done(9);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    if (words[0] > '0') {
        CHECK_EQ(remote_ack(a, &r, 1), 0);
        CHECK_GE(remote_hear(a, R2_F_CLOSE, NULL, 0), 0);
    }
    if (words[0] == '2')
        answer_close(a);
    else if (words[0] == '3')
        fake_fail(a, ECONNRESET, false);
    return 0; /* and exit */
}

static uint64_t run_ms(const char *arg)
{
    uint64_t at = r2_now_ns();
    pid_t pid = fork();
    int status = 0;

    CHECK_GE(pid, 0);
    if (pid == 0) {
        execl("/proc/self/exe", "test_engine_buffered", LEAVES, arg, (char *)NULL);
        _exit(127);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return (r2_now_ns() - at) / R2_NS_PER_MS;
}

/* A process that has nothing to wait for, on a busy machine. */
static void soon(const char *arg)
{
    for (int i = 0;; i++) {
        if (run_ms(arg) < 1900)
            break;
        CHECK_LT(i, 5);
    }
}

/* R2CCL_NO_PATH_TIMEOUT is 2 s here, and nobody answers the engine's calls. */
TEST(exit_waits)
{
    CHECK_SKIP_EMULATED("it cannot start itself anew");
    CHECK_GE(run_ms("0"), 1900);
    CHECK_GE(run_ms("1"), 1900);
    soon("2");
    soon("3"); /* no path: the end is said to nobody, as a connection that did not linger ends */
}

int main(int argc, char **argv)
{
    bool child = argc == 3 && strcmp(argv[1], LEAVES) == 0;

    remote_engine(2, child ? "R2CCL_NO_PATH_TIMEOUT=2s R2CCL_IO_THREADS=2"
                           : "R2CCL_RAMP=0 R2CCL_IO_THREADS=2");
    return child ? leaves(argv[2]) : check_main(argc, argv);
}
