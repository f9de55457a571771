/* Links, addresses and interfaces of this node's NICs: what the kernel says about them, and what
 * follows when a NIC has another address or its interface was made anew.
 *
 * Everything here runs on I/O thread 0, and nothing here waits for the kernel's RTNL lock. Events
 * are read as they come. A thread of its own puts the questions (nicask.c), and the answers come
 * back as a task. (To bind and to listen, listen_again, takes locks of sockets and RCU's only.)
 * Where a NIC is (r2_nic.ifindex, addr, ...) is changed here only (r2_local_move).
 *
 * Events and answers come on two ways, and the newer one counts. Both are made under RTNL, so they
 * have an order in the kernel: an answer says what was at its moment A. After an answer has come
 * and before it is taken, all queued events are read (answered). So all events older than A have
 * been told by then. If nothing about the interface was read since the question was put
 * (r2_linkwatch_since), nothing newer than A has been told either: the answer is the newest word,
 * and counts. If something was, it may be older than A or newer, which nobody can tell: the answer
 * is dropped and the question put again, so an old "up" never overrules a newer "down" nor the
 * other way round. While events keep coming they are the news, and the question waits for the next
 * tick (20 ms). A carrier that changes is seen by questions before its event, which the kernel may
 * hold back for a second. The event is about the state of when it is made: it repeats the answer,
 * or is newer. The watch tells only what differs from what it told before, and knows of no answers.
 * So it does not tell an event that takes an answer back. Whenever something was read about an
 * interface whose NIC is not as the watch told last, the kernel is asked
 * (ask_where_answers_differ). */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "engine/nic/nics.h"
#include "topology/pick.h"

/* A NIC that is renumbered has for a moment no address of its family: the other one can wait. */
#define FAMILY_NS (1 * R2_NS_PER_S)
#define LOOK_NS (1 * R2_NS_PER_S)      /* an event may have been missed */
#define LISTEN_NS (900 * R2_NS_PER_MS) /* a deaf NIC tries once a second, not at each event */
#define AGAIN_NS (20 * R2_NS_PER_MS)   /* from the tables' answer to the next question for them */
#define FAILED_NS (100 * R2_NS_PER_MS) /* ... if the kernel could not answer */

static struct r2_nic first[R2_MAX_NICS];  /* as they were found */
static bool deaf[R2_MAX_NICS];            /* nobody listens where it is */
static uint64_t tried_at[R2_MAX_NICS];    /* when it was last tried to */
static char place_news[R2_MAX_NICS][128]; /* until its link is up: what happened to its place */
static uint64_t lost_at[R2_MAX_NICS];     /* when its address was seen to be gone */

static uint64_t looked_at;            /* at all of them */
static struct r2_task *links;         /* answers are there, or events were left */
static bool link_due[R2_MAX_NICS];    /* its link is to be asked for, at the next tick */
static bool tables_due;               /* the tables are ... */
static uint64_t tables_after;         /* ... not before: each reading takes the kernel's lock */
static uint64_t counted[R2_MAX_NICS]; /* number of the last answer that counted */

static int index_of(int nic)
{
    struct r2_nic now;

    r2_local_now(nic, &now);
    return now.ifindex;
}

/* A port without an interface is asked by its transport (nicrdma.c). */
static bool has_interface(int nic)
{
    return !r2_local.nics[nic].bare && !r2_local.nics[nic].loopback;
}

static bool missing(int nic)
{
    return atomic_load(&r2_eng.nic_state[nic].place) == R2_PLACE_MISSING;
}

static void place_lost(int nic, const char *cause, uint64_t now)
{
    if (r2_nicstate_place(nic, R2_PLACE_EV_LOST, cause, now))
        lost_at[nic] = now;
}

static void comes_up(int nic, uint64_t now)
{
    if (r2_nicstate_place(nic, R2_PLACE_EV_LINK_UP,
                          place_news[nic][0] ? place_news[nic] : "link up", now))
        place_news[nic][0] = 0;
}

/* ---- questions, and whether answers count */

static uint64_t moment(void)
{
    return r2_eng.watch ? r2_linkwatch_moment(r2_eng.watch) : 0;
}

/* Something newer may have been told about the interface, or has been about the NIC, since it was
 * asked for. */
