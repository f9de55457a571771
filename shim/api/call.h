/* What every wrapper does around the real call.
 *
 * NCCL calls some of its own public functions, and the dynamic linker leads those calls through the
 * wrappers as well: a thread that is inside a real call passes everything straight on ("nested").
 * No lock is held over a real call.
 */
#ifndef R2_API_CALL_H
#define R2_API_CALL_H

#include <stdbool.h>
#include <stdint.h>

#include "api/ids.h"
#include "api/nccl.h"
#include "real/real.h"

#define R2_EXPORT __attribute__((visibility("default")))

struct r2_comm;

struct r2_call {
    struct r2_real *real;
    struct r2_comm *comm; /* held by the call; NULL: none, or not known */
    bool active;          /* a call of the application, with the shim switched on */
    int error;            /* of a call without a function: what the wrapper returns */
};

/* The function to call, or NULL: call->error says what to return. With a handle, `comm` is held
 * until r2_call_leave. Every r2_call_enter that returned a function needs its r2_call_leave. */
void *r2_call_enter(struct r2_call *call, enum r2_api id, r2_nccl_comm handle, const void *caller);
void r2_call_leave(struct r2_call *call);

/* Inside an active call: other functions of the same NCCL. NULL where it lacks them. */
#define R2_CALL_REAL(call, name) ((call)->real->fn[R2_API_##name])

/* Whether R2CCL_MODE leaves the shim anything to do, and this process is not a forked child. */
bool r2_shim_on(void);

/* A warning that is written once: `flag` is static. */
#define R2_WARN_ONCE(...)                                                                          \
    do {                                                                                           \
        static char r2_told;                                                                       \
        if (!__atomic_test_and_set(&r2_told, __ATOMIC_RELAXED))                                    \
            R2_WARN(__VA_ARGS__);                                                                  \
    } while (0)

/* A real call from within the shim, on a thread that may not be inside one: nested calls of NCCL
 * into the wrappers pass through. */
void r2_call_nest(void);
void r2_call_unnest(void);

#define R2_CALLER __builtin_extract_return_addr(__builtin_return_address(0))

#endif
