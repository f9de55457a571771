/* The journal, read while threads of the process write it. Any thread. */
#ifndef R2_TESTS_JOURNAL_LOOK_H
#define R2_TESTS_JOURNAL_LOOK_H

#include "control/segment.h"

/* Entries so far, some of which may not be whole yet. */
static inline uint64_t journal_head(const struct r2_segment *seg)
{
    return __atomic_load_n(&seg->header.event_head, __ATOMIC_ACQUIRE);
}

/* The first that is still in the ring. */
static inline uint64_t journal_tail(const struct r2_segment *seg)
{
    uint64_t head = journal_head(seg);

    return head > R2_SEG_MAX_EVENTS ? head - R2_SEG_MAX_EVENTS : 0;
}

/* Entry `n`, or NULL while it is being written. It is not written again before the ring has gone
 * round. */
static inline const struct r2_seg_journal_entry *journal_entry(const struct r2_segment *seg,
                                                               uint64_t n)
{
    const struct r2_seg_journal_entry *e = &seg->events[n % R2_SEG_MAX_EVENTS];

    return __atomic_load_n(&e->stamp, __ATOMIC_ACQUIRE) == 2 * n + 2 ? e : NULL;
}

#endif
