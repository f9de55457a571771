/* This process's heartbeats: how often they go out, when one is late, and what follows. Under the
 * peer's lock.
 *
 * A path is in use while something that was given to it may not have arrived, and for a while
 * after. That is chunks that are not acknowledged, or frames that no answered heartbeat was sent
 * behind. Only then can its silence cost anything, so only then it is asked at the pace of
 * R2CCL_HEARTBEAT; a calm one is asked as an idle peer's are. What is given to a calm path makes it
 * due at the next tick. A miss of one path brings all of the peer's to that pace. Only an answer to
 * a heartbeat no older than the unanswered one proves that the peer is there: a calm path's answer
 * may be from before all fell silent. */
#include <errno.h>

#include "engine/core/heartbeat.h"
#include "engine/path/path.h"
#include "util/log.h"

#define BEATS_MOST 1000u /* a second, of the process: with thousands of paths they cost no more */
#define DOUBT_NS (1 * R2_NS_PER_S)
#define CALM_NS (1 * R2_NS_PER_S) /* two heartbeats, where these are rarer */

/* Paths of the process that are up, of busy and of idle peers. Counts, nothing is ordered by
 * them. */
static atomic_int active_paths, idle_paths;

static void count(struct r2_peer *p, int active, int idle)
{
    if (active != p->hb_active)
        atomic_fetch_add_explicit(&active_paths, active - p->hb_active, memory_order_relaxed);
    if (idle != p->hb_idle)
        atomic_fetch_add_explicit(&idle_paths, idle - p->hb_idle, memory_order_relaxed);
    p->hb_active = active;
    p->hb_idle = idle;
}

/* Frames since the last look that found some. */
static bool is_given(const struct r2_path *path)
{
    return path->hb.given_at && path->hb.given_at >= path->hb.used_at;
}

static bool in_use(const struct r2_path *path, uint64_t now)
{
    uint64_t used = path->hb.used_at, acked = path->rate.delivered_time_ns;
    uint64_t beats = 2 * path->peer->hb_interval, calm = beats > CALM_NS ? beats : CALM_NS;

    used = used > acked ? used : acked;
    return is_given(path) || path->hb.unanswered || path->hb.state == R2_BEAT_NONE ||
           r2_pathrate_inflight(&path->rate) || now < used + calm;
}

static bool is_calm(const struct r2_path *path, uint64_t now)
{
    return !in_use(path, now) && now >= path->peer->hb_doubt_until;
}

static uint64_t interval_of(const struct r2_path *path, uint64_t now)
{
    const struct r2_peer *p = path->peer;

    return is_calm(path, now) ? p->hb_calm_interval : p->hb_interval;
}

void r2_peer_hb_intervals(struct r2_peer *p, bool busy, uint64_t now)
{
    struct r2_hb_load load = {.active_ns = r2_eng.set->heartbeat_ns,
                              .idle_ns = r2_eng.set->heartbeat_idle_ns,
                              .most = BEATS_MOST};
    uint64_t active_ns, idle_ns;
    int active = 0;

    for (int i = 0; i < p->n_paths && busy; i++)
        active +=
            r2_path_is_up(p->paths[i]) && (in_use(p->paths[i], now) || now < p->hb_doubt_until);
    count(p, active, p->n_up - active);
    load.active = (unsigned)atomic_load_explicit(&active_paths, memory_order_relaxed);
    load.idle = (unsigned)atomic_load_explicit(&idle_paths, memory_order_relaxed);
    r2_hb_intervals(&load, &active_ns, &idle_ns);
    p->hb_interval = busy ? active_ns : idle_ns;
    p->hb_calm_interval = idle_ns > p->hb_interval ? idle_ns : p->hb_interval;
}

void r2_peer_hb_forget(struct r2_peer *p)
{
    count(p, 0, 0);
}

bool r2_path_hb_answers(const struct r2_path *path, uint64_t since)
{
    return r2_path_is_up(path) && path->hb.state && !path->hb.unanswered &&
           path->hb.proven_at >= since;
}

static bool some_answers(const struct r2_peer *p, uint64_t since)
{
    return R2_ANY_PATH(path, p, r2_path_hb_answers(path, since));
}

/* Since when nothing that the path brought was acknowledged although it had something to bring; 0:
 * not so. A slow path's bytes may have arrived over another one meanwhile (tail.c): what it was
 * asked for is still unproven. */
static uint64_t quiet_from(struct r2_path *path)
{
    if (path->hb.delivered != path->rate.delivered) {
        path->hb.delivered = path->rate.delivered;
        path->hb.quiet_from = 0;
    }
    if (!path->hb.quiet_from && r2_pathrate_inflight(&path->rate))
        path->hb.quiet_from = path->rate.delivered_time_ns;
    return path->hb.quiet_from;
}

