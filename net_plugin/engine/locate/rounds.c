/* Rounds are begun by failed paths, advanced every 10 ms, and end. */
#include <stddef.h>
#include <string.h>

#include "engine/locate/round.h"

#define LOOK_NS (50 * R2_NS_PER_MS) /* between questions about the carrier */

struct r2_round r2_rounds[R2_ROUNDS];
struct r2_nodeseg *r2_locate_seg;

struct r2_round *r2_round_open(int lnic)
{
    R2_FOR_EACH_ROUND(r)
    {
        if (r->lnic == lnic && !r->closed)
            return r;
    }
    return NULL;
}

static struct r2_round *new_round(int lnic, uint64_t now)
{
    for (int i = 0; i < R2_ROUNDS; i++) {
        struct r2_round *r = &r2_rounds[i];

        if (r->phase != R2_PHASE_FREE)
            continue;
        memset(r, 0, offsetof(struct r2_round, ev));
        r2_evidence_init(&r->ev);
        r->phase = R2_PHASE_SETTLE;
        r->lnic = lnic;
        r->began = now;
        return r;
    }
    return NULL;
}

void r2_round_free(struct r2_round *r, uint64_t now)
{
    if (!r->closed)
        r2_targets_close(r, now);
    R2_FOR_EACH_SUSPECT (s, r)
        r2_peer_put(s->peer);
    r->phase = R2_PHASE_FREE;
}

/* ---- a failed path */

static bool has_suspect(const struct r2_round *r, const struct r2_peer *p, int rnic)
{
    R2_FOR_EACH_SUSPECT (s, r) {
        if (s->peer == p && s->rnic == rnic)
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
    s->heard = false;
    r2_peer_lock(p);
    s->addr = p->rnics[rnic].addr;
    memcpy(s->name, p->rnics[rnic].name, sizeof(s->name));
    memcpy(s->host, p->host, sizeof(s->host));
    s->pid = p->pid;
    r2_locate_label(s->label, s->name, p->host);
    r2_peer_leave(p);
    if (r->phase == R2_PHASE_RUN)
        r2_target_add(r, r->lnic, &s->addr, rnic, p->id, s->label, true);
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
    r = r2_round_open(lnic);
    if (!r) /* none, or one that has seen enough */
        r = new_round(lnic, at);
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

/* The paths that failed together are known. */
static void settled(struct r2_round *r, uint64_t now)
{
    drop_suspects(r);
    if (!r->n_suspects || !r2_nic_usable(r->lnic)) {
        r2_round_free(r, now);
        return;
    }
    r->phase = R2_PHASE_RUN;
    r->next_try = now;
    r->close_at = now + R2_WINDOW_NS;
    r->deadline = now + R2_ANSWER_NS;
    R2_FOR_EACH_SUSPECT (s, r)
        r2_target_add(r, r->lnic, &s->addr, s->rnic, s->peer->id, s->label, true);
    r2_targets_collect(r);
    r2_count(&r2_eng.n->locate_rounds, 1);
}

void r2_rounds_nic(int nic, uint64_t now)
{
    R2_FOR_EACH_ROUND(r)
    {
        if (r->lnic == nic && !r2_nic_usable(nic))
            r2_round_free(r, now); /* the reason is known now */
    }
    r2_verdict_nic(nic, now);
}

/* ---- time */

/* Every path in question answers again: no need to wait for the rest. */
static bool all_answer(const struct r2_round *r)
{
    int n = 0;

    R2_FOR_EACH_SUSPECT (s, r) {
        R2_FOR_EACH_TARGET (t, r)
            n += t->lnic == r->lnic && r2_same_nic(&t->addr, &s->addr) &&
                 t->outcome == R2_SEEN_ANSWERED;
    }
    return r->n_suspects && n == r->n_suspects;
}

static bool all_heard(const struct r2_round *r)
{
    R2_FOR_EACH_SUSPECT (s, r) {
        if (!s->heard)
            return false;
    }
    return true;
}

/* A carrier that is gone is the reason, and its event may come a second late. Asked when a round
 * begins, and again while it runs: the answer is there, as a rule, when the paths that failed
 * together are known, and says the rest by itself (r2_rounds_nic). If the kernel does not answer, a
 * round goes on by what its probes see, which without carrier is nothing. */
static void look(struct r2_round *r, uint64_t now)
{
    if (now - r->looked_at < LOOK_NS)
        return;
    r->looked_at = now;
    r2_niclink_ask(r->lnic);
}

static void close_round(struct r2_round *r, uint64_t now)
{
    r2_targets_close(r, now);
    r->closed = true;
    r2_targets_evidence(r);
    r2_round_tell(r, now);
}

static void round_tick(struct r2_round *r, uint64_t now)
{
    bool over;

    look(r, now);
    if (r->phase == R2_PHASE_SETTLE && now - r->began >= R2_SETTLE_NS)
        settled(r, now);
    if (r->phase != R2_PHASE_RUN)
        return;
    if (!r->closed)
        r2_targets_tick(r, now);
    over = all_answer(r);
    if (!r->closed && (over || r2_targets_done(r) || now >= r->close_at))
        close_round(r, now);
    if (!r->closed || !(over || all_heard(r) || now >= r->deadline))
        return;
    r2_round_conclude(r, now);
    r2_round_free(r, now);
}

bool r2_rounds_tick(uint64_t now)
{
    bool any = false;

    R2_FOR_EACH_ROUND(r)
    {
        round_tick(r, now);
        any |= r->phase != R2_PHASE_FREE;
    }
    return any;
}
