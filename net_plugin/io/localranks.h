/* What whoever started the job says of how many ranks a node has, from the environment: known
 * before the others of the node have started. */
#ifndef R2_IO_LOCALRANKS_H
#define R2_IO_LOCALRANKS_H

#include <stddef.h>

/* As getenv. */
typedef char *(*r2_env_fn)(const char *name);

/* Ranks on this process's node, itself among them; 0 where nobody says so, or nothing that can be:
 * not a number, more than a node has, more than the job has. In this order: LOCAL_WORLD_SIZE
 * (torchrun, r2ccl-ctl launch), OMPI_COMM_WORLD_LOCAL_SIZE, MPI_LOCALNRANKS,
 * MV2_COMM_WORLD_LOCAL_SIZE; within a step of Slurm SLURM_STEP_TASKS_PER_NODE ("4(x2),3", of which
 * SLURM_NODEID picks one), or SLURM_NTASKS_PER_NODE. In emulated nodes it may be less than run on
 * the machine. Any thread; `env` must not change what it hands out meanwhile. */
int r2_local_ranks(r2_env_fn env);

/* "R2CCL_PORT_RANGE=40000-40003 has 4 ports, a node needs ...", for people; "" where it is not set.
 */
const char *r2_port_range_text(char *out, size_t cap);

#endif
