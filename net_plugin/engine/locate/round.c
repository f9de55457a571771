/* Rounds: begun by a failed path, a peer's question or a hint; advanced every 10 ms; ended. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/locate/round.h"
#include "util/random.h"

#define WAIT_NS (800 * R2_NS_PER_MS) /* for the process that looks into the NIC */
#define LOOK_NS (50 * R2_NS_PER_MS)  /* between questions about the carrier */
#define HINTS_PER_S 20
#define CHECKS_MAX 4
#define ASSISTS_MAX 12

static struct r2_round rounds[R2_ROUNDS];
static uint64_t next_id;

static uint64_t new_id(void)
{
    if (!next_id && r2_random_bytes(&next_id, sizeof(next_id)))
        next_id = 1;
    next_id += 2; /* never 0 in a process's life */
    return next_id | 1;
}

struct r2_round *r2_round_find(uint64_t id)
{
    for (int i = 0; i < R2_ROUNDS; i++) {
        if (rounds[i].phase != R2_PHASE_FREE && rounds[i].id == id)
            return &rounds[i];
    }
    return NULL;
}

struct r2_round *r2_round_of(enum r2_round_kind kind, int lnic)
{
    for (int i = 0; i < R2_ROUNDS; i++) {
        if (rounds[i].phase != R2_PHASE_FREE && rounds[i].kind == kind && rounds[i].lnic == lnic &&
            !rounds[i].closed)
            return &rounds[i];
    }
    return NULL;
}

int r2_round_count(enum r2_round_kind kind)
{
    int n = 0;

    for (int i = 0; i < R2_ROUNDS; i++)
        n += rounds[i].phase != R2_PHASE_FREE && rounds[i].kind == kind;
    return n;
}

bool r2_rounds_any(void)
{
    for (int i = 0; i < R2_ROUNDS; i++) {
        if (rounds[i].phase != R2_PHASE_FREE)
            return true;
    }
    return false;
}

static void start_clock(struct r2_round *r, uint64_t now)
{
    r->closed = false;
    r->next_try = now;
    r->close_at = now + R2_WINDOW_NS;
    r->deadline = now + R2_ANSWER_NS;
}

struct r2_round *r2_round_new(enum r2_round_kind kind, int lnic, uint64_t now)
{
    for (int i = 0; i < R2_ROUNDS; i++) {
        struct r2_round *r = &rounds[i];

        if (r->phase != R2_PHASE_FREE)
            continue;
        memset(r, 0, offsetof(struct r2_round, ev));
        r2_evidence_init(&r->ev);
        r->kind = kind;
        r->phase = kind == R2_ROUND_FULL ? R2_PHASE_SETTLE : R2_PHASE_RUN;
        r->id = new_id();
        r->lnic = lnic;
        r->began = now;
        start_clock(r, now);
        return r;
    }
    return NULL;
}

static void unclaim(struct r2_round *r)
{
    struct r2_wire_addr own;

    if (r->claimed && r2_eng.ops->address(r->lnic, &own) == 0)
        r2_nodeseg_release(r2_locate_nodeseg(), &own);
    r->claimed = false;
}

void r2_round_free(struct r2_round *r, uint64_t now)
{
    if (!r->closed)
        r2_targets_close(r, now);
    r2_round_reply(r, now);
    unclaim(r);
    for (int i = 0; i < r->n_suspects; i++)
        r2_peer_put(r->suspects[i].peer);
    r->phase = R2_PHASE_FREE;
}

/* ---- a failed path */

static bool has_suspect(const struct r2_round *r, const struct r2_peer *p, int rnic)
{
    for (int i = 0; i < r->n_suspects; i++) {
        if (r->suspects[i].peer == p && r->suspects[i].rnic == rnic)
            return true;
    }
    return false;
}

static void add_suspect(struct r2_round *r, struct r2_peer *p, int rnic, int via, uint64_t at)
{
    struct r2_suspect *s;

    if (r->n_suspects == R2_SUSPECTS || has_suspect(r, p, rnic))
        return;
    s = &r->suspects[r->n_suspects++];
    r2_peer_get(p);
    s->peer = p;
    s->rnic = (uint8_t)rnic;
    s->via = (uint8_t)via;
    s->failed_at = at;
    r2_peer_lock(p);
    s->addr = p->rnics[rnic].addr;
    memcpy(s->name, p->rnics[rnic].name, sizeof(s->name));
    memcpy(s->host, p->host, sizeof(s->host));
    s->pid = p->pid;
    r2_locate_label(s->label, s->name, p->host);
    r2_peer_leave(p);
    if (r->phase == R2_PHASE_RUN || r->phase == R2_PHASE_WAIT)
        r2_target_add(r, r->lnic, &s->addr, rnic, p->id, s->label, true);
    if (r->phase == R2_PHASE_RUN)
        r2_round_ask(r);
}

