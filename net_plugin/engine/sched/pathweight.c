/* Weights of paths: what makes them up, and when they are counted anew. Under the peer's lock. */
#include <stdio.h>

#include <errno.h>

#include "engine/internal.h"
#include "util/told.h"

#define AGE_NS (250 * R2_NS_PER_MS)
#define LAG_NS (1 * R2_NS_PER_MS) /* beside twice the quickest path's round trip */

bool r2_path_carries(const struct r2_path *path)
{
    return r2_path_able(path) && !path->spare;
}

/* What is enforced: the operator's word, the ramp. A slow path is held to its measured rate instead
 * (pathrate): a share of what all carry would hold up its siblings, which are no faster because it
 * is slow, and a path that only shares its NIC with other traffic. */
static uint32_t weight_of(const struct r2_path *path, uint64_t now)
{
    uint32_t ramp = path->health.state == R2_HEALTH_RAMPING
                        ? r2_health_ramp(now - path->health.since_ns, r2_eng.set->ramp_ns)
                        : R2_WEIGHT_FULL;
    uint32_t nic_ramp =
        atomic_load_explicit(&r2_eng.nic_state[path->lnic].ramp, memory_order_relaxed);
    uint32_t nic = atomic_load_explicit(&r2_eng.nic_state[path->lnic].weight, memory_order_relaxed);
    const struct r2_rnic *r = &path->peer->rnics[path->rnic];

    if (r->known && r->weight < nic)
        nic = r->weight; /* the lower of the two ends */
    return r2_weight_of(nic, ramp < nic_ramp ? ramp : nic_ramp, R2_WEIGHT_FULL);
}

/* A path whose round trips take far longer than the quickest one's has a queue on its way, or loses
 * packets; frames that messages wait for take another. Seen at both ends: a receiver judges no
 * path by its speed. */
static void find_laggards(struct r2_peer *p)
{
    uint64_t least = UINT64_MAX;

    for (int i = 0; i < p->n_paths; i++) {
        const struct r2_path *path = p->paths[i];

        if (r2_path_carries(path) && path->rtt_ns && path->rtt_ns < least)
            least = path->rtt_ns;
    }
    for (int i = 0; i < p->n_paths; i++) {
        struct r2_path *path = p->paths[i];

        path->lags = path->rtt_ns && least != UINT64_MAX && path->rtt_ns > 2 * least + LAG_NS;
    }
}

/* Paths whose heartbeat is overdue do not count, so that nobody's share is held up by them. */
void r2_peer_weigh(struct r2_peer *p)
{
    bool was_limited = p->shares.limited;
    uint64_t now = r2_now_ns();

    for (int answering = 1; answering >= 0; answering--) {
        r2_share_begin(&p->shares);
        for (int i = 0; i < p->n_paths; i++) {
            struct r2_path *path = p->paths[i];

            path->share.weight = weight_of(path, now);
            if (r2_path_carries(path) && !(answering && path->hb_unanswered))
                r2_share_add(&p->shares, &path->share);
        }
        if (p->shares.members)
            break;
    }
    r2_share_end(&p->shares, was_limited);
    find_laggards(p);
    if (now - p->shares_aged > AGE_NS) {
        p->shares_aged = now;
        r2_share_age(&p->shares);
    }
}

/* On a loaded machine weights change all the time, and the journal is for failures as well: the
 * first word about a path, and of others so many that the ring lasts for days. */
static void tell_weight(struct r2_path *path, const char *reason)
{
    static struct r2_told told; /* under its own lock: peers have different ones */
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    unsigned untold = 0;
    char text[128];
    bool tell;

    pthread_mutex_lock(&lock);
    tell = r2_told_pass(&told, !path->weight_told, r2_now_ns(), &untold);
    pthread_mutex_unlock(&lock);
    if (!tell)
        return;
    path->weight_told = true;
    if (untold)
        snprintf(text, sizeof(text), "%s (and %u changes before, not shown)", reason, untold);
    r2_path_journal(path, R2_EV_WEIGHT, 0, 0, untold ? text : reason);
}

void r2_path_set_grey(struct r2_path *path, unsigned permille, const char *reason)
{
    char text[128];

    if (permille > R2_WEIGHT_FULL)
        permille = R2_WEIGHT_FULL;
    path->grey = (uint16_t)permille;
    tell_weight(path, reason);
    R2_INFO("path %s: %u of 1000 of its weight: %s", r2_path_text(path, text, sizeof(text)),
            permille, reason);
    r2_peer_weigh(path->peer);
    r2_peer_kick(path->peer);
}

/* ---- who may take what */

bool r2_path_usable(const struct r2_path *path)
{
    return r2_path_carries(path) && (path->share.weight || !path->peer->shares.max);
}

bool r2_path_unlimited(const struct r2_path *path)
{
    return r2_path_usable(path) && r2_share_free(&path->peer->shares, &path->share);
}

bool r2_path_well(const struct r2_path *path)
{
    return path->grey == R2_WEIGHT_FULL && r2_path_unlimited(path);
}

bool r2_path_able(const struct r2_path *path)
{
    return path->state == R2_PATH_UP && path->ctrl_ready && !path->testing &&
           r2_health_carries(path->health.state);
}

/* Alive and well: nothing stays with a NIC that is known to be slow. */
bool r2_conn_home_alive(const struct r2_conn *c)
{
    const struct r2_peer *p = c->peer;

    for (int i = 0; i < p->n_paths; i++) {
        if (p->paths[i]->lnic == c->home && r2_path_well(p->paths[i]))
            return true;
    }
    return false;
}

