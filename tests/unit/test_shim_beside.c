/* What the communicators of plans have from the application's: its configuration, and that it is
 * suspended; over the no-op NCCL, as test_shim_exec.c, which has the rest of what is done to them.
 * Rung 3: real sockets on loopback. */
#define _GNU_SOURCE
#include "await.h"
#include "plan_bed.h"

/* A communicator's configuration is that of what plans make beside it, also where it is given to
 * ncclCommShrink: as much of it as we know, which is the caller's own when it returns. */
static void configured(struct rank *me)
{
    struct {
        struct r2_nccl_config known;
        char newer[64];
    } config = {.known = {.size = sizeof(config),
                          .magic = R2_NCCL_CONFIG_MAGIC,
                          .blocking = 1,
                          .min_ctas = 4711,
                          .net_name = "R2CCL"}};
    r2_nccl_comm whole = me->comm;
    const struct r2_nccl_config *made_with;
    int nobody;

    /* None excluded: NCCL would refuse that, but all ranks of the bed stay. */
    CHECK_EQ(ncclCommShrink(whole, &nobody, 0, &me->comm, &config.known, 0), 0);
    memset(&config, 0xdb, sizeof(config));
    r2_comms_drop(me->entry);
    me->entry = r2_comms_hold(me->comm);
    CHECK(me->entry && me->entry->follow);
    me->follow = me->entry->follow;
    pthread_barrier_wait(&together);
    take_plan(me, 1);
    made_with = &second(me, 11)->config;
    CHECK_EQ(made_with->size, sizeof(*made_with));
    CHECK_EQ(made_with->magic, R2_NCCL_CONFIG_MAGIC);
    CHECK_EQ(made_with->min_ctas, 4711);
    CHECK_STR(made_with->net_name, "R2CCL");
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
    CHECK_EQ(ncclCommDestroy(whole), 0);
}

static void test_configuration(void)
{
    run_all(configured);
}

static int suspended(struct rank *me, uint64_t key)
{
    return atomic_load(&second(me, key)->suspended);
}

/* NCCL meets all ranks: a plan's communicator that one rank has made and another may not have yet
 * is left alone, also when it is made while the application's is suspended. */
static void made_while_suspended(struct rank *me)
{
    if (me->rank == 0) {
        noop.hold_inits(1);
        propose(me, 1, false);
    }
    reach(me);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), 0);
    pthread_barrier_wait(&together);
    noop.hold_inits(0);
    CHECK(!made(me));
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), 0);
    CHECK_EQ(suspended(me, 11), 0);
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

/* What NCCL refuses leaves what is suspended so and the rest not: the application's, once more or
 * at first; one of a plan, which is not resumed then. */
static void refused(struct rank *me)
{
    take_plan(me, 2);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), 0);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), R2_NCCL_USAGE);
    CHECK_EQ(suspended(me, 11), 1);
    CHECK_EQ(suspended(me, 12), 1);
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(ncclCommResume(me->comm), R2_NCCL_USAGE);
    CHECK_EQ(suspended(me, 11), 0);
    CHECK_EQ(suspended(me, 12), 0);
    atomic_store(&me->comm->suspended, 1);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), R2_NCCL_USAGE);
    CHECK_EQ(suspended(me, 11), 0);
    atomic_store(&me->comm->suspended, 0);
    atomic_store(&second(me, 12)->suspended, 1);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), R2_NCCL_USAGE);
    CHECK_EQ(suspended(me, 11), 1);
    CHECK_EQ(atomic_load(&me->comm->suspended), 1);
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(suspended(me, 11), 0);
    CHECK_EQ(suspended(me, 12), 1);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static int async_error(struct rank *me)
{
    int error = -1;

    CHECK_EQ(ncclCommGetAsyncError(me->comm, &error), 0);
    return error;
}

/* The other ranks wait in each call for this one, whatever failed here. Where that was one of a
 * plan, the communicator is at its end. */
