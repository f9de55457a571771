/* Which lanes of an endpoint carry bulk data. */
#include <limits.h>

#include "settings/settings.h"
#include "topology/local.h"
#include "transport/tcp/tcp.h"
#include "util/clock.h"

/* Chunks of a push: the second look, which finds nothing as a rule, costs less than to wake the
 * lane's thread for it. */
#define PUSH_TURN 2
#define AT_WORK_NS (200 * R2_NS_PER_US) /* a chunk takes some 140 us where one core carries it */

/* Bulk lanes of a path. A stream moves about 25 Gbit/s with a core of its own. So more of them help
 * only where there are threads to drive them and the link can take it. */
int r2_bulk_plan(int nic)
{
    int asked = r2_settings_get()->lanes, threads = r2_io_used();
    const struct r2_nic *n = r2_local_nic(nic);

    if (asked > 0)
        return asked < R2_TCP_MAX_LANES ? asked : R2_TCP_MAX_LANES - 1;
    if (r2_io_fds_short())
        return 1;
    if (n->speed_known && n->speed_mbps <= 2500)
        return 1;
    return threads < 1 ? 1 : threads > 4 ? 4 : threads;
}

/* Relaxed: a figure. A lane that is asked by who still reads the old one looks itself, and passes
 * the question on (r2_lane_tx_bulk). */
static int in_use(const struct r2_ep *ep)
{
    return atomic_load_explicit(&ep->use, memory_order_relaxed);
}

void r2_bulk_use(struct r2_ep *ep, unsigned lanes)
{
    int n = lanes < (unsigned)ep->n_lanes ? (int)lanes : ep->n_lanes;

    atomic_store_explicit(&ep->use, n, memory_order_relaxed);
}

bool r2_bulk_uses(const struct r2_ep *ep, int index)
{
    return index <= in_use(ep);
}

/* Either number may change while a lane is relied on that then is blocked and does not say so: what
 * waits has the next kick, of an acknowledgement or the peer's tick. */
bool r2_bulk_keeps_to_few(const struct r2_ep *ep)
{
    return in_use(ep) > 1 && r2_io_used() > R2_MANY_THREADS;
}

/* It is idle, or at work and will ask for more before long: not blocked, and not at it for so long
 * that its thread may have no core, or much else to do. */
static bool counts(struct r2_lane *lane, uint64_t now)
{
    return !atomic_load(&lane->tx_full) &&
           (atomic_load(&lane->tx_idle) ||
            now < atomic_load_explicit(&lane->tx_since, memory_order_relaxed) + AT_WORK_NS);
}

/* A lane is given one chunk at a time: whoever kicks it takes `tx_idle`, and the lane sets it again
 * before it asks for work (r2_lane_tx_bulk). Lanes of threads that poll come first, then the
 * lowest. With many threads only the first lanes are asked, as many as what waits is worth. So
 * little traffic keeps a few threads awake on both sides. Otherwise it would wake all in turn and
 * find none of them polling (docs/decisions.md 41). Those at work ask by themselves; where none can
 * be counted on, all are asked. */
void r2_bulk_kick(struct r2_ep *ep, unsigned chunks, unsigned lanes)
{
    uint64_t now = r2_now_ns();
    bool few = r2_bulk_keeps_to_few(ep) && lanes < (unsigned)in_use(ep);
    unsigned able = 1;

    if (!few)
        lanes = UINT_MAX;
    for (int pass = 0; pass < 3 && chunks; pass++) {
        if ((pass == 1 && !able) || (pass == 2 && able && few))
            continue;
        able = 0;
        for (int i = 1; i <= in_use(ep) && (pass == 2 || able < lanes) && chunks; i++) {
            struct r2_lane *lane = r2_ep_lane(ep, i);

            if (!lane || !atomic_load(&lane->open) || (pass < 2 && !counts(lane, now)))
                continue;
            able++;
            if ((pass == 0 && !r2_io_polls(lane->io.io)) || !atomic_exchange(&lane->tx_idle, false))
                continue;
            atomic_store_explicit(&lane->tx_since, now, memory_order_relaxed);
            r2_lane_kick(lane);
            chunks--;
        }
    }
}

/* With several I/O threads: one of the lanes' is awake and takes the next chunk (the only one is
 * rather spared). */
static bool others_send(struct r2_ep *ep)
{
    if (r2_io_alone())
        return false;
    for (int i = 1; i <= in_use(ep); i++) {
        struct r2_lane *lane = r2_ep_lane(ep, i);

        if (lane && atomic_load(&lane->open) && r2_io_awake(lane->io.io))
            return true;
    }
    return false;
}

bool r2_bulk_push(struct r2_ep *ep)
{
    int rc;

    if (others_send(ep))
        return false;
    for (int i = 1; i <= in_use(ep); i++) {
        struct r2_lane *lane = r2_ep_lane(ep, i);

        if (!lane || !atomic_load(&lane->open) || !atomic_load(&lane->tx_idle) ||
            pthread_mutex_trylock(&lane->tx_lock))
            continue;
        if (lane->closed) {
            pthread_mutex_unlock(&lane->tx_lock);
            continue;
        }
        rc = r2_lane_tx_bulk(lane, PUSH_TURN);
        pthread_mutex_unlock(&lane->tx_lock);
        if (rc < 0)
            r2_ep_lane_failed(ep, -rc);
        return true;
    }
    return false;
}

unsigned r2_bulk_planned(struct r2_ep *ep)
{
    return (unsigned)ep->n_lanes;
}

unsigned r2_bulk_lanes(struct r2_ep *ep)
{
    int open = atomic_load(&ep->open_lanes), use = in_use(ep);

    return (unsigned)(open < use ? open : use);
}
