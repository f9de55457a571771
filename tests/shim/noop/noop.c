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
#include "api/nccl.def"
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

static atomic_int failing, holding;

void noop_fail_inits(int n)
{
    atomic_store(&failing, n);
}

void noop_hold_inits(int on)
{
    atomic_store(&holding, on);
}

static __thread struct {
    int n;
    r2_nccl_comm comms[NOOP_TRACE];
    size_t counts[NOOP_TRACE];
} traced __attribute__((tls_model("initial-exec")));

void noop_trace(void)
{
    traced.n = 0;
}

int noop_traced(r2_nccl_comm *comms, size_t *counts)
{
    memcpy(comms, traced.comms, sizeof(traced.comms));
    memcpy(counts, traced.counts, sizeof(traced.counts));
    return traced.n;
}

void noop_traces(r2_nccl_comm comm, size_t count)
{
    if (noop_within || traced.n == NOOP_TRACE)
        return;
    traced.comms[traced.n] = comm;
    traced.counts[traced.n++] = count;
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
#include "api/nccl.def"
API int ncclBroadcast(const void *send, void *recv, size_t count, int type, int root,
                      r2_nccl_comm comm, r2_nccl_stream stream);

/* As on a peer that does not answer. */
static int wait_for_peers(r2_nccl_comm comm, int result)
{
    if (!comm || atomic_load(&comm->answered) || !atomic_load_explicit(&hang, memory_order_relaxed))
        return result;
    atomic_fetch_add(&comm->inside, 1);
    while (atomic_load(&hang) && !atomic_load(&comm->aborted))
        usleep(1000);
    if (atomic_load(&comm->aborted))
        result = R2_NCCL_INTERNAL;
    atomic_fetch_sub(&comm->inside, 1);
    return result;
}

/* The thread's open group: what it ends is told to stop in the call, and waited for and freed at
 * the group's end. It launches nothing, and frees nothing, once a call in it has failed. */
struct late {
    r2_nccl_comm comm;
    bool frees;
};
static __thread struct {
    int depth, error, n;
    struct late late[16];
} group __attribute__((tls_model("initial-exec")));

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

/* Traces as an operation of a made-up size, and so where it came among the others. */
int ncclRedOpDestroy(int op, r2_nccl_comm comm)
{
    (void)op;
    noop_traces(comm, NOOP_DESTROYED);
    return noop_note(R2_API_ncclRedOpDestroy);
}

/* Traces the first number of its configuration as an operation of its own. */
API int ncclAllReduceConfig(const void *send, void *recv, size_t count, int type, int op,
                            r2_nccl_comm comm, r2_nccl_stream stream, const void *config);
int ncclAllReduceConfig(const void *send, void *recv, size_t count, int type, int op,
                        r2_nccl_comm comm, r2_nccl_stream stream, const void *config)
{
    (void)send, (void)recv, (void)type, (void)op, (void)stream;
    noop_traces(comm, count);
    if (config)
        noop_traces(comm, (size_t)((const struct r2_nccl_config *)config)->blocking);
    return noop_collective(R2_API_ncclAllReduceConfig, comm);
}

API int ncclGetVersion(int *version);
int ncclGetVersion(int *version)
{
    *version = NOOP_VERSION;
    return noop_note(R2_API_ncclGetVersion);
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

static atomic_long live;

long noop_live(void)
{
    return atomic_load(&live);
}

static atomic_int stuck;

int noop_stuck(void)
{
    return atomic_load(&stuck);
}

static void stop(r2_nccl_comm comm)
{
    if (comm->stops)
        atomic_store(comm->stops, 1);
}

static void await_stream(r2_nccl_comm comm)
{
    for (int i = 0; comm->waits && !atomic_load(comm->waits); i++) {
        if (i == 10000) {
            atomic_fetch_add(&stuck, 1);
            return;
        }
        usleep(1000);
    }
}

static void later(struct late late)
{
    if (group.depth && group.n < 16) {
        group.late[group.n++] = late;
        return;
    }
    await_stream(late.comm);
    if (!late.frees)
        return;
    while (atomic_load(&late.comm->inside))
        usleep(500);
    atomic_fetch_sub(&live, 1);
    free(late.comm);
}

static int make(enum r2_api id, r2_nccl_comm *out, int nranks, int rank)
{
    int result = noop_note(id);

    while (atomic_load(&holding) && id == R2_API_ncclCommInitRank)
        usleep(1000);
    if (id == R2_API_ncclCommInitRank && atomic_load(&failing) > 0 &&
        atomic_fetch_sub(&failing, 1) > 0)
        result = R2_NCCL_SYSTEM;
    *out = NULL;
    if (result == R2_NCCL_OK || result == R2_NCCL_IN_PROGRESS) {
        *out = calloc(1, sizeof(**out));
        atomic_fetch_add(&live, 1);
        (*out)->rank = rank;
        (*out)->nranks = nranks;
        atomic_store(&(*out)->error, result);
    }
    return result;
}

int ncclCommInitRank(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank)
{
    int result = make(R2_API_ncclCommInitRank, out, nranks, rank);

    if (*out)
        memcpy(&(*out)->id, id.bytes, sizeof((*out)->id));
    return result;
}

int ncclCommInitRankConfig(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank,
                           struct r2_nccl_config *config)
{
    int result = make(R2_API_ncclCommInitRankConfig, out, nranks, rank);

    (void)id;
    if (*out && config)
        memcpy(&(*out)->config, config,
               config->size < sizeof(*config) ? config->size : sizeof(*config));
    return result;
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
    (void)excluded, (void)config;
    if (flags & R2_NCCL_SHRINK_ABORT) {
        stop(comm);
        await_stream(comm);
    }
    if (nexcluded < 0) {
        group.error = group.depth ? R2_NCCL_ARGUMENT : 0;
        return R2_NCCL_ARGUMENT;
    }
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
        if (id == R2_API_ncclCommAbort)
            stop(comm);
        later((struct late){comm, true});
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
    if (result == R2_NCCL_OK) {
        atomic_store(&comm->revoked, 1);
        stop(comm);
        later((struct late){comm, false});
    }
    return result;
}

int ncclCommSuspend(r2_nccl_comm comm, int flags)
{
    int result = wait_for_peers(comm, noop_note(R2_API_ncclCommSuspend));

    (void)flags;
    noop_traces(comm, NOOP_SUSPENDED);
    if (result != R2_NCCL_OK)
        return result;
    switch (atomic_exchange(&comm->suspended, 1)) {
    case 0:
        return R2_NCCL_OK;
    case NOOP_SHORT:
        atomic_store(&comm->suspended, 0);
        return R2_NCCL_SYSTEM;
    default:
        return R2_NCCL_USAGE;
    }
}

int ncclCommResume(r2_nccl_comm comm)
{
    int result = noop_note(R2_API_ncclCommResume);

    noop_traces(comm, NOOP_RESUMED);
    return result == R2_NCCL_OK && !atomic_exchange(&comm->suspended, 0) ? R2_NCCL_USAGE : result;
}

/* A communicator in the making is made when it has been asked about once. */
int ncclCommGetAsyncError(r2_nccl_comm comm, int *error)
{
    atomic_fetch_add(&comm->asking, 1);
    while (atomic_load(&comm->hold_asks))
        usleep(1000);
    *error = atomic_exchange(&comm->error, R2_NCCL_OK);
    atomic_fetch_sub(&comm->asking, 1);
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
    int result = noop_note(id), error = group.error, n = group.n;

    group.depth -= group.depth > 0;
    if (group.depth)
        return result;
    group.error = group.n = 0;
    for (int i = 0; i < n && !error; i++)
        later(group.late[i]);
    return error ? error : result;
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
