/* Health of this node's NICs: what is known about each, and what the engine and the peers are told.
 *
 * Sources: link and address events, what paths say (census), verdicts, the operator. All but
 * verdicts run on I/O thread 0. `nic_lock` is a leaf; peers are told after it is released. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/nic/nics.h"
#include "util/ratelimit.h"

#define GRACE_NS (300 * R2_NS_PER_MS) /* for other pairs of the NIC to be tried */
#define SHOW_NS (1 * R2_NS_PER_S)
#define UNUSED_NS (2 * R2_NS_PER_S) /* nobody tries a NIC that is back: no path needs it */

static bool remarked[R2_MAX_NICS]; /* the row's cause is not the state's; under nic_lock */

static enum r2_health_state state_of(int nic)
{
    return r2_nic_health(nic).state;
}

/* How long it has been in its state. */
static uint64_t age_of(int nic, uint64_t now)
{
    uint64_t since = r2_nic_health(nic).since_ns;

    return now > since ? now - since : 0;
}

/* ---- what follows from a state */

static enum r2_nic_word word_of(int nic)
{
    switch (r2_eng.nic_state[nic].health.state) {
    case R2_HEALTH_FAILED:
        return r2_nic_is_up(nic) ? R2_NIC_FAILED : R2_NIC_DOWN;
    case R2_HEALTH_DRAINED:
        return R2_NIC_DRAINED;
    case R2_HEALTH_DAMPED:
        return R2_NIC_DAMPED;
    default:
        return R2_NIC_USABLE;
    }
}

static enum r2_seg_nic_state shown_as(enum r2_health_state state)
{
    static const enum r2_seg_nic_state as[R2_HEALTH_STATES] = {
        [R2_HEALTH_HEALTHY] = R2_SEG_NIC_HEALTHY, [R2_HEALTH_SUSPECT] = R2_SEG_NIC_SUSPECT,
        [R2_HEALTH_FAILED] = R2_SEG_NIC_FAILED,   [R2_HEALTH_PROBING] = R2_SEG_NIC_PROBING,
        [R2_HEALTH_RAMPING] = R2_SEG_NIC_RAMPING, [R2_HEALTH_DRAINED] = R2_SEG_NIC_DRAINED,
        [R2_HEALTH_DAMPED] = R2_SEG_NIC_DAMPED,
    };

    return as[state];
}

/* A NIC at the brink becomes suspect and healthy time and again: the journal has few of these, and
 * that a suspicion cleared only if it has the suspicion. Under nic_lock. */
static void journal(int nic, enum r2_health_state before, enum r2_health_state after,
                    const char *cause, uint64_t now)
{
    static const enum r2_seg_event as[R2_HEALTH_STATES] = {
        [R2_HEALTH_HEALTHY] = R2_EV_NIC_UP,      [R2_HEALTH_SUSPECT] = R2_EV_NIC_SUSPECT,
        [R2_HEALTH_FAILED] = R2_EV_NIC_DOWN,     [R2_HEALTH_PROBING] = R2_EV_NIC_PROBING,
        [R2_HEALTH_RAMPING] = R2_EV_NIC_RAMPING, [R2_HEALTH_DAMPED] = R2_EV_NIC_DAMPED,
    };
    static struct r2_ratelimit doubts[R2_MAX_NICS];
    static bool told[R2_MAX_NICS];
    bool cleared = before == R2_HEALTH_SUSPECT && after == R2_HEALTH_HEALTHY;
    struct r2_control_event ev = {
        .event = cleared ? R2_EV_NIC_HEALTHY : as[after], .nic = r2_nic_name(nic), .cause = cause};

    R2_INFO("NIC %s is %s: %s", r2_nic_name(nic), r2_health_word(after), cause);
    if (after == R2_HEALTH_SUSPECT)
        told[nic] = r2_control_journal_seldom(r2_eng.ctl, &ev, &doubts[nic], false, now);
    else if (cleared ? told[nic]
                     : after != R2_HEALTH_DRAINED) /* that: when nothing is left on it */
        r2_control_journal(r2_eng.ctl, &ev);
}

