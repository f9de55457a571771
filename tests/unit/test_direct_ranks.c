/* The direct AllReduce over the engine: ranks are processes, NICs are loopback addresses (rung 3).
 * Results are compared bit by bit with an addition in rank order. What it cannot prove: speed, and
 * GPUs. */
#define _GNU_SOURCE
#include <pthread.h>

#include "direct_bed.h"
#include "nccl/nccl.h"

#include "io/fault.h"

#define MOST ((uint64_t)3 << 20)

static float *in, *out;

static void buffers(void)
{
    in = malloc((MOST + 1) * sizeof(*in));
    out = malloc((MOST + 1) * sizeof(*out));
    CHECK(in && out);
}

/* ---- sizes, in place and not, weights */

static void one_weights(int rank)
{
    static const uint32_t weights[][4] = {{16384, 16384, 16384, 16384},
                                          {9362, 18725, 18725, 18724},
                                          {0, 21845, 21845, 21846},
                                          {65536, 0, 0, 0},
                                          {0, 0, 1, 65535},
                                          {32768, 0, 32768, 0}};
    struct r2_direct *d = bed_join(rank);

    buffers();
    for (unsigned i = 0; i < sizeof(weights) / sizeof(weights[0]); i++) {
        for (uint64_t n = 0; n <= MOST; n = n * 37 + 1) {
            bed_fill(in, rank, n, 1);
            CHECK_EQ(bed_allreduce(d, in, i % 2 ? in : out, n, weights[i]), 0);
            bed_check(i % 2 ? in : out, n, 1); /* the same bits under all weights */
        }
    }
    bed_together(0);
    r2_direct_free(d);
}

TEST(any_weights_give_the_same_bits)
{
    bed_run(4, -1, one_weights);
}

TEST(a_window_of_one_round)
{
    bed_config = (struct r2_direct_config){.memory = {.slot = 16 << 10, .n_slots = 7}, .credit = 1};
    bed_run(4, -1, one_weights);
    bed_config = (struct r2_direct_config){0};
}

/* ---- failures */

static void one_nic(int rank)
{
    struct r2_fault hole = {.kind = R2_SEG_FAULT_BLACKHOLE, .tx = true, .rx = true};
    struct r2_direct *d = bed_join(rank);

    buffers();
    for (unsigned i = 0; i < 6; i++) {
        bed_fill(in, rank, MOST, i);
        if (rank == 1 && i == 2)
            r2_fault_set(0, &hole);
        CHECK_EQ(bed_allreduce(d, in, out, MOST, NULL), 0);
        bed_check(out, MOST, i);
    }
    bed_together(0);
    r2_direct_free(d);
}

TEST(a_nic_fails)
{
    bed_run(4, -1, one_nic);
}

enum { ROUND = 2, GOES_ON = 3 }; /* steps: of rank 1; it has been stopped and goes on */

/* Operations until one fails; how long that took. */
static int until_error(struct r2_direct *d, int rank, uint64_t *took)
{
    uint64_t begun = r2_now_ns();
    int rc = 0;

    for (unsigned i = 0; rc == 0 && r2_now_ns() - begun < 30 * R2_NS_PER_S; i++) {
        atomic_fetch_add(&sh->step[ROUND], rank == 1);
        bed_fill(in, rank, MOST, i);
        begun = r2_now_ns();
        rc = bed_allreduce(d, in, out, MOST, NULL);
    }
    *took = r2_now_ns() - begun;
    return rc;
}

static void one_killed(int rank)
{
    struct r2_direct *d = bed_join(rank);
    uint64_t took;

    buffers();
    bed_fill(in, rank, MOST, 0);
    CHECK_EQ(bed_allreduce(d, in, out, MOST, NULL), 0);
    if (rank == 2) {
        struct r2_direct_call call = {
            .in = in, .out = out, .count = MOST, .type = FLOAT32, .op = SUM};
        uint64_t number;

        CHECK_EQ(r2_direct_allreduce(d, &call, &number), 0);
        AWAIT(atomic_load(&sh->step[0]) == 3);
        raise(SIGKILL);
    }
    atomic_fetch_add(&sh->step[0], 1); /* they wait for it */
    CHECK_EQ(until_error(d, rank, &took), -ECONNRESET);
    CHECK_LT(took, 8 * R2_NS_PER_S);
    CHECK_EQ(bed_allreduce(d, in, out, 10, NULL), -ECONNRESET);
    r2_direct_free(d);
}

TEST(a_rank_is_killed)
{
    bed_run(4, 2, one_killed);
}

/* A child stops this process in the middle of its operations, for a second; then it goes on, or is
 * killed. */
static void stops_me(int then)
{
    pid_t me = getpid(), child = fork();

    CHECK_GE(child, 0);
    if (child)
        return;
    AWAIT(atomic_load(&sh->step[ROUND]) >= 3);
    kill(me, SIGSTOP);
    pause_us(1000000);
    kill(me, then);
    atomic_store(&sh->step[GOES_ON], 1);
    _exit(0);
}

