/* NCCL's public functions: arguments are checked here, the work is done elsewhere. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "group.h"

#define API __attribute__((visibility("default")))

API ncclResult_t ncclGetVersion(int *version)
{
    if (!version)
        return hn_util_fail(ncclInvalidArgument, "version is NULL");
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

API const char *ncclGetErrorString(ncclResult_t result)
{
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error";
    case ncclSystemError:
        return "unhandled system error";
    case ncclInternalError:
        return "internal error";
    case ncclInvalidArgument:
        return "invalid argument";
    case ncclInvalidUsage:
        return "invalid usage";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    default:
        return "unknown result code";
    }
}

API const char *ncclGetLastError(ncclComm_t comm)
{
    (void)comm;
    return hn_util_last_error();
}

API ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    return id ? hn_boot_new_id(id) : hn_util_fail(ncclInvalidArgument, "id is NULL");
}

static void *background_init(void *arg)
{
    struct hn_init *init = arg;
    hn_init_run(init);
    free(init);
    return NULL;
}

/* A non-blocking communicator is made by a thread of its own; the caller polls. */
static ncclResult_t start_init(struct hn_init *init)
{
    struct ncclComm *comm = init->comm;
    comm->in_api = 1; /* until it is made */
    if (comm->config.blocking != 0)
        return hn_group_init(init);
    init->result = ncclSystemError; /* unless it starts */
    struct hn_init *copy = malloc(sizeof(*copy));
    if (copy) {
        *copy = *init;
        comm->init_threaded = true;
        if (!pthread_create(&comm->init_thread, NULL, background_init, copy))
            return ncclInProgress;
        comm->init_threaded = false;
        free(copy);
    }
    hn_init_over(init);
    return hn_util_fail(ncclSystemError, "no thread for the communicator");
}

static ncclResult_t init_rank(ncclComm_t *out, int nranks, const ncclUniqueId *id, int rank,
                              int device, const ncclConfig_t *config)
{
    struct hn_init init = {.out = out, .id = *id};
    ncclResult_t result = hn_init_prepare(&init, nranks, rank, device, config);
    return result == ncclSuccess ? start_init(&init) : result;
}

static int default_device(void)
{
    return (int)hn_util_env("LOCAL_RANK", 0, 0, 1 << 20);
}

API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank)
{
    return init_rank(comm, nranks, &id, rank, default_device(), NULL);
}

API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                        ncclConfig_t *config)
{
    return init_rank(comm, nranks, &id, rank, default_device(), config);
}

API ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devlist)
{
    ncclUniqueId id;
    if (!comms || ndev < 1)
        return hn_util_fail(ncclInvalidArgument, "comms is NULL or ndev %d below 1", ndev);
    ncclResult_t result = hn_boot_new_id(&id);
    if (result != ncclSuccess)
        return result;
    ncclGroupStart();
    for (int i = 0; i < ndev && result == ncclSuccess; i++)
        result = init_rank(&comms[i], ndev, &id, i, devlist ? devlist[i] : i, NULL);
    ncclResult_t end = ncclGroupEnd();
    return result == ncclSuccess ? end : result;
}

API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                               ncclConfig_t *config)
{
    if (color < 0 && color != NCCL_SPLIT_NOCOLOR)
        return hn_util_fail(ncclInvalidArgument, "color %d is negative", color);
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    result = hn_comm_usable(comm);
    struct hn_init init = {.out = newcomm, .parent = comm, .color = color, .key = key};
    if (result == ncclSuccess)
        result = hn_init_prepare(&init, comm->nranks, comm->rank, comm->device, config);
    if (result != ncclSuccess) {
        hn_comm_leave(comm);
        return result;
    }
    return start_init(&init);
}

/* Old ranks of those who stay, in init->stay. */
static ncclResult_t list_stays(struct hn_init *init, const int *excluded, int nexcluded)
{
    const struct ncclComm *parent = init->parent;
    init->stay = calloc((size_t)parent->nranks, sizeof(*init->stay));
    if (!init->stay)
        return hn_util_fail(ncclSystemError, "out of memory");
    for (int r = 0; r < parent->nranks; r++) {
        bool out = false;
        for (int i = 0; i < nexcluded; i++)
            out |= excluded[i] == r;
        if (out && r == parent->rank)
            return hn_util_fail(ncclInvalidArgument, "rank %d is excluded and calls", r);
        if (!out)
            init->stay[init->stays++] = r;
    }
    if (init->stays + nexcluded != parent->nranks)
        return hn_util_fail(ncclInvalidArgument, "excluded ranks come twice or do not exist");
    return ncclSuccess;
}

/* Only what NCCL does without NCCL_SHRINK_ABORT: the parent's operations go on. */
API ncclResult_t ncclCommShrink(ncclComm_t comm, int *excluded, int nexcluded, ncclComm_t *newcomm,
                                ncclConfig_t *config, int flags)
{
    if (!excluded || nexcluded < 1 || flags != NCCL_SHRINK_DEFAULT)
        return hn_util_fail(ncclInvalidArgument, "%d ranks excluded, flags %d", nexcluded, flags);
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    result = hn_comm_usable(comm);
    struct hn_init init = {.out = newcomm, .parent = comm};
    if (result == ncclSuccess)
        result = list_stays(&init, excluded, nexcluded);
    if (result == ncclSuccess)
        result = hn_init_prepare(&init, comm->nranks, comm->rank, comm->device, config);
    if (result != ncclSuccess) {
        free(init.stay);
        hn_comm_leave(comm);
        return result;
    }
    return start_init(&init);
}

API ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *id)
{
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    result = hn_comm_check(comm);
    if (result == ncclSuccess)
        result = id ? hn_boot_new_id(id) : hn_util_fail(ncclInvalidArgument, "id is NULL");
    hn_comm_leave(comm);
    return result;
}

API ncclResult_t ncclCommGrow(ncclComm_t comm, int nranks, const ncclUniqueId *id, int rank,
                              ncclComm_t *newcomm, ncclConfig_t *config)
{
    if (comm ? rank != -1 || nranks <= comm->nranks : !id)
        return hn_util_fail(ncclInvalidArgument, "%s rank %d of %d, %s id", comm ? "old" : "new",
                            rank, nranks, id ? "with" : "no");
    if (!comm)
        return init_rank(newcomm, nranks, id, rank, default_device(), config);
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    result = hn_comm_check(comm);
    struct hn_init init = {.out = newcomm, .parent = comm, .grows = true, .has_id = id};
    if (id)
        init.id = *id;
    if (result == ncclSuccess)
        result = hn_init_prepare(&init, nranks, comm->rank, comm->device, config);
    if (result != ncclSuccess) {
        hn_comm_leave(comm);
        return result;
    }
    return start_init(&init);
}

API ncclResult_t ncclCommRevoke(ncclComm_t comm, int flags)
{
    if (flags != NCCL_REVOKE_DEFAULT)
        return hn_util_fail(ncclInvalidArgument, "flags %d", flags);
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    result = hn_comm_revoke(comm);
    hn_comm_leave(comm);
    return result;
}

/* A pause: memory stays where it is. */
static ncclResult_t pause_comm(struct ncclComm *comm, bool suspend)
{
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    if (suspend)
        result = hn_comm_check(comm);
    if (result == ncclSuccess)
        result = hn_comm_drain(comm);
    if (result == ncclSuccess && atomic_exchange(&comm->suspended, suspend) == suspend)
        result = hn_util_fail(ncclInvalidUsage, "the communicator is not suspended");
    hn_comm_leave(comm);
    return result;
}

API ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags)
{
    if (flags & ~NCCL_SUSPEND_MEM || hn_group_open())
        return hn_util_fail(ncclInvalidArgument, "flags %d, or in a group", flags);
    return pause_comm(comm, true);
}

API ncclResult_t ncclCommResume(ncclComm_t comm)
{
    return pause_comm(comm, false);
}

API ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    if (atomic_exchange(&comm->finalized, true))
        result = hn_util_fail(ncclInvalidUsage, "the communicator was finalized before");
    else
        result = hn_comm_drain(comm);
    hn_comm_leave(comm);
    return result;
}

static void wait_left(struct ncclComm *comm)
{
    pthread_mutex_lock(&comm->lock);
    while (comm->in_api)
        pthread_cond_wait(&comm->cond, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
}

API ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm)
        return ncclSuccess;
    hn_comm_drain(comm);
    wait_left(comm);
    hn_comm_free(comm);
    return ncclSuccess;
}

API ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!comm)
        return ncclSuccess;
    pthread_mutex_lock(&comm->lock);
    atomic_store(&comm->aborted, true);
    pthread_mutex_unlock(&comm->lock);
    hn_comm_fail(comm, ncclInternalError);
    wait_left(comm);
    hn_comm_free(comm);
    return ncclSuccess;
}

API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    *error = (ncclResult_t)atomic_load(&comm->async);
    hn_comm_leave(comm);
    return ncclSuccess;
}

static ncclResult_t tell(const struct ncclComm *comm, int *out, int value)
{
    if (!comm || !out)
        return hn_util_fail(ncclInvalidArgument, "comm or the result pointer is NULL");
    *out = value;
    return ncclSuccess;
}

API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    return tell(comm, count, comm ? comm->nranks : 0);
}

API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    return tell(comm, device, comm ? comm->device : 0);
}

API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    return tell(comm, rank, comm ? comm->rank : 0);
}

API ncclResult_t ncclMemAlloc(void **ptr, size_t size)
{
    if (!ptr)
        return hn_util_fail(ncclInvalidArgument, "ptr is NULL");
    *ptr = aligned_alloc(4096, (size + 4096) / 4096 * 4096);
    return *ptr ? ncclSuccess : hn_util_fail(ncclSystemError, "no memory for %zu bytes", size);
}

API ncclResult_t ncclMemFree(void *ptr)
{
    free(ptr);
    return ncclSuccess;
}

API ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle)
{
    if (!comm || !handle || (!buff && size))
        return hn_util_fail(ncclInvalidArgument, "comm, buffer or handle is NULL");
    *handle = malloc(1); /* host buffers need no registration: only a name to give back */
    return *handle ? ncclSuccess : ncclSystemError;
}

API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
{
    free(handle);
    return comm ? ncclSuccess : hn_util_fail(ncclInvalidArgument, "comm is NULL");
}

API ncclResult_t hostncclSynchronize(ncclComm_t comm)
{
    ncclResult_t result = hn_comm_enter(comm);
    if (result != ncclSuccess)
        return result;
    pthread_mutex_lock(&comm->lock);
    while (comm->launches)
        pthread_cond_wait(&comm->cond, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    result = hn_comm_check(comm);
    hn_comm_leave(comm);
    return result;
}
