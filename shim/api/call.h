/* What every wrapper does around the real call. A call from within a real call (real/nest.h) is
 * passed straight on. No lock is held over a real call. */
#ifndef R2_API_CALL_H
#define R2_API_CALL_H

#include <stdbool.h>
#include <stdint.h>

#include "nccl/ids.h"
#include "nccl/nccl.h"
#include "real/nest.h"
#include "real/real.h"

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

/* The wrapper of a function. */
void *r2_api_wrapper(enum r2_api id);

/* Whether R2CCL_MODE leaves the shim anything to do, and this process is not a forked child. */
bool r2_shim_on(void);

#define R2_CALLER __builtin_extract_return_addr(__builtin_return_address(0))

#endif
