/* The loops of r2_reduce, compiled once for each kind of processor. Every level gives the same bits
 * (which NaN a NaN is may differ). r2_reduce takes the last level that this processor can run. For
 * reduce.c and its test.
 */
#ifndef R2_REDUCE_LEVELS_H
#define R2_REDUCE_LEVELS_H

#include <stddef.h>

#define R2_REDUCE_LEVELS 3
#define R2_REDUCE_STEP 64 /* `bytes` below is a multiple of this */

struct r2_reduce_level {
    const char *name;
    /* n_in >= 2, a covered pair. AVG of integers is only added up. Any address. */
    void (*run)(char *out, const char *const *in, int n_in, size_t bytes, int type, int op);
};

/* NULL: not on this processor. Level 0 runs everywhere. */
const struct r2_reduce_level *r2_reduce_level(int level);

/* r2_reduce at this level, n_in >= 2. */
void r2_reduce_run(const struct r2_reduce_level *level, void *out, const void *const *in, int n_in,
                   size_t count, int type, int op);

#endif
