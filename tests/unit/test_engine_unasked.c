/* Messages that come before their receive over bulk lanes (engine/unasked), over a scripted
 * transport (rung 2): the test is the sender, then the receiver. What it cannot prove: that sockets
 * do as the script does (tests/py/test_unasked.py). */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include "recv_bed.h"

static void hear_whole(struct r2_ep *ep, uint64_t cumulative)
{
    struct r2_msg_ack ack;

    do
        CHECK_GE(remote_hear(ep, R2_F_ACK, &ack, sizeof(ack)), 0);
    while (ack.cumulative != cumulative);
}

static void message(struct r2_ep *ep, uint64_t seq)
{
    for (uint64_t off = 0; off < MSG; off += CHUNK)
        chunk(ep, seq, off);
}

static void receive(struct r2_ep *ep, struct r2_req *req, uint64_t seq)
{
    size_t size = 0;
    int rc = 0;

    for (int i = 0; i < 300 && rc == 0; i++) {
        fake_pull(ep);
        rc = remote_test(req, 10, &size);
    }
    CHECK_EQ(rc, 1);
    CHECK_EQ(size, MSG);
    CHECK_MEM(sink, source + seq * MSG, MSG);
    memset(sink, 0, sizeof(sink));
}

/* Whole, in part, or not at all before its receive is posted; acknowledged from there. */
static void test_before_its_receive(void)
{
    struct r2_req *req;
    struct r2_bulk c;

    begin(1);
    message(a, 0);
    hear_whole(a, 1);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 1); /* once more: to be forgotten */
    req = irecv(sink, MSG);
    receive(a, req, 0);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 1);
    chunk(a, 1, 0);
    chunk(a, 1, 2 * CHUNK);
    CHECK_EQ(claim_chunk(a, 1, CHUNK, &c), 0);
    req = irecv(sink, 2 * MSG);
    CHECK_EQ(remote_test(req, 20, NULL), 0);
    CHECK(remote_place(a, &c, source + MSG));
    CHECK_EQ(sink[0], 0); /* nothing of it before all of it has come */
    CHECK_EQ(remote_test(req, 20, NULL), 0);
    chunk(a, 1, 3 * CHUNK);
    receive(a, req, 1);
    req = irecv(sink, MSG);
    message(a, 2);
    receive(a, req, 2);
    remote_end(&r);
}

static void test_credit(void)
{
    struct r2_bulk c;

    begin(1);
    c = remote_chunk(&r, 0, 0, CHUNK, 129 * KB);
    CHECK_EQ(fake_claim(a, &c), -EPROTO); /* larger than was said */
    c = remote_chunk(&r, R2_UNASKED_AHEAD, 0, CHUNK, MSG);
    CHECK_EQ(fake_claim(a, &c), -EPROTO);
    for (uint64_t s = 0; s < R2_UNASKED_AHEAD; s++) {
        c = remote_chunk(&r, s, 0, CHUNK, MSG);
        CHECK_EQ(fake_claim(a, &c), 0);
        CHECK(fake_dropped(a, &c, false));
    }
    c = remote_chunk(&r, 0, 0, CHUNK, 2 * MSG);
    CHECK_EQ(fake_claim(a, &c), -EPROTO); /* another size than it said before */
    irecv(sink, MSG);
    c = remote_chunk(&r, R2_UNASKED_AHEAD, 0, CHUNK, MSG); /* the receive has made room */
    CHECK_EQ(fake_claim(a, &c), 0);
    CHECK(fake_dropped(a, &c, false));
    remote_end(&r);
}

/* A path fails in the middle: only what is missing comes again, over another one. */
static void test_path_lost(void)
{
    struct r2_msg_path m;
    struct r2_req *req;
    struct r2_bulk c;

    begin(2);
    chunk(a, 0, 0);
    CHECK_EQ(claim_chunk(a, 0, CHUNK, &c), 0);
    memset(c.data, 0xee, CHUNK / 2); /* half written */
    fake_fail(a, ECONNRESET, false);
    fake_dropped(a, &c, false);
    CHECK_GE(remote_hear(b, R2_F_FENCED, &m, sizeof(m)), 0);
    CHECK_EQ(claim_chunk(b, 0, 0, &c), 1); /* it is there */
    req = irecv(sink, MSG);
    for (uint64_t off = CHUNK; off < MSG; off += CHUNK)
        chunk(b, 0, off);
    receive(b, req, 0);
    remote_end(&r);
}

