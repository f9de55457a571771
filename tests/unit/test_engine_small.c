/* When small messages are all that moves (engine/standin.h), over a scripted transport (rung 2).
 * What follows from it: test_standin, test_pollers. Two I/O threads. */
#include "recv_bed.h"

#include "engine/pause.h"

#define SIZE 100
#define TRIES 200 /* this thread may be off its core for longer than a phase lasts */

static bool limited(void)
{
    return r2_pause_limited(r2_now_ns());
}

static void begin_after_all(bool out)
{
    for (int ms = 0; ms < 1000 && limited(); ms++)
        fake_sleep_ms(1);
    fake_sleep_ms(15); /* so long after a large one */
    CHECK(!limited());
    if (!out) {
        begin(1);
        return;
    }
    remote_new(&r, true, 2);
    CHECK(remote_open(&r, 1));
    a = fake_find(r.id, 0, 0, 0);
}

/* One comes; says whether small ones are all that moves then. */
static bool comes_for(struct r2_req **posted)
{
    struct {
        struct r2_msg_eager m;
        uint8_t data[SIZE];
    } f = {
        .m = {.conn = r.conn_id, .size = SIZE, .gen = a->params.gen, .flags = R2_EAGER_BUFFERED}};
    struct r2_req *req = irecv(sink, SIZE);
    bool is;

    f.m.seq = req->seq;
    CHECK_EQ(fake_ctrl(a, R2_F_EAGER, &f, sizeof(f)), 0);
    is = limited();
    *posted = req;
    return is;
}

static bool comes(void)
{
    struct r2_req *req;
    bool is = comes_for(&req);

    CHECK_EQ(remote_test(req, 1000, NULL), 1);
    return is;
}

static bool comes_in_the_end(void)
{
    bool is = comes();

    for (int i = 0; i < TRIES && !is; i++) {
        fake_sleep_ms(1);
        is = comes();
    }
    return is;
}

/* When the kernel has taken what says so. */
static void done_in_the_end(struct r2_req *req)
{
    int done = 0;

    for (int ms = 0; ms < REMOTE_WAIT_MS && !done; ms++) {
        fake_pull(a);
        done = remote_test(req, 1, NULL);
    }
    CHECK_EQ(done, 1);
}

static void part_comes(const struct r2_req *req, uint64_t off)
{
    struct r2_bulk c = remote_chunk(&r, req->seq, off, CHUNK, MSG);

    CHECK_EQ(fake_claim(a, &c), 0);
    CHECK(remote_place(a, &c, source));
}

/* A chunk ends it, and small ones beside it do not bring it back, unless that was long ago. */
static void test_chunks_come(void)
{
    int beside = 0, at_all = 0;
    struct r2_req *req, *small[4];

    begin_after_all(false);
    CHECK(comes_in_the_end());
    req = irecv(sink, MSG);
    part_comes(req, 0);
    CHECK(!limited());
    for (int i = 1; i < 4; i++) {
        uint64_t at = r2_now_ns();
        bool is;

        part_comes(req, (uint64_t)i * CHUNK);
        is = comes_for(&small[i]);
        at_all += r2_now_ns() < at + 9 * R2_NS_PER_MS;
        beside += is && r2_now_ns() < at + 9 * R2_NS_PER_MS;
    }
    CHECK_EQ(beside, 0);
    CHECK_GE(at_all, 1);
    done_in_the_end(req);
    for (int i = 1; i < 4; i++)
        CHECK_EQ(remote_test(small[i], 1000, NULL), 1);
    CHECK(comes_in_the_end());
    remote_end(&r);
}

/* The sender's chunks, too. Small ones came to another connection meanwhile: as if. */
static void test_chunks_go(void)
{
    struct r2_req *req = NULL;
    struct r2_bulk latest;
    bool was = false;

    begin_after_all(true);
    CHECK_EQ(r2_engine_isend(r.conn, source, MSG, 0, NULL, &req), 0);
    for (int i = 0; i < TRIES && !was; i++) {
        r2_pause_small(r2_now_ns());
        was = limited();
    }
    CHECK(was);
    CHECK_EQ(remote_cts(a, &r, 0, MSG), 0);
    CHECK(fake_next(a, &latest));
    CHECK(!limited());
    CHECK(fake_chunk_sent(a, &latest));
    remote_end(&r);
}

/* Where nobody may stand in, or cannot, threads had better poll. */
static void test_not_for_others(void)
{
    struct r2_settings *set = (struct r2_settings *)(uintptr_t)r2_eng.set;
    struct r2_path *path;

    begin_after_all(false);
    path = a->params.owner;
    set->help_progress = false;
    for (int i = 0; i < 20; i++, fake_sleep_ms(1))
        CHECK(!comes());
    set->help_progress = true;
    r2_peer_lock(path->peer);
    path->transport = R2_VIA_VERBS; /* a queue pair's messages */
    r2_peer_unlock(path->peer);
    for (int i = 0; i < 20; i++, fake_sleep_ms(1))
        CHECK(!comes());
    r2_peer_lock(path->peer);
    path->transport = R2_VIA_TCP;
    r2_peer_unlock(path->peer);
    CHECK(comes_in_the_end());
    remote_end(&r);
}

static const struct check_test tests[] = {
    {"chunks_come", test_chunks_come},
    {"chunks_go", test_chunks_go},
    {"not_for_others", test_not_for_others},
    {0},
};

int main(int argc, char **argv)
{
    static const char *const env[] = {"R2CCL_RAMP", "0", "R2CCL_IO_THREADS", "2", NULL};

    remote_engine(2, env);
    return check_main(argc, argv, tests);
}
