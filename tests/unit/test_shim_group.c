/* Groups that are recorded (comms/run.h), over the no-op NCCL: what an operation needs is kept
 * until it is issued, whatever other threads do meanwhile, and none is lost. The communicators have
 * one rank here, and its plan is put there, not agreed. Rung 2. It cannot prove that all ranks
 * record alike: test_shim_storm.c does. */
#define _GNU_SOURCE
#include <pthread.h>

#include "api/call.h"
#include "check.h"
#include "comms/follow_inside.h"
#include "noop_bed.h"

#define R2_OWN(name, since, ret, params) ret name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#define R2_P2P(name, since, kind, params, args) int name params;
#include "api/nccl.def"

#define BIG (1 << 20) /* floats: an operation that plans are for */
#define FLOAT 7
#define OWN_SUM 5 /* the application's own */

static const struct r2_plan_table empty;

/* A communicator whose groups are recorded. */
static r2_nccl_comm make(struct r2_comm **entry, const struct r2_plan_table *table)
{
    struct r2_nccl_id id;
    r2_nccl_comm comm;

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclCommInitRank(&comm, 2, id, 1), 0);
    *entry = r2_comms_hold(comm);
    CHECK(*entry && (*entry)->follow);
    (*entry)->follow->table = table;
    atomic_store(&(*entry)->planned, true);
    return comm;
}

static void end(struct r2_comm *entry, r2_nccl_comm comm)
{
    r2_comms_drop(entry);
    if (comm)
        CHECK_EQ(ncclCommAbort(comm), 0);
}

static int reduce(r2_nccl_comm comm, size_t count, int op)
{
    return ncclAllReduce(NULL, NULL, count, FLOAT, op, comm, NULL);
}

/* What this thread called since the last time. */
static int called(r2_nccl_comm *comms, size_t *counts)
{
    int n = noop.traced(comms, counts);

    noop.trace();
    return n;
}

static void test_kept_while_recorded(void)
{
    struct r2_nccl_config config = {
        .size = sizeof(config), .magic = R2_NCCL_CONFIG_MAGIC, .blocking = 4711};
    r2_nccl_comm comm, ran[NOOP_TRACE];
    size_t counts[NOOP_TRACE];
    struct r2_comm *entry;

    comm = make(&entry, &empty);
    noop.trace();
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(comm, BIG, OWN_SUM), 0);
    CHECK_EQ(ncclRedOpDestroy(OWN_SUM, comm), 0);
    CHECK_EQ(ncclAllReduceConfig(NULL, NULL, 3, FLOAT, 0, comm, NULL, &config), 0);
    memset(&config, 0xdb, sizeof(config));
    CHECK_EQ(called(ran, counts), 0); /* recorded, not run */
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK_EQ(called(ran, counts), 4);
    CHECK(counts[0] == BIG && counts[1] == 3 && counts[2] == 4711 && counts[3] == NOOP_DESTROYED);
    /* Outside of a recorded group it is destroyed at once, and an error is the call's. */
    noop.next_result(5);
    CHECK_EQ(ncclRedOpDestroy(OWN_SUM, comm), 5);
    CHECK_EQ(called(ran, counts), 1);
    /* And in one whose communicator has no plan any more when it ends. */
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(comm, BIG, OWN_SUM), 0);
    CHECK_EQ(ncclRedOpDestroy(OWN_SUM, comm), 0);
    entry->follow->table = NULL;
    atomic_store(&entry->planned, false);
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK_EQ(called(ran, counts), 2);
    end(entry, comm);
}

/* ---- other threads */

static void *destroy_both(void *comm)
{
    long before = noop.calls("ncclRedOpDestroy");

    CHECK_EQ(ncclRedOpDestroy(OWN_SUM + 1, comm), 0); /* nobody uses it */
    CHECK_EQ(noop.calls("ncclRedOpDestroy"), before + 1);
    CHECK_EQ(ncclRedOpDestroy(OWN_SUM, comm), 0);
    CHECK_EQ(noop.calls("ncclRedOpDestroy"), before + 1);
    return NULL;
}

static void in_thread(void *(*run)(void *), void *arg)
{
    pthread_t thread;

    CHECK_EQ(pthread_create(&thread, NULL, run, arg), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
}

/* NCCL would have copied the reduction in the call that is only recorded. */
static void test_destroyed_by_another_thread(void)
{
    r2_nccl_comm comm, ran[NOOP_TRACE];
    size_t counts[NOOP_TRACE];
    struct r2_comm *entry;

    comm = make(&entry, &empty);
    noop.trace();
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(comm, 1, OWN_SUM), 0);
    CHECK_EQ(reduce(comm, 2, OWN_SUM), 0);
    CHECK_EQ(reduce(comm, 3, 0), 0);
    in_thread(destroy_both, comm);
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK_EQ(called(ran, counts), 4);
    CHECK(counts[0] == 1 && counts[1] == 2 && counts[2] == 3 && counts[3] == NOOP_DESTROYED);
    end(entry, comm);
}

