/* What the kernel knows about the hardware behind an interface: by ethtool requests, which see
 * the caller's network namespace, and by /sys/bus/pci, which is the same in all of them
 * (/sys/class/net may show another namespace than the caller's). Nothing here fails: what is not
 * known stays empty. */
#ifndef R2_TOPOLOGY_DEVICE_H
#define R2_TOPOLOGY_DEVICE_H

#include <stdint.h>

#include "topology/nettables.h"

/* Fills in `bus` and `rdma` of all links. A VLAN or bond has those of the link below it. */
void r2_device_decorate(struct r2_net_tables *tables);
/* Mbit/s, or 0 if the driver does not say (no carrier, virtual). */
int r2_device_speed(const char *ifname);
/* The path below /sys/devices of a PCI address and its NUMA node; "" and -1 if not known. */
void r2_device_pci(const char *bus, char *path, size_t pathlen, int *numa);
/* Which port of its device the interface is, from 1; 0 if not known. */
int r2_device_port(const char *ifname);
/* The hardware's own address where the driver tells it, else 0 in length. */
int r2_device_permanent_mac(const char *ifname, unsigned char *mac, int maxlen);
/* A number that tells this boot of this machine from others. */
uint64_t r2_device_host_id(void);

#endif
