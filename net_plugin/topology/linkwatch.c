#define _GNU_SOURCE
#include "topology/linkwatch.h"

#include <errno.h>
#include <linux/rtnetlink.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "topology/nettables.h"

#define R2_LINKWATCH_BUFFER 32768
#define R2_LINKWATCH_MESSAGES 1024 /* per call: a storm must not keep the caller for ever */
#define R2_LINKWATCH_SLOTS 64      /* of interfaces, by index */

struct r2_linkwatch {
    int fd;
    struct r2_net_tables known;         /* what the caller has been told */
    uint64_t moment;                    /* grows with all that is read */
    uint64_t heard[R2_LINKWATCH_SLOTS]; /* when the last message about such an interface was read */
    uint64_t lost_at;                   /* when the last loss was over; 0: none */
    bool losing;  /* the kernel leaves messages out, until its queue has been empty */
    bool stale;   /* `known` lacks what was lost */
    bool drained; /* the last read has left nothing behind */
    _Alignas(struct nlmsghdr) char buffer[R2_LINKWATCH_BUFFER];
};

/* One call of r2_linkwatch_read. */
struct r2_linkwatch_report {
    struct r2_linkwatch *watch;
    r2_linkwatch_fn fn;
    void *arg;
    int count;
};

static void r2_linkwatch_tell(struct r2_linkwatch_report *r, int ifindex, enum r2_link_event event,
                              const struct r2_net_addr *addr)
{
    r->fn(r->arg, ifindex, event, addr ? (const struct sockaddr *)&addr->addr : NULL);
    r->count++;
}

int r2_linkwatch_open(struct r2_linkwatch **out)
{
    struct r2_linkwatch *w = calloc(1, sizeof(*w));
    int size = 1 << 20; /* hundreds of events between two reads; the kernel may grant less */
    int rc;

    *out = NULL;
    if (!w) {
        return -ENOMEM;
    }
    /* Listen first, read the tables second: what changes in between arrives as an event. */
    w->fd = r2_netlink_open(RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR);
    rc = w->fd < 0 ? w->fd : r2_net_tables_read(&w->known);
    if (rc) {
        r2_linkwatch_close(w);
        return rc;
    }
    setsockopt(w->fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof(size));
    *out = w;
    return 0;
}

void r2_linkwatch_close(struct r2_linkwatch *watch)
{
    if (!watch) {
        return;
    }
    if (watch->fd >= 0) {
        close(watch->fd);
    }
    r2_net_tables_free(&watch->known);
    free(watch);
}

int r2_linkwatch_fd(const struct r2_linkwatch *watch)
{
    return watch->fd;
}

/* ---- one change at a time ---- */

static int r2_linkwatch_link(struct r2_linkwatch_report *r, const struct r2_net_link *link)
{
    struct r2_net_tables *known = &r->watch->known;
    struct r2_net_link *old = r2_net_tables_link(known, link->ifindex);
    bool up = r2_net_link_is_up(link);

    if (old) {
        bool changed = r2_net_link_is_up(old) != up;

        *old = *link;
        if (changed) {
            r2_linkwatch_tell(r, link->ifindex, up ? R2_LINK_UP : R2_LINK_DOWN, NULL);
        }
        return 0;
    }
    old = reallocarray(known->links, (size_t)known->nlinks + 1, sizeof(*old));
    if (!old) {
        return -ENOMEM;
    }
    known->links = old;
    known->links[known->nlinks++] = *link;
    r2_linkwatch_tell(r, link->ifindex, up ? R2_LINK_UP : R2_LINK_DOWN, NULL);
    return 0;
}

static void r2_linkwatch_unlink(struct r2_linkwatch_report *r, int ifindex)
{
    struct r2_net_tables *known = &r->watch->known;
    struct r2_net_link *old = r2_net_tables_link(known, ifindex);

    if (old) {
        *old = known->links[--known->nlinks];
        r2_linkwatch_tell(r, ifindex, R2_LINK_REMOVED, NULL);
    }
}

static struct r2_net_addr *r2_linkwatch_find(const struct r2_net_tables *t,
                                             const struct r2_net_addr *addr)
{
    for (int i = 0; i < t->naddrs; i++) {
        if (t->addrs[i].ifindex == addr->ifindex && t->addrs[i].prefixlen == addr->prefixlen &&
            r2_sockaddr_equal((struct sockaddr *)&t->addrs[i].addr,
                              (const struct sockaddr *)&addr->addr)) {
            return &t->addrs[i];
        }
    }
    return NULL;
}

