/* The cores that I/O threads may run on. Linux's cpu_set_t; needs _GNU_SOURCE. */
#ifndef R2_IO_IOCPUS_H
#define R2_IO_IOCPUS_H

#include <sched.h>
#include <stdbool.h>

/* Those of the calling thread, and how many they are (1 if the kernel does not say). */
int r2_iocpus_allowed(cpu_set_t *set);
/* What `text` (as R2CCL_CPUS) names of `allowed`. False, and `allowed` as it was, when nothing is
 * left. */
bool r2_iocpus_narrow(const char *text, cpu_set_t *allowed);

#endif
