/* What the kernel knows about the hardware behind an interface. Ethtool requests see the caller's
 * network namespace, and /sys/bus/pci is the same in all of them. /sys/class/net may show another
 * namespace than the caller's. Nothing here fails: what is not known stays empty.
 *
 * A driver may not answer: all are waited for together, R2_DEVICE_SECONDS in a process
 * (util/ask.h), and no question is put to one that was silent. */
#ifndef R2_TOPOLOGY_DEVICE_H
#define R2_TOPOLOGY_DEVICE_H

#include <stdint.h>

#include "topology/nettables.h"

#define R2_DEVICE_SECONDS 10

/* What is asked about one interface. */
struct r2_device_facts {
    char name[IFNAMSIZ];
    bool has_port; /* in: `port` is wanted */
    bool silent;   /* in: not asked; out: it did not answer */
    int speed;     /* Mbit/s; 0: the driver does not say (no carrier, virtual) */
    int port;      /* which of its device's, from 1; 0: not known */
    int mac_len;   /* of the hardware's own address; 0: not told */
    unsigned char mac[32];
};

/* Fills in `bus`, `rdma` and `silent` of all links. A VLAN or bond has those of the link below it.
 */
void r2_device_decorate(struct r2_net_tables *tables);
/* Fills in the rest of each. */
void r2_device_ask(struct r2_device_facts *facts, int n);
/* The path below /sys/devices of a PCI address and its NUMA node; "" and -1 if not known. */
void r2_device_pci(const char *bus, char *path, size_t pathlen, int *numa);
/* A number that tells this boot of this machine from others. */
uint64_t r2_device_host_id(void);

#endif
