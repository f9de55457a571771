/* Paths: made, brought up, failed, connected again. Everything here runs under the peer's lock. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/path/pairs.h"
#include "util/random.h"

#define BACKOFF_NEVER_UP (5 * R2_NS_PER_S)
#define BACKOFF_NONE_LEFT (250 * R2_NS_PER_MS)
#define CROWDED_NS (5 * R2_NS_PER_S) /* there are no descriptors for one path more */
#define CROWDED_ALONE_NS (100 * R2_NS_PER_MS)

struct r2_path *r2_path_find(struct r2_peer *p, int lnic, int rnic, int transport)
{
    for (int i = 0; i < p->n_paths; i++) {
        if (p->paths[i]->lnic == lnic && p->paths[i]->rnic == rnic &&
            p->paths[i]->transport == transport)
            return p->paths[i];
    }
    return NULL;
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
    r2_mem_less(sizeof(*path) + path->outbox.cap);
    free(path->outbox.data);
    free(path->attempt.end_memory);
    free(path);
}

const char *r2_path_text(const struct r2_path *path, char *out, size_t cap)
{
    const struct r2_peer *p = path->peer;
    char who[R2_PEER_WHO];

    snprintf(out, cap, "%s -> %s of %s", r2_nic_name(path->lnic),
             p->rnics[path->rnic].name[0] ? p->rnics[path->rnic].name : "?", r2_peer_who(p, who));
    return out;
}

void r2_path_journal(const struct r2_path *path, enum r2_seg_event event, uint64_t bytes,
                     uint64_t duration_ns, const char *cause)
{
    struct r2_control_event ev = {
        .event = event,
        .nic = r2_nic_name(path->lnic),
        .remote_nic = path->peer->rnics[path->rnic].name,
        .peer_host = path->peer->host,
        .peer_pid = path->peer->pid,
        .generation = path->gen,
        .bytes = bytes,
        .duration_us = duration_ns / 1000,
        .cause = cause,
    };

    r2_control_journal(r2_eng.ctl, &ev);
}

/* Longest time between the starts of two attempts. A pair that never was up may be out of reach for
 * good, unless its NIC is known to be coming back. */
static uint64_t probe_cap(const struct r2_path *path)
{
    if (!r2_past_carried(path->past) && r2_nic_trusted(path->lnic))
        return BACKOFF_NEVER_UP;
    if (!r2_peer_left(path->peer, path->transport) && path->role == R2_ROLE_FIRST)
        return BACKOFF_NONE_LEFT;
    return R2_PROBE_NS;
}

/* Counted from the start of an attempt that failed, so that its own time-out is no extra wait. */
static void backoff(struct r2_path *path, uint64_t now, bool attempt)
{
    uint64_t wait = r2_health_backoff((unsigned)path->attempt.fails, probe_cap(path));
    struct r2_prng jitter;

    r2_prng_seed(&jitter, now ^ (uint64_t)(uintptr_t)path);
    wait = r2_health_jitter(wait, r2_prng_next(&jitter));
    path->attempt.next_at = (attempt ? path->attempt.at : now) + wait;
    path->attempt.fails++;
}

bool r2_path_end_memory(struct r2_path *path)
{
    if (!path->attempt.end_memory)
        path->attempt.end_memory = malloc(sizeof(*path->attempt.end_memory));
    return path->attempt.end_memory;
}

static void end_endpoint(struct r2_path *path, int err)
{
    struct r2_peer *p = path->peer;
    struct r2_dying *d = path->attempt.end_memory;

    path->attempt.end_memory = NULL;
    d->ep = path->ep;
    d->path = path;
    d->gen = r2_eng.ops->params(path->ep)->gen;
    d->upto = path->gen;
    d->err = err;
    d->since = 0;
    r2_list_init(&d->node);
    r2_list_add_tail(&p->dying, &d->node);
    path->ep = NULL;
}

