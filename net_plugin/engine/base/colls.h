/* Times of collectives: on and off, and out into the control segment. */
#ifndef R2_ENGINE_BASE_COLLS_H
#define R2_ENGINE_BASE_COLLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define R2_COLLS_MASKS 4 /* NCCLs of a process that are recorded */

/* Any thread. As r2_engine_coll_comm_begins and its end. */
bool r2_colls_begin(int *mask, int bits);
void r2_colls_end(const int *mask);
/* The operator's word. 0, or -EOPNOTSUPP where NCCL has not taken the plugin's profiler. */
int r2_colls_record(bool on, char *result, size_t size);
/* I/O thread 0: what has ended goes into the segment. */
void r2_colls_tick(uint64_t now);

#endif
