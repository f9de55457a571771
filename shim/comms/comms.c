/* The table of communicators. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comms/follow.h"
#include "comms/inside.h"
#include "comms/watch.h"
#include "real/nest.h"
#include "util/clock.h"
#include "util/hash.h"
#include "util/log.h"

#define TRY_AGAIN_NS (200 * R2_NS_PER_MS)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards table and row numbers */
static struct r2_hash table;
static atomic_uint_fast64_t tried_ns; /* when an unseen row was last looked for */

static uint64_t key_of(r2_nccl_comm handle)
{
    return (uint64_t)(uintptr_t)handle;
}

struct r2_comm *r2_comms_hold(r2_nccl_comm handle)
{
    struct r2_comm *comm;

    pthread_mutex_lock(&lock);
    comm = table.slots ? r2_hash_get(&table, key_of(handle)) : NULL;
    if (comm)
        atomic_fetch_add_explicit(&comm->holders, 1, memory_order_relaxed);
    pthread_mutex_unlock(&lock);
    return comm;
}

void r2_comms_drop(struct r2_comm *comm)
{
    /* Release: what this holder did comes before the free. Acquire: the one that frees sees it. */
    if (atomic_fetch_sub_explicit(&comm->holders, 1, memory_order_acq_rel) != 1)
        return;
    if (comm->follow)
        r2_follow_free(comm->follow);
    free(comm);
}

/* Rank, size and device as NCCL says, where the call that made it did not. */
static void ask(struct r2_comm *comm, int rank, int nranks)
{
    int (*get_rank)(r2_nccl_comm, int *) = comm->real->fn[R2_API_ncclCommUserRank];
    int (*get_count)(r2_nccl_comm, int *) = comm->real->fn[R2_API_ncclCommCount];
    int (*get_device)(r2_nccl_comm, int *) = comm->real->fn[R2_API_ncclCommCuDevice];
    int device = -1;

    r2_call_nest();
    if (rank < 0 && (!get_rank || get_rank(comm->handle, &rank)))
        rank = -1;
    if (nranks <= 0 && (!get_count || get_count(comm->handle, &nranks)))
        nranks = 0;
    if (!get_device || get_device(comm->handle, &device))
        device = -1;
    r2_call_unnest();
    r2_comm_row_ranks(comm, rank, nranks, device);
}

/* Why the ranks of a communicator do not meet. */
static const char *apart(const struct r2_comm_birth *birth)
{
    if (birth->nonblocking)
        return "it is non-blocking (blocking=0 or NCCL_COMM_BLOCKING=0)";
    return "it was made by ncclCommInitAll, ncclCommInitRankScalable or ncclCommGrow, or out of a "
           "communicator without; ncclCommInitRank and ncclCommInitRankConfig have plans";
}

/* Its agreement with the other ranks. Every rank that took part in a split counts it. */
static void follow(struct r2_comm *comm, const struct r2_comm_birth *birth)
{
    struct r2_follow *parent = birth->from ? birth->from->follow : NULL;
    bool meets = !birth->nonblocking && (parent || birth->has_id);
    struct r2_follow_birth is = {0};

    if (comm)
        is = (struct r2_follow_birth){.rank = comm->unseen.rank,
                                      .nranks = (int)comm->unseen.ranks,
                                      .device = comm->unseen.device};
    if (parent && (!comm || !meets))
        r2_follow_skip(parent, birth->salt);
    else if (parent)
        comm->follow = r2_follow_child(comm, parent, birth->salt, &is);
    else if (comm && meets && r2_follow_wanted())
        comm->follow = r2_follow_new(comm, &birth->nccl_id, &is);
    if (comm && !meets && comm->unseen.ranks != 1)
        r2_follow_lacks(comm, apart(birth));
}

static struct r2_comm *make(r2_nccl_comm handle, const struct r2_comm_birth *birth)
{
    struct r2_comm *comm = calloc(1, sizeof(*comm));

    if (!comm) {
        R2_WARN_ONCE("no memory to follow a communicator: it runs without plan changes");
        return NULL;
    }
    comm->handle = handle;
    comm->real = birth->real;
    comm->id = birth->id;
    comm->parent = birth->parent;
    atomic_init(&comm->holders, 2); /* the table, and this function */
    atomic_init(&comm->row, &comm->unseen);
    atomic_init(&comm->row_number, -1);
    comm->unseen.id = birth->id;
    comm->unseen.parent = birth->parent;
    comm->unseen.device = -1;
    comm->unseen.rank = birth->rank;
    comm->unseen.ranks = birth->nranks > 0 ? (uint32_t)birth->nranks : 0;
    comm->unseen.used = 1;
    r2_comm_row_name(comm, birth->name);
    r2_comms_state(comm, birth->pending ? R2_SEG_COMM_INIT : R2_SEG_COMM_READY, NULL);
    if (!birth->pending)
        ask(comm, birth->rank, birth->nranks);
    return comm;
}

