/* Wrappers of groups, and of what must wait for their end. */
#include "api/call.h"
#include "comms/comms.h"
#include "comms/reduction.h"
#include "comms/run.h"

R2_EXPORT int ncclGroupStart(void);
int ncclGroupStart(void)
{
    struct r2_call call;
    int (*fn)(void) = r2_call_enter(&call, R2_API_ncclGroupStart, NULL, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    result = fn();
    if (call.active && result == R2_NCCL_OK)
        r2_comms_group_start();
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclGroupEnd(void);
int ncclGroupEnd(void)
{
    struct r2_call call;
    int (*fn)(void) = r2_call_enter(&call, R2_API_ncclGroupEnd, NULL, R2_CALLER);
    bool outermost, took;
    int ended, result, issued = R2_NCCL_OK;

    if (!fn)
        return call.error;
    /* Counted before the call, so that another call of this thread (a signal handler's, say) never
     * finds a group that NCCL has closed. */
    outermost = call.active && r2_comms_in_group() && r2_comms_group_end() == 0;
    if (outermost) {
        r2_comms_group_hand();
        issued = r2_run_group_end(false);
    }
    ended = fn();
    result = r2_nccl_worse(ended, issued);
    if (outermost) {
        took = r2_comms_group_took(ended, issued);
        r2_run_group_over(took);
        r2_comms_group_over(ended, result, false, took);
    }
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclGroupSimulateEnd(void *info);
int ncclGroupSimulateEnd(void *info)
{
    struct r2_call call;
    int (*fn)(void *) = r2_call_enter(&call, R2_API_ncclGroupSimulateEnd, NULL, R2_CALLER);
    bool outermost;
    int ended, result, issued = R2_NCCL_OK;

    if (!fn)
        return call.error;
    outermost = call.active && r2_comms_in_group() && r2_comms_group_end() == 0;
    if (outermost)
        issued = r2_run_group_end(true);
    ended = fn(info);
    result = r2_nccl_worse(ended, issued);
    if (outermost)
        r2_comms_group_over(ended, result, true, true);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclRedOpDestroy(int op, r2_nccl_comm comm);
int ncclRedOpDestroy(int op, r2_nccl_comm comm)
{
    struct r2_call call;
    int (*fn)(int, r2_nccl_comm) = r2_call_enter(&call, R2_API_ncclRedOpDestroy, comm, R2_CALLER);
    int result;

    if (!fn)
        return call.error;
    /* Of any thread: while a group that another one has open has operations with it recorded, NCCL
     * is told of it behind these. */
    result =
        call.active && r2_reduction_destroy(fn, op, call.comm, comm) ? R2_NCCL_OK : fn(op, comm);
    r2_call_leave(&call);
    return result;
}
