/* Ranks as threads of this process over the no-op NCCL (noop_bed.h), whose plans the test itself
 * proposes. Of test_shim_timing.c. */
#ifndef R2_TESTS_PLAN_BED_H
#define R2_TESTS_PLAN_BED_H

#include <errno.h>
#include <pthread.h>

#include "api/call.h"
#include "await.h"
#include "check.h"
#include "comms/follow_inside.h"
#include "noop_bed.h"
#include "util/clock.h"

#define R2_OWN(name, since, ret, params) ret name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#define R2_P2P(name, since, kind, params, args) int name params;
#include "nccl/nccl.def"

#define RANKS 3
#define BIG ((size_t)(1 << 20) + 3) /* floats: an operation that plans are for */
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

/* Where its operations go. While a stream is being captured (tests/shim/fakecuda.c) they are not
 * timed. */
static _Thread_local void *stream;
#define CAPTURED ((void *)0xca)

static int reduce(r2_nccl_comm comm, size_t count)
{
    return ncclAllReduce(NULL, NULL, count, FLOAT, 0, comm, stream);
}

/* NCCL's own choice once more: this NCCL has no plugin behind it that could carry anything out. */
static void propose(struct rank *me)
{
    struct r2_plan plan;
    int rc = -EAGAIN;

    r2_plan_stock(&plan, RANKS);
    WHILE_MS (20000, rc == -EAGAIN || rc == -EBUSY) {
        CHECK_EQ(reduce(me->comm, BIG), 0);
        rc = r2_agree_propose(me->follow->agree, &plan, r2_plan_bytes(RANKS));
    }
    CHECK_EQ(rc, 0);
}

/* Operations until another plan is in force on all ranks, at most 20 s. Its epoch is any higher
 * one: a proposal that comes too late for a rank is made again by itself, under the next. */
static void reach(struct rank *me)
{
    WHILE_MS (20000, me->follow->epoch == me->epoch)
        CHECK_EQ(reduce(me->comm, BIG), 0);
    CHECK_GT(me->follow->epoch, me->epoch);
    me->epoch = me->follow->epoch;
    pthread_barrier_wait(&together);
}

/* All ranks: rank 0 proposes, and it comes into force. */
static void agree(struct rank *me)
{
    if (me->rank == 0)
        propose(me);
    reach(me);
}

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static void *run_rank(void *arg)
{
    struct rank *me = arg;
    char name[16];

    stream = me->rank ? CAPTURED : NULL; /* the driver is asked about rank 0 alone */
    pthread_mutex_lock(&one_at_a_time);  /* each is on a node of its own */
    snprintf(name, sizeof(name), "node%d", me->rank);
    setenv("NCCL_HOSTID", name, 1);
    CHECK_EQ(ncclCommInitRank(&me->comm, RANKS, me->id, me->rank), 0);
    pthread_mutex_unlock(&one_at_a_time);
    me->entry = r2_comms_hold(me->comm);
    CHECK(me->entry && me->entry->follow);
    me->follow = me->entry->follow;
    WHILE_MS (20000, !atomic_load(&me->follow->ready)) /* they meet */
        CHECK_EQ(reduce(me->comm, BIG), 0);
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
