/* The peer's task and timer: shuts dead endpoints, decides which paths to have, heartbeats,
 * time-outs. All of one peer's runs on one I/O thread, so it is never concurrent with itself. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop/loop.h"

#define ATTEMPT_NS (1 * R2_NS_PER_S) /* for a connect of ours to be answered */
#define ATTEMPT_SHORT_NS (300 * R2_NS_PER_MS)
#define ATTEMPT_REACHED_NS (10 * R2_NS_PER_S) /* ... where the peer's kernel has taken it */
#define PATIENCE_NS (100 * R2_NS_PER_MS)      /* before the next best pair is tried as well */
#define DOWN_REPEAT_NS (100 * R2_NS_PER_MS)
#define FRESH_NS (3 * R2_NS_PER_S) /* for first attempts, all together, before the last resort */
#define SUSPECT_NS (1 * R2_NS_PER_S)
#define IDLE_NS (10 * R2_NS_PER_S)
#define STOPPED_NS (2 * R2_NS_PER_S)
#define TICK_MAX_NS (4 * R2_TICK_NS)
#define BELIEVED_NS (5 * R2_NS_PER_S)
#define LATE_NS (2 * R2_TICK_NS) /* an observer that woke later than this was asleep */

/* The hardware has not said that it has stopped. It is not assumed, so nothing that the endpoint
 * carried is sent again; that must end some time. */
static void unconfirmed(struct r2_peer *p, struct r2_dying *d, uint64_t now)
{
    if (!d->since)
        d->since = now;
    else if (now - d->since > r2_eng.set->no_path_timeout_ns)
        r2_peer_gone(p, -ETIMEDOUT, "a NIC does not confirm that it has stopped");
}

/* R: the generation has stopped for good. FENCED speaks for all generations up to its number, so an
 * older one whose end is not confirmed holds it back. */
static void stopped(struct r2_peer *p, struct r2_path *path, uint32_t gen)
{
    uint32_t upto = gen > path->down.shut ? gen : path->down.shut;

    path->down.shut = upto;
    R2_LIST_EACH (d, struct r2_dying, node, &p->dying) {
        if (d->path == path && d->gen <= upto)
            upto = d->gen - 1;
    }
    if (upto <= path->down.fenced)
        return;
    path->down.fenced = upto;
    r2_flush_note_fenced(path);
    r2_path_journal(path, R2_EV_FENCED, 0, 0, "");
    r2_peer_want_resync(p);
}

/* Shuts the endpoints of p->dying. The entry stays in the list meanwhile, so that whoever wants
 * memory back finds the endpoint (r2_peer_eps). */
static void shut_dying(struct r2_peer *p)
{
    struct r2_list *n, *next;

    /* Others only append, so the node after this one is still its successor after the call. */
    for (n = p->dying.next; n != &p->dying; n = next) {
        struct r2_dying *d = R2_CONTAINER_OF(n, struct r2_dying, node);
        int rc;

        r2_peer_leave(p);
        rc = r2_eng.ops->shut(d->ep);
        r2_peer_lock(p);
        next = n->next;
        if (rc) {
            unconfirmed(p, d, r2_peer_now(p));
            continue;
        }
        r2_list_del(&d->node);
        if (d->path && !p->out)
            stopped(p, d->path, d->upto);
        r2_eng.ops->put(d->ep);
        free(d);
    }
}

static bool rnic_ok(const struct r2_peer *p, int r)
{
    return p->rnics[r].known &&
           (p->rnics[r].word == R2_NIC_USABLE || p->rnics[r].word == R2_NIC_FAILED);
}

/* With no path left, attempts are short and many: a NIC that comes back while one is under way
 * would otherwise be found when the kernel repeats its SYN. Every third one gives a slow network
 * time. */
static uint64_t attempt_ns(const struct r2_path *path)
{
    return path->peer->n_up || path->attempt.fails % 3 == 2 ? ATTEMPT_NS : ATTEMPT_SHORT_NS;
}

