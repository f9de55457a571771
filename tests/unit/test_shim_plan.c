/* Communicators whose ranks meet (R2CCL_PLAN=shadow), over the no-op NCCL, and how they fail: all
 * ranks are threads of this process. Rung 3: real sockets on loopback. It cannot prove anything
 * between hosts. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sys/mman.h>

#include "agree/internal.h"
#include "api/call.h"
#include "await.h"
#include "check.h"
#include "comm_row.h"
#include "comms/follow_inside.h"
#include "control/impl.h"
#include "noop_bed.h"
#include "util/clock.h"

#define R2_OWN(name, since, ret, params) ret name params;
#define R2_COLL(name, since, kind, params, args) int name params;
#define R2_P2P(name, since, kind, params, args) int name params;
#include "nccl/nccl.def"

#define RANKS 3
#define BIG (1 << 20) /* floats: an operation that plans are for */

struct rank {
    pthread_t thread;
    struct r2_nccl_id id;
    int rank, abort;
    uint32_t nodes, local, child_nodes, child_local;
    uint64_t index;
};

/* Until the ranks have met, at most 20 s. */
static struct r2_seg_comm meet(r2_nccl_comm comm)
{
    WHILE_MS (20000, !row_of(comm).local_ranks) {
        CHECK_EQ(ncclAllReduce(NULL, NULL, BIG, 7, 0, comm, NULL), 0);
    }
    return row_of(comm);
}

static void *run_rank(void *arg)
{
    struct rank *me = arg;
    struct r2_seg_comm row;
    r2_nccl_comm comm, child, none;

    CHECK_EQ(ncclCommInitRank(&comm, RANKS, me->id, me->rank), 0);
    /* A split that rank 0 gets nothing from, in a group with one that all are in. */
    CHECK_EQ(ncclGroupStart(), 0);
    CHECK_EQ(ncclCommSplit(comm, me->rank ? 5 : -1, 0, &none, NULL), 0);
    CHECK_EQ(ncclCommSplit(comm, 1, 0, &child, NULL), 0);
    CHECK_EQ(ncclGroupEnd(), 0);
    row = meet(comm);
    me->nodes = row.nodes;
    me->local = row.local_ranks;
    row = meet(child);
    me->child_nodes = row.nodes;
    me->child_local = row.local_ranks;
    me->index = row.operations;
    if (none)
        CHECK_EQ(ncclCommAbort(none), 0);
    CHECK_EQ((me->abort ? ncclCommAbort : ncclCommDestroy)(child), 0);
    CHECK_EQ(ncclCommDestroy(comm), 0);
    return NULL;
}

static void run_all(int abort)
{
    struct rank ranks[RANKS];
    struct r2_nccl_id id;
    int before = r2_comms_count();

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    for (int r = 0; r < RANKS; r++) {
        ranks[r] = (struct rank){.id = id, .rank = r, .abort = abort};
        CHECK_EQ(pthread_create(&ranks[r].thread, NULL, run_rank, &ranks[r]), 0);
    }
    for (int r = 0; r < RANKS; r++)
        CHECK_EQ(pthread_join(ranks[r].thread, NULL), 0);
    for (int r = 0; r < RANKS; r++) {
        CHECK_EQ(ranks[r].nodes, 1);
        CHECK_EQ(ranks[r].local, RANKS);
        CHECK_EQ(ranks[r].child_nodes, 1);
        CHECK_EQ(ranks[r].child_local, RANKS);
        CHECK(ranks[r].index > 0);
    }
    CHECK_EQ(r2_comms_count(), before);
}

/* Every rank makes the id by itself: it stays as NCCL made it, the same on all, and nobody meets.
 */
