/* The trace of plans (R2CCL_PLAN_TRACE): which communicator of a process ran which plan from which
 * operation on, as text, a line each:
 *
 *     CRC r2ccl-plan-trace 1
 *     CRC comm NAME run RUN ranks N rank R
 *     CRC plan NAME from INDEX table HEX | summary for the reader
 *
 * CRC is the CRC32C of what follows it in the line, in 8 digits; NAME, RUN and HEX are hexadecimal.
 * A table is what plan/table.h encodes, with empty ids: they are secrets of the run that made them
 * and of no use in another. A line that is damaged or cut off makes the whole trace unusable.
 *
 * Pure: no file, clock or setting. Threads: none. Errors: -EINVAL with a line in `why`, -ENOMEM.
 */
#ifndef R2_PLAN_TRACE_H
#define R2_PLAN_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "plan/table.h"

#define R2_TRACE_VERSION 1
#define R2_TRACE_WHY 160            /* most bytes of a reason, NUL included */
#define R2_TRACE_BYTES (64UL << 20) /* most of a trace */

struct r2_trace_plan {
    uint64_t from; /* index of the first operation that ran under it, above 0 */
    struct r2_plan_table *table;
};

struct r2_trace_comm {
    uint64_t name; /* the same in every run of the program, another for every communicator */
    uint64_t run;  /* the same on all its ranks, another in every run */
    int nranks, rank;
    int nplans;
    struct r2_trace_plan *plans; /* by ascending index */
};

struct r2_trace {
    int ncomms;
    struct r2_trace_comm *comms;
};

/* The name of a communicator: of the `ordinal`-th, from 1, that its process made of `parent` (0: of
 * nothing) with the same other properties. */
uint64_t r2_trace_name(uint64_t parent, uint64_t ordinal, uint64_t salt, int nranks, int rank,
                       int device);

/* Lines, malloc'd and NUL-terminated; NULL: no memory, or no valid table. */
char *r2_trace_put_head(void);
char *r2_trace_put_comm(const struct r2_trace_comm *comm);
char *r2_trace_put_plan(uint64_t name, uint64_t from, const struct r2_plan_table *table);

/* `why` has R2_TRACE_WHY bytes. */
int r2_trace_parse(struct r2_trace **out, const char *text, size_t len, char *why);
void r2_trace_free(struct r2_trace *trace);
/* NULL: not in it. */
const struct r2_trace_comm *r2_trace_find(const struct r2_trace *trace, uint64_t name);

/* Whether both bring the same communicators and run the same on them: all but ids and reason. */
bool r2_trace_same(const struct r2_plan_table *a, const struct r2_plan_table *b);

#endif
