/* Paths: made, brought up, connected again, drained. Everything here runs under the peer's lock. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/path/path.h"
#include "util/random.h"

/* See core/pathstate.h. */
enum r2_path_may r2_path_may(const struct r2_path *path)
{
    const struct r2_share_set *shares = &path->peer->shares;
    struct r2_path_facts facts = {
        .state = path->state,
        .health = path->health.state,
        .spare = path->role == R2_ROLE_SPARE,
        .barred = !path->share.weight && shares->max,
        .limited = !r2_share_free(shares, &path->share),
        .slow = path->flow.grey != R2_WEIGHT_FULL,
    };

    return r2_path_may_carry(&facts);
}

/* Where memory of devices is taken, sockets are not enough. */
bool r2_path_suffices(const struct r2_path *path)
{
    return r2_path_is_up(path) && (path->transport != R2_VIA_TCP || !r2_eng.device_memory);
}

struct r2_path *r2_path_obtain(struct r2_peer *p, int lnic, int rnic, int transport)
{
    struct r2_path *path = r2_path_find(p, lnic, rnic, transport);
    char name[R2_SEG_NAME];

    if (path)
        return path;
    if (lnic < 0 || lnic >= r2_local.n || rnic < 0 || rnic >= R2_MAX_NICS || transport < 0 ||
        transport >= R2_VIA_COUNT || p->n_paths == R2_PATHS_MAX)
        return NULL;
    path = calloc(1, sizeof(*path));
    if (!path)
        return NULL;
    r2_mem_more(sizeof(*path));
    path->peer = p;
    path->index = (uint16_t)p->n_paths;
    path->lnic = (uint8_t)lnic;
    path->rnic = (uint8_t)rnic;
    path->transport = (uint8_t)transport;
    if (p->out) /* the other side may remember a path that was here before */
        path->gen = path->down.gen = path->down.fenced = atomic_load(&r2_eng.top_gen);
    r2_list_init(&path->outbox.flushq);
    r2_pathrate_init(&path->rate);
    r2_grey_path_init(path);
    if (p->rnics[rnic].name[0])
        snprintf(name, sizeof(name), "%s", p->rnics[rnic].name);
    else /* until the peer says it */
        r2_wire_addr_text(&p->rnics[rnic].addr, name, sizeof(name));
    path->shown.row = r2_control_path_add(r2_eng.ctl, p->row, lnic, name);
    r2_control_path_via(r2_eng.ctl, path->shown.row, (enum r2_seg_via)transport);
    p->paths[p->n_paths++] = path;
    return path;
}

void r2_path_free(struct r2_path *path)
{
    r2_grey_path_free(path);
    atomic_fetch_sub_explicit(&r2_eng.inflight[path->lnic], path->inflight_told,
                              memory_order_relaxed);
    atomic_fetch_sub_explicit(&r2_eng.rates[path->lnic], path->rate_told, memory_order_relaxed);
    r2_mem_less(sizeof(*path) + path->outbox.cap);
    free(path->outbox.data);
    free(path->attempt.end_memory);
    free(path);
}

bool r2_path_end_memory(struct r2_path *path)
{
    if (!path->attempt.end_memory)
        path->attempt.end_memory = malloc(sizeof(*path->attempt.end_memory));
    return path->attempt.end_memory;
}

/* Relaxed: a hint for other peers' paths over the NIC, which they may see late. */
void r2_path_tell_inflight(struct r2_path *path)
{
    uint64_t now = r2_path_is_up(path) ? r2_pathrate_inflight(&path->rate) : 0;
    uint64_t rate = r2_path_is_up(path) ? r2_pathrate_rate(&path->rate) : 0;

    atomic_fetch_add_explicit(&r2_eng.inflight[path->lnic], now - path->inflight_told,
                              memory_order_relaxed);
    path->inflight_told = now;
    if (rate != path->rate_told)
        atomic_fetch_add_explicit(&r2_eng.rates[path->lnic], rate - path->rate_told,
                                  memory_order_relaxed);
    path->rate_told = rate;
}

