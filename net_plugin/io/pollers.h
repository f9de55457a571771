/* How many I/O threads are in use and may poll at once (R2CCL_SPIN), where processes share a
 * machine.
 *
 * A thread that polls answers sooner while its core has nothing better to do. When it has, polling
 * costs throughput and latency. With eight processes of twelve threads on 32 cores AllReduce took
 * up to 2.6 times as long as without polling (docs/decisions.md 19). Work that is given to a thread
 * that may not poll waits until it wakes, and then for a core: so it is given to those that may
 * (docs/decisions.md 26).
 */
#ifndef R2_IO_POLLERS_H
#define R2_IO_POLLERS_H

#include <stdint.h>

struct r2_control;
struct r2_settings;

/* I/O threads of a process that may poll when `part` cores are its part: all but two, which NCCL's
 * progress thread and the application keep busy. Pure. */
int r2_pollers(int part);

/* Takes the launcher's word from the environment (settings/launch.h). When the engine starts, on
 * the thread that starts it: another one might meet the application's setenv. `ctl` (may be NULL:
 * then nobody looks) knows the node's other processes; `set` stays valid. */
void r2_pollers_start(struct r2_control *ctl, const struct r2_settings *set);
/* Looks at the machine and says to the threads how many of them may poll (r2_pause_let) and are
 * given something new (r2_io_use; R2CCL_IO_THREADS, when it is set, says that itself). Nothing if
 * there is one thread, another thread is at it, or the last look is younger than a millisecond or
 * than four looks take. Called right before something is given, and not when the engine starts: a
 * node's ranks start within milliseconds of each other and of their first sockets, and who has just
 * looked does not look again. Any thread; reads a directory (all that is in /dev/shm) and asks for
 * each neighbour's affinity. */
void r2_pollers_look(void);
/* The same, now and then; from the engine's house timer only. `now`: monotonic ns. */
void r2_pollers_house(uint64_t now);

#endif
