/* Everything at once, at random (rung 3; verbs_bed.h says what it cannot prove). Ports, addresses,
 * partitions, queue pairs and devices fail and come back. Commands hang, completions are late or
 * lost, and writes land late. Messages are under way, some of them to memory of a device.
 * Connections are closed and memory is deregistered in the middle of them. Every message arrives
 * right. A receive that is done and memory that was given back stay as they are. Nothing but what
 * was closed ends.
 *
 * R2_STORM_SECONDS=60 for longer than 6 s; -s SEED repeats the order of what is done. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>

#include "util/random.h"
#include "verbs_bed.h"

#define CONNS 3
#define SLOTS 4
#define SIZE (160 * 1024)
#define STUCK_NS (25 * R2_NS_PER_S)
#define GIVEN_BACK 0x5a

struct slot {
    uint8_t *out, *in;
    uint8_t *view; /* where `in` is looked at: memory of a device is not mapped */
    int fd;        /* of memory of a device */
    struct r2_req *flush;
    struct r2_mr *out_mr, *in_mr;
    struct r2_req *send, *recv;
    size_t size; /* 0: nothing is under way */
    uint64_t seq, since;
};

struct line {
    struct r2_conn *tx, *rx;
    struct slot slots[SLOTS];
    uint64_t next_seq;
    bool given_back; /* its memory, which nobody may touch */
    uint64_t until;
};

static struct r2_ctx *ctx;
static struct line lines[CONNS];
static unsigned turn, messages, closed, flushes, driver_calls;

/* By seed: one line receives into memory of a device; the others' receives are in one range, which
 * each of them registers as a whole. */
static bool device, shared;
static uint8_t *pool, *pool_end;
#define POOL ((size_t)SIZE * 256)

__attribute__((visibility("default"))) int cuFlushGPUDirectRDMAWrites(int target, int scope);
int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    (void)target, (void)scope;
    driver_calls++;
    bed_script("show");
    return 0;
}

static bool is_device(const struct line *l)
{
    return device && l == &lines[CONNS - 1];
}

static void new_memory(const struct line *l, struct slot *s)
{
    s->fd = -1;
    if (is_device(l)) {
        s->fd = memfd_create("device", MFD_CLOEXEC);
        CHECK(s->fd >= 0 && ftruncate(s->fd, SIZE) == 0);
        s->view = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, s->fd, 0);
        s->in = mmap(NULL, SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(s->view != MAP_FAILED && s->in != MAP_FAILED);
        return;
    }
    s->in = s->view = pool_end;
    pool_end += SIZE;
    CHECK_LE(pool_end, pool + POOL);
}

static int registered(const struct line *l, struct slot *s)
{
    if (is_device(l))
        return r2_engine_reg_dmabuf(l->rx, s->in, SIZE, 2, 0, s->fd, &s->in_mr);
    return r2_engine_reg(l->rx, shared ? pool : s->in, shared ? POOL : SIZE, 1, &s->in_mr);
}

static void until_connected(struct line *l)
{
    char handle[R2_HANDLE_BYTES];
    struct r2_listen *listen = NULL;
    uint64_t until = r2_now_ns() + STUCK_NS;

    CHECK_EQ(r2_engine_listen(ctx, (int)(check_below(2)), handle, &listen), 0);
    l->tx = l->rx = NULL;
    while (!(l->tx && l->rx)) {
        if (!l->tx)
            CHECK_EQ(r2_engine_connect(ctx, 0, handle, &l->tx), 0);
        if (!l->rx)
            CHECK_EQ(r2_engine_accept(listen, &l->rx), 0);
        CHECK_LT(r2_now_ns(), until);
        bed_ms(1);
    }
    CHECK_EQ(r2_engine_close_listen(listen), 0);
}

/* Memory of a device is refused while no device of ours is there. */
static void register_in(struct line *l, struct slot *s)
{
    uint64_t until = r2_now_ns() + STUCK_NS;
    int rc;

    while ((rc = registered(l, s)) == -EOPNOTSUPP && r2_now_ns() < until)
        bed_ms(5);
    CHECK_EQ(rc, 0);
}