void r2_comms_add(r2_nccl_comm handle, const struct r2_comm_birth *birth)
{
    struct r2_comm *comm = handle ? make(handle, birth) : NULL, *old;
    int rc;

    follow(comm, birth);
    if (!comm)
        return;
    pthread_mutex_lock(&lock);
    if (!table.slots)
        r2_hash_init(&table);
    /* A handle that was freed behind our back (an NCCL function that we do not know). */
    old = r2_hash_del(&table, key_of(handle));
    if (old)
        r2_comm_row_detach(old);
    rc = r2_hash_put(&table, key_of(handle), comm);
    if (rc == 0)
        r2_comm_row_attach(comm, r2_now_ns());
    pthread_mutex_unlock(&lock);
    if (old)
        r2_comms_drop(old);
    if (rc)
        r2_comms_drop(comm);
    r2_comms_drop(comm);
}

void r2_comms_remove(r2_nccl_comm handle, bool aborted)
{
    struct r2_comm *comm;

    pthread_mutex_lock(&lock);
    comm = table.slots ? r2_hash_del(&table, key_of(handle)) : NULL;
    if (comm)
        r2_comm_row_detach(comm);
    pthread_mutex_unlock(&lock);
    if (comm && comm->follow)
        (aborted ? r2_follow_abort : r2_follow_end)(comm->follow);
    if (comm)
        r2_comms_drop(comm);
}

int r2_comms_count(void)
{
    int count;

    pthread_mutex_lock(&lock);
    count = table.slots ? (int)r2_hash_count(&table) : 0;
    pthread_mutex_unlock(&lock);
    return count;
}

void r2_comms_row_again(struct r2_comm *comm, uint64_t now)
{
    uint64_t last = atomic_load_explicit(&tried_ns, memory_order_relaxed);

    if (now - last < TRY_AGAIN_NS || r2_comm_row_hopeless())
        return;
    if (!atomic_compare_exchange_strong(&tried_ns, &last, now))
        return;
    pthread_mutex_lock(&lock);
    if (r2_hash_get(&table, key_of(comm->handle)) == comm)
        r2_comm_row_attach(comm, now);
    pthread_mutex_unlock(&lock);
}

void r2_comms_handed(struct r2_comm *comm, int64_t collectives, int64_t p2p, int64_t bus_bytes)
{
    /* Relaxed: numbers to read. One thread at a time uses a communicator, as NCCL asks, so what
     * is stored last is the newest. */
    uint64_t more = (uint64_t)collectives, bus;
    uint64_t before = atomic_fetch_add_explicit(&comm->index, more, memory_order_relaxed);
    struct r2_seg_comm *row = r2_comm_row(comm);

    if (collectives)
        __atomic_store_n(&row->operations, before + more, __ATOMIC_RELAXED);
    if (p2p)
        __atomic_fetch_add(&row->p2p, (uint64_t)p2p, __ATOMIC_RELAXED);
    if (bus_bytes) {
        bus = __atomic_load_n(&row->bus_bytes, __ATOMIC_RELAXED) + (uint64_t)bus_bytes;
        __atomic_store_n(&row->bus_bytes, bus, __ATOMIC_RELAXED);
    }
}

bool r2_comms_gone(struct r2_comm *comm)
{
    bool gone;

    pthread_mutex_lock(&lock);
    gone = r2_hash_get(&table, key_of(comm->handle)) != comm;
    pthread_mutex_unlock(&lock);
    return gone;
}

void r2_comms_abort(struct r2_comm *comm)
{
    if (comm->follow)
        r2_follow_abort(comm->follow);
}

void r2_comms_revoked(struct r2_comm *comm)
{
    r2_comms_state(comm, R2_SEG_COMM_REVOKED, NULL);
    if (comm->follow)
        r2_follow_revoked(comm->follow);
}

void r2_comms_async(struct r2_comm *comm, r2_nccl_comm handle, int error)
{
    (void)handle;
    if (atomic_load(&comm->state) == R2_SEG_COMM_INIT && error == R2_NCCL_OK) {
        r2_comms_state(comm, R2_SEG_COMM_READY, NULL);
        ask(comm, -1, 0);
    } else if (error != R2_NCCL_OK && error != R2_NCCL_IN_PROGRESS) {
        const char *(*text)(int) = comm->real->fn[R2_API_ncclGetErrorString];
        const char *cause = "asynchronous error";

        r2_call_nest();
        if (text && atomic_load(&comm->state) != R2_SEG_COMM_FAILED)
            cause = text(error);
        r2_call_unnest();
        r2_comm_fail(comm, error, cause, NULL);
    }
}

void r2_comms_before_fork(void)
{
    pthread_mutex_lock(&lock);
}

void r2_comms_after_fork(void)
{
    pthread_mutex_unlock(&lock);
}
