/* Inside control/: the object and the row writer's tools. */
#ifndef R2_CONTROL_IMPL_H
#define R2_CONTROL_IMPL_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "control/control.h"

#define R2_CONTROL_NAME 128 /* of the object, with the leading "/" */

#define R2_CONTROL_BASE (R2_CONTROL_NAME - 16)

struct r2_control {
    struct r2_segment *seg;           /* the process's own: nobody else can write there */
    struct r2_segment *shadow;        /* what was published last; unused without an object */
    int fd;                           /* the object; -1: none */
    bool publishing;                  /* by one thread at a time */
    uint64_t events_out, events_head; /* published; looked at. Of the publishing thread */
    bool in_reserve;                  /* the static object for when memory is out */
    char name[R2_CONTROL_NAME];
    char base[R2_CONTROL_BASE]; /* what the names of this process's objects began with at the start:
                                   /proc, or the effective user, may say something else later */
    uint64_t alive_mono_ns;     /* of the last sign of life; polling thread only */
    uint64_t published_mono_ns; /* polling thread only */
    /* where row -1 leads */
    struct r2_seg_nic_counters no_nic;
    struct r2_seg_path_counters no_path;
};

static inline uint64_t r2_control_clock(clockid_t clock)
{
    struct timespec ts;

    clock_gettime(clock, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Where a table lies. */
static inline struct r2_seg_table *r2_control_table(struct r2_segment *seg, enum r2_seg_kind kind)
{
    struct r2_seg_header *h = &seg->header;

    return kind <= R2_SEG_TABLES ? &h->tables[kind - 1] : &h->more[kind - 1 - R2_SEG_TABLES];
}

/* The text part of a row is written between begin and end.
 *
 * begin is also the lock between writers: it takes `seq` from even to odd. Its acquire pairs with
 * the release in end of the writer before, so that one's stores are seen. All stores in between are
 * releases (the helpers below). A reader that sees one of them with an acquire load also sees the
 * odd number that was stored before it. It throws its copy away. */
void r2_row_begin(uint32_t *seq);
void r2_row_end(uint32_t *seq);

static inline void r2_row_u32(uint32_t *field, uint32_t value)
{
    __atomic_store_n(field, value, __ATOMIC_RELEASE);
}
static inline void r2_row_u64(uint64_t *field, uint64_t value)
{
    __atomic_store_n(field, value, __ATOMIC_RELEASE);
}
/* `size`: of the field, a multiple of 8, as is its address. Cuts on a character boundary. */
void r2_row_text(char *field, size_t size, const char *text);
/* The same with a sentence, of which as many words are kept as fit in front of " ...". */
void r2_row_cause(char *field, size_t size, const char *text);
/* Bytes of `text` that fit into `room`: all of it, or up to the end of a word (of a character,
 * where that would leave less than half). Not 0 where there is something and room for it. */
size_t r2_row_words(const char *text, size_t room);
/* As r2_row_text with `n` bytes that are no text. */
void r2_row_bytes(void *field, const void *data, size_t n);
/* Raises a table's mark of rows ever used. */
void r2_row_mark(struct r2_control *ctl, enum r2_seg_kind kind, uint32_t row);

/* Fills the process row, what the environment knows of rank and job included. */
void r2_control_describe(struct r2_control *ctl, const struct r2_control_info *info);
/* Start ticks of this process and inode of its PID namespace; 0 where /proc does not say. */
uint64_t r2_control_start_ticks(void);
uint64_t r2_control_pidns(void);

/* Writes what has changed into the object. `whole`: what somebody else may have damaged, too. */
void r2_control_publish(struct r2_control *ctl, bool whole);
/* New events only, unless another thread publishes just now. A few microseconds. */
void r2_control_publish_events(struct r2_control *ctl);
/* Events that were not looked at. Polling thread. */
bool r2_control_has_news(const struct r2_control *ctl);

#define R2_CONTROL_PREFIX "r2ccl."

/* Removes this user's objects that nobody holds, as control.h says, of all whose names start with
 * `prefix`; `own` is this process's base name ("r2ccl.0.1.2.3"), whose objects are not even opened;
 * `now`: CLOCK_REALTIME. Returns the number removed. */
int r2_control_sweep(const char *prefix, const char *own, uint64_t now);
/* Those that somebody holds, of this user; the own ones are left alone. `each`, unless NULL, hears
 * of every one, with its holder's process id; 0: that is in another PID namespace. */
int r2_control_count_held(const char *prefix, const char *own, r2_control_holder_fn each,
                          void *arg);

#endif
