/* Health of paths: what their states mean for traffic, segment and journal. Everything here runs
 * under the peer's lock. */
#include <stdio.h>

#include "engine/path/path.h"
#include "util/ratelimit.h"

#define DAMP_REUSE 1000  /* one failure: nobody is left alone for that */
#define DAMP_HALVINGS 10 /* in the longest time: nothing is left of any penalty */

struct r2_damp_rules r2_damp_rules(void)
{
    struct r2_damp_rules rules = {.suppress = (uint32_t)r2_eng.set->damp_suppress,
                                  .reuse = DAMP_REUSE,
                                  .half_life_ns = 1 + r2_eng.set->damp_ns / DAMP_HALVINGS,
                                  .max_suppress_ns = r2_eng.set->damp_ns};

    if (rules.suppress && rules.reuse > rules.suppress / 2)
        rules.reuse = rules.suppress / 2; /* else it would be used again at once */
    return rules;
}

/* ---- states */

const char *r2_path_text(const struct r2_path *path, char *out, size_t cap)
{
    const struct r2_peer *p = path->peer;
    char who[R2_PEER_WHO];

    snprintf(out, cap, "%s -> %s of %s", r2_nic_name(path->lnic),
             p->rnics[path->rnic].name[0] ? p->rnics[path->rnic].name : "?", r2_peer_who(p, who));
    return out;
}

static struct r2_control_event event_on(const struct r2_path *path, enum r2_seg_event event,
                                        const char *cause)
{
    return (struct r2_control_event){
        .event = event,
        .nic = r2_nic_name(path->lnic),
        .remote_nic = path->peer->rnics[path->rnic].name,
        .peer_host = path->peer->host,
        .peer_pid = path->peer->pid,
        .generation = path->gen,
        .cause = cause,
    };
}

void r2_path_journal(const struct r2_path *path, enum r2_seg_event event, uint64_t bytes,
                     uint64_t duration_ns, const char *cause)
{
    struct r2_control_event ev = event_on(path, event, cause);

    ev.bytes = bytes;
    ev.duration_us = duration_ns / 1000;
    r2_control_journal(r2_eng.ctl, &ev);
}

bool r2_path_journal_seldom(const struct r2_path *path, enum r2_seg_event event, const char *cause,
                            struct r2_ratelimit *kind, bool anyway)
{
    struct r2_control_event ev = event_on(path, event, cause);

    return r2_control_journal_seldom(r2_eng.ctl, &ev, kind, anyway, r2_peer_now(path->peer));
}

static enum r2_seg_path_state shown_as(const struct r2_path *path)
{
    static const enum r2_seg_path_state as[R2_HEALTH_STATES] = {
        [R2_HEALTH_HEALTHY] = R2_SEG_PATH_UP,      [R2_HEALTH_SUSPECT] = R2_SEG_PATH_SUSPECT,
        [R2_HEALTH_FAILED] = R2_SEG_PATH_DOWN,     [R2_HEALTH_PROBING] = R2_SEG_PATH_PROBING,
        [R2_HEALTH_RAMPING] = R2_SEG_PATH_RAMPING, [R2_HEALTH_DRAINED] = R2_SEG_PATH_DRAINED,
        [R2_HEALTH_DAMPED] = R2_SEG_PATH_DAMPED,
    };

    if (path->health.state != R2_HEALTH_UNREACHED)
        return as[path->health.state];
    if (path->state == R2_PATH_PROVEN)
        return R2_SEG_PATH_UP;
    if (r2_path_is_up(path) || path->state == R2_PATH_CONNECTING)
        return R2_SEG_PATH_CONNECTING;
    if (!r2_past_carried(path->past))
        return R2_SEG_PATH_NEVER_REACHED;
    /* It is wanted, and cannot be had. */
    return path->past == R2_PAST_MISSED && path->role != R2_ROLE_SPARE ? R2_SEG_PATH_CONNECTING
                                                                       : R2_SEG_PATH_CLOSED;
}

void r2_path_show(struct r2_path *path, const char *cause)
{
    r2_control_path_state(r2_eng.ctl, path->shown.row, shown_as(path), path->gen, cause);
}

void r2_path_set_role(struct r2_path *path, enum r2_path_role role)
{
    bool spare = role == R2_ROLE_SPARE, was_spare = path->role == R2_ROLE_SPARE;

    path->role = role;
    if (spare == was_spare)
        return;
    r2_control_path_spare(r2_eng.ctl, path->shown.row, spare);
    /* Else it is shown as it was, and so is its cause. */
    if (path->state == R2_PATH_WAIT && path->past == R2_PAST_MISSED &&
        path->health.state == R2_HEALTH_UNREACHED)
        r2_path_show(path, spare ? "a better pair of NICs serves" : "wanted again");
    path->peer->todo |= R2_TODO_WEIGH;
}

/* Every change of state is told, and that a ramp begins again: what makes a path come up or go down
 * tells it itself (path-up, path-down). */
static enum r2_seg_event told_as(enum r2_health_state before, enum r2_health_state state)
{
    static const enum r2_seg_event as[R2_HEALTH_STATES] = {
        [R2_HEALTH_SUSPECT] = R2_EV_PATH_SUSPECT,
        [R2_HEALTH_PROBING] = R2_EV_PATH_PROBING,
        [R2_HEALTH_DRAINED] = R2_EV_PATH_DRAINED,
        [R2_HEALTH_DAMPED] = R2_EV_PATH_DAMPED,
    };

