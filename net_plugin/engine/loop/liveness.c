/* Does the peer's process still exist? Asked when no path leads to it any more; under its lock.
 *
 * A host that refuses says that nobody listens there in this moment. So does the host of a process
 * that lives and has not got its listener back, after its NIC's interface was made anew. So does a
 * firewall while its rules are changed, or whoever has the NIC's address for a moment. What ends a
 * process's listeners for good ends all of them at once. Hence one refusal is a beginning: it takes
 * another one CONFIRM_NS later, of every NIC that can have a say. One NIC's refusals do not confirm
 * another's: an attempt may be out for longer than CONFIRM_NS, at a NIC that has refused in one
 * moment and listens in the next. One that has neither answered nor refused for so long may be
 * where the process listens. It is waited for until PARTIAL_NS, which is more than two attempts
 * take, and twice as long while its connection has time to answer. A NIC whose kernel takes
 * connections contradicts, until one is refused there: who stands still does so for longer than one
 * attempt. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop/loop.h"

#define CONFIRM_NS (500 * R2_NS_PER_MS)
#define PARTIAL_NS (2 * R2_NS_PER_S)
#define TAKEN_NS (5 * R2_NS_PER_S) /* a kernel that took a connection does so again before */
#define ASK_NS (200 * R2_NS_PER_MS)
#define ASK_AGAIN_NS (50 * R2_NS_PER_MS) /* after a refusal: the next NIC */
/* For the peer's kernel to answer. Every third question at a NIC is a long one, but only one of
 * each of ours at a time. It is for a slow network, and TCP repeats meanwhile what was lost. */
#define PATIENCE_NS (300 * R2_NS_PER_MS)
#define PATIENCE_LONG_NS (2 * R2_NS_PER_S)
#define PATIENCE_REACHED_NS (10 * R2_NS_PER_S) /* ... where it has, for the process */
#define REFUSED_LEAST 3 /* attempts of each pair, to a process that never was reached */

/* ---- the end */

/* R: messages that wait here whole were acknowledged, so their sender may have closed and left in
 * peace: they can still be received, nothing behind them can. */
static bool outlives_sender(struct r2_conn *c)
{
    if (c->peer->out || c->state != R2_CONN_OPEN || c->next_seq >= c->cum)
        return false;
    c->final_seq = c->cum;
    r2_recv_flushed(c, c->cum); /* nobody is left to be told */
    return true;
}

void r2_peer_gone(struct r2_peer *p, int err, const char *cause)
{
    struct r2_control_event ev = {
        .event = R2_EV_PEER_GONE, .peer_host = p->host, .peer_pid = p->pid, .cause = cause};
    char who[R2_PEER_WHO];

    if (p->life != R2_PEER_ALIVE)
        return;
    p->life = R2_PEER_GONE;
    p->error = err;
    r2_control_peer_state(r2_eng.ctl, p->row, R2_SEG_PEER_GONE, cause);
    if (!r2_list_empty(&p->conn_list)) {
        r2_control_journal(r2_eng.ctl, &ev);
        R2_INFO("peer %s is gone: %s", r2_peer_who(p, who), cause);
        r2_peer_tell_gone(p, cause);
    }
    r2_peer_show(p, r2_peer_now(p));
    R2_FOR_EACH_PATH (path, p)
        r2_path_fail(path, path->gen, -err, cause);
    R2_FOR_EACH_CONN_SAFE (c, p) {
        if (c->state >= R2_CONN_CLOSING) {
            c->word = R2_WORD_HEARD; /* nobody is left to acknowledge it */
            r2_conn_reap(c);
        } else if (!outlives_sender(c)) {
            r2_conn_fail(c, err);
        }
    }
    r2_peer_wake(p);
}

/* ---- refusals */

/* S: what is open was before it was said; what is being opened waits for its answer. */
static void fail_open_ones(struct r2_peer *p)
{
    R2_FOR_EACH_CONN_SAFE (c, p) {
        if (c->state == R2_CONN_OPEN)
            r2_conn_fail(c, -ECONNRESET);
    }
}

/* Once the peer's process has given this one up it never takes that back. Nor has it any other end
 * of the connections that are open here. But a connection that is still being opened may be newer:
 * that process takes it when its application has closed those that failed. And so may be those that
 * were opened over a path that came up after it was said. */
