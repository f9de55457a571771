/* Several NICs of a node in one subnet: what the kernel's usual settings do to them. */
#include <stdio.h>
#include <stdlib.h>

#include "topology/nettables.h"
#include "topology/nics.h"

/* The larger of the interface's and the one for all counts, as in the kernel; -1: not known. */
static int r2_shared_setting(const char *ifname, const char *name)
{
    const char *const scopes[] = {"all", ifname};
    int most = -1;

    for (int i = 0; i < 2; i++) {
        char path[128];
        int value;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/sys/net/ipv4/conf/%s/%s", scopes[i], name);
        f = fopen(path, "re");
        if (f) {
            if (fscanf(f, "%d", &value) == 1 && value > most) {
                most = value;
            }
            fclose(f);
        }
    }
    return most;
}

static const struct r2_nic *r2_shared_with(const struct r2_nic *nics, int n, int which)
{
    const struct r2_nic *nic = &nics[which];

    for (int i = 0; i < n; i++) {
        if (i != which && nics[i].ifindex != nic->ifindex && nic->addr.ss_family == AF_INET &&
            r2_sockaddr_in_prefix((const struct sockaddr *)&nic->addr,
                                  (const struct sockaddr *)&nics[i].addr, nic->prefixlen)) {
            return &nics[i];
        }
    }
    return NULL;
}

const char *r2_nics_shared_hint(const struct r2_nic *nics, int n, int which, char *out,
                                size_t outlen)
{
    const struct r2_nic *other = r2_shared_with(nics, n, which);
    int filter = other ? r2_shared_setting(nics[which].ifname, "rp_filter") : 0;
    int ignore = other ? r2_shared_setting(nics[which].ifname, "arp_ignore") : 1;

    out[0] = '\0';
    if (filter == 1 || ignore == 0) {
        snprintf(out, outlen,
                 "It shares a subnet with %s, and net.ipv4.conf has rp_filter=%d, arp_ignore=%d: "
                 "set rp_filter=2, arp_ignore=1, arp_announce=2 for all, on both nodes. ",
                 other->ifname, filter, ignore);
    }
    return out;
}