void r2_path_up(struct r2_path *path)
{
    struct r2_peer *p = path->peer;
    uint64_t now = r2_peer_now(p);

    path->state = r2_path_next(path->state, R2_PATH_EV_CONNECTED);
    path->hb.state = r2_beat_next(path->hb.state, R2_BEAT_EV_UP);
    path->hb.unanswered = 0;
    path->hb.asked_for = path->hb.quiet_from = path->hb.given_at = path->hb.used_at = 0;
    path->hb.at = path->hb.proven_at = now;
    r2_pathrate_reset(&path->rate);
    r2_path_tell_inflight(path);
    p->n_up++;
    r2_peer_answers(p);
    path->shown.verdict[0] = '\0';
    p->reached[path->lnic] |= (uint16_t)(1u << path->rnic);
    path->intro = R2_INTRO_NONE;
    r2_out_info(path);        /* before any other frame */
    if (!r2_path_is_up(path)) /* no memory for the frame */
        return;
    r2_grey_path_up(path); /* what was measured is forgotten too */
    r2_lanes_init(&path->lanes, r2_eng.ops->planned(path->ep));
    path->flow.busy_until = 0;
    r2_path_test(path);
    if (!r2_path_is_up(path)) /* the same */
        return;
    r2_path_show(path, path->state == R2_PATH_TESTING ? "test chunks are under way" : "");
    r2_peer_census(p);
    p->todo |= R2_TODO_WEIGH;
    if (p->n_up == 1) {
        r2_control_peer_state(r2_eng.ctl, p->row, R2_SEG_PEER_UP, "");
        r2_peer_want_resync(p);
    }
    r2_peer_wake(p);
}

void r2_path_refused(struct r2_path *path, bool yes)
{
    uint64_t now = r2_peer_now(path->peer);

    path->attempt.refused_from = !yes                         ? 0
                                 : path->attempt.refused_from ? path->attempt.refused_from
                                                              : now;
    if (yes)
        r2_peer_refused(path->peer, path->lnic, path->rnic, now);
}

bool r2_path_has_others(const struct r2_path *path)
{
    const struct r2_peer *p = path->peer;

    return R2_ANY_PATH(
        other, p, other != path && (r2_path_is_up(other) || other->state == R2_PATH_CONNECTING));
}

int r2_path_connect(struct r2_path *path, uint64_t now)
{
    struct r2_peer *p = path->peer;
    struct r2_ep_params params = {.local_nic = path->lnic,
                                  .remote_nic = path->rnic,
                                  .transport = path->transport,
                                  .packet = path->attempt.packet,
                                  .initiator = true,
                                  .extra = r2_path_has_others(path),
                                  .owner = path};
    struct r2_ep *ep = NULL;
    int rc = -ENOMEM;

    path->gen++;
    for (unsigned top = atomic_load(&r2_eng.top_gen);
         top < path->gen && !atomic_compare_exchange_weak(&r2_eng.top_gen, &top, path->gen);) {
    }
    params.gen = path->gen;
    params.remote_addr = *r2_pair_addr(p, path->lnic, path->rnic);
    memcpy(params.local_process, r2_eng.process, 16);
    memcpy(params.remote_process, p->id, 16);
    memcpy(params.secret, p->secret, 16);
    path->state = r2_path_next(path->state, R2_PATH_EV_ATTEMPT);
    path->attempt.at = now;
    r2_path_event(path, R2_HEALTH_EV_PROBE, "tried with fresh resources");
    if (r2_path_end_memory(path)) {
        r2_peer_get(p); /* the endpoint's, until `released` */
        rc = r2_eng.ops->connect(&params, &ep);
    }
    if (rc == 0) {
        path->ep = ep;
        return 0;
    }
    r2_path_refused(path, rc == -ECONNREFUSED);
    r2_path_fail(path, path->gen, -rc, "connect");
    return rc;
}

/* Frames are few, so a limited weight does not matter to them, but warm spares come last. What does
 * matter is a queue on the way: a message waits for its clear-to-send and its acknowledgement. */
static bool better(const struct r2_path *a, const struct r2_path *b)
{
    if (!b)
        return true;
    if ((a->hb.unanswered == 0) != (b->hb.unanswered == 0))
        return a->hb.unanswered == 0;
    if ((r2_path_may(a) >= R2_MAY_LAST_RESORT) != (r2_path_may(b) >= R2_MAY_LAST_RESORT))
        return r2_path_may(a) >= R2_MAY_LAST_RESORT;
    if (r2_path_high_rtt(a) != r2_path_high_rtt(b))
        return r2_path_high_rtt(b);
    return a->share.weight && !b->share.weight;
}

