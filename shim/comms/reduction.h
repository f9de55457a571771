/* Reductions that the application made (ncclRedOpCreatePreMulSum) and recorded operations use.
 *
 * NCCL copies a reduction in the call of an operation, so the application may destroy it as soon as
 * that has returned, on any thread. An operation that is only recorded is called later
 * (comms/run.h): until then NCCL is not told, and does not give the number to another one.
 *
 * Threads: any. No lock is held over a call to NCCL. Results are NCCL's.
 */
#ifndef R2_COMMS_REDUCTION_H
#define R2_COMMS_REDUCTION_H

#include <stdbool.h>

#include "api/nccl.h"
#include "comms/comms.h"

/* An operation with it is recorded; `comm`, NULL: not followed, is held until the release. False:
 * no memory. */
bool r2_reduction_use(struct r2_comm *comm, r2_nccl_comm handle, int op);

/* ncclRedOpDestroy (`fn`). True: it waits for the last release. False: nothing uses it, the caller
 * makes the real call. */
bool r2_reduction_destroy(int (*fn)(int, r2_nccl_comm), int op, struct r2_comm *comm,
                          r2_nccl_comm handle);

/* One for each use, once the operation has been called. The result of what waited for it. */
int r2_reduction_release(struct r2_comm *comm, r2_nccl_comm handle, int op);

#endif
