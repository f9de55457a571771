/* What the communicators of plans have from the application's: its configuration, and that it is
 * suspended; over the no-op NCCL, as test_shim_exec.c, which has the rest of what is done to them.
 */
#define _GNU_SOURCE
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

/* NCCL resumes what it has suspended: a plan's communicator that is made meanwhile is not among it.
 */
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
    CHECK_EQ(atomic_load(&second(me, 11)->suspended), 1);
    CHECK_EQ(ncclCommResume(me->comm), 0);
    CHECK_EQ(atomic_load(&second(me, 11)->suspended), 0);
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

/* One that cannot be suspended: none is, and the application hears of it. */
static void not_suspended(struct rank *me)
{
    take_plan(me, 2);
    for (int which = 0; which < 2; which++) {
        r2_nccl_comm refuses = which ? me->comm : second(me, 11);

        atomic_store(&refuses->suspended, 1);
        CHECK_EQ(ncclCommSuspend(me->comm, 0), R2_NCCL_USAGE);
        CHECK_EQ(atomic_exchange(&refuses->suspended, 0), 1);
        CHECK_EQ(atomic_load(&second(me, 11)->suspended), 0);
        CHECK_EQ(atomic_load(&second(me, 12)->suspended), 0);
        CHECK_EQ(atomic_load(&me->comm->suspended), 0);
    }
    CHECK_EQ(ncclCommDestroy(me->comm), 0);
}

static void test_suspend(void)
{
    run_all(made_while_suspended);
    run_all(not_suspended);
}

static const struct check_test tests[] = {
    {"configuration", test_configuration},
    {"suspend", test_suspend},
    {0},
};

int main(int argc, char **argv)
{
    noop_bed("on");
    setenv("R2CCL_PLAN_FORCE", "0", 1);
    return check_main(argc, argv, tests);
}
