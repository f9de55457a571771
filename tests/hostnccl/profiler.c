#define _GNU_SOURCE
#include "profiler.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "nccl_abi/nccl_profiler_abi.h"

enum { GROUP = 1 << 0, P2P = 1 << 2, NET_API = 11 /* of the first NCCL that takes v5 */ };
enum { READY, LOADED, FAILED };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all but the mask */
static int state, users;
static void *dl;
static const struct r2_ncclprofiler_v5 *table; /* stays until the last communicator ends */
static int mask;

static void *open_library(const char *name)
{
    char file[300];
    void *found = dlopen(name && *name ? name : "libnccl-profiler.so", RTLD_NOW | RTLD_LOCAL);
    if (found || !name || !*name || strchr(name, '/'))
        return found;
    snprintf(file, sizeof(file), "libnccl-profiler-%s.so", name);
    return dlopen(file, RTLD_NOW | RTLD_LOCAL);
}

/* The user's own first, then the network's library; what can be opened and has none is no reason to
 * look on. */
static void load(const struct hn_net *net)
{
    const char *name = getenv("NCCL_PROFILER_PLUGIN");
    state = FAILED;
    if (hn_util_env("HOSTNCCL_NET_VERSION", 12, 6, 12) < NET_API ||
        (name && !strcasecmp(name, "none")))
        return;
    dl = open_library(name);
    if (!dl && net->dl) {
        Dl_info info;
        name = dladdr(net->table, &info) ? info.dli_fname : NULL;
        dl = name ? dlopen(name, RTLD_NOW | RTLD_LOCAL) : NULL;
    }
    table = dl ? dlsym(dl, "ncclProfiler_v5") : NULL;
    if (table) {
        HN_INFO("PROFILER/Plugin: Loaded %s (v5)", table->name);
        state = LOADED;
    } else if (dl) {
        dlclose(dl);
    }
}

void hn_prof_open(struct ncclComm *comm, int nodes)
{
    pthread_mutex_lock(&lock);
    if (state == READY)
        load(comm->net->net);
    if (state == LOADED) {
        users++;
        comm->profiled = true;
        if (table->init(&comm->prof_ctx, comm->id, &mask, NULL, nodes, comm->nranks, comm->rank,
                        hn_util_logger))
            HN_INFO("Profiler init failed. Continue without profiler.");
    }
    pthread_mutex_unlock(&lock);
}

void hn_prof_close(struct ncclComm *comm)
{
    if (!comm->profiled)
        return;
    pthread_mutex_lock(&lock);
    if (comm->prof_ctx)
        table->finalize(comm->prof_ctx);
    if (--users == 0) {
        dlclose(dl);
        table = NULL;
        state = READY;
    }
    pthread_mutex_unlock(&lock);
}

int hn_prof_mask(void)
{
    return __atomic_load_n(&mask, __ATOMIC_RELAXED);
}

static void *start(void *ctx, struct r2_prof_event *event)
{
    void *handle = NULL;
    table->start_event(ctx, &handle, event);
    return handle;
}

static const char *name_of(enum hn_func func)
{
    static const char *const names[] = {"Broadcast", "Reduce", "AllGather", "ReduceScatter",
                                        "AllReduce"};
    return func <= HN_ALLREDUCE ? names[func] : func == HN_SEND ? "Send" : "Recv";
}

static const char *type_name(ncclDataType_t type)
{
    static const char *const names[] = {
        "ncclInt8",    "ncclUint8",   "ncclInt32",   "ncclUint32",   "ncclInt64",     "ncclUint64",
        "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3"};
    return (size_t)type < sizeof(names) / sizeof(names[0]) ? names[type] : "Unknown";
}

void hn_prof_ops_begin(struct ncclComm *comm, struct hn_op *ops)
{
    for (struct hn_op *op = ops; op && comm->profiled; op = op->next) {
        bool p2p = op->func == HN_SEND || op->func == HN_RECV;
        struct r2_prof_event event = {.rank = comm->rank};
        if (!op->mask)
            continue;
        event.type = GROUP;
        if (!comm->prof_group)
            comm->prof_group = start(comm->prof_ctx, &event);
        event.type = p2p ? P2P : R2_PROF_COLL;
        if (!p2p) {
            event.coll.func = name_of(op->func);
            event.coll.count = op->count;
            event.coll.datatype = type_name(op->type);
            event.coll.root = op->peer;
        }
        op->event = start(comm->prof_ctx, &event);
    }
}

void hn_prof_ops_end(struct hn_op *ops)
{
    for (struct hn_op *op = ops; op; op = op->next)
        if (op->event)
            table->stop_event(op->event);
    if (ops && ops->comm->prof_group)
        table->stop_event(ops->comm->prof_group);
    if (ops)
        ops->comm->prof_group = NULL;
}

void hn_prof_work_begin(struct hn_pxop *px)
{
    struct r2_prof_event event = {.type = R2_PROF_PROXY_OP, .parent = px->task_event};
    if (!(px->mask & (R2_PROF_PROXY_OP | R2_PROF_PROXY_STEP)))
        return;
    event.rank = px->conn->comm->rank;
    event.proxy_op.pid = getpid();
    event.proxy_op.channel = (uint8_t)px->conn->channel;
    event.proxy_op.peer = px->conn->peer;
    event.proxy_op.steps = (int)px->total;
    event.proxy_op.is_send = px->conn->send;
    px->event = start(px->conn->comm->prof_ctx, &event);
}

void hn_prof_work_end(struct hn_pxop *px)
{
    if (px->event)
        table->stop_event(px->event);
}

void hn_prof_message_begin(struct hn_pxop *px, struct hn_slot *slot)
{
    struct r2_prof_event event = {.type = R2_PROF_PROXY_STEP, .parent = px->event};
    slot->event = NULL;
    if (px->mask & R2_PROF_PROXY_STEP)
        slot->event = start(px->conn->comm->prof_ctx, &event);
}

void hn_prof_message_state(struct hn_pxop *px, struct hn_slot *slot, int to)
{
    char args[64] = {0};
    if (px->event && slot->event)
        table->record_state(slot->event, to, args);
}

void hn_prof_message_end(struct hn_slot *slot)
{
    if (slot->event)
        table->stop_event(slot->event);
    slot->event = NULL;
}