static void test_too_large(void)
{
    struct r2_req *req;

    begin(1);
    message(a, 0);
    req = irecv(sink, CHUNK);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), -EMSGSIZE);
    CHECK_EQ(sink[0], 0);
    remote_end(&r);
}

/* Keeps the I/O thread that copies for the connection busy until it is let go. */
static struct r2_task hog;
static atomic_bool hogs, let_go;

static void hog_run(struct r2_task *t)
{
    (void)t;
    atomic_store(&hogs, true);
    for (int i = 0; i < 3000 && !atomic_load(&let_go); i++)
        fake_sleep_ms(1);
    atomic_store(&hogs, false);
}

static void hold_copies(void)
{
    atomic_store(&let_go, false);
    r2_task_init(&hog, r.conn->unasked.copy.io, hog_run);
    CHECK(r2_task_kick(&hog));
    CHECK(remote_wait_flag(&hogs));
}

static void let_copies(void)
{
    atomic_store(&let_go, true);
    for (int i = 0; i < 3000 && atomic_load(&hogs); i++)
        fake_sleep_ms(1);
}

/* What has come whole can be received after its sender went, also by a receive that waits for its
 * copy just then; one that waits for more fails. */
static void test_outlives_its_sender(void)
{
    struct r2_req *req[3];

    for (int posted = 0; posted < 2; posted++) {
        begin(1);
        message(a, 0);
        message(a, 1);
        hear_whole(a, 2);
        if (posted)
            hold_copies();
        for (int i = 0; i < 3 * posted; i++)
            req[i] = irecv(i ? sink + (size_t)i * MSG : sink, MSG);
        r2_peer_lock(r.conn->peer);
        r2_peer_gone(r.conn->peer, -ECONNRESET, "test");
        r2_peer_unlock(r.conn->peer);
        if (posted)
            let_copies();
        else
            req[0] = irecv(sink, MSG);
        CHECK_EQ(remote_test(req[0], REMOTE_WAIT_MS, NULL), 1);
        CHECK_MEM(sink, source, MSG);
        if (!posted)
            req[1] = irecv(sink + MSG, MSG);
        CHECK_EQ(remote_test(req[1], REMOTE_WAIT_MS, NULL), 1);
        CHECK_MEM(sink + MSG, source + MSG, MSG);
        if (posted)
            CHECK_EQ(remote_test(req[2], REMOTE_WAIT_MS, NULL), -ECONNRESET);
        else
            CHECK_EQ(r2_engine_irecv(r.conn, sink, MSG, 0, NULL, &req[2]), -ECONNRESET);
        CHECK_EQ(r2_engine_close(r.conn), 0);
        fake_forget(r.id);
    }
}

/* Nothing is posted, but a lane writes: closing makes it let go before the memory goes. */
static void test_close_while_written(void)
{
    struct r2_bulk c;

    begin(1);
    CHECK_EQ(claim_chunk(a, 0, 0, &c), 0);
    CHECK_EQ(atomic_load(&a->detached), 0);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    CHECK_EQ(atomic_load(&a->detached), 1);
    fake_forget(r.id);
}

/* The sender is gone while one message waits for its copy and a lane writes into the receive of the
 * next one: that lane is made to let go before the memory goes. */