static bool is_stalled(const struct r2_path *path)
{
    return path->hb.state == R2_BEAT_STALLED;
}

static struct r2_hb_watch watch_of(struct r2_path *path, uint64_t now)
{
    uint64_t from = path->peer->out ? quiet_from(path) : 0, interval = interval_of(path, now);
    struct r2_hb_watch w = {
        .interval = interval,
        .misses = r2_eng.set->heartbeat_misses,
        .unanswered = path->hb.unanswered,
        .beat_age = now - path->hb.sent_at,
        .look_age =
            path->hb.at ? now - path->hb.at : UINT64_MAX, /* 0: now, however young the clock */
        .hasty = path->transport == R2_VIA_TCP,
        .stalled = is_stalled(path),
        .asked = path->hb.asked_for == path->rate.delivered + 1,
        .srtt = path->hb.rtt_ns,
        .var = path->hb.rttvar_ns,
    };

    /* With so many paths that heartbeats are limited in number there are none to spare. */
    if (interval <= r2_eng.set->heartbeat_ns && from && now > from && !is_stalled(path))
        w.quiet = now - from;
    return w;
}

static enum r2_hb_look look(struct r2_path *path, uint64_t now)
{
    struct r2_hb_watch w = watch_of(path, now);

    return path->hb.state ? r2_hb_look(&w) : R2_HB_DUE;
}

uint64_t r2_peer_hb_next(struct r2_peer *p, uint64_t now)
{
    uint64_t soonest = UINT64_MAX;

    R2_FOR_EACH_PATH (path, p) {
        struct r2_hb_watch w;
        uint64_t next;

        if (!r2_path_is_up(path) || !path->hb.state || is_stalled(path))
            continue; /* stalled: the longer TCP has, the better */
        w = watch_of(path, now);
        next = r2_hb_next(&w);
        soonest = next < soonest ? next : soonest;
    }
    return soonest;
}

/* Bulk bytes that stall while the control lane answers get twice the time: TCP's second
 * retransmission, up to 600 ms after the loss (with the kernel's own times), may still bring them.
 */
bool r2_path_is_silent(const struct r2_path *path)
{
    int misses = r2_eng.set->heartbeat_misses * (is_stalled(path) ? 2 : 1);

    return r2_path_is_up(path) && path->hb.unanswered >= misses &&
           path->hb.unanswered >=
               r2_hb_misses(path->peer->hb_interval, misses, path->hb.rtt_ns, path->hb.rttvar_ns);
}

static void send_heartbeat(struct r2_path *path, uint64_t now)
{
    path->hb.at = path->hb.sent_at = now;
    path->hb.state = r2_beat_next(path->hb.state, R2_BEAT_EV_SEND);
    r2_out_frame(path, R2_F_HEARTBEAT, NULL, 0, NULL, 0);
    r2_count(&r2_eng.n->heartbeats_sent, 1);
}

static void use_lanes(struct r2_path *path, const struct r2_ep_health *h, uint64_t now)
{
    struct r2_lanes *l = &path->lanes;
    char text[128];

    /* The sender's; while one that is to carry is not open yet, the others have to, and test chunks
     * come over all. */
    if (r2_eng.set->lanes || !r2_eng.ops->use || !path->peer->out ||
        path->state != R2_PATH_PROVEN || r2_eng.ops->lanes(path->ep) < l->now)
        return;
    if (!r2_lanes_sample(l, h->segments, h->retransmits, now))
        return;
    r2_eng.ops->use(path->ep, l->now);
    R2_INFO("path %s: %u of %u streams carry, since segments %s sent again",
            r2_path_text(path, text, sizeof(text)), l->now, l->most, l->more ? "were not" : "are");
}

/* A look at one path, while the lock is let go. */
struct look {
    struct r2_path *path;
    struct r2_ep *ep;
    enum r2_hb_look due;
    struct r2_ep_health h;
};

