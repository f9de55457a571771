/* Questions that may never be answered, such as requests to a driver whose firmware is dead: put by
 * threads of their own and waited for with a limit. */
#ifndef R2_UTIL_ASK_H
#define R2_UTIL_ASK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#define R2_ASK_SIZE 512 /* bytes of an item, at most */

/* Asks about `n` items of `size` bytes side by side in memory: `ask` fills in a copy of each, which
 * is put back when it has come in time. One thread asks them in order. When it has been stuck for a
 * second, another one continues with the next item. Waits until all have answered, for at most
 * `*steps` seconds. Takes the seconds without an answer off `*steps`, so that several calls can
 * share one bound. Seconds in which the process was stopped do not count. 0 or less: a tenth of a
 * second. `answered[i]` tells which have. Returns how many have not: those items stay as they were,
 * and the thread with the question stays until it comes back.
 *
 * `ask` uses nothing but its item. Any thread. */
int r2_ask_all(void *items, size_t size, int n, void (*ask)(void *item), bool *answered,
               atomic_int *steps);

#endif
