/* Times of collectives, from NCCL's profiler events to the rows that operators read. Rung 1: the
 * clock is the test's; events come as NCCL sends them. It cannot prove that NCCL sends them so. */
#include "check.h"
#include "control/control.h"
#include "engine/base/base.h"
#include "nccl_abi/nccl_profiler_abi.h"

enum { COMM = 0xc0, RANKS = 4, RANK = 2 };

extern const struct r2_ncclprofiler_v5 ncclProfiler_v5;
static const struct r2_ncclprofiler_v5 *const prof = &ncclProfiler_v5;

static uint64_t now_ns;

uint64_t r2_now_ns(void)
{
    return now_ns;
}

static struct r2_colltimes *t; /* of the tests of the slots alone */
static struct r2_coll found;
static uint64_t found_ns;
static int found_count;

static void take(void *arg, const struct r2_coll *what, uint64_t ns)
{
    (void)arg;
    found = *what;
    found_ns = ns;
    found_count++;
}

static unsigned reap(uint64_t now)
{
    found_count = 0;
    return r2_coll_reap(t, now, take, NULL);
}

static void fresh(bool on)
{
    free(t);
    t = calloc(1, sizeof(*t));
    CHECK(t);
    atomic_store(&t->on, on);
}

static uint64_t begin(uint64_t now)
{
    return r2_coll_begin(t, &(struct r2_coll){.comm = COMM, .bytes = now}, now);
}

TEST(who_only_receives)
{
    uint64_t h;

    fresh(true);
    h = begin(1000);
    CHECK(r2_coll_op_begin(t, h));
    r2_coll_handed(t, h, 1000);
    r2_coll_moves(t, h, false, 5000);
    r2_coll_moves(t, h, false, 6000);
    r2_coll_op_end(t, h, 12000);
    CHECK_EQ(reap(UINT64_C(1) << 40), 0);
    CHECK_EQ(found_count, 1);
    CHECK_EQ(found_ns, 7000);
}

TEST(without_network)
{
    uint64_t h;

    fresh(true);
    h = begin(1000);
    r2_coll_handed(t, h, 1000);
    CHECK_EQ(reap(1000 + R2_COLL_IDLE_NS), 1);
    CHECK_EQ(reap(1001 + R2_COLL_IDLE_NS), 0);
    CHECK_EQ(found_count, 0);
    CHECK_EQ(atomic_load(&t->dropped), 0);
}

/* Full: at once, and counted. Room comes back. */
TEST(drops)
{
    uint64_t last = 0;

    fresh(true);
    for (int i = 0; i < R2_COLL_SLOTS; i++) {
        uint64_t h = begin(1000);

        CHECK(h);
        CHECK(h != last);
        last = h;
    }
    for (int i = 0; i < 100; i++)
        CHECK_EQ(begin(1000), 0);
    CHECK_EQ(atomic_load(&t->dropped), 100);
    CHECK(r2_coll_op_begin(t, last));
    r2_coll_moves(t, last, true, 2000);
    r2_coll_op_end(t, last, 3000);
    r2_coll_handed(t, last, 3000);
    CHECK_EQ(reap(2 * R2_COLL_SETTLE_NS), R2_COLL_SLOTS - 1);
    for (int i = 0; i < R2_COLL_SLOTS / R2_COLL_TRIES; i++)
        if (begin(3000))
            return;
    CHECK_MSG(false, "a slot that is free again is not found");
}

TEST(stuck)
{
    uint64_t h;

    fresh(true);
    h = begin(1000);
    CHECK(r2_coll_op_begin(t, h));
    r2_coll_handed(t, h, 1000);
    CHECK_EQ(reap(1000 + R2_COLL_STUCK_NS), 1);
    CHECK_EQ(reap(1001 + R2_COLL_STUCK_NS), 0);
    CHECK_EQ(found_count, 0);
    CHECK_EQ(atomic_load(&t->dropped), 1);
}

