/* Life of a communicator, and who may be inside it. */
#define _GNU_SOURCE

#include "comm.h"
#include "profiler.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct info { /* what every rank tells all others */
    int32_t ndev, min_channels, max_channels;
    uint32_t net_hash;
    uint64_t host_hash;
};

void hn_comm_fail(struct ncclComm *comm, ncclResult_t result)
{
    pthread_mutex_lock(&comm->lock);
    int now = atomic_load(&comm->async);
    if (now == ncclSuccess || now == ncclInProgress)
        atomic_store(&comm->async, result);
    atomic_store(&comm->broken, 1);
    atomic_store(&comm->stop, 1);
    pthread_cond_broadcast(&comm->cond);
    pthread_mutex_unlock(&comm->lock);
}

ncclResult_t hn_comm_usable(struct ncclComm *comm)
{
    if (atomic_load(&comm->aborted))
        return hn_util_fail(ncclInternalError, "the communicator was aborted");
    return (ncclResult_t)atomic_load(&comm->async);
}

ncclResult_t hn_comm_check(struct ncclComm *comm)
{
    ncclResult_t result = hn_comm_usable(comm);
    if (result == ncclSuccess && atomic_load(&comm->revoked))
        return hn_util_fail(ncclInvalidUsage, "the communicator was revoked");
    if (result == ncclSuccess && atomic_load(&comm->suspended))
        return hn_util_fail(ncclInvalidUsage, "the communicator is suspended");
    return result;
}

ncclResult_t hn_comm_revoke(struct ncclComm *comm)
{
    pthread_mutex_lock(&comm->lock);
    bool before = atomic_exchange(&comm->revoked, true);
    atomic_store(&comm->stop, 1);
    pthread_cond_broadcast(&comm->cond);
    while (!before && comm->in_api > 1)
        pthread_cond_wait(&comm->cond, &comm->lock);
    if (!before && comm->boot) /* nobody uses it now: for a shrink or split it is good again */
        hn_boot_stop(comm->boot, &comm->broken);
    pthread_mutex_unlock(&comm->lock);
    return before ? hn_util_fail(ncclInvalidUsage, "the communicator was revoked before")
                  : hn_comm_usable(comm);
}

ncclResult_t hn_comm_enter(struct ncclComm *comm)
{
    if (!comm)
        return hn_util_fail(ncclInvalidArgument, "comm is NULL");
    pthread_mutex_lock(&comm->lock);
    bool aborted = atomic_load(&comm->aborted);
    if (!aborted)
        comm->in_api++;
    pthread_mutex_unlock(&comm->lock);
    return aborted ? hn_util_fail(ncclInvalidUsage, "the communicator was aborted") : ncclSuccess;
}

void hn_comm_leave(struct ncclComm *comm)
{
    pthread_mutex_lock(&comm->lock);
    /* Abort waits until the last one has left, revoke until all others have. */
    if (--comm->in_api == 0 || atomic_load(&comm->revoked))
        pthread_cond_broadcast(&comm->cond);
    pthread_mutex_unlock(&comm->lock);
}

