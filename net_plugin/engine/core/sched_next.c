#include "engine/core/sched_next.h"

#include "util/num.h"

#define NS_PER_S UINT64_C(1000000000)

uint64_t r2_sched_done(const struct r2_sched_path *path, uint64_t len)
{
    return path->rate ? r2_mul_div(path->inflight + len, NS_PER_S, path->rate) : 0;
}

void r2_sched_order(const struct r2_sched_path paths[], int n, uint16_t order[])
{
    uint64_t done[R2_SCHED_MAX];

    for (int i = 0; i < n; i++) {
        int at = i;

        done[i] = paths[i].rate ? 1 + r2_sched_done(&paths[i], 0) : 0;
        for (; at > 0; at--) {
            int other = order[at - 1];

            if (done[other] < done[i] ||
                (done[other] == done[i] && paths[other].distance <= paths[i].distance))
                break;
            order[at] = (uint16_t)other;
        }
        order[at] = (uint16_t)i;
    }
}

int r2_sched_next(const struct r2_sched_path *self, const struct r2_sched_path others[], int n,
                  uint64_t waiting, uint32_t chunk)
{
    uint64_t len = waiting < chunk ? waiting : chunk, mine = r2_sched_done(self, len);
    uint64_t bytes = waiting, rates = 0, soon = UINT64_MAX;
    int soonest = -1;

    for (int i = 0; i < n && mine; i++) {
        uint64_t theirs = r2_sched_done(&others[i], len);

        if (!theirs || theirs >= mine)
            continue;
        bytes += others[i].inflight;
        rates += others[i].rate;
        if (theirs < soon) {
            soon = theirs;
            soonest = i;
        }
    }
    if (soonest < 0 || soon > mine / 2 || r2_mul_div(bytes, NS_PER_S, rates) >= mine)
        return -1;
    return soonest;
}

uint64_t r2_sched_ahead(const struct r2_sched_path *path)
{
    unsigned others = path->nic_paths ? path->nic_paths - 1 : 0;

    return path->nic_inflight + others * path->inflight;
}
