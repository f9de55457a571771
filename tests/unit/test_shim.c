/* The wrappers and the table of communicators, over the no-op NCCL. Rung 2.
 *
 * The wrappers are linked into this program, so that sanitizers see them. The NCCL is opened by its
 * path (R2CCL_REAL_NCCL). Its calls of its own public functions are led through the wrappers, as
 * the dynamic linker does under LD_PRELOAD. It cannot prove that the linker finds the real NCCL:
 * tests/py/test_shim.py does. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/wait.h>

#include "api/call.h"
#include "await.h"
#include "check.h"
#include "comm_row.h"
#include "comms/follow_inside.h"
#include "nccl/ids.h"
#include "noop_bed.h"

#define R2_PLAIN(name, since, params, args) int name params;
#define R2_COMM(name, since, params, args) int name params;
#define R2_BYPASS(name, since, what, params, args) int name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#define R2_P2P(name, since, kind, params, args) int name params;
#define R2_OWN(name, since, ret, params) ret name params;
#include "nccl/nccl.def"

static r2_nccl_comm make(void)
{
    struct r2_nccl_id id;
    r2_nccl_comm comm;

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclCommInitRank(&comm, 2, id, 1), 0);
    return comm;
}

static uint64_t index_of(r2_nccl_comm handle)
{
    struct r2_comm *comm = r2_comms_hold(handle);
    uint64_t index;

    CHECK(comm != NULL);
    index = r2_comms_index(comm);
    r2_comms_drop(comm);
    return index;
}

static uint32_t calling(r2_nccl_comm handle)
{
    struct r2_comm *comm = r2_comms_hold(handle);
    uint32_t now = __atomic_load_n(&r2_comm_row(comm)->calling, __ATOMIC_RELAXED);

    r2_comms_drop(comm);
    return now;
}

static int reduce(r2_nccl_comm comm)
{
    return ncclAllReduce(NULL, NULL, 10, 7, 0, comm, NULL);
}

TEST(table)
{
    for (int i = 0; i < R2_API_COUNT; i++) {
        CHECK_EQ(r2_api_find(r2_api_names[i]), i);
        CHECK(r2_api_wrapper((enum r2_api)i) != NULL);
        CHECK(r2_api_since[i] >= 21400 && r2_api_since[i] < 30000);
        /* The no-op NCCL has every function, so every wrapper has somewhere to go. */
        CHECK(noop.calls(r2_api_names[i]) >= 0);
    }
    CHECK_EQ(r2_api_find("ncclNothing"), -1);
}

TEST(passes_on)
{
    long before;
    int version = 0;

    before = noop.calls("ncclGetVersion");
    CHECK_EQ(ncclGetVersion(&version), 0);
    CHECK_EQ(version, 23203);
    /* One more than ours: the shim asks once itself. */
    CHECK(noop.calls("ncclGetVersion") - before >= 1);
    noop.next_result(3);
    CHECK_EQ(ncclMemFree(NULL), 3);
    CHECK_STR(ncclGetErrorString(1), "no-op error");
}

TEST(counts_what_nccl_took)
{
    r2_nccl_comm comm;

    comm = make();
    CHECK_EQ(index_of(comm), 0);
    CHECK_EQ(reduce(comm), 0);
    CHECK_EQ(index_of(comm), 1);
    noop.next_result(5);
    CHECK_EQ(reduce(comm), 5);
    CHECK_EQ(index_of(comm), 1);
    CHECK_EQ(ncclAllGather(NULL, NULL, 0, 7, comm, NULL), 0); /* nothing to do counts too */
    CHECK_EQ(index_of(comm), 2);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, comm, NULL), 0);
    CHECK_EQ(ncclRecv(NULL, 1, 7, 0, comm, NULL), 0);
    CHECK_EQ(index_of(comm), 2);
    CHECK_EQ(row_of(comm).p2p, 2);
    CHECK_EQ(ncclAllReduceConfig(NULL, NULL, 1, 7, 0, comm, NULL, NULL), 0);
    CHECK_EQ(index_of(comm), 3);
    CHECK_EQ(row_of(comm).op, R2_SEG_COLL_ALL_REDUCE);
    CHECK_EQ(row_of(comm).op_bytes, 4);
    CHECK_EQ(row_of(comm).operations, 3);
    CHECK_EQ(ncclCommDestroy(comm), 0);
}

