#define _GNU_SOURCE
#include <errno.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "io/fault.h"
#include "io/pollers.h"
#include "settings/launch.h"
#include "settings/settings.h"
#include "topology/local.h"
#include "topology/nettables.h"
#include "transport/tcp/tcp.h"
#include "util/clock.h"
#include "util/log.h"

/* All peers may come at once, each with several sockets; the kernel's own limit is somaxconn. */
#define BACKLOG 8192
#define IP_HEADS 60 /* of IPv6 and TCP; options come off the segment */
#define AGAIN_NS (100 * R2_NS_PER_MS)
#define CROWDED_NS (5 * R2_NS_PER_MS) /* until some of those who are being heard have been */

void r2_tcp_close_fd(int fd, bool abort)
{
    const struct sockaddr none = {.sa_family = AF_UNSPEC}; /* resets */
    struct linger now = {.l_onoff = 1, .l_linger = 0};

    if (fd < 0)
        return;
    if (abort) /* a reset: the kernel must not go on retransmitting what is dead */
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    /* The connection ends here and now, even if a child forked meanwhile holds the socket, too. */
    if (abort)
        connect(fd, &none, sizeof(none));
    shutdown(fd, SHUT_RDWR);
    r2_io_fd_untrack(fd);
    close(fd);
    atomic_fetch_sub(&r2_tcp.sockets, 1);
}

bool r2_tcp_broken(int nic)
{
    return r2_fault_is(nic, R2_SEG_FAULT_ERROR, R2_FAULT_TX) ||
           r2_fault_is(nic, R2_SEG_FAULT_ERROR, R2_FAULT_RX);
}

/* Without this the kernel sends from a bound address over another NIC when its own goes down. */
static int tcp_bind_device(int fd, int nic)
{
    const struct r2_nic *n = r2_local_nic(nic);
    static atomic_bool told;

    if (n->loopback || !n->ifname[0])
        return 0;
    if (setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, n->ifname, strlen(n->ifname) + 1) == 0)
        return 0;
    if (!atomic_exchange(&told, true))
        R2_WARN("sockets cannot be bound to the device %s (%s): a path may leave by another NIC "
                "when the route changes; the kernel needs 5.7 or CAP_NET_RAW",
                n->ifname, strerror(errno));
    return -errno;
}

static bool set_congestion(int fd, const char *name)
{
    return !setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name));
}

/* Before the socket connects or listens (what it accepts is like it): bbr that has begun to pace
 * goes on under any other. A new stream's pace comes from its handshake: a few megabytes per second
 * on a busy machine. A stream that carried nothing but small messages was never measured. A chunk
 * of half a megabyte then takes tens of milliseconds (docs/decisions.md 17). */
static void choose_congestion(int fd)
{
    const char *wanted = r2_settings_get()->congestion;
    char name[32] = "";
    socklen_t len = sizeof(name) - 1;

    if (!strcmp(wanted, "system"))
        return;
    if (!strcmp(wanted, "auto")) {
        if (!getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len) && !strncmp(name, "bbr", 3) &&
            !set_congestion(fd, "cubic") && !set_congestion(fd, "reno"))
            R2_WARN_LIMIT(
                "the system's congestion control is %s, and neither cubic nor reno is "
                "allowed (net.ipv4.tcp_allowed_congestion_control): messages may wait for "
                "its pacing",
                name);
    } else if (!set_congestion(fd, wanted)) {
        static atomic_bool told;

        if (!atomic_exchange(&told, true))
            R2_TELL("R2CCL_TCP_CONGESTION=%s: %s; the system's choice is used. "
                    "net.ipv4.tcp_allowed_congestion_control lists the choices",
                    wanted, strerror(errno));
    }
}

static int new_socket(int nic, int family)
{
    int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return -errno;
    atomic_fetch_add(&r2_tcp.sockets, 1);
    r2_io_fd_track(fd);
    tcp_bind_device(fd, nic);
    choose_congestion(fd);
    return fd;
}

