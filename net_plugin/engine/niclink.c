/* Links, addresses and interfaces of this node's NICs: what the kernel says about them, and what
 * follows when a NIC has another address or its interface was made anew.
 *
 * Everything here runs on I/O thread 0, but for r2_nicstate_carrier and r2_engine_nic_now. Where a
 * NIC is (r2_nic.ifindex, addr, ...) is changed here only, under `place_lock`, a leaf. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "engine/internal.h"
#include "topology/nettables.h"
#include "topology/pick.h"

/* A NIC that is renumbered has for a moment no address of its family: the other one can wait. */
#define FAMILY_NS (1 * R2_NS_PER_S)
#define LISTEN_NS                                                                                  \
    (900 * R2_NS_PER_MS) /* a NIC that is deaf tries once a second, not at each event */

static pthread_mutex_t place_lock = PTHREAD_MUTEX_INITIALIZER;
static struct r2_nic first[R2_MAX_NICS];  /* as they were found */
static bool deaf[R2_MAX_NICS];            /* nobody listens where it is */
static uint64_t tried_at[R2_MAX_NICS];    /* when it was last tried to */
static char place_news[R2_MAX_NICS][128]; /* until its link is up: what happened to its place */
static uint64_t lost_at[R2_MAX_NICS];     /* when its address was seen to be gone */
static atomic_bool moved;                 /* set once, read by anybody */

void r2_engine_nic_now(int dev, struct r2_nic *out)
{
    pthread_mutex_lock(&place_lock);
    *out = r2_eng.nics[dev];
    pthread_mutex_unlock(&place_lock);
}

bool r2_niclink_moved(void)
{
    return atomic_load(&moved);
}

static int index_of(int nic)
{
    int ifindex;

    pthread_mutex_lock(&place_lock);
    ifindex = r2_eng.nics[nic].ifindex;
    pthread_mutex_unlock(&place_lock);
    return ifindex;
}

static bool missing(int nic)
{
    return atomic_load(&r2_eng.nic_state[nic].addr_gone);
}

static void lost(int nic, const char *cause)
{
    if (!atomic_exchange(&r2_eng.nic_state[nic].addr_gone, true))
        lost_at[nic] = r2_now_ns();
    r2_nicstate_link(nic, false, cause);
}

static void comes_up(int nic)
{
    r2_nicstate_link(nic, true, place_news[nic][0] ? place_news[nic] : "link up");
    place_news[nic][0] = 0;
}

/* ---- another place */

static int family_wanted(int nic)
{
    const char *family = r2_eng.set->nccl_socket_family;

    return strcasecmp(family, "AF_INET") == 0       ? AF_INET
           : strcasecmp(family, "AF_INET6") == 0    ? AF_INET6
           : r2_now_ns() - lost_at[nic] < FAMILY_NS ? first[nic].family
                                                    : 0;
}

/* The operator named the NIC by this address (R2CCL_NICS): no other one will do. */
static bool named_by_address(int nic)
{
    struct r2_pick_item items[R2_PICK_ITEMS];
    char err[128];
    int n = r2_pick_parse(r2_eng.set->nics, items, R2_PICK_ITEMS, err, sizeof(err));

    for (int i = 0; i < n; i++) {
        if (items[i].kind == R2_PICK_ADDRESS &&
            r2_sockaddr_equal((const struct sockaddr *)&items[i].addr,
                              (const struct sockaddr *)&first[nic].addr))
            return true;
    }
    return false;
}

static bool same_place(const struct r2_nic *a, const struct r2_nic *b)
{
    return a->ifindex == b->ifindex &&
           r2_sockaddr_equal((const struct sockaddr *)&a->addr, (const struct sockaddr *)&b->addr);
}

static void describe_move(const struct r2_nic *from, const struct r2_nic *to, char *out, size_t cap)
{
    char a[64], b[64];

    r2_addr_text((const struct sockaddr *)&from->addr, a, sizeof(a));
    r2_addr_text((const struct sockaddr *)&to->addr, b, sizeof(b));
    if (from->ifindex == to->ifindex)
        snprintf(out, cap, "its address is %.46s now, was %.46s", b, a);
    else
        snprintf(out, cap, "its interface was made anew: %.46s", b);
}

