#define _GNU_SOURCE
#include "topology/nettables.h"

#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_addr.h>
#include <linux/if_link.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

/* linux/if.h has it too, but does not get along with net/if.h. */
#ifndef IFF_LOWER_UP
#define IFF_LOWER_UP 0x10000
#endif

#define R2_NETLINK_BUFFER 32768 /* the kernel fills at most this much per message of a dump */

bool r2_net_link_is_up(const struct r2_net_link *link)
{
    return (link->flags & IFF_UP) && (link->flags & IFF_LOWER_UP);
}

int r2_netlink_open(unsigned groups)
{
    struct sockaddr_nl local = {.nl_family = AF_NETLINK, .nl_groups = groups};
    struct timeval limit = {.tv_sec = 1};
    int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);

    if (fd < 0) {
        return -errno;
    }
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit)) < 0 ||
        bind(fd, (struct sockaddr *)&local, sizeof(local)) < 0) {
        int err = -errno;

        close(fd);
        return err;
    }
    return fd;
}

/* ---- decoding ---- */

static void r2_netlink_copy_text(char *out, size_t outlen, const struct rtattr *attr)
{
    size_t len = strnlen(RTA_DATA(attr), RTA_PAYLOAD(attr));

    len = len < outlen ? len : outlen - 1;
    memcpy(out, RTA_DATA(attr), len);
    out[len] = '\0';
}

static int r2_netlink_int(const struct rtattr *attr)
{
    int value = 0;

    if (RTA_PAYLOAD(attr) >= sizeof(value)) {
        memcpy(&value, RTA_DATA(attr), sizeof(value));
    }
    return value;
}

static void r2_netlink_decode_kind(const struct rtattr *info, struct r2_net_link *out)
{
    int left = (int)RTA_PAYLOAD(info);

    for (struct rtattr *a = RTA_DATA(info); RTA_OK(a, left); a = RTA_NEXT(a, left)) {
        if (a->rta_type == IFLA_INFO_KIND) {
            r2_netlink_copy_text(out->kind, sizeof(out->kind), a);
        }
    }
}

int r2_netlink_decode_link(const struct nlmsghdr *msg, struct r2_net_link *out)
{
    const struct ifinfomsg *info = NLMSG_DATA(msg);
    bool elsewhere = false;
    int left;

    memset(out, 0, sizeof(*out));
    if (msg->nlmsg_len < NLMSG_LENGTH(sizeof(*info)) || info->ifi_index <= 0) {
        return -EINVAL;
    }
    out->ifindex = info->ifi_index;
    out->flags = info->ifi_flags;
    out->type = info->ifi_type;
    left = (int)IFLA_PAYLOAD(msg);
    for (const struct rtattr *a = IFLA_RTA(info); RTA_OK(a, left); a = RTA_NEXT(a, left)) {
        switch (a->rta_type) {
        case IFLA_IFNAME:
            r2_netlink_copy_text(out->name, sizeof(out->name), a);
            break;
        case IFLA_MTU:
            out->mtu = r2_netlink_int(a);
            break;
        case IFLA_MASTER:
            out->master = r2_netlink_int(a);
            break;
        case IFLA_LINK:
            out->lower = r2_netlink_int(a);
            break;
        case IFLA_LINK_NETNSID:
            elsewhere = true;
            break;
        case IFLA_ADDRESS:
            out->mac_len = RTA_PAYLOAD(a) <= sizeof(out->mac) ? (int)RTA_PAYLOAD(a) : 0;
            memcpy(out->mac, RTA_DATA(a), (size_t)out->mac_len);
            break;
        case IFLA_LINKINFO:
            r2_netlink_decode_kind(a, out);
            break;
        default:
            break;
        }
    }
    if (elsewhere || out->lower == out->ifindex || strcmp(out->kind, "veth") == 0) {
        out->lower = 0;
    }
    return 0;
}