/* Handles of collectives that ended do nothing to the next one in their slot. */
TEST(old_handles)
{
    uint64_t old, h = 0;

    fresh(true);
    old = begin(1000);
    r2_coll_handed(t, old, 1000);
    CHECK_EQ(reap(1001 + R2_COLL_IDLE_NS), 0);
    for (int i = 0; i < R2_COLL_SLOTS; i++)
        h = begin(2000);
    CHECK(h != old);
    CHECK(!r2_coll_op_begin(t, old));
    CHECK(!r2_coll_wants_first(t, old, true));
    r2_coll_moves(t, old, true, 1);
    r2_coll_op_end(t, old, 1);
    r2_coll_handed(t, old, 1);
    CHECK(!r2_coll_op_begin(t, 0));
    CHECK(!r2_coll_op_begin(t, UINT64_MAX));
    CHECK(r2_coll_wants_first(t, h, true));
    CHECK_EQ(reap(2 * R2_COLL_IDLE_NS), R2_COLL_SLOTS);
}

TEST(classes)
{
    CHECK_EQ(r2_coll_class(0), 1024);
    CHECK_EQ(r2_coll_class(1024), 1024);
    CHECK_EQ(r2_coll_class(1025), 4096);
    CHECK_EQ(r2_coll_class(64 << 20), 64 << 20);
    CHECK_EQ(r2_coll_class((64 << 20) + 1), 256 << 20);
    CHECK(r2_coll_class(UINT64_MAX) > 0);
}

/* ---- NCCL's events */

static int mask;
static void *ctx;
static char word[256];

static void open_engine(void)
{
    struct r2_control_info info = {.host = "h", .rank = -1, .hidden = 1};

    memset(&r2_eng.colls, 0, sizeof(r2_eng.colls));
    CHECK_EQ(r2_control_open(&r2_eng.ctl, &info), 0);
    r2_eng.n = r2_control_counters(r2_eng.ctl);
    now_ns = 1000000;
    mask = 1 << 7; /* somebody else's */
}

static void open_comm(void)
{
    open_engine();
    CHECK_EQ(prof->init(&ctx, COMM, &mask, NULL, 2, RANKS, RANK, NULL), R2_NCCL_SUCCESS);
    CHECK(ctx);
}

static void close_comm(void)
{
    CHECK_EQ(prof->finalize(ctx), R2_NCCL_SUCCESS);
    r2_control_close(r2_eng.ctl);
    r2_eng.ctl = NULL;
}

static void record(bool on)
{
    CHECK_EQ(r2_colls_record(on, word, sizeof(word)), 0);
}

static void *coll(const char *func, size_t count, const char *type)
{
    struct r2_prof_event e = {.type = R2_PROF_COLL, .rank = RANK};
    void *event = &e;

    e.coll.func = func;
    e.coll.count = count;
    e.coll.datatype = type;
    CHECK_EQ(prof->start_event(ctx, &event, &e), R2_NCCL_SUCCESS);
    return event;
}

static void *op(void *parent, bool send, int pid)
{
    struct r2_prof_event e = {.type = R2_PROF_PROXY_OP, .parent = parent, .rank = RANK};
    void *event = &e;

    e.proxy_op.pid = pid;
    e.proxy_op.is_send = send;
    /* A proxy works for ranks of other processes, whose contexts mean nothing here. */
    CHECK_EQ(prof->start_event((void *)1, &event, &e), R2_NCCL_SUCCESS);
    return event;
}

static void *step(void *parent)
{
    struct r2_prof_event e = {.type = R2_PROF_PROXY_STEP, .parent = parent};
    void *event = &e;

    CHECK_EQ(prof->start_event((void *)1, &event, &e), R2_NCCL_SUCCESS);
    return event;
}

static const char *type = "ncclFloat32";

/* One collective: handed over now, the GPU comes to it after `wait`, and it takes `span`. */
static void run(const char *func, size_t count, uint64_t wait, uint64_t span)
{
    void *c = coll(func, count, type), *send, *recv, *message;

    CHECK(c);
    send = op(c, true, getpid());
    recv = op(c, false, getpid());
    CHECK(send && recv);
    CHECK_EQ(prof->stop_event(c), 0);
    message = step(recv);
    CHECK_EQ(prof->record_state(message, 10, NULL), 0); /* posted */
    message = step(send);
    CHECK_EQ(prof->record_state(message, 8, NULL), 0); /* waits for the GPU */
    now_ns += wait;
    CHECK_EQ(prof->record_state(message, R2_PROF_SEND_PEER_WAIT, NULL), 0);
    now_ns += span / 2;
    CHECK_EQ(prof->stop_event(message), 0);
    message = step(recv);
    CHECK_EQ(prof->record_state(message, R2_PROF_RECV_FLUSH_WAIT, NULL), 0);
    CHECK_EQ(prof->stop_event(message), 0);
    CHECK_EQ(prof->stop_event(send), 0);
    now_ns += span - span / 2;
    CHECK_EQ(prof->stop_event(recv), 0);
}

