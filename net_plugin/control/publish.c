/* The copy that others see.
 *
 * The process works on memory of its own (ctl->seg), and writes what has changed into the object
 * with pwrite. So nothing that others do to the object reaches the process: bytes that they write
 * are overwritten within a second, and a file that they cut short grows again. Only the mailbox is
 * read back (commands.c).
 *
 * A row whose text has changed goes out with an odd sequence number first. It gets its even one
 * when the whole table is there: readers take no half of it. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "control/impl.h"

#define MAX_STRIDE 1024
#define TAKE_TRIES 16
#define LOCK_TRIES 1000

_Static_assert(sizeof(struct r2_seg_process) <= MAX_STRIDE &&
                   sizeof(struct r2_seg_nic) <= MAX_STRIDE &&
                   sizeof(struct r2_seg_peer) <= MAX_STRIDE &&
                   sizeof(struct r2_seg_path) <= MAX_STRIDE &&
                   sizeof(struct r2_seg_comm) <= MAX_STRIDE &&
                   sizeof(struct r2_seg_timing) <= MAX_STRIDE,
               "rows are taken whole");

static void out(struct r2_control *ctl, const void *data, size_t n, size_t at)
{
    /* A full /dev/shm: readers see what was there before. */
    (void)!pwrite(ctl->fd, data, n, (off_t)at);
}

static void copy_words(void *to, const void *from, size_t n)
{
    for (size_t i = 0; i < n / 8; i++) {
        uint64_t value = __atomic_load_n((const uint64_t *)from + i, __ATOMIC_ACQUIRE);

        memcpy((char *)to + i * 8, &value, 8);
    }
}

/* A row as no writer is changing it, into the shadow; one that writers never leave stays as it was
 * published before. True: its text is another one now. */
static bool take_row(const char *from, char *shadow, size_t stride)
{
    const uint32_t *number = (const uint32_t *)(const void *)from;
    uint32_t published;
    uint64_t copy[MAX_STRIDE / 8];

    memcpy(&published, shadow, sizeof(published));
    for (int i = 0; i < TAKE_TRIES; i++) {
        uint32_t seq = __atomic_load_n(number, __ATOMIC_ACQUIRE);

        if (seq & 1) {
            sched_yield();
            continue;
        }
        copy_words(copy, from, stride);
        if (__atomic_load_n(number, __ATOMIC_ACQUIRE) != seq)
            continue;
        memcpy(copy, &seq, sizeof(seq));
        memcpy(shadow, copy, stride);
        return seq != published;
    }
    return false;
}

/* The first `rows` rows of a table. */
static void table(struct r2_control *ctl, size_t offset, size_t stride, uint32_t rows)
{
    const char *from = (const char *)ctl->seg + offset;
    char *shadow = (char *)ctl->shadow + offset;
    bool changed = false;

    for (uint32_t i = 0; i < rows; i++) {
        if (!take_row(from + i * stride, shadow + i * stride, stride))
            continue;
        *(uint32_t *)(void *)(shadow + i * stride) |= 1; /* until the row is there */
        changed = true;
    }
    out(ctl, shadow, rows * stride, offset);
    for (uint32_t i = 0; i < rows && changed; i++) {
        uint32_t *seq = (uint32_t *)(void *)(shadow + i * stride);

        if (!(*seq & 1))
            continue;
        *seq &= ~1u;
        out(ctl, seq, sizeof(*seq), offset + i * stride);
    }
}

static uint32_t used(const uint32_t *high, uint32_t rows)
{
    uint32_t n = __atomic_load_n(high, __ATOMIC_ACQUIRE);

    return n < rows ? n : rows;
}

/* Counters: single words. */
static void words(struct r2_control *ctl, size_t offset, size_t n)
{
    copy_words((char *)ctl->shadow + offset, (const char *)ctl->seg + offset, n);
    out(ctl, (char *)ctl->shadow + offset, n, offset);
}

/* False: its writer is not through with it. */
static bool event(struct r2_control *ctl, uint64_t number)
{
    const struct r2_seg_journal_entry *from = &ctl->seg->events[number % R2_SEG_MAX_EVENTS];
    size_t at = (size_t)((const char *)from - (const char *)ctl->seg);
    uint64_t stamp = __atomic_load_n(&from->stamp, __ATOMIC_ACQUIRE);
    struct r2_seg_journal_entry copy;

    if (stamp != 2 * number + 2)
        return stamp > 2 * number + 2;
    copy_words(&copy, from, sizeof(copy));
    if (__atomic_load_n(&from->stamp, __ATOMIC_ACQUIRE) != stamp)
        return true; /* a newer one has its slot */
    copy.stamp = stamp - 1;
    out(ctl, &copy, sizeof(copy), at);
    out(ctl, &stamp, sizeof(stamp), at);
    return true;
}