static void tell_path(struct r2_path *path, enum r2_nic_word word, bool others, const char *cause)
{
    if (word == R2_NIC_USABLE) {
        path->attempt.next_at = 0;
        path->attempt.fails = 0;
    } else if (path->ep && word != R2_NIC_DRAINED && (word != R2_NIC_DAMPED || others)) {
        r2_path_fail(path, path->gen, word == R2_NIC_DOWN ? ENETDOWN : EIO, cause);
    }
    r2_path_follow(path);
}

static bool others_up(const struct r2_peer *p, int lnic)
{
    return R2_ANY_PATH(path, p, path->lnic != lnic && r2_path_suffices(path));
}

static void tell_peer(struct r2_peer *p, int nic, bool news, bool forgiven, const char *cause)
{
    enum r2_nic_word word = r2_nic_word(nic);
    bool others;

    r2_peer_lock(p);
    others = others_up(p, nic);
    R2_FOR_EACH_PATH (path, p) {
        if (path->lnic == nic && forgiven)
            r2_path_forgive(path);
        if (path->lnic == nic && news)
            tell_path(path, word, others, cause);
    }
    r2_nicnews_tell(p);
    if (p->out)
        r2_peer_resync(p);
    r2_peer_weigh(p);
    if (p->out)
        r2_peer_kick(p);
    r2_peer_unlock(p);
    r2_peer_wake(p);
}

static void tell_all(int nic, bool news, bool forgiven, const char *cause)
{
    R2_FOR_EACH_PEER(p)
    tell_peer(p, nic, news, forgiven, cause);
}

void r2_nicstate_announce(int nic)
{
    atomic_fetch_add(&r2_eng.news, 1);
    tell_all(nic, false, false, "");
}

/* Takes the event; tells everybody if that changes what they may do with the NIC. One without a
 * link is not probed: who took the link away says so, or has, and would not say it again. */
static bool nic_event(int nic, enum r2_health_event event, const char *cause, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];
    enum r2_health_state before, after;
    enum r2_nic_word word;
    bool changed, news;

    pthread_mutex_lock(&r2_eng.nic_lock);
    before = s->health.state;
    changed = (event != R2_HEALTH_EV_PROBE || r2_nic_is_up(nic)) &&
              r2_health_step(&s->health, event, now);
    after = s->health.state;
    word = word_of(nic);
    news = word != r2_nic_word(nic);
    atomic_fetch_add(&s->telling, news);
    atomic_store(&s->word, (unsigned char)word);
    if (news) /* last: see r2_engine.news */
        atomic_fetch_add(&r2_eng.news, 1);
    if (after != before) {
        r2_control_nic_state(r2_eng.ctl, s->row, shown_as(after), cause);
        remarked[nic] = false;
        journal(nic, before, after, cause, now);
    }
    pthread_mutex_unlock(&r2_eng.nic_lock);
    if (news) {
        r2_eng.upper->nic_changed(nic);
        tell_all(nic, true, false, cause);
        atomic_fetch_sub(&s->telling, 1);
    }
    return changed;
}

/* ---- failures and their memory */

static void show_penalty(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];
    struct r2_damp_rules rules = r2_damp_rules();

    pthread_mutex_lock(&r2_eng.nic_lock);
    r2_control_nic_damping(r2_eng.ctl, s->row, r2_damp_penalty(&s->damp, &rules, now),
                           r2_damp_reuse_at(&s->damp, &rules, now));
    pthread_mutex_unlock(&r2_eng.nic_lock);
}

/* A NIC that was in use, or is being left alone, has failed once more. The last one that works is
 * never left alone. */
static void count_failure(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];
    struct r2_damp_rules rules = r2_damp_rules();
    bool suppress, others = r2_nic_others(nic) > 0;

    pthread_mutex_lock(&r2_eng.nic_lock);
    suppress = r2_damp_failure(&s->damp, &rules, now);
    if (suppress && !others) {
        r2_damp_release(&s->damp);
        suppress = false;
    }
    pthread_mutex_unlock(&r2_eng.nic_lock);
    if (suppress)
        nic_event(nic, R2_HEALTH_EV_SUPPRESS, "it fails too often", now);
    show_penalty(nic, now);
}

