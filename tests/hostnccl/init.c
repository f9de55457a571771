/* Making communicators: from a unique id, or as a part of another one. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../pause.h"
#include "group.h"

struct member { /* what the ranks of a split tell each other */
    int32_t color, key;
    struct hn_addr addr;
};

static struct ncclComm *new_comm(int nranks, int rank, int device)
{
    struct ncclComm *comm = calloc(1, sizeof(*comm));
    if (!comm)
        return NULL;
    comm->nranks = nranks;
    comm->rank = rank;
    comm->device = device;
    comm->config = (ncclConfig_t)NCCL_CONFIG_INITIALIZER;
    comm->launches_end = &comm->launches;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_cond_init(&comm->cond, NULL);
    return comm;
}

/* Only as many bytes as the caller's version has. */
static ncclResult_t read_config(struct ncclComm *comm, const ncclConfig_t *config)
{
    if (!config)
        return ncclSuccess;
    if (config->magic != NCCL_API_MAGIC)
        return hn_util_fail(ncclInvalidArgument,
                            "ncclConfig_t is not initialised with NCCL_CONFIG_INITIALIZER");
    size_t bytes = config->size < sizeof(*config) ? config->size : sizeof(*config);
    memcpy(&comm->config, config, bytes);
    if (comm->config.netName)
        strncpy(comm->net_name, comm->config.netName, sizeof(comm->net_name) - 1);
    comm->config.netName = NULL;
    return ncclSuccess;
}

ncclResult_t hn_init_prepare(struct hn_init *init, int nranks, int rank, int device,
                             const ncclConfig_t *config)
{
    struct ncclComm *parent = init->parent;
    if (!init->out)
        return hn_util_fail(ncclInvalidArgument, "newcomm is NULL");
    *init->out = NULL;
    if (!parent && (nranks < 1 || nranks > 4096 || rank < 0 || rank >= nranks))
        return hn_util_fail(ncclInvalidArgument, "rank %d of %d is not valid", rank, nranks);
    struct ncclComm *comm = new_comm(nranks, rank, device);
    if (!comm)
        return hn_util_fail(ncclSystemError, "out of memory");
    if (parent) {
        comm->config = parent->config;
        memcpy(comm->net_name, parent->net_name, sizeof(comm->net_name));
    }
    ncclResult_t result = read_config(comm, config);
    if (result != ncclSuccess) {
        hn_comm_free(comm);
        return result;
    }
    atomic_store(&comm->async, ncclInProgress);
    init->comm = comm;
    /* Given out at once, so that another thread can abort. */
    *init->out = comm;
    return ncclSuccess;
}

/* HOSTNCCL_GATE: while there is such a file, nobody gets past here. */
static void wait_at_gate(const struct ncclComm *comm)
{
    const char *gate = getenv("HOSTNCCL_GATE");
    long left = hn_util_env("HOSTNCCL_BOOTSTRAP_TIMEOUT", 60, 1, 86400) * 1000;
    (void)WITHIN_MS(left, !gate || atomic_load(&comm->stop) || access(gate, F_OK) != 0);
}

static ncclResult_t make_from_id(struct hn_init *init)
{
    struct ncclComm *comm = init->comm;
    struct hn_boot *boot = NULL;
    wait_at_gate(comm);
    comm->id = hn_util_hash(&init->id, sizeof(init->id), 3);
    ncclResult_t result = hn_boot_join(&init->id, comm->rank, comm->nranks, &comm->stop, &boot);
    return result == ncclSuccess ? hn_comm_create(comm, boot, NULL) : result;
}

/* New ranks of the members of one color, by key and old rank. */
static void place(struct ncclComm *comm, const struct ncclComm *parent, const struct member *all,
                  struct hn_addr *addrs)
{
    const struct member *own = &all[parent->rank];
    comm->nranks = 0;
    for (int r = 0; r < parent->nranks; r++) {
        if (all[r].color != own->color)
            continue;
        int place = 0;
        for (int o = 0; o < parent->nranks; o++)
            place += all[o].color == own->color &&
                     (all[o].key < all[r].key || (all[o].key == all[r].key && o < r));
        addrs[place] = all[r].addr;
        if (r == parent->rank)
            comm->rank = place;
        comm->nranks++;
    }
}

