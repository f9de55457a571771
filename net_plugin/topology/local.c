#include "topology/local.h"

#include <pthread.h>

#define ASSUMED_MBPS 100000

struct r2_local r2_local;

static pthread_mutex_t place_lock = PTHREAD_MUTEX_INITIALIZER;

const struct r2_nic *r2_local_nic(int dev)
{
    return dev >= 0 && dev < r2_local.n ? &r2_local.nics[dev] : NULL;
}

void r2_local_now(int dev, struct r2_nic *out)
{
    pthread_mutex_lock(&place_lock);
    *out = r2_local.nics[dev];
    pthread_mutex_unlock(&place_lock);
}

uint64_t r2ccl_local_speed(void)
{
    uint64_t mbps = 0;
    bool any = false;

    for (int i = 0; i < r2_local.n; i++)
        any |= r2_local.nics[i].speed_known;
    for (int i = 0; i < r2_local.n; i++) {
        const struct r2_nic *nic = &r2_local.nics[i];
        bool says = nic->speed_known || (any && !nic->link_up); /* taken for one of its kind */

        if (nic->weight > 0)
            mbps += says ? (uint64_t)nic->speed_mbps : ASSUMED_MBPS;
    }
    return mbps * 125000;
}

void r2_local_move(int dev, const struct r2_nic *now)
{
    struct r2_nic *nic = &r2_local.nics[dev];

    pthread_mutex_lock(&place_lock);
    nic->ifindex = now->ifindex;
    nic->addr = now->addr;
    nic->family = now->family;
    nic->socklen = now->socklen;
    nic->prefixlen = now->prefixlen;
    nic->second = now->second;
    nic->second_prefixlen = now->second_prefixlen;
    pthread_mutex_unlock(&place_lock);
}
