/* Running operations under a plan: an AllReduce that the plan has an entry for goes to the
 * communicators that were made for it, in the parts that the entry says, on the same stream.
 *
 * Groups. NCCL launches a group's operations by communicator, in the order in which the group first
 * named them; a communicator's own operations have no order among each other. The communicators of
 * a plan must take their place right behind the application's on every rank, whatever else is in
 * the group there, or ranks wait for each other in different orders. So from the first operation on
 * a communicator with a plan, the rest of the group is recorded, and issued at the outermost end:
 * communicator by communicator, first what stays on it, then what goes to the plan's.
 *
 * Not replaced: operations with reductions that the application made (they belong to its
 * communicator), and operations that are being captured, unless R2CCL_CAPTURE=plan. Both are the
 * same on all ranks.
 *
 * Threads: any; a group is its thread's. Results are NCCL's.
 */
#ifndef R2_COMMS_RUN_H
#define R2_COMMS_RUN_H

#include <stdbool.h>
#include <stdint.h>

#include "api/ids.h"
#include "api/nccl.h"

#define R2_OP_WORDS 9 /* most arguments of an operation */

/* A call of an operation. All of its arguments are pointers or integers of at most 8 bytes, which
 * on x86-64 and AArch64 Linux take one register or 8 bytes of stack each, whatever their type: so
 * any operation can be called with R2_OP_WORDS of them. */
struct r2_op {
    enum r2_api api;
    void *fn;
    struct r2_comm *comm; /* NULL: not followed */
    r2_nccl_comm handle;
    uint64_t word[R2_OP_WORDS];
};

/* Runs or records the operation: true, and *result is what the call returns. False: the caller
 * makes the real call. Inside r2_call_enter and r2_call_leave, after r2_comms_begin. Outside of
 * groups the time of what plans are for begins here, whoever runs it; r2_comms_end ends it. */
bool r2_run_take(const struct r2_op *op, int *result);

/* Cheap: whether r2_run_take has to be asked. */
bool r2_run_asks(struct r2_comm *comm);

/* The outermost end of a group is about to be called: issues what was recorded. stock: nothing goes
 * to a plan's communicators (a simulated end). What was recorded on a communicator that another
 * thread has aborted meanwhile is not issued: ncclInternalError. Returns the first error. */
int r2_run_group_end(bool stock);
/* NCCL is through with that end: what went to a plan's communicators is on its streams, if NCCL
 * took it. */
void r2_run_group_over(bool took);

#endif