static void half_way(struct rank *me)
{
    take_plan(me, 2);
    atomic_store(&me->comm->suspended, NOOP_SHORT);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), R2_NCCL_SYSTEM);
    CHECK_EQ(suspended(me, 11), 1);
    CHECK_EQ(suspended(me, 12), 1);
    atomic_store(&me->comm->suspended, 1);
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(async_error(me), 0);
    pthread_barrier_wait(&together); /* before a rank tells the others of its failure */
    atomic_store(&second(me, 11)->suspended, NOOP_SHORT);
    CHECK_EQ(ncclCommSuspend(me->comm, 0), R2_NCCL_SYSTEM);
    CHECK_EQ(suspended(me, 12), 1);
    CHECK_EQ(async_error(me), R2_NCCL_REMOTE);
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(atomic_load(&me->entry->state), R2_SEG_COMM_FAILED);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

/* NCCL meets all ranks in each: the same ones, in the same order, on all of them. */
static void in_order(struct rank *me)
{
    r2_nccl_comm ran[NOOP_TRACE];
    size_t what[NOOP_TRACE];

    take_plan(me, 2);
    noop.trace();
    CHECK_EQ(ncclCommSuspend(me->comm, 0), 0);
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(noop.traced(ran, what), 6);
    for (int i = 0; i < 6; i++) {
        CHECK_EQ(what[i], i < 3 ? NOOP_SUSPENDED : NOOP_RESUMED);
        CHECK(ran[i] == (i % 3 ? second(me, (uint64_t)(10 + i % 3)) : me->comm));
    }
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void *suspend(void *comm)
{
    return (void *)(intptr_t)ncclCommSuspend(comm, 0);
}

static void *ask(void *me)
{
    async_error(me);
    return NULL;
}

static void *end(void *comm)
{
    CHECK_EQ(ncclCommAbort(comm), 0);
    return NULL;
}

static void await(atomic_int *word)
{
    AWAIT(atomic_load(word));
}

/* Another thread ends the communicator while its own part is suspended, and waits for a third one,
 * so that NCCL is through with that part first: the answer is NCCL's, and there is nothing left to
 * follow it. */
static void ended_meanwhile(struct rank *me)
{
    pthread_t suspender, asker, ender;
    r2_nccl_comm beside;
    void *result;

    take_plan(me, 1);
    beside = second(me, 11);
    atomic_store(&beside->hold_asks, 1);
    noop.hang(1);
    CHECK_EQ(pthread_create(&asker, NULL, ask, me), 0);
    await(&beside->asking);
    CHECK_EQ(pthread_create(&suspender, NULL, suspend, me->comm), 0);
    await(&me->comm->inside);
    CHECK_EQ(pthread_create(&ender, NULL, end, me->comm), 0);
    AWAIT(r2_comms_gone(me->entry));
    pthread_barrier_wait(&together);
    noop.hang(0);
    CHECK_EQ(pthread_join(suspender, &result), 0);
    CHECK_EQ((int)(intptr_t)result, 0);
    atomic_store(&beside->hold_asks, 0);
    CHECK_EQ(pthread_join(asker, NULL), 0);
    CHECK_EQ(pthread_join(ender, NULL), 0);
}

static void test_suspend_order(void)
{
    run_all(in_order);
}

static void test_suspend_ended(void)
{
    long before = noop.calls("ncclCommSuspend");

    run_all(ended_meanwhile);
    CHECK_EQ(noop.calls("ncclCommSuspend"), before + RANKS);
}

static void test_suspend(void)
{
    run_all(made_while_suspended);
    run_all(refused);
    run_all(half_way);
}

static const struct check_test tests[] = {
    {"configuration", test_configuration},
    {"suspend", test_suspend},
    {"suspend_order", test_suspend_order},
    {"suspend_ended", test_suspend_ended},
    {0},
};

int main(int argc, char **argv)
{
    noop_bed("on");
    setenv("R2CCL_PLAN_FORCE", "0", 1);
    return check_main(argc, argv, tests);
}
