/* The sender's bulk data: r2_up_next_chunk gives the next chunk to a path. Paths pull: a lane that
 * has room asks for a chunk, and is told when there may be one. core/sched_next.c decides which
 * path takes it. Under the peer's lock but for the upcalls. */
#include <string.h>

#include "engine/core/sched_next.h"
#include "engine/sched/sched.h"

static uint32_t chunk_max(void)
{
    return (uint32_t)(r2_eng.set->chunk & ~UINT64_C(127));
}

/* All that waits may go over any NIC. */
static bool any_nic(const struct r2_peer *p)
{
    R2_FOR_EACH_READY (c, p) {
        if (c->first != R2_ANY_NIC)
            return false;
    }
    return !r2_list_empty(&p->ready);
}

static uint64_t room(const struct r2_path *path)
{
    uint32_t chunk = r2_pathrate_chunk_len(&path->rate, chunk_max());
    unsigned lanes = r2_eng.ops->lanes(path->ep);
    uint64_t window = r2_pathrate_window(&path->rate, chunk, lanes, any_nic(path->peer));
    uint64_t used = r2_pathrate_inflight(&path->rate);

    if (path->flow.busy_until && path->peer->shares.members > 1 && !r2_conn_narrow() &&
        path->flow.busy_until > r2_peer_now(path->peer))
        return 0; /* others have room; the only one is not spared */
    return window > used && lanes ? window - used : 0;
}

/* Lets lanes of the path pull up to `bytes` of the `space` left; returns what has no room. */
static uint64_t kick_path(struct r2_path *path, uint64_t bytes, uint64_t *space)
{
    uint64_t n = *space < bytes ? *space : bytes;

    if (n) {
        *space -= n;
        path->outbox.kick_wanted += (unsigned)((n + chunk_max() - 1) / chunk_max());
    }
    return bytes - n;
}

/* A path of limited weight may decline, a slow one should: others are asked for its bytes all the
 * same. */
static uint64_t ask_path(struct r2_path *path, uint64_t bytes, uint64_t *space)
{
    uint64_t left = kick_path(path, bytes, space);

    return r2_path_may(path) >= R2_MAY_BEST ? left : bytes;
}

/* The path can carry something of what waits. */
static bool has_work(const struct r2_path *path)
{
    R2_FOR_EACH_READY (c, path->peer) {
        const struct r2_req *r = r2_send_first_waiting(c);

        if (r && r2_send_carries(path, r))
            return true;
    }
    return false;
}

_Static_assert(R2_PATHS_MAX <= R2_SCHED_MAX, "r2_sched_order takes all paths of a peer");

/* As core/sched_next.h sees it, for a chunk of the connection. */
static struct r2_sched_path seen(const struct r2_path *path, const struct r2_conn *c)
{
    uint64_t now = r2_peer_now(path->peer), inflight = r2_pathrate_inflight(&path->rate);
    const atomic_int *out = &r2_eng.nic_state[path->lnic].census[R2_CENSUS_OUT];
    /* Hints, which other peers' threads change at any time. */
    int paths = atomic_load_explicit(out, memory_order_relaxed);

    return (struct r2_sched_path){
        .rate = r2_pathrate_rate_now(&path->rate, now),
        .inflight = inflight,
        .srtt = r2_pathrate_srtt_now(&path->rate, now),
        .distance = r2_eng.near[c->home][path->lnic],
        .nic_inflight = atomic_load_explicit(&r2_eng.inflight[path->lnic], memory_order_relaxed),
        .nic_rate = atomic_load_explicit(&r2_eng.rates[path->lnic], memory_order_relaxed),
        .nic_paths = paths > 0 ? (unsigned)paths : 0,
        .chunk = r2_pathrate_chunk_len(&path->rate, chunk_max()),
        .takes = inflight || room(path),
        .left =
            atomic_load_explicit(&path->peer->leave.leaves, memory_order_relaxed) >> path->lnic & 1,
    };
}

/* Paths that have room, in the order in which they are asked to take what the NIC of `spills` has
 * no room for. Returns how many. */
