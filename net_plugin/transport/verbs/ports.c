/* InfiniBand ports that are NICs of their own, and what is told of a port. No interface with an
 * address belongs to them: IPoIB is not configured, or its interface is not among the NICs. */
#define _GNU_SOURCE
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "settings/settings.h"
#include "topology/device.h"
#include "transport/verbs/verbs.h"
#include "util/log.h"

/* Some NIC has the port. */
static bool taken(const struct r2_nic *nics, int n, int slot, int port)
{
    for (int i = 0; i < n; i++) {
        uint8_t found_port;
        int found = r2_vnic_best(&nics[i], &found_port);

        if (found == slot && found_port == port)
            return true;
    }
    return false;
}

/* Where its device is, by /sys/class/infiniband, which shows other network namespaces' as well. */
static void place(const char *device, struct r2_nic *nic)
{
    char path[128], real[PATH_MAX];
    const char *bus;

    snprintf(path, sizeof(path), "/sys/class/infiniband/%.64s/device", device);
    nic->numa = -1;
    if (!realpath(path, real))
        return;
    bus = strrchr(real, '/');
    r2_device_pci(bus ? bus + 1 : "", nic->pci_path, sizeof(nic->pci_path), &nic->numa);
}

static void describe(const struct r2_hca *hca, int port, const struct ibv_port_attr *attr,
                     struct r2_nic *nic)
{
    bool up = attr->state == IBV_PORT_ACTIVE;
    /* What a port without a link says of its rate is not what it will have. */
    unsigned gbps = up ? r2_port_rate_gbps(attr->active_width, attr->active_speed) : 0;

    memset(nic, 0, sizeof(*nic));
    snprintf(nic->name, sizeof(nic->name), "%.48s:%d", hca->name, port);
    snprintf(nic->rdma, sizeof(nic->rdma), "%s", hca->name);
    nic->rdma_port = port;
    nic->bare = true;
    nic->ifindex = -1;
    nic->link_up = up;
    nic->speed_known = gbps > 0;
    nic->speed_mbps = (int)gbps * 1000;
    nic->mtu = 128 << (attr->active_mtu ? attr->active_mtu : IBV_MTU_1024);
    place(hca->name, nic);
}

/* The port is taken, if no NIC has it. As in NCCL it must be active, since a card may have a port
 * that nobody uses. One that the user names need not be: it may have its link later. */
static bool counts(const struct r2_hca *hca, int port)
{
    const struct r2_settings *set = r2_settings_get();
    const struct r2_port_view *view = &hca->ports[port];

    return view->there && view->attr.link_layer == IBV_LINK_LAYER_INFINIBAND &&
           r2_hca_match(set->nccl_ib_hca, hca->name, port) &&
           r2_nics_wants_port(set, hca->name, port) &&
           (view->attr.state == IBV_PORT_ACTIVE || r2_nics_names_port(set, hca->name, port));
}

int r2_verbs_ports(const struct r2_nic *nics, int n, struct r2_nic *out, uint64_t *seed, int max)
{
    int found = 0;

    if (r2_verbs_library())
        return 0;
    for (int h = 0; h < r2_verbs.n_slots; h++) {
        const struct r2_hca *hca = r2_verbs.slots[h].now;

        for (int port = 1; port <= hca->n_ports && found < max; port++) {
            const struct r2_port_view *view = &hca->ports[port];

            if (!counts(hca, port) || taken(nics, n, h, port))
                continue;
            describe(hca, port, &view->attr, &out[found]);
            out[found].port_guid = view->guid;
            seed[found] = out[found].port_guid;
            found++;
        }
    }
    return found;
}

bool r2_verbs_rdma(int nic, struct r2_rdma_info *out)
{
    struct r2_vnic *v = nic >= 0 && nic < R2_MAX_NICS ? &r2_verbs.nics[nic] : NULL;
    const char *name;

    if (!v || v->slot < 0)
        return false;
    memset(out, 0, sizeof(*out));
    name = r2_verbs.slots[v->slot].name;
    pthread_mutex_lock(&r2_verbs.hca_lock);
    memcpy(out->device, name, strnlen(name, sizeof(out->device) - 1));
    pthread_mutex_unlock(&r2_verbs.hca_lock);
    out->port = v->port;
    out->queue_pairs = (uint32_t)atomic_load(&v->qps);
    pthread_mutex_lock(&v->lock);
    out->state = (uint32_t)v->state;
    out->active = v->active;
    out->phys = (uint32_t)v->phys;
    out->link = v->link; /* IBV_LINK_LAYER_INFINIBAND 1, _ETHERNET 2 */
    out->gbps = v->rate_gbps;
    out->lid = v->lid;
    memcpy(out->gid, v->gid, sizeof(out->gid));
    pthread_mutex_unlock(&v->lock);
    return true;
}