/* A peer with much to do is only made slower by one attempt after the other (invariant "silence is
 * not failure"). */
static bool attempt_is_over(const struct r2_path *path, uint64_t now)
{
    uint64_t age = now - path->attempt.at;

    return path->state == R2_PATH_CONNECTING && age > attempt_ns(path) &&
           (age > ATTEMPT_REACHED_NS || !r2_path_is_taken(path));
}

static void want(struct r2_path *path, enum r2_path_role role, uint64_t now)
{
    r2_path_set_role(path, role);
    if (path->state == R2_PATH_IDLE)
        path->attempt.next_at = now;
    if (attempt_is_over(path, now)) {
        bool slow = r2_path_is_taken(path); /* until another attempt has ended */

        r2_path_refused(path, false);
        r2_path_fail(path, path->gen, ETIMEDOUT, "no answer to connect");
        if (slow)
            path->past = r2_past_next(path->past, R2_PAST_EV_WAIT);
    }
    if (path->health.state == R2_HEALTH_DRAINED || path->health.state == R2_HEALTH_DAMPED)
        return;
    if ((path->state == R2_PATH_IDLE || path->state == R2_PATH_WAIT) &&
        now >= path->attempt.next_at && !(r2_io_fds_short() && r2_path_has_others(path)))
        r2_path_connect(path, now);
}

/* Its first attempt, and then the test of its queue pairs, are given a moment before the next best
 * pair is tried as well. */
static bool just_begun(const struct r2_path *path, uint64_t now)
{
    bool tested = path->state == R2_PATH_TESTING;
    uint64_t from = tested ? path->test.at : path->attempt.at;

    return (tested || path->state == R2_PATH_CONNECTING) && path->attempt.fails == 0 &&
           now - from < PATIENCE_NS;
}

/* It is tried until it works, even if it would only stand by: the peer may have no other path on
 * its NIC, and takes that for broken until then. */
static bool is_lost(const struct r2_path *path)
{
    return r2_past_carried(path->past) &&
           (path->health.state == R2_HEALTH_FAILED || path->health.state == R2_HEALTH_PROBING);
}

/* For one local NIC: the best pair, and the next best ones while that is not up. */
static int plan_nic(struct r2_peer *p, int lnic, int via, uint64_t now, bool extra,
                    unsigned allowed)
{
    int order[R2_MAX_NICS], n = r2_pairs_candidates(p, lnic, via, order), up = 0;

    n = r2_pairs_keep(p, lnic, via, order, n);
    for (int i = 0; i < n; i++) {
        struct r2_path *path;

        if (!(allowed >> order[i] & 1))
            continue;
        /* A NIC that the peer calls unusable is left out only while there is another path. Without
         * one the peer cannot say that the NIC works again, and this NIC may be the only one for
         * memory of devices. So all are tried. */
        if (!rnic_ok(p, order[i]) && r2_peer_left(p, via))
            continue;
        path = up > (extra ? 1 : 0) ? r2_path_find(p, lnic, order[i], via)
                                    : r2_path_obtain(p, lnic, order[i], via);
        if (!path)
            continue;
        if (up > (extra ? 1 : 0) && !is_lost(path)) { /* stood in for a better pair, now back */
            r2_path_set_role(path, R2_ROLE_SPARE);
            continue;
        }
        want(path, up ? R2_ROLE_SPARE : i ? R2_ROLE_OTHER : R2_ROLE_FIRST, now);
        if (path->health.state == R2_HEALTH_DRAINED && !r2_path_is_up(path) &&
            !r2_peer_left(p, via))
            r2_path_event(path, R2_HEALTH_EV_UNDRAIN, "no other path is left");
        up += r2_path_may(path) >= R2_MAY_LAST_RESORT;
        if (just_begun(path, now) || r2_path_is_taken(path))
            break;
    }
    return up;
}

/* A first attempt that may still succeed: too early for the last resort. */
static bool still_new(const struct r2_path *path)
{
    return !r2_past_carried(path->past) && path->attempt.fails == 0;
}

