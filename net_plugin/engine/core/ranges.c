#include "engine/core/ranges.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void r2_ranges_init(struct r2_ranges *r)
{
    r->heap = NULL;
    r->count = 0;
    r->cap = R2_RANGES_INLINE;
    r->bytes = 0;
}

void r2_ranges_free(struct r2_ranges *r)
{
    free(r->heap);
    r2_ranges_init(r);
}

static struct r2_range *ranges_data(struct r2_ranges *r)
{
    return r->heap ? r->heap : r->small;
}

int r2_ranges_reserve(struct r2_ranges *r, size_t count)
{
    struct r2_range *fresh;
    size_t cap = r->cap;

    if (count <= cap) {
        return 0;
    }
    if (count > UINT32_MAX / 2) {
        return -ENOMEM;
    }
    while (cap < count) {
        cap *= 2;
    }
    fresh = realloc(r->heap, cap * sizeof(*fresh));
    if (!fresh) {
        return -ENOMEM;
    }
    if (!r->heap) {
        memcpy(fresh, r->small, r->count * sizeof(*fresh));
    }
    r->heap = fresh;
    r->cap = (uint32_t)cap;
    return 0;
}

/* Index of the first range whose end is at or after `end`; count when there is none. */
static uint32_t ranges_ending_from(const struct r2_ranges *r, uint64_t end)
{
    uint32_t lo = 0;
    uint32_t hi = r->count;

    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;

        if (r2_ranges_at(r, mid)->end >= end) {
            hi = mid;
        } else {
            lo = mid + 1;
        }
    }
    return lo;
}

/* Replaces `gone` ranges at index `at` by `fresh` unset ones. The capacity must be there. */
static void ranges_splice(struct r2_ranges *r, uint32_t at, uint32_t gone, uint32_t fresh)
{
    struct r2_range *d = ranges_data(r);

    memmove(d + at + fresh, d + at + gone, (r->count - at - gone) * sizeof(*d));
    r->count = r->count - gone + fresh;
}

int r2_ranges_add(struct r2_ranges *r, uint64_t off, uint64_t len)
{
    uint64_t end = off + len;
    uint64_t merged = 0;
    uint32_t first;
    uint32_t last;
    struct r2_range *d;

    if (end < off) {
        return -EINVAL;
    }
    if (len == 0) {
        return 0;
    }
    /* Ranges first .. last-1 touch the new one and melt into it. */
    first = ranges_ending_from(r, off);
    for (last = first; last < r->count && r2_ranges_at(r, last)->off <= end; last++) {
        merged += r2_ranges_at(r, last)->end - r2_ranges_at(r, last)->off;
    }
    if (first == last) {
        int err = r2_ranges_reserve(r, (size_t)r->count + 1);

        if (err) {
            return err;
        }
    } else {
        uint64_t first_off = r2_ranges_at(r, first)->off;
        uint64_t last_end = r2_ranges_at(r, last - 1)->end;

        off = first_off < off ? first_off : off;
        end = last_end > end ? last_end : end;
    }
    ranges_splice(r, first, last - first, 1);
    d = ranges_data(r);
    d[first].off = off;
    d[first].end = end;
    r->bytes += (end - off) - merged;
    return 0;
}

int r2_ranges_remove(struct r2_ranges *r, uint64_t off, uint64_t len)
{
    uint64_t end = off + len;
    uint64_t gone = 0;
    struct r2_range left = {off, off};
    struct r2_range right = {end, end};
    uint32_t first;
    uint32_t last;
    uint32_t keep;

    if (end < off) {
        return -EINVAL;
    }
    if (len == 0) {
        return 0;
    }
    first = ranges_ending_from(r, off + 1);
    for (last = first; last < r->count && r2_ranges_at(r, last)->off < end; last++) {
        const struct r2_range *x = r2_ranges_at(r, last);

        left.off = x->off < left.off ? x->off : left.off;
        right.end = x->end > right.end ? x->end : right.end;
        gone += (x->end < end ? x->end : end) - (x->off > off ? x->off : off);
    }
    if (first == last) {
        return 0;
    }
    keep = (left.off < left.end) + (right.off < right.end);
    if (keep > last - first) {
        int err = r2_ranges_reserve(r, (size_t)r->count + 1);

        if (err) {
            return err;
        }
    }
    ranges_splice(r, first, last - first, keep);
    if (left.off < left.end) {
        ranges_data(r)[first++] = left;
    }
    if (right.off < right.end) {
        ranges_data(r)[first] = right;
    }
    r->bytes -= gone;
    return 0;
}

bool r2_ranges_contains(const struct r2_ranges *r, uint64_t off, uint64_t len)
{
    uint32_t i;

    if (len == 0) {
        return true;
    }
    if (off + len < off) {
        return false;
    }
    i = ranges_ending_from(r, off + len);
    return i < r->count && r2_ranges_at(r, i)->off <= off;
}

uint64_t r2_ranges_overlap(const struct r2_ranges *r, uint64_t off, uint64_t len)
{
    uint64_t end = off + len < off ? UINT64_MAX : off + len;
    uint64_t sum = 0;

    for (uint32_t i = ranges_ending_from(r, off); i < r->count; i++) {
        const struct r2_range *x = r2_ranges_at(r, i);
        uint64_t lo = x->off > off ? x->off : off;
        uint64_t hi = x->end < end ? x->end : end;

        if (x->off >= end) {
            break;
        }
        sum += hi > lo ? hi - lo : 0;
    }
    return sum;
}

uint64_t r2_ranges_first_gap(const struct r2_ranges *r, uint64_t off)
{
    uint32_t i = off == UINT64_MAX ? r->count : ranges_ending_from(r, off + 1);

    if (i < r->count && r2_ranges_at(r, i)->off <= off) {
        return r2_ranges_at(r, i)->end;
    }
    return off;
}

bool r2_ranges_gap(const struct r2_ranges *r, uint64_t *off, uint64_t end, uint64_t *gap_end)
{
    uint64_t start = r2_ranges_first_gap(r, *off);
    uint32_t i;

    if (start >= end) {
        return false;
    }
    i = ranges_ending_from(r, start + 1);
    *off = start;
    *gap_end = i < r->count && r2_ranges_at(r, i)->off < end ? r2_ranges_at(r, i)->off : end;
    return true;
}
