/* Watches links and addresses of the caller's network namespace through netlink.
 *
 * Threads: one watcher belongs to one thread at a time. Nothing blocks: r2_linkwatch_read returns
 * when the socket is empty; a resynchronisation is bounded by a local dump of the kernel's tables
 * (1 s at most). */
#ifndef R2_TOPOLOGY_LINKWATCH_H
#define R2_TOPOLOGY_LINKWATCH_H

#include <sys/socket.h>

enum r2_link_event {
    R2_LINK_UP,      /* administratively up, and carrier */
    R2_LINK_DOWN,    /* no carrier, or administratively down */
    R2_LINK_REMOVED, /* the interface is gone, or has left the namespace */
    R2_ADDR_ADDED,
    R2_ADDR_REMOVED,
};

struct r2_linkwatch;

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
 * known state is dropped. After a loss in the kernel's queue the tables are read again and the
 * differences reported. Returns the number of events or -errno. */
int r2_linkwatch_read(struct r2_linkwatch *watch, r2_linkwatch_fn fn, void *arg);

/* The state now: R2_LINK_UP, R2_LINK_DOWN or R2_LINK_REMOVED, or -errno. The kernel may hold back
 * a carrier event for up to a second after another one; this asks it directly. */
int r2_link_query(int ifindex);

#endif