/* The other process leaves, or the path is let go on purpose: nobody misses it. */
static bool in_order(const struct r2_path *path, int err)
{
    if (err == 0 || path->health.state == R2_HEALTH_DRAINED)
        return true;
    R2_FOR_EACH_CONN (c, path->peer) {
        if (!r2_conn_is_left(c) && c->state < R2_CONN_CLOSING)
            return false;
    }
    return true;
}

static void report_down(struct r2_path *path, int err, const char *cause)
{
    char text[128];

    bool closed = in_order(path, err);

    path->past = r2_past_next(path->past, closed ? R2_PAST_EV_CLOSE : R2_PAST_EV_LOSS);
    r2_path_event(path, closed ? R2_HEALTH_EV_CLOSE : R2_HEALTH_EV_LOSS, cause);
    if (closed)
        return;
    r2_path_journal(path, R2_EV_PATH_DOWN, 0, 0, cause);
    R2_INFO("path %s generation %u is down: %s (%s)", r2_path_text(path, text, sizeof(text)),
            path->gen, cause, err ? strerror(err) : "closed");
}

/* It never carried anything, so nothing failed that anybody missed; but who counts on it wants to
 * know. Said of the first attempt only. */
static void report_untried(const struct r2_path *path, int err, const char *cause)
{
    char text[128];

    if (!r2_past_carried(path->past) && !path->attempt.fails && !in_order(path, err))
        R2_INFO("path %s generation %u: not even its first test came through: %s (%s)",
                r2_path_text(path, text, sizeof(text)), path->gen, cause,
                err ? strerror(err) : "closed");
}

/* One failure more; too many lately, and the path is left alone while another one is left. */
static void count_failure(struct r2_path *path, uint64_t now)
{
    struct r2_damp_rules rules;

    if (path->past == R2_PAST_CLOSED || !path->peer->out)
        return;
    r2_damp_rules_get(&rules);
    if (r2_damp_failure(&path->damp, &rules, now) && r2_peer_left(path->peer, path->transport))
        r2_path_event(path, R2_HEALTH_EV_SUPPRESS, "it fails too often");
    else if (path->health.state != R2_HEALTH_DAMPED)
        r2_damp_release(&path->damp);
}

/* Memory was taken back, or the peer wrote where it may not any more: no NIC has failed. */
static bool blameless(int err)
{
    return err == ECANCELED || err == EACCES || err == EFAULT;
}

/* Here or at the peer: no NIC has failed. */
static bool no_descriptors(int err)
{
    return err == EMFILE || err == ENFILE;
}

/* The newest generation has ended: what becomes of the path. */
static void ended(struct r2_path *path, bool clean, int err, const char *cause)
{
    struct r2_peer *p = path->peer;
    bool was_up = r2_path_is_up(path), carried = path->state == R2_PATH_PROVEN;
    uint64_t now = r2_peer_now(p);

    path->state = r2_path_next(path->state, R2_PATH_EV_END);
    p->n_up -= was_up;
    r2_grey_note_beside(path, 0);
    if (!carried) /* R: the other side knows whether it is wanted */
        path->past =
            r2_past_next(path->past, p->out && err && !no_descriptors(err) ? R2_PAST_EV_ATTEMPT
                                                                           : R2_PAST_EV_END);
    if (was_up && !carried)
        report_untried(path, err, cause);
    if (was_up && !carried && p->out && err == ETIMEDOUT)
        r2_path_test_lost(path);
    if (carried) {
        path->attempt.fails = 0;
        path->down.at = now;
        report_down(path, err, cause);
        if (!blameless(err))
            count_failure(path, now);
        if (err && path->past == R2_PAST_LOST && !blameless(err)) {
            path->down.blame = err;
            p->todo |= R2_TODO_BLAME;
        }
    } else if (p->out && clean) {
        path->down.fenced = path->gen; /* it never carried a byte of a message */
    }
    if (no_descriptors(err))
        path->attempt.next_at = now + (p->n_up ? CROWDED_NS : CROWDED_ALONE_NS);
    else
        backoff(path, now, !carried);
    r2_path_show(path, !was_up && path->shown.verdict[0] ? path->shown.verdict : cause);
    r2_peer_census(p);
}