static void open_line(struct line *l)
{
    until_connected(l);
    for (int i = 0; i < SLOTS; i++) {
        struct slot *s = &l->slots[i];

        CHECK_EQ(r2_engine_reg(l->tx, s->out, SIZE, 1, &s->out_mr), 0);
        register_in(l, s);
        memset(s->view, GIVEN_BACK, SIZE);
        s->send = s->recv = s->flush = NULL;
    }
    l->given_back = false;
}

static void untouched(const struct slot *s, const char *since)
{
    for (size_t i = 0; i < SIZE; i++)
        CHECK_MSG(s->view[i] == GIVEN_BACK, "byte %zu was written after %s", i, since);
}

static void post(struct line *l, struct slot *s)
{
    untouched(s, "its receive was done");
    s->size = check_below(4) ? 1 + check_below(SIZE) : 1 + check_below(512);
    turn++;
    for (size_t i = 0; i < s->size; i++)
        s->out[i] = (uint8_t)(i * 7 + i / 251 + turn * 31);
    CHECK_EQ(r2_engine_irecv(l->rx, s->in, SIZE, 0, s->in_mr, &s->recv), 0);
    CHECK_EQ(r2_engine_isend(l->tx, s->out, s->size, 0, s->out_mr, &s->send), 0);
    CHECK(s->recv && s->send);
    s->since = r2_now_ns();
    s->seq = l->next_seq++;
}

/* Not many messages ahead of one that waits for its path. */
static bool may_post(const struct line *l)
{
    for (int i = 0; i < SLOTS; i++) {
        if (l->slots[i].size && l->next_seq - l->slots[i].seq > 2 * SLOTS)
            return false;
    }
    return true;
}

static void look(struct r2_req **req)
{
    int done = 0;

    if (*req)
        CHECK_EQ(r2_engine_test(*req, &done, NULL), 0);
    if (done)
        *req = NULL;
}

static void test_slot(struct line *l, struct slot *s)
{
    bool was = s->recv || s->send, received = s->recv;

    look(&s->recv);
    look(&s->send);
    look(&s->flush);
    if (received && !s->recv && is_device(l)) {
        CHECK_EQ(r2_engine_iflush(l->rx, s->in, s->in_mr, &s->flush), 0);
        flushes++;
        was = true;
    }
    CHECK_MSG(!was || r2_now_ns() - s->since < STUCK_NS, "%s of %zu bytes hangs",
              s->recv ? "a receive" : "a send", s->size);
    if (!s->size || s->recv || s->send || s->flush)
        return;
    CHECK_MEM(s->view, s->out, s->size);
    memset(s->view, GIVEN_BACK, SIZE);
    s->size = 0;
    messages++;
}

/* In the middle of whatever there is. Where a device does not confirm it in time the memory may
 * still be written to, and nobody is told otherwise. */
static void close_line(struct line *l)
{
    bool receiver_first = check_below(2), dereg = check_below(2), confirmed = true;

    for (int i = 0; i < SLOTS; i++) { /* nobody closes with a flush under way */
        if (l->slots[i].flush)
            CHECK_EQ(bed_test(l->slots[i].flush, BED_WAIT_MS), 1);
        l->slots[i].size = 0;
    }
    for (int i = 0; i < SLOTS && dereg; i++)
        confirmed &= r2_engine_dereg(l->rx, l->slots[i].in_mr) == 0;
    if (!receiver_first)
        r2_engine_close(l->tx);
    confirmed &= r2_engine_close(l->rx) == 0;
    for (int i = 0; i < SLOTS; i++)
        memset(l->slots[i].view, GIVEN_BACK, SIZE);
    if (receiver_first)
        r2_engine_close(l->tx);
    l->given_back = confirmed;
    l->tx = l->rx = NULL;
    l->until = r2_now_ns() + check_below(200) * R2_NS_PER_MS;
    closed += confirmed;
}

