/* The plan that ranks agree on: a complete table, made once by the leader and shipped. Nothing
 * that must be equal on all ranks is computed again from it except by integer arithmetic.
 *
 * A plan lists communicators to have (each: an id of its own that NCCL made on the leader, and the
 * rank order) and what runs on them. "Make, then switch" are two plans: the first has the
 * communicators and no entries, the second the same communicators (same key) with entries.
 *
 * Threads: none. r2_plan_table_decode allocates one block; free it with r2_plan_table_free. What
 * is decoded was checked: counts, ranges, permutations, boundaries ascending.
 */
#ifndef R2_PLAN_TABLE_H
#define R2_PLAN_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "plan/plan.h"

#define R2_PLAN_ENTRIES 32

enum r2_plan_coll { /* numbers are shipped */
                    R2_PLAN_ALLREDUCE = 0,
                    R2_PLAN_REDUCESCATTER = 1,
                    R2_PLAN_ALLGATHER = 2,
                    R2_PLAN_BROADCAST = 3,
                    R2_PLAN_REDUCE = 4,
                    R2_PLAN_COLLS
};

enum r2_plan_class { R2_PLAN_ANY_TYPE = 0, R2_PLAN_FLOATS = 1, R2_PLAN_INTS = 2, R2_PLAN_CLASSES };

struct r2_plan_comm {
    uint64_t key;    /* names this order on this parent, never 0: equal key = same communicator */
    uint8_t id[128]; /* ncclUniqueId */
    const uint32_t *ranks; /* [nranks]: old rank at each new rank */
};

struct r2_plan_entry {
    uint8_t coll, type_class, schedule; /* r2_plan_coll, r2_plan_class, r2_plan_schedule */
    uint8_t segments;                   /* parts of the data: 1..R2_PLAN_ORDERS */
    uint64_t from_bytes, below_bytes;   /* size range, [from, below) */
    uint32_t comm[R2_PLAN_ORDERS];      /* part i runs on comms[comm[i]] */
    uint32_t boundary[R2_PLAN_ORDERS];  /* part i begins here, in 1/R2_PLAN_UNIT; [0] is 0 */
};

struct r2_plan_table {
    int nranks, ncomms, nentries;
    struct r2_plan_comm comms[R2_PLAN_ORDERS];
    struct r2_plan_entry entries[R2_PLAN_ENTRIES];
    char reason[R2_PLAN_REASON];
};

/* Bytes needed, or -errno (-EINVAL: not a valid table). Writes at most `room` bytes. */
long r2_plan_table_encode(const struct r2_plan_table *t, void *out, size_t room);
/* The same to memory of its own, the caller's to free; 0, -EINVAL or -ENOMEM. */
int r2_plan_table_pack(const struct r2_plan_table *t, void **out, size_t *len);
/* 0, -EINVAL (not a table for `nranks` ranks) or -ENOMEM. */
int r2_plan_table_decode(struct r2_plan_table **out, const void *data, size_t len, int nranks);
void r2_plan_table_free(struct r2_plan_table *t);

/* The entry for an operation of `bytes` bytes per rank, or NULL: stock NCCL. The first that fits
 * wins. */
const struct r2_plan_entry *r2_plan_table_find(const struct r2_plan_table *t, int coll,
                                               int type_class, uint64_t bytes);

/* Elements [*first, *first + *count) of part `part` of `elements`: boundaries rounded down to
 * multiples of `align` elements; the parts cover all, none overlap, some may be empty. */
void r2_plan_entry_part(const struct r2_plan_entry *e, int part, uint64_t elements, uint64_t align,
                        uint64_t *first, uint64_t *count);

/* A table from a plan, with empty comm ids for the caller to fill (keys are set). 0, -EINVAL or
 * -ENOMEM. `make_only`: no entries. */
int r2_plan_table_from_plan(struct r2_plan_table **out, const struct r2_plan *plan, bool make_only);

#endif
