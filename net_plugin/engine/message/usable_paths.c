/* Which ways the messages of a connection have: the NIC that it keeps to, paths that only stand by,
 * none at all. Under the peer's lock. */
#include <errno.h>

#include "engine/message/message.h"

/* Alive and well: nothing stays with a NIC that is known to be slow. */
bool r2_conn_home_alive(const struct r2_conn *c)
{
    const struct r2_peer *p = c->peer;

    return R2_ANY_PATH(path, p, path->lnic == c->first && r2_path_may(path) >= R2_MAY_BEST);
}

int r2_conn_stays(const struct r2_conn *c)
{
    const struct r2_peer *p = c->peer;
    int best = -1, behind = 2 * r2_local.n;

    if (!r2_conn_narrow())
        return -1;
    R2_FOR_EACH_PATH (path, p) {
        int after = r2_eng.near[c->home][path->lnic];

        after += r2_path_may(path) >= R2_MAY_UNLIMITED ? 0 : r2_local.n; /* while it ramps */
        if (after < behind && r2_path_may(path) >= R2_MAY_LIMITED) {
            behind = after;
            best = path->lnic;
        }
    }
    return best;
}

/* Some path carries the message and may take it. */
static bool served(const struct r2_conn *c, const struct r2_req *r)
{
    const struct r2_peer *p = c->peer;
    int stays = r2_conn_stays(c);

    return R2_ANY_PATH(path, p,
                       r2_path_may(path) >= R2_MAY_LIMITED && (stays < 0 || path->lnic == stays) &&
                           r2_send_carries(path, r));
}

static bool only_stands_by(const struct r2_conn *c, const struct r2_req *r)
{
    const struct r2_peer *p = c->peer;

    if (served(c, r))
        return false;
    return R2_ANY_PATH(path, p,
                       r2_path_may(path) >= R2_MAY_LAST_RESORT && r2_send_carries(path, r));
}

static enum r2_conn_ways ways_of(const struct r2_conn *c, const struct r2_req *r)
{
    return only_stands_by(c, r) ? R2_WAYS_ANY : R2_WAYS_RULED;
}

void r2_conn_begins(struct r2_conn *c, const struct r2_req *r)
{
    bool alone = r2_list_empty(&c->ready); /* nothing else of it waits: earlier ones do not count */

    if (alone || c->ways == R2_WAYS_RULED)
        c->ways = ways_of(c, r);
}

void r2_peer_find_ways(struct r2_peer *p)
{
    R2_FOR_EACH_READY (c, p) {
        c->ways = R2_WAYS_RULED;
        R2_FOR_EACH_REQ (r, c) {
            if (c->ways == R2_WAYS_RULED && r2_send_waiting(r))
                c->ways = ways_of(c, r);
        }
    }
}

bool r2_conn_has_way(struct r2_conn *c, bool proven)
{
    const struct r2_peer *p = c->peer;
    bool waits = false, way = false;

    R2_FOR_EACH_REQ (r, c) {
        if (way || !r2_send_waiting(r))
            continue;
        waits = true;
        /* By any path: that there is none is the peer's time. */
        way |= proven && !r2_send_device(r) && !r2_peer_served(p);
        way = way || R2_ANY_PATH(path, p,
                                 (proven ? path->state == R2_PATH_PROVEN : r2_path_is_up(path)) &&
                                     r2_send_carries(path, r));
    }
    return way || !waits;
}

void r2_peer_check_stuck(struct r2_peer *p, uint64_t now)
{
    R2_LIST_EACH_SAFE (c, struct r2_conn, ready, &p->ready) {
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