void r2_peer_given_up(struct r2_peer *p, uint64_t asked)
{
    if (p->n_up || asked < p->liveness.lost_at || r2_list_empty(&p->conn_list))
        return;
    if (p->opening)
        fail_open_ones(p);
    else
        r2_peer_gone(p, -ECONNRESET, "its process has given this one up");
}

/* It has refused, and again when a moment was over. */
static bool confirmed(const struct r2_liveness *a, int rnic)
{
    uint64_t from = a->refused_from ? a->nic_refused_from[rnic] : 0;

    return from && a->nic_refused_at[rnic] - from >= CONFIRM_NS;
}

/* One that works, or is left alone as long as another one is left: now it is tried. What fails too
 * often is mostly damped as its link goes down: then nobody can refuse there. */
static bool has_a_say(int lnic)
{
    enum r2_nic_word word = r2_nic_word(lnic);

    return word == R2_NIC_USABLE || (word == R2_NIC_DAMPED && r2_nic_is_up(lnic));
}

/* Every NIC of the peer's that can still have a say has: met before, from one that has one here. */
static bool all_confirmed(const struct r2_peer *p)
{
    bool any = false;

    for (int l = 0; l < r2_local.n; l++) {
        for (int r = 0; r < R2_MAX_NICS && has_a_say(l); r++) {
            if (!r2_pair_speaks(p, l, r))
                continue;
            if (!confirmed(&p->liveness, r))
                return false;
            any = true;
        }
    }
    return any;
}

/* Some kernel over there has taken a connection, and nobody has answered on it yet. */
static void note_taken(struct r2_peer *p, uint64_t now)
{
    uint64_t *taken_at = p->liveness.taken_at;

    R2_FOR_EACH_PATH (path, p) {
        if (r2_pair_speaks(p, path->lnic, path->rnic) && r2_path_is_taken(path))
            taken_at[path->rnic] = now;
    }
    for (int i = 0; i < R2_QUESTIONS; i++) {
        const struct r2_question *q = &p->liveness.by[i];
        const struct r2_ep_params *params = q->ep ? r2_eng.ops->params(q->ep) : NULL;

        if (params && r2_pair_speaks(p, params->local_nic, params->remote_nic) &&
            r2_eng.ops->reached(q->ep))
            taken_at[params->remote_nic] = now;
    }
}

/* One did, and has not refused since. */
static bool may_answer(const struct r2_peer *p, uint64_t now)
{
    for (int r = 0; r < R2_MAX_NICS; r++) {
        uint64_t at = p->liveness.taken_at[r];

        if (at && (now < at || now - at < TAKEN_NS))
            return true;
    }
    return false;
}

static bool refused_for_good(const struct r2_path *path, uint64_t now)
{
    return path->attempt.refused_from && path->attempt.fails >= REFUSED_LEAST &&
           now >= path->attempt.refused_from + CONFIRM_NS;
}

/* S: a process that never was reached: every best pair is refused, again and again. Over another
 * subnet the peer's kernel may refuse on behalf of a NIC that the process does not use. It does not
 * listen there: that proves nothing. */
static bool never_there(const struct r2_peer *p, uint64_t now)
{
    bool any = false;

    R2_FOR_EACH_PATH (path, p) {
        bool counts = path->role == R2_ROLE_FIRST && r2_pair_on_link(p, path->lnic, path->rnic);

        if (r2_past_carried(path->past) || (counts && !refused_for_good(path, now)))
            return false;
        any |= counts;
    }
    return any;
}

/* Refusals have gone on for that long, and still did a moment ago. */
static bool went_on(const struct r2_liveness *a, uint64_t needed, uint64_t now)
{
    return a->refused_from && a->refused_at - a->refused_from >= needed &&
           now < a->refused_at + R2_REFUSAL_STALE_NS;
}

/* R: a NIC that has not refused for certain is being given time: the others' refusals have to go on
 * for longer meanwhile. */
static bool asked_patiently(const struct r2_peer *p)
{
    for (int l = 0; l < r2_local.n; l++) {
        const struct r2_ep *ep = p->liveness.by[R2_MAX_NICS + l].ep;

        if (ep && !confirmed(&p->liveness, r2_eng.ops->params(ep)->remote_nic))
            return true;
    }
    return false;
}