static int spill_order(const struct r2_peer *p, const uint64_t space[],
                       const struct r2_conn *spills, uint16_t order[])
{
    struct r2_sched_path paths[R2_PATHS_MAX];
    uint16_t of[R2_PATHS_MAX];
    int n = 0;

    for (int i = 0; i < p->n_paths; i++) {
        if (!space[i] || r2_path_may(p->paths[i]) < R2_MAY_LIMITED)
            continue;
        paths[n] = seen(p->paths[i], spills);
        of[n++] = (uint16_t)i;
    }
    r2_sched_order(paths, n, order);
    for (int i = 0; i < n; i++)
        order[i] = of[order[i]];
    return n;
}

/* A connection has bytes that only paths on standby can carry. */
static bool any_may(const struct r2_peer *p)
{
    R2_FOR_EACH_READY (c, p) {
        if (c->ways == R2_WAYS_ANY)
            return true;
    }
    return false;
}

/* The path may take a chunk of some connection. */
static bool may_take(const struct r2_path *path)
{
    enum r2_path_may may = r2_path_may(path);

    return may >= R2_MAY_LIMITED || (may >= R2_MAY_LAST_RESORT && any_may(path->peer));
}

/* Asks lanes to pull. A connection's home NIC is asked first. The others are asked for what it has
 * no room for, unless the connection keeps to one NIC. If all windows together have room for more
 * than what waits, the paths that are asked last run empty. So the path that has least to do is
 * asked first. A connection with R2_WAYS_ANY asks every path. */
void r2_peer_kick(struct r2_peer *p)
{
    uint64_t space[R2_PATHS_MAX], rest = 0;
    uint16_t order[R2_PATHS_MAX];
    const struct r2_conn *spills = NULL; /* the first that its own NIC has no room for */
    int others;

    if (r2_list_empty(&p->ready))
        return;
    for (int i = 0; i < p->n_paths; i++)
        space[i] = may_take(p->paths[i]) ? room(p->paths[i]) : 0;
    R2_FOR_EACH_READY (c, p) {
        const struct r2_req *r = r2_send_first_waiting(c);
        uint64_t left = r ? c->waiting : 0;
        int stays = r2_conn_stays(c), first = stays < 0 ? c->first : stays, asked = 0;

        for (int i = 0; i < p->n_paths && c->ways == R2_WAYS_ANY; i++)
            kick_path(p->paths[i], left, &space[i]);
        for (int i = 0; i < p->n_paths && left; i++) {
            if (p->paths[i]->lnic != first || r2_path_may(p->paths[i]) < R2_MAY_LIMITED ||
                !r2_send_carries(p->paths[i], r))
                continue;
            asked |= stays >= 0;
            left = ask_path(p->paths[i], left, &space[i]);
        }
        if (!asked && left) {
            spills = spills ? spills : c;
            rest += left;
        }
    }
    others = rest ? spill_order(p, space, spills, order) : 0;
    for (int i = 0; i < others && rest; i++) {
        if (has_work(p->paths[order[i]]))
            rest = ask_path(p->paths[order[i]], rest, &space[order[i]]);
    }
}

/* The other path may take a chunk of the message now: it answers, carries the message, is one of
 * those that the connection keeps to (`stays`), and has not had its share. */
static bool may_instead(const struct r2_path *other, const struct r2_req *r, int stays)
{
    return r2_path_may(other) >= R2_MAY_LIMITED && !other->hb.unanswered &&
           (stays < 0 || other->lnic == stays) &&
           r2_share_may(&other->peer->shares, &other->share) && r2_send_carries(other, r);
}

/* ... and its lanes are not full. */
static bool may_at_once(const struct r2_path *path, const struct r2_path *other,
                        const struct r2_req *r)
{
    return other != path && other->flow.busy_until <= r2_peer_now(path->peer) &&
           may_instead(other, r, r2_conn_stays(r->conn));
}

/* A path that is left nothing could never show that it is well again, or slow. */
static bool on_trial(const struct r2_path *path)
{
    return !path->hb.unanswered && r2_trial_may(&path->trial, r2_grey_path_doubted(path),
                                                path->flow.chunk_at, r2_peer_now(path->peer));
}