/* With no path left, or every one silent, no NIC is blamed (invariant "silence is not failure"). */
static bool still_suspect(struct r2_peer *p)
{
    bool yes;

    r2_peer_lock(p);
    yes = p->life == R2_PEER_ALIVE && p->n_up && !p->suspect_since && !r2_list_empty(&p->conn_list);
    r2_peer_leave(p);
    return yes;
}

void r2_rounds_failed(struct r2_peer *p, int lnic, int rnic, int via, uint64_t at)
{
    struct r2_wire_addr addr;
    struct r2_round *r;
    bool word;

    if (!r2_nic_usable(lnic)) /* the reason is known */
        return;
    r2_peer_lock(p);
    word = p->rnics[rnic].known && p->rnics[rnic].word != R2_NIC_USABLE;
    addr = p->rnics[rnic].addr;
    r2_peer_leave(p);
    /* No socket of ours goes over that NIC, or over any wire at all (a process of this node). */
    if ((addr.offers & R2_OFFER_NO_TCP) || r2_nic_own(&addr) >= 0)
        return;
    if (word) {
        r2_verdict_word(p, lnic, rnic, at);
        return;
    }
    if (!still_suspect(p) || r2_verdict_recent(lnic, &addr, at))
        return;
    r = r2_round_of(R2_ROUND_FULL, lnic);
    if (!r) /* none, or one that has seen enough */
        r = r2_round_new(R2_ROUND_FULL, lnic, at);
    if (r)
        add_suspect(r, p, rnic, via, at);
}

static void drop_suspects(struct r2_round *r)
{
    for (int i = 0; i < r->n_suspects;) {
        if (still_suspect(r->suspects[i].peer)) {
            i++;
            continue;
        }
        r2_peer_put(r->suspects[i].peer);
        r->suspects[i] = r->suspects[--r->n_suspects];
    }
}

static bool covers(const struct r2_round *r, const struct r2_node_row *row, uint64_t now)
{
    struct r2_wire_addr own;

    if (r2_eng.ops->address(r->lnic, &own) || !r2_same_nic(&own, &row->nic) ||
        row->mono_ns + R2_FRESH_NS < now || row->mono_ns > now + R2_FRESH_NS ||
        row->mono_ns + R2_ROUND_NS < r->began)
        return false;
    if (row->kind == R2_FOUND_LOCAL)
        return true;
    for (int i = 0; i < r->n_suspects; i++) {
        for (uint32_t k = 0; k < row->n_others; k++) {
            if (r2_same_nic(&r->suspects[i].addr, &row->others[k]))
                return true;
        }
    }
    return false;
}

static void go(struct r2_round *r, uint64_t now)
{
    r->phase = R2_PHASE_RUN;
    r2_targets_again(r);
    start_clock(r, now);
    r2_targets_collect(r);
    r2_round_ask(r);
    r2_count(&r2_eng.n->locate_rounds, 1);
}

static int claim(struct r2_round *r)
{
    struct r2_nodeseg *seg = r2_locate_nodeseg();
    struct r2_wire_addr own;
    int rc;

    if (!seg || r2_eng.ops->address(r->lnic, &own))
        return 0;
    rc = r2_nodeseg_claim(seg, &own);
    r->claimed = rc == 0;
    return rc;
}

static bool find_row(struct r2_round *r, uint64_t now)
{
    struct r2_nodeseg *seg = r2_locate_nodeseg();
    struct r2_wire_addr own;

    r->have_row = seg && r2_eng.ops->address(r->lnic, &own) == 0 &&
                  r2_nodeseg_get(seg, &own, &r->row) && covers(r, &r->row, now);
    return r->have_row;
}

/* The paths that failed together are known: one process of the node looks into the NIC. */
static void settled(struct r2_round *r, uint64_t now)
{
    drop_suspects(r);
    if (!r->n_suspects || !r2_nic_usable(r->lnic) ||
        r2_niclink_carrier(r->lnic, now) == R2_CARRIER_DOWN) {
        r2_round_free(r, now);
        return;
    }
    r->phase = R2_PHASE_WAIT;
    start_clock(r, now);
    for (int i = 0; i < r->n_suspects; i++) {
        struct r2_suspect *s = &r->suspects[i];

        r2_target_add(r, r->lnic, &s->addr, s->rnic, s->peer->id, s->label, true);
    }
    r->deadline = now + WAIT_NS;
    if (!find_row(r, now) && claim(r) != -EAGAIN)
        go(r, now);
}

/* ---- questions and hints from outside */

static bool allowed(uint64_t now)
{
    static uint64_t since;
    static int used;

    if (now - since > R2_NS_PER_S) {
        since = now;
        used = 0;
    }
    return used++ < HINTS_PER_S;
}

