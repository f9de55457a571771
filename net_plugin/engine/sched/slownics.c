#include "engine/sched/sched.h"
#include "io/pause.h"
#include "io/standin.h"

#define SLOW_RATE UINT64_C(600000000) /* bytes/s of one NIC: its window holds 2 ms at least */
#define SLOW_SUM UINT64_C(1500000000) /* ... of all of a peer: NCCL's thread can carry that */

/* Queue pairs are their threads' own, but for their events. */
static bool is_slow(const struct r2_path *path)
{
    uint64_t rate = r2_pathrate_rate(&path->rate);

    return path->transport == R2_VIA_TCP && rate && rate < SLOW_RATE && !path->rate.startup;
}

/* Whether NICs are what the path's peer waits for: this one is slow, and so are all others. What
 * comes next then comes when they have sent what they have. One among fast ones is not waited for.
 */
static bool nics_limit(const struct r2_path *path)
{
    const struct r2_peer *p = path->peer;
    uint64_t sum = 0;

    if (!is_slow(path) || path->rate.probing_rtt || !r2_pathrate_inflight(&path->rate) ||
        r2_limited_never(path))
        return false;
    R2_FOR_EACH_PATH (other, p) {
        if (r2_path_may(other) < R2_MAY_LIMITED)
            continue;
        if (!is_slow(other))
            return false;
        sum += r2_pathrate_rate(&other->rate);
    }
    return sum < SLOW_SUM;
}

void r2_slownics_full(struct r2_path *path)
{
    if (path->flow.busy_until > r2_peer_now(path->peer) || !nics_limit(path)) {
        path->flow.waits_for = R2_FLOW_DATA;
        return;
    }
    path->flow.waits_for = R2_FLOW_NICS;
    r2_limited_note(path->peer, 0);
}

void r2_slownics_taken(struct r2_path *path, struct r2_bulk *bulk)
{
    if (path->flow.waits_for == R2_FLOW_DATA)
        return;
    if (!nics_limit(path)) { /* it may have become faster, or another one */
        path->flow.waits_for = R2_FLOW_DATA;
        return;
    }
    bulk->flags |= R2_BULK_LIMITED;
    r2_limited_note(path->peer, bulk->len);
}
