/* Wrappers of groups, and of what must wait for their end. */
#include "api/call.h"
#include "comms/comms.h"

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
    bool outermost;
    int result;

    if (!fn)
        return call.error;
    /* Counted before the call, so that another call of this thread (a signal handler's, say) never
     * finds a group that NCCL has closed. */
    outermost = call.active && r2_comms_in_group() && r2_comms_group_end() == 0;
    if (outermost)
        r2_comms_group_hand();
    result = fn();
    if (outermost)
        r2_comms_group_over(result, false);
    r2_call_leave(&call);
    return result;
}

R2_EXPORT int ncclGroupSimulateEnd(void *info);
int ncclGroupSimulateEnd(void *info)
{
    struct r2_call call;
    int (*fn)(void *) = r2_call_enter(&call, R2_API_ncclGroupSimulateEnd, NULL, R2_CALLER);
    bool outermost;
    int result;

    if (!fn)
        return call.error;
    outermost = call.active && r2_comms_in_group() && r2_comms_group_end() == 0;
    result = fn(info);
    if (outermost)
        r2_comms_group_over(result, true);
    r2_call_leave(&call);
    return result;
}
