/* The end of a path's generation: what becomes of the path, its endpoint and its peer. Under the
 * peer's lock. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/path/path.h"
#include "util/random.h"

#define BACKOFF_NEVER_UP (5 * R2_NS_PER_S)
#define BACKOFF_NONE_LEFT (250 * R2_NS_PER_MS)
#define CROWDED_NS (5 * R2_NS_PER_S) /* there are no descriptors for one path more */
#define CROWDED_ALONE_NS (100 * R2_NS_PER_MS)
#define SMALL_PACKET 1280 /* IPv6 asks that much of every link */
#define LOST_TESTS 2

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

static void end_endpoint(struct r2_path *path)
{
    struct r2_dying *d = path->attempt.end_memory;

    *d = (struct r2_dying){
        .ep = path->ep, .path = path, .gen = r2_eng.ops->params(path->ep)->gen, .upto = path->gen};
    r2_list_add_tail(&path->peer->dying, &d->node);
    path->ep = NULL;
    path->attempt.end_memory = NULL;
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
    struct r2_damp_rules rules = r2_damp_rules();

    if (path->past == R2_PAST_CLOSED || !path->peer->out)
        return;
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

/* S: a test was not answered in time. After a few the next attempts use small packets, or full ones
 * again: which of them pass is what a user has to know. */
static void test_lost(struct r2_path *path)
{
    if (path->transport != R2_VIA_TCP || ++path->test.lost < LOST_TESTS)
        return;
    path->test.lost = 0;
    path->attempt.packet = path->attempt.packet ? 0 : SMALL_PACKET;
}

/* The newest generation has ended: what becomes of the path. */
static void ended(struct r2_path *path, bool clean, int err, const char *cause)
{
    struct r2_peer *p = path->peer;
    bool was_up = r2_path_is_up(path), carried = path->state == R2_PATH_PROVEN;
    uint64_t now = r2_peer_now(p);

    path->state = r2_path_next(path->state, R2_PATH_EV_END);
    p->n_up -= was_up;
    r2_path_tell_inflight(path);
    r2_grey_note_beside(path, 0);
    if (!carried) /* R: the other side knows whether it is wanted */
        path->past =
            r2_past_next(path->past, p->out && err && !no_descriptors(err) ? R2_PAST_EV_ATTEMPT
                                                                           : R2_PAST_EV_END);
    if (was_up && !carried)
        report_untried(path, err, cause);
    if (was_up && !carried && p->out && err == ETIMEDOUT)
        test_lost(path);
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

    R2_FOR_EACH_PATH (path, p) {
        if (path->down.at && (!last || path->down.at > last->down.at))
            last = path;
    }
    if (last)
        say_no_path(last, "it was lost while nothing was under way");
}

static void reset_outbox(struct r2_path *path)
{
    path->outbox.len = path->outbox.off = 0;
    path->outbox.total = path->outbox.said = 0;
    path->outbox.due = 0;
    while (!r2_list_empty(&path->outbox.flushq))
        r2_list_del(
            r2_list_first(&path->outbox.flushq)); /* r2_peer_resync acknowledges them anew */
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
        end_endpoint(path);
    if (was_up || path->state == R2_PATH_CONNECTING)
        ended(path, clean, err, cause);
    reset_outbox(path);
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

/* ---- hosts that refuse: noted here, judged in loop/liveness.c */

void r2_peer_refused(struct r2_peer *p, int lnic, int rnic, uint64_t now)
{
    struct r2_liveness *a = &p->liveness;

    if (p->n_up || !r2_pair_speaks(p, lnic, rnic))
        return;
    if (!a->refused_from || now - a->refused_at > R2_REFUSAL_STALE_NS) {
        a->refused_from = now;
        memset(a->nic_refused_from, 0, sizeof(a->nic_refused_from));
    }
    if (!a->nic_refused_from[rnic])
        a->nic_refused_from[rnic] = now;
    a->refused_at = a->nic_refused_at[rnic] = now;
    a->taken_at[rnic] = 0;
}

void r2_peer_answers(struct r2_peer *p)
{
    p->liveness.refused_from = 0;
    memset(p->liveness.taken_at, 0, sizeof(p->liveness.taken_at));
    R2_FOR_EACH_PATH (path, p)
        path->attempt.refused_from = 0;
}