/* ncclBcast of the no-op NCCL calls ncclBroadcast, which opens a group: all through the wrappers.
 */
TEST(nested_calls_pass_through)
{
    long before;
    r2_nccl_comm comm, all[3];

    comm = make();
    before = noop.calls("ncclBcast");
    CHECK_EQ(ncclBcast(NULL, 1, 7, 0, comm, NULL), 0);
    CHECK_EQ(noop.calls("ncclBcast") - before, 1);
    CHECK_EQ(index_of(comm), 1);
    CHECK(!r2_comms_in_group());
    CHECK_EQ(ncclCommDestroy(comm), 0);
    /* ncclCommInitAll calls ncclCommInitRank: followed once, not twice. */
    before = r2_comms_count();
    CHECK_EQ(ncclCommInitAll(all, 3, NULL), 0);
    CHECK_EQ(r2_comms_count() - before, 3);
    CHECK_EQ(row_of(all[2]).rank, 2);
    CHECK_EQ(row_of(all[0]).id, row_of(all[2]).id);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(ncclCommDestroy(all[i]), 0);
    CHECK_EQ(r2_comms_count(), before);
}

TEST(groups)
{
    r2_nccl_comm comm, other;

    comm = make();
    other = make();
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(comm), 0);
    CHECK_EQ(index_of(comm), 0); /* NCCL has it when the group ends, all of it */
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK(r2_comms_in_group());
    CHECK_EQ(index_of(comm), 0);
    CHECK_EQ(reduce(comm), 0);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, comm, NULL), 0);
    CHECK_EQ(row_of(comm).p2p, 0);
    CHECK_EQ(reduce(other), 0);
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK(!r2_comms_in_group());
    CHECK_EQ(index_of(comm), 2);
    CHECK_EQ(index_of(other), 1);
    CHECK_EQ(row_of(comm).operations, 2);
    CHECK_EQ(row_of(comm).p2p, 1);
    /* A simulation is never seen: what operators see is a counter, and does not fall. */
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(comm), 0);
    CHECK_EQ(reduce(comm), 0);
    CHECK_EQ(reduce(other), 0);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, comm, NULL), 0);
    CHECK_EQ(row_of(comm).operations, 2);
    CHECK_EQ(ncclGroupSimulateEnd(NULL), 0);
    CHECK_EQ(index_of(comm), 2);
    CHECK_EQ(index_of(other), 1);
    CHECK_EQ(row_of(comm).operations, 2);
    CHECK_EQ(row_of(comm).p2p, 1);
    CHECK_EQ(reduce(comm), 0);
    CHECK_EQ(row_of(comm).operations, 3);
    CHECK_EQ(ncclCommDestroy(comm), 0);
    CHECK_EQ(ncclCommDestroy(other), 0);
}

TEST(communicators_of_a_group)
{
    struct r2_nccl_id id;
    r2_nccl_comm comms[2], failed;
    int before;

    before = r2_comms_count();
    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclGroupStart(), 0);
    for (int r = 0; r < 2; r++)
        CHECK_EQ(ncclCommInitRank(&comms[r], 2, id, r), 0);
    CHECK_EQ(r2_comms_count(), before);
    CHECK_EQ(ncclGroupEnd(), 0);
    CHECK_EQ(r2_comms_count() - before, 2);
    CHECK_EQ(row_of(comms[1]).rank, 1);
    CHECK_EQ(row_of(comms[1]).ranks, 2);
    /* A group that fails makes none. */
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(ncclCommInitRank(&failed, 2, id, 0), 0);
    noop.next_result(2);
    CHECK_EQ(ncclGroupEnd(), 2);
    CHECK_EQ(r2_comms_count() - before, 2);
    CHECK_EQ(ncclCommDestroy(failed), 0); /* the no-op NCCL has it, unlike the real one */
    for (int r = 0; r < 2; r++)
        CHECK_EQ(ncclCommDestroy(comms[r]), 0);
}

