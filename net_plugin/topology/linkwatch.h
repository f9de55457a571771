/* Watches links and addresses of the caller's network namespace through netlink.
 *
 * Threads: one watcher belongs to one thread at a time. Once it is open nothing here waits:
 * r2_linkwatch_read takes what the kernel has queued, without the kernel's RTNL lock. Opening one
 * and r2_link_query ask the kernel and may have to wait for that lock, for as long as somebody
 * changes an interface. */
#ifndef R2_TOPOLOGY_LINKWATCH_H
#define R2_TOPOLOGY_LINKWATCH_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>

enum r2_link_event {
    R2_LINK_UP,      /* administratively up, and carrier */
    R2_LINK_DOWN,    /* no carrier, or administratively down */
    R2_LINK_REMOVED, /* the interface is gone, or has left the namespace */
    R2_ADDR_ADDED,
    R2_ADDR_REMOVED,
};

struct r2_linkwatch;
struct r2_net_tables;

/* `addr` is set for address events, port 0, and valid during the call only. */
typedef void (*r2_linkwatch_fn)(void *arg, int ifindex, enum r2_link_event event,
                                const struct sockaddr *addr);

/* Opens a watcher whose first events are relative to the state at this moment. A container may
 * forbid it: -errno, and the caller goes on without link events. */
int r2_linkwatch_open(struct r2_linkwatch **out);
void r2_linkwatch_close(struct r2_linkwatch *watch);
/* The descriptor to poll for reading. */
int r2_linkwatch_fd(const struct r2_linkwatch *watch);
/* Reports what changed since the last call, in order and only changes: a message that repeats a
 * known state is dropped. Returns the number of events or -errno. At most about a thousand messages
 * a call: what is left (not drained) brings no new edge of the descriptor. */
int r2_linkwatch_read(struct r2_linkwatch *watch, r2_linkwatch_fn fn, void *arg);
bool r2_linkwatch_drained(const struct r2_linkwatch *watch);
/* Messages were lost in the kernel's queue: read the tables, after the moment was taken, and say
 * what they have (r2_linkwatch_resync). */
bool r2_linkwatch_stale(const struct r2_linkwatch *watch);

/* When something was, by what had been read until then: to be taken before a question is put. */
uint64_t r2_linkwatch_moment(const struct r2_linkwatch *watch);
/* Something was read about the interface since that moment, told or not, or may have been lost: an
 * answer to a question of then may be older than that. (Now and then said of an interface of which
 * nothing was read.) */
bool r2_linkwatch_since(const struct r2_linkwatch *watch, int ifindex, uint64_t moment);
/* Messages were lost since that moment: the tables are to be read (again). */
bool r2_linkwatch_lost_since(const struct r2_linkwatch *watch, uint64_t moment);
/* What was told of the interface last: R2_LINK_UP, R2_LINK_DOWN or R2_LINK_REMOVED. A message that
 * repeats it is not told again, whatever the caller has found out by itself since. */
int r2_linkwatch_told(const struct r2_linkwatch *watch, int ifindex);
/* Reports in what the tables, asked for at that moment, differ from what was told. Interfaces of
 * which something was read since are left out; the watch stays stale if there is one that differs,
 * or if messages were lost since. To be called with the watch drained. Returns the number of events
 * or -errno. */
int r2_linkwatch_resync(struct r2_linkwatch *watch, const struct r2_net_tables *now,
                        uint64_t moment, r2_linkwatch_fn fn, void *arg);

/* The state now: R2_LINK_UP, R2_LINK_DOWN or R2_LINK_REMOVED, or -errno. The kernel may hold back
 * a carrier event for up to a second after another one; this asks it directly. */
int r2_link_query(int ifindex);

#endif