TEST(fixed_id)
{
    static const char zero[64];
    struct r2_nccl_id id;
    struct r2_comm *entry;
    struct r2_agree_stats stats;
    r2_nccl_comm comm;

    setenv("NCCL_COMM_ID", "127.0.0.1:4711", 1);
    CHECK_EQ(ncclGetUniqueId(&id), 0);
    unsetenv("NCCL_COMM_ID");
    CHECK(!memcmp(id.bytes + sizeof(id.bytes) - sizeof(zero), zero, sizeof(zero)));
    CHECK_EQ(ncclCommInitRank(&comm, 2, id, 1), 0);
    entry = r2_comms_hold(comm);
    CHECK(entry && entry->follow);
    CHECK_EQ(ncclAllReduce(NULL, NULL, 1 << 20, 7, 0, comm, NULL), 0); /* waits for nobody */
    r2_agree_get_stats(entry->follow->agree, &stats);
    CHECK_EQ(stats.state, R2_AGREE_OFF);
    r2_comms_drop(entry);
    CHECK_EQ(ncclCommDestroy(comm), 0);
}

TEST(ranks_meet)
{
    run_all(0);
}

TEST(generations)
{
    for (int i = 0; i < 5; i++)
        run_all(i % 2);
}

/* A rank that never comes: collectives and abort do not wait for it. */
TEST(missing_rank)
{
    struct r2_nccl_id id;
    r2_nccl_comm comm;

    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclCommInitRank(&comm, RANKS, id, 1), 0);
    for (int i = 0; i < 100; i++)
        CHECK_EQ(ncclAllReduce(NULL, NULL, BIG, 7, 0, comm, NULL), 0);
    CHECK_EQ(row_of(comm).local_ranks, 0);
    CHECK_EQ(row_of(comm).operations, 100);
    CHECK_EQ(ncclCommAbort(comm), 0);
}

/* ---- revoked while operations wait */

static pthread_barrier_t together;

static void *operate(void *comm)
{
    return (void *)(intptr_t)ncclAllReduce(NULL, NULL, BIG, 7, 0, comm, NULL);
}

/* As if this rank had promised a plan that begins with its next operation, and nobody could tell
 * what became of it. */
static void promise(struct r2_agree *a)
{
    pthread_mutex_lock(&a->lock);
    a->machine.promise = (struct r2_agree_slot){a->machine.decided + 1, r2_agree_index(a)};
    atomic_store(&a->fence, 0);
    pthread_mutex_unlock(&a->lock);
}

static void await_waiting(struct r2_agree *a)
{
    struct r2_agree_stats stats = {0};

    WHILE_MS (20000, !stats.waiting) {
        r2_agree_get_stats(a, &stats);
    }
    CHECK(stats.waiting);
}

static void *revoke_while_waiting(void *arg)
{
    struct rank *me = arg;
    uint64_t begin = r2_now_ns();
    struct r2_comm *entry;
    r2_nccl_comm comm;
    pthread_t other;
    void *result;

    CHECK_EQ(ncclCommInitRank(&comm, RANKS, me->id, me->rank), 0);
    entry = r2_comms_hold(comm);
    CHECK(entry && entry->follow);
    meet(comm);
    pthread_barrier_wait(&together);
    promise(entry->follow->agree);
    pthread_barrier_wait(&together); /* who has not promised would say that nothing came of it */
    CHECK_EQ(pthread_create(&other, NULL, operate, comm), 0);
    await_waiting(entry->follow->agree);
    pthread_barrier_wait(&together);
    CHECK_EQ(ncclCommRevoke(comm, 0), 0);
    CHECK_EQ(pthread_join(other, &result), 0);
    CHECK_EQ((int)(intptr_t)result, R2_NCCL_USAGE); /* NCCL's answer, not the shim's */
    CHECK_EQ((int)(intptr_t)operate(comm), R2_NCCL_USAGE);
    CHECK(r2_now_ns() - begin < 50 * R2_NS_PER_S); /* agree_timeout_ns is 60 s */
    CHECK_EQ(r2_comms_index(entry), r2_agree_index(entry->follow->agree));
    r2_comms_drop(entry);
    CHECK_EQ(ncclCommDestroy(comm), 0);
    return NULL;
}