static void open_again(struct line *l)
{
    for (int i = 0; i < SLOTS && l->given_back; i++)
        untouched(&l->slots[i], "its memory was given back");
    for (int i = 0; i < SLOTS && !l->given_back; i++) /* nobody's from now on */
        new_memory(l, &l->slots[i]);
    open_line(l);
}

/* ---- what fails, and is mended a little later */

static struct {
    const char *name, *begin, *end; /* D: the device's number, P: 0x8000 and something; ; between */
} const failures[] = {
    {"port", "port fvD 1 down", "port fvD 1 up"},
    {"hole", "port fvD 1 blackhole", "port fvD 1 up"},
    {"address", "gid fvD 1 1 0.0.0.0", "gid fvD 1 1 127.0.E.1"},
    {"entry", "gid fvD 1 3 127.0.E.1;gid fvD 1 1 0.0.0.0",
     "gid fvD 1 1 127.0.E.1;gid fvD 1 3 0.0.0.0"},
    {"partition", "pkey fvD 1 0 32771", "pkey fvD 1 0 65535"},
    {"removed", "remove fvD", "restore fvD"},
    {"vanished", "vanish fvD", "restore fvD"},
    {"fatal", "fatal fvD", "remove fvD;restore fvD"},
    {"hanging", "hang fvD 1", "unhang"},
    {"hanging port", "hang fvD 2;event fvD 9 1", "unhang"},
    {"hangs and goes", "hang fvD 2;event fvD 11 1;remove fvD;restore fvD", "unhang"},
    {"later writes", "chaos late_write=800,late_us=60000", "chaos late_write=200,late_us=20000"},
    {"late ends", "chaos late_cqe=300", "chaos late_cqe=0"},
    {"lost ends", "chaos lost_cqe=20000", "chaos lost_cqe=0"},
    {"errors", "chaos error=5000", "chaos error=0"},
    {"slow commands", "chaos cmd_us=20000", "chaos cmd_us=0"},
    {"large ones", "most fvD 4096", "most fvD 0"},
    {"failed queue", "queue fvD 1 Q", ""},
    {"failed request", "inject fvD 12", ""},
};
#define FAILURES (sizeof(failures) / sizeof(failures[0]))

/* Two at a time, never the same twice: their ends do not mend each other's. Of a thread of its own,
 * because who closes may have to wait for a device. */
static struct {
    int what; /* of failures; -1: nothing */
    int dev;
    uint64_t until;
} failing[2];
static atomic_bool calm;

static void tell(const char *text, int dev, struct r2_prng *chance)
{
    char one[96];
    size_t n = 0;

    for (one[n++] = '!'; *text; text++) {
        if (*text == ';') {
            one[n] = '\0';
            bed_script(one);
            n = 1;
        } else if (*text == 'D' || *text == 'E' || *text == 'Q') {
            one[n++] =
                (char)('0' + (*text == 'Q' ? (int)r2_prng_below(chance, 8) : dev + (*text == 'E')));
        } else {
            one[n++] = *text;
        }
    }
    one[n] = '\0';
    if (n > 1)
        bed_script(one);
}

static void mend(int i, struct r2_prng *chance)
{
    if (failing[i].what >= 0)
        tell(failures[failing[i].what].end, failing[i].dev, chance);
    failing[i].what = -1;
}

static void fail(int i, struct r2_prng *chance)
{
    int what = (int)r2_prng_below(chance, FAILURES), other = 1 - i;
    uint64_t most = r2_prng_below(chance, 4) ? 60 : 600;

    if (failing[other].what == what)
        return;
    failing[i].what = what;
    failing[i].dev =
        failing[other].what >= 0 ? 1 - failing[other].dev : (int)r2_prng_below(chance, 2);
    failing[i].until = r2_now_ns() + (5 + r2_prng_below(chance, most)) * R2_NS_PER_MS;
    if (getenv("R2_STORM_TELL"))
        fprintf(stderr, "%s at fv%d\n", failures[what].name, failing[i].dev);
    tell(failures[what].begin, failing[i].dev, chance);
}