/* Sockets of the old place are dead, and the listener is one of them. Peers hear the new address
 * behind a newer epoch, over any path that lives. */
static void move(int nic, const struct r2_nic *to, const char *cause)
{
    char addr[64];

    r2_nicstate_link(nic, false, cause);
    pthread_mutex_lock(&place_lock);
    r2_eng.nics[nic].ifindex = to->ifindex;
    r2_eng.nics[nic].addr = to->addr;
    r2_eng.nics[nic].family = to->family;
    r2_eng.nics[nic].socklen = to->socklen;
    r2_eng.nics[nic].prefixlen = to->prefixlen;
    pthread_mutex_unlock(&place_lock);
    r2_control_nic_addr(r2_eng.ctl, r2_eng.nic_state[nic].row,
                        r2_addr_text((const struct sockaddr *)&to->addr, addr, sizeof(addr)),
                        (uint32_t)to->speed_mbps);
}

/* Nobody may be refused because the listener is not there yet: it is, before peers hear of it. */
static void listen_again(int nic, bool elsewhere)
{
    int rc = r2_eng.ops->rebind(nic);
    bool was = deaf[nic];

    deaf[nic] = rc != 0;
    tried_at[nic] = r2_now_ns();
    if (rc)
        R2_WARN_LIMIT("NIC %s: cannot listen at its address: %s (tried again every second)",
                      r2_nic_name(nic), strerror(-rc));
    atomic_store(&moved, true);
    if (elsewhere || was != deaf[nic])
        r2_nicstate_announce(nic);
    if (was != deaf[nic])
        r2_nicstate_deaf(nic, deaf[nic]);
}

/* Where the NIC is now, by the kernel's tables: taken back if it was missing. */
static void find_again(int nic)
{
    struct r2_net_tables tables;
    struct r2_nic old, now;
    int rc;

    if (r2_net_tables_read(&tables))
        return;
    r2_engine_nic_now(nic, &old);
    rc = r2_nic_find_again(&tables, r2_eng.nics, r2_eng.n_nics, nic, &first[nic],
                           family_wanted(nic), &now);
    r2_net_tables_free(&tables);
    if (!rc && named_by_address(nic) &&
        !r2_sockaddr_equal((const struct sockaddr *)&now.addr,
                           (const struct sockaddr *)&first[nic].addr))
        rc = -EADDRNOTAVAIL;
    if (rc) {
        lost(nic, rc == -ENODEV ? "its interface is gone" : "its address is gone");
        return;
    }
    if (!same_place(&old, &now)) {
        describe_move(&old, &now, place_news[nic], sizeof(place_news[nic]));
        R2_INFO("NIC %s: %s", r2_nic_name(nic), place_news[nic]);
        move(nic, &now, place_news[nic]);
        listen_again(nic, true);
    } else if (deaf[nic]) {
        if (r2_now_ns() - tried_at[nic] >= LISTEN_NS)
            listen_again(nic, false);
    } else if (missing(nic)) {
        snprintf(place_news[nic], sizeof(place_news[nic]), "its address is back");
    }
    atomic_store(&r2_eng.nic_state[nic].addr_gone, deaf[nic]);
    if (now.link_up && !deaf[nic])
        comes_up(nic);
}

/* It has none, or is of no use where it is: a better address may have come. */
static void look_for_place(int nic)
{
    const struct r2_nic_state *s = &r2_eng.nic_state[nic];

    if (deaf[nic] && !missing(nic)) { /* since the start */
        if (r2_now_ns() - tried_at[nic] >= LISTEN_NS)
            listen_again(nic, false);
        return;
    }
    if (r2_eng.nics[nic].loopback || r2_eng.nics[nic].bare)
        return;
    if (missing(nic) || (!atomic_load(&s->trusted) && atomic_load(&s->census[R2_CENSUS_OK]) <= 0))
        find_again(nic);
}

