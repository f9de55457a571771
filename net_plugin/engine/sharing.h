/* The part of the machine's cores that is a process's, where others run on them too. For files with
 * _GNU_SOURCE (cpu_set_t). */
#ifndef R2_ENGINE_SHARING_H
#define R2_ENGINE_SHARING_H

#include <sched.h>
#include <stdint.h>

/* Of the cores that the process may run on, how many other processes may run on each. */
struct r2_sharing {
    cpu_set_t mine;
    uint16_t others[CPU_SETSIZE];
};

/* The cores that the process may run on now, as its main thread may: where it was narrowed (a
 * cpuset, a container, taskset), the others are no use to it. */
void r2_sharing_start(struct r2_sharing *s);
/* Another process, which may run on `set`; NULL: nobody knows, so on all. */
void r2_sharing_add(struct r2_sharing *s, const cpu_set_t *set);
/* The process's part of its cores, each shared out evenly, rounded down; at least 1. */
int r2_sharing_part(const struct r2_sharing *s);

#endif