int r2_conn_stays(const struct r2_conn *c)
{
    const struct r2_peer *p = c->peer;
    bool migrate = r2_eng.set->mode == R2_MODE_MIGRATE;
    int best = -1, behind = 2 * r2_local.n;

    if (!r2_conn_narrow())
        return -1;
    if (!migrate)
        return r2_conn_home_alive(c) ? c->home : -1;
    for (int i = 0; i < p->n_paths; i++) {
        int after = (p->paths[i]->lnic - c->home + r2_local.n) % r2_local.n;

        after += r2_path_unlimited(p->paths[i]) ? 0 : r2_local.n; /* while it ramps */
        if (after < behind && r2_path_usable(p->paths[i])) {
            behind = after;
            best = p->paths[i]->lnic;
        }
    }
    return best;
}

/* Some path carries the message and may take it. */
static bool served(const struct r2_conn *c, const struct r2_req *r)
{
    const struct r2_peer *p = c->peer;
    int stays = r2_conn_stays(c);

    for (int i = 0; i < p->n_paths; i++) {
        if (r2_path_usable(p->paths[i]) && (stays < 0 || p->paths[i]->lnic == stays) &&
            r2_send_carries(p->paths[i], r))
            return true;
    }
    return false;
}

/* Some other path carries the message, and may take a chunk of it now. */
static bool others_may(const struct r2_path *path, const struct r2_conn *c, const struct r2_req *r)
{
    const struct r2_peer *p = path->peer;
    int stays = r2_conn_stays(c);

    for (int i = 0; i < p->n_paths; i++) {
        const struct r2_path *other = p->paths[i];

        if (other != path && r2_path_usable(other) && !other->hb_unanswered &&
            (stays < 0 || other->lnic == stays) && r2_share_may(&p->shares, &other->share) &&
            r2_send_carries(other, r))
            return true;
    }
    return false;
}

bool r2_path_sole_carrier(const struct r2_path *path)
{
    struct r2_list *n;

    R2_LIST_FOR_EACH (n, &path->peer->ready) {
        struct r2_conn *c = R2_CONTAINER_OF(n, struct r2_conn, ready);
        const struct r2_req *r = r2_send_first_waiting(c);

        if (r && r2_send_carries(path, r) && !others_may(path, c, r))
            return true;
    }
    return false;
}

static bool only_stands_by(const struct r2_conn *c, const struct r2_req *r)
{
    const struct r2_peer *p = c->peer;

    if (served(c, r))
        return false;
    for (int i = 0; i < p->n_paths; i++) {
        if (r2_path_able(p->paths[i]) && r2_send_carries(p->paths[i], r))
            return true;
    }
    return false;
}

void r2_conn_begins(struct r2_conn *c, const struct r2_req *r)
{
    bool alone = r2_list_empty(&c->ready); /* nothing else of it waits: earlier ones do not count */

    if (alone || !c->waived)
        c->waived = only_stands_by(c, r);
    c->peer->waived |= c->waived;
}

void r2_peer_waive(struct r2_peer *p)
{
    struct r2_list *n;

    if (p->waived) {
        R2_LIST_FOR_EACH (n, &p->conn_list)
            R2_CONTAINER_OF(n, struct r2_conn, node)->waived = false;
    }
    p->waived = false;
    R2_LIST_FOR_EACH (n, &p->ready) {
        struct r2_conn *c = R2_CONTAINER_OF(n, struct r2_conn, ready);

        for (uint64_t s = c->oldest; s < c->next_seq && !c->waived; s++) {
            struct r2_req *r = r2_conn_req(c, s);

            c->waived = r && r2_send_waiting(r) && only_stands_by(c, r);
        }
        p->waived |= c->waived;
    }
}

bool r2_conn_has_way(struct r2_conn *c, bool proven)
{
    const struct r2_peer *p = c->peer;
    bool waits = false, way = false;

    for (uint64_t s = c->oldest; s < c->next_seq && !way; s++) {
        const struct r2_req *r = r2_conn_req(c, s);

        if (!r || !r2_send_waiting(r))
            continue;
        waits = true;
        /* By any path: that there is none is the peer's time. */
        way |= proven && !r2_send_device(r) && !r2_peer_served(p);
        for (int i = 0; i < p->n_paths && !way; i++)
            way = p->paths[i]->state == R2_PATH_UP && !(proven && p->paths[i]->testing) &&
                  r2_send_carries(p->paths[i], r);
    }
    return way || !waits;
}

void r2_peer_check_stuck(struct r2_peer *p, uint64_t now)
{
    struct r2_list *n, *tmp;

    R2_LIST_FOR_EACH_SAFE (n, tmp, &p->ready) {
        struct r2_conn *c = R2_CONTAINER_OF(n, struct r2_conn, ready);

        if (r2_conn_has_way(c, true)) /* what comes up and proves nothing is none */
            c->stuck_since = 0;
        else if (!c->stuck_since)
            c->stuck_since = now;
        else if (p->n_up && now - c->stuck_since > r2_eng.set->no_path_timeout_ns) {
            R2_WARN("no NIC that can reach a message's memory came back within "
                    "R2CCL_NO_PATH_TIMEOUT%s",
                    r2_eng.device_memory ? "; memory of GPUs cannot go over sockets "
                                           "(R2CCL_GPU_MEMORY=host: through host memory, which can)"
                                         : "");
            r2_conn_fail(c, -ETIMEDOUT);
        }
    }
}
