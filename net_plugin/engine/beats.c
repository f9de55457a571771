/* How often this process's heartbeats go out, and when one is late. Under the peer's lock. */
#include "engine/health/heartbeat.h"
#include "engine/internal.h"

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

uint64_t r2_peer_hb_interval(struct r2_peer *p, bool busy)
{
    struct r2_hb_load load = {.active_ns = r2_eng.set->heartbeat_ns,
                              .idle_ns = r2_eng.set->heartbeat_idle_ns,
                              .most = (unsigned)r2_eng.set->heartbeat_max};
    uint64_t active_ns, idle_ns;

    count(p, busy ? p->n_up : 0, busy ? 0 : p->n_up);
    load.active = (unsigned)atomic_load_explicit(&active_paths, memory_order_relaxed);
    load.idle = (unsigned)atomic_load_explicit(&idle_paths, memory_order_relaxed);
    r2_hb_intervals(&load, &active_ns, &idle_ns);
    p->hb_interval = busy ? active_ns : idle_ns;
    return p->hb_interval;
}

void r2_peer_hb_forget(struct r2_peer *p)
{
    count(p, 0, 0);
}

int r2_path_hb_look(const struct r2_path *path, uint64_t interval, uint64_t now)
{
    uint64_t acked_at = path->rate.delivered_time_ns;
    struct r2_hb_watch w = {
        .interval = interval,
        .misses = r2_eng.set->heartbeat_misses,
        .unanswered = path->hb_unanswered,
        .beat_age = now - path->hb_sent_at,
        .look_age = now - path->hb_at,
        .asked = path->hb_asked_for && path->hb_asked_for == acked_at,
        .srtt = path->rtt_ns,
        .var = path->rttvar_ns,
    };

    /* With so many paths that heartbeats are limited in number there are none to spare. */
    if (interval <= r2_eng.set->heartbeat_ns && path->peer->out &&
        r2_pathrate_inflight(&path->rate) && now > acked_at)
        w.quiet = now - acked_at;
    return path->hb_marked ? (int)r2_hb_look(&w) : R2_HB_DUE;
}

/* Bulk bytes that stall while the control lane answers get twice the time: TCP's second
 * retransmission, 600 ms after the loss, may still bring them. */
bool r2_path_hb_late(const struct r2_path *path)
{
    int misses = r2_eng.set->heartbeat_misses * (path->stalled ? 2 : 1);

    return path->hb_unanswered >= misses &&
           path->hb_unanswered >=
               r2_hb_misses(path->peer->hb_interval, misses, path->rtt_ns, path->rttvar_ns);
}