static void tick(void)
{
    now_ns += 2 * (uint64_t)R2_COLL_SETTLE_NS;
    r2_colls_tick(now_ns);
}

static const struct r2_seg_timing *row(int i)
{
    return &r2_control_segment(r2_eng.ctl)->timings[i];
}

static uint32_t recording(void)
{
    return r2_control_segment(r2_eng.ctl)->process.recording;
}

/* Nothing is asked of NCCL before the operator does, and no event is taken. */
TEST(asks_for_nothing)
{
    open_comm();
    CHECK_EQ(mask, 1 << 7);
    CHECK(!coll("AllReduce", 1000, "ncclFloat32"));
    tick();
    CHECK_EQ(recording(), R2_SEG_RECORDING_OFF);
    record(true);
    CHECK_EQ(mask, 1 << 7 | R2_PROF_COLL | R2_PROF_PROXY_OP | R2_PROF_PROXY_STEP);
    tick();
    CHECK_EQ(recording(), R2_SEG_RECORDING_ON);
    record(false);
    CHECK_EQ(mask, 1 << 7);
    CHECK(!coll("AllReduce", 1000, "ncclFloat32")); /* of a graph that was captured before */
    CHECK_EQ(row(0)->used, 0);
    close_comm();
}

/* Known times come out as they went in. */
TEST(histogram)
{
    const struct r2_seg_timing *r;

    open_comm();
    record(true);
    for (int i = 0; i < 3; i++) {
        run("AllReduce", 1 << 20, 7000000, 200000); /* up to 256 us */
        tick();
    }
    run("AllReduce", 1 << 20, 1, 8000); /* 8 us and no more: the first */
    run("AllReduce", 1 << 20, 1, 8001);
    run("AllReduce", 1 << 20, 1, UINT64_C(60000000000)); /* longer than the last bound */
    tick();
    r = row(0);
    CHECK_EQ(r->used, 1);
    CHECK_EQ(r->comm, COMM);
    CHECK_EQ(r->rank, RANK);
    CHECK_EQ(r->ranks, RANKS);
    CHECK_EQ(r->op, R2_SEG_COLL_ALL_REDUCE);
    CHECK_EQ(r->up_to, 4 << 20);
    CHECK_EQ(r->ns, 3 * 200000 + 8000 + 8001 + UINT64_C(60000000000));
    CHECK_EQ(r->longest_ns, UINT64_C(60000000000));
    CHECK_EQ(r->bus_bytes, 6 * (UINT64_C(4) << 20) / 4 * 3 * 2);
    CHECK_EQ(r->count[0], 1);
    CHECK_EQ(r->count[1], 1);
    CHECK_EQ(r->count[5], 3);
    CHECK_EQ(r->count[R2_SEG_SPANS - 1], 1);
    CHECK_EQ(row(1)->used, 0);
    close_comm();
}

/* One row for each kind and class of sizes; sizes as nccl-tests has them. */
TEST(kinds)
{
    static const struct {
        const char *func;
        enum r2_seg_collective op;
        uint64_t bytes, bus;
    } kinds[] = {
        {"AllReduce", R2_SEG_COLL_ALL_REDUCE, 4096, 6144},
        {"AllGather", R2_SEG_COLL_ALL_GATHER, 16384, 12288},
        {"ReduceScatter", R2_SEG_COLL_REDUCE_SCATTER, 16384, 12288},
        {"Broadcast", R2_SEG_COLL_BROADCAST, 4096, 4096},
        {"Reduce", R2_SEG_COLL_REDUCE, 4096, 4096},
    };
    const int n = sizeof(kinds) / sizeof(kinds[0]);

    open_comm();
    record(true);
    for (int i = 0; i < n; i++)
        run(kinds[i].func, 1024, 1, 10000);
    run("AllReduce", 1025, 1, 10000);
    tick();
    CHECK_EQ(row(n)->up_to, 16384);
    for (int i = 0; i < n; i++) {
        CHECK_EQ(row(i)->op, kinds[i].op);
        CHECK_EQ(row(i)->up_to, kinds[i].bytes);
        CHECK_EQ(row(i)->bus_bytes, kinds[i].bus);
    }
    type = "ncclUint8";
    run("AllReduce", 3, 1, 10000); /* fewer bytes than ranks */
    type = "ncclFloat32";
    tick();
    CHECK_EQ(row(n + 1)->bus_bytes, 4);
    CHECK(!coll("SendRecv", 1024, "ncclFloat32"));
    CHECK(!coll(NULL, 1024, "ncclFloat32"));
    CHECK(!coll("AllReduce", 0, "ncclFloat32"));
    CHECK(!coll("AllReduce", 1024, "Unknown"));
    CHECK(coll("AllReduce", 1024, "ncclFloat8e4m3"));
    close_comm();
}