static int r2_linkwatch_addr(struct r2_linkwatch_report *r, const struct r2_net_addr *addr)
{
    struct r2_net_tables *known = &r->watch->known;
    struct r2_net_addr *grown;

    if (r2_linkwatch_find(known, addr)) {
        return 0;
    }
    grown = reallocarray(known->addrs, (size_t)known->naddrs + 1, sizeof(*grown));
    if (!grown) {
        return -ENOMEM;
    }
    known->addrs = grown;
    known->addrs[known->naddrs++] = *addr;
    r2_linkwatch_tell(r, addr->ifindex, R2_ADDR_ADDED, addr);
    return 0;
}

static void r2_linkwatch_unaddr(struct r2_linkwatch_report *r, const struct r2_net_addr *addr)
{
    struct r2_net_tables *known = &r->watch->known;
    struct r2_net_addr *old = r2_linkwatch_find(known, addr);

    if (old) {
        *old = known->addrs[--known->naddrs];
        r2_linkwatch_tell(r, addr->ifindex, R2_ADDR_REMOVED, addr);
    }
}

static void r2_linkwatch_hear(struct r2_linkwatch *w, int ifindex)
{
    w->heard[(unsigned)ifindex % R2_LINKWATCH_SLOTS] = ++w->moment;
}

static int r2_linkwatch_new_addr(struct r2_linkwatch_report *r, const struct r2_net_addr *addr)
{
    r2_linkwatch_hear(r->watch, addr->ifindex);
    return r2_linkwatch_addr(r, addr);
}

static int r2_linkwatch_message(struct r2_linkwatch_report *r, const struct nlmsghdr *m)
{
    struct r2_net_link link;
    struct r2_net_addr addr;

    switch (m->nlmsg_type) {
    case RTM_NEWLINK:
    case RTM_DELLINK:
        /* A bridge speaks of its ports in its own family: they are still there. */
        if (m->nlmsg_len < NLMSG_LENGTH(sizeof(struct ifinfomsg)) ||
            ((const struct ifinfomsg *)NLMSG_DATA(m))->ifi_family != AF_UNSPEC ||
            r2_netlink_decode_link(m, &link)) {
            return 0;
        }
        r2_linkwatch_hear(r->watch, link.ifindex);
        if (m->nlmsg_type == RTM_NEWLINK) {
            return r2_linkwatch_link(r, &link);
        }
        r2_linkwatch_unlink(r, link.ifindex);
        return 0;
    case RTM_NEWADDR:
        return r2_netlink_decode_addr(m, &addr) ? 0 : r2_linkwatch_new_addr(r, &addr);
    case RTM_DELADDR:
        if (r2_netlink_decode_addr(m, &addr) == 0) {
            r2_linkwatch_hear(r->watch, addr.ifindex);
            r2_linkwatch_unaddr(r, &addr);
        }
        return 0;
    default:
        return 0;
    }
}

/* ---- after a loss ---- */

/* The kernel says once that its queue was full, and leaves out whatever comes until the queue has
 * been empty. */
static void r2_linkwatch_lost(struct r2_linkwatch *w)
{
    w->losing = w->stale = true;
    w->lost_at = ++w->moment;
}

static void r2_linkwatch_empty(struct r2_linkwatch *w)
{
    w->drained = true;
    if (w->losing) {
        w->losing = false;
        w->lost_at = ++w->moment;
    }
}

static bool r2_linkwatch_fresh(struct r2_linkwatch *w, int ifindex, uint64_t moment)
{
    bool fresh = !r2_linkwatch_since(w, ifindex, moment);

    w->stale |= !fresh;
    return fresh;
}

/* Told and in the tables alike: so it was when they were read, and what was read since has been
 * told. */
static bool r2_linkwatch_same(struct r2_linkwatch *w, const struct r2_net_link *now)
{
    const struct r2_net_link *old = r2_net_tables_link(&w->known, now->ifindex);

    return old && r2_net_link_is_up(old) == r2_net_link_is_up(now);
}

