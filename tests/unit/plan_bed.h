/* Ranks as threads of this process over the no-op NCCL (noop_bed.h), whose plans the test itself
 * proposes. Of test_shim_exec.c, test_shim_beside.c and test_shim_timing.c. */
#ifndef R2_TESTS_PLAN_BED_H
#define R2_TESTS_PLAN_BED_H

#include <errno.h>
#include <pthread.h>

#include "api/call.h"
#include "check.h"
#include "comms/follow_inside.h"
#include "noop_bed.h"
#include "util/clock.h"

#define R2_OWN(name, since, ret, params) ret name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#define R2_P2P(name, since, kind, params, args) int name params;
#include "api/nccl.def"

#define RANKS 3
#define BIG ((size_t)(1 << 20) + 3) /* floats: an operation that plans are for */
#define SMALL ((size_t)1000)
#define FLOAT 7

struct rank {
    pthread_t thread;
    struct r2_nccl_id id;
    int rank;
    r2_nccl_comm comm;
    struct r2_comm *entry; /* held */
    struct r2_follow *follow;
    uint64_t epoch; /* of the plan that came into force last */
    void (*run)(struct rank *me);
};

static pthread_barrier_t together;

static int reduce(r2_nccl_comm comm, size_t count)
{
    return ncclAllReduce(NULL, NULL, count, FLOAT, 0, comm, NULL);
}

/* A plan of `n` communicators, with an entry of as many parts, or without entries. */
static void propose(struct rank *me, int n, bool run)
{
    static const uint32_t orders[2][RANKS] = {{2, 0, 1}, {1, 2, 0}};
    struct r2_plan_table t = {.nranks = RANKS, .ncomms = n, .nentries = run};
    uint8_t bytes[2048];
    long len;
    int rc;

    for (int i = 0; i < n; i++) {
        t.comms[i] = (struct r2_plan_comm){.key = (uint64_t)i + 11, .ranks = orders[i]};
        t.comms[i].id[0] = (uint8_t)(i + 1);
        t.entries[0].comm[i] = (uint32_t)i;
        t.entries[0].boundary[i] = (uint32_t)i * (R2_PLAN_UNIT / 4);
    }
    t.entries[0].coll = R2_PLAN_ALLREDUCE;
    t.entries[0].schedule = R2_PLAN_TREE;
    t.entries[0].segments = (uint8_t)n;
    t.entries[0].from_bytes = 1 << 20;
    t.entries[0].below_bytes = UINT64_MAX;
    len = r2_plan_table_encode(&t, bytes, sizeof(bytes));
    CHECK(len > 0 && (size_t)len <= sizeof(bytes));
    for (int i = 0; i < 20000; i++) {
        rc = r2_agree_propose(me->follow->agree, bytes, (size_t)len);
        if (rc != -EAGAIN && rc != -EBUSY)
            break;
        CHECK_EQ(reduce(me->comm, BIG), 0);
        usleep(1000);
    }
    CHECK_EQ(rc, 0);
}

/* Operations until another plan is in force on all ranks, at most 20 s. Its epoch is any higher
 * one: a proposal that comes too late for a rank is made again by itself, under the next. */
static void reach(struct rank *me)
{
    for (int i = 0; i < 20000 && me->follow->epoch == me->epoch; i++) {
        CHECK_EQ(reduce(me->comm, BIG), 0);
        usleep(1000);
    }
    CHECK_GT(me->follow->epoch, me->epoch);
    me->epoch = me->follow->epoch;
    pthread_barrier_wait(&together);
}

/* All ranks: rank 0 proposes, and it comes into force. */
static void agree(struct rank *me, int n, bool run)
{
    if (me->rank == 0)
        propose(me, n, run);
    reach(me);
}

/* Until what is to be made is made or has failed: whether it has. */
static bool made(struct rank *me)
{
    bool failed = false;

    for (int i = 0; i < 20000 && !r2_seconds_made(me->follow->seconds, &failed); i++)
        usleep(1000);
    CHECK(r2_seconds_made(me->follow->seconds, &failed) != 0);
    return failed;
}

/* The two steps to a plan of `n` parts. */
static void take_plan(struct rank *me, int n)
{
    agree(me, n, false);
    CHECK(!made(me));
    pthread_barrier_wait(&together);
    agree(me, n, true);
}

/* What was made for it. */
__attribute__((unused)) static r2_nccl_comm second(struct rank *me, uint64_t key)
{
    r2_nccl_comm handle = r2_seconds_get(me->follow->seconds, key);

    CHECK(handle != NULL);
    return handle;
}

static void *run_rank(void *arg)
{
    struct rank *me = arg;

    CHECK_EQ(ncclCommInitRank(&me->comm, RANKS, me->id, me->rank), 0);
    me->entry = r2_comms_hold(me->comm);
    CHECK(me->entry && me->entry->follow);
    me->follow = me->entry->follow;
    pthread_barrier_wait(&together);
    me->run(me);
    r2_comms_drop(me->entry);
    return NULL;
}

static void run_all(void (*run)(struct rank *))
{
    struct rank ranks[RANKS];
    struct r2_nccl_id id;
    int before = r2_comms_count();

    CHECK_EQ(pthread_barrier_init(&together, NULL, RANKS), 0);
    CHECK_EQ(ncclGetUniqueId(&id), 0);
    for (int r = 0; r < RANKS; r++) {
        ranks[r] = (struct rank){.id = id, .rank = r, .run = run};
        CHECK_EQ(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < RANKS; r++)
        CHECK_EQ(pthread_join(ranks[r].thread, NULL), 0);
    CHECK_EQ(r2_comms_count(), before);
    pthread_barrier_destroy(&together);
}

#endif
