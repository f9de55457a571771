/* Memory that a peer was cleared to write is taken back, over queue pairs of the stand-in (rung 3;
 * verbs_bed.h says what it cannot prove). */
#include <pthread.h>

#include "verbs_bed.h"

#define SIZE (256 * 1024)

static uint8_t out[SIZE], in[SIZE], other[SIZE];
static struct bed bed;
static struct r2_conn *tx2, *rx2;

/* The newest generation of any path of the peer. */
static uint32_t newest(struct r2_peer *p)
{
    uint32_t gen = 0;

    r2_peer_lock(p);
    for (int i = 0; i < p->n_paths; i++)
        gen = p->paths[i]->gen > gen ? p->paths[i]->gen : gen;
    r2_peer_unlock(p);
    return gen;
}

static void message(struct r2_conn *s, struct r2_conn *d, struct r2_mr *smr, struct r2_mr *dmr)
{
    struct r2_req *a = NULL, *b = NULL;

    CHECK_EQ(r2_engine_irecv(d, other, SIZE, 0, dmr, &b), 0);
    CHECK_EQ(r2_engine_isend(s, out, SIZE, 0, smr, &a), 0);
    CHECK_EQ(bed_test(b, BED_WAIT_MS), 1);
    CHECK_EQ(bed_test(a, BED_WAIT_MS), 1);
    CHECK_MEM(other, out, SIZE);
    memset(other, 0, SIZE);
}

static void second_connection(void)
{
    char handle[R2_HANDLE_BYTES];
    struct r2_listen *l = NULL;

    tx2 = rx2 = NULL;
    CHECK_EQ(r2_engine_listen(bed.ctx, 1, handle, &l), 0);
    WHILE_MS (BED_WAIT_MS, !(tx2 && rx2)) {
        if (!tx2)
            CHECK_EQ(r2_engine_connect(bed.ctx, 1, handle, &tx2), 0);
        if (!rx2)
            CHECK_EQ(r2_engine_accept(l, &rx2), 0);
    }
    CHECK(tx2 && rx2);
    CHECK_EQ(r2_engine_close_listen(l), 0);
}

/* Receives that nobody fills, closed and deregistered: the sender gives its word, and neither the
 * paths nor another connection's keys for the same memory notice it. */
TEST(word_is_enough)
{
    struct r2_mr *in_mr, *same_mr, *smr, *omr;
    struct r2_req *req = NULL;
    uint32_t gen, before[R2_WIRE_MAX_NICS], after[R2_WIRE_MAX_NICS];

    r2_revoke_wait_ns = 10 * R2_NS_PER_S;
    bed_open(&bed, 2);
    second_connection();
    for (size_t i = 0; i < SIZE; i++)
        out[i] = (uint8_t)(i * 7 + i / 251);
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    CHECK_EQ(r2_engine_reg(rx2, in, SIZE, 1, &same_mr), 0);
    CHECK_EQ(r2_engine_reg(rx2, other, SIZE, 1, &omr), 0);
    CHECK_EQ(r2_engine_reg(tx2, out, SIZE, 1, &smr), 0);
    message(tx2, rx2, smr, omr);
    gen = newest(bed.rx->peer);
    CHECK_EQ(r2_eng.ops->remote_keys(same_mr->keys, before), 2);
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, in_mr, &req), 0);
    bed_until_cleared(bed.tx);
    CHECK_EQ(r2_engine_dereg(bed.rx, in_mr), 0);
    CHECK_EQ(bed_test(req, 0), -ECANCELED);
    message(tx2, rx2, smr, omr);
    CHECK_EQ(newest(bed.rx->peer), gen);
    CHECK_EQ(r2_eng.ops->remote_keys(same_mr->keys, after), 2);
    CHECK_MEM(before, after, 2 * sizeof(before[0]));
    CHECK_EQ(r2_engine_close(bed.rx), 0);
    bed.rx = NULL;
    message(tx2, rx2, smr, omr);
    CHECK_EQ(newest(rx2->peer), gen);
    CHECK_EQ(r2_engine_close(tx2), 0);
    CHECK_EQ(r2_engine_close(rx2), 0);
    bed_close(&bed);
}

