#define _GNU_SOURCE
#include "sockets.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "util.h"

static socklen_t sockets_sockaddr(const struct hn_addr *addr, struct sockaddr_storage *out)
{
    memset(out, 0, sizeof(*out));
    if (addr->family == AF_INET6) {
        struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)out;
        in6->sin6_family = AF_INET6;
        in6->sin6_port = addr->port;
        in6->sin6_scope_id = addr->scope;
        memcpy(&in6->sin6_addr, addr->ip, 16);
        return sizeof(*in6);
    }
    struct sockaddr_in *in = (struct sockaddr_in *)out;
    in->sin_family = AF_INET;
    in->sin_port = addr->port;
    memcpy(&in->sin_addr, addr->ip, 4);
    return sizeof(*in);
}

static void from_sockaddr(const struct sockaddr *sa, struct hn_addr *out)
{
    memset(out, 0, sizeof(*out));
    out->family = sa->sa_family;
    if (sa->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)sa;
        out->port = in6->sin6_port;
        out->scope = in6->sin6_scope_id;
        memcpy(out->ip, &in6->sin6_addr, 16);
    } else {
        const struct sockaddr_in *in = (const struct sockaddr_in *)sa;
        out->port = in->sin_port;
        memcpy(out->ip, &in->sin_addr, 4);
    }
}

void hn_sockets_format(const struct hn_addr *addr, char *text, size_t size)
{
    char ip[INET6_ADDRSTRLEN] = "?";
    inet_ntop(addr->family, addr->ip, ip, sizeof(ip));
    snprintf(text, size, addr->family == AF_INET6 ? "[%s]:%u" : "%s:%u", ip, ntohs(addr->port));
}

int hn_sockets_parse(const char *text, struct hn_addr *out)
{
    char host[128];
    unsigned port = 0;
    snprintf(host, sizeof(host), "%s", text);
    char *colon = NULL;
    char *start = host;
    if (host[0] == '[') {
        char *close_at = strchr(host, ']');
        if (!close_at)
            return -EINVAL;
        *close_at = '\0';
        start = host + 1;
        colon = close_at[1] == ':' ? close_at + 1 : NULL;
    } else if (strchr(host, ':') == strrchr(host, ':')) {
        colon = strchr(host, ':');
    }
    if (colon) {
        char *end;
        unsigned long value = strtoul(colon + 1, &end, 10);
        if (*end || value > 65535)
            return -EINVAL;
        port = (unsigned)value;
        *colon = '\0';
    }
    memset(out, 0, sizeof(*out));
    out->port = htons((uint16_t)port);
    out->family = AF_INET;
    if (inet_pton(AF_INET, start, out->ip) == 1)
        return 0;
    out->family = AF_INET6;
    return inet_pton(AF_INET6, start, out->ip) == 1 ? 0 : -EINVAL;
}

/* NCCL_SOCKET_IFNAME: 1 named, 0 not named, -1 no list. */
static int named(const char *ifname)
{
    const char *spec = getenv("NCCL_SOCKET_IFNAME");
    if (!spec || !*spec)
        return -1;
    bool exclude = *spec == '^';
    bool exact = spec[exclude] == '=';
    char list[256];
    char *rest = NULL;
    snprintf(list, sizeof(list), "%s", spec + exclude + exact);
    bool hit = false;
    for (char *name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        hit |= exact ? !strcmp(name, ifname) : !strncmp(name, ifname, strlen(name));
    return hit != exclude;
}

static bool wanted(const struct ifaddrs *ifa, bool loopback)
{
    int family = ifa->ifa_addr ? ifa->ifa_addr->sa_family : AF_UNSPEC;
    const char *only = getenv("NCCL_SOCKET_FAMILY");
    if (family != AF_INET && family != AF_INET6)
        return false;
    if (only && *only && strcmp(only, family == AF_INET ? "AF_INET" : "AF_INET6"))
        return false;
    if (!(ifa->ifa_flags & IFF_UP))
        return false;
    int chosen = named(ifa->ifa_name);
    bool is_loopback = ifa->ifa_flags & IFF_LOOPBACK;
    if (chosen == 0)
        return false;
    if (chosen == 1 && getenv("NCCL_SOCKET_IFNAME")[0] != '^')
        return true;
    if (family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)ifa->ifa_addr;
        if (IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr))
            return false;
    }
    if (is_loopback)
        return loopback;
    return !loopback && strncmp(ifa->ifa_name, "docker", 6);
}

