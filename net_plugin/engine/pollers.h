/* How many I/O threads may poll at once (R2CCL_SPIN), where processes share a machine.
 *
 * A thread that polls answers sooner while a core has nothing better to do, and costs throughput
 * and latency when one has: with eight processes of twelve threads on 32 cores AllReduce took up
 * to 2.6 times as long as without polling (docs/decisions.md 19).
 */
#ifndef R2_ENGINE_POLLERS_H
#define R2_ENGINE_POLLERS_H

#include <stdint.h>

/* Threads of one process that may, when `processes` of them share `cores`: an equal part of the
 * cores, less two that NCCL's progress thread and the application keep busy. Pure. */
int r2_pollers(int cores, int processes);

/* The cores that the process may run on now, as its main thread may: where it was narrowed (a
 * cpuset, a container, taskset), the others are no use to it. At least 1. */
int r2_pollers_cores(void);

/* Looks at the machine, now and then, and says it to the threads (r2_pause_let). From the
 * engine's house timer only; `now`: monotonic ns. */
void r2_pollers_house(uint64_t now);

#endif
