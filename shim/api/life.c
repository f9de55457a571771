/* Wrappers that make and end communicators. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "api/call.h"
#include "comms/comms.h"
#include "comms/follow.h"
#include "settings/launch.h"
#include "util/log.h"

/* FNV-1a: the same on all ranks, which is all that is asked of it. */
static uint64_t mix(uint64_t hash, const void *data, size_t len)
{
    const unsigned char *bytes = data;

    for (size_t i = 0; i < len; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash ? hash : 1;
}

#define START UINT64_C(0xcbf29ce484222325)

static void warn_config(const struct r2_nccl_config *config)
{
    if (R2_NCCL_CONFIG_HAS(config, net_name) && config->net_name &&
        strcasecmp(config->net_name, "R2CCL"))
        R2_WARN_ONCE("a communicator asks for the network %s (netName): it passes the R2CCL plugin "
                     "over and does not survive failed NICs",
                     config->net_name);
    if (R2_NCCL_CONFIG_HAS(config, collnet_enable) && config->collnet_enable == 1)
        R2_WARN_ONCE("a communicator asks for reductions in the switches (collnetEnable): they are "
                     "not available with R2CCL");
}

/* What the configuration says, read no further than the caller's own size. */
static void read_config(struct r2_comm_birth *birth, const struct r2_nccl_config *config)
{
    warn_config(config);
    birth->nonblocking = R2_NCCL_CONFIG_HAS(config, blocking) && config->blocking == 0;
    if (R2_NCCL_CONFIG_HAS(config, name) && config->name)
        snprintf(birth->name, sizeof(birth->name), "%s", config->name);
}

/* NCCL's own variable for all communicators: 0, 1, or -1 where it says nothing. */
static int blocking_by_environment(void)
{
    const char *text = getenv("NCCL_COMM_BLOCKING");

    return !text || (strcmp(text, "0") && strcmp(text, "1")) ? -1 : text[0] - '0';
}

/* After a call that makes a communicator: now, or when the group is over. */
static void born(const struct r2_call *call, r2_nccl_comm *out, struct r2_comm_birth *birth,
                 int result)
{
    if (!call->active || (result != R2_NCCL_OK && result != R2_NCCL_IN_PROGRESS))
        return;
    birth->real = call->real;
    /* One that asks for non-blocking calls may be made already here and not yet on another rank. */
    birth->pending = result == R2_NCCL_IN_PROGRESS;
    birth->nonblocking |= birth->pending || blocking_by_environment() == 0;
    if (r2_comms_in_group())
        r2_comms_group_birth(out, birth);
    else
        r2_comms_add(out ? *out : NULL, birth);
}

R2_EXPORT int ncclGetUniqueId(struct r2_nccl_id *id);
int ncclGetUniqueId(struct r2_nccl_id *id)
{
    struct r2_call call;
    int (*fn)(struct r2_nccl_id *) = r2_call_enter(&call, R2_API_ncclGetUniqueId, NULL, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    result = fn(id);
    if (call.active && result == R2_NCCL_OK && id && r2_follow_wanted())
        r2_follow_sign(id, call.real->version);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclSetEncryption(const void *config);
int ncclSetEncryption(const void *config)
{
    struct r2_call call;
    int (*fn)(const void *) = r2_call_enter(&call, R2_API_ncclSetEncryption, NULL, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    if (call.active)
        R2_TELL_ONE(
            "ncclSetEncryption encrypts NCCL's own sockets only: the data that R2CCL carries "
            "between nodes is not encrypted");
    result = fn(config);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommInitRank(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank);
int ncclCommInitRank(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank)
{
    struct r2_comm_birth birth = {.id = mix(START, &id, sizeof(id)),
                                  .rank = rank,
                                  .nranks = nranks,
                                  .has_id = true,
                                  .nccl_id = id};
    struct r2_call call;
    int (*fn)(r2_nccl_comm *, int, struct r2_nccl_id, int) =
        r2_call_enter(&call, R2_API_ncclCommInitRank, NULL, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    result = fn(out, nranks, id, rank);
    born(&call, out, &birth, result);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommInitRankConfig(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank,
                                     struct r2_nccl_config *config);
int ncclCommInitRankConfig(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank,
                           struct r2_nccl_config *config)
{
    struct r2_comm_birth birth = {.id = mix(START, &id, sizeof(id)),
                                  .rank = rank,
                                  .nranks = nranks,
                                  .has_id = true,
                                  .nccl_id = id};
    struct r2_call call;
    int (*fn)(r2_nccl_comm *, int, struct r2_nccl_id, int, struct r2_nccl_config *) =
        r2_call_enter(&call, R2_API_ncclCommInitRankConfig, NULL, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    if (call.active)
        read_config(&birth, config);
    result = fn(out, nranks, id, rank, config);
    born(&call, out, &birth, result);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommInitRankScalable(r2_nccl_comm *out, int nranks, int rank, int nids,
                                       struct r2_nccl_id *ids, struct r2_nccl_config *config);
int ncclCommInitRankScalable(r2_nccl_comm *out, int nranks, int rank, int nids,
                             struct r2_nccl_id *ids, struct r2_nccl_config *config)
{
    struct r2_comm_birth birth = {.id = START, .rank = rank, .nranks = nranks};
    struct r2_call call;
    int (*fn)(r2_nccl_comm *, int, int, int, struct r2_nccl_id *, struct r2_nccl_config *) =
        r2_call_enter(&call, R2_API_ncclCommInitRankScalable, NULL, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    if (call.active) {
        read_config(&birth, config);
        if (ids && nids > 0)
            birth.id = mix(START, ids, (size_t)nids * sizeof(*ids));
    }
    result = fn(out, nranks, rank, nids, ids, config);
    born(&call, out, &birth, result);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommInitAll(r2_nccl_comm *comms, int ndev, const int *devices);
int ncclCommInitAll(r2_nccl_comm *comms, int ndev, const int *devices)
{
    static uint64_t made;
    struct r2_call call;
    int (*fn)(r2_nccl_comm *, int, const int *) =
        r2_call_enter(&call, R2_API_ncclCommInitAll, NULL, R2_CALLER);
    uint64_t serial;
    int result;

    if (!fn)
        return call.error;
    result = fn(comms, ndev, devices);
    /* All ranks are here: any number does that is this one's alone. */
    serial = __atomic_add_fetch(&made, 1, __ATOMIC_RELAXED);
    for (int rank = 0; rank < ndev && comms; rank++) {
        struct r2_comm_birth birth = {.rank = rank, .nranks = ndev};

        birth.id = mix(mix(START, &serial, sizeof(serial)), &comms, sizeof(comms));
        born(&call, &comms[rank], &birth, result);
    }
    r2_call_leave(&call);
    return result;
}

/* The child of a communicator that is known: numbered by the parent's splits, which all its ranks
 * take part in, and told apart by `salt` from others of the same call. */
static void derive(const struct r2_call *call, struct r2_comm_birth *birth, const void *salt,
                   size_t len)
{
    uint64_t parts[2] = {0};

    birth->rank = -1;
    birth->from = call->comm;
    birth->salt = mix(START, salt, len);
    if (call->comm) {
        parts[0] = birth->parent = r2_comms_id(call->comm);
        parts[1] = r2_comms_next_child(call->comm);
    }
    birth->id = mix(mix(START, parts, sizeof(parts)), salt, len);
}

R2_EXPORT int ncclCommSplit(r2_nccl_comm comm, int color, int key, r2_nccl_comm *out,
                            struct r2_nccl_config *config);
int ncclCommSplit(r2_nccl_comm comm, int color, int key, r2_nccl_comm *out,
                  struct r2_nccl_config *config)
{
    struct r2_comm_birth birth = {0};
    struct r2_call call;
    int (*fn)(r2_nccl_comm, int, int, r2_nccl_comm *, struct r2_nccl_config *) =
        r2_call_enter(&call, R2_API_ncclCommSplit, comm, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    if (call.active) {
        read_config(&birth, config);
        derive(&call, &birth, &color, sizeof(color));
    }
    result = fn(comm, color, key, out, config);
    born(&call, color == R2_NCCL_NOCOLOR ? NULL : out, &birth, result);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommShrink(r2_nccl_comm comm, int *excluded, int nexcluded, r2_nccl_comm *out,
                             struct r2_nccl_config *config, int flags);
int ncclCommShrink(r2_nccl_comm comm, int *excluded, int nexcluded, r2_nccl_comm *out,
                   struct r2_nccl_config *config, int flags)
{
    struct r2_comm_birth birth = {0};
    struct r2_call call;
    int (*fn)(r2_nccl_comm, int *, int, r2_nccl_comm *, struct r2_nccl_config *, int) =
        r2_call_enter(&call, R2_API_ncclCommShrink, comm, R2_CALLER);
    bool gone = false;
    int result;

    if (!fn)
        return call.error;
    if (call.active) {
        read_config(&birth, config);
        if (call.comm && flags & R2_NCCL_SHRINK_ABORT) {
            r2_comms_abort(call.comm);
            gone = r2_comms_gone(call.comm);
        }
        derive(&call, &birth, excluded,
               excluded && nexcluded > 0 ? (size_t)nexcluded * sizeof(*excluded) : 0);
    }
    result = gone ? R2_NCCL_INTERNAL : fn(comm, excluded, nexcluded, out, config, flags);
    born(&call, out, &birth, result);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommGrow(r2_nccl_comm comm, int nranks, const struct r2_nccl_id *id, int rank,
                           r2_nccl_comm *out, struct r2_nccl_config *config);
int ncclCommGrow(r2_nccl_comm comm, int nranks, const struct r2_nccl_id *id, int rank,
                 r2_nccl_comm *out, struct r2_nccl_config *config)
{
    struct r2_comm_birth birth = {.nranks = nranks};
    struct r2_call call;
    int (*fn)(r2_nccl_comm, int, const struct r2_nccl_id *, int, r2_nccl_comm *,
              struct r2_nccl_config *) = r2_call_enter(&call, R2_API_ncclCommGrow, comm, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    if (call.active) {
        read_config(&birth, config);
        birth.rank = -1;
        /* New ranks have no parent and old ones may have no id: it is not the same on all. */
        birth.id = id ? mix(START, id, sizeof(*id)) : START;
        birth.parent = call.comm ? r2_comms_id(call.comm) : 0;
    }
    result = fn(comm, nranks, id, rank, out, config);
    born(&call, out, &birth, result);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommFinalize(r2_nccl_comm comm);
int ncclCommFinalize(r2_nccl_comm comm)
{
    struct r2_call call;
    int (*fn)(r2_nccl_comm) = r2_call_enter(&call, R2_API_ncclCommFinalize, comm, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    result = fn(comm);
    if (call.active && call.comm && (result == R2_NCCL_OK || result == R2_NCCL_IN_PROGRESS))
        r2_comms_state(call.comm, R2_SEG_COMM_FINALIZED, NULL);
    r2_call_leave(&call);
    return result;
}

/* Destroy and abort: out of the table first, since NCCL may hand out the address again at once.
 * Whether the call succeeds does not matter: the handle must not be used again either way. */
static int end(enum r2_api id, r2_nccl_comm comm, const void *caller)
{
    struct r2_call call;
    int (*fn)(r2_nccl_comm) = r2_call_enter(&call, id, comm, caller);
    int result;

    if (!fn)
        return call.error;
    if (call.active && call.comm)
        r2_comms_remove(comm, id == R2_API_ncclCommAbort);
    result = fn(comm);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommDestroy(r2_nccl_comm comm);
int ncclCommDestroy(r2_nccl_comm comm)
{
    return end(R2_API_ncclCommDestroy, comm, R2_CALLER);
}

R2_EXPORT int ncclCommAbort(r2_nccl_comm comm);
int ncclCommAbort(r2_nccl_comm comm)
{
    return end(R2_API_ncclCommAbort, comm, R2_CALLER);
}

R2_EXPORT int ncclCommRevoke(r2_nccl_comm comm, int flags);
int ncclCommRevoke(r2_nccl_comm comm, int flags)
{
    struct r2_call call;
    int (*fn)(r2_nccl_comm, int) = r2_call_enter(&call, R2_API_ncclCommRevoke, comm, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    result = fn(comm, flags);
    if (call.active && call.comm && (result == R2_NCCL_OK || result == R2_NCCL_IN_PROGRESS))
        r2_comms_revoked(call.comm);
    r2_call_leave(&call);
    return result;
}

/* A communicator that NCCL has suspended or resumed. */
static void moved(const struct r2_call *call, enum r2_seg_comm_state state, int result)
{
    if (call->active && call->comm && (result == R2_NCCL_OK || result == R2_NCCL_IN_PROGRESS))
        r2_comms_state(call->comm, state, NULL);
}

R2_EXPORT int ncclCommSuspend(r2_nccl_comm comm, int flags);
int ncclCommSuspend(r2_nccl_comm comm, int flags)
{
    struct r2_call call;
    int (*fn)(r2_nccl_comm, int) = r2_call_enter(&call, R2_API_ncclCommSuspend, comm, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    result = fn(comm, flags);
    moved(&call, R2_SEG_COMM_SUSPENDED, result);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommResume(r2_nccl_comm comm);
int ncclCommResume(r2_nccl_comm comm)
{
    struct r2_call call;
    int (*fn)(r2_nccl_comm) = r2_call_enter(&call, R2_API_ncclCommResume, comm, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    result = fn(comm);
    moved(&call, R2_SEG_COMM_READY, result);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclCommGetAsyncError(r2_nccl_comm comm, int *error);
int ncclCommGetAsyncError(r2_nccl_comm comm, int *error)
{
    struct r2_call call;
    int (*fn)(r2_nccl_comm, int *) =
        r2_call_enter(&call, R2_API_ncclCommGetAsyncError, comm, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    result = fn(comm, error);
    if (call.active && call.comm && result == R2_NCCL_OK && error) {
        r2_comms_async(call.comm, comm, *error);
        if (*error == R2_NCCL_OK || *error == R2_NCCL_IN_PROGRESS)
            *error = r2_comms_elsewhere(call.comm) ? R2_NCCL_REMOTE : *error;
    }
    r2_call_leave(&call);
    return result;
}
