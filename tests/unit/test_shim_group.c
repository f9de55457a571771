/* Groups, over the no-op NCCL: what NCCL took is counted, and what it refused is not. Rung 2. */
#define _GNU_SOURCE
#include <pthread.h>

#include "api/call.h"
#include "await.h"
#include "check.h"
#include "comms/follow_inside.h"
#include "noop_bed.h"

#define R2_OWN(name, since, ret, params) ret name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#define R2_P2P(name, since, kind, params, args) int name params;
#include "nccl/nccl.def"

#define BIG (1 << 20) /* floats: an operation that plans are for */
#define FLOAT 7

static r2_nccl_comm make(struct r2_comm **entry, int ranks)
{
    struct r2_nccl_id id;
    r2_nccl_comm comm;

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclCommInitRank(&comm, ranks, id, 1), 0);
    *entry = r2_comms_hold(comm);
    CHECK(*entry && (*entry)->follow);
    return comm;
}

static void end(struct r2_comm *entry, r2_nccl_comm comm)
{
    r2_comms_drop(entry);
    if (comm)
        CHECK_EQ(ncclCommAbort(comm), 0);
}

static int reduce(r2_nccl_comm comm, size_t count)
{
    return ncclAllReduce(NULL, NULL, count, FLOAT, 0, comm, NULL);
}

static void *run_group(void *comm)
{
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(reduce(comm, BIG), 0);
    CHECK_EQ(ncclGroupEnd(), 0);
    return NULL;
}

/* As nccl-tests counts: NCCL's count is of the whole at an AllReduce, of a part at an AllGather. */
TEST(bus_bytes)
{
    struct r2_comm *entry;
    r2_nccl_comm comm;
    uint64_t bytes = 4 * BIG;

    comm = make(&entry, 4);
    CHECK_EQ(reduce(comm, BIG), 0);
    CHECK_EQ(r2_comm_row(entry)->bus_bytes, bytes * 3 / 2);
    CHECK_EQ(ncclAllGather(NULL, NULL, BIG, FLOAT, comm, NULL), 0);
    CHECK_EQ(r2_comm_row(entry)->bus_bytes, bytes * 9 / 2);
    CHECK_EQ(ncclBroadcast(NULL, NULL, BIG, FLOAT, 0, comm, NULL), 0);
    CHECK_EQ(r2_comm_row(entry)->bus_bytes, bytes * 11 / 2);
    noop.next_result(R2_NCCL_ARGUMENT);
    CHECK_EQ(reduce(comm, BIG), R2_NCCL_ARGUMENT);
    CHECK_EQ(ncclSend(NULL, BIG, FLOAT, 0, comm, NULL), 0);
    CHECK_EQ(r2_comm_row(entry)->bus_bytes, bytes * 11 / 2);
    end(entry, comm);
}

/* A rank that hangs in the end of a group has handed over what is in it: it is not the one that the
 * others wait for. */
TEST(counted_before_it_hangs)
{
    struct r2_comm *entry;
    r2_nccl_comm comm;
    pthread_t thread;

    comm = make(&entry, 2);
    noop.hang(1);
    CHECK_EQ(pthread_create(&thread, NULL, run_group, comm), 0);
    AWAIT(atomic_load(&comm->inside));
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
    CHECK_EQ(r2_comm_row(entry)->bus_bytes, collectives * 4 * BIG); /* of two ranks */
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
            CHECK_EQ(reduce(comm, BIG), i == refuse ? error : 0);
    }
    return ncclGroupEnd();
}

/* A rank whose arguments NCCL refuses may do the group again; the others know nothing of that. What
 * NCCL had in hand when it failed is counted. */
TEST(refused_is_not_counted)
{
    struct r2_comm *entry;
    r2_nccl_comm comm;

    comm = make(&entry, 2);
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

int main(int argc, char **argv)
{
    noop_bed("auto");
    return check_main(argc, argv);
}
