/* NCCL's thread in the place of sleeping I/O threads.
 *
 * Where there is one I/O thread, cores are few: as long as that one sleeps, NCCL's, which polls all
 * the same, does what is due on its sockets (r2_io_lend), without end.
 *
 * Where a slow NIC is what is waited for (r2_pause_limited), no I/O thread polls. Each would be
 * woken for every piece that the NIC lets through. NCCL's thread does what is due on their sockets,
 * one thread's for each look, and they go on sleeping. When nearly every look finds work, the NICs
 * are too many or too fast for one thread, or it has too much else to do. Then the I/O threads are
 * left to themselves for a while.
 */
#ifndef R2_IO_STANDIN_H
#define R2_IO_STANDIN_H

#include <stdbool.h>
#include <stdint.h>

/* By a thread that polls, without locks. True: it stood in for the only I/O thread, or slow NICs
 * are what is waited for, and sockets (of peers that are: slownics.c) need no other help; false:
 * they do. */
bool r2_standin_look(void);
/* r2_pause_limit; when it says that the NICs carry too much for one thread, those that sleep
 * because somebody stands in for them are woken. Any thread, any lock. */
void r2_standin_limit(uint64_t now, uint64_t bytes);

#endif
