/* The process's trace of plans (R2CCL_PLAN_TRACE): one file per process, written as plans come into
 * force, or read once to be replayed. plan/trace.h has the format, replay.c what a replay does.
 *
 *   FILE          records. FILE must not be there yet: a trace is never written over.
 *   replay:FILE   replays.
 *
 * In FILE, %r is the rank (the launcher's, else that in the process's first communicator), %h the
 * host's name, %% a percent sign; without %r, ".%r" is appended.
 *
 * Threads: any. Nothing here fails a call: what cannot be recorded is said once, and the trace then
 * renamed to end in ".incomplete"; a trace that cannot be read is said once, and replays nothing.
 */
#ifndef R2_COMMS_TRACE_H
#define R2_COMMS_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "plan/trace.h"

enum r2_tracing { R2_TRACING_OFF, R2_TRACING_RECORD, R2_TRACING_REPLAY };

/* Opens it with the first call; `rank` is the caller's in its communicator. */
enum r2_tracing r2_tracing_mode(int rank);

/* The name of the process's next communicator that was made of nothing. */
uint64_t r2_tracing_root(int nranks, int rank, int device);

/* Recording. */
void r2_tracing_put_comm(const struct r2_trace_comm *comm);
void r2_tracing_put_plan(uint64_t name, uint64_t from, const struct r2_plan_table *table);

/* Replaying. What the trace has of a communicator; NULL: it does not know it, or is unusable. */
const struct r2_trace_comm *r2_tracing_recorded(uint64_t name);
bool r2_tracing_unusable(void);
/* For messages. */
const char *r2_tracing_path(void);

#endif
