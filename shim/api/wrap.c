/* The wrappers that come from the table alone. */
#include "api/call.h"
#include "comms/comms.h"
#include "util/log.h"

/* Arguments as words (comms/vote.h). */
#define W(a) (uint64_t)(uintptr_t)(a)
#define W5(a, b, c, d, e) W(a), W(b), W(c), W(d), W(e)
#define W6(a, ...) W(a), W5(__VA_ARGS__)
#define W7(a, ...) W(a), W6(__VA_ARGS__)
#define W8(a, ...) W(a), W7(__VA_ARGS__)
#define W9(a, ...) W(a), W8(__VA_ARGS__)
#define WORDS_OF(a, b, c, d, e, f, g, h, i, name, ...) name
#define WORDS(...) WORDS_OF(__VA_ARGS__, W9, W8, W7, W6, W5, , , , )(__VA_ARGS__)

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
            R2_WARN_ONCE(what " bypasses R2CCL's plugin between nodes and does not survive a "     \
                              "failed NIC; everything else of this job does");                     \
        result = real_fn args;                                                                     \
        r2_call_leave(&call);                                                                      \
        return result;                                                                             \
    }

/* An operation of the application: R2CCL's own, or handed to NCCL as it is. */
#define OPERATION(name, kind, args, collective)                                                    \
    if (!call.active) {                                                                            \
        result = real_fn args;                                                                     \
        r2_call_leave(&call);                                                                      \
        return result;                                                                             \
    }                                                                                              \
    result = call.comm ? r2_comms_begin(call.comm, R2_SEG_COLL_##kind, count, type) : 0;           \
    if (result == R2_NCCL_OK) {                                                                    \
        bool taken = false;                                                                        \
        bool configured = R2_API_##name == R2_API_ncclAllReduceConfig;                             \
        if ((configured || R2_API_##name == R2_API_ncclAllReduce) && call.comm) {                  \
            const uint64_t words[] = {WORDS args};                                                 \
            taken = r2_comms_take(call.comm, words, configured, &result);                          \
        }                                                                                          \
        if (!taken)                                                                                \
            result = real_fn args;                                                                 \
        if (call.comm)                                                                             \
            r2_comms_end(call.comm, result, collective, stream);                                   \
    }                                                                                              \
    r2_call_leave(&call);                                                                          \
    return result;

#define R2_COLL(name, since, kind, params, args)                                                   \
    R2_EXPORT int name params;                                                                     \
    int name params                                                                                \
    {                                                                                              \
        ENTER(name, params, comm)                                                                  \
        OPERATION(name, kind, args, true)                                                          \
    }

#define R2_P2P(name, since, kind, params, args)                                                    \
    R2_EXPORT int name params;                                                                     \
    int name params                                                                                \
    {                                                                                              \
        ENTER(name, params, comm)                                                                  \
        OPERATION(name, kind, args, false)                                                         \
    }

#include "nccl/nccl.def"

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