TEST(children)
{
    r2_nccl_comm parent = NULL, child, other, shrunk, grown;
    int excluded[] = {1};
    uint64_t id;

    parent = make();
    id = row_of(parent).id;
    CHECK_EQ(ncclCommSplit(parent, 4, 0, &child, NULL), 0);
    CHECK_EQ(row_of(child).parent, id);
    CHECK(row_of(child).id != id);
    CHECK_EQ(row_of(child).rank, 1);
    /* The same color at another time is another communicator. */
    CHECK_EQ(ncclCommSplit(parent, 4, 0, &other, NULL), 0);
    CHECK(row_of(child).id != row_of(other).id);
    CHECK_EQ(ncclCommDestroy(other), 0);
    /* No color: no communicator, but the split counts. */
    CHECK_EQ(ncclCommSplit(parent, R2_NCCL_NOCOLOR, 0, &other, NULL), 0);
    CHECK(other == NULL);
    CHECK_EQ(ncclCommShrink(parent, excluded, 1, &shrunk, NULL, 0), 0);
    CHECK_EQ(row_of(shrunk).parent, id);
    CHECK_EQ(row_of(shrunk).ranks, 1);
    CHECK_EQ(ncclCommGrow(parent, 5, NULL, -1, &grown, NULL), 0);
    CHECK_EQ(row_of(grown).ranks, 5);
    CHECK_EQ(ncclCommRevoke(parent, 0), 0);
    CHECK_EQ(row_of(parent).state, R2_SEG_COMM_REVOKED);
    CHECK_EQ(ncclCommSuspend(child, 1), 0);
    CHECK_EQ(row_of(child).state, R2_SEG_COMM_SUSPENDED);
    CHECK_EQ(ncclCommResume(child), 0);
    CHECK_EQ(row_of(child).state, R2_SEG_COMM_READY);
    CHECK_EQ(ncclCommFinalize(child), 0);
    CHECK_EQ(row_of(child).state, R2_SEG_COMM_FINALIZED);
    CHECK_EQ(ncclCommDestroy(child), 0);
    CHECK_EQ(ncclCommDestroy(shrunk), 0);
    CHECK_EQ(ncclCommDestroy(grown), 0);
    CHECK_EQ(ncclCommAbort(parent), 0);
    CHECK(r2_comms_hold(parent) == NULL);
}

/* Two ranks that split in the same order number the children alike. */
TEST(ids_are_the_same_on_all_ranks)
{
    struct r2_nccl_id id;
    r2_nccl_comm ranks[2], children[2];

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(ncclCommInitRank(&ranks[r], 2, id, r), 0);
        CHECK_EQ(ncclCommSplit(ranks[r], r == 0 ? 1 : R2_NCCL_NOCOLOR, 0, &children[r], NULL), 0);
        if (r == 0)
            CHECK_EQ(ncclCommDestroy(children[r]), 0);
        CHECK_EQ(ncclCommSplit(ranks[r], 9, 0, &children[r], NULL), 0);
    }
    CHECK_EQ(row_of(ranks[0]).id, row_of(ranks[1]).id);
    CHECK_EQ(row_of(children[0]).id, row_of(children[1]).id);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ(ncclCommDestroy(children[r]), 0);
        CHECK_EQ(ncclCommDestroy(ranks[r]), 0);
    }
}

