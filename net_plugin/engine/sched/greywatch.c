/* Grey failures: what is measured of a peer's paths goes to the judge (health/grey), and its word
 * is told, slows the path's chunks down and starts trials. Under the peer's lock. */
#include <stdio.h>
#include <string.h>

#include "engine/sched/sched.h"

/* The verdict is the path's; what the same NIC does towards other peers tells where to look. */
static void tell(struct r2_path *path)
{
    char reason[R2_GREY_REASON], text[R2_GREY_REASON + 64];
    bool is_grey = path->watch.factor < R2_GREY_FULL;
    int nic = path->lnic, grey, all;

    r2_grey_note(path, path->watch.factor);
    path->rate.known_slow =
        path->watch.why == R2_GREY_SLOW; /* losses hold a sender back by themselves */
    if (!is_grey)
        r2_pathrate_forget(&path->rate);
    r2_grey_counts(nic, &grey, &all);
    r2_grey_reason(&path->watch, reason, sizeof(reason));
    if (all > 1 && is_grey)
        snprintf(text, sizeof(text), "%s; %s towards %d of %d", reason, r2_nic_name(nic), grey,
                 all);
    else
        snprintf(text, sizeof(text), "%s", reason);
    r2_path_set_grey(path, path->watch.factor, text);
}

/* Local NICs that chunks may take, as bits: where each connection keeps to one NIC, the others are
 * not asked for anything. */
static uint64_t given(const struct r2_peer *p)
{
    uint64_t nics = 0;

    if (!r2_conn_narrow())
        return UINT64_MAX;
    R2_FOR_EACH_CONN (c, p) {
        int stays = r2_conn_stays(c);

        nics |= stays < 0 ? UINT64_MAX : UINT64_C(1) << stays;
    }
    return nics;
}

/* Some chunks may go over any NIC: one that carries less may be busy with other peers. */
static bool any_nic(const struct r2_peer *p)
{
    R2_FOR_EACH_CONN (c, p) {
        if (c->first == R2_ANY_NIC)
            return true;
    }
    return false;
}

void r2_peer_watch_grey(struct r2_peer *p, uint64_t now)
{
    /* As many as a verdict has bits: one path of a local NIC carries, or two. */
    struct r2_grey *watched[64] = {NULL};
    struct r2_path *of[64];
    uint64_t changed, nics;
    int n = 0;

    if (!r2_eng.set->grey || !p->out)
        return;
    nics = given(p);
    R2_FOR_EACH_PATH (path, p) {
        uint64_t since = path->rate.delivered_time_ns;

        if (r2_path_may(path) < R2_MAY_STAND_BY || n == 64)
            continue;
        of[n] = path;
        /* One that is given nothing, a warm spare or a NIC that no connection keeps to, shows
         * nothing: no sibling to be measured by. */
        watched[n++] =
            r2_path_may(path) >= R2_MAY_LIMITED && (nics >> path->lnic & 1) ? &path->watch : NULL;
        if (now > since && watched[n - 1])
            r2_grey_waiting(&path->watch, r2_pathrate_inflight(&path->rate), now - since, now);
    }
    changed = r2_grey_judge(watched, n, now);
    for (int i = 0; i < n; i++) {
        /* One that is to carry less by its weight says nothing. */
        if (watched[i])
            r2_grey_note_beside(of[i], of[i]->share.weight == R2_WEIGHT_FULL && !any_nic(p)
                                           ? r2_grey_beside(watched, n, i)
                                           : 0);
        if (changed >> i & 1)
            tell(of[i]);
    }
}