static void test_gone_while_written(void)
{
    struct r2_req *req[2];
    struct r2_mr *mr = NULL;
    struct r2_bulk c;

    begin(1);
    message(a, 0);
    hold_copies();
    CHECK_EQ(r2_engine_reg(r.conn, sink + MSG, MSG, R2_MEMORY_TYPE_HOST, &mr), 0);
    req[0] = irecv(sink, MSG);
    CHECK_EQ(r2_engine_irecv(r.conn, sink + MSG, MSG, 0, mr, &req[1]), 0);
    CHECK_EQ(claim_chunk(a, 1, 0, &c), 0);
    CHECK(c.data == sink + MSG);
    atomic_store(&a->hold_shut, true);
    r2_peer_lock(r.conn->peer);
    r2_peer_gone(r.conn->peer, -ECONNRESET, "test");
    r2_peer_unlock(r.conn->peer);
    CHECK_EQ(remote_test(req[1], 0, NULL), -ECONNRESET);
    CHECK_EQ(atomic_load(&a->detached), 0);
    CHECK_EQ(r2_engine_dereg(r.conn, mr), 0);
    CHECK_GE(atomic_load(&a->detached), 1);
    atomic_store(&a->hold_shut, false);
    let_copies();
    remote_test(req[0], REMOTE_WAIT_MS, NULL);
    CHECK_EQ(r2_engine_close(r.conn), 0);
    fake_forget(r.id);
}

/* A queue pair comes up in the middle of a message that is put beside its receive, and a sender
 * that does not know better writes the rest to the receive: an error, no message of two halves. */
static void test_queue_pair_joins(void)
{
    struct r2_req *req;
    struct r2_ep *q;
    struct r2_bulk c;

    begin(1);
    chunk(a, 0, 0);
    fake_offers = R2_OFFER_ROCE;
    q = fake_accept(r.id, 1, 1, 1000);
    fake_offers = 0;
    CHECK(q);
    CHECK(fake_up(q));
    CHECK(remote_prove(&r, q));
    req = irecv(sink, MSG);
    c = remote_chunk(&r, 0, CHUNK, CHUNK, MSG);
    CHECK_EQ(fake_claim(q, &c), 1);
    CHECK_EQ(remote_test(req, REMOTE_WAIT_MS, NULL), -EPROTO);
    remote_end(&r);
}

/* Its memory goes while a thread may be copying into it: dereg waits for that, and afterwards
 * nothing is written. */
static void test_dereg_while_copied(void)
{
    for (int i = 0; i < 200; i++) {
        uint8_t *to = malloc(MSG);
        struct r2_req *req = NULL;
        struct r2_mr *mr = NULL;

        begin(1);
        message(a, 0);
        CHECK_EQ(r2_engine_reg(r.conn, to, MSG, R2_MEMORY_TYPE_HOST, &mr), 0);
        CHECK_EQ(r2_engine_irecv(r.conn, to, MSG, 0, mr, &req), 0);
        for (int spin = (int)check_below(20000); spin > 0; spin--)
            atomic_load(&hogs);
        CHECK_EQ(r2_engine_dereg(r.conn, mr), 0);
        free(to);
        CHECK(remote_test(req, 0, NULL));
        CHECK_EQ(r2_engine_close(r.conn), 0);
        fake_forget(r.id);
    }
}

/* Where a copy stays in its middle: memory that nobody may write until `go_on`. */
static uint8_t *held_at;
static atomic_bool held, go_on;
static struct sigaction segv_was;

