/* Verdicts: given and noted. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/locate/round.h"
#include "util/num.h"

#define RECENT 64
#define WRITE_TRIES 20 /* of 0.1 ms */
#define FRESH_NS (3 * R2_NS_PER_S)

static struct recent {
    int lnic;
    struct r2_wire_addr addr;
    uint64_t at;
} recent[RECENT];
static unsigned next_recent;

bool r2_verdict_recent(int lnic, const struct r2_wire_addr *addr, uint64_t now)
{
    for (int i = 0; i < RECENT; i++) {
        if (recent[i].at && recent[i].at + R2_REPEAT_NS > now && recent[i].lnic == lnic &&
            r2_same_nic(&recent[i].addr, addr))
            return true;
    }
    return false;
}

static void remember(int lnic, const struct r2_wire_addr *addr, uint64_t now)
{
    recent[next_recent++ % RECENT] = (struct recent){lnic, *addr, now};
}

static void journal(int lnic, const char *rname, const char *host, uint32_t pid, uint64_t ns,
                    const char *why)
{
    struct r2_control_event ev = {
        .event = R2_EV_VERDICT,
        .nic = lnic >= 0 ? r2_nic_name(lnic) : NULL,
        .remote_nic = rname,
        .peer_host = host,
        .peer_pid = pid,
        .duration_us = ns / 1000,
        .cause = why,
    };

    r2_control_journal(r2_eng.ctl, &ev);
    r2_count(&r2_eng.n->verdicts, 1);
    R2_INFO("verdict on %s -> %s@%s: %s", lnic >= 0 ? r2_nic_name(lnic) : "?", rname ? rname : "?",
            host ? host : "?", why);
}

/* The path's row says why it is down, until it is up again. */
static void explain(struct r2_peer *p, int lnic, int rnic, const char *why)
{
    r2_peer_lock(p);
    R2_FOR_EACH_PATH (path, p) {
        if (path->lnic != lnic || path->rnic != rnic || r2_path_is_up(path))
            continue;
        snprintf(path->shown.verdict, sizeof(path->shown.verdict), "%s", why);
        r2_control_path_cause(r2_eng.ctl, path->shown.row, path->shown.verdict);
    }
    r2_peer_leave(p);
}

/* One line per NIC at the other end, however many processes it serves. */
static void pronounce(struct r2_round *r, int i, const struct r2_finding *v, uint64_t now)
{
    const struct r2_suspect *s = &r->suspects[i];

    explain(s->peer, r->lnic, s->rnic, v->why);
    for (int k = 0; k < i; k++) {
        if (r2_same_nic(&r->suspects[k].addr, &s->addr))
            return;
    }
    if (v->kind != R2_FOUND_TRANSIENT)
        remember(r->lnic, &s->addr, now);
    journal(r->lnic, s->name, s->host, s->pid, now - s->failed_at, v->why);
}

/* The last NIC stays in service: a broken one is as good as none. */
static void take_out(int nic, const char *why, uint64_t now)
{
    struct r2_wire_addr own;

    if (!r2_nic_usable(nic) || !r2_nic_others(nic))
        return;
    if (r2_eng.ops->address(nic, &own) == 0)
        remember(-1, &own, now); /* that its carrier goes as well is no other verdict */
    r2_nicstate_located(nic, why, now);
}

/* ---- the node segment */

static void write_row(struct r2_node_row *row)
{
    const struct timespec soon = {.tv_nsec = 100000};

    if (!r2_locate_seg)
        return;
    memcpy(row->process, r2_eng.process, 16);
    row->nic.port = 0;
    row->nic.offers = 0;
    for (int i = 0; i < WRITE_TRIES && r2_nodeseg_write(r2_locate_seg, row) == -EAGAIN; i++)
        nanosleep(&soon, NULL); /* a row that is lost is one that is not shown */
}

/* Another process of the node has just found that the NIC is at fault; this one may have seen less.
 */
static bool is_blamed(const struct r2_wire_addr *nic, uint64_t now)
{
    struct r2_node_row row;

    return r2_locate_seg && r2_nodeseg_get(r2_locate_seg, nic, &row) &&
           row.state == R2_NODE_FAILED && row.mono_ns + FRESH_NS > now;
}

static void share_own(const struct r2_round *r, enum r2_node_state state,
                      const struct r2_finding *v, uint64_t now)
{
    struct r2_node_row row = {.state = (uint32_t)state, .kind = (uint32_t)v->kind};

    if (r2_eng.ops->address(r->lnic, &row.nic) ||
        (state != R2_NODE_FAILED && is_blamed(&row.nic, now)))
        return;
    snprintf(row.name, sizeof(row.name), "%.39s", r2_nic_name(r->lnic));
    snprintf(row.why, sizeof(row.why), "%s", v->why);
    for (int i = 0; i < r->n_suspects && i < R2_NODE_OTHERS; i++)
        row.others[row.n_others++] = r->suspects[i].addr;
    write_row(&row);
}

static void share_remote(const struct r2_suspect *s, const struct r2_finding *v)
{
    struct r2_node_row row = {.state = R2_NODE_FAILED, .kind = R2_FOUND_LOCAL, .nic = s->addr};

    snprintf(row.name, sizeof(row.name), "%s", s->label);
    snprintf(row.why, sizeof(row.why), "%s", v->why);
    write_row(&row);
}

/* ---- the end of a round */

static bool remote_word(const struct r2_suspect *s)
{
    bool word;

    r2_peer_lock(s->peer);
    word = s->peer->rnics[s->rnic].known && s->peer->rnics[s->rnic].word != R2_NIC_USABLE;
    r2_peer_leave(s->peer);
    return word;
}