static bool in_use(int nic)
{
    enum r2_health_state state = state_of(nic);

    return r2_health_carries(state) || state == R2_HEALTH_DAMPED;
}

static void declare_nic_lost(int nic, enum r2_health_event event, const char *cause, uint64_t now)
{
    bool counts = in_use(nic);

    nic_event(nic, event, cause, now);
    if (counts)
        count_failure(nic, now);
}

void r2_nicstate_forgive(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];

    r2_nic_forget(nic);
    show_penalty(nic, now);
    if (nic_event(nic, R2_HEALTH_EV_REUSE, "past failures are forgotten", now) &&
        !r2_nic_is_up(nic))
        nic_event(nic, R2_HEALTH_EV_LOSS, "link down", now);
    atomic_fetch_add(&s->forgiven, 1);
    atomic_fetch_add(&r2_eng.news, 1);
    tell_all(nic, false, true, "");
}

/* ---- verdicts */

/* Its paths go on trying: the first that is back tells that it works again. */
void r2_nicstate_located(int nic, const char *why, uint64_t now)
{
    declare_nic_lost(nic, R2_HEALTH_EV_LOSS, why, now);
}

/* ---- its place */

bool r2_nicstate_place(int nic, enum r2_place_event event, const char *cause, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];
    enum r2_place before, after;

    pthread_mutex_lock(&r2_eng.nic_lock);
    before = atomic_load(&s->place);
    after = r2_place_next(before, event);
    atomic_store(&s->place, (unsigned char)after);
    if ((before == R2_PLACE_UP) != (after == R2_PLACE_UP))
        r2_control_nic_link(r2_eng.ctl, s->row,
                            after == R2_PLACE_UP ? R2_SEG_LINK_UP : R2_SEG_LINK_DOWN);
    pthread_mutex_unlock(&r2_eng.nic_lock);
    if (before != after && after == R2_PLACE_UP)
        nic_event(nic, R2_HEALTH_EV_PROBE, cause, now);
    else if (before != after && before == R2_PLACE_UP)
        declare_nic_lost(nic, R2_HEALTH_EV_LOSS, cause, now);
    return before != after;
}

void r2_nic_eps(int nic, void (*each)(struct r2_ep *ep, void *arg), void *arg)
{
    R2_FOR_EACH_PEER(p)
    {
        struct r2_ep *eps[2 * R2_PATHS_MAX];
        int m;

        r2_peer_lock(p);
        m = r2_peer_eps(p, eps, 2 * R2_PATHS_MAX);
        r2_peer_unlock(p);
        for (int k = 0; k < m; k++) {
            if (r2_eng.ops->params(eps[k])->local_nic == nic)
                each(eps[k], arg);
            r2_eng.ops->put(eps[k]);
        }
    }
}

/* ---- drain */

static void count(struct r2_ep *ep, void *open)
{
    (void)ep;
    ++*(uint32_t *)open;
}

static uint32_t still_open(int nic)
{
    uint32_t open = 0;

    r2_nic_eps(nic, count, &open);
    return open;
}

static void tick_drain(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];
    struct r2_control_event ev = {
        .event = R2_EV_NIC_DRAINED, .nic = r2_nic_name(nic), .cause = "nothing is on it any more"};
    uint32_t open;

    if (!s->drain_from)
        return;
    open = still_open(nic);
    if (open) {
        r2_control_nic_draining(r2_eng.ctl, s->row, open);
        return;
    }
    ev.duration_us = (now - s->drain_from) / 1000;
    s->drain_from = 0;
    r2_control_nic_state(r2_eng.ctl, s->row, R2_SEG_NIC_DRAINED, ev.cause);
    r2_control_journal(r2_eng.ctl, &ev);
    r2_control_nic_draining(r2_eng.ctl, s->row, 0);
}

void r2_nicstate_drain(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];

    if (state_of(nic) == R2_HEALTH_DRAINED)
        return;
    s->drain_from = now;
    r2_control_nic_draining(r2_eng.ctl, s->row, still_open(nic) + 1);
    nic_event(nic, R2_HEALTH_EV_DRAIN, "operator: moving traffic off", now);
}

