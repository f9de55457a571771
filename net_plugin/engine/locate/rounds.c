/* What rounds are begun by: a failed path, a peer's question. They are advanced every 10 ms
 * and end. */
#include <errno.h>
#include <string.h>

#include "engine/locate/round.h"

#define WAIT_NS (800 * R2_NS_PER_MS) /* for the process that looks into the NIC */
#define LOOK_NS (50 * R2_NS_PER_MS)  /* between questions about the carrier */
#define QUESTIONS_PER_S 20
#define ASSISTS_MAX 12

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
    r = r2_round_full(lnic);
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
    r2_round_clock(r, now);
    r2_targets_collect(r);
    r2_round_ask(r);
    r2_count(&r2_eng.n->locate_rounds, 1);
}

static int claim(struct r2_round *r)
{
    struct r2_wire_addr own;
    int rc;

    if (!r2_locate_seg || r2_eng.ops->address(r->lnic, &own))
        return 0;
    rc = r2_nodeseg_claim(r2_locate_seg, &own);
    r->claimed = rc == 0;
    return rc;
}

static bool find_row(struct r2_round *r, uint64_t now)
{
    struct r2_wire_addr own;

    r->have_row = r2_locate_seg && r2_eng.ops->address(r->lnic, &own) == 0 &&
                  r2_nodeseg_get(r2_locate_seg, &own, &r->row) && covers(r, &r->row, now);
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
    r2_round_clock(r, now);
    for (int i = 0; i < r->n_suspects; i++) {
        struct r2_suspect *s = &r->suspects[i];

        r2_target_add(r, r->lnic, &s->addr, s->rnic, s->peer->id, s->label, true);
    }
    r->deadline = now + WAIT_NS;
    if (!find_row(r, now) && claim(r) != -EAGAIN)
        go(r, now);
}

/* ---- questions from outside */

static bool allowed(uint64_t now)
{
    static uint64_t since;
    static int used;

    if (now - since > R2_NS_PER_S) {
        since = now;
        used = 0;
    }
    return used++ < QUESTIONS_PER_S;
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
    struct r2_round *r = lnic >= 0 ? r2_round_full(lnic) : NULL;

    R2_FOR_EACH_ROUND(other)
    { /* the same question over another path */
        for (int k = 0; k < other->n_replies; k++) {
            if (other->replies[k].peer == p && other->replies[k].round == m->round)
                return;
        }
    }
    if (r && r->phase != R2_PHASE_WAIT && now - r->began < R2_SLACK_NS) {
        add_reply(r, p, m->round, true); /* we look from there already */
        if (r->phase == R2_PHASE_RUN)
            add_near(r, p, &m->near);
        return;
    }
    if (!allowed(now) || r2_round_assists() >= ASSISTS_MAX)
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

void r2_rounds_nic(int nic, uint64_t now)
{
    R2_FOR_EACH_ROUND(r)
    {
        if (r->lnic != nic || r2_nic_usable(nic))
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

static bool all_heard(const struct r2_round *r)
{
    for (int i = 0; i < r->n_asks; i++) {
        if (!r->asks[i].heard)
            return false;
    }
    return true;
}

static bool in_row(const struct r2_node_row *row, const struct r2_wire_addr *addr)
{
    for (uint32_t i = 0; i < row->n_others; i++) {
        if (r2_same_nic(&row->others[i], addr))
            return true;
    }
    return row->kind == R2_FOUND_LOCAL;
}

/* What the row says nothing about needs a round. */
static void adopt(struct r2_round *r, uint64_t now)
{
    struct r2_suspect left[R2_SUSPECTS];
    int lnic = r->lnic, n_left = 0;

    for (int i = 0; i < r->n_suspects;) {
        if (in_row(&r->row, &r->suspects[i].addr)) {
            i++;
            continue;
        }
        left[n_left++] = r->suspects[i];
        r->suspects[i] = r->suspects[--r->n_suspects];
    }
    r2_round_adopt(r, now);
    r2_round_free(r, now);
    for (int i = 0; i < n_left; i++) {
        r2_rounds_failed(left[i].peer, lnic, left[i].rnic, left[i].via, left[i].failed_at);
        r2_peer_put(left[i].peer);
    }
}

static void wait_tick(struct r2_round *r, uint64_t now)
{
    if (r->have_row) {
        if (r->closed)
            adopt(r, now);
        return;
    }
    if (claim(r) == -EAGAIN && now < r->deadline)
        return;
    /* Its holder has given up, is dead or asleep; or has just written what it found. */
    if (find_row(r, now))
        r2_round_unclaim(r);
    else
        go(r, now);
}

static void conclude(struct r2_round *r, uint64_t now)
{
    if (r->kind == R2_ROUND_FULL)
        r2_round_conclude(r, now);
    r2_round_free(r, now);
}

/* A carrier that is gone is the reason, and its event may come a second late. Asked when a round
 * begins, and again while it runs: the answer is there, as a rule, when the paths that failed
 * together are known, and says the rest by itself (r2_rounds_nic). If the kernel does not answer, a
 * round goes on by what its probes see, which without carrier is nothing. */
static void look(struct r2_round *r, uint64_t now)
{
    if (r->lnic < 0 || now - r->looked_at < LOOK_NS)
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
        early = all_answer(r);
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
    R2_FOR_EACH_ROUND(r)
    round_tick(r, now);
}