static void add_reply(struct r2_round *r, struct r2_peer *p, uint64_t id, bool far_is_mine)
{
    struct r2_reply *a;

    if (r->n_replies == R2_REPLIES)
        return;
    a = &r->replies[r->n_replies++];
    r2_peer_get(p);
    a->peer = p;
    a->round = id;
    a->far_is_mine = far_is_mine;
}

/* The asking process's NIC, as it told us. */
static bool add_near(struct r2_round *r, struct r2_peer *p, const struct r2_wire_addr *near)
{
    char label[R2_WIRE_NAME];
    bool found = false, reached = false;
    struct r2_wire_addr addr;
    int rnic = 0;

    r2_peer_lock(p);
    for (int i = 0; i < p->n_rnics && !found; i++) {
        if (!p->rnics[i].known || !r2_same_nic(&p->rnics[i].addr, near) || r2_nic_own(near) >= 0)
            continue;
        found = true;
        rnic = i;
        addr = p->rnics[i].addr;
        reached = (p->reached[r->lnic] >> i) & 1;
        r2_locate_label(label, p->rnics[i].name, p->host);
    }
    r2_peer_leave(p);
    return found && r2_target_add(r, r->lnic, &addr, rnic, p->id, label, reached);
}

void r2_rounds_asked(struct r2_peer *p, const struct r2_msg_probe *m, uint64_t now)
{
    int lnic = r2_nic_own(&m->far);
    struct r2_round *r = lnic >= 0 ? r2_round_of(R2_ROUND_FULL, lnic) : NULL;

    for (int i = 0; i < R2_ROUNDS; i++) { /* the same question over another path */
        for (int k = 0; k < rounds[i].n_replies && rounds[i].phase != R2_PHASE_FREE; k++) {
            if (rounds[i].replies[k].peer == p && rounds[i].replies[k].round == m->round)
                return;
        }
    }
    if (r && r->phase != R2_PHASE_WAIT && now - r->began < R2_SLACK_NS) {
        add_reply(r, p, m->round, true); /* we look from there already */
        if (r->phase == R2_PHASE_RUN)
            add_near(r, p, &m->near);
        return;
    }
    if (!allowed(now) || r2_round_count(R2_ROUND_ASSIST) >= ASSISTS_MAX)
        return;
    r = r2_round_new(R2_ROUND_ASSIST, lnic, now);
    if (!r)
        return;
    r2_count(&r2_eng.n->locate_assists, 1);
    add_reply(r, p, m->round, lnic >= 0);
    if (lnic < 0) {
        r2_targets_witness(r, &m->near);
        r2_targets_witness(r, &m->far);
    } else if (r2_niclink_carrier(lnic, now) != R2_CARRIER_DOWN && add_near(r, p, &m->near)) {
        r2_targets_collect(r);
    }
}

void r2_round_check(const struct r2_wire_addr *nic, const struct r2_node_row *row, uint64_t now)
{
    struct r2_round *r;

    for (int i = 0; i < R2_ROUNDS; i++) {
        if (rounds[i].phase != R2_PHASE_FREE && rounds[i].kind == R2_ROUND_CHECK &&
            r2_same_nic(&rounds[i].about, nic))
            return;
    }
    if (r2_round_count(R2_ROUND_CHECK) >= CHECKS_MAX || !allowed(now))
        return;
    r = r2_round_new(R2_ROUND_CHECK, r2_nic_own(nic), now);
    if (!r)
        return;
    r->about = *nic;
    if (row) {
        r->have_row = true;
        r->row = *row;
    }
    r2_targets_paths(r, nic);
    if (r->n_targets)
        r2_count(&r2_eng.n->locate_hints, 1);
    else
        r2_round_free(r, now); /* no path over it: nothing to lose */
}

void r2_rounds_hint(const struct r2_msg_verdict *m, uint64_t now)
{
    int own = r2_nic_own(&m->nic);

    if (m->kind != R2_FOUND_LOCAL && m->kind != R2_FOUND_REMOTE && m->kind != R2_FOUND_BOTH)
        return;
    if (own >= 0 && (!r2_nic_usable(own) || r2_round_of(R2_ROUND_FULL, own)))
        return;
    r2_round_check(&m->nic, NULL, now);
}

/* Another process of this node has written what it found. */
void r2_rounds_row(const struct r2_node_row *row, uint64_t now)
{
    int own = r2_nic_own(&row->nic);

    if (memcmp(row->process, r2_eng.process, 16) == 0 || row->mono_ns + R2_FRESH_NS < now)
        return;
    for (int i = 0; i < R2_ROUNDS; i++) {
        struct r2_round *r = &rounds[i];

        if (r->phase == R2_PHASE_WAIT && !r->have_row && covers(r, row, now)) {
            r->row = *row;
            r->have_row = true;
        }
    }
    if (own >= 0 && row->state == R2_NODE_WORKS)
        r2_recover_soon(own, now);
    else if (row->state == R2_NODE_FAILED &&
             (own < 0 || (r2_nic_usable(own) && !r2_round_of(R2_ROUND_FULL, own))))
        r2_round_check(&row->nic, row, now);
}

