#define _GNU_SOURCE
#include "topology/nics.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "topology/device.h"
#include "topology/nettables.h"
#include "topology/pick.h"

/* Tells this NIC from those of other nodes: by its hardware address if it has one, which holds
 * over reboots; a loopback only by the machine. */
static uint64_t r2_nics_seed(const struct r2_net_link *link, const struct r2_device_facts *facts,
                             uint64_t host)
{
    const unsigned char *mac = facts->mac_len ? facts->mac : link->mac;
    int len = facts->mac_len ? facts->mac_len : link->mac_len;
    uint64_t hash = 0xcbf29ce484222325u;
    unsigned char any = 0;

    for (int i = 0; i < len; i++) {
        hash = (hash ^ mac[i]) * 0x100000001b3u;
        any |= mac[i];
    }
    return any ? hash : host;
}

static void r2_nics_describe(const struct r2_pick *pick, const struct r2_device_facts *facts,
                             struct r2_nic *nic)
{
    const struct r2_net_link *link = pick->link;
    const struct sockaddr *addr = (const struct sockaddr *)&pick->addr;

    memset(nic, 0, sizeof(*nic));
    snprintf(nic->ifname, sizeof(nic->ifname), "%s", link->name);
    nic->ifindex = link->ifindex;
    nic->addr = pick->addr;
    nic->family = addr->sa_family;
    nic->socklen = r2_sockaddr_len(addr);
    nic->prefixlen = pick->prefixlen;
    nic->second = pick->second;
    nic->second_prefixlen = pick->second_prefixlen;
    nic->loopback = (link->flags & IFF_LOOPBACK) != 0;
    nic->link_up = r2_net_link_is_up(link);
    nic->mtu = link->mtu;
    nic->silent = facts->silent;
    nic->speed_mbps = facts->speed;
    nic->speed_known = nic->speed_mbps > 0;
    snprintf(nic->rdma, sizeof(nic->rdma), "%s", link->rdma);
    nic->rdma_port = facts->port;
    r2_device_pci(link->bus, nic->pci_path, sizeof(nic->pci_path), &nic->numa);
}

int r2_nics_find(const struct r2_settings *settings, struct r2_nic *out, int max, char *err,
                 size_t errlen)
{
    struct r2_net_tables tables;
    struct r2_pick picks[R2_MAX_NICS];
    struct r2_device_facts facts[R2_MAX_NICS] = {0};
    uint64_t seed[R2_MAX_NICS];
    uint64_t host = r2_device_host_id();
    int n = r2_net_tables_read(&tables);

    if (errlen) {
        err[0] = '\0';
    }
    if (n < 0) {
        snprintf(err, errlen, "the kernel does not tell its interfaces (netlink): %s",
                 strerror(-n));
        return n;
    }
    r2_device_decorate(&tables);
    max = max < R2_MAX_NICS ? max : R2_MAX_NICS;
    n = r2_pick_choose(settings, &tables, picks, max, err, errlen);
    for (int i = 0; i < n; i++) {
        memcpy(facts[i].name, picks[i].link->name, sizeof(facts[i].name));
        facts[i].silent = picks[i].link->silent;
        facts[i].has_port = picks[i].link->rdma[0] != '\0';
    }
    if (n > 0) {
        r2_device_ask(facts, n);
    }
    for (int i = 0; i < n; i++) {
        r2_nics_describe(&picks[i], &facts[i], &out[i]);
        seed[i] = r2_nics_seed(picks[i].link, &facts[i], host);
    }
    if (n > 0) {
        r2_pick_finish(out, n, seed);
    }
    r2_net_tables_free(&tables);
    return n;
}
