#include "noop.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef NOOP_VERSION
#define NOOP_VERSION 23203
#endif

static const char *const names[R2_API_COUNT] = {
#define R2_PLAIN(name, since, params, args) #name,
#define R2_COMM(name, since, params, args) #name,
#define R2_BYPASS(name, since, what, params, args) #name,
#define R2_COLL(name, since, kind, params, args) #name,
#define R2_P2P(name, since, kind, params, args) #name,
#define R2_OWN(name, since, ret, params) #name,
#include "nccl/nccl.def"
};

static atomic_long calls[R2_API_COUNT];
static atomic_int next_result, hang;
/* Initial-exec, as a thread's other variables: thread sanitizers take the dynamic linker's reuse of
 * dynamic ones for a race. */
__thread int noop_within __attribute__((tls_model("initial-exec")));

long noop_calls(const char *name)
{
    for (int i = 0; i < R2_API_COUNT; i++)
        if (!strcmp(names[i], name))
            return atomic_load(&calls[i]);
    return -1;
}

void noop_next_result(int result)
{
    atomic_store(&next_result, result);
}

void noop_hang(int on)
{
    atomic_store(&hang, on);
}

int noop_note(enum r2_api id)
{
    if (!noop_within)
        atomic_fetch_add_explicit(&calls[id], 1, memory_order_relaxed);
    if (atomic_load_explicit(&next_result, memory_order_relaxed))
        return atomic_exchange(&next_result, 0);
    return R2_NCCL_OK;
}

#define R2_OWN(name, since, ret, params) API ret name params;
#include "../../pause.h"
#include "nccl/nccl.def"
API int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root,
                      r2_nccl_comm comm, r2_nccl_stream stream);

static __thread struct {
    int depth, error;
    r2_nccl_comm comm; /* of an operation in it */
} group __attribute__((tls_model("initial-exec")));

/* As on a peer that does not answer. In a group that is its end's business. */
static int wait_for_peers(r2_nccl_comm comm, int result)
{
    if (!comm || !atomic_load_explicit(&hang, memory_order_relaxed))
        return result;
    if (group.depth) {
        group.comm = comm;
        return result;
    }
    atomic_fetch_add(&comm->inside, 1);
    UNTIL(!atomic_load(&hang) || atomic_load(&comm->aborted));
    if (atomic_load(&comm->aborted))
        result = R2_NCCL_INTERNAL;
    atomic_fetch_sub(&comm->inside, 1);
    return result;
}

int noop_enqueue(enum r2_api id)
{
    int result = noop_note(id);

    if (result != R2_NCCL_OK && result != R2_NCCL_IN_PROGRESS && group.depth && !noop_within)
        group.error = group.error ? group.error : result;
    return result;
}

int noop_collective(enum r2_api id, r2_nccl_comm comm)
{
    int result = noop_enqueue(id);

    noop_within++;
    ncclGroupStart();
    ncclGroupEnd();
    noop_within--;
    if (comm && atomic_load_explicit(&comm->revoked, memory_order_relaxed))
        return R2_NCCL_USAGE;
    return wait_for_peers(comm, result);
}

API int ncclBcast(void *buffer, size_t count, int type, int root, r2_nccl_comm comm,
                  r2_nccl_stream stream);
int ncclBcast(void *buffer, size_t count, int type, int root, r2_nccl_comm comm,
              r2_nccl_stream stream)
{
    int result = noop_note(R2_API_ncclBcast);

    noop_within++;
    if (!result)
        result = ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
    noop_within--;
    return result;
}

API int ncclGetVersion(int *version);
int ncclGetVersion(int *version)
{
    *version = NOOP_VERSION;
    return noop_note(R2_API_ncclGetVersion);
}

int ncclSetEncryption(const void *config)
{
    (void)config;
    return noop_note(R2_API_ncclSetEncryption);
}

const char *ncclGetErrorString(int result)
{
    noop_note(R2_API_ncclGetErrorString);
    return result ? "no-op error" : "no error";
}

const char *ncclGetLastError(r2_nccl_comm comm)
{
    (void)comm;
    noop_note(R2_API_ncclGetLastError);
    return "";
}

int ncclGetUniqueId(struct r2_nccl_id *id)
{
    static atomic_int serial;
    int number = atomic_fetch_add(&serial, 1) + 1;

    memset(id, 0, sizeof(*id));
    memcpy(id->bytes, &number, sizeof(number));
    return noop_note(R2_API_ncclGetUniqueId);
}

static int make(enum r2_api id, r2_nccl_comm *out, int nranks, int rank)
{
    int result = noop_note(id);

    *out = NULL;
    if (result == R2_NCCL_OK || result == R2_NCCL_IN_PROGRESS) {
        *out = calloc(1, sizeof(**out));
        (*out)->rank = rank;
        (*out)->nranks = nranks;
        atomic_store(&(*out)->error, result);
    }
    return result;
}

int ncclCommInitRank(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank)
{
    (void)id;
    return make(R2_API_ncclCommInitRank, out, nranks, rank);
}