static void on_segv(int sig, siginfo_t *info, void *context)
{
    uint8_t *at = info->si_addr;

    (void)context;
    if (at < held_at || at >= held_at + MSG) { /* any other one is what it always is */
        sigaction(sig, &segv_was, NULL);
        return;
    }
    atomic_store(&held, true);
    for (int i = 0; i < 20000 && !atomic_load(&go_on); i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    mprotect(held_at, MSG, PROT_READ | PROT_WRITE);
}

static struct r2_task unblock;
static atomic_bool unblocked;

/* The engine's threads have all signals blocked. */
static void unblock_run(struct r2_task *t)
{
    sigset_t set;

    (void)t;
    sigemptyset(&set);
    sigaddset(&set, SIGSEGV);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    atomic_store(&unblocked, true);
}

static struct r2_mr *held_mr;
static atomic_bool let_off;

static void *lets_off(void *arg)
{
    if (arg)
        CHECK_EQ(r2_engine_dereg(r.conn, held_mr), 0);
    else
        CHECK_EQ(r2_engine_close(r.conn), 0);
    atomic_store(&let_off, true);
    return NULL;
}

/* The connection is there while its copy is. */
static bool is_open(void)
{
    bool yes;

    r2_peer_lock(r.conn->peer);
    yes = r.conn->state == R2_CONN_OPEN;
    pthread_mutex_unlock(&r.conn->peer->lock);
    return yes;
}

/* The memory is given back in the middle of a copy into it: by dereg or by close, neither of which
 * returns before the copy is over. */
static void given_back_in_a_copy(bool by_dereg)
{
    struct sigaction act = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO};
    struct r2_req *req = NULL;
    pthread_t thread;

    begin(1);
    message(a, 0);
    held_at = mmap(NULL, MSG, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(held_at != MAP_FAILED);
    atomic_store(&held, false);
    atomic_store(&go_on, false);
    atomic_store(&let_off, false);
    atomic_store(&unblocked, false);
    CHECK_EQ(sigaction(SIGSEGV, &act, &segv_was), 0);
    r2_task_init(&unblock, r.conn->unasked.copy.io, unblock_run);
    CHECK(r2_task_kick(&unblock));
    CHECK(remote_wait_flag(&unblocked));
    CHECK_EQ(r2_engine_reg(r.conn, held_at, MSG, R2_MEMORY_TYPE_HOST, &held_mr), 0);
    CHECK_EQ(r2_engine_irecv(r.conn, held_at, MSG, 0, held_mr, &req), 0);
    CHECK(req);
    CHECK(remote_wait_flag(&held));
    CHECK_EQ(pthread_create(&thread, NULL, lets_off, by_dereg ? &held_mr : NULL), 0);
    for (int ms = 0; ms < REMOTE_WAIT_MS * 5 && is_open(); ms++)
        fake_sleep_ms(1);
    CHECK(!is_open()); /* it is at it: the request has ended */
    for (int ms = 0; ms < 60; ms++) {
        CHECK_MSG(!atomic_load(&let_off), "given back while a thread copies into it");
        fake_sleep_ms(1);
    }
    atomic_store(&go_on, true);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK(atomic_load(&let_off));
    CHECK_MEM(held_at, source, MSG); /* the copy was over, too */
    CHECK_EQ(sigaction(SIGSEGV, &segv_was, NULL), 0);
    CHECK_EQ(munmap(held_at, MSG), 0);
    if (by_dereg) {
        CHECK_EQ(remote_test(req, 0, NULL), -ECANCELED);
        CHECK_EQ(r2_engine_close(r.conn), 0);
    }
    fake_forget(r.id);
}

static void test_dereg_in_a_copy(void)
{
    given_back_in_a_copy(true);
}

static void test_close_in_a_copy(void)
{
    given_back_in_a_copy(false);
}

/* Many messages, each in random order of chunks, before or after its receive or in the middle of
 * it, while a thread copies. */
static void test_random_order(void)
{
    begin(1);
    for (uint64_t seq = 0; seq < 400; seq++) {
        uint64_t order[MSG / CHUNK], at = check_below(MSG / CHUNK + 1);
        struct r2_req *req = NULL;

        for (uint64_t i = 0; i < MSG / CHUNK; i++) {
            uint64_t j = check_below(i + 1);

            order[i] = order[j];
            order[j] = i;
        }
        for (uint64_t i = 0; i <= MSG / CHUNK; i++) {
            struct r2_bulk c;

            if (i == at)
                req = irecv(sink, MSG);
            if (i == MSG / CHUNK)
                break;
            c = remote_chunk(&r, seq, order[i] * CHUNK, CHUNK, MSG);
            CHECK_EQ(fake_claim(a, &c), 0);
            CHECK(remote_place(a, &c, source + (seq % 4) * MSG));
        }
        receive(a, req, seq % 4);
    }
    remote_end(&r);
}

/* ---- the sender */

static struct r2_req *isend(size_t size)
{
    struct r2_req *req = NULL;

    CHECK_EQ(r2_engine_isend(r.conn, source, size, 0, NULL, &req), 0);
    CHECK(req);
    return req;
}

static void begin_sender(int paths, uint32_t said)
{
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, paths));
    a = fake_find(r.id, 0, 0, 0);
    b = paths > 1 ? fake_find(r.id, 1, 1, 0) : NULL;
    r2_peer_lock(r.conn->peer);
    CHECK_EQ(r.conn->unasked.most, 0); /* its OPEN_ACK said nothing of it */
    r2_unasked_heard(r.conn, said << R2_OPEN_UNASKED_SHIFT);
    r2_peer_unlock(r.conn->peer);
}

