/* What tests ask of a ledger, and the engine does not. */
#ifndef R2_TEST_LEDGER_LOOK_H
#define R2_TEST_LEDGER_LOOK_H

#include "engine/core/ledger.h"

/* Claims held by the path with a generation of at most gen: 0 means fenced. */
static inline unsigned r2_recv_claims_on(const struct r2_recv_ledger *l, uint16_t path,
                                         uint32_t gen)
{
    unsigned n = 0;

    for (uint32_t i = 0; i < l->count; i++) {
        const struct r2_recv_claim *c = r2_recv_claim_at(l, i);

        n += c->path == path && c->gen <= gen;
    }
    return n;
}

/* Calls cb for every stretch that is not done, ascending, claimed ones included; up to the total,
 * or to the capacity while the total is unknown. cb returns false to stop. */
static inline void r2_recv_missing(const struct r2_recv_ledger *l, r2_range_fn cb, void *arg)
{
    uint64_t end = l->total_known ? l->total : l->capacity;
    uint64_t gap_end;

    for (uint64_t at = 0; r2_ranges_gap(&l->done, &at, end, &gap_end); at = gap_end) {
        if (!cb(arg, at, gap_end - at)) {
            return;
        }
    }
}

/* A lane may still read bytes of the buffer. */
static inline bool r2_send_reading(const struct r2_send_ledger *l)
{
    const struct r2_send_rec *recs = l->heap ? l->heap : l->small;

    for (uint32_t i = 0; i < l->count; i++) {
        if (recs[i].reading) {
            return true;
        }
    }
    return false;
}

#endif
