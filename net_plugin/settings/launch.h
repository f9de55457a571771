/* What the launcher says of this process, in its environment. */
#ifndef R2_SETTINGS_LAUNCH_H
#define R2_SETTINGS_LAUNCH_H

#include <stdbool.h>

#include "util/log.h"

/* The rank in the job, the rank on the node; -1: not said. */
int r2_launch_rank(void);
int r2_launch_local_rank(void);

/* Whether this process speaks for those with the same settings: rank 0 of a job whose settings are
 * all in the environment, the first rank of each node where a file is read, and whoever does not
 * know its rank. */
bool r2_launch_speaks(void);

/* Of what the user has given to all ranks alike: aloud by one of them, at level INFO by the others.
 */
#define R2_TELL_ONE(...)                                                                           \
    do {                                                                                           \
        if (r2_launch_speaks())                                                                    \
            R2_TELL(__VA_ARGS__);                                                                  \
        else                                                                                       \
            R2_INFO(__VA_ARGS__);                                                                  \
    } while (0)

#endif