/* Some message that waits has no way over the paths that are up. */
static bool stranded(struct r2_peer *p)
{
    R2_FOR_EACH_READY (c, p) {
        if (!r2_conn_has_way(c, false))
            return true;
    }
    return false;
}

/* Pairs are tried for the first time one after the other, each as long as the peer's kernel keeps
 * it waiting: together too long. Then nothing is expected of them any more, until one serves. */
static bool expected(struct r2_peer *p, bool serves, bool fresh, uint64_t now)
{
    uint64_t half = r2_eng.set->no_path_timeout_ns / 2, most = half < FRESH_NS ? half : FRESH_NS;

    if (p->tcp_for == R2_TCP_ALWAYS)
        return serves;
    if (serves)
        p->tcp_for = R2_TCP_BESIDE;
    else if (p->no_path_since && now > p->no_path_since && now - p->no_path_since > most)
        p->tcp_for = R2_TCP_LATE;
    return serves || (fresh && p->tcp_for == R2_TCP_BESIDE);
}

/* Paths of one transport. True: they serve, or may in a moment (of queue pairs). */
static bool plan_transport(struct r2_peer *p, int via, uint64_t now)
{
    bool few = r2_peer_left(p, via) == 1, serves = false, fresh = false;
    int first = r2_io_fds_short() ? p->id[0] % r2_local.n : 0; /* not the same NIC for all peers */

    for (int i = 0; i < r2_local.n; i++) {
        int l = (first + i) % r2_local.n;

        if (r2_peer_may_try(p, l))
            plan_nic(p, l, via, now, few, ~0u);
    }
    R2_FOR_EACH_PATH (path, p) {
        if (path->transport == via && r2_nic_usable(path->lnic)) {
            serves |= r2_path_may(path) >= R2_MAY_LAST_RESORT;
            fresh |= still_new(path);
        }
    }
    return via == R2_VIA_VERBS && expected(p, serves, fresh, now);
}

/* A NIC that only stands by does not come up before those that it stands by for. */
static bool waits(const struct r2_peer *p, int lnic)
{
    return !p->n_up && !atomic_load(&r2_eng.nic_state[lnic].weight);
}

/* Queue pairs serve: sockets carry for NICs that have none, and others stand by. */
static void plan_beside(struct r2_peer *p, uint64_t now)
{
    unsigned allowed[R2_MAX_NICS];

    for (int l = 0; l < r2_local.n; l++) {
        allowed[l] = r2_pairs_beside(p, l);
        if (allowed[l] && r2_peer_may_try(p, l) && !waits(p, l))
            plan_nic(p, l, R2_VIA_TCP, now, false, allowed[l]);
    }
    R2_FOR_EACH_PATH (path, p) {
        if (path->transport == R2_VIA_TCP && !(allowed[path->lnic] >> path->rnic & 1))
            r2_path_set_role(path, R2_ROLE_SPARE);
    }
}

/* Which pairs of NICs to have (S). Own rail first; with a single path up, one spare more. Sockets
 * are the last resort where queue pairs can be had: they stand in, and stand by afterwards. */
static void plan_paths(struct r2_peer *p, uint64_t now)
{
    bool verbs = plan_transport(p, R2_VIA_VERBS, now);

    if (verbs && p->n_up && p->tcp_for != R2_TCP_ALWAYS && stranded(p))
        p->tcp_for = R2_TCP_ALWAYS;
    if (!verbs || p->tcp_for == R2_TCP_ALWAYS)
        plan_transport(p, R2_VIA_TCP, now);
    else
        plan_beside(p, now);
}

static void repeat_downs(struct r2_peer *p, uint64_t now)
{
    R2_FOR_EACH_PATH (path, p) {
        if (path->down.gen > path->down.fenced && now - path->down.said_at > DOWN_REPEAT_NS)
            r2_peer_want_resync(p);
    }
}