/* All wait for it in one of the operations. */
static void one_stopped(int rank)
{
    enum { N = 100003 };
    struct r2_direct *d = bed_join(rank);
    uint64_t longest = 0;

    buffers();
    bed_together(0);
    if (rank == 1)
        stops_me(SIGCONT);
    for (unsigned i = 0; i < 20; i++) {
        uint64_t begun = r2_now_ns(), took;

        bed_fill(in, rank, N, i);
        atomic_fetch_add(&sh->step[ROUND], rank == 1);
        if (rank == 1 && i == 10) /* at the latest it is stopped here */
            AWAIT(atomic_load(&sh->step[GOES_ON]));
        CHECK_EQ(bed_allreduce(d, in, out, N, NULL), 0);
        bed_check(out, N, i);
        took = r2_now_ns() - begun;
        longest = took > longest ? took : longest;
    }
    if (rank != 1)
        CHECK_GT(longest, R2_NS_PER_S / 2);
    bed_together(1);
    r2_direct_free(d);
}

static void one_stopped_and_killed(int rank)
{
    struct r2_direct *d = bed_join(rank);
    uint64_t took;

    buffers();
    if (rank == 1)
        stops_me(SIGKILL);
    CHECK_EQ(until_error(d, rank, &took), -ECONNRESET);
    CHECK_LT(took, 10 * R2_NS_PER_S);
    r2_direct_free(d);
}

TEST(a_stopped_rank_is_waited_for)
{
    bed_run(3, -1, one_stopped);
}

TEST(a_stopped_rank_is_killed)
{
    bed_run(3, 1, one_stopped_and_killed);
}

static void *aborts(void *d)
{
    AWAIT(atomic_load(&sh->step[1]) && thread_waits(getpid()));
    r2_direct_abort(d);
    return NULL;
}

/* Rank 1 aborts from another thread while it waits for rank 0, which never comes. */
static void one_aborts(int rank)
{
    struct r2_direct *d = bed_join(rank);
    uint64_t begun = r2_now_ns();
    pthread_t thread;

    buffers();
    if (rank == 1)
        CHECK_EQ(pthread_create(&thread, NULL, aborts, d), 0);
    if (rank != 0) {
        bed_fill(in, rank, MOST, 0);
        atomic_fetch_add(&sh->step[1], rank == 1);
        CHECK_EQ(bed_allreduce(d, in, out, MOST, NULL), rank == 1 ? -ECANCELED : -ECONNRESET);
        atomic_fetch_add(&sh->step[2], 1);
    }
    AWAIT(atomic_load(&sh->step[2]) == 2);
    if (rank == 1)
        pthread_join(thread, NULL);
    r2_direct_free(d);
    CHECK_LT(r2_now_ns() - begun, 10 * R2_NS_PER_S);
    bed_together(0);
}

TEST(an_abort_ends_all)
{
    bed_run(3, -1, one_aborts);
}

static void one_leaves(int rank)
{
    struct r2_direct *d = bed_new(rank);

    if (rank == 0)
        r2_direct_abort(d);
    AWAIT(r2_direct_state(d, NULL) != R2_DIRECT_CONNECTING);
    bed_together(0);
    r2_direct_free(d);
}

TEST(an_abort_while_connecting)
{
    bed_run(3, -1, one_leaves);
}

/* ---- ranks that do not give the same operations */

static uint64_t unequal[2];

static void one_unequal(int rank)
{
    struct r2_direct *d = bed_join(rank);
    int rc;

    buffers();
    bed_fill(in, rank, MOST, 0);
    rc = bed_allreduce(d, in, out, unequal[rank == 1], NULL);
    CHECK(rc == -EMSGSIZE || rc == -ECONNRESET || rc == -EINVAL);
    atomic_fetch_or(&sh->step[1], rc == -EMSGSIZE);
    bed_together(0);
    CHECK_EQ(atomic_load(&sh->step[1]), 1); /* one of them at least knows why */
    r2_direct_free(d);
}

TEST(unequal_counts)
{
    static const uint64_t pairs[][2] = {{1000, 1001},
                                        {1001, 1000},
                                        {4, MOST},
                                        {MOST, MOST - 1},
                                        {65536, 131072} /* pieces of equal size */};

    for (unsigned i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        memcpy(unequal, pairs[i], sizeof(unequal));
        bed_run(2, -1, one_unequal);
        bed_run(3, -1, one_unequal);
    }
}

/* One rank gives another operation, another type of the same size, or the same slice of another
 * count. */
static int other_type, other_op;
static uint64_t other_whole;

static void one_other_kind(int rank)
{
    struct r2_direct *d = bed_join(rank);
    struct r2_direct_call call = {.count = 65536, .type = FLOAT32, .op = SUM};
    uint64_t number;
    int rc;

    buffers();
    bed_fill(in, rank, call.count, 0);
    call.in = call.out = in;
    if (rank == 1) {
        call.type = other_type;
        call.op = other_op;
        call.whole = other_whole;
    }
    CHECK_EQ(r2_direct_allreduce(d, &call, &number), 0);
    rc = r2_direct_wait(d, number);
    CHECK(rc == -EMSGSIZE || rc == -ECONNRESET);
    atomic_fetch_or(&sh->step[1], rc == -EMSGSIZE);
    bed_together(0);
    CHECK_EQ(atomic_load(&sh->step[1]), 1);
    r2_direct_free(d);
}

TEST(other_operation)
{
    other_type = FLOAT32;
    other_op = R2_NCCL_MAX;
    bed_run(3, -1, one_other_kind);
}

TEST(other_type)
{
    other_type = INT32;
    other_op = SUM;
    bed_run(2, -1, one_other_kind);
}

TEST(slice_of_another_count)
{
    other_type = FLOAT32;
    other_op = SUM;
    other_whole = 2 * 65536 + 1;
    bed_run(2, -1, one_other_kind);
}
