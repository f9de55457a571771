/* NCCL's profiler: how long collectives take. NCCL loads it out of the net plugin's library unless
 * the user has a profiler of his own. NCCL tells nothing before the operator asks for it.
 *
 * A handle is the engine's, with what it stands for in its lowest bits. It is no pointer: NCCL
 * gives back handles of collectives that ended long ago, and those of other processes. */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "control/segment.h"
#include "engine/engine.h"
#include "nccl_abi/abi.h"
#include "nccl_abi/nccl_profiler_abi.h"

#define R2_EXPORT __attribute__((visibility("default")))
#define WANTED (R2_PROF_COLL | R2_PROF_PROXY_OP | R2_PROF_PROXY_STEP)

enum role { ROLE_NONE, ROLE_COLL, ROLE_SEND, ROLE_RECV, ROLE_SEND_STEP, ROLE_RECV_STEP };
#define ROLE_BITS 3
#define ROLE_MASK ((1 << ROLE_BITS) - 1)

struct comm {
    uint64_t id;
    int rank, ranks;
    const int *mask; /* NCCL's */
};

static _Atomic pid_t own_pid; /* a proxy's thread may ask while a communicator begins */

static void *event_of(uint64_t handle, enum role role)
{
    return handle ? (void *)(uintptr_t)(handle << ROLE_BITS | role) : NULL;
}

static enum role role_of(const void *event)
{
    return (enum role)((uintptr_t)event & ROLE_MASK);
}

static uint64_t handle_of(const void *event)
{
    return (uint64_t)(uintptr_t)event >> ROLE_BITS;
}

static int prof_init(void **ctx, uint64_t comm_id, int *mask, const char *comm_name, int nodes,
                     int ranks, int rank, r2_nccl_logger log)
{
    struct comm *comm = malloc(sizeof(*comm));

    (void)comm_name;
    (void)nodes;
    (void)log;
    *ctx = NULL;
    if (!comm || !r2_engine_coll_comm_begins(mask, WANTED)) {
        free(comm);
        return R2_NCCL_SYSTEM_ERROR; /* NCCL goes on without a profiler */
    }
    *comm = (struct comm){.id = comm_id, .rank = rank, .ranks = ranks, .mask = mask};
    atomic_store_explicit(&own_pid, getpid(), memory_order_relaxed);
    *ctx = comm;
    return R2_NCCL_SUCCESS;
}

static int prof_finalize(void *ctx)
{
    struct comm *comm = ctx;

    r2_engine_coll_comm_ends(comm->mask);
    free(comm);
    return R2_NCCL_SUCCESS;
}

/* "ncclFloat8e4m3" and "ncclBfloat16": the first number is the bits. */
static size_t type_bytes(const char *type)
{
    return type ? (size_t)strtoul(type + strcspn(type, "0123456789"), NULL, 10) / 8 : 0;
}

/* Sizes and bus bytes as nccl-tests counts them. NCCL's `count` is that of the API: of one rank's
 * part where each has one. False: it is none of these. */
static bool measure(const char *func, size_t bytes, struct r2_coll *what)
{
    static const struct {
        const char *func;
        enum r2_seg_collective op;
        bool parts;
        unsigned passes; /* of all the data through the bus; 0: 1, however many ranks */
    } known[] = {
        {"AllReduce", R2_SEG_COLL_ALL_REDUCE, false, 2},
        {"AllGather", R2_SEG_COLL_ALL_GATHER, true, 1},
        {"ReduceScatter", R2_SEG_COLL_REDUCE_SCATTER, true, 1},
        {"Broadcast", R2_SEG_COLL_BROADCAST, false, 0},
        {"Reduce", R2_SEG_COLL_REDUCE, false, 0},
    };
    uint64_t ranks = (uint64_t)what->ranks;

    for (size_t i = 0; func && i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcmp(func, known[i].func))
            continue;
        what->op = known[i].op;
        what->bytes = known[i].parts ? bytes * ranks : bytes;
        what->bus_bytes = what->bytes;
        if (known[i].passes && ranks)
            what->bus_bytes = what->bytes * (ranks - 1) * known[i].passes / ranks;
        return bytes > 0;
    }
    return false;
}

static void *coll_begins(const struct comm *comm, const struct r2_prof_event *e)
{
    struct r2_coll what = {.comm = comm->id, .rank = comm->rank, .ranks = comm->ranks};

    if (!measure(e->coll.func, e->coll.count * type_bytes(e->coll.datatype), &what))
        return NULL;
    return event_of(r2_engine_coll_begin(&what), ROLE_COLL);
}

/* The context may be another process's: a proxy there can work for a rank here. */
static void *op_begins(const struct r2_prof_event *e)
{
    if (role_of(e->parent) != ROLE_COLL ||
        e->proxy_op.pid != atomic_load_explicit(&own_pid, memory_order_relaxed) ||
        !r2_engine_coll_op_begin(handle_of(e->parent)))
        return NULL;
    return event_of(handle_of(e->parent), e->proxy_op.is_send ? ROLE_SEND : ROLE_RECV);
}

static void *step_begins(const struct r2_prof_event *e)
{
    enum role role = role_of(e->parent);

    if (role != ROLE_SEND && role != ROLE_RECV)
        return NULL;
    return event_of(handle_of(e->parent), role == ROLE_SEND ? ROLE_SEND_STEP : ROLE_RECV_STEP);
}

static int prof_start(void *ctx, void **event, struct r2_prof_event *what)
{
    *event = what->type == R2_PROF_COLL && ctx  ? coll_begins(ctx, what)
             : what->type == R2_PROF_PROXY_OP   ? op_begins(what)
             : what->type == R2_PROF_PROXY_STEP ? step_begins(what)
                                                : NULL;
    return R2_NCCL_SUCCESS;
}

static int prof_stop(void *event)
{
    enum role role = role_of(event);

    if (role == ROLE_COLL)
        r2_engine_coll_handed(handle_of(event));
    else if (role == ROLE_SEND || role == ROLE_RECV)
        r2_engine_coll_op_end(handle_of(event));
    return R2_NCCL_SUCCESS;
}

static int prof_state(void *event, int state, void *args)
{
    enum role role = role_of(event);

    (void)args;
    if (role == ROLE_SEND_STEP && state == R2_PROF_SEND_PEER_WAIT)
        r2_engine_coll_moves(handle_of(event), true);
    else if (role == ROLE_RECV_STEP && state == R2_PROF_RECV_FLUSH_WAIT)
        r2_engine_coll_moves(handle_of(event), false);
    return R2_NCCL_SUCCESS;
}

R2_EXPORT extern const struct r2_ncclprofiler_v5 ncclProfiler_v5;

const struct r2_ncclprofiler_v5 ncclProfiler_v5 = {
    .name = r2_abi_name,
    .init = prof_init,
    .start_event = prof_start,
    .stop_event = prof_stop,
    .record_state = prof_state,
    .finalize = prof_finalize,
};