void r2_peer_judge_refusals(struct r2_peer *p, uint64_t now)
{
    const struct r2_liveness *a = &p->liveness;
    uint64_t needed;

    if (p->n_up || p->life != R2_PEER_ALIVE)
        return;
    note_taken(p, now);
    needed = all_confirmed(p) ? CONFIRM_NS : asked_patiently(p) ? 2 * PARTIAL_NS : PARTIAL_NS;
    if (!went_on(a, needed, now) && !(p->out && never_there(p, now)))
        return;
    if (may_answer(p, now))
        return;
    if (p->out && never_there(p, now)) {
        r2_noway_refused(p, now);
        r2_peer_gone(p, -ECONNRESET, "never reached: its host refuses");
    } else {
        r2_peer_gone(p, -ECONNRESET, "process gone: its host refuses, or another process answers");
    }
}

/* ---- questions of the accepting side */

bool r2_peer_may_try(const struct r2_peer *p, int nic)
{
    enum r2_nic_word word = r2_nic_word(nic);

    return word == R2_NIC_USABLE || word == R2_NIC_FAILED ||
           (word == R2_NIC_DAMPED && !r2_peer_left(p, R2_VIA_VERBS));
}

static uint64_t patience(const struct r2_question *q)
{
    return r2_eng.ops->reached(q->ep) ? PATIENCE_REACHED_NS : q->patience;
}

static void end_endpoint(struct r2_peer *p, struct r2_question *q)
{
    struct r2_dying *d = q->end_memory;

    *d = (struct r2_dying){.ep = q->ep};
    r2_list_add_tail(&p->dying, &d->node);
    q->ep = NULL;
    q->end_memory = NULL;
}

/* A question that gives the network time does not keep its NIC from asking others meanwhile. */
static void step_aside(struct r2_liveness *a, int l, uint64_t now)
{
    struct r2_question *q = &a->by[l], *aside = &a->by[R2_MAX_NICS + l], was = *q;

    if (!q->ep || aside->ep || q->patience != PATIENCE_LONG_NS || now - q->at < PATIENCE_NS)
        return;
    *q = (struct r2_question){.end_memory = aside->end_memory, .asked = was.asked};
    *aside = was;
}

static void give_up(struct r2_peer *p, uint64_t now)
{
    for (int i = 0; i < R2_QUESTIONS; i++) {
        struct r2_question *q = &p->liveness.by[i];

        if (q->ep && now - q->at >= patience(q))
            end_endpoint(p, q);
    }
    for (int l = 0; l < r2_local.n; l++)
        step_aside(&p->liveness, l, now);
}

/* The peer's kernel has answered, its process not yet: it is not asked by another NIC as well. */
static bool process_is_slow(const struct r2_peer *p)
{
    for (int i = 0; i < R2_QUESTIONS; i++) {
        const struct r2_question *q = &p->liveness.by[i];

        if (q->ep && r2_eng.ops->reached(q->ep))
            return true;
    }
    return false;
}

/* Its refusal would tell nothing: it has refused often enough, or only just now. */
static bool settled(const struct r2_liveness *a, int rnic, uint64_t now)
{
    uint64_t from = a->nic_refused_from[rnic];

    return confirmed(a, rnic) || (from && now - from < CONFIRM_NS);
}

/* Whether the NIC can ask now, and at which of the peer's; where a refusal would count, or
 * (`anyone`) its first choice. Those that can tell something new and the others take turns: a
 * silent one must not keep those from being asked that go on refusing, or are back. */
static bool whom(const struct r2_peer *p, int l, bool anyone, uint64_t now, int *rnic)
{
    const struct r2_liveness *a = &p->liveness;
    const struct r2_ep *aside = a->by[R2_MAX_NICS + l].ep;
    int order[R2_MAX_NICS], who[2][R2_MAX_NICS], n, turn = (int)(a->by[l].asked % 2);
    int being_asked = aside ? r2_eng.ops->params(aside)->remote_nic : -1;
    unsigned many[2] = {0, 0}, round = a->by[l].asked; /* [1]: settled */

    if (a->by[l].ep || !r2_peer_may_try(p, l))
        return false;
    n = r2_pairs_candidates(p, l, R2_VIA_TCP, order);
    for (int i = 0; i < n; i++) {
        bool old = a->refused_from && settled(a, order[i], now);

        if (order[i] != being_asked && r2_pair_speaks(p, l, order[i]))
            who[old][many[old]++] = order[i];
    }
    if (!n || (!many[0] && !many[1] && (!anyone || aside)))
        return false;
    if (many[0] && many[1])
        round /= 2;
    else
        turn = many[1] != 0;
    *rnic = many[turn] ? who[turn][round % many[turn]] : order[0];
    return true;
}

