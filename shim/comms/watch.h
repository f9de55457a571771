/* The shim's thread: it looks at the node's NICs, and lets the communicators that plan know.
 *
 * Started with the first entry, it lives as long as the process (the library is never unloaded).
 * Entries are looked at under the list's lock: r2_watch_remove returns when nobody looks at the
 * entry any more and never will. */
#ifndef R2_COMMS_WATCH_H
#define R2_COMMS_WATCH_H

#include <stdbool.h>
#include <stdint.h>

struct r2_watch_entry {
    struct r2_watch_entry *next;
    /* capacity: bytes/s of all NICs of the process but spares, 0: not known; share: what is left of
     * it, in 1/65536. Returns when to look again at the latest. */
    uint64_t (*look)(struct r2_watch_entry *entry, uint64_t capacity, uint32_t share,
                     uint64_t now_ns);
};

void r2_watch_add(struct r2_watch_entry *entry);
void r2_watch_remove(struct r2_watch_entry *entry);
/* Look soon. Any thread, never waits. */
void r2_watch_wake(void);
/* Whether the operator wants stock NCCL in this process (r2ccl-ctl plan off). */
bool r2_watch_stop(void);
/* A line in the process's journal, about plans. */
void r2_watch_journal(const char *text);
/* ... about a communicator that has failed. Both: any thread, never waits. */
void r2_watch_journal_failed(const char *text);

#endif