ncclResult_t hn_comm_drain(struct ncclComm *comm)
{
    pthread_mutex_lock(&comm->lock);
    while ((comm->launches || comm->px_active) && !atomic_load(&comm->stop))
        pthread_cond_wait(&comm->cond, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    return hn_comm_usable(comm);
}

/* HOSTNCCL_DEVICES_PER_NODE makes several nodes of one process. */
static uint64_t host_hash(int device)
{
    char text[512] = "";
    const char *id = getenv("NCCL_HOSTID");
    long per_node = hn_util_env("HOSTNCCL_DEVICES_PER_NODE", 0, 1, 4096);
    uint64_t seed = per_node > 0 ? 2 + (uint64_t)(device / per_node) : 1;
    if (id && *id)
        return hn_util_hash(id, strlen(id), seed);
    gethostname(text, 128);
    size_t at = strlen(text);
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    if (file) {
        at += fread(text + at, 1, 64, file);
        fclose(file);
    }
    return hn_util_hash(text, at, seed);
}

static int limit(const char *first, const char *second, int configured, int def)
{
    long value = hn_util_env(first, -1, 1, HN_MAX_CHANNELS);
    if (value < 0)
        value = hn_util_env(second, -1, 1, HN_MAX_CHANNELS);
    if (value < 0 && configured != NCCL_CONFIG_UNDEF_INT)
        value = configured;
    return value < 0 ? def : (int)value;
}

static int count_nodes(const struct ncclComm *comm, const struct info *all)
{
    int nodes = 0;
    for (int r = 0; r < comm->nranks; r++) {
        int o = 0;
        while (o < r && all[o].host_hash != all[r].host_hash)
            o++;
        nodes += o == r;
    }
    return nodes;
}

/* All ranks agree on the channels: one per device of the rank that has most, within limits. */
static ncclResult_t agree(struct ncclComm *comm, int *nodes)
{
    struct info *all = calloc((size_t)comm->nranks, sizeof(*all));
    if (!all)
        return hn_util_fail(ncclSystemError, "out of memory");
    const char *name = hn_net_name(comm->net->net);
    struct info *own = &all[comm->rank];
    own->ndev = comm->net->net->ndev;
    own->min_channels = limit("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS", comm->config.minCTAs, 1);
    own->max_channels =
        limit("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS", comm->config.maxCTAs, HN_MAX_CHANNELS);
    own->net_hash = (uint32_t)hn_util_hash(name, strlen(name), 2);
    own->host_hash = host_hash(comm->device);
    ncclResult_t result = hn_boot_allgather(comm->boot, all, sizeof(*all));
    int most = 1, least = 1, cap = HN_MAX_CHANNELS;
    for (int r = 0; r < comm->nranks && result == ncclSuccess; r++) {
        most = all[r].ndev > most ? all[r].ndev : most;
        least = all[r].min_channels > least ? all[r].min_channels : least;
        cap = all[r].max_channels < cap ? all[r].max_channels : cap;
        if (all[r].net_hash != own->net_hash)
            result = hn_util_fail(ncclInvalidUsage,
                                  "rank %d uses another network than rank %d's "
                                  "%s",
                                  r, comm->rank, name);
    }
    comm->channels = most < least ? least : most;
    comm->channels = comm->channels > cap ? cap : comm->channels;
    *nodes = count_nodes(comm, all);
    free(all);
    HN_INFO("rank %d of %d, comm 0x%llx: stand-in for NCCL, nNodes %d, %d channels over NET/%s",
            comm->rank, comm->nranks, (unsigned long long)comm->id, *nodes, comm->channels, name);
    return result;
}

static ncclResult_t make_rings(struct ncclComm *comm)
{
    int n = comm->channels, next = (comm->rank + 1) % comm->nranks;
    int prev = (comm->rank + comm->nranks - 1) % comm->nranks;
    size_t pairs = (size_t)comm->nranks * (size_t)n;
    comm->ring_send = calloc((size_t)n, sizeof(void *));
    comm->ring_recv = calloc((size_t)n, sizeof(void *));
    comm->p2p_send = calloc(pairs, sizeof(void *));
    comm->p2p_recv = calloc(pairs, sizeof(void *));
    if (!comm->ring_send || !comm->ring_recv || !comm->p2p_send || !comm->p2p_recv)
        return hn_util_fail(ncclSystemError, "out of memory");
    if (comm->nranks == 1)
        return ncclSuccess;
    for (int c = 0; c < n; c++) {
        comm->ring_send[c] = hn_conn_new(comm, next, c, true, false);
        comm->ring_recv[c] = hn_conn_new(comm, prev, c, false, false);
        if (!comm->ring_send[c] || !comm->ring_recv[c])
            return hn_util_fail(ncclSystemError, "out of memory");
    }
    return hn_conn_setup(comm, comm->ring_send, n, comm->ring_recv, n);
}

ncclResult_t hn_comm_create(struct ncclComm *comm, struct hn_boot *boot, struct hn_netctx *share)
{
    comm->boot = boot;
    int nodes = 0;
    ncclResult_t result = ncclSuccess;
    int traffic = comm->config.trafficClass;
    if (share) {
        hn_net_share(share);
        comm->net = share;
    } else {
        const char *name = comm->net_name[0] ? comm->net_name : getenv("NCCL_NET");
        if (traffic == NCCL_CONFIG_UNDEF_INT)
            traffic = R2_NCCL_TRAFFIC_CLASS_UNDEF;
        result = hn_net_open(comm->id, name, traffic, &comm->net);
    }
    if (result == ncclSuccess)
        result = agree(comm, &nodes);
    if (result != ncclSuccess)
        return result;
    hn_prof_open(comm, nodes);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    long gpu = cores / 4 < 1 ? 1 : cores / 4 > 8 ? 8 : cores / 4;
    comm->gpu_threads = (int)hn_util_env("HOSTNCCL_GPU_THREADS", gpu, 1, HN_MAX_GPU_THREADS);
    if (hn_service_start(comm) || hn_progress_start(comm) || hn_gpu_start(comm))
        return hn_util_fail(ncclSystemError, "cannot start the communicator's threads");
    result = make_rings(comm);
    if (result != ncclSuccess)
        return result;
    uint8_t *ready = calloc((size_t)comm->nranks, 1); /* nobody starts before all are ready */
    if (!ready)
        return hn_util_fail(ncclSystemError, "out of memory");
    result = hn_boot_allgather(comm->boot, ready, 1);
    free(ready);
    return result;
}

static int collect(struct hn_conn **from, size_t count, struct hn_job *jobs, int at)
{
    for (size_t i = 0; from && i < count; i++) {
        if (!from[i])
            continue;
        jobs[at].conn = from[i];
        jobs[at++].step = hn_conn_close;
    }
    return at;
}

static void close_conns(struct ncclComm *comm)
{
    size_t rings = (size_t)comm->channels, pairs = rings * (size_t)comm->nranks;
    struct hn_job *jobs = calloc(2 * (rings + pairs) + 1, sizeof(*jobs));
    if (!jobs)
        return;
    int count = collect(comm->ring_send, rings, jobs, 0);
    count = collect(comm->ring_recv, rings, jobs, count);
    count = collect(comm->p2p_send, pairs, jobs, count);
    count = collect(comm->p2p_recv, pairs, jobs, count);
    if (comm->threads_started & 1)
        hn_service_run(comm, jobs, count, 0);
    for (int i = 0; i < count; i++)
        free(jobs[i].conn);
    free(jobs);
}

void hn_comm_free(struct ncclComm *comm)
{
    if (comm->init_threaded)
        pthread_join(comm->init_thread, NULL);
    hn_progress_stop(comm);
    hn_gpu_stop(comm);
    close_conns(comm);
    hn_service_stop(comm);
    hn_boot_free(comm->boot);
    hn_prof_close(comm);
    if (comm->net)
        hn_net_close(comm->net);
    free(comm->ring_send);
    free(comm->ring_recv);
    free(comm->p2p_send);
    free(comm->p2p_recv);
    pthread_mutex_destroy(&comm->lock);
    pthread_cond_destroy(&comm->cond);
    free(comm);
}