/* This process was stopped, or its machine. */
static bool slept(const struct r2_peer *p, uint64_t now)
{
    return now > p->last_tick && now - p->last_tick >= TICK_MAX_NS + LATE_NS;
}

static uint64_t later_by(uint64_t since, uint64_t ns, uint64_t now)
{
    return since + ns < now ? since + ns : now;
}

/* Time in which nobody here could look for a path is no time waited; being late on a busy machine
 * is, or the wait might never end. */
static void not_waited(struct r2_peer *p, uint64_t now)
{
    uint64_t ns = now - p->last_tick;

    if (ns < STOPPED_NS)
        return;
    if (p->no_path_since)
        p->no_path_since = later_by(p->no_path_since, ns, now);
    if (p->suspect_since)
        p->suspect_since = later_by(p->suspect_since, ns, now);
    R2_FOR_EACH_READY (c, p) {
        if (c->stuck_since)
            c->stuck_since = later_by(c->stuck_since, ns, now);
    }
}

/* Connections that the application has closed, and nobody has acknowledged it. A peer that is there
 * after all learns it from the answer to what it says about them (on_open, on_cts). Those that are
 * open and have nothing under way wait for nothing. */
static void forget_closed(struct r2_peer *p)
{
    R2_FOR_EACH_CONN_SAFE (c, p) {
        if (c->state >= R2_CONN_CLOSING) {
            c->word = R2_WORD_HEARD;
            r2_conn_reap(c);
        }
    }
}

static void check_time(struct r2_peer *p, uint64_t now)
{
    uint64_t limit = r2_eng.set->no_path_timeout_ns;
    bool pathless = !r2_peer_served(p) && p->no_path_since && now - p->no_path_since > limit;
    bool silent = p->suspect_since && now - p->suspect_since > limit;

    if (p->life != R2_PEER_ALIVE || slept(p, now) || !(pathless || silent))
        return;
    if (!p->active && !p->opening)
        forget_closed(p);
    else
        r2_peer_gone(p, -ETIMEDOUT,
                     p->shown.noway ? "no NIC here reaches it"
                     : pathless     ? "no path came back within R2CCL_NO_PATH_TIMEOUT"
                                    : "every path silent for R2CCL_NO_PATH_TIMEOUT");
}

/* A peer without connections: its paths are closed after a while (S), and it is forgotten. */
static void retire(struct r2_peer *p, uint64_t now)
{
    if (!r2_list_empty(&p->conn_list) || p->opening) {
        p->idle_since = now;
        return;
    }
    if (!p->idle_since)
        p->idle_since = now;
    if (p->life == R2_PEER_ALIVE && now - p->idle_since < IDLE_NS)
        return;
    if (!p->out && p->n_up)
        return; /* the connecting side lets go first */
    R2_FOR_EACH_PATH (path, p)
        r2_path_fail(path, path->gen, 0, "idle");
    if (p->life == R2_PEER_FORGOTTEN)
        return;
    p->life = R2_PEER_GONE;
    if (!r2_list_empty(&p->dying) || r2_peer_is_asking(p))
        return;
    r2_timer_set(&p->timer, 0);
    pthread_mutex_lock(&r2_eng.lock);
    p->life = R2_PEER_FORGOTTEN;
    r2_peer_hb_forget(p);
    r2_list_del(&p->node);
    pthread_mutex_unlock(&r2_eng.lock);
    r2_control_peer_remove(r2_eng.ctl, p->row);
    p->row = -1;
    R2_FOR_EACH_PATH (path, p)
        path->shown.row = -1;
}

static void maintain(struct r2_peer *p, uint64_t now)
{
    r2_peer_judge_refusals(p, now);
    if (p->life == R2_PEER_ALIVE) {
        if (p->out && (!r2_list_empty(&p->conn_list) || p->opening))
            plan_paths(p, now);
        r2_noway_look(p, now);
        r2_peer_judge_refusals(p, now);
        repeat_downs(p, now);
        r2_nicnews_repeat(p, now);
        if (!slept(p, now))
            r2_peer_check_stuck(p, now);
        check_time(p, now);
    }
    r2_peer_ask(p, now);
    r2_peer_resync(p);
}

