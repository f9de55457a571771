/* The kernel's tables of links and addresses in the caller's network namespace, through netlink.
 *
 * Threads: no shared state; a table belongs to its owner. */
#ifndef R2_TOPOLOGY_NETTABLES_H
#define R2_TOPOLOGY_NETTABLES_H

#include <linux/netlink.h>
#include <net/if.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/socket.h>

struct r2_net_link {
    int ifindex;
    char name[IFNAMSIZ];
    unsigned flags; /* IFF_* with IFF_LOWER_UP */
    unsigned type;  /* ARPHRD_* */
    int mtu;
    int master;    /* ifindex of the bond, bridge or VRF it belongs to, or 0 */
    int lower;     /* ifindex of the link below a VLAN or macvlan here, or 0 */
    char kind[16]; /* veth, bridge, vlan, vxlan, ...; "" for most hardware */
    int mac_len;
    unsigned char mac[32];
    /* Filled in by topology/device.c: */
    char bus[64];  /* PCI address, 0000:3b:00.0; "" if there is none */
    char rdma[64]; /* RDMA device of the same PCI device, mlx5_0; "" if there is none */
    bool silent;   /* its driver has not answered in time */
};

struct r2_net_addr {
    int ifindex;
    int prefixlen;
    unsigned flags;               /* IFA_F_* */
    struct sockaddr_storage addr; /* port 0 */
};

struct r2_net_tables {
    struct r2_net_link *links;
    int nlinks;
    struct r2_net_addr *addrs;
    int naddrs;
};

/* IFF_LOWER_UP follows the carrier at once; IFF_RUNNING may lag by a second. */
bool r2_net_link_is_up(const struct r2_net_link *link);
socklen_t r2_sockaddr_len(const struct sockaddr *addr);
/* Same family, address and, for link-local IPv6, scope. */
bool r2_sockaddr_equal(const struct sockaddr *a, const struct sockaddr *b);
/* Both in the same subnet of `prefixlen` bits. */
bool r2_sockaddr_in_prefix(const struct sockaddr *a, const struct sockaddr *b, int prefixlen);
bool r2_sockaddr_is_loopback(const struct sockaddr *addr);
bool r2_sockaddr_is_linklocal(const struct sockaddr *addr);

/* A routing socket that listens to `groups` (0: none): a descriptor or -errno. */
int r2_netlink_open(unsigned groups);
/* Reads both tables, at most about a second. 0 or -errno; then the tables are empty. */
int r2_net_tables_read(struct r2_net_tables *out);
void r2_net_tables_free(struct r2_net_tables *tables);

/* The link with this index, or NULL. */
struct r2_net_link *r2_net_tables_link(const struct r2_net_tables *tables, int ifindex);
/* One link, asked for by index: 0, -ENODEV or another -errno. */
int r2_net_link_read(int ifindex, struct r2_net_link *out);

/* Decode one message of type RTM_*LINK or RTM_*ADDR: 0 or -EINVAL. */
int r2_netlink_decode_link(const struct nlmsghdr *msg, struct r2_net_link *out);
int r2_netlink_decode_addr(const struct nlmsghdr *msg, struct r2_net_addr *out);

#endif