TEST(nonblocking)
{
    struct r2_nccl_id id;
    r2_nccl_comm comm;
    int error = 0;

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    noop.next_result(R2_NCCL_IN_PROGRESS);
    CHECK_EQ(ncclCommInitRank(&comm, 2, id, 0), R2_NCCL_IN_PROGRESS);
    CHECK_EQ(row_of(comm).state, R2_SEG_COMM_INIT);
    CHECK_EQ(ncclCommGetAsyncError(comm, &error), 0);
    CHECK_EQ(error, R2_NCCL_IN_PROGRESS);
    CHECK_EQ(row_of(comm).state, R2_SEG_COMM_INIT);
    CHECK_EQ(ncclCommGetAsyncError(comm, &error), 0);
    CHECK_EQ(error, 0);
    CHECK_EQ(row_of(comm).state, R2_SEG_COMM_READY);
    noop.next_result(R2_NCCL_IN_PROGRESS);
    CHECK_EQ(reduce(comm), R2_NCCL_IN_PROGRESS);
    CHECK_EQ(index_of(comm), 1);
    CHECK_EQ(ncclCommDestroy(comm), 0);
}

static void *hanging(void *arg)
{
    return (void *)(intptr_t)reduce(arg);
}

/* As PyTorch's watchdog does: abort while another thread is inside a collective. */
TEST(abort_from_another_thread)
{
    r2_nccl_comm comm;
    pthread_t thread;
    void *result;

    comm = make();
    noop.hang(1);
    CHECK_EQ(pthread_create(&thread, NULL, hanging, comm), 0);
    AWAIT(atomic_load(&comm->inside));
    CHECK(calling(comm));
    CHECK_EQ(ncclCommAbort(comm), 0);
    CHECK_EQ(pthread_join(thread, &result), 0);
    noop.hang(0);
    CHECK_EQ((int)(intptr_t)result, R2_NCCL_INTERNAL);
    CHECK(r2_comms_hold(comm) == NULL);
}

static void *churn(void *arg)
{
    (void)arg;
    for (int round = 0; round < 200; round++) {
        r2_nccl_comm comm = make();

        for (int i = 0; i < 20; i++) {
            CHECK_EQ(ncclGroupStart(), 0);
            CHECK_EQ(reduce(comm), 0);
            CHECK_EQ(ncclGroupEnd(), 0);
            CHECK_EQ(reduce(comm), 0);
        }
        CHECK_EQ(index_of(comm), 40);
        CHECK_EQ(ncclCommDestroy(comm), 0);
    }
    return NULL;
}

TEST(threads)
{
    pthread_t threads[4];
    int before;

    before = r2_comms_count();
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, churn, NULL), 0);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(r2_comms_count(), before);
}

TEST(child_of_fork_is_inert)
{
    r2_nccl_comm comm;
    int status, version;
    pid_t pid;

    comm = make();
    CHECK_EQ(reduce(comm), 0);
    pid = fork();
    if (pid == 0) {
        /* Passed on, not followed. */
        int ok = ncclGetVersion(&version) == 0 && reduce(comm) == 0 && index_of(comm) == 1;

        _exit(ok ? 0 : 1);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK_EQ(status, 0);
    CHECK_EQ(reduce(comm), 0);
    CHECK_EQ(index_of(comm), 2);
    CHECK_EQ(ncclCommDestroy(comm), 0);
}

static atomic_bool looking;

static void *look_up(void *comm)
{
    while (atomic_load(&looking))
        index_of(comm);
    return NULL;
}

/* With several NCCLs in the process a forked child asks the table which one a communicator belongs
 * to: threads of the parent that were in it then are not there to leave it. */
TEST(fork_while_others_look_up)
{
    pthread_t threads[3];
    r2_nccl_comm comm;
    int status;

    comm = make();
    atomic_store(&looking, true);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, look_up, comm), 0);
    for (int i = 0; i < 300; i++) {
        pid_t pid = fork();

        if (pid == 0) {
            alarm(5);
            index_of(comm);
            _exit(0);
        }
        CHECK_EQ(waitpid(pid, &status, 0), pid);
        CHECK_MSG(status == 0, "the child of fork %d hangs", i);
    }
    atomic_store(&looking, false);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(ncclCommDestroy(comm), 0);
}