    if (state == before)
        return state == R2_HEALTH_RAMPING ? R2_EV_PATH_RAMPING : R2_EV_NONE;
    if (state == R2_HEALTH_UNREACHED)
        return R2_EV_PATH_CLOSED;
    if (state == R2_HEALTH_HEALTHY && before != R2_HEALTH_UNREACHED)
        return R2_EV_PATH_HEALTHY;
    return as[state];
}

static void tell_state(const struct r2_path *path, enum r2_seg_event event, const char *cause)
{
    static struct r2_ratelimit closed; /* a process that leaves closes hundreds */

    if (event == R2_EV_PATH_CLOSED)
        r2_path_journal_seldom(path, event, cause, &closed, false);
    else if (event != R2_EV_NONE)
        r2_path_journal(path, event, 0, 0, cause);
}

bool r2_path_event(struct r2_path *path, enum r2_health_event event, const char *cause)
{
    enum r2_health_state before = path->health.state;

    if (!r2_health_step(&path->health, event, r2_peer_now(path->peer)))
        return false;
    tell_state(path, told_as(before, path->health.state), cause);
    r2_path_show(path, cause);
    r2_peer_census(path->peer);
    path->peer->todo |= R2_TODO_WEIGH;
    return true;
}

/* Loopback has no wire anyway. */
bool r2_path_wireless(const struct r2_path *path)
{
    const struct r2_rnic *r = &path->peer->rnics[path->rnic];

    return !r2_local.nics[path->lnic].loopback && r->known && r2_nic_own(&r->addr) >= 0;
}

/* A ramp goes on in silence (health.def), so its state alone does not say that it answers. */
static bool answers(const struct r2_path *path)
{
    return path->state == R2_PATH_PROVEN && path->health.state != R2_HEALTH_SUSPECT &&
           path->hb.unanswered < R2_SUSPECT_BEATS;
}

/* It is wanted, and cannot be had. */
static bool is_lost(const struct r2_path *path)
{
    enum r2_health_state state = path->health.state;

    return r2_past_carried(path->past) &&
           (state == R2_HEALTH_SUSPECT || state == R2_HEALTH_RAMPING || state == R2_HEALTH_FAILED ||
            state == R2_HEALTH_PROBING || state == R2_HEALTH_DAMPED);
}

static bool rnic_usable(const struct r2_path *path)
{
    return path->rnic < path->peer->n_rnics && path->peer->rnics[path->rnic].word == R2_NIC_USABLE;
}

static enum r2_census census_of(const struct r2_path *path, bool others)
{
    const struct r2_peer *p = path->peer;

    if (r2_path_wireless(path))
        return R2_CENSUS_NONE;
    if (answers(path))
        return p->out ? R2_CENSUS_OUT : R2_CENSUS_IN;
    if (!others || p->life != R2_PEER_ALIVE || r2_list_empty(&p->conn_list) || !rnic_usable(path))
        return R2_CENSUS_NONE; /* nobody is blamed, or the other side is already */
    return is_lost(path) ? R2_CENSUS_LOST : R2_CENSUS_NONE;
}

static bool some_answer(const struct r2_peer *p)
{
    return R2_ANY_PATH(path, p, census_of(path, false) != R2_CENSUS_NONE);
}

/* A path that is lost says something about its NIC only while the peer answers on another. */
void r2_peer_census(struct r2_peer *p)
{
    bool others = some_answer(p);

    R2_FOR_EACH_PATH (path, p) {
        enum r2_census now = census_of(path, others);

        if (now == path->counted)
            continue;
        atomic_fetch_sub(&r2_eng.nic_state[path->lnic].census[path->counted], 1);
        atomic_fetch_add(&r2_eng.nic_state[path->lnic].census[now], 1);
        path->counted = now;
    }
}

bool r2_peer_has_open(const struct r2_peer *p)
{
    R2_FOR_EACH_CONN (c, p) {
        if (c->state == R2_CONN_OPENING || (c->state == R2_CONN_OPEN && !r2_conn_is_left(c)))
            return true;
    }
    return false;
}

static bool waits_for(const struct r2_peer *p, int nic)
{
    bool others = some_answer(p);

    return R2_ANY_PATH(path, p,
                       path->lnic == nic && is_lost(path) && !answers(path) &&
                           (rnic_usable(path) || !others));
}

bool r2_nic_asked_in_vain(int nic)
{
    bool found = false;

    R2_FOR_EACH_PEER(p)
    {
        r2_peer_lock(p);
        found |= p->life == R2_PEER_ALIVE && r2_peer_has_open(p) && waits_for(p, nic);
        r2_peer_unlock(p);
    }
    return found;
}

void r2_path_tell_up(struct r2_path *path)
{
    uint64_t away = path->down.at ? r2_peer_now(path->peer) - path->down.at : 0;

    if (path->intro != R2_INTRO_HEARD || path->state != R2_PATH_PROVEN)
        return;
    path->intro = R2_INTRO_TOLD;
    r2_path_journal(path, R2_EV_PATH_UP, 0, away, path->down.at ? "back" : "connected");
    path->down.at = 0;
}

void r2_path_forgive(struct r2_path *path)
{
    r2_damp_clear(&path->damp);
    path->attempt.fails = 0;
    if (r2_path_event(path, R2_HEALTH_EV_REUSE, "past failures are forgotten"))
        path->attempt.next_at = 0;
}

int r2_peer_left(const struct r2_peer *p, int transport)
{
    int n = 0;

    R2_FOR_EACH_PATH (path, p)
        n += transport == R2_VIA_TCP ? r2_path_is_up(path) : r2_path_suffices(path);
    return n;
}