static bool blames_local(enum r2_finding_kind k)
{
    return k == R2_FOUND_LOCAL || k == R2_FOUND_BOTH;
}

static bool blames_remote(enum r2_finding_kind k)
{
    return k == R2_FOUND_REMOTE || k == R2_FOUND_BOTH;
}

static uint64_t first_failure(const struct r2_round *r)
{
    uint64_t first = UINT64_MAX;

    R2_FOR_EACH_SUSPECT (s, r)
        first = r2_min(first, s->failed_at);
    return first < R2_SLACK_NS ? R2_SLACK_NS : first;
}

static uint64_t last_failure(const struct r2_round *r)
{
    uint64_t last = 0;

    R2_FOR_EACH_SUSPECT (s, r)
        last = r2_max(last, s->failed_at);
    return last;
}

/* A NIC that is broken for one pair is broken for the others that fell silent with it. */
static void spread_local(const struct r2_round *r, struct r2_finding *v)
{
    const struct r2_finding *local = NULL;

    for (int i = 0; i < r->n_suspects && !local; i++) {
        if (v[i].kind == R2_FOUND_LOCAL)
            local = &v[i];
    }
    for (int i = 0; local && i < r->n_suspects; i++) {
        if (v[i].kind == R2_FOUND_UNDECIDED)
            v[i] = *local;
    }
}

/* All that follows from the verdicts on the round's pairs. */
static void carry_out(struct r2_round *r, const struct r2_finding *v, uint64_t now)
{
    const struct r2_finding *local = NULL, *said = &v[0];

    for (int i = 0; i < r->n_suspects; i++) {
        pronounce(r, i, &v[i], now);
        if (blames_local(v[i].kind))
            local = &v[i];
        if (v[i].kind != R2_FOUND_UNDECIDED && said->kind == R2_FOUND_UNDECIDED)
            said = &v[i];
    }
    share_own(r, local ? R2_NODE_FAILED : R2_NODE_UNKNOWN, local ? local : said, now);
    for (int i = 0; i < r->n_suspects; i++) {
        if (blames_remote(v[i].kind))
            share_remote(&r->suspects[i], &v[i]);
    }
    if (local)
        take_out(r->lnic, local->why, now);
}

/* Probes are sockets: where queue pairs failed, their answer clears the wire, not the path. */
static void rdma_only(const struct r2_suspect *s, struct r2_finding *v)
{
    if (s->via == R2_VIA_TCP || v->kind != R2_FOUND_TRANSIENT)
        return;
    v->kind = R2_FOUND_UNDECIDED;
    snprintf(v->why, sizeof(v->why), "undecided: RDMA failed, sockets over the same NICs work");
}

/* A heartbeat that the NIC's path has answered is as good as a probe. One from before the failure
 * was noticed may be from before it happened. */
static void add_heartbeats(struct r2_round *r, int l, uint64_t since)
{
    R2_FOR_EACH_PEER(p)
    {
        r2_peer_lock(p);
        R2_FOR_EACH_PATH (path, p) {
            const struct r2_rnic *o = &p->rnics[path->rnic];

            if (path->lnic == r->lnic && r2_path_hb_answers(path, since) && !r2_path_wireless(path))
                r2_evidence_add(&r->ev, l, r2_evidence_nic(&r->ev, &o->addr, o->name),
                                R2_SEEN_ANSWERED, true, path->hb.proven_at);
        }
        r2_peer_leave(p);
    }
}

void r2_round_conclude(struct r2_round *r, uint64_t now)
{
    struct r2_finding v[R2_SUSPECTS];
    int l = r2_own_index(&r->ev, r->lnic);
    uint64_t since = first_failure(r) - R2_SLACK_NS;
    int o[R2_SUSPECTS];

    for (int i = 0; i < r->n_suspects; i++) {
        o[i] = r2_evidence_nic(&r->ev, &r->suspects[i].addr, r->suspects[i].label);
        if (o[i] >= 0)
            r->ev.nics[o[i]].word = remote_word(&r->suspects[i]);
    }
    add_heartbeats(r, l, last_failure(r));
    for (int i = 0; i < r->n_suspects; i++) {
        r2_verdict_of(&r->ev, l, o[i], since, r->suspects[i].heard, &v[i]);
        rdma_only(&r->suspects[i], &v[i]);
    }
    spread_local(r, v);
    if (r->n_suspects)
        carry_out(r, v, now);
}

void r2_verdict_word(struct r2_peer *p, int lnic, int rnic, uint64_t now)
{
    struct r2_wire_addr addr;
    char name[R2_WIRE_NAME], host[64];
    uint32_t pid;

    r2_peer_lock(p);
    addr = p->rnics[rnic].addr;
    memcpy(name, p->rnics[rnic].name, sizeof(name));
    memcpy(host, p->host, sizeof(host));
    pid = p->pid;
    r2_peer_leave(p);
    explain(p, lnic, rnic, "remote NIC: its node says so");
    if (r2_verdict_recent(-1, &addr, now))
        return;
    remember(-1, &addr, now);
    journal(lnic, name, host, pid, 0, "remote NIC: its node says so");
}

void r2_verdict_nic(int nic, uint64_t now)
{
    struct r2_wire_addr own;

    if (r2_nic_word(nic) != R2_NIC_DOWN || r2_eng.ops->address(nic, &own) ||
        r2_verdict_recent(-1, &own, now))
        return;
    remember(-1, &own, now);
    journal(nic, NULL, NULL, 0, 0, "local NIC: no carrier");
}
