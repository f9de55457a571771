/* The NICs of this node: which ones to use, what is known about each, and in which order another
 * NIC stands in for one that failed.
 *
 * Threads: r2_nics_find may be called from any thread; the other functions are pure. */
#ifndef R2_TOPOLOGY_NICS_H
#define R2_TOPOLOGY_NICS_H

#include <net/if.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

#include "settings/settings.h"

#define R2_MAX_NICS 16
#define R2_NIC_NAME 64          /* an IPv6 address with a scope fits */
#define R2_NIC_MIN_REPORT 10000 /* Mbit/s; below, NCCL's channel search rounds to nothing */

struct r2_nic {
    char name[R2_NIC_NAME]; /* unique: the interface, or the address where several share one */
    char ifname[IFNAMSIZ];
    int ifindex;
    int family;                   /* AF_INET or AF_INET6 */
    struct sockaddr_storage addr; /* port 0; scope id set where IPv6 needs one */
    socklen_t socklen;
    int prefixlen;
    struct sockaddr_storage second; /* an address of the other family; family 0: none */
    int second_prefixlen;
    bool loopback;
    bool bare; /* an InfiniBand port without an interface: no address, ifindex -1, `ifname` "" */
    uint64_t port_guid; /* of a bare one, in host order; 0: not known */
    bool link_up;       /* at the time of r2_nics_find */
    bool speed_known;   /* false: speed_mbps is an assumption */
    bool silent;        /* its driver has not answered in time: speed and device are unknown */
    int speed_mbps;     /* > 0 */
    int mtu;
    int numa;           /* -1: not known */
    char rdma[64];      /* RDMA device of the same PCI device, "" if there is none */
    int rdma_port;      /* its port, 0: not known */
    char pci_path[256]; /* below /sys/devices, a PCI device; "" if it is none */
    uint64_t guid;      /* not 0; unique among the NICs found, the same in every process */
    int weight;         /* percent of the fastest NIC, at least 1; 0: a warm spare */
    int rail;           /* position in the list */
};

/* Finds the NICs that `settings` asks for, at most `max`, in a stable order. Returns the number
 * found; 0 is no error. `err` has a message if some were left out for `max`, or if some that
 * R2CCL_NICS names are not there. Or returns -errno with a message in `err`: -ENODEV if none of
 * them is there, -EINVAL for a bad list. A NIC that has no carrier is still a NIC. */
int r2_nics_find(const struct r2_settings *settings, struct r2_nic *out, int max, char *err,
                 size_t errlen);

struct r2_net_tables;
/* Where NIC `which` of `nics` is now, by its interface's name: the interface may have been made
 * anew, and have other addresses. The address that it had at first (`first`) is preferred, then one
 * of the same family, then of the same subnet, then its present one. Never one that another of
 * `nics` uses. `family` 0: any. `out` is the NIC with ifindex, address and link_up of now. 0,
 * -ENODEV: no interface of that name; -EADDRNOTAVAIL: it has no address to use. Pure. */
int r2_nic_find_again(const struct r2_net_tables *tables, const struct r2_nic *nics, int n,
                      int which, const struct r2_nic *first, int family, struct r2_nic *out);

/* After `n` NICs that were found comes one more at nics[n], filled in but for guid, weight and
 * rail; `seed`: a hash of its hardware. Weights of all are set anew. Pure. */
void r2_nics_append(struct r2_nic *nics, int n, uint64_t seed);

/* Whether R2CCL_NICS lets that InfiniBand port in, which belongs to no NIC: it names it
 * ("mlx5_0:1"), or it names no NICs and does not exclude it. Pure. */
bool r2_nics_wants_port(const struct r2_settings *settings, const char *device, int port);
/* Whether it names it. Pure. */
bool r2_nics_names_port(const struct r2_settings *settings, const char *device, int port);

/* Speed as reported to NCCL, Mbit/s. */
int r2_nic_report_speed(const struct r2_nic *nic);

/* Where a NIC is, for messages: its address, or the port's GUID ("0x0002c90300a1b2c3"). */
const char *r2_nic_place_text(const struct r2_nic *nic, char *out, size_t outlen);

/* Text of an address without port, for messages: "10.0.0.1", "fd00::1". Returns `out`. */
const char *r2_addr_text(const struct sockaddr *addr, char *out, size_t outlen);

/* For a NIC that reaches nobody: the kernel's settings that stand in the way of NICs that share a
 * subnet (rp_filter, arp_ignore), as sentences with a blank behind them; "" if they do not. Reads
 * /proc. Returns `out`. */
const char *r2_nics_shared_hint(const struct r2_nic *nics, int n, int which, char *out,
                                size_t outlen);

/* The order in which NICs serve a connection whose home is `home`: home, then the same PCIe
 * switch, the same NUMA node, and across; warm spares (weight 0) last. NICs at equal distance
 * follow in a rotation that starts after home, so that different homes fail over to different
 * NICs. Writes n entries to `order`. */
void r2_nics_order(const struct r2_nic *nics, int n, int home, int *order);

/* Its address of a family, or NULL. Pure. */
const struct sockaddr_storage *r2_nic_addr(const struct r2_nic *nic, int family);

/* Which of a peer's `n` addresses the local NIC number `index` should reach, best first: the same
 * subnet, then the same rail (index modulo n), then the following ones. Leaves out other address
 * families, and pairs of a loopback with a real address. Returns the number written to `order`. */
int r2_rail_candidates(const struct r2_nic *local, int index, const struct sockaddr_storage *remote,
                       int n, int *order);

#endif