int r2_tcp_socket(int nic, const struct r2_wire_addr *remote, int packet)
{
    const struct sockaddr_storage *own;
    struct sockaddr_storage sa;
    struct r2_nic n;
    socklen_t len;
    int fd, rc, one = 1, segment;

    r2_local_now(nic, &n);
    if (n.bare) { /* it has no place to dial from */
        if (r2_tcp_broken(nic))
            return -ENETDOWN;
        nic = r2_tcp.ev->meeting();
        if (nic < 0)
            return -EADDRNOTAVAIL;
        r2_local_now(nic, &n);
    }
    rc = r2_wire_to_sockaddr(remote, &sa, &len);
    if (rc)
        return rc;
    own = r2_nic_addr(&n, sa.ss_family);
    if (!own)
        return -EAFNOSUPPORT;
    if (r2_tcp_broken(nic))
        return -ENETDOWN;
    fd = new_socket(nic, sa.ss_family);
    if (fd < 0)
        return fd;
    if (sa.ss_family == AF_INET6) /* link-local addresses need the local scope */
        ((struct sockaddr_in6 *)&sa)->sin6_scope_id =
            ((const struct sockaddr_in6 *)own)->sin6_scope_id;
    segment = packet - IP_HEADS;
    if (packet) /* told to the other side, so it holds both ways */
        setsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &segment, sizeof(segment));
    setsockopt(fd, IPPROTO_IP, 24 /* IP_BIND_ADDRESS_NO_PORT */, &one, sizeof(one));
    if (bind(fd, (const struct sockaddr *)own, len) < 0)
        goto fail;
    if (connect(fd, (struct sockaddr *)&sa, len) < 0 && errno != EINPROGRESS)
        goto fail;
    return fd;
fail:
    rc = -errno;
    r2_tcp_close_fd(fd, false);
    return rc;
}

static void set_port(struct sockaddr_storage *sa, uint16_t port)
{
    if (sa->ss_family == AF_INET)
        ((struct sockaddr_in *)sa)->sin_port = htons(port);
    else
        ((struct sockaddr_in6 *)sa)->sin6_port = htons(port);
}

/* A socket that listens at the port, 0: at any, or -errno. With SO_REUSEADDR two processes may bind
 * the same port before either listens, and listen() tells the second; what is bound stays so, hence
 * a socket for each try. */
static int try_port(int nic, const struct sockaddr_storage *own, uint16_t port)
{
    struct sockaddr_storage sa = *own;
    int fd = new_socket(nic, sa.ss_family), one = 1, rc;

    if (fd < 0)
        return fd;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    /* A NIC that is down now has no local route, and comes up later. */
    setsockopt(fd, IPPROTO_IP, IP_FREEBIND, &one, sizeof(one));
    set_port(&sa, port);
    if (bind(fd, (struct sockaddr *)&sa, r2_sockaddr_len((struct sockaddr *)&sa)) == 0 &&
        listen(fd, BACKLOG) == 0)
        return fd;
    rc = -errno;
    r2_tcp_close_fd(fd, false);
    return rc;
}

/* `again`: the port of the listener before this one, 0: none. Peers that have no path left to
 * hear a new one over find it where it was. */
static int find_port(int nic, const struct r2_nic *n, uint16_t again)
{
    const struct r2_port_range *ports = &r2_settings_get()->ports;
    int fd = again ? try_port(nic, &n->addr, again) : -EADDRINUSE;

    if (fd != -EADDRINUSE)
        return fd;
    if (!ports->high)
        return try_port(nic, &n->addr, 0);
    for (uint32_t port = ports->low; port <= ports->high && fd == -EADDRINUSE; port++)
        fd = try_port(nic, &n->addr, (uint16_t)port);
    return fd;
}

static void accept_ready(struct r2_io_fd *f, uint32_t events)
{
    int at = (int)(f - r2_tcp.listeners), nic = at % R2_TCP_NICS;

    (void)events;
    for (;;) {
        struct r2_lane *lane;
        int fd;

        if (atomic_load(&r2_tcp.pending) >= R2_TCP_MAX_PENDING) {
            r2_timer_set(&r2_tcp.again[at], r2_now_ns() + CROWDED_NS);
            return; /* the others wait in the kernel's queue */
        }
        pthread_mutex_lock(&r2_tcp.listen_lock);
        fd = accept4(f->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        pthread_mutex_unlock(&r2_tcp.listen_lock);

        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            if (errno == EMFILE || errno == ENFILE)
                R2_WARN_ONCE("cannot accept a connection: no file descriptors left (ulimit -n)");
            if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EBADF)
                r2_timer_set(&r2_tcp.again[at], r2_now_ns() + AGAIN_NS);
            return;
        }
        atomic_fetch_add(&r2_tcp.sockets, 1);
        r2_io_fd_track(fd);
        r2_pollers_look(); /* which threads something new is given to */
        if (r2_tcp_broken(nic) ||
            !(lane = r2_lane_new(fd, nic, r2_io_pick(), R2_LANE_WAIT_HELLO))) {
            r2_tcp.ev->rejected(nic, ECONNREFUSED);
            r2_tcp_close_fd(fd, true);
            continue;
        }
        atomic_fetch_add(&r2_tcp.pending, 1);
        r2_timer_set(&lane->timer, r2_now_ns() + R2_TCP_HANDSHAKE_NS);
        if (r2_lane_start(lane) < 0)
            r2_lane_shut(lane, true);
    }
}

