/* What whoever started the job says of it, in the environment: known before the others of the node
 * have started. */
#ifndef R2_SETTINGS_LAUNCH_H
#define R2_SETTINGS_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>

#include "util/log.h"

/* The rank in the job, and on the node; -1: not said. */
int r2_launch_rank(void);
int r2_launch_local_rank(void);

/* As getenv. */
typedef char *(*r2_env_fn)(const char *name);

/* Ranks on this process's node, itself among them; 0 where nobody says so, or nothing that can be:
 * not a number, more than a node has, more than the job has. In this order: LOCAL_WORLD_SIZE
 * (torchrun, r2ccl-ctl launch), OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS,
 * MV2_COMM_WORLD_LOCAL_SIZE; within a step of Slurm SLURM_STEP_TASKS_PER_NODE ("4(x2),3", of which
 * SLURM_NODEID picks one), or SLURM_NTASKS_PER_NODE. In emulated nodes it may be less than run on
 * the machine. Any thread; `env` must not change what it hands out meanwhile. */
int r2_launch_local_ranks(r2_env_fn env);

/* Whether this process speaks for those with the same settings: rank 0 of a job whose settings are
 * all in the environment, the first rank of each node where a file is read, and whoever does not
 * know its rank. */
bool r2_launch_speaks(void);

/* About what the user has given to all ranks alike: one of them warns, the others say it at level
 * INFO. */
#define R2_TELL_ONE(...)                                                                           \
    do {                                                                                           \
        if (r2_launch_speaks())                                                                    \
            R2_TELL(__VA_ARGS__);                                                                  \
        else                                                                                       \
            R2_INFO(__VA_ARGS__);                                                                  \
    } while (0)

/* "R2CCL_PORT_RANGE=40000-40003 has 4 ports, a node needs ...", for people; "" where it is not set.
 */
const char *r2_port_range_text(char *out, size_t cap);

#endif
