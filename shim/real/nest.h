/* Whether this thread is inside a real call.
 *
 * NCCL calls some of its own public functions, and the dynamic linker leads those calls through the
 * wrappers as well: a thread that is inside a real call passes everything straight on ("nested").
 */
#ifndef R2_REAL_NEST_H
#define R2_REAL_NEST_H

#include <stdbool.h>

/* Around each real call: of a wrapper, or of the shim's own. They nest. */
void r2_call_nest(void);
void r2_call_unnest(void);
bool r2_call_nested(void);

#endif