/* Events come once for what is new: who waits since descriptors or memory ran out brings none. */
static void accept_again(struct r2_timer *t, uint64_t now)
{
    (void)now;
    accept_ready(&r2_tcp.listeners[t - r2_tcp.again], 0);
}

/* A socket that listens at the NIC's place, and its address. */
static int open_listener(int nic, uint16_t again, struct r2_wire_addr *addr)
{
    struct sockaddr_storage sa;
    socklen_t len = sizeof(sa);
    struct r2_nic n;
    int fd, rc;

    r2_local_now(nic, &n);
    fd = find_port(nic, &n, again);
    if (fd < 0)
        return fd;
    if (getsockname(fd, (struct sockaddr *)&sa, &len) < 0) {
        rc = -errno;
        r2_tcp_close_fd(fd, false);
        return rc;
    }
    r2_wire_from_sockaddr(addr, &sa);
    return fd;
}

/* A batch of events in hand may still name the listener: it finds whatever is there now. */
static int install(int at, int fd, const struct r2_wire_addr *addr)
{
    struct r2_io_fd *f = &r2_tcp.listeners[at];
    int rc;

    pthread_mutex_lock(&r2_tcp.listen_lock);
    r2_tcp.addrs[at] = *addr;
    f->fd = fd;
    f->ready = accept_ready;
    rc = r2_io_add(r2_io_at(at % R2_TCP_NICS), f);
    if (rc) {
        f->fd = -1;
        r2_tcp_close_fd(fd, false);
    }
    pthread_mutex_unlock(&r2_tcp.listen_lock);
    return rc;
}

/* At the same port: ports of a range are few. Without it peers of that family only do not reach the
 * NIC, which they say. */
static void listen_second(int nic, uint16_t port)
{
    struct r2_wire_addr addr;
    struct r2_nic n;
    int fd;

    r2_local_now(nic, &n);
    if (!n.second.ss_family)
        return;
    fd = try_port(nic, &n.second, port);
    if (fd >= 0) {
        r2_wire_from_sockaddr(&addr, &n.second);
        addr.port = port;
        install(nic + R2_TCP_NICS, fd, &addr);
    } else {
        R2_INFO("NIC %s: cannot listen at its second address: %s", n.name, strerror(-fd));
    }
}

static int listen_nic(int nic, uint16_t again)
{
    struct r2_wire_addr addr;
    int fd = open_listener(nic, again, &addr), rc = fd < 0 ? fd : install(nic, fd, &addr);

    if (rc == 0)
        listen_second(nic, addr.port);
    atomic_store(&r2_tcp.listening[nic], rc == 0);
    return rc;
}

static void stop_listening(int at)
{
    struct r2_io_fd *f = &r2_tcp.listeners[at];

    r2_io_del(f);
    r2_tcp_close_fd(f->fd, false);
    f->fd = -1;
}

int r2_tcp_rebind(int nic)
{
    int second = nic + R2_TCP_NICS;
    uint16_t port;

    if (r2_local_nic(nic)->bare)
        return 0;
    pthread_mutex_lock(&r2_tcp.listen_lock);
    port = r2_tcp.addrs[nic].port;
    if (atomic_load(&r2_tcp.listening[nic]))
        stop_listening(nic);
    if (r2_tcp.addrs[second].family)
        stop_listening(second);
    memset(&r2_tcp.addrs[second], 0, sizeof(r2_tcp.addrs[second]));
    atomic_store(&r2_tcp.listening[nic], false);
    pthread_mutex_unlock(&r2_tcp.listen_lock);
    return listen_nic(nic, port);
}

int r2_tcp_listen_all(void)
{
    int n, ok = 0, rc = -ENODEV;
    char range[160];

    n = r2_local.n;
    for (int i = 0; i < n; i++) {
        r2_timer_init(&r2_tcp.again[i], r2_io_at(i), accept_again);
        r2_timer_init(&r2_tcp.again[i + R2_TCP_NICS], r2_io_at(i), accept_again);
    }
    for (int i = 0; i < n; i++) {
        int one = r2_local_nic(i)->bare ? 1 : listen_nic(i, 0);

        if (one > 0)
            continue;
        if (one == 0) {
            ok++;
            continue;
        }
        rc = one;
        if (one == -EADDRINUSE && r2_port_range_text(range, sizeof(range))[0])
            R2_TELL("NIC %s: cannot listen: no port is free. %s: widen the range, in firewalls too",
                    r2_local_nic(i)->name, range);
        else
            R2_TELL("NIC %s: cannot listen: %s", r2_local_nic(i)->name, strerror(-one));
    }
    return ok ? 0 : rc;
}