bool r2_peer_served(const struct r2_peer *p)
{
    return R2_ANY_PATH(path, p, path->state == R2_PATH_PROVEN);
}

static void say_no_path(const struct r2_path *path, const char *cause)
{
    r2_count(&r2_eng.n->no_path_waits, 1);
    r2_path_journal(path, R2_EV_NO_PATH, 0, 0, cause);
}

static void wait_begins(struct r2_path *path, const char *cause)
{
    struct r2_peer *p = path->peer;

    p->no_path_since = p->suspect_since ? p->suspect_since : r2_peer_now(p);
    if (p->doubt_since) /* what came up meanwhile delivered nothing */
        p->no_path_since = p->doubt_since;
    if (p->active || p->opening)
        say_no_path(path, cause); /* else the first that waits does: path_wait_late */
}

/* Something begins to wait for a peer without paths: the journal says so, if it ever had one. */
static void path_wait_late(const struct r2_peer *p)
{
    const struct r2_path *last = NULL;

    for (int i = 0; i < p->n_paths; i++) {
        if (p->paths[i]->down.at && (!last || p->paths[i]->down.at > last->down.at))
            last = p->paths[i];
    }
    if (last)
        say_no_path(last, "it was lost while nothing was under way");
}

void r2_path_fail(struct r2_path *path, uint32_t gen, int err, const char *cause)
{
    struct r2_peer *p = path->peer;
    bool was_up = r2_path_is_up(path), carried = path->state == R2_PATH_PROVEN;
    bool clean = path->down.fenced >= path->down.gen; /* nothing older waits for its fence */

    if (gen > path->gen)
        path->gen = gen;
    if (gen <= path->down.gen)
        return;
    path->down.gen = gen;
    path->attempt.err = err;
    if (gen <
        path->gen) { /* word of an older generation: the living one has nothing to do with it */
        r2_peer_want_resync(p);
        r2_peer_wake(p);
        return;
    }
    if (path->ep)
        end_endpoint(path, err);
    if (was_up || path->state == R2_PATH_CONNECTING)
        ended(path, clean, err, cause);
    r2_out_reset(path);
    /* Attempts that come up and prove nothing do not begin the wait anew, and are no wait more. */
    if (was_up && !r2_peer_served(p) && (carried || !p->no_path_since))
        wait_begins(path, cause);
    if (p->n_up == 0 && was_up) {
        p->suspect_since = 0;
        p->liveness.next_at = p->liveness.lost_at = r2_peer_now(p);
    }
    if (was_up) {
        r2_peer_want_resync(p);
        p->todo |= R2_TODO_WEIGH;
    }
    r2_peer_wake(p);
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
    p->n_up++;
    r2_peer_answers(p);
    path->shown.verdict[0] = '\0';
    p->reached[path->lnic] |= (uint16_t)(1u << path->rnic);
    path->intro = R2_INTRO_NONE;
    r2_out_info(path);
    if (!r2_path_is_up(path)) /* no memory for the frame */
        return;
    path->state = r2_path_next(path->state, R2_PATH_EV_INTRODUCED);
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
    int rc;

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
    r2_peer_get(p); /* the endpoint's, until `released` */
    r2_path_event(path, R2_HEALTH_EV_PROBE, "tried with fresh resources");
    rc = -ENOMEM;
    if (r2_path_end_memory(path))
        rc = r2_eng.ops->connect(&params, &ep);
    else
        r2_peer_put(p);
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
        if (!r2_path_takes_frames(path))
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

void r2_peer_waits(struct r2_peer *p, uint64_t now)
{
    bool first = !p->active && !p->opening;

    if (!r2_peer_served(p) && (first || !p->no_path_since)) {
        p->no_path_since = now;
        path_wait_late(p);
    }
    if (p->suspect_since && first)
        p->suspect_since = now;
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
