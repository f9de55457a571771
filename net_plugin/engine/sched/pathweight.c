/* Weights of paths: what makes them up, and when they are counted anew. Under the peer's lock. */
#include "engine/sched/sched.h"
#include "util/ratelimit.h"

#define AGE_NS (250 * R2_NS_PER_MS)
#define LAG_NS (1 * R2_NS_PER_MS) /* beside twice the quickest path's round trip */

/* What is enforced: the operator's word, the ramp. A slow path is held to its measured rate instead
 * (pathrate). A share of what all carry would hold up its siblings, which are no faster because it
 * is slow. It would also hold up a path that only shares its NIC with other traffic. */
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

static void find_nics(struct r2_peer *p)
{
    unsigned nics = 0;

    R2_FOR_EACH_PATH (path, p) {
        if (r2_path_may(path) >= R2_MAY_LIMITED)
            nics |= 1u << path->lnic;
    }
    atomic_store_explicit(&p->leave.nics, nics, memory_order_relaxed); /* a hint (leave.c) */
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
    find_nics(p);
    if (now - p->shares_aged > AGE_NS) {
        p->shares_aged = now;
        r2_share_age(&p->shares);
    }
}

void r2_path_set_grey(struct r2_path *path, unsigned permille, const char *reason)
{
    static struct r2_ratelimit weights; /* on a loaded machine they change all the time */
    char text[128];

    if (permille > R2_WEIGHT_FULL)
        permille = R2_WEIGHT_FULL;
    r2_grey_note(path, permille);
    path->shown.weighed |= r2_path_journal_seldom(path, R2_EV_WEIGHT, reason, &weights,
                                                  !path->shown.weighed); /* its first one always */
    R2_INFO("path %s: %u of 1000 of its weight: %s", r2_path_text(path, text, sizeof(text)),
            permille, reason);
    r2_peer_weigh(path->peer);
    r2_peer_kick(path->peer);
}