struct r2_path *r2_path_for_ctrl(struct r2_peer *p, int home, int remote_home)
{
    struct r2_path *best = NULL;

    R2_FOR_EACH_PATH (path, p) {
        if (!r2_path_is_up(path))
            continue;
        if (path->hb.unanswered == 0 && path->share.weight &&
            r2_path_may(path) >= R2_MAY_LAST_RESORT && !r2_path_high_rtt(path) &&
            (home < 0 || path->lnic == home) && (remote_home < 0 || path->rnic == remote_home))
            return path;
        if (better(path, best))
            best = path;
    }
    return best;
}

void r2_peer_account(struct r2_peer *p, int delta)
{
    if (delta > 0 && !p->active) {
        uint64_t now = r2_peer_now(p);

        r2_peer_waits(p, now);
        r2_timer_sooner(&p->timer, now + R2_TICK_NS);
    }
    p->active += delta;
    r2_gauge_add(&r2_eng.g->requests_in_flight, delta);
}

/* ---- draining */

#define DRAIN_MIN_NS (50 * R2_NS_PER_MS) /* the word about it travels on another path */

static bool drained_here(const struct r2_path *path)
{
    const struct r2_rnic *r = &path->peer->rnics[path->rnic];

    return r2_nic_word(path->lnic) == R2_NIC_DRAINED || (r->known && r->word == R2_NIC_DRAINED);
}

void r2_path_follow(struct r2_path *path)
{
    bool drained = drained_here(path);

    if (drained && r2_path_event(path, R2_HEALTH_EV_DRAIN, "its NIC is drained")) {
        path->drain_at = r2_peer_now(path->peer);
        if (path->state == R2_PATH_CONNECTING)
            r2_path_fail(path, path->gen, 0, "drained");
        path->peer->todo |= R2_TODO_KICK;
    } else if (!drained && r2_path_event(path, R2_HEALTH_EV_UNDRAIN, "its NIC is given back")) {
        path->attempt.next_at = 0;
        path->attempt.fails = 0;
        if (path->state == R2_PATH_PROVEN) { /* it was not empty yet */
            path->intro = path->intro ? R2_INTRO_HEARD : R2_INTRO_NONE;
            r2_path_proven(path, "its NIC is given back before it was empty");
        }
    }
}

/* Nothing of a message is on the path, and every frame has left. */
static bool is_empty(const struct r2_path *path)
{
    if (path->outbox.off < path->outbox.len || r2_pathrate_inflight(&path->rate))
        return false;
    R2_FOR_EACH_CONN (c, path->peer) {
        R2_FOR_EACH_REQ (r, c) {
            if (r2_send_on_path(&r->led.send, path->index))
                return false;
        }
    }
    return true;
}

/* ---- time */

static bool needed(const struct r2_path *path)
{
    return !r2_peer_left(path->peer, path->transport); /* nothing else is left */
}

static void tick_damped(struct r2_path *path, uint64_t now)
{
    struct r2_damp_rules rules = r2_damp_rules();

    if (!r2_damp_tick(&path->damp, &rules, now) && !needed(path))
        return;
    r2_damp_release(&path->damp);
    path->attempt.next_at = now;
    path->attempt.fails = 0;
    r2_path_event(path, R2_HEALTH_EV_REUSE,
                  needed(path) ? "no other path is left" : "the penalty has faded");
}

void r2_path_tick(struct r2_path *path, uint64_t now)
{
    switch (path->health.state) {
    case R2_HEALTH_RAMPING:
        /* Silence proves nothing: who does not answer is not back. */
        if (now - path->health.since_ns >= r2_eng.set->ramp_ns && !path->hb.unanswered)
            r2_path_event(path, R2_HEALTH_EV_RAMPED, "at full weight");
        break;
    case R2_HEALTH_DAMPED:
        tick_damped(path, now);
        break;
    case R2_HEALTH_DRAINED:
        if (r2_path_is_up(path) && path->peer->out && now - path->drain_at > DRAIN_MIN_NS &&
            is_empty(path))
            r2_path_fail(path, path->gen, 0, "drained");
        break;
    default:
        break;
    }
    r2_path_test_tick(path, now);
}
