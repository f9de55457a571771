/* NICs that have reached nobody since the process started.
 *
 * Such a NIC has a link and looks well. Nothing was ever lost over it, so no path and no census
 * speaks against it. A firewall, a cable in the wrong switch or a subnet of its own would be found
 * on the day another NIC fails. So operators are told while others serve. Its state stays as it is:
 * what never carried has not failed, and nothing depends on it.
 *
 * Looked at on I/O thread 0, once a second, and only about NICs that no path was ever up over.
 * Whoever connects knows what was tried; so a process that only receives says nothing. */
#include <stdlib.h>
#include <string.h>

#include "engine/locate/round.h"

#define LOOK_NS (1 * R2_NS_PER_S)
/* In vain, one after the other: 10 s of looking. Counted, so that time in which this process was
 * stopped is none. */
#define LOOKS 10

static const char cause[] = "has reached no peer yet: the job is not protected by it";

/* I/O thread 0's */
static int in_vain[R2_MAX_NICS]; /* looks, in a row */
static uint64_t looked_at;

static enum r2_nicreach reach_of(int nic)
{
    return (enum r2_nicreach)atomic_load(&r2_eng.nic_state[nic].reach);
}

static bool has_met(int nic)
{
    return r2_nicreach_met(reach_of(nic));
}

/* It could protect the job, for all that is known of it: has a link, has not failed, is not drained
 * and has a weight. Loopback addresses have no wire that could be wrong. */
static bool counted_on(int nic)
{
    return !r2_local.nics[nic].loopback && r2_nic_is_up(nic) && r2_nic_trusted(nic) &&
           atomic_load(&r2_eng.nic_state[nic].weight);
}

/* The two are meant to reach each other: they are of one subnet, or the peer has a NIC for each of
 * ours. Where it has fewer, some of ours may have no rail to it, and nothing is wrong. */
static bool belongs(const struct r2_peer *p, int lnic, int rnic)
{
    int known = 0;

    for (int i = 0; i < p->n_rnics; i++)
        known += p->rnics[i].known;
    return known >= r2_local.n || r2_pair_on_link(p, lnic, rnic);
}

bool r2_path_reaches_kernel(const struct r2_path *path)
{
    return path->past == R2_PAST_WAITED || r2_path_is_taken(path);
}

static bool tried_in_vain(const struct r2_path *path)
{
    const struct r2_peer *p = path->peer;
    const struct r2_rnic *r = &p->rnics[path->rnic];

    return path->role == R2_ROLE_FIRST && path->attempt.fails && !r2_past_carried(path->past) &&
           !r2_path_wireless(path) && r->known && r->word == R2_NIC_USABLE &&
           belongs(p, path->lnic, path->rnic) && !r2_path_reaches_kernel(path);
}

/* The peer has a NIC for each of ours, and none with an address of a family that this one has. */
static bool has_no_pair(const struct r2_peer *p, int lnic)
{
    int order[R2_MAX_NICS], known = 0;

    for (int i = 0; i < p->n_rnics; i++)
        known += p->rnics[i].known;
    return known >= r2_local.n && !r2_pairs_candidates(p, lnic, R2_VIA_TCP, order) &&
           !r2_pairs_candidates(p, lnic, R2_VIA_VERBS, order);
}

/* Its NICs are known, it is in use, and another NIC of ours serves it, where its kernel answers at
 * this time: a host that stands still takes no attempts. Under its lock. */
static bool is_served(const struct r2_peer *p)
{
    if (p->life != R2_PEER_ALIVE || !p->pid || r2_list_empty(&p->conn_list))
        return false;
    return R2_ANY_PATH(path, p,
                       path->state == R2_PATH_PROVEN && r2_path_hb_answers(path, 0) &&
                           !r2_path_wireless(path));
}

/* Counts it for each NIC that has tried it in vain. Under its lock. */
static void look_at_peer(const struct r2_peer *p, int *peers)
{
    bool vain[R2_MAX_NICS] = {false};

    if (!p->out || !is_served(p))
        return;
    R2_FOR_EACH_PATH (path, p)
        vain[path->lnic] |= tried_in_vain(path);
    for (int i = 0; i < r2_local.n; i++)
        peers[i] += vain[i] || has_no_pair(p, i);
}

/* How many peers each NIC was tried for in vain. */
static void count_peers(int *peers)
{
    R2_FOR_EACH_PEER(p)
    {
        r2_peer_lock(p);
        look_at_peer(p, peers);
        r2_peer_unlock(p);
    }
}

/* The row's word goes with a change of state, and comes again; stderr and journal hear it once. */
static void tell(int nic, int peers)
{
    char hint[256];

    r2_nicstate_remark(nic, cause);
    if (r2_nic_reach(nic, R2_NICREACH_EV_WARN) != R2_NICREACH_NOBODY)
        return;
    r2_nic_journal(nic, R2_EV_WARNING, cause);
    R2_TELL("NIC %s has a link, but in %d s it reached none of %d peer process%s that other NICs "
            "reach: the job is not protected by it. %sCheck firewall, cabling, subnet and address "
            "family on both sides, or leave it out of R2CCL_NICS",
            r2_nic_name(nic), LOOKS, peers, peers == 1 ? "" : "es",
            r2_nics_shared_hint(r2_local.nics, r2_local.n, nic, hint, sizeof(hint)));
}

static void take_back(int nic)
{
    r2_nic_reach(nic, R2_NICREACH_EV_TAKE_BACK);
    r2_nic_journal(nic, R2_EV_WARNING, "reaches a peer now");
    r2_nicstate_remark(nic, "");
    R2_INFO("NIC %s reaches a peer now", r2_nic_name(nic));
}

/* One more look at the NIC in vain, or one that it was not. */
static void count_look(int nic, int peers)
{
    in_vain[nic] = !peers ? 0 : in_vain[nic] < LOOKS ? in_vain[nic] + 1 : LOOKS;
    if (in_vain[nic] == LOOKS)
        tell(nic, peers);
}

void r2_nicreach_look(void)
{
    int peers[R2_MAX_NICS] = {0};
    bool open = false;

    for (int i = 0; i < r2_local.n; i++) {
        if (reach_of(i) == R2_NICREACH_LATE)
            take_back(i);
        open |= !has_met(i) && counted_on(i);
    }
    if (open)
        count_peers(peers);
    for (int i = 0; i < r2_local.n; i++)
        count_look(i, has_met(i) || !counted_on(i) ? 0 : peers[i]);
}

void r2_nicreach_tick(uint64_t now)
{
    if (now - looked_at < LOOK_NS)
        return;
    looked_at = now;
    r2_nicreach_look();
}