int r2_linkwatch_resync(struct r2_linkwatch *watch, const struct r2_net_tables *now,
                        uint64_t moment, r2_linkwatch_fn fn, void *arg)
{
    struct r2_linkwatch_report r = {.watch = watch, .fn = fn, .arg = arg};
    struct r2_net_tables *known = &watch->known;
    int rc = 0;

    watch->stale = watch->lost_at > moment;
    if (watch->stale) {
        return 0;
    }
    for (int i = known->naddrs - 1; i >= 0; i--) {
        struct r2_net_addr addr = known->addrs[i];

        if (!r2_linkwatch_find(now, &addr) && r2_linkwatch_fresh(watch, addr.ifindex, moment)) {
            r2_linkwatch_unaddr(&r, &addr);
        }
    }
    for (int i = known->nlinks - 1; i >= 0; i--) {
        int ifindex = known->links[i].ifindex;

        if (!r2_net_tables_link(now, ifindex) && r2_linkwatch_fresh(watch, ifindex, moment)) {
            r2_linkwatch_unlink(&r, ifindex);
        }
    }
    for (int i = 0; i < now->nlinks && rc == 0; i++) {
        if (!r2_linkwatch_same(watch, &now->links[i]) &&
            r2_linkwatch_fresh(watch, now->links[i].ifindex, moment)) {
            rc = r2_linkwatch_link(&r, &now->links[i]);
        }
    }
    for (int i = 0; i < now->naddrs && rc == 0; i++) {
        if (!r2_linkwatch_find(known, &now->addrs[i]) &&
            r2_linkwatch_fresh(watch, now->addrs[i].ifindex, moment)) {
            rc = r2_linkwatch_addr(&r, &now->addrs[i]);
        }
    }
    watch->stale |= rc != 0;
    return rc ? rc : r.count;
}

int r2_linkwatch_read(struct r2_linkwatch *watch, r2_linkwatch_fn fn, void *arg)
{
    struct r2_linkwatch_report r = {.watch = watch, .fn = fn, .arg = arg};
    int rc = 0;

    watch->drained = false;
    for (int messages = 0; rc == 0 && messages < R2_LINKWATCH_MESSAGES;) {
        struct sockaddr_nl from = {0};
        socklen_t fromlen = sizeof(from);
        ssize_t n = recvfrom(watch->fd, watch->buffer, sizeof(watch->buffer), MSG_DONTWAIT,
                             (struct sockaddr *)&from, &fromlen);
        int left = (int)n;

        if (n < 0 && errno == ENOBUFS) {
            r2_linkwatch_lost(watch);
        } else if (n < 0 && errno != EINTR) { /* EAGAIN: that was all */
            rc = errno == EAGAIN ? 0 : -errno;
            r2_linkwatch_empty(watch);
            break;
        }
        if (n < 0 || from.nl_pid != 0) { /* or not from the kernel */
            messages++;
            continue;
        }
        for (struct nlmsghdr *m = (struct nlmsghdr *)watch->buffer;
             left > 0 && NLMSG_OK(m, (unsigned)left) && rc == 0;
             m = NLMSG_NEXT(m, left), messages++) {
            rc = r2_linkwatch_message(&r, m);
            if (rc) { /* no memory: as if the kernel had lost it */
                r2_linkwatch_lost(watch);
            }
        }
    }
    return rc ? rc : r.count;
}

bool r2_linkwatch_drained(const struct r2_linkwatch *watch)
{
    return watch->drained;
}

bool r2_linkwatch_stale(const struct r2_linkwatch *watch)
{
    return watch->stale;
}

uint64_t r2_linkwatch_moment(const struct r2_linkwatch *watch)
{
    return watch->moment;
}

bool r2_linkwatch_lost_since(const struct r2_linkwatch *watch, uint64_t moment)
{
    return watch->lost_at > moment;
}

int r2_linkwatch_told(const struct r2_linkwatch *watch, int ifindex)
{
    const struct r2_net_link *link = r2_net_tables_link(&watch->known, ifindex);

    return !link ? R2_LINK_REMOVED : r2_net_link_is_up(link) ? R2_LINK_UP : R2_LINK_DOWN;
}

bool r2_linkwatch_since(const struct r2_linkwatch *watch, int ifindex, uint64_t moment)
{
    return watch->lost_at > moment || watch->heard[(unsigned)ifindex % R2_LINKWATCH_SLOTS] > moment;
}

int r2_link_query(int ifindex)
{
    struct r2_net_link link;
    int rc = r2_net_link_read(ifindex, &link);

    if (rc == -ENODEV) {
        return R2_LINK_REMOVED;
    }
    return rc ? rc : r2_net_link_is_up(&link) ? R2_LINK_UP : R2_LINK_DOWN;
}