/* An error that comes with the end of a group is that of all its communicators. */
TEST(errors_of_a_group)
{
    r2_nccl_comm one, other, outside;

    one = make();
    other = make();
    outside = make();
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(one), 0);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, other, NULL), 0);
    noop.next_result(5); /* a mistake of the caller's */
    CHECK_EQ(ncclGroupEnd(), 5);
    CHECK_EQ(row_of(one).state, R2_SEG_COMM_READY);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(one), 0);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, other, NULL), 0);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, other, NULL), 0);
    noop.next_result(R2_NCCL_REMOTE); /* of one of the two: the other is well */
    CHECK_EQ(ncclGroupEnd(), R2_NCCL_REMOTE);
    CHECK_EQ(row_of(one).state, R2_SEG_COMM_READY);
    CHECK_EQ(row_of(other).state, R2_SEG_COMM_READY);
    CHECK_EQ(index_of(one), 1); /* not of the first group, which NCCL has refused */
    CHECK_EQ(index_of(other), 0);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, other, NULL), 0);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, other, NULL), 0);
    noop.next_result(R2_NCCL_REMOTE);
    CHECK_EQ(ncclGroupEnd(), R2_NCCL_REMOTE);
    CHECK_EQ(row_of(one).state, R2_SEG_COMM_READY);
    CHECK_EQ(row_of(other).state, R2_SEG_COMM_FAILED);
    CHECK_EQ(row_of(outside).state, R2_SEG_COMM_READY);
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(one), 0);
    noop.next_result(R2_NCCL_REMOTE); /* of a call: it is that communicator's, not the other's */
    CHECK_EQ(reduce(outside), R2_NCCL_REMOTE);
    CHECK_EQ(ncclGroupEnd(), R2_NCCL_REMOTE);
    CHECK_EQ(row_of(one).state, R2_SEG_COMM_READY);
    CHECK_EQ(row_of(outside).state, R2_SEG_COMM_FAILED);
    CHECK_EQ(ncclCommDestroy(one), 0);
    CHECK_EQ(ncclCommDestroy(other), 0);
    CHECK_EQ(ncclCommDestroy(outside), 0);
}

/* Whether the ranks of a new communicator meet, to be told of errors. */
static bool meets(r2_nccl_comm handle)
{
    struct r2_comm *comm = r2_comms_hold(handle);
    struct r2_agree_stats stats;

    CHECK_EQ(reduce(handle), 0);
    r2_agree_get_stats(comm->follow->agree, &stats);
    CHECK(stats.state == R2_AGREE_IDLE || stats.state == R2_AGREE_JOINING);
    r2_comms_drop(comm);
    return stats.state == R2_AGREE_JOINING;
}

/* R2CCL_TELL_ERRORS bounds what one process has to bear: all of a family meet at the same one. */
TEST(children_of_too_many)
{
    static int excluded[100];
    r2_nccl_comm parents[2], children[2], grandchild;
    struct r2_nccl_id id;

    for (int i = 0; i < 2; i++) {
        CHECK_EQ(ncclGetUniqueId(&id), 0);
        CHECK_EQ(ncclCommInitRank(&parents[i], i == 0 ? 256 : 257, id, 1), 0);
        CHECK_EQ(meets(parents[i]), i == 0);
        CHECK_EQ(ncclCommShrink(parents[i], excluded, 100, &children[i], NULL, 0), 0);
        CHECK_EQ(meets(children[i]), i == 0);
        CHECK_EQ(ncclCommSplit(children[i], 3, 0, &grandchild, NULL), 0);
        CHECK_EQ(meets(grandchild), i == 0);
        CHECK_EQ(ncclCommDestroy(grandchild), 0);
        CHECK_EQ(ncclCommDestroy(children[i]), 0);
        CHECK_EQ(ncclCommDestroy(parents[i]), 0);
    }
}

int main(int argc, char **argv)
{
    noop_bed(NULL);
    return check_main(argc, argv);
}