static void run_together(void *(*run)(void *))
{
    struct rank ranks[RANKS];
    struct r2_nccl_id id;

    CHECK_EQ(pthread_barrier_init(&together, NULL, RANKS), 0);
    CHECK_EQ(ncclGetUniqueId(&id), 0);
    for (int r = 0; r < RANKS; r++) {
        ranks[r] = (struct rank){.id = id, .rank = r};
        CHECK_EQ(pthread_create(&ranks[r].thread, NULL, run, &ranks[r]), 0);
    }
    for (int r = 0; r < RANKS; r++)
        CHECK_EQ(pthread_join(ranks[r].thread, NULL), 0);
    pthread_barrier_destroy(&together);
}

TEST(revoke_wakes)
{
    run_together(revoke_while_waiting);
}

/* ---- failed */

static struct r2_control *control; /* NULL: no shared memory */

/* Lines of the journal that say why a communicator has failed. */
static int failures(struct r2_comm *comm, const char *why)
{
    const struct r2_segment *seg = r2_control_segment(control);
    char begin[80];
    int n = 0;

    snprintf(begin, sizeof(begin), "communicator %016llx has failed: %s",
             (unsigned long long)r2_comms_id(comm), why);
    for (int i = 0; i < R2_SEG_MAX_EVENTS; i++) {
        const struct r2_seg_journal_entry *e = &seg->events[i];
        uint64_t stamp = __atomic_load_n(&e->stamp, __ATOMIC_ACQUIRE);

        n += stamp && stamp % 2 == 0 && e->event == R2_EV_ERROR &&
             strncmp(e->cause, begin, strlen(begin)) == 0;
    }
    return n;
}

static int async_error(r2_nccl_comm comm)
{
    int error = -1;

    CHECK_EQ(ncclCommGetAsyncError(comm, &error), 0);
    return error;
}

#define UNDECIDED 1 /* the rank that waits in vain */

/* A rank that waits for a plan's fate has called. */
static void *see_calling(void *arg)
{
    struct r2_comm *entry = arg;
    const uint32_t *calling = &r2_comm_row(entry)->calling;

    WHILE_MS (200, !__atomic_load_n(calling, __ATOMIC_RELAXED))
        ;
    return (void *)(intptr_t)__atomic_load_n(calling, __ATOMIC_RELAXED);
}

/* NCCL is not called, nothing is counted, and it is for good. */
static void undecided_at(r2_nccl_comm comm, struct r2_comm *entry)
{
    uint64_t begin = r2_now_ns(), index = r2_comms_index(entry);
    long calls = noop.calls("ncclAllReduce"), sends = noop.calls("ncclSend");
    pthread_t watcher;
    void *called;

    CHECK_EQ(pthread_create(&watcher, NULL, see_calling, entry), 0);
    CHECK_EQ((int)(intptr_t)operate(comm), R2_NCCL_REMOTE);
    CHECK_EQ(pthread_join(watcher, &called), 0);
    CHECK_EQ((int)(intptr_t)called, 1);
    CHECK_EQ(r2_comm_row(entry)->calling, 0);
    CHECK_GE(r2_now_ns() - begin, 300 * R2_NS_PER_MS);
    CHECK_EQ(r2_comm_row(entry)->state, R2_SEG_COMM_FAILED);
    CHECK_EQ(async_error(comm), R2_NCCL_REMOTE);
    CHECK_EQ((int)(intptr_t)operate(comm), R2_NCCL_REMOTE);
    CHECK_EQ(ncclSend(NULL, 1, 7, 0, comm, NULL), R2_NCCL_REMOTE);
    CHECK_EQ(noop.calls("ncclAllReduce"), calls);
    CHECK_EQ(noop.calls("ncclSend"), sends);
    CHECK_EQ(r2_comms_index(entry), index);
}