/* The next chunks are all of message `seq`, which they make up. */
static void goes(struct r2_ep *ep, uint64_t seq)
{
    uint64_t bytes = 0;
    struct r2_bulk c;

    while (bytes < MSG) {
        CHECK(fake_next(ep, &c));
        CHECK_EQ(c.seq, seq);
        CHECK_EQ(c.total, MSG);
        bytes += c.len;
        CHECK(fake_chunk_sent(ep, &c));
        CHECK_EQ(remote_ack_range(ep, &r, seq, c.offset, c.len), 0);
    }
}

static void test_goes_unasked(void)
{
    struct r2_req *req[R2_UNASKED_AHEAD + 2];
    struct r2_bulk c;

    begin_sender(1, 64);
    for (int i = 0; i < R2_UNASKED_AHEAD + 2; i++)
        req[i] = isend(MSG);
    for (uint64_t s = 0; s < R2_UNASKED_AHEAD; s++) {
        goes(a, s);
        CHECK_EQ(remote_test(req[s], 0, NULL), 1);
    }
    CHECK(!fake_next(a, &c)); /* acknowledged, but no more receives are known */
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    goes(a, R2_UNASKED_AHEAD);
    CHECK(!fake_next(a, &c));
    CHECK_EQ(remote_cts(a, &r, R2_UNASKED_AHEAD, MSG), 0); /* of one that has gone */
    goes(a, R2_UNASKED_AHEAD + 1);
    CHECK_EQ(remote_test(req[R2_UNASKED_AHEAD + 1], 0, NULL), 1);
    CHECK_EQ(r.conn->waiting, 0);
    req[0] = isend(MSG);
    CHECK_EQ(r.conn->waiting, MSG);
    CHECK_EQ(remote_cts(a, &r, R2_UNASKED_AHEAD + 2, MSG), 0); /* counted once */
    CHECK_EQ(r.conn->waiting, MSG);
    goes(a, R2_UNASKED_AHEAD + 2);
    req[0] = isend(MSG + 1); /* larger than was said */
    CHECK(!fake_next(a, &c));
    remote_end(&r);
}

/* The receive is too small: known from the clear-to-send that comes behind. Bytes that a lost path
 * took along go again. */
static void test_lost_and_small(void)
{
    struct r2_req *req;
    struct r2_bulk c;

    begin_sender(2, 256);
    req = isend(MSG);
    CHECK(fake_next(a, &c) || fake_next(b, &c));
    CHECK_EQ(remote_cts(b, &r, 0, MSG - 1), 0);
    CHECK_EQ(remote_test(req, 0, NULL), -EMSGSIZE);
    remote_end(&r);
    begin_sender(2, 256);
    req = isend(MSG);
    CHECK(fake_next(a, &c));
    fake_fail(a, ECONNRESET, false);
    CHECK_GE(remote_hear(b, R2_F_DOWN, NULL, 0), 0);
    fake_chunk_sent(a, &c);
    CHECK_EQ(remote_fenced(b, a), 0);
    goes(b, 0);
    CHECK_EQ(remote_test(req, 0, NULL), 1);
    remote_end(&r);
}

static const struct check_test tests[] = {
    {"before_its_receive", test_before_its_receive},
    {"credit", test_credit},
    {"path_lost", test_path_lost},
    {"too_large", test_too_large},
    {"outlives_its_sender", test_outlives_its_sender},
    {"close_while_written", test_close_while_written},
    {"gone_while_written", test_gone_while_written},
    {"queue_pair_joins", test_queue_pair_joins},
    {"dereg_while_copied", test_dereg_while_copied},
    {"dereg_in_a_copy", test_dereg_in_a_copy},
    {"close_in_a_copy", test_close_in_a_copy},
    {"random_order", test_random_order},
    {"goes_unasked", test_goes_unasked},
    {"lost_and_small", test_lost_and_small},
    {0},
};

int main(int argc, char **argv)
{
    static const char *const env[] = {"R2CCL_UNASKED", "128K", "R2CCL_IO_THREADS", "2", NULL};

    remote_engine(2, env);
    return check_main(argc, argv, tests);
}