void r2_nicstate_undrain(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];

    s->drain_from = 0;
    r2_control_nic_draining(r2_eng.ctl, s->row, 0);
    if (nic_event(nic, R2_HEALTH_EV_UNDRAIN, "operator: given back", now) && !r2_nic_is_up(nic))
        nic_event(nic, R2_HEALTH_EV_LOSS, "link down", now);
    r2_nicstate_forgive(nic, now);
}

/* ---- time */

/* Nobody answers over it, and somebody should: nothing says that it works, or that it does not. */
static bool awaits_word(int nic)
{
    return r2_nic_answers(nic) <= 0 && r2_nic_asked_in_vain(nic);
}

/* For long enough nobody has asked for it in vain. */
static bool unneeded(int nic, uint64_t now)
{
    return age_of(nic, now) > UNUSED_NS && !awaits_word(nic);
}

/* What its paths say: none answers although the same peers do on others. */
static void tick_census(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];
    int ok = r2_nic_answers(nic), lost = atomic_load(&s->census[R2_CENSUS_LOST]);
    enum r2_health_state state = state_of(nic);

    if (ok > 0 || lost == 0)
        s->alone_at = 0;
    else if (!s->alone_at)
        s->alone_at = now;
    if (state == R2_HEALTH_FAILED && r2_nic_is_up(nic) && ok > 0)
        nic_event(nic, R2_HEALTH_EV_PROBE, "a path of it is back", now);
    else if (state == R2_HEALTH_PROBING && ok > 0)
        nic_event(nic, R2_HEALTH_EV_PROVEN, "test chunks have arrived", now);
    else if (state == R2_HEALTH_PROBING && !lost && unneeded(nic, now))
        nic_event(nic, R2_HEALTH_EV_PROVEN, "link up, and no path needs it", now);
    else if (state == R2_HEALTH_SUSPECT && !s->alone_at && !awaits_word(nic))
        nic_event(nic, R2_HEALTH_EV_ANSWER, "it answers", now);
    else if (s->alone_at && state == R2_HEALTH_HEALTHY)
        nic_event(nic, R2_HEALTH_EV_SILENCE, "none of its paths answers", now);
    else if (s->alone_at && now - s->alone_at > GRACE_NS && r2_health_carries(state))
        declare_nic_lost(nic, R2_HEALTH_EV_PROBE, "none of its paths answers", now);
}

static void tick_damping(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];
    struct r2_damp_rules rules = r2_damp_rules();
    bool forgiven, over, alone = !r2_nic_others(nic);

    pthread_mutex_lock(&r2_eng.nic_lock);
    forgiven = !s->damp.suppressed; /* r2_nic_forget */
    over = forgiven || r2_damp_tick(&s->damp, &rules, now);
    if (alone)
        r2_damp_release(&s->damp);
    pthread_mutex_unlock(&r2_eng.nic_lock);
    if (!over && !alone)
        return;
    nic_event(nic, R2_HEALTH_EV_REUSE,
              forgiven ? "past failures are forgotten"
              : over   ? "the penalty has faded"
                       : "no other NIC is left",
              now);
    if (!r2_nic_is_up(nic))
        nic_event(nic, R2_HEALTH_EV_LOSS, "link down", now);
}

static void tick_nic(int nic, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[nic];

    /* A verdict's thread is still at it. If the NIC were probed now, its word would be usable again
     * before anybody heard that it had failed. Its paths would stay as they are. */
    if (atomic_load(&s->telling))
        return;
    if (state_of(nic) == R2_HEALTH_DAMPED)
        tick_damping(nic, now);
    if (state_of(nic) == R2_HEALTH_RAMPING && age_of(nic, now) >= r2_eng.set->ramp_ns &&
        !awaits_word(nic))
        nic_event(nic, R2_HEALTH_EV_RAMPED,
                  atomic_load(&s->weight) ? "back at its full weight"
                                          : "works again, and stands by at weight 0",
                  now);
    tick_census(nic, now);
    tick_drain(nic, now);
    if (now - s->shown_at < SHOW_NS)
        return;
    s->shown_at = now;
    show_penalty(nic, now);
}

