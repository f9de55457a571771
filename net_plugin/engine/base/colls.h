/* Times of collectives: on and off, and out into the control segment. */
#ifndef R2_ENGINE_BASE_COLLS_H
#define R2_ENGINE_BASE_COLLS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Any thread. As r2_engine_coll_switch. */
void r2_colls_switch(int *mask, int bits);
/* The operator's word. 0, or -EOPNOTSUPP where NCCL has not taken the plugin's profiler. */
int r2_colls_record(bool on, char *result, size_t size);
/* I/O thread 0: what has ended goes into the segment. */
void r2_colls_tick(uint64_t now);

#endif