static int r2_netlink_set_addr(struct r2_net_addr *out, int family, const struct rtattr *attr)
{
    if (family == AF_INET && RTA_PAYLOAD(attr) == sizeof(struct in_addr)) {
        struct sockaddr_in *in = (struct sockaddr_in *)&out->addr;

        in->sin_family = AF_INET;
        memcpy(&in->sin_addr, RTA_DATA(attr), sizeof(in->sin_addr));
        return 0;
    }
    if (family == AF_INET6 && RTA_PAYLOAD(attr) == sizeof(struct in6_addr)) {
        struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&out->addr;

        in6->sin6_family = AF_INET6;
        memcpy(&in6->sin6_addr, RTA_DATA(attr), sizeof(in6->sin6_addr));
        if (IN6_IS_ADDR_LINKLOCAL(&in6->sin6_addr)) {
            in6->sin6_scope_id = (uint32_t)out->ifindex;
        }
        return 0;
    }
    return -EINVAL;
}

int r2_netlink_decode_addr(const struct nlmsghdr *msg, struct r2_net_addr *out)
{
    const struct ifaddrmsg *info = NLMSG_DATA(msg);
    const struct rtattr *local = NULL;
    const struct rtattr *address = NULL;
    int left;

    memset(out, 0, sizeof(*out));
    if (msg->nlmsg_len < NLMSG_LENGTH(sizeof(*info))) {
        return -EINVAL;
    }
    out->ifindex = (int)info->ifa_index;
    out->prefixlen = info->ifa_prefixlen;
    out->flags = info->ifa_flags;
    left = (int)IFA_PAYLOAD(msg);
    for (const struct rtattr *a = IFA_RTA(info); RTA_OK(a, left); a = RTA_NEXT(a, left)) {
        if (a->rta_type == IFA_LOCAL) {
            local = a;
        } else if (a->rta_type == IFA_ADDRESS) {
            address = a;
        } else if (a->rta_type == IFA_FLAGS) {
            out->flags = (unsigned)r2_netlink_int(a);
        }
    }
    /* On a point-to-point link IFA_ADDRESS is the other end. */
    address = local ? local : address;
    return address ? r2_netlink_set_addr(out, info->ifa_family, address) : -EINVAL;
}

/* ---- reading ---- */

static int r2_net_tables_add(struct r2_net_tables *t, const struct nlmsghdr *msg)
{
    struct r2_net_link link;
    struct r2_net_addr addr;
    void *grown;

    if (msg->nlmsg_type == RTM_NEWLINK && r2_netlink_decode_link(msg, &link) == 0) {
        grown = reallocarray(t->links, (size_t)t->nlinks + 1, sizeof(*t->links));
        if (!grown) {
            return -ENOMEM;
        }
        t->links = grown;
        t->links[t->nlinks++] = link;
    } else if (msg->nlmsg_type == RTM_NEWADDR && r2_netlink_decode_addr(msg, &addr) == 0) {
        grown = reallocarray(t->addrs, (size_t)t->naddrs + 1, sizeof(*t->addrs));
        if (!grown) {
            return -ENOMEM;
        }
        t->addrs = grown;
        t->addrs[t->naddrs++] = addr;
    }
    return 0;
}

/* Sends one request; `ifindex` picks one link, 0 asks for the whole table. */
static int r2_netlink_ask(int fd, int type, int ifindex)
{
    struct {
        struct nlmsghdr head;
        struct ifinfomsg info; /* also long enough for struct ifaddrmsg */
    } req = {
        .head = {.nlmsg_len = NLMSG_LENGTH(sizeof(struct ifinfomsg)),
                 .nlmsg_type = (uint16_t)type,
                 .nlmsg_flags = (uint16_t)(NLM_F_REQUEST | (ifindex ? 0 : NLM_F_DUMP)),
                 .nlmsg_seq = 1},
        .info = {.ifi_family = AF_UNSPEC, .ifi_index = ifindex},
    };
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};

    if (sendto(fd, &req, req.head.nlmsg_len, 0, (struct sockaddr *)&kernel, sizeof(kernel)) < 0) {
        return -errno;
    }
    return 0;
}