static atomic_int dereg_rc;

static void *dereg_main(void *arg)
{
    atomic_store(&dereg_rc, r2_engine_dereg(bed.rx, arg));
    return NULL;
}

/* A write is on its way into the memory and cannot be called off, so there is no word. deregMr
 * comes back when the queue pair has been drained. The keys of the range are others then, although
 * it is still registered. What comes later finds nothing. No NIC is blamed. */
TEST(no_word_fence_and_keys)
{
    uint32_t before[R2_WIRE_MAX_NICS], after[R2_WIRE_MAX_NICS];
    struct r2_req *a = NULL, *b = NULL;
    struct r2_mr *in_mr, *same_mr, *out_mr;
    struct r2_path *path;
    pthread_t thread;

    r2_revoke_wait_ns = 200 * R2_NS_PER_MS;
    bed_open(&bed, 2);
    second_connection();
    CHECK_EQ(r2_engine_reg(bed.rx, in, SIZE, 1, &in_mr), 0);
    CHECK_EQ(r2_engine_reg(rx2, in, SIZE, 1, &same_mr), 0);
    CHECK_EQ(r2_engine_reg(bed.tx, out, SIZE, 1, &out_mr), 0);
    CHECK_EQ(r2_eng.ops->remote_keys(same_mr->keys, before), 2);
    bed_script("late 32768");
    CHECK_EQ(r2_engine_irecv(bed.rx, in, SIZE, 0, in_mr, &b), 0);
    CHECK_EQ(r2_engine_isend(bed.tx, out, SIZE, 0, out_mr, &a), 0);
    bed_until_script(1);
    atomic_store(&dereg_rc, 1);
    CHECK_EQ(pthread_create(&thread, NULL, dereg_main, in_mr), 0);
    bed_ms(500);                       /* longer than the sender's word is waited for */
    if (atomic_load(&dereg_rc) != 1) { /* a broken one: NCCL has freed the memory */
        memset(in, 0x5a, SIZE);
        bed_script("release");
        bed_ms(50);
        for (size_t i = 0; i < SIZE; i++)
            CHECK_MSG(in[i] == 0x5a, "written at %zu after deregMr had returned", i);
    }
    CHECK_EQ(atomic_load(&dereg_rc), 1);
    bed_script("release");
    pthread_join(thread, NULL);
    CHECK_EQ(atomic_load(&dereg_rc), 0);
    CHECK_EQ(r2_eng.ops->remote_keys(same_mr->keys, after), 2);
    CHECK_NE(before[0], after[0]);
    CHECK_NE(before[1], after[1]);
    memset(in, 0x5a, SIZE);
    bed_until_paths(tx2, 2); /* made anew at once */
    for (size_t i = 0; i < SIZE; i++)
        CHECK_EQ(in[i], 0x5a);
    r2_peer_lock(tx2->peer);
    for (int i = 0; i < tx2->peer->n_paths; i++) {
        path = tx2->peer->paths[i];
        CHECK(path->damp.penalty < 1);
    }
    r2_peer_unlock(tx2->peer);
    for (int i = 0; i < r2_local.n; i++)
        CHECK_EQ(r2_nic_word(i), R2_NIC_USABLE);
    CHECK_EQ(r2_engine_close(tx2), 0);
    CHECK_EQ(r2_engine_close(rx2), 0);
    bed_close(&bed);
}

/* Registrations of `in` that the device has. */
static int held(const char *dev)
{
    char text[64];

    snprintf(text, sizeof(text), "held %s %p", dev, (void *)in);
    return bed_script(text);
}

static struct r2_mr_keys *reg(void *data)
{
    struct r2_memory m = {.data = data, .size = SIZE, .dmabuf_fd = -1};
    struct r2_mr_keys *keys = NULL;

    CHECK_EQ(r2_eng.ops->reg(&m, &keys), 0);
    CHECK(keys);
    return keys;
}