void r2_peer_task(struct r2_task *t)
{
    struct r2_peer *p = R2_CONTAINER_OF(t, struct r2_peer, task);
    enum r2_peer_life was;
    bool drop;

    r2_io_note(false);
    r2_peer_lock(p);
    was = p->life;
    shut_dying(p);
    r2_conns_leave(p);
    maintain(p, r2_peer_now(p));
    shut_dying(p);
    r2_peer_resync(p);
    if (p->out) {
        R2_FOR_EACH_CONN_SAFE (c, p)
            r2_send_pump(c);
        r2_peer_find_ways(p);
        r2_peer_kick(p);
    }
    retire(p, r2_peer_now(p));
    drop = was != p->life && p->life == R2_PEER_FORGOTTEN;
    r2_peer_unlock(p);
    if (drop)
        r2_peer_put(p); /* the list's */
    r2_peer_put(p);     /* the queued task's */
}

/* ---- heartbeats */

/* Every path is silent for long: the kernel's own retries become rare, so fresh connections try,
 * one path after the other. No NIC is blamed for it. */
static void refresh_suspect(struct r2_peer *p, uint64_t now)
{
    if (!p->out || !p->suspect_since || now - p->suspect_since < SUSPECT_NS ||
        now - p->refresh_at < SUSPECT_NS)
        return;
    p->refresh_at = now;
    for (int i = 0; i < p->n_paths; i++) {
        if (r2_path_is_silent(p->paths[i])) {
            r2_path_fail(p->paths[i], p->paths[i]->gen, ETIMEDOUT, "every path silent: made anew");
            return;
        }
    }
}

/* `mark` looks at what the transport has handed to the kernel, so it comes after the flush. */
static void mark_all(struct r2_peer *p)
{
    R2_FOR_EACH_PATH (path, p) {
        if (r2_path_is_up(path) && path->hb.state == R2_BEAT_QUEUED)
            r2_eng.ops->mark(path->ep);
        path->hb.state = r2_beat_next(path->hb.state, R2_BEAT_EV_FLUSHED);
    }
}

/* Bytes that are under way. Of a path that has ended: those that are not sent again yet, as its end
 * is not confirmed. */
static uint64_t under_way(const struct r2_path *path)
{
    if (!r2_path_is_up(path) && path->down.gen <= path->down.fenced)
        return 0;
    return r2_pathrate_inflight(&path->rate);
}

static void publish(struct r2_peer *p, uint64_t now)
{
    struct r2_damp_rules rules = r2_damp_rules();

    R2_FOR_EACH_PATH (path, p) {
        struct r2_seg_path_counters *n = r2_control_path_counters(r2_eng.ctl, path->shown.row);

        r2_gauge(&n->tx_bytes, path->sum.tx_bytes);
        r2_gauge(&n->rx_bytes, path->sum.rx_bytes);
        r2_gauge(&n->inflight_bytes, under_way(path));
        r2_gauge(&n->rate, r2_pathrate_rate(&path->rate));
        r2_gauge(&n->rtt_us, path->hb.rtt_ns / 1000);
        r2_gauge(&n->replayed_bytes, path->sum.replayed);
        if (r2_path_is_up(path) && path->intro)
            r2_gauge(&n->heard_mono_ns, path->hb.proven_at);
        r2_control_path_weight(r2_eng.ctl, path->shown.row,
                               r2_weight_of(path->share.weight, path->flow.grey) / 10,
                               path->ep ? r2_eng.ops->lanes(path->ep) : 0);
        r2_control_path_damping(r2_eng.ctl, path->shown.row,
                                r2_damp_penalty(&path->damp, &rules, now),
                                r2_damp_reuse_at(&path->damp, &rules, now));
    }
}

/* Until the next look: four to an interval of heartbeats, which grows with the number of paths. So
 * what a process spends on its peers grows with them, and no faster. A verdict about silence does
 * not wait for that. */