static void events(struct r2_control *ctl)
{
    uint64_t head = __atomic_load_n(&ctl->seg->header.event_head, __ATOMIC_RELAXED), n;
    bool whole = true;

    n = ctl->events_out;
    if (head > n + R2_SEG_MAX_EVENTS)
        n = head - R2_SEG_MAX_EVENTS;
    for (; n < head; n++) {
        /* One that was never written (control/journal.c drops some) holds the others up for no
         * longer than the next full look. */
        whole = event(ctl, n) && whole;
        if (whole)
            ctl->events_out = n + 1;
    }
    __atomic_store_n(&ctl->events_head, head, __ATOMIC_RELAXED);
}

static bool lock(struct r2_control *ctl, int tries)
{
    bool free = false;

    while (!__atomic_compare_exchange_n(&ctl->publishing, &free, true, false, __ATOMIC_ACQUIRE,
                                        __ATOMIC_RELAXED)) {
        if (--tries <= 0)
            return false;
        free = false;
        sched_yield();
    }
    return true;
}

static void unlock(struct r2_control *ctl)
{
    __atomic_store_n(&ctl->publishing, false, __ATOMIC_RELEASE);
}

/* Behind the rows: who sees how many there are, or that the process has ended, finds them. */
static void header(struct r2_control *ctl)
{
    words(ctl, offsetof(struct r2_segment, header) + sizeof(uint64_t),
          sizeof(struct r2_seg_header) - sizeof(uint64_t));
    words(ctl, offsetof(struct r2_segment, header.magic), sizeof(uint64_t));
}

void r2_control_publish_events(struct r2_control *ctl)
{
    if (ctl->fd < 0 || !lock(ctl, 1))
        return; /* who has it, or the next poll, does it */
    events(ctl);
    words(ctl, offsetof(struct r2_segment, header.event_head), sizeof(uint64_t));
    words(ctl, offsetof(struct r2_segment, header.tables), sizeof(ctl->seg->header.tables));
    unlock(ctl);
}

bool r2_control_has_news(const struct r2_control *ctl)
{
    return __atomic_load_n(&ctl->seg->header.event_head, __ATOMIC_RELAXED) !=
           __atomic_load_n(&ctl->events_head, __ATOMIC_RELAXED);
}

#define TABLE(ctl, member, high, rows)                                                             \
    table(ctl, offsetof(struct r2_segment, member), sizeof((ctl)->seg->member) / (rows),           \
          used(high, rows))

void r2_control_publish(struct r2_control *ctl, bool whole)
{
    struct r2_seg_header *h = &ctl->seg->header;
    static const uint32_t one = 1;

    if (ctl->fd < 0 || !lock(ctl, LOCK_TRIES))
        return;
    if (whole) {
        ctl->events_out = 0;
        (void)!ftruncate(ctl->fd, sizeof(*ctl->seg)); /* as long as its header says */
    }
    TABLE(ctl, process, &one, 1);
    words(ctl, offsetof(struct r2_segment, counters), sizeof(ctl->seg->counters));
    words(ctl, offsetof(struct r2_segment, gauges), sizeof(ctl->seg->gauges));
    TABLE(ctl, nics, &h->tables[R2_SEG_KIND_NICS - 1].high, R2_SEG_MAX_NICS);
    TABLE(ctl, peers, &h->tables[R2_SEG_KIND_PEERS - 1].high, R2_SEG_MAX_PEERS);
    TABLE(ctl, paths, &h->tables[R2_SEG_KIND_PATHS - 1].high, R2_SEG_MAX_PATHS);
    TABLE(ctl, comms, &r2_control_table(ctl->seg, R2_SEG_KIND_COMMS)->high, R2_SEG_MAX_COMMS);
    TABLE(ctl, timings, &r2_control_table(ctl->seg, R2_SEG_KIND_TIMINGS)->high, R2_SEG_MAX_TIMINGS);
    events(ctl);
    header(ctl);
    unlock(ctl);
}