/* Who takes the path's next chunk: it, or another one that may take it at once. */
static struct r2_path *taker(struct r2_path *path, const struct r2_req *r)
{
    const struct r2_conn *c = r->conn;
    const struct r2_sched_bytes bytes = {
        .waiting = c->waiting, .any_nic = c->first == R2_ANY_NIC, .trial = on_trial(path)};
    struct r2_sched_path paths[R2_PATHS_MAX];
    struct r2_path *of[R2_PATHS_MAX];
    int n = 1;

    paths[0] = seen(path, c);
    of[0] = path;
    R2_FOR_EACH_PATH (other, path->peer) {
        if (!may_at_once(path, other, r))
            continue;
        paths[n] = seen(other, c);
        of[n++] = other;
    }
    return of[r2_sched_next(paths, n, &bytes)];
}

/* The path leaves its chunk to another one, which is asked if it has room. */
static bool leave(struct r2_path *path, const struct r2_req *r)
{
    struct r2_path *to = taker(path, r);

    if (to != path && room(to))
        to->outbox.kick_wanted++;
    return to != path;
}

/* No small rest: it would cost as much as a chunk, and another lane's thread a wake-up. */
static uint32_t with_rest(const struct r2_path *path, const struct r2_req *r, uint32_t len)
{
    uint64_t left = r2_send_waiting_bytes(&r->led.send);

    return !path->rate.known_slow && left <= (uint64_t)len + len / 2 && left <= chunk_max()
               ? (uint32_t)left
               : len;
}

static bool take_chunk(struct r2_path *path, struct r2_conn *c, struct r2_bulk *bulk)
{
    uint32_t len = r2_pathrate_chunk_len(&path->rate, chunk_max());
    struct r2_chunk chunk;

    R2_FOR_EACH_REQ (r, c) {
        if (!r2_send_waiting(r) || !r2_send_carries(path, r))
            continue;
        if (leave(path, r))
            return false;
        if (!r2_send_next(&r->led.send, with_rest(path, r, len), path->index, path->gen,
                          r2_peer_now(path->peer), &chunk))
            continue;
        r2_send_fill(path, c, r, &chunk, bulk);
        c->waiting -= chunk.len;
        if (c->first == R2_ANY_NIC)
            atomic_fetch_add_explicit(&path->peer->leave.bytes, chunk.len, memory_order_relaxed);
        r2_list_del(&c->ready); /* to the end of the line */
        r2_send_more(c, 0);
        return true;
    }
    return false;
}

/* Some other path carries the message, and may take a chunk of it now. */
static bool others_may(const struct r2_path *path, const struct r2_conn *c, const struct r2_req *r)
{
    const struct r2_peer *p = path->peer;
    int stays = r2_conn_stays(c);

    return R2_ANY_PATH(other, p, other != path && may_instead(other, r, stays));
}

/* What waits first of some connection no other path may take now: they cannot carry it, have had
 * their share as well, or do not answer. Then shares are no reason to wait. */
static bool is_sole_carrier(const struct r2_path *path)
{
    R2_FOR_EACH_READY (c, path->peer) {
        const struct r2_req *r = r2_send_first_waiting(c);

        if (r && r2_send_carries(path, r) && !others_may(path, c, r))
            return true;
    }
    return false;
}

/* The path has had its share: whoever may take more is asked instead, so that nothing waits. */
static void hand_over(struct r2_path *path)
{
    struct r2_peer *p = path->peer;

    r2_pathrate_app_limited(&path->rate);
    R2_FOR_EACH_PATH (other, p) {
        if (other != path && r2_path_may(other) >= R2_MAY_UNLIMITED && !other->hb.unanswered &&
            room(other)) {
            other->outbox.kick_wanted++;
            return;
        }
    }
}

/* The path has taken a chunk, so the shares of limited ones have become smaller. */
static void shares_moved(struct r2_path *path, uint32_t len)
{
    struct r2_peer *p = path->peer;

    r2_share_sent(&p->shares, &path->share, len);
    for (int i = 0; i < p->n_paths && p->shares.limited; i++) {
        struct r2_path *other = p->paths[i];

        if (other != path && r2_path_may(other) == R2_MAY_LIMITED &&
            r2_share_may(&p->shares, &other->share) && room(other))
            other->outbox.kick_wanted = 1;
    }
}

