/* Which NIC stands in for which, and which of a peer's NICs it should reach. Pure. */
#include <stdlib.h>
#include <string.h>

#include "topology/nettables.h"
#include "topology/nics.h"

enum r2_distance { R2_SAME_SWITCH, R2_SAME_NUMA, R2_ACROSS };

/* Components that two /sys/devices paths share from their start: the host bridge is the first one
 * that is specific (/sys/devices/pci0000:16), so more than three mean a common bridge. */
static int r2_order_common(const char *a, const char *b)
{
    int shared = 0;

    if (!*a || !*b) {
        return 0;
    }
    for (; *a == *b; a++, b++) {
        if (*a == '\0') {
            return shared + 1;
        }
        shared += a[1] == '/' && b[1] == '/';
    }
    /* One ends where the other goes on with a new component. */
    return shared + ((*a == '\0' && *b == '/') || (*b == '\0' && *a == '/'));
}

static enum r2_distance r2_order_distance(const struct r2_nic *a, const struct r2_nic *b)
{
    if (r2_order_common(a->pci_path, b->pci_path) > 3) {
        return R2_SAME_SWITCH;
    }
    return a->numa == b->numa ? R2_SAME_NUMA : R2_ACROSS;
}

/* Smaller is nearer; no two NICs are equal. */
static int r2_order_rank(const struct r2_nic *nics, int n, int home, int i)
{
    const struct r2_nic *a = &nics[home];
    const struct r2_nic *b = &nics[i];
    int distance = (int)r2_order_distance(a, b);
    int common = distance == R2_SAME_SWITCH ? r2_order_common(a->pci_path, b->pci_path) : 0;
    int turn = (i - home + n) % n;

    if (i == home) {
        return -1;
    }
    common = common < 63 ? common : 63;
    return (((b->weight == 0) * 4 + distance) * 64 + (63 - common)) * 1024 + turn;
}

void r2_nics_order(const struct r2_nic *nics, int n, int home, int *order)
{
    for (int i = 0; i < n; i++) {
        int rank = r2_order_rank(nics, n, home, i);
        int at = i;

        for (; at > 0 && r2_order_rank(nics, n, home, order[at - 1]) > rank; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
}

const struct sockaddr_storage *r2_nic_addr(const struct r2_nic *nic, int family)
{
    if (family != AF_INET && family != AF_INET6) {
        return NULL;
    }
    return nic->addr.ss_family == family     ? &nic->addr
           : nic->second.ss_family == family ? &nic->second
                                             : NULL;
}

static int r2_rail_rank(const struct r2_nic *local, int index,
                        const struct sockaddr_storage *remote, int n, int i)
{
    const struct sockaddr_storage *own = r2_nic_addr(local, remote[i].ss_family);
    bool near =
        r2_sockaddr_in_prefix((const struct sockaddr *)own, (const struct sockaddr *)&remote[i],
                              own == &local->addr ? local->prefixlen : local->second_prefixlen);

    return (near ? 0 : n) + ((i - index % n) + n) % n;
}

int r2_rail_candidates(const struct r2_nic *local, int index, const struct sockaddr_storage *remote,
                       int n, int *order)
{
    int count = 0;

    for (int i = 0; i < n; i++) {
        const struct sockaddr_storage *own = r2_nic_addr(local, remote[i].ss_family);
        int at = count;

        if (!own || r2_sockaddr_is_loopback((const struct sockaddr *)&remote[i]) !=
                        r2_sockaddr_is_loopback((const struct sockaddr *)own)) {
            continue;
        }
        for (; at > 0 && r2_rail_rank(local, index, remote, n, order[at - 1]) >
                             r2_rail_rank(local, index, remote, n, i);
             at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
        count++;
    }
    return count;
}