static bool overtaken(int nic, int ifindex, const struct r2_nicask *got)
{
    return got->number < counted[nic] ||
           (r2_eng.watch && r2_linkwatch_since(r2_eng.watch, ifindex, got->moment));
}

/* One that is out may be older than what made us ask: then it is put again when it is back. Not
 * before all events are read: what was lost is in the tables only if they are read after that. */
static void ask_tables(uint64_t now)
{
    if (tables_due && now >= tables_after &&
        (!r2_eng.watch || r2_linkwatch_drained(r2_eng.watch)) &&
        r2_nicask_put(R2_NICASK_TABLES, 0, moment()))
        tables_due = false;
}

static void ask_link(int nic)
{
    if (link_due[nic] && has_interface(nic) && r2_nicask_put(nic, index_of(nic), moment()))
        link_due[nic] = false;
}

/* ---- another place */

static int family_wanted(int nic, uint64_t now)
{
    const char *family = r2_eng.set->nccl_socket_family;

    return strcasecmp(family, "AF_INET") == 0    ? AF_INET
           : strcasecmp(family, "AF_INET6") == 0 ? AF_INET6
           : now - lost_at[nic] < FAMILY_NS      ? first[nic].family
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
 * over any path that lives. */
static void move(int nic, const struct r2_nic *to, const char *cause, uint64_t now)
{
    char addr[64];

    r2_nicstate_place(nic, R2_PLACE_EV_LINK_DOWN, cause, now);
    r2_local_move(nic, to);
    r2_control_nic_addr(r2_eng.ctl, r2_eng.nic_state[nic].row,
                        r2_addr_text((const struct sockaddr *)&to->addr, addr, sizeof(addr)),
                        (uint32_t)to->speed_mbps);
}

/* Nobody may be refused because the listener is not there yet: it is, before peers hear of it. */
static void listen_again(int nic, bool elsewhere, uint64_t now)
{
    int rc = r2_eng.ops->rebind(nic);
    bool was = deaf[nic];

    deaf[nic] = rc != 0;
    tried_at[nic] = now;
    if (rc)
        R2_WARN_LIMIT("NIC %s: cannot listen at its address: %s (tried again every second)",
                      r2_nic_name(nic), strerror(-rc));
    if (elsewhere || was != deaf[nic])
        r2_nicstate_announce(nic);
    if (was != deaf[nic])
        r2_nicstate_deaf(nic, deaf[nic]);
}

/* Where the NIC is now, by the kernel's tables: taken back if it was missing. */
static void find_again(int nic, const struct r2_nicask *got, uint64_t now)
{
    struct r2_nic old, at;
    int rc;

    r2_local_now(nic, &old);
    rc = r2_nic_find_again(&got->tables, r2_local.nics, r2_local.n, nic, &first[nic],
                           family_wanted(nic, now), &at);
    if (overtaken(nic, old.ifindex, got) || (rc == 0 && overtaken(nic, at.ifindex, got))) {
        tables_due = true;
        return;
    }
    counted[nic] = got->number;
    if (!rc && named_by_address(nic) &&
        !r2_sockaddr_equal((const struct sockaddr *)&at.addr,
                           (const struct sockaddr *)&first[nic].addr))
        rc = -EADDRNOTAVAIL;
    if (rc) {
        place_lost(nic, rc == -ENODEV ? "its interface is gone" : "its address is gone", now);
        return;
    }
    if (!same_place(&old, &at)) {
        describe_move(&old, &at, place_news[nic], sizeof(place_news[nic]));
        R2_INFO("NIC %s: %s", r2_nic_name(nic), place_news[nic]);
        move(nic, &at, place_news[nic], now);
        listen_again(nic, true, now);
    } else if (deaf[nic]) {
        if (now - tried_at[nic] >= LISTEN_NS)
            listen_again(nic, false, now);
    } else if (missing(nic)) {
        snprintf(place_news[nic], sizeof(place_news[nic]), "its address is back");
    }
    r2_nicstate_place(nic, deaf[nic] ? R2_PLACE_EV_LOST : R2_PLACE_EV_FOUND, place_news[nic], now);
    if (at.link_up)
        comes_up(nic, now);
}

/* It has none, or is of no use where it is: a better address may have come. */
static bool needs_place(int nic)
{
    return has_interface(nic) &&
           (missing(nic) || (!deaf[nic] && !r2_nic_trusted(nic) && r2_nic_answers(nic) <= 0));
}

static void look_for_place(int nic, uint64_t now)
{
    if (deaf[nic] && !missing(nic)) { /* since the start */
        if (now - tried_at[nic] >= LISTEN_NS)
            listen_again(nic, false, now);
    } else if (needs_place(nic)) {
        tables_due = true;
        ask_tables(now);
    }
}

/* ---- the kernel's word */

/* Without its address nothing of the NIC's can be sent or heard, whatever its carrier says. */
static void on_address(int nic, bool added, const struct sockaddr *addr, uint64_t now)
{
    if (!added && !r2_local.nics[nic].loopback &&
        r2_sockaddr_equal(addr, (const struct sockaddr *)&r2_local.nics[nic].addr))
        place_lost(nic, "its address is gone", now);
}

static void link_event(int nic, bool up, uint64_t now)
{
    if (up)
        comes_up(nic, now);
    else
        r2_nicstate_place(nic, R2_PLACE_EV_LINK_DOWN, "link down", now);
}

static void on_link(void *arg, int ifindex, enum r2_link_event event, const struct sockaddr *addr)
{
    uint64_t now = *(const uint64_t *)arg;

    for (int i = 0; i < r2_local.n; i++) {
        if (r2_local.nics[i].ifindex != ifindex)
            continue;
        if (event == R2_ADDR_ADDED || event == R2_ADDR_REMOVED)
            on_address(i, event == R2_ADDR_ADDED, addr, now);
        else if (event == R2_LINK_REMOVED && !r2_local.nics[i].loopback)
            place_lost(i, "its interface is gone", now);
        else
            link_event(i, event == R2_LINK_UP, now);
    }
}

/* An answer that counted may have been taken back by what was just read and, to the watch, is no
 * news. (A NIC that is missing has another reason to be down.) At the next tick, and only if
 * something was read: where the two differ for long, the kernel is not asked at each tick. */
static void ask_where_answers_differ(uint64_t before)
{
    for (int i = 0; i < r2_local.n; i++) {
        int ifindex = r2_local.nics[i].ifindex;

        if (has_interface(i) && !missing(i) && r2_linkwatch_since(r2_eng.watch, ifindex, before) &&
            (r2_linkwatch_told(r2_eng.watch, ifindex) == R2_LINK_UP) != r2_nic_is_up(i))
            link_due[i] = true;
    }
}

/* Takes in what is queued; what is too much for once is left to the task. */
void r2_niclink_events(uint64_t now)
{
    uint64_t before = moment();
    int n;

    if (!r2_eng.watch)
        return;
    n = r2_linkwatch_read(r2_eng.watch, on_link, &now);
    if (n >= 0 && !r2_linkwatch_drained(r2_eng.watch))
        r2_task_kick(links);
    /* Once for each loss, not as long as the watch is stale: tables_answer sees to that. */
    if (r2_linkwatch_lost_since(r2_eng.watch, before))
        tables_due = true;
    ask_where_answers_differ(before);
    for (int i = 0; i < r2_local.n && n > 0; i++)
        look_for_place(i, now);
    ask_tables(now);
}

static void link_answer(int nic, const struct r2_nicask *got, uint64_t now)
{
    if (got->rc < 0)
        return; /* the next look is soon enough */
    if (got->ifindex != index_of(nic) || overtaken(nic, got->ifindex, got)) {
        link_due[nic] = true;
        return;
    }
    counted[nic] = got->number;
    if (got->rc == R2_LINK_REMOVED) {
        place_lost(nic, "its interface is gone", now);
        look_for_place(nic, now);
    } else {
        link_event(nic, got->rc == R2_LINK_UP, now);
    }
}

static void tables_answer(struct r2_nicask *got, uint64_t now)
{
    bool stale = r2_eng.watch && r2_linkwatch_stale(r2_eng.watch);
    bool needed = false;

    tables_after = now + (got->rc ? FAILED_NS : AGAIN_NS);
    if (stale && got->rc == 0) {
        r2_linkwatch_resync(r2_eng.watch, &got->tables, got->moment, on_link, &now);
        stale = r2_linkwatch_stale(r2_eng.watch);
    }
    for (int i = 0; i < r2_local.n; i++) {
        if (got->rc == 0 && needs_place(i))
            find_again(i, got, now);
        needed |= needs_place(i);
    }
    if (stale || !needed)
        tables_due = stale;
    else if (got->rc)
        tables_due = true;
    r2_net_tables_free(&got->tables);
}

void r2_niclink_answers(uint64_t now)
{
    struct r2_nicask got;

    r2_nicask_ready();
    r2_niclink_events(now);
    if (r2_eng.watch && !r2_linkwatch_drained(r2_eng.watch))
        return; /* events first, see above: it was kicked again, or the next tick does it */
    if (r2_nicask_take(R2_NICASK_TABLES, &got))
        tables_answer(&got, now);
    for (int i = 0; i < r2_local.n; i++) {
        if (r2_nicask_take(i, &got))
            link_answer(i, &got, now);
    }
}

void r2_niclink_ask(int nic)
{
    if (has_interface(nic)) {
        link_due[nic] = true;
        ask_link(nic);
    }
}

/* The port's own thread (nicrdma.c) stores that the port is down, and then takes the NIC down. If
 * it does that after the NIC was taken up here, it finds it up, and all is well. If before, that
 * was no change; but its hold of nic_lock came before ours, and its store before that, so the
 * second look sees it. */
static void look_at_port(int nic, uint64_t now)
{
    bool up = r2_local.nics[nic].loopback || r2_nic_port_up(nic);

    link_event(nic, up, now);
    if (up && !r2_local.nics[nic].loopback && !r2_nic_port_up(nic))
        link_event(nic, false, now);
}

void r2_nic_transport(int nic, int transport, bool up, const char *cause, uint64_t now)
{
    /* Its endpoints have ended with a reason of their own. Up is left to thread 0, as for links. */
    if (r2_local.nics[nic].bare) {
        r2_nic_port_note(nic, up);
        if (!up)
            r2_nicstate_place(nic, R2_PLACE_EV_LINK_DOWN, cause, now);
    }
    if (!up)
        return;
    R2_FOR_EACH_PEER(p)
    {
        r2_peer_lock(p);
        R2_FOR_EACH_PATH (path, p) {
            if (path->lnic == nic && path->transport == transport)
                path->attempt.next_at = 0;
        }
        r2_peer_unlock(p);
        r2_peer_wake(p);
    }
}

void r2_niclink_look(int nic, uint64_t now)
{
    if (has_interface(nic))
        r2_niclink_ask(nic);
    else
        look_at_port(nic, now);
    look_for_place(nic, now);
}

void r2_niclink_tick(uint64_t now)
{
    if (r2_eng.watch && !r2_linkwatch_drained(r2_eng.watch))
        r2_task_kick(links);
    for (int i = 0; i < r2_local.n; i++)
        ask_link(i);
    ask_tables(now);
    for (int i = 0; i < r2_local.n && now - looked_at >= LOOK_NS; i++)
        r2_niclink_look(i, now);
    if (now - looked_at >= LOOK_NS)
        looked_at = now;
}

/* Before the watch is at work nothing of this is thread 0's. */
void r2_niclink_start(struct r2_task *task)
{
    int rc;

    memcpy(first, r2_local.nics, sizeof(first));
    for (int i = 0; i < r2_local.n; i++) {
        struct r2_wire_addr addr;

        deaf[i] = !r2_local.nics[i].bare && r2_eng.ops->address(i, &addr) != 0;
    }
    links = task;
    r2_nicask_start(links);
    rc = r2_linkwatch_open(&r2_eng.watch);
    if (rc == 0) {
        r2_eng.watch_fd.fd = r2_linkwatch_fd(r2_eng.watch);
        r2_io_fd_track(r2_eng.watch_fd.fd);
        rc = r2_io_add(r2_io_at(0), &r2_eng.watch_fd);
    }
    if (rc) {
        R2_WARN("no link events (%s): heartbeats have to notice dead links", strerror(-rc));
        r2_control_set_missing(r2_eng.ctl, R2_SEG_MISSING_NETLINK);
    }
}