static int find(struct hn_nic *nics, int max, bool loopback)
{
    struct ifaddrs *all = NULL;
    int count = 0;
    if (getifaddrs(&all))
        return 0;
    for (struct ifaddrs *ifa = all; ifa && count < max; ifa = ifa->ifa_next) {
        if (!wanted(ifa, loopback))
            continue;
        bool seen = false; /* one address per interface */
        for (int i = 0; i < count; i++)
            seen |= !strcmp(nics[i].name, ifa->ifa_name);
        if (seen)
            continue;
        snprintf(nics[count].name, sizeof(nics[0].name), "%s", ifa->ifa_name);
        from_sockaddr(ifa->ifa_addr, &nics[count].addr);
        nics[count++].addr.port = 0;
    }
    freeifaddrs(all);
    return count;
}

int hn_sockets_nics(struct hn_nic *nics, int max)
{
    int count = find(nics, max, false);
    return count ? count : find(nics, max, true);
}

int hn_sockets_listen(struct hn_addr *addr)
{
    struct sockaddr_storage sa;
    socklen_t len = sockets_sockaddr(addr, &sa);
    int one = 1;
    int fd = socket(addr->family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (struct sockaddr *)&sa, len) || listen(fd, 4096) ||
        getsockname(fd, (struct sockaddr *)&sa, &len)) {
        int rc = -errno;
        close(fd);
        return rc;
    }
    from_sockaddr((struct sockaddr *)&sa, addr);
    return fd;
}

int hn_sockets_connect(const struct hn_addr *to, const struct hn_addr *from)
{
    struct sockaddr_storage sa;
    int one = 1;
    int fd = socket(to->family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    int rc = 0;
    if (from && from->family == to->family) {
        struct hn_addr local = *from;
        local.port = 0;
        setsockopt(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof(one));
        socklen_t len = sockets_sockaddr(&local, &sa);
        if (bind(fd, (struct sockaddr *)&sa, len))
            rc = -errno;
    }
    socklen_t len = sockets_sockaddr(to, &sa);
    if (!rc && connect(fd, (struct sockaddr *)&sa, len) && errno != EINPROGRESS)
        rc = -errno;
    if (rc) {
        close(fd);
        return rc;
    }
    return fd;
}

int hn_sockets_connected(int fd)
{
    struct pollfd p = {fd, POLLOUT, 0};
    int err = 0;
    socklen_t len = sizeof(err);
    if (poll(&p, 1, 0) <= 0)
        return 0;
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &len))
        return -errno;
    return err ? -err : 1;
}

int hn_sockets_accept(int listen_fd)
{
    int one = 1;
    int fd = accept4(listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return errno == ECONNABORTED || errno == EINTR ? -EAGAIN : -errno;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    return fd;
}

static int wait_ready(int fd, short what, const _Atomic int *stop, uint64_t deadline)
{
    struct pollfd p = {fd, what, 0};
    for (;;) {
        if (stop && atomic_load(stop))
            return -ECANCELED;
        if (hn_util_now() > deadline)
            return -ETIMEDOUT;
        if (poll(&p, 1, 20) > 0)
            return 0;
    }
}

int hn_sockets_write(int fd, const void *data, size_t size, const _Atomic int *stop,
                     uint64_t deadline)
{
    size_t at = 0;
    while (at < size) {
        ssize_t n = send(fd, (const char *)data + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) {
            at += (size_t)n;
            continue;
        }
        if (errno != EAGAIN && errno != EINTR)
            return -errno;
        int rc = wait_ready(fd, POLLOUT, stop, deadline);
        if (rc)
            return rc;
    }
    return 0;
}

int hn_sockets_read(int fd, void *data, size_t size, const _Atomic int *stop, uint64_t deadline)
{
    size_t at = 0;
    while (at < size) {
        ssize_t n = recv(fd, (char *)data + at, size - at, MSG_DONTWAIT);
        if (n > 0) {
            at += (size_t)n;
            continue;
        }
        if (n == 0)
            return -ECONNRESET;
        if (errno != EAGAIN && errno != EINTR)
            return -errno;
        int rc = wait_ready(fd, POLLIN, stop, deadline);
        if (rc)
            return rc;
    }
    return 0;
}
