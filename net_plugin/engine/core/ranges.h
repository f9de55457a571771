/* A set of bytes, kept as sorted ranges. Part of the ledger.
 *
 * Ownership: a set owns its array; small sets allocate nothing. Threads: the caller serialises
 * access. Ranges are never adjacent, never empty and never overlap.
 */
#ifndef R2_ENGINE_CORE_RANGES_H
#define R2_ENGINE_CORE_RANGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define R2_RANGES_INLINE 4

struct r2_range {
    uint64_t off;
    uint64_t end; /* first byte after it */
};

struct r2_ranges {
    struct r2_range *heap; /* NULL while the inline ones suffice */
    uint32_t count;
    uint32_t cap;
    uint64_t bytes; /* total */
    struct r2_range small[R2_RANGES_INLINE];
};

void r2_ranges_init(struct r2_ranges *r);
void r2_ranges_free(struct r2_ranges *r);
/* Room for `count` ranges in all: adds and removes that stay below it cannot fail. */
int r2_ranges_reserve(struct r2_ranges *r, size_t count);
/* 0, -EINVAL (off + len overflows) or -ENOMEM (nothing changed). len 0 does nothing. */
int r2_ranges_add(struct r2_ranges *r, uint64_t off, uint64_t len);
int r2_ranges_remove(struct r2_ranges *r, uint64_t off, uint64_t len);
/* True when every byte of [off, off+len) is in the set (always for len 0). */
bool r2_ranges_contains(const struct r2_ranges *r, uint64_t off, uint64_t len);
/* Bytes of [off, off+len) that are in the set. */
uint64_t r2_ranges_overlap(const struct r2_ranges *r, uint64_t off, uint64_t len);
/* First byte at or after `off` that is not in the set. */
uint64_t r2_ranges_first_gap(const struct r2_ranges *r, uint64_t off);
/* First stretch of [*off, end) that is not in the set: true, and [*off, *gap_end). Else false. */
bool r2_ranges_gap(const struct r2_ranges *r, uint64_t *off, uint64_t end, uint64_t *gap_end);

/* Range number i, 0 <= i < count, in ascending order. */
static inline const struct r2_range *r2_ranges_at(const struct r2_ranges *r, uint32_t i)
{
    return &(r->heap ? r->heap : r->small)[i];
}

#endif
