/* How long AllReduces take one rank under what is in force, by size: medians of the first ones, in
 * ns per byte. A class is a power of two. The very first say nothing: connections are made, and
 * windows grow. Pure; one thread at a time.
 */
#ifndef R2_PLAN_TIMES_H
#define R2_PLAN_TIMES_H

#include <stdbool.h>
#include <stdint.h>

#define R2_TIMES_CLASSES 16 /* the first is up to 2 MiB */
#define R2_TIMES_PLAN 20    /* operations that a median is of, under a plan */
#define R2_TIMES_STOCK 5    /* ... and of NCCL */
#define R2_TIMES_SKIP 2

/* What is told of them. */
struct r2_medians {
    float of[2][R2_TIMES_CLASSES]; /* [whether the plan took them]; 0: not known */
};

struct r2_times {
    uint64_t epoch; /* what is in force */
    unsigned skipped;
    unsigned seen[2][R2_TIMES_CLASSES];
    float each[2][R2_TIMES_CLASSES][R2_TIMES_PLAN];
    struct r2_medians known;
};

/* One more, of `epoch`. A later epoch than that of the last one begins anew, an earlier one is not
 * counted. */
void r2_times_add(struct r2_times *t, uint64_t epoch, bool planned, uint64_t bytes, uint64_t ns);
/* What is known, in one word for another thread: an operation whose median is known in its epoch
 * needs no timing. Epochs are told apart by their low 32 bits. */
uint64_t r2_times_done(const struct r2_times *t);
bool r2_times_needs(uint64_t done, uint64_t epoch, bool planned, uint64_t bytes);
/* The first size behind a class. */
uint64_t r2_times_behind(int class);

#endif
