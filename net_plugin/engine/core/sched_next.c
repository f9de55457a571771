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

uint64_t r2_sched_ahead(const struct r2_sched_path *path)
{
    unsigned others = path->nic_paths ? path->nic_paths - 1 : 0;

    return path->nic_inflight + others * path->inflight;
}

/* A path on a NIC that others use gets little, so its own rate is low. If it counted as slow for
 * that, it would get less. So the time of the whole NIC counts, too: all of its bytes, at the rate
 * of all of its paths. The latest round trips show whether the peer's NIC is slow. */
static uint64_t done_of(const struct r2_sched_path *path, uint64_t len, bool any_nic)
{
    uint64_t own = r2_sched_done(path, len), nic;

    if (!any_nic || !own || !path->nic_rate)
        return own;
    nic = r2_mul_div(path->nic_inflight + len, NS_PER_S, path->nic_rate);
    return r2_min(own, r2_max(nic, path->srtt));
}

/* The length for which times of paths are compared. For any NIC it is the same for all paths: else
 * each of two could find the other one faster. */
static uint64_t length_of(const struct r2_sched_path paths[], int n, int self,
                          const struct r2_sched_bytes *b)
{
    uint64_t len = r2_min(b->waiting, paths[self].chunk);

    for (int i = 0; i < n && b->any_nic; i++)
        len = r2_min(len, paths[i].chunk);
    return len;
}

/* Who is so much faster than paths[self] that it should have the chunk; self: nobody. */
static int faster(const struct r2_sched_path paths[], int n, int self,
                  const struct r2_sched_bytes *b)
{
    uint64_t len = length_of(paths, n, self, b);
    uint64_t mine = done_of(&paths[self], len, b->any_nic);
    uint64_t bytes = b->waiting, rates = 0, soon = UINT64_MAX;
    int soonest = self;

    for (int i = 0; i < n && mine; i++) {
        uint64_t theirs = done_of(&paths[i], len, b->any_nic);

        if (i == self || !paths[i].takes || !theirs || theirs >= mine)
            continue;
        bytes += paths[i].inflight;
        rates += paths[i].rate;
        if (theirs < soon) {
            soon = theirs;
            soonest = i;
        }
    }
    if (soonest == self || soon > mine / 2 || r2_mul_div(bytes, NS_PER_S, rates) >= mine)
        return self;
    return soonest;
}

/* The NIC is left to other peers, and has bytes for them in flight. While it has none, anybody may
 * use it. */
static bool is_theirs(const struct r2_sched_path *path)
{
    return path->left && path->nic_inflight > path->inflight;
}

static bool before(const struct r2_sched_path *a, const struct r2_sched_path *b)
{
    if (is_theirs(a) != is_theirs(b))
        return is_theirs(b);
    return r2_sched_ahead(a) < r2_sched_ahead(b);
}

/* Who has the least ahead, of paths[0] and of those that would not leave the chunk to a faster one.
 */
static int least_ahead(const struct r2_sched_path paths[], int n, const struct r2_sched_bytes *b)
{
    int least = 0;

    for (int i = 1; i < n; i++) {
        if (paths[i].takes && before(&paths[i], &paths[least]) && faster(paths, n, i, b) == i)
            least = i;
    }
    return least;
}

int r2_sched_next(const struct r2_sched_path paths[], int n, const struct r2_sched_bytes *bytes)
{
    int to = bytes->trial ? 0 : faster(paths, n, 0, bytes);

    return to || !bytes->any_nic ? to : least_ahead(paths, n, bytes);
}
