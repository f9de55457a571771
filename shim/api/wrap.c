/* The wrappers that come from the table alone. */
#include "api/call.h"
#include "comms/comms.h"
#include "util/log.h"

/* The head of every wrapper: `real_fn` is what to call. */
#define ENTER(name, params, comm)                                                                  \
    struct r2_call call;                                                                           \
    int(*real_fn) params = r2_call_enter(&call, R2_API_##name, comm, R2_CALLER);                   \
    int result;                                                                                    \
    if (!real_fn)                                                                                  \
        return call.error;

#define R2_PLAIN(name, since, params, args)                                                        \
    R2_EXPORT int name params;                                                                     \
    int name params                                                                                \
    {                                                                                              \
        ENTER(name, params, NULL)                                                                  \
        result = real_fn args;                                                                     \
        r2_call_leave(&call);                                                                      \
        return result;                                                                             \
    }

#define R2_COMM(name, since, params, args)                                                         \
    R2_EXPORT int name params;                                                                     \
    int name params                                                                                \
    {                                                                                              \
        ENTER(name, params, comm)                                                                  \
        result = real_fn args;                                                                     \
        r2_call_leave(&call);                                                                      \
        return result;                                                                             \
    }

#define R2_BYPASS(name, since, what, params, args)                                                 \
    R2_EXPORT int name params;                                                                     \
    int name params                                                                                \
    {                                                                                              \
        ENTER(name, params, comm)                                                                  \
        if (call.active)                                                                           \
            R2_WARN_ONCE(what " goes around R2CCL's plugin between nodes and does not survive a "  \
                              "failed NIC; everything else of this job does");                     \
        result = real_fn args;                                                                     \
        r2_call_leave(&call);                                                                      \
        return result;                                                                             \
    }

#define R2_COLL(name, since, kind, params, args)                                                   \
    R2_EXPORT int name params;                                                                     \
    int name params                                                                                \
    {                                                                                              \
        ENTER(name, params, comm)                                                                  \
        if (call.active && call.comm)                                                              \
            r2_comms_begin(call.comm, R2_SEG_COLL_##kind, count, type);                            \
        result = real_fn args;                                                                     \
        if (call.active && call.comm)                                                              \
            r2_comms_end(call.comm, result, true);                                                 \
        r2_call_leave(&call);                                                                      \
        return result;                                                                             \
    }

#define R2_P2P(name, since, kind, params, args)                                                    \
    R2_EXPORT int name params;                                                                     \
    int name params                                                                                \
    {                                                                                              \
        ENTER(name, params, comm)                                                                  \
        if (call.active && call.comm)                                                              \
            r2_comms_begin(call.comm, R2_SEG_COLL_##kind, count, type);                            \
        result = real_fn args;                                                                     \
        if (call.active && call.comm)                                                              \
            r2_comms_end(call.comm, result, false);                                                \
        r2_call_leave(&call);                                                                      \
        return result;                                                                             \
    }

#include "api/nccl.def"

R2_EXPORT const char *ncclGetErrorString(int result);
const char *ncclGetErrorString(int result)
{
    struct r2_call call;
    const char *(*fn)(int) = r2_call_enter(&call, R2_API_ncclGetErrorString, NULL, R2_CALLER);
    const char *text = "NCCL is not loaded";

    if (fn) {
        text = fn(result);
        r2_call_leave(&call);
    }
    return text;
}

R2_EXPORT const char *ncclGetLastError(r2_nccl_comm comm);
const char *ncclGetLastError(r2_nccl_comm comm)
{
    struct r2_call call;
    const char *(*fn)(r2_nccl_comm) =
        r2_call_enter(&call, R2_API_ncclGetLastError, comm, R2_CALLER);
    const char *text = "NCCL is not loaded";

    if (fn) {
        text = fn(comm);
        r2_call_leave(&call);
    }
    return text;
}
