/* Tree, forced on the communicators of plans: the net plugin brings a tuner that does what the
 * thread that makes a communicator has asked for (tuner/want.h). */
#ifndef R2_SCHEDULES_FORCE_H
#define R2_SCHEDULES_FORCE_H

#include <stdbool.h>

#include "real/real.h"

/* Whether NCCL would ask our tuner. False: one warning has said why, and there is no Tree. */
bool r2_force_available(const struct r2_real *real);
/* Around the calling thread's making of one communicator. The end says whether NCCL's tuner took
 * Tree for it: a rank where it did not must not run the plan. */
void r2_force_begin(void);
bool r2_force_end(void);

#endif
