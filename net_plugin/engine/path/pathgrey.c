/* What is measured of a path, for the judge of slow and lossy ones (sched/greywatch.c), and how
 * many of a NIC's paths it calls so. Under the peer's lock. */
#include "engine/path/path.h"

static atomic_int grey_paths[R2_MAX_NICS], watched_paths[R2_MAX_NICS];

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

void r2_grey_path_up(struct r2_path *path)
{
    r2_grey_note(path, R2_GREY_FULL);
    path->rate.tight = false;
    r2_grey_restart(&path->watch);
}

void r2_grey_path_free(struct r2_path *path)
{
    r2_grey_note(path, R2_GREY_FULL);
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