static uint64_t next_tick(struct r2_peer *p, uint64_t now, bool busy)
{
    uint64_t quarter = p->hb_interval / 4, tick = p->n_up ? TICK_MAX_NS : R2_TICK_NS;
    uint64_t next = r2_peer_hb_next(p, now);

    if (busy)
        tick = quarter < R2_TICK_NS ? R2_TICK_NS : quarter > TICK_MAX_NS ? TICK_MAX_NS : quarter;
    return next > tick ? tick : next < R2_NS_PER_MS ? R2_NS_PER_MS : next;
}

/* Test chunks have arrived, but that the job's do is shown by the job's only. With nothing large to
 * send, it is believed after a while of answers. */
static bool delivers(const struct r2_path *path, uint64_t now)
{
    return path->state == R2_PATH_PROVEN &&
           (path->rate.delivered ||
            (path->health.state != R2_HEALTH_SUSPECT && !path->hb.unanswered &&
             path->hb.state != R2_BEAT_STALLED && now > path->health.since_ns + BELIEVED_NS));
}

static void end_doubt(struct r2_peer *p, uint64_t now)
{
    if (p->doubt_since && R2_ANY_PATH(path, p, delivers(path, now)))
        p->doubt_since = 0;
}

static void peer_timer(struct r2_timer *t, uint64_t now)
{
    struct r2_peer *p = R2_CONTAINER_OF(t, struct r2_peer, timer);
    bool busy, awake;

    r2_peer_get(p);
    r2_peer_lock(p);
    busy = p->active || p->opening;
    r2_peer_hb_intervals(p, busy, now);
    awake = !slept(p, now);
    if (!awake)
        not_waited(p, now);
    p->last_tick = now;
    R2_FOR_EACH_PATH (path, p)
        r2_path_tick(path, now);
    r2_peer_beat(p, now, awake);
    if (awake) {
        r2_peer_judge_silence(p, now);
        refresh_suspect(p, now);
        r2_peer_watch_grey(p, now);
        r2_tail_poll(p, now);
    }
    r2_peer_weigh(p);
    if (!p->out && (p->active || atomic_load(&p->held_until)))
        r2_recv_say_kept(p, now);
    end_doubt(p, now);
    publish(p, now);
    r2_peer_show(p, now);
    r2_timer_set(&p->timer, now + next_tick(p, now, busy));
    r2_out_again(p);   /* whoever left a frame and took the word may have no core */
    r2_peer_unlock(p); /* flushes the heartbeats */
    r2_peer_lock(p);
    mark_all(p);
    r2_peer_unlock(p);
    r2_peer_wake(p);
    r2_peer_put(p);
}

/* ---- for the layers below: begin and end with peers, and carry out what was noted */

static void began(struct r2_peer *p)
{
    r2_task_init(&p->task, p->io, r2_peer_task);
    r2_timer_init(&p->timer, p->io, peer_timer);
    r2_acks_init(p);
}

static void ended(struct r2_peer *p)
{
    R2_FOR_EACH_PATH (path, p)
        r2_path_free(path);
    r2_liveness_free(&p->liveness);
}

static void blame(struct r2_peer *p)
{
    R2_FOR_EACH_PATH (path, p) {
        if (path->down.blame)
            r2_locate_path_failed(path, path->down.blame);
        path->down.blame = 0;
    }
}

/* Weights first: lanes are asked by weight. */
static void carry_out(struct r2_peer *p)
{
    unsigned todo = p->todo;

    p->todo = 0;
    if (todo & R2_TODO_BLAME)
        blame(p);
    if (todo & R2_TODO_WEIGH)
        r2_peer_weigh(p);
    if (todo & R2_TODO_KICK)
        r2_peer_kick(p);
}

const struct r2_upper r2_loop_upper = {
    .began = began, .ended = ended, .carry_out = carry_out, .nic_changed = r2_locate_nic_changed};