/* Judges whether the last mark was answered; then marks again and sends the next heartbeat. */
static void beat(const struct look *l, uint64_t now, bool judge)
{
    struct r2_path *path = l->path;
    const struct r2_ep_health *h = &l->h;
    bool early = l->due == R2_HB_EARLY, was_silent = path->hb.unanswered >= R2_SUSPECT_BEATS;

    if (early)
        path->hb.asked_for = path->rate.delivered + 1;
    if (l->due != R2_HB_DUE && !(h->answered && !h->stalled))
        return; /* its time is not up */
    if (path->hb.state) {
        path->hb.rtt_ns = h->rtt_ns;
        path->hb.rttvar_ns = h->rttvar_ns;
        r2_grey_path_segments(path, h, now);
        use_lanes(path, h, now);
        r2_path_judge_packets(path, h);
        if (h->answered && !h->stalled) {
            path->hb.proven_at = path->hb.sent_at;
            path->hb.used_at = is_given(path) ? now : path->hb.used_at;
            path->hb.unanswered = 0;
            if (was_silent)
                r2_peer_census(path->peer); /* a ramp has no event for it */
            path->hb.quiet_from = early ? path->hb.quiet_from : 0;
            r2_path_event(path, R2_HEALTH_EV_ANSWER, "heartbeats are answered");
        } else { /* the same mark stands until it is answered */
            path->hb.state =
                r2_beat_next(path->hb.state, h->answered ? R2_BEAT_EV_STALL : R2_BEAT_EV_SILENCE);
            if (judge && ++path->hb.unanswered == R2_SUSPECT_BEATS)
                r2_path_event(path, R2_HEALTH_EV_SILENCE, "heartbeats are overdue");
            r2_count(&r2_eng.n->heartbeats_missed, 1);
            path->peer->hb_doubt_until = now + DOUBT_NS; /* the pace of paths in use */
            path->hb.at = now;
            return;
        }
    }
    send_heartbeat(path, now);
}

/* The peer's paths that it is time to look at. Calm ones go along with a calm one whose turn it is:
 * each group of heartbeats that leaves by itself wakes a thread here and one at the peer. */
static int due_paths(struct r2_peer *p, uint64_t now, struct look *out)
{
    enum r2_hb_look due[R2_PATHS_MAX];
    bool along = false;
    int n = 0;

    for (int i = 0; i < p->n_paths; i++) {
        const struct r2_path *path = p->paths[i];

        due[i] = r2_path_is_up(path) ? look(p->paths[i], now) : R2_HB_NOT_YET;
        along |= due[i] == R2_HB_DUE && is_calm(path, now);
    }
    for (int i = 0; i < p->n_paths; i++) {
        struct r2_path *path = p->paths[i];

        if (due[i] == R2_HB_NOT_YET && along && r2_path_is_up(path) && is_calm(path, now)) {
            struct r2_hb_watch w = watch_of(path, now);

            due[i] = r2_hb_along(&w);
        }
        if (due[i] == R2_HB_NOT_YET)
            continue;
        out[n] = (struct look){.path = path, .ep = path->ep, .due = due[i]};
        r2_eng.ops->get(out[n++].ep);
    }
    return n;
}

/* Asks the transport without the peer's lock (it takes lane locks), then judges under it. */
void r2_peer_beat(struct r2_peer *p, uint64_t now, bool judge)
{
    struct look looks[R2_PATHS_MAX];
    int n = due_paths(p, now, looks);

    if (!n)
        return;
    r2_peer_leave(p);
    for (int i = 0; i < n; i++)
        r2_eng.ops->health(looks[i].ep, &looks[i].h);
    r2_peer_lock(p);
    for (int i = 0; i < n; i++) {
        if (r2_path_is_up(looks[i].path) && looks[i].path->ep == looks[i].ep)
            beat(&looks[i], now, judge);
        r2_eng.ops->put(looks[i].ep);
    }
}

/* A path is failed for silence only while another one answers (invariant "silence is not failure").
 */
void r2_peer_judge_silence(struct r2_peer *p, uint64_t now)
{
    int silent = 0;
    bool all;

    R2_FOR_EACH_PATH (path, p) {
        silent += r2_path_is_silent(path);
    }
    all = silent && silent == p->n_up;
    for (int i = 0; i < p->n_paths && silent && !all; i++) {
        struct r2_path *path = p->paths[i];

        if (r2_path_is_silent(path) && some_answers(p, path->hb.sent_at))
            r2_path_fail(path, path->gen, ETIMEDOUT,
                         is_stalled(path) ? "bulk bytes unacknowledged" : "heartbeats unanswered");
    }
    if (all) {
        if (!p->suspect_since) {
            struct r2_control_event ev = {.event = R2_EV_PEER_SUSPECT,
                                          .peer_host = p->host,
                                          .peer_pid = p->pid,
                                          .cause = "every path is silent"};

            p->suspect_since = now;
            r2_control_journal(r2_eng.ctl, &ev);
            r2_control_peer_state(r2_eng.ctl, p->row, R2_SEG_PEER_SUSPECT, "every path is silent");
        }
    } else if (p->suspect_since) {
        p->suspect_since = 0;
        r2_control_peer_state(r2_eng.ctl, p->row, R2_SEG_PEER_UP, "");
    }
}