void r2_rounds_nic(int nic, uint64_t now)
{
    for (int i = 0; i < R2_ROUNDS && !r2_nic_usable(nic); i++) {
        struct r2_round *r = &rounds[i];

        if (r->phase == R2_PHASE_FREE || r->lnic != nic)
            continue;
        if (r->kind == R2_ROUND_FULL) {
            r2_round_free(r, now); /* the reason is known now */
        } else if (r->kind == R2_ROUND_ASSIST && r2_niclink_carrier(nic, now) == R2_CARRIER_DOWN) {
            r2_targets_close(r, now); /* what is not seen without carrier says nothing */
            r->n_targets = 0;
        }
    }
    r2_verdict_nic(nic, now);
}

/* ---- time */

/* Every path in question answers again: no need to wait for the rest. */
static bool all_answer(const struct r2_round *r)
{
    int n = 0;

    for (int i = 0; i < r->n_suspects; i++) {
        for (int k = 0; k < r->n_targets; k++) {
            const struct r2_target *t = &r->targets[k];

            n += t->lnic == r->lnic && r2_same_nic(&t->addr, &r->suspects[i].addr) &&
                 t->outcome == R2_SEEN_ANSWERED;
        }
    }
    return r->kind == R2_ROUND_FULL && r->n_suspects && n == r->n_suspects;
}

static bool any_answer(const struct r2_round *r)
{
    for (int k = 0; k < r->n_targets; k++) {
        if (r->targets[k].outcome == R2_SEEN_ANSWERED)
            return true;
    }
    return false;
}

static bool ends_by_answer(const struct r2_round *r)
{
    return r->kind == R2_ROUND_RECOVER || r->kind == R2_ROUND_REACH;
}

static bool all_heard(const struct r2_round *r)
{
    for (int i = 0; i < r->n_asks; i++) {
        if (!r->asks[i].heard)
            return false;
    }
    return true;
}

static void wait_tick(struct r2_round *r, uint64_t now)
{
    if (r->have_row) {
        if (r->closed)
            r2_round_adopt(r, now);
        return;
    }
    if (claim(r) == -EAGAIN && now < r->deadline)
        return;
    /* Its holder has given up, is dead or asleep; or has just written what it found. */
    if (find_row(r, now))
        unclaim(r);
    else
        go(r, now);
}

static void conclude(struct r2_round *r, uint64_t now)
{
    if (r->kind == R2_ROUND_FULL)
        r2_round_conclude(r, now);
    else if (r->kind == R2_ROUND_CHECK)
        r2_check_conclude(r, now);
    else if (r->kind == R2_ROUND_RECOVER)
        r2_recover_conclude(r, now);
    else if (r->kind == R2_ROUND_REACH)
        r2_reach_conclude(r);
    r2_round_free(r, now);
}

/* A carrier that is gone is the reason, and its event may come a second late. Asked when a round
 * begins, and again while it runs: the answer is there, as a rule, when the paths that failed
 * together are known, and says the rest by itself (r2_rounds_nic). If the kernel does not answer, a
 * round goes on by what its probes see, which without carrier is nothing. */
static void look(struct r2_round *r, uint64_t now)
{
    if (r->lnic < 0 || now - r->looked_at < LOOK_NS ||
        (r->kind != R2_ROUND_FULL && r->kind != R2_ROUND_ASSIST))
        return;
    r->looked_at = now;
    r2_niclink_ask(r->lnic, now);
}

static void round_tick(struct r2_round *r, uint64_t now)
{
    bool early;

    look(r, now);
    if (r->phase == R2_PHASE_SETTLE && now - r->began >= R2_SETTLE_NS)
        settled(r, now);
    if (r->phase != R2_PHASE_RUN && r->phase != R2_PHASE_WAIT)
        return;
    if (!r->closed) {
        r2_targets_tick(r, now);
        early = all_answer(r) || (ends_by_answer(r) && any_answer(r));
        if (early || r2_targets_done(r) || now >= r->close_at) {
            r2_targets_close(r, now);
            r->closed = true;
            r2_targets_evidence(r);
            r2_round_reply(r, now);
            if (early) {
                conclude(r, now);
                return;
            }
        }
    }
    if (r->phase == R2_PHASE_WAIT)
        wait_tick(r, now);
    else if (r->closed && (all_heard(r) || now >= r->deadline))
        conclude(r, now);
}

void r2_rounds_tick(uint64_t now)
{
    for (int i = 0; i < R2_ROUNDS; i++) {
        if (rounds[i].phase != R2_PHASE_FREE)
            round_tick(&rounds[i], now);
    }
}