/* Only `in` is refused: paths come and go as they like. */
static void begin_refusing(void)
{
    char text[64];

    bed_open(&bed, 2);
    snprintf(text, sizeof(text), "only %p", (void *)in);
    bed_script(text);
}

/* As long as a device keeps a key, nobody hears that memory of that range is deregistered, whoever
 * registered it; of other memory nothing is held against it. */
TEST(refused_for_long)
{
    struct r2_mr_keys *one, *two;

    begin_refusing();
    one = reg(in);
    two = reg(in);
    bed_script("!refuse fv0 dereg 1");
    CHECK_EQ(r2_eng.ops->dereg(one, true), -ETIMEDOUT);
    bed_script("!refuse fv0 dereg 2");
    CHECK_EQ(r2_eng.ops->dereg(two, true), -ETIMEDOUT);
    CHECK_EQ(held("fv0"), 2);
    CHECK_EQ(r2_eng.ops->dereg(reg(other), false), 0);
    CHECK_EQ(held("fv0"), 2);
    one = reg(in);
    CHECK_EQ(held("fv0"), 3);
    bed_script("!refuse fv0 dereg 1");
    CHECK_EQ(r2_eng.ops->dereg(one, false), 0); /* its own is gone, theirs was asked for */
    CHECK_EQ(held("fv0"), 1);
    CHECK_EQ(r2_eng.ops->dereg(reg(in), false), 0);
    CHECK_EQ(held("fv0"), 0);
    CHECK_EQ(held("fv1"), 0);
    bed_close(&bed);
}

#define OWNERS 4

static struct r2_mr_keys *range;
static atomic_int ready;

static void *lets_go(void *arg)
{
    (void)arg;
    atomic_fetch_add(&ready, 1);
    while (atomic_load(&ready) < OWNERS)
        sched_yield();
    CHECK_EQ(r2_eng.ops->dereg(range, true), 0);
    return NULL;
}

/* All of them at once: none uses what the last one frees (ASan), and nothing is left. */
TEST(owners_at_once)
{
    pthread_t threads[OWNERS];

    bed_open(&bed, 2);
    for (int turn = 0; turn < 50; turn++) {
        atomic_store(&ready, 0);
        for (int i = 0; i < OWNERS; i++)
            range = reg(in);
        for (int i = 0; i < OWNERS; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, lets_go, NULL), 0);
        for (int i = 0; i < OWNERS; i++)
            pthread_join(threads[i], NULL);
        CHECK_EQ(held("fv0"), 0);
        CHECK_EQ(held("fv1"), 0);
    }
    bed_close(&bed);
}

static void *takes_back(void *arg)
{
    CHECK_EQ(r2_eng.ops->dereg(arg, true), 0);
    atomic_fetch_add(&ready, 1);
    return NULL;
}

/* While the keys of a range are changed for one owner, and devices take their time, the other one
 * has keys at any moment: a clear-to-send without one would go nowhere. */
TEST(never_without_keys)
{
    uint32_t before[R2_WIRE_MAX_NICS], now[R2_WIRE_MAX_NICS];
    struct r2_mr_keys *one, *two;
    pthread_t thread;
    int turns = 0;

    bed_open(&bed, 2);
    one = reg(in);
    two = reg(in);
    CHECK_EQ(r2_eng.ops->remote_keys(two, before), 2);
    atomic_store(&ready, 0);
    bed_script("!chaos cmd_us=50000");
    CHECK_EQ(pthread_create(&thread, NULL, takes_back, one), 0);
    for (; !atomic_load(&ready); turns++) {
        CHECK_EQ(r2_eng.ops->remote_keys(two, now), 2);
        CHECK(now[0] && now[1]);
    }
    CHECK_GT(turns, 10);
    bed_script("!chaos cmd_us=0");
    pthread_join(thread, NULL);
    CHECK_EQ(r2_eng.ops->remote_keys(two, now), 2);
    CHECK(now[0] != before[0] && now[1] != before[1]);
    CHECK_EQ(held("fv0"), 1);
    CHECK_EQ(r2_eng.ops->dereg(two, false), 0);
    CHECK_EQ(held("fv0") + held("fv1"), 0);
    bed_close(&bed);
}
