/* Weights of paths: what makes them up, and when they are counted anew. Under the peer's lock. */
#include <stdio.h>

#include <errno.h>

#include "engine/sched/sched.h"
#include "util/ratelimit.h"

#define AGE_NS (250 * R2_NS_PER_MS)
#define LAG_NS (1 * R2_NS_PER_MS) /* beside twice the quickest path's round trip */

/* What is enforced: the operator's word, the ramp. A slow path is held to its measured rate instead
 * (pathrate): a share of what all carry would hold up its siblings, which are no faster because it
 * is slow, and a path that only shares its NIC with other traffic. */
static uint32_t weight_of(const struct r2_path *path, uint64_t now)
{
    uint32_t ramp = path->health.state == R2_HEALTH_RAMPING
                        ? r2_health_ramp(now - path->health.since_ns, r2_eng.set->ramp_ns)
                        : R2_WEIGHT_FULL;
    uint32_t nic = atomic_load_explicit(&r2_eng.nic_state[path->lnic].weight, memory_order_relaxed);
    const struct r2_rnic *r = &path->peer->rnics[path->rnic];

    if (r->known && r->weight < nic)
        nic = r->weight; /* the lower of the two ends */
    return r2_weight_of(nic, ramp);
}

/* A path whose round trips take far longer than the quickest one's has a queue on its way, or loses
 * packets; frames that messages wait for take another. Seen at both ends: a receiver judges no
 * path by its speed. */
static void find_rtt_most(struct r2_peer *p)
{
    uint64_t least = UINT64_MAX;

    R2_FOR_EACH_PATH (path, p) {
        if (r2_path_may(path) >= R2_MAY_STAND_BY && path->hb.rtt_ns && path->hb.rtt_ns < least)
            least = path->hb.rtt_ns;
    }
    p->rtt_most = least == UINT64_MAX ? UINT64_MAX : 2 * least + LAG_NS;
}

/* Paths whose heartbeat is overdue do not count, so that nobody's share is held up by them. */
void r2_peer_weigh(struct r2_peer *p)
{
    bool was_limited = p->shares.limited;
    uint64_t now = r2_peer_now(p);

    for (int answering = 1; answering >= 0; answering--) {
        r2_share_begin(&p->shares);
        R2_FOR_EACH_PATH (path, p) {
            path->share.weight = weight_of(path, now);
            if (r2_path_may(path) >= R2_MAY_STAND_BY && !(answering && path->hb.unanswered))
                r2_share_add(&p->shares, &path->share);
        }
        if (p->shares.members)
            break;
    }
    r2_share_end(&p->shares, was_limited);
    find_rtt_most(p);
    if (now - p->shares_aged > AGE_NS) {
        p->shares_aged = now;
        r2_share_age(&p->shares);
    }
}

/* On a loaded machine weights change all the time, and the journal is for failures as well: the
 * first word about a path, and of others so many that the ring lasts for days. */
static void tell_weight(struct r2_path *path, const char *reason)
{
    static struct r2_ratelimit told; /* under its own lock: peers have different ones */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    unsigned untold = 0;
    char text[128];
    bool tell;

    pthread_mutex_lock(&lock);
    tell = r2_ratelimit_pass(&told, !path->shown.weights, r2_peer_now(path->peer), &untold);
    pthread_mutex_unlock(&lock);
    if (!tell)
        return;
    path->shown.weights++;
    if (untold)
        snprintf(text, sizeof(text), "%s (and %u changes before, not shown)", reason, untold);
    r2_path_journal(path, R2_EV_WEIGHT, 0, 0, untold ? text : reason);
}

void r2_path_set_grey(struct r2_path *path, unsigned permille, const char *reason)
{
    char text[128];

    if (permille > R2_WEIGHT_FULL)
        permille = R2_WEIGHT_FULL;
    r2_grey_note(path, permille);
    tell_weight(path, reason);
    R2_INFO("path %s: %u of 1000 of its weight: %s", r2_path_text(path, text, sizeof(text)),
            permille, reason);
    r2_peer_weigh(path->peer);
    r2_peer_kick(path->peer);
}