/* ---- the kernel's word */

/* Without its address nothing of the NIC's can be sent or heard, whatever its carrier says. */
static void on_address(int nic, bool added, const struct sockaddr *addr)
{
    if (!added && !r2_eng.nics[nic].loopback &&
        r2_sockaddr_equal(addr, (const struct sockaddr *)&r2_eng.nics[nic].addr))
        lost(nic, "its address is gone");
}

static void link_event(int nic, bool up)
{
    if (!up)
        r2_nicstate_link(nic, false, "link down");
    else if (!missing(nic))
        comes_up(nic);
}

static void on_link(void *arg, int ifindex, enum r2_link_event event, const struct sockaddr *addr)
{
    (void)arg;
    for (int i = 0; i < r2_eng.n_nics; i++) {
        if (r2_eng.nics[i].ifindex != ifindex)
            continue;
        if (event == R2_ADDR_ADDED || event == R2_ADDR_REMOVED)
            on_address(i, event == R2_ADDR_ADDED, addr);
        else if (event == R2_LINK_REMOVED && !r2_eng.nics[i].loopback)
            lost(i, "its interface is gone");
        else
            link_event(i, event == R2_LINK_UP);
    }
}

static void watch_ready(struct r2_io_fd *f, uint32_t events)
{
    (void)f;
    (void)events;
    if (r2_linkwatch_read(r2_eng.watch, on_link, NULL) <= 0)
        return;
    r2_io_away(true);
    for (int i = 0; i < r2_eng.n_nics; i++)
        look_for_place(i);
    r2_io_away(false);
}

/* A port without an interface is asked by its transport (nicrdma.c). */
static int query(int nic)
{
    if (r2_eng.nics[nic].bare)
        return r2_nic_port_up(nic) ? R2_LINK_UP : R2_LINK_DOWN;
    return r2_eng.nics[nic].loopback ? R2_LINK_UP : r2_link_query(index_of(nic));
}

/* False: the interface does not exist any more. */
static bool look_at_link(int nic)
{
    int link = query(nic);

    if (link == R2_LINK_UP || link == R2_LINK_DOWN)
        link_event(nic, link == R2_LINK_UP);
    return link != R2_LINK_REMOVED;
}

/* Any thread: what is up again is left to thread 0. */
bool r2_nicstate_carrier(int nic)
{
    int link = query(nic);

    if (link == R2_LINK_DOWN)
        r2_nicstate_link(nic, false, "link down");
    if (link < 0)
        return r2_eng.nic_state[nic].link_up;
    return link == R2_LINK_UP && !missing(nic);
}

void r2_niclink_look(int nic)
{
    r2_io_away(true);
    if (!look_at_link(nic))
        lost(nic, "its interface is gone");
    look_for_place(nic);
    r2_io_away(false);
}

void r2_niclink_start(void)
{
    int rc;

    memcpy(first, r2_eng.nics, sizeof(first));
    rc = r2_linkwatch_open(&r2_eng.watch);
    if (rc == 0) {
        r2_eng.watch_fd.fd = r2_linkwatch_fd(r2_eng.watch);
        r2_eng.watch_fd.ready = watch_ready;
        r2_io_fd_track(r2_eng.watch_fd.fd);
        rc = r2_io_add(r2_io_at(0), &r2_eng.watch_fd);
    }
    if (rc) {
        R2_WARN("no link events (%s): heartbeats have to notice dead links", strerror(-rc));
        r2_control_set_missing(r2_eng.ctl, R2_SEG_MISSING_NETLINK);
    }
    for (int i = 0; i < r2_eng.n_nics; i++) {
        struct r2_wire_addr addr;

        deaf[i] = !r2_eng.nics[i].bare && r2_eng.ops->address(i, &addr) != 0;
        look_at_link(i); /* what changed since the NICs were found */
    }
}