static void ask(struct r2_peer *p, int l, int rnic, uint64_t now)
{
    struct r2_ep_params params = {.initiator = true, .probe = true, .owner = p};
    struct r2_question *q = &p->liveness.by[l];

    if (!q->end_memory && !(q->end_memory = malloc(sizeof(*q->end_memory))))
        return; /* memory that is there when it has to end */
    q->at = now;
    q->asked++;
    q->patience = PATIENCE_NS;
    if (++p->liveness.nic_asked[rnic] >= 3 && !p->liveness.by[R2_MAX_NICS + l].ep) {
        q->patience = PATIENCE_LONG_NS;
        p->liveness.nic_asked[rnic] = 0;
    }
    params.local_nic = (uint8_t)l;
    params.remote_nic = (uint8_t)rnic;
    params.remote_addr = *r2_pair_addr(p, l, rnic);
    memcpy(params.local_process, r2_eng.process, 16);
    memcpy(params.remote_process, p->id, 16);
    memcpy(params.secret, p->secret, 16);
    r2_peer_get(p); /* the endpoint's, until `released` */
    if (r2_eng.ops->connect(&params, &q->ep) == -ECONNREFUSED) {
        r2_peer_refused(p, l, rnic, now);
        p->liveness.next_at = now + ASK_AGAIN_NS;
    }
}

/* Says where its NIC is now, besides. One NIC after the other, each with a question of its own, so
 * that a hole does not keep the others from being asked. Once the peer's host has refused, all ask
 * at once where that would tell something new: of many NICs each has to be asked twice. */
void r2_peer_ask(struct r2_peer *p, uint64_t now)
{
    unsigned nics = (unsigned)r2_local.n;
    bool confirm = p->liveness.refused_from;
    int rnic;

    give_up(p, now);
    if (p->out || p->life != R2_PEER_ALIVE || p->n_up || r2_list_empty(&p->conn_list) ||
        now < p->liveness.next_at || process_is_slow(p))
        return;
    p->liveness.next_at = now + ASK_NS;
    for (int l = 0; confirm && l < (int)nics; l++) {
        if (whom(p, l, false, now, &rnic) && !settled(&p->liveness, rnic, now))
            ask(p, l, rnic, now);
    }
    for (unsigned i = 0; i < 2 * nics; i++) { /* first round: whose refusal would count */
        int l = (int)((p->liveness.turn + i) % nics);

        if (!whom(p, l, i >= nics, now, &rnic))
            continue;
        p->liveness.turn = (unsigned)l + 1;
        ask(p, l, rnic, now);
        return;
    }
}

void r2_peer_asked(struct r2_peer *p, struct r2_ep *ep, int err, const struct r2_ep_health *h)
{
    const struct r2_ep_params *params = r2_eng.ops->params(ep);
    struct r2_question *q = &p->liveness.by[params->local_nic];
    uint64_t now = r2_peer_now(p);

    if (q->ep != ep)
        q += R2_MAX_NICS;
    if (q->ep != ep)
        return;
    end_endpoint(p, q);
    if (h->refused || h->other_process) {
        r2_peer_refused(p, params->local_nic, params->remote_nic, now);
        p->liveness.next_at = now + ASK_AGAIN_NS;
        r2_peer_judge_refusals(p, now);
    } else if (h->there || err == EALREADY) {
        r2_peer_answers(p);
    }
    if (h->given_up)
        r2_peer_given_up(p, q->at);
}

bool r2_peer_is_asking(const struct r2_peer *p)
{
    for (int i = 0; i < R2_QUESTIONS; i++) {
        if (p->liveness.by[i].ep)
            return true;
    }
    return false;
}

void r2_liveness_free(struct r2_liveness *a)
{
    for (int i = 0; i < R2_QUESTIONS; i++)
        free(a->by[i].end_memory);
}
