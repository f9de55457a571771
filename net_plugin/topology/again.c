/* Where a NIC is after its address or its interface has changed. Pure. */
#include <errno.h>
#include <linux/if_addr.h>
#include <string.h>

#include "topology/nettables.h"
#include "topology/nics.h"

static bool r2_again_is(const struct r2_net_addr *a, const struct sockaddr_storage *addr)
{
    return r2_sockaddr_equal((const struct sockaddr *)&a->addr, (const struct sockaddr *)addr);
}

/* Another NIC of this process is there (several may share an interface). */
static bool r2_again_taken(const struct r2_net_addr *a, const struct r2_nic *nics, int n, int which)
{
    for (int i = 0; i < n; i++) {
        if (i != which && a->ifindex == nics[i].ifindex && r2_again_is(a, &nics[i].addr)) {
            return true;
        }
    }
    return false;
}

/* Lower is better; -1: not to be used. */
static int r2_again_rank(const struct r2_net_addr *a, const struct r2_nic *nic,
                         const struct r2_nic *first, int family)
{
    const struct sockaddr *addr = (const struct sockaddr *)&a->addr;

    if (a->flags & IFA_F_DADFAILED || (family && addr->sa_family != family)) {
        return -1;
    }
    if (r2_again_is(a, &first->addr)) {
        return 0;
    }
    if (r2_sockaddr_is_linklocal(addr) !=
        r2_sockaddr_is_linklocal((const struct sockaddr *)&first->addr)) {
        return -1;
    }
    return (addr->sa_family == first->family ? 0 : 32) +
           (r2_sockaddr_in_prefix(addr, (const struct sockaddr *)&first->addr, first->prefixlen)
                ? 0
                : 16) +
           (a->flags & IFA_F_TENTATIVE ? 8 : 0) + (a->flags & IFA_F_DEPRECATED ? 4 : 0) +
           (a->flags & IFA_F_SECONDARY ? 2 : 0) + (r2_again_is(a, &nic->addr) ? 0 : 1);
}

int r2_nic_find_again(const struct r2_net_tables *tables, const struct r2_nic *nics, int n,
                      int which, const struct r2_nic *first, int family, struct r2_nic *out)
{
    const struct r2_nic *nic = &nics[which];
    const struct r2_net_link *link = NULL;
    int best = -1;

    for (int i = 0; i < tables->nlinks && !link; i++) {
        if (strcmp(tables->links[i].name, nic->ifname) == 0) {
            link = &tables->links[i];
        }
    }
    if (!link) {
        return -ENODEV;
    }
    *out = *nic;
    memset(&out->second, 0, sizeof(out->second));
    for (int i = 0; i < tables->naddrs; i++) {
        const struct r2_net_addr *a = &tables->addrs[i];
        int rank = a->ifindex == link->ifindex ? r2_again_rank(a, nic, first, family) : -1;

        if (rank < 0 || (best >= 0 && rank >= best) || r2_again_taken(a, nics, n, which)) {
            continue;
        }
        best = rank;
        out->addr = a->addr;
        out->prefixlen = a->prefixlen;
    }
    if (best < 0) {
        return -EADDRNOTAVAIL;
    }
    for (int i = 0; i < tables->naddrs && nic->second.ss_family; i++) {
        const struct r2_net_addr *a = &tables->addrs[i];

        if (a->ifindex == link->ifindex && a->addr.ss_family != out->addr.ss_family &&
            r2_again_is(a, &nic->second)) {
            out->second = a->addr;
            out->second_prefixlen = a->prefixlen;
        }
    }
    out->ifindex = link->ifindex;
    out->link_up = r2_net_link_is_up(link);
    out->family = out->addr.ss_family;
    out->socklen = r2_sockaddr_len((const struct sockaddr *)&out->addr);
    return 0;
}