int ncclCommInitRankConfig(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank,
                           struct r2_nccl_config *config)
{
    (void)id, (void)config;
    return make(R2_API_ncclCommInitRankConfig, out, nranks, rank);
}

int ncclCommInitRankScalable(r2_nccl_comm *out, int nranks, int rank, int nids,
                             struct r2_nccl_id *ids, struct r2_nccl_config *config)
{
    (void)nids, (void)ids, (void)config;
    return make(R2_API_ncclCommInitRankScalable, out, nranks, rank);
}

int ncclCommInitAll(r2_nccl_comm *comms, int ndev, const int *devices)
{
    struct r2_nccl_id id;
    int result = noop_note(R2_API_ncclCommInitAll);

    (void)devices;
    noop_within++;
    ncclGetUniqueId(&id);
    for (int i = 0; i < ndev && !result; i++)
        result = ncclCommInitRank(&comms[i], ndev, id, i);
    noop_within--;
    return result;
}

int ncclCommSplit(r2_nccl_comm comm, int color, int key, r2_nccl_comm *out,
                  struct r2_nccl_config *config)
{
    (void)key, (void)config;
    if (color < 0) {
        *out = NULL;
        return noop_note(R2_API_ncclCommSplit);
    }
    return make(R2_API_ncclCommSplit, out, comm->nranks, comm->rank);
}

int ncclCommShrink(r2_nccl_comm comm, int *excluded, int nexcluded, r2_nccl_comm *out,
                   struct r2_nccl_config *config, int flags)
{
    (void)excluded, (void)config, (void)flags;
    return make(R2_API_ncclCommShrink, out, comm->nranks - nexcluded, comm->rank);
}

int ncclCommGrow(r2_nccl_comm comm, int nranks, const struct r2_nccl_id *id, int rank,
                 r2_nccl_comm *out, struct r2_nccl_config *config)
{
    (void)id, (void)config;
    return make(R2_API_ncclCommGrow, out, nranks, rank >= 0 ? rank : comm->rank);
}

int ncclCommFinalize(r2_nccl_comm comm)
{
    return wait_for_peers(comm, noop_note(R2_API_ncclCommFinalize));
}

static int end(enum r2_api id, r2_nccl_comm comm)
{
    if (comm) {
        atomic_store(&comm->aborted, 1);
        UNTIL(!atomic_load(&comm->inside));
        free(comm);
    }
    return noop_note(id);
}

int ncclCommDestroy(r2_nccl_comm comm)
{
    return end(R2_API_ncclCommDestroy, comm);
}

int ncclCommAbort(r2_nccl_comm comm)
{
    return end(R2_API_ncclCommAbort, comm);
}

int ncclCommRevoke(r2_nccl_comm comm, int flags)
{
    int result = wait_for_peers(comm, noop_note(R2_API_ncclCommRevoke));

    (void)flags;
    if (result == R2_NCCL_OK)
        atomic_store(&comm->revoked, 1);
    return result;
}

int ncclCommSuspend(r2_nccl_comm comm, int flags)
{
    int result = wait_for_peers(comm, noop_note(R2_API_ncclCommSuspend));

    (void)flags;
    return result;
}

int ncclCommResume(r2_nccl_comm comm)
{
    (void)comm;
    return noop_note(R2_API_ncclCommResume);
}

/* A communicator in the making is made when it has been asked about once. */
int ncclCommGetAsyncError(r2_nccl_comm comm, int *error)
{
    *error = atomic_exchange(&comm->error, R2_NCCL_OK);
    return noop_note(R2_API_ncclCommGetAsyncError);
}

API int ncclCommCount(const r2_nccl_comm comm, int *count);
int ncclCommCount(const r2_nccl_comm comm, int *count)
{
    *count = comm->nranks;
    return noop_note(R2_API_ncclCommCount);
}

API int ncclCommUserRank(const r2_nccl_comm comm, int *rank);
int ncclCommUserRank(const r2_nccl_comm comm, int *rank)
{
    *rank = comm->rank;
    return noop_note(R2_API_ncclCommUserRank);
}

API int ncclCommCuDevice(const r2_nccl_comm comm, int *device);
int ncclCommCuDevice(const r2_nccl_comm comm, int *device)
{
    *device = comm->rank;
    return noop_note(R2_API_ncclCommCuDevice);
}

int ncclGroupStart(void)
{
    int result = noop_note(R2_API_ncclGroupStart);

    group.depth += result == R2_NCCL_OK;
    return result;
}

static int over(enum r2_api id)
{
    r2_nccl_comm comm = group.comm;
    int result = noop_note(id), error = group.error;

    group.depth -= group.depth > 0;
    if (group.depth)
        return result;
    group.comm = NULL;
    group.error = 0;
    return error ? error : wait_for_peers(comm, result);
}

int ncclGroupEnd(void)
{
    return over(R2_API_ncclGroupEnd);
}

int ncclGroupSimulateEnd(void *info)
{
    (void)info;
    return over(R2_API_ncclGroupSimulateEnd);
}