static int r2_netlink_error(const struct nlmsghdr *msg)
{
    const struct nlmsgerr *e = NLMSG_DATA(msg);

    return msg->nlmsg_len < NLMSG_LENGTH(sizeof(*e)) ? -EPROTO : e->error;
}

/* Adds one dump to the tables; -EINTR: the kernel's table changed meanwhile, ask again. */
static int r2_netlink_dump(int fd, int type, struct r2_net_tables *t, char *buffer)
{
    bool interrupted = false;
    int rc = r2_netlink_ask(fd, type, 0);

    while (rc == 0) {
        ssize_t n = recv(fd, buffer, R2_NETLINK_BUFFER, 0);
        int left = (int)n;

        if (n < 0) {
            return errno == EAGAIN ? -ETIMEDOUT : -errno;
        }
        for (struct nlmsghdr *m = (struct nlmsghdr *)buffer;
             left > 0 && NLMSG_OK(m, (unsigned)left) && rc == 0; m = NLMSG_NEXT(m, left)) {
            interrupted |= (m->nlmsg_flags & NLM_F_DUMP_INTR) != 0;
            if (m->nlmsg_type == NLMSG_DONE) {
                return interrupted ? -EINTR : 0;
            }
            rc = m->nlmsg_type == NLMSG_ERROR ? r2_netlink_error(m) : r2_net_tables_add(t, m);
        }
    }
    return rc;
}

int r2_net_tables_read(struct r2_net_tables *out)
{
    char *buffer = malloc(R2_NETLINK_BUFFER);
    int rc = -ENOMEM;

    memset(out, 0, sizeof(*out));
    for (int tries = 0; buffer && tries < 10; tries++) {
        int fd = r2_netlink_open(0);

        if (fd < 0) {
            rc = fd;
            break;
        }
        rc = r2_netlink_dump(fd, RTM_GETLINK, out, buffer);
        if (rc == 0) {
            rc = r2_netlink_dump(fd, RTM_GETADDR, out, buffer);
        }
        close(fd);
        if (rc != -EINTR) {
            break;
        }
        r2_net_tables_free(out);
    }
    if (rc) {
        r2_net_tables_free(out);
    }
    free(buffer);
    return rc;
}

void r2_net_tables_free(struct r2_net_tables *tables)
{
    free(tables->links);
    free(tables->addrs);
    memset(tables, 0, sizeof(*tables));
}

struct r2_net_link *r2_net_tables_link(const struct r2_net_tables *tables, int ifindex)
{
    for (int i = 0; i < tables->nlinks; i++) {
        if (tables->links[i].ifindex == ifindex) {
            return &tables->links[i];
        }
    }
    return NULL;
}

int r2_net_link_read(int ifindex, struct r2_net_link *out)
{
    /* One link's message: attributes of a few KiB, more with many virtual functions. */
    _Alignas(struct nlmsghdr) char buffer[R2_NETLINK_BUFFER / 2];
    struct nlmsghdr *m = (struct nlmsghdr *)buffer;
    int fd = ifindex > 0 ? r2_netlink_open(0) : -ENODEV;
    int rc = fd < 0 ? fd : r2_netlink_ask(fd, RTM_GETLINK, ifindex);
    ssize_t n;

    if (rc) {
        goto out;
    }
    n = recv(fd, buffer, sizeof(buffer), 0);
    if (n < 0) {
        rc = errno == EAGAIN ? -ETIMEDOUT : -errno;
    } else if (!NLMSG_OK(m, (unsigned)n)) {
        rc = -EPROTO;
    } else if (m->nlmsg_type == NLMSG_ERROR) {
        rc = r2_netlink_error(m);
    } else {
        rc = r2_netlink_decode_link(m, out);
    }
out:
    if (fd >= 0) {
        close(fd);
    }
    return rc;
}