static ncclResult_t make_split(struct hn_init *init)
{
    struct ncclComm *comm = init->comm, *parent = init->parent;
    struct hn_boot *boot = NULL;
    size_t n = (size_t)parent->nranks;
    struct member *all = calloc(n, sizeof(*all));
    struct hn_addr *addrs = calloc(n, sizeof(*addrs));
    uint64_t parts[3] = {parent->id, ++parent->splits, (uint64_t)init->color};
    comm->id = hn_util_hash(parts, sizeof(parts), 4);
    ncclResult_t result = all && addrs ? ncclSuccess : ncclSystemError;
    if (result == ncclSuccess)
        result = hn_boot_open(comm->id, &comm->stop, &boot, &all[parent->rank].addr);
    if (result == ncclSuccess) {
        all[parent->rank].color = init->color;
        all[parent->rank].key = init->key;
        result = hn_boot_allgather(parent->boot, all, sizeof(*all));
    }
    bool member = init->color != NCCL_SPLIT_NOCOLOR;
    if (result == ncclSuccess && member) {
        place(comm, parent, all, addrs);
        result = hn_boot_meet(boot, comm->rank, comm->nranks, addrs);
    }
    if (result == ncclSuccess && member) {
        result = hn_comm_create(comm, boot, comm->config.splitShare == 1 ? parent->net : NULL);
        boot = NULL; /* the communicator's, whatever the result */
    }
    hn_boot_free(boot);
    free(all);
    free(addrs);
    return result;
}

/* One of the old ranks has the id that new ones join by. */
static ncclResult_t make_grown(struct hn_init *init)
{
    struct ncclComm *parent = init->parent;
    struct invitation {
        int32_t there;
        ncclUniqueId id;
    } *all = calloc((size_t)parent->nranks, sizeof(*all));
    if (!all)
        return hn_util_fail(ncclSystemError, "out of memory");
    all[parent->rank] = (struct invitation){init->has_id, init->id};
    ncclResult_t result = hn_boot_allgather(parent->boot, all, sizeof(*all));
    int root = 0;
    while (root < parent->nranks && !all[root].there)
        root++;
    if (result == ncclSuccess && root == parent->nranks)
        result = hn_util_fail(ncclInvalidUsage, "ncclCommGrow: no rank has a unique id");
    if (result == ncclSuccess) {
        init->id = all[root].id;
        result = make_from_id(init);
    }
    free(all);
    return result;
}

/* Without those who do not stay, who may be gone: every pair of the others speaks for itself. */
static ncclResult_t make_shrink(struct hn_init *init)
{
    struct ncclComm *comm = init->comm, *parent = init->parent;
    const int *stay = init->stay;
    struct hn_boot *boot = NULL;
    struct hn_addr *addrs = calloc((size_t)init->stays, sizeof(*addrs));
    uint64_t parts[3] = {parent->id, ++parent->splits,
                         hn_util_hash(stay, (size_t)init->stays * sizeof(*stay), 5)};
    comm->id = hn_util_hash(parts, sizeof(parts), 6);
    comm->nranks = init->stays;
    for (comm->rank = 0; stay[comm->rank] != parent->rank;)
        comm->rank++;
    ncclResult_t result = addrs ? ncclSuccess : ncclSystemError;
    if (result == ncclSuccess)
        result = hn_boot_open(comm->id, &comm->stop, &boot, &addrs[comm->rank]);
    for (int r = 0; r < comm->nranks && result == ncclSuccess; r++)
        if (r != comm->rank)
            result =
                hn_boot_send(parent->boot, stay[r], comm->id, &addrs[comm->rank], sizeof(*addrs));
    for (int r = 0; r < comm->nranks && result == ncclSuccess; r++)
        if (r != comm->rank)
            result = hn_boot_recv(parent->boot, stay[r], comm->id, &addrs[r], sizeof(*addrs));
    if (result == ncclSuccess)
        result = hn_boot_meet(boot, comm->rank, comm->nranks, addrs);
    if (result == ncclSuccess) {
        result = hn_comm_create(comm, boot, comm->config.splitShare == 1 ? parent->net : NULL);
        boot = NULL; /* the communicator's, whatever the result */
    }
    hn_boot_free(boot);
    free(addrs);
    return result;
}

void hn_init_run(struct hn_init *init)
{
    init->result = init->stay     ? make_shrink(init)
                   : init->grows  ? make_grown(init)
                   : init->parent ? make_split(init)
                                  : make_from_id(init);
    hn_init_over(init);
}

void hn_init_over(struct hn_init *init)
{
    struct ncclComm *comm = init->comm;
    free(init->stay);
    if (init->parent)
        hn_comm_leave(init->parent);
    bool absent = init->parent && init->color == NCCL_SPLIT_NOCOLOR; /* of a split only */
    if (init->result == ncclSuccess && !absent) {
        int in_progress = ncclInProgress; /* an error that came first stays */
        atomic_compare_exchange_strong(&comm->async, &in_progress, ncclSuccess);
        hn_comm_leave(comm);
        return;
    }
    HN_INFO("rank %d: communicator not made: %s", comm->rank, ncclGetErrorString(init->result));
    hn_comm_fail(comm, init->result == ncclSuccess ? ncclInternalError : init->result);
    bool keep = atomic_load(&comm->aborted) || comm->init_threaded;
    if (!keep)
        *init->out = NULL;
    hn_comm_leave(comm);
    if (!keep)
        hn_comm_free(comm);
}