static void *abort_it(void *comm)
{
    CHECK_EQ(ncclCommAbort(comm), 0);
    return NULL;
}

/* Nothing is called with what the abort has freed; the group's other communicator runs. */
static void test_aborted_while_recorded(void)
{
    r2_nccl_comm comm, other, child = NULL, ran[NOOP_TRACE];
    struct r2_comm *entry, *beside, *made;
    size_t counts[NOOP_TRACE];
    long destroyed;

    comm = make(&entry, &empty);
    other = make(&beside, &empty);
    destroyed = noop.calls("ncclRedOpDestroy");
    noop.trace();
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(comm, 1, OWN_SUM), 0);
    CHECK_EQ(ncclRedOpDestroy(OWN_SUM, comm), 0);
    CHECK_EQ(reduce(other, 2, 0), 0);
    CHECK_EQ(ncclCommSplit(other, 0, 0, &child, NULL), 0);
    in_thread(abort_it, comm);
    CHECK_EQ(ncclGroupEnd(), R2_NCCL_INTERNAL);
    CHECK_EQ(called(ran, counts), 1);
    CHECK(ran[0] == other && counts[0] == 2);
    CHECK_EQ(noop.calls("ncclRedOpDestroy"), destroyed);
    made = r2_comms_hold(child); /* NCCL has made it, whatever else was wrong */
    CHECK(made && made->follow);
    end(made, child);
    end(entry, NULL);
    end(beside, other);
}

/* Of two communicators the first one's call is in progress, as a non-blocking one's are, and the
 * other one was aborted: the end does not hide that. */
static void test_in_progress_hides_no_error(void)
{
    struct r2_comm *entry, *beside;
    r2_nccl_comm comm, other;

    other = make(&beside, &empty);
    comm = make(&entry, &empty);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(other, 2, 0), 0);
    CHECK_EQ(reduce(comm, 1, 0), 0);
    in_thread(abort_it, comm);
    noop.next_result(R2_NCCL_IN_PROGRESS);
    CHECK_EQ(ncclGroupEnd(), R2_NCCL_INTERNAL);
    end(entry, NULL);
    end(beside, other);
}

static void *run_group(void *comm)
{
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(comm, BIG, 0), 0);
    CHECK_EQ(ncclGroupEnd(), 0);
    return NULL;
}

/* A rank that hangs in the end of a group has handed over what is in it: it is not the one that the
 * others wait for. */