static void *wait_in_vain(void *arg)
{
    struct rank *me = arg;
    struct r2_comm *entry;
    struct r2_agree *a;
    r2_nccl_comm comm;

    CHECK_EQ(ncclCommInitRank(&comm, RANKS, me->id, me->rank), 0);
    entry = r2_comms_hold(comm);
    CHECK(entry && entry->follow);
    a = entry->follow->agree;
    meet(comm);
    pthread_barrier_wait(&together);
    promise(a);
    if (me->rank == UNDECIDED)
        a->timeout_ns = 300 * R2_NS_PER_MS; /* the others would wait for 60 s */
    pthread_barrier_wait(&together);
    if (me->rank == UNDECIDED)
        undecided_at(comm, entry);
    else
        CHECK_EQ((int)(intptr_t)operate(comm), R2_NCCL_REMOTE); /* told */
    CHECK_EQ(async_error(comm), R2_NCCL_REMOTE);
    pthread_barrier_wait(&together);
    if (control) {
        CHECK_EQ(failures(entry, "nobody knows what became of a plan"), 1);
        CHECK_EQ(failures(entry, "ncclRemoteError at rank 1"), RANKS - 1);
        CHECK_EQ(failures(entry, ""), RANKS);
    }
    pthread_barrier_wait(&together);
    r2_comms_drop(entry);
    CHECK_EQ(ncclCommDestroy(comm), 0);
    return NULL;
}

TEST(undecided)
{
    run_together(wait_in_vain);
}

static void *poll_error(void *comm)
{
    return (void *)(intptr_t)async_error(comm);
}

static bool telling(struct r2_agree *a)
{
    bool any;

    pthread_mutex_lock(&a->lock);
    any = a->tellers > 0;
    pthread_mutex_unlock(&a->lock);
    return any;
}

/* One thread found the error and tells the others, for 200 ms, as nobody answers; another one hears
 * of it meanwhile. By then the journal has it, and it has it once. */
TEST(journal)
{
    struct r2_nccl_id id;
    struct r2_comm *entry;
    r2_nccl_comm comm;
    pthread_t first;
    void *result;

    if (!control)
        CHECK_SKIP("no shared memory");
    CHECK_EQ(ncclGetUniqueId(&id), 0);
    CHECK_EQ(ncclCommInitRank(&comm, 2, id, 1), 0);
    entry = r2_comms_hold(comm);
    pthread_mutex_lock(&entry->follow->agree->lock);
    entry->follow->agree->state = R2_AGREE_READY; /* as if they had met */
    pthread_mutex_unlock(&entry->follow->agree->lock);
    atomic_store(&comm->error, R2_NCCL_REMOTE);
    CHECK_EQ(pthread_create(&first, NULL, poll_error, comm), 0);
    AWAIT(telling(entry->follow->agree));
    atomic_store(&comm->error, R2_NCCL_REMOTE);
    CHECK_EQ(async_error(comm), R2_NCCL_REMOTE);
    CHECK_EQ(failures(entry, "ncclRemoteError"), 1);
    CHECK_EQ(pthread_join(first, &result), 0);
    CHECK_EQ((int)(intptr_t)result, R2_NCCL_REMOTE);
    atomic_store(&comm->error, R2_NCCL_SYSTEM);
    CHECK_EQ(async_error(comm), R2_NCCL_SYSTEM);
    CHECK_EQ(failures(entry, ""), 1);
    r2_comms_drop(entry);
    CHECK_EQ(ncclCommAbort(comm), 0);
}

int main(int argc, char **argv)
{
    static const struct r2_control_info info = {.rank = -1};
    char name[R2_CONTROL_NAME];
    int rc;

    noop_bed("shadow");
    setenv("R2CCL_SHM", "1", 1);
    if (r2_control_open(&control, &info))
        control = NULL;
    snprintf(name, sizeof(name), "%s", control ? r2_control_name(control) : "");
    rc = check_main(argc, argv);
    if (control)
        shm_unlink(name);
    return rc;
}