/* Handles of another process, and none at all, lead nowhere. */
TEST(strange_handles)
{
    void *c;

    open_comm();
    record(true);
    c = coll("AllReduce", 1024, "ncclBfloat16");
    CHECK(!op(c, true, getpid() + 1));
    CHECK(!op(NULL, true, getpid()));
    CHECK(!op((void *)(uintptr_t)0x7fff12345678, true, getpid()));
    CHECK(!step(NULL));
    CHECK(!step(c));
    CHECK_EQ(prof->stop_event(NULL), 0);
    CHECK_EQ(prof->record_state(NULL, R2_PROF_SEND_PEER_WAIT, NULL), 0);
    CHECK_EQ(prof->stop_event((void *)(uintptr_t)0x7fff12345678), 0);
    CHECK_EQ(prof->stop_event(c), 0);
    close_comm();
}

TEST(full_table)
{
    open_comm();
    record(true);
    for (uint64_t comm = 0; comm < R2_SEG_MAX_TIMINGS + 3; comm++) {
        void *one = NULL, *first = ctx;

        CHECK_EQ(prof->init(&one, comm, &mask, NULL, 2, RANKS, RANK, NULL), 0);
        ctx = one;
        run("AllReduce", 1024, 1, 10000);
        CHECK_EQ(prof->finalize(one), 0);
        ctx = first;
        tick();
    }
    CHECK_EQ(r2_eng.n->timings_dropped, 3);
    CHECK(mask & R2_PROF_COLL); /* one communicator is left */
    close_comm();
}

/* With the last communicator NCCL's word is gone; the next one finds recording as it was. */
TEST(no_communicator)
{
    open_comm();
    record(true);
    CHECK_EQ(prof->finalize(ctx), 0);
    mask = 0;
    CHECK(r2_colls_record(true, word, sizeof(word)) < 0);
    CHECK_MSG(strstr(word, "a communicator") && strstr(word, "NCCL_PROFILER_PLUGIN"), "%s", word);
    CHECK_EQ(mask, 0);
    tick();
    CHECK_EQ(recording(), R2_SEG_RECORDING_CANNOT);
    CHECK_EQ(prof->init(&ctx, COMM, &mask, NULL, 2, RANKS, RANK, NULL), 0);
    CHECK(mask & R2_PROF_COLL);
    close_comm();
}

/* What was turned on can be turned off, also between two communicators. */
TEST(off_without_communicator)
{
    open_comm();
    record(true);
    CHECK_EQ(prof->finalize(ctx), 0);
    record(false);
    CHECK(r2_colls_record(false, word, sizeof(word)) < 0);
    CHECK_EQ(prof->init(&ctx, COMM, &mask, NULL, 2, RANKS, RANK, NULL), 0);
    CHECK(!(mask & R2_PROF_COLL));
    close_comm();
}

/* Two NCCLs in one process: each has its word. One that has no communicator may be gone. */
TEST(two_nccls)
{
    int other = 0;
    void *second;

    open_comm();
    CHECK_EQ(prof->init(&second, COMM + 1, &other, NULL, 2, RANKS, RANK, NULL), 0);
    record(true);
    CHECK(mask & R2_PROF_COLL);
    CHECK(other & R2_PROF_COLL);
    CHECK_EQ(prof->finalize(second), 0);
    other = -1; /* somebody else's memory */
    record(false);
    CHECK_EQ(other, -1);
    CHECK_EQ(mask, 1 << 7);
    close_comm();
}