static void test_counted_before_it_hangs(void)
{
    struct r2_comm *entry;
    r2_nccl_comm comm;
    pthread_t thread;

    comm = make(&entry, &empty);
    noop.hang(1);
    CHECK_EQ(pthread_create(&thread, NULL, run_group, comm), 0);
    for (int i = 0; i < 20000 && !atomic_load(&comm->inside); i++)
        usleep(1000);
    CHECK(atomic_load(&comm->inside));
    CHECK_EQ(r2_comms_index(entry), 1);
    noop.hang(0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(r2_comms_index(entry), 1);
    end(entry, comm);
}

static void counted(struct r2_comm *entry, uint64_t collectives, uint64_t p2p)
{
    CHECK_EQ(r2_comms_index(entry), collectives);
    CHECK_EQ(r2_agree_index(entry->follow->agree), collectives);
    CHECK_EQ(r2_comm_row(entry)->operations, collectives);
    CHECK_EQ(r2_comm_row(entry)->p2p, p2p);
}

/* refuse: the call of the group that NCCL does; 0: none, -1: its end. */
static int group_of_three(r2_nccl_comm comm, int refuse, int error)
{
    for (int i = 1; i <= 4; i++) {
        if (i == 1)
            CHECK_EQ(ncclGroupStart(), 0);
        if (i == refuse || (i == 4 && refuse < 0))
            noop.next_result(error);
        if (i == 3)
            CHECK_EQ(ncclSend(NULL, 1, FLOAT, 0, comm, NULL), i == refuse ? error : 0);
        else if (i < 3)
            CHECK_EQ(reduce(comm, BIG, 0), i == refuse ? error : 0);
    }
    return ncclGroupEnd();
}

/* A rank whose arguments NCCL refuses may do the group again; the others know nothing of that. What
 * NCCL had in hand when it failed is counted. */
static void test_refused_is_not_counted(void)
{
    struct r2_comm *entry;
    r2_nccl_comm comm;

    comm = make(&entry, &empty);
    atomic_store(&entry->planned, false); /* straight on */
    CHECK_EQ(group_of_three(comm, 0, 0), 0);
    counted(entry, 2, 1);
    for (int refuse = 1; refuse <= 3; refuse++) {
        CHECK_EQ(group_of_three(comm, refuse, R2_NCCL_ARGUMENT), R2_NCCL_ARGUMENT);
        counted(entry, 2, 1);
    }
    CHECK_EQ(group_of_three(comm, 2, R2_NCCL_INTERNAL), R2_NCCL_INTERNAL);
    counted(entry, 2, 1);
    CHECK_EQ(group_of_three(comm, -1, R2_NCCL_USAGE), R2_NCCL_USAGE);
    counted(entry, 2, 1);
    CHECK_EQ(group_of_three(comm, 0, 0), 0);
    counted(entry, 4, 2);
    CHECK_EQ(group_of_three(comm, -1, R2_NCCL_INTERNAL), R2_NCCL_INTERNAL);
    counted(entry, 6, 3);
    end(entry, comm);
}

/* The same of what is recorded, and refused when it is issued. */
static void test_refused_when_issued(void)
{
    struct r2_comm *entry;
    r2_nccl_comm comm;

    comm = make(&entry, &empty);
    CHECK_EQ(group_of_three(comm, -1, R2_NCCL_ARGUMENT), R2_NCCL_ARGUMENT);
    counted(entry, 0, 0);
    CHECK_EQ(group_of_three(comm, -1, R2_NCCL_INTERNAL), R2_NCCL_INTERNAL);
    counted(entry, 0, 0);
    CHECK_EQ(group_of_three(comm, 0, 0), 0);
    counted(entry, 2, 1);
    CHECK_EQ(atomic_load(&entry->state), R2_SEG_COMM_READY);
    /* As of a communicator that has lost a peer: its other ranks are to hear of that. */
    CHECK_EQ(group_of_three(comm, -1, R2_NCCL_REMOTE), R2_NCCL_REMOTE);
    counted(entry, 2, 1);
    CHECK_EQ(atomic_load(&entry->state), R2_SEG_COMM_FAILED);
    end(entry, comm);
}

/* ---- captures, over a driver that only pretends */

#define BEGINS ((r2_nccl_stream)0xcb) /* its capture begins after the first question about it */

/* Another thread's capture may begin while a group is being issued. */
static void test_capture_begins_meanwhile(void)
{
    static const uint32_t order[] = {1, 0};
    struct r2_plan_table table = {.nranks = 2, .ncomms = 1, .nentries = 1};
    r2_nccl_comm comm, ran[NOOP_TRACE];
    size_t counts[NOOP_TRACE];
    struct r2_comm *entry;
    bool failed = false;

    CHECK(dlopen(check_built("tests/fakecuda/libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) != NULL);
    table.comms[0] = (struct r2_plan_comm){.key = 11, .ranks = order};
    table.entries[0] = (struct r2_plan_entry){.coll = R2_PLAN_ALLREDUCE,
                                              .schedule = R2_PLAN_TREE,
                                              .segments = 1,
                                              .from_bytes = 1,
                                              .below_bytes = UINT64_MAX};
    comm = make(&entry, &table);
    CHECK(entry->follow->seconds);
    r2_seconds_follow(entry->follow->seconds, &table, 1);
    for (int i = 0; i < 20000 && !r2_seconds_made(entry->follow->seconds, &failed); i++)
        usleep(1000);
    CHECK(!failed);
    noop.trace();
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(ncclAllReduce(NULL, NULL, BIG, FLOAT, 0, comm, BEGINS), 0);
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK_EQ(called(ran, counts), 1); /* not lost between the two */
    CHECK(ran[0] == r2_seconds_get(entry->follow->seconds, 11) && counts[0] == BIG);
    entry->follow->table = NULL;
    end(entry, comm);
}

static const struct check_test tests[] = {
    {"kept_while_recorded", test_kept_while_recorded},
    {"destroyed_by_another_thread", test_destroyed_by_another_thread},
    {"aborted_while_recorded", test_aborted_while_recorded},
    {"in_progress_hides_no_error", test_in_progress_hides_no_error},
    {"counted_before_it_hangs", test_counted_before_it_hangs},
    {"refused_is_not_counted", test_refused_is_not_counted},
    {"refused_when_issued", test_refused_when_issued},
    {"capture_begins_meanwhile", test_capture_begins_meanwhile},
    {0},
};

int main(int argc, char **argv)
{
    noop_bed("on");
    setenv("R2CCL_PLAN_FORCE", "0", 1);
    return check_main(argc, argv, tests);
}
