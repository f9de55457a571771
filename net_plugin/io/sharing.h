/* The part of the machine's cores that is a process's, where others run on them too. For files with
 * _GNU_SOURCE (cpu_set_t). */
#ifndef R2_IO_SHARING_H
#define R2_IO_SHARING_H

#include <sched.h>
#include <stdint.h>

/* Of the cores that the process may run on, how many other processes may run on each. */
struct r2_sharing {
    cpu_set_t mine;
    uint16_t others[CPU_SETSIZE];
    int n;    /* those of them that may run on any of its cores */
    int most; /* cores that its part is at most; 0: as many as it has */
};

/* Somebody's word, how many processes like this one run on the machine. */
struct r2_sharing_word {
    int n;          /* processes, this one among them; 0: none given, or over */
    uint64_t until; /* ns, of the caller's clock */
};

/* The cores that the process may run on now, as its main thread may: where it was narrowed (a
 * cpuset, a container, taskset), the others are no use to it. */
void r2_sharing_start(struct r2_sharing *s);
/* Another process, which may run on `set`; NULL: nobody knows, so on all. */
void r2_sharing_add(struct r2_sharing *s, const cpu_set_t *set);
/* It runs on a machine of `cores` with `n` - 1 others like it, wherever those may run: none has
 * more than its part of the machine. Those that are bound to cores of their own have less than
 * that, and it changes nothing. `cores` or `n` below 1: nothing is said. */
void r2_sharing_among(struct r2_sharing *s, int cores, int n);
/* How many the word stands for now, 0 for none: it is over for good when so many have been seen
 * sharing cores with this one (`seen`, itself among them), or its time is. Pure. */
int r2_sharing_word(struct r2_sharing_word *w, int seen, uint64_t now);
/* The process's part of its cores, each shared out evenly, rounded down; at least 1. */
int r2_sharing_part(const struct r2_sharing *s);

#endif
