/* What is measured of a path, for the judge of slow and lossy ones (sched/greywatch.c), and how
 * many of a NIC's paths it calls so. Under the peer's lock. */
#include "engine/path/path.h"

static atomic_int grey_paths[R2_MAX_NICS], watched_paths[R2_MAX_NICS];
/* Relaxed, as those above. Rated: their best is known beside their siblings'. */
static atomic_int rated_paths[R2_MAX_NICS], behind_paths[R2_MAX_NICS];
static atomic_uint behind_share[R2_MAX_NICS];

void r2_grey_path_init(struct r2_path *path)
{
    const struct r2_nic *nic = &r2_local.nics[path->lnic];

    path->flow.grey = R2_GREY_FULL;
    r2_grey_init(&path->watch, nic->speed_known ? (uint64_t)nic->speed_mbps * 125000 : 0);
    if (path->peer->out)
        atomic_fetch_add_explicit(&watched_paths[path->lnic], 1, memory_order_relaxed);
}

void r2_grey_note(struct r2_path *path, unsigned permille)
{
    int was = path->flow.grey < R2_GREY_FULL, is = permille < R2_GREY_FULL;

    atomic_fetch_add_explicit(&grey_paths[path->lnic], is - was, memory_order_relaxed);
    path->flow.grey = (uint16_t)permille;
}

void r2_grey_note_beside(struct r2_path *path, uint32_t beside)
{
    bool was_behind = path->flow.beside && path->flow.beside < R2_GREY_BEHIND;
    bool behind = beside && beside < R2_GREY_BEHIND;

    atomic_fetch_add_explicit(&rated_paths[path->lnic], !!beside - !!path->flow.beside,
                              memory_order_relaxed);
    atomic_fetch_add_explicit(&behind_paths[path->lnic], behind - was_behind, memory_order_relaxed);
    if (behind)
        atomic_store_explicit(&behind_share[path->lnic], beside, memory_order_relaxed);
    path->flow.beside = beside;
}

uint32_t r2_grey_nic_behind(int nic)
{
    int behind = atomic_load_explicit(&behind_paths[nic], memory_order_relaxed);

    if (!behind || 2 * behind < atomic_load_explicit(&rated_paths[nic], memory_order_relaxed))
        return 0;
    return atomic_load_explicit(&behind_share[nic], memory_order_relaxed);
}

void r2_grey_path_segments(struct r2_path *path, const struct r2_ep_health *h, uint64_t now)
{
    struct r2_seg_nic_counters *n = r2_control_nic_counters(r2_eng.ctl, path->lnic);
    uint64_t sent = h->segments - path->segments.seen;
    uint64_t resent = h->retransmits - path->segments.resent_seen;
    /* The kernel counts in 32 bits: a look at which one has wrapped counts nothing. */
    bool grown = h->segments >= path->segments.seen && h->retransmits >= path->segments.resent_seen;

    r2_grey_segments(&path->watch, h->segments, h->retransmits, now);
    path->segments.seen = h->segments;
    path->segments.resent_seen = h->retransmits;
    if (!grown || !sent)
        return;
    path->segments.all += sent;
    path->segments.resent += resent;
    r2_count(&n->tx_segments, sent);
    r2_count(&n->retransmits, resent);
    r2_control_path_resent(r2_eng.ctl, path->shown.row, path->segments.resent,
                           (uint32_t)(path->segments.resent * 1000000 / path->segments.all));
}

void r2_grey_path_up(struct r2_path *path)
{
    r2_grey_note(path, R2_GREY_FULL);
    r2_grey_note_beside(path, 0);
    path->segments.seen = path->segments.resent_seen = 0;
    path->rate.tight = false;
    r2_grey_restart(&path->watch);
}

void r2_grey_path_free(struct r2_path *path)
{
    r2_grey_note(path, R2_GREY_FULL);
    r2_grey_note_beside(path, 0);
    if (path->peer->out)
        atomic_fetch_sub_explicit(&watched_paths[path->lnic], 1, memory_order_relaxed);
}

void r2_grey_acked(struct r2_path *path, const struct r2_send_report *rep, uint64_t now)
{
    if (!r2_eng.set->grey || !rep->complete || now <= rep->t_sent_ns)
        return;
    r2_grey_moved(&path->watch, rep->len, now - rep->t_sent_ns, rep->stamp.app_limited, now);
    r2_grey_chunk(&path->watch, path->rate.delivered - rep->stamp.at_send, now - rep->t_sent_ns,
                  r2_pathrate_rate(&path->rate), now);
}

void r2_grey_counts(int nic, int *grey, int *all)
{
    *grey = atomic_load_explicit(&grey_paths[nic], memory_order_relaxed);
    *all = atomic_load_explicit(&watched_paths[nic], memory_order_relaxed);
}

bool r2_grey_path_doubted(const struct r2_path *path)
{
    return path->rate.tight ||
           (r2_eng.set->grey && r2_pathrate_rate(&path->rate) < path->watch.best_rate / 2);
}