void r2_nicstate_tick(uint64_t now)
{
    for (int i = 0; i < r2_local.n; i++)
        tick_nic(i, now);
}

/* ---- start */

/* Under nic_lock. */
static void add_row(int i)
{
    const struct r2_nic *n = &r2_local.nics[i];
    struct r2_nic_state *s = &r2_eng.nic_state[i];
    char addr[64];
    struct r2_control_nic row = {
        .name = n->name,
        .ifname = n->ifname,
        .pci_path = n->pci_path,
        .speed_mbps = (uint32_t)n->speed_mbps,
        .numa = n->numa,
        .weight = atomic_load(&s->weight) ? (uint32_t)n->weight : 0,
        .state = r2_nic_is_up(i) ? R2_SEG_NIC_HEALTHY : R2_SEG_NIC_FAILED,
        .link = r2_nic_is_up(i) ? R2_SEG_LINK_UP : R2_SEG_LINK_DOWN,
    };

    row.addr = r2_nic_place_text(n, addr, sizeof(addr));
    s->row = r2_control_nic_add(r2_eng.ctl, &row);
}

void r2_nicstate_deaf(int nic, bool deaf)
{
    static const char cause[] = "cannot listen (R2CCL_PORT_RANGE has no free port?)";
    const struct r2_nic_state *s = &r2_eng.nic_state[nic];

    /* Read and written under one lock: a state that is newer is not taken back in the row. */
    pthread_mutex_lock(&r2_eng.nic_lock);
    r2_control_nic_state(r2_eng.ctl, s->row, shown_as(s->health.state), deaf ? cause : "");
    remarked[nic] = false; /* said again if it still is so */
    pthread_mutex_unlock(&r2_eng.nic_lock);
    r2_nic_journal(nic, R2_EV_WARNING, deaf ? cause : "listens again");
}

void r2_nicstate_remark(int nic, const char *cause)
{
    const struct r2_nic_state *s = &r2_eng.nic_state[nic];

    pthread_mutex_lock(&r2_eng.nic_lock);
    if (remarked[nic] != !!cause[0])
        r2_control_nic_state(r2_eng.ctl, s->row, shown_as(s->health.state), cause);
    remarked[nic] = cause[0];
    pthread_mutex_unlock(&r2_eng.nic_lock);
}

/* A port's thread may say that it is down, or up, from the transport's start on: it has noted that
 * before it takes the lock (r2_nic_transport), so whoever comes second sees what the first did. */
void r2_nicstate_begin(int i, uint64_t now)
{
    struct r2_nic_state *s = &r2_eng.nic_state[i];
    bool carries = r2_local.nics[i].weight && !r2_nic_stands_by(i); /* which takes other locks */
    bool up;

    pthread_mutex_lock(&r2_eng.nic_lock);
    up = r2_local.nics[i].bare ? r2_nic_port_up(i) : r2_local.nics[i].link_up;
    atomic_store(&s->place, up ? R2_PLACE_UP : R2_PLACE_DOWN);
    s->health.state = up ? R2_HEALTH_HEALTHY : R2_HEALTH_FAILED;
    atomic_store(&s->weight, carries ? R2_WEIGHT_FULL : 0);
    atomic_store(&s->word, (unsigned char)word_of(i));
    add_row(i);
    if (!up) {
        r2_control_nic_state(r2_eng.ctl, s->row, R2_SEG_NIC_FAILED, "link down");
        journal(i, R2_HEALTH_HEALTHY, R2_HEALTH_FAILED, "link down at the start", now);
    }
    pthread_mutex_unlock(&r2_eng.nic_lock);
}

void r2_nicstate_start(uint64_t now)
{
    for (int i = 0; i < r2_local.n; i++) {
        struct r2_wire_addr addr;

        r2_nicstate_begin(i, now);
        if (!r2_local.nics[i].bare && r2_eng.ops->address(i, &addr))
            r2_nicstate_deaf(i, true);
    }
}
