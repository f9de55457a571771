/* NCCL's profiler: finds it and drives it as NCCL 2.28 to 2.32 do (profiler API v5).
 *
 * Only events that the word `mask` asks for, and their parents, are told. A handle that is not NULL
 * gets its states and its end. */
#ifndef HOSTNCCL_PROFILER_H
#define HOSTNCCL_PROFILER_H

#include "group.h"

/* Around a communicator's life. No profiler is no error. */
void hn_prof_open(struct ncclComm *comm, int nodes);
void hn_prof_close(struct ncclComm *comm);
/* What is asked for now. */
int hn_prof_mask(void);
/* Around handing over the operations of a group: fills op->event. */
void hn_prof_ops_begin(struct ncclComm *comm, struct hn_op *ops);
void hn_prof_ops_end(struct hn_op *ops);
/* One operation's work on one connection, and its messages. On the progress thread. */
void hn_prof_work_begin(struct hn_pxop *px);
void hn_prof_work_end(struct hn_pxop *px);
void hn_prof_message_begin(struct hn_pxop *px, struct hn_slot *slot);
void hn_prof_message_state(struct hn_pxop *px, struct hn_slot *slot, int state);
void hn_prof_message_end(struct hn_slot *slot);

#endif