/* Whether the connection's chunks go over the NIC before those of others do, or alone do. */
static bool at_home(const struct r2_conn *c, int nic)
{
    int stays = r2_conn_stays(c);

    if (!r2_conn_narrow())
        return c->first == nic || !r2_conn_home_alive(c);
    return stays < 0 || stays == nic;
}

bool r2_up_next_chunk(void *owner, struct r2_ep *ep, struct r2_bulk *bulk)
{
    struct r2_path *path = owner;
    struct r2_peer *p = path->peer;
    bool found = false, any = false, rules;

    r2_peer_lock(p);
    if (path->ep == ep && path->state == R2_PATH_TESTING) {
        found = r2_path_test_next(path, bulk);
        goto out;
    }
    rules = r2_path_may(path) >= R2_MAY_LIMITED;
    if (path->ep != ep || r2_list_empty(&p->ready) || !may_take(path))
        goto out;
    if (!room(path)) {
        r2_slownics_full(path);
        goto out;
    }
    if (rules && !r2_share_may(&p->shares, &path->share) && !is_sole_carrier(path)) {
        hand_over(path);
        goto out;
    }
    for (int turn = 0; turn < (r2_conn_narrow() ? 1 : 2) && !found; turn++) {
        R2_FOR_EACH_READY (c, p) {
            bool all = c->ways == R2_WAYS_ANY, home = all || at_home(c, path->lnic);

            any = true;
            if (!(rules || all) || home != (turn == 0) || !take_chunk(path, c, bulk))
                continue;
            found = true;
            break; /* the connection is at the end of the line now */
        }
    }
    if (found) {
        r2_slownics_taken(path, bulk);
        shares_moved(path, bulk->len);
    }
    if (!found && !any)
        r2_pathrate_app_limited(&path->rate);
out:
    if (r2_list_empty(&p->ready) && path->ep == ep) {
        r2_pathrate_app_limited(&path->rate);
        path->flow.waits_for = R2_FLOW_DATA;
    }
    /* Only sockets take copies; one-sided paths are not even asked. */
    if (!found && path->transport == R2_VIA_TCP && path->ep == ep &&
        r2_path_may(path) >= R2_MAY_LIMITED && room(path))
        found = r2_tail_take(path, bulk);
    r2_peer_unlock(p); /* a faster path may have to be asked instead */
    return found;
}

void r2_up_blocked(void *owner, struct r2_ep *ep)
{
    struct r2_path *path = owner;
    struct r2_peer *p = path->peer;
    uint64_t now;

    r2_peer_lock(p);
    now = r2_peer_now(p);
    if (path->ep == ep && (!r2_list_empty(&p->ready) || r2_tail_waits(p, now))) {
        if (room(path)) {
            path->outbox.kick_wanted++;
        } else if (p->n_up > 1) {
            r2_peer_kick(p);
            r2_tail_poll(p, now);
        }
    }
    r2_peer_unlock(p);
}

void r2_up_chunk_sent(void *owner, struct r2_ep *ep, const struct r2_bulk *bulk)
{
    struct r2_path *path = owner;
    struct r2_conn *c;
    struct r2_req *r;
    bool said;

    if (bulk->conn == R2_CONN_TEST)
        return;
    r2_peer_lock(path->peer);
    path->sum.tx_bytes += bulk->len - bulk->unsent;
    c = r2_conn_find(path->peer, bulk->conn);
    said = c && c->peer->out && r2_revoke_back(c, path);
    r = c && c->peer->out ? r2_conn_req(c, bulk->seq) : NULL;
    if (r) {
        r2_send_released(&r->led.send, bulk->offset, bulk->len, path->index,
                         r2_eng.ops->params(ep)->gen);
        if (r2_send_complete(&r->led.send))
            r2_req_finish(r, 0);
    }
    if (said)
        r2_peer_unlock(path->peer);
    else
        r2_peer_leave(path->peer);
    r2_count(&r2_control_nic_counters(r2_eng.ctl, path->lnic)->tx_bytes, bulk->len - bulk->unsent);
    r2_count(&r2_control_nic_counters(r2_eng.ctl, path->lnic)->tx_chunks, !bulk->unsent);
    r2_count(&r2_eng.n->chunks_sent, !bulk->unsent);
}