static void *weather(void *arg)
{
    struct r2_prng *chance = arg;

    while (!atomic_load(&calm)) {
        for (int i = 0; i < 2; i++) {
            if (failing[i].what >= 0 && r2_now_ns() > failing[i].until)
                mend(i, chance);
            else if (failing[i].what < 0 && r2_prng_below(chance, 20) == 0)
                fail(i, chance);
            r2_nicstate_forgive(i, r2_now_ns());
        }
        bed_ms(2);
    }
    for (int i = 0; i < 2; i++)
        mend(i, chance);
    return NULL;
}

static void step(void)
{
    for (int i = 0; i < CONNS; i++) {
        struct line *l = &lines[i];

        if (!l->tx) {
            if (r2_now_ns() > l->until)
                open_again(l);
            continue;
        }
        for (int k = 0; k < SLOTS; k++) {
            struct slot *s = &l->slots[k];

            test_slot(l, s);
            if (!s->size && may_post(l) && check_below(3) == 0)
                post(l, s);
        }
        if (i && check_below(300) == 0) /* one connection lives through it all */
            close_line(l);
    }
    await_nap();
}

static void settle(void)
{
    bool busy = true;

    while (busy) {
        busy = false;
        for (int i = 0; i < CONNS * SLOTS; i++) {
            struct line *l = &lines[i / SLOTS];
            struct slot *s = &l->slots[i % SLOTS];

            if (!l->tx)
                continue;
            test_slot(l, s);
            busy |= s->size > 0;
        }
        await_nap();
    }
}

TEST(storm)
{
    const char *text = getenv("R2_STORM_SECONDS");
    struct r2_prng chance;
    pthread_t thread;
    char chaos[96];
    uint64_t until;

    r2_prng_seed(&chance, check_random());
    setenv("R2CCL_NICS", bed_nics, 1);
    setenv("R2CCL_CHUNK", "32K", 1);
    setenv("R2CCL_NO_PATH_TIMEOUT", "60s", 1);
    device = check_below(2);
    shared = check_below(2);
    snprintf(chaos, sizeof(chaos), "seed=%llu,late_write=200,late_us=20000,gpu=%d",
             (unsigned long long)check_below(1000) + 1, device);
    setenv("R2_FAKEVERBS_CHAOS", chaos, 1);
    if (device)
        setenv("R2CCL_GPU_MEMORY", "direct", 1);
    pool = pool_end = aligned_alloc(4096, POOL);
    CHECK(pool);
    bed_library();
    CHECK_EQ(r2_engine_init(&ctx, 1, NULL), 0);
    for (int i = 0; i < 2; i++)
        failing[i].what = -1;
    for (int i = 0; i < CONNS; i++) {
        for (int k = 0; k < SLOTS; k++) {
            lines[i].slots[k].out = malloc(SIZE);
            new_memory(&lines[i], &lines[i].slots[k]);
        }
        open_line(&lines[i]);
    }
    CHECK_EQ(pthread_create(&thread, NULL, weather, &chance), 0);
    until = r2_now_ns() + (text ? strtoull(text, NULL, 10) : 6) * R2_NS_PER_S;
    while (r2_now_ns() < until)
        step();
    atomic_store(&calm, true);
    pthread_join(thread, NULL);
    settle();
    fprintf(stderr, "%u messages, %u connections closed, %u flushes, %u by the driver%s\n",
            messages, closed, flushes, driver_calls, shared ? ", one range" : "");
    for (int i = 0; i < CONNS; i++) {
        if (lines[i].tx)
            close_line(&lines[i]);
    }
    r2_engine_finalize(ctx);
}

int main(int argc, char **argv)
{
    setenv("R2CCL_LOG", "0", 0);
    return check_main(argc, argv);
}
