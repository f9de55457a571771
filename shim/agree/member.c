/* What the service thread does for one rank of one communicator: registers it, carries the
 * machine's messages, drives proposals, has it ask (ask.c) while it waits, buries what is done
 * for. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agree/internal.h"
#include "util/clock.h"

#define R2_MEMBER_REPEAT_NS R2_NS_PER_S        /* a proposal, to who has not answered */
#define R2_MEMBER_GIVE_UP_NS (5 * R2_NS_PER_S) /* then the leader aborts it */
#define R2_MEMBER_TRIES 6                      /* with ever later indices */
#define R2_MEMBER_PLACES 3                     /* choices of one, see there */
#define R2_MEMBER_TOMB_NS (30 * R2_NS_PER_S)   /* the dead still answer */

/* --- life --------------------------------------------------------------------------------- */

void r2_agree_member_free(struct r2_agree *a)
{
    pthread_mutex_destroy(&a->lock);
    pthread_cond_destroy(&a->wake);
    r2_agree_roster_free(&a->roster);
    free(a->machine.promises);
    free(a->report_seen);
    free(a->early);
    r2_agree_exchange_free(a);
    free(a->garbage);
    free(a->wanted);
    free(a->plan);
    free(a);
}

/* --- sending ------------------------------------------------------------------------------ */

static void r2_member_say_all(struct r2_agree *a, const struct r2_agree_msg *msg)
{
    for (int r = 0; r < a->nranks; r++) {
        if (r != a->rank) {
            r2_agree_member_say(a, (uint32_t)r, msg);
        }
    }
}

/* --- the machine -------------------------------------------------------------------------- */

/* Member lock held: what a step of the machine means for the lookup. */
static void r2_member_settle(struct r2_agree *a, const struct r2_agree_out *out)
{
    if (out->aborted) {
        r2_agree_member_drop(a, out->aborted, false, 0);
    }
    if (a->machine.failed && a->state == R2_AGREE_READY) {
        a->state = R2_AGREE_FAILED;
        snprintf(a->why, sizeof(a->why), "a plan was decided without this rank's promise");
    }
    r2_agree_member_fence(a);
    if (out->promised || out->committed || out->aborted || a->machine.failed) {
        pthread_cond_broadcast(&a->wake);
    }
}

static void r2_member_decided(struct r2_agree *a, uint64_t epoch, uint64_t at, bool committed,
                              const char *why)
{
    if (a->ops && a->ops->decided && !a->destroyed_ns) {
        a->ops->decided(a->user, epoch, at, committed, why);
    }
}

static void r2_member_enter(struct r2_agree *a, enum r2_agree_phase phase)
{
    pthread_mutex_lock(&a->lock);
    a->phase = phase;
    pthread_mutex_unlock(&a->lock);
}

/* Before the caller hears of the end: it may propose again from its callback. */
static void r2_member_forget_plan(struct r2_agree *a)
{
    free(a->plan);
    a->plan = NULL;
    a->plan_len = 0;
    r2_member_enter(a, R2_PHASE_NONE);
}

/* Leader: a proposal has ended. A refusal is tried again with a later index: the plan was accepted
 * everywhere or the rank that cannot have it says so again. */
static void r2_member_concluded(struct r2_agree *a, const struct r2_agree_out *out, uint64_t at,
                                bool refused, const char *why, uint64_t now)
{
    uint64_t took = now - a->phase_ns;
    bool closed;

    pthread_mutex_lock(&a->lock);
    closed = a->machine.closed;
    a->stats.commits += out->concluded_well;
    a->stats.aborts += !out->concluded_well;
    if (out->concluded_well) {
        a->stats.commit_ns = took;
    }
    pthread_mutex_unlock(&a->lock);
    if (out->concluded_well) {
        r2_agree_horizon_committed(&a->horizon, took, now);
    } else if (refused && a->tries < R2_MEMBER_TRIES && !closed) {
        a->tries++;
        r2_agree_horizon_refused(&a->horizon, now);
        r2_member_enter(a, R2_PHASE_WATCH); /* what it saw before the first try still counts */
        return;
    }
    r2_member_forget_plan(a);
    r2_member_decided(a, out->concluded, at, out->concluded_well, why);
}

/* Sends what a step wants sent, and concludes. No lock held. */
static void r2_member_act(struct r2_agree *a, int sender, const struct r2_agree_out *out,
                          uint64_t at, bool refused, const char *why, uint64_t now)
{
    if (out->to == R2_AGREE_SENDER) {
        r2_agree_member_say(a, (uint32_t)sender, &out->msg);
    } else if (out->to == R2_AGREE_EVERYBODY) {
        r2_member_say_all(a, &out->msg);
    }
    if (out->promised && !out->committed) {
        r2_agree_ask_begin(a, now);
    }
    if (out->concluded) {
        r2_member_concluded(a, out, at, refused, why, now);
    }
}

/* May this rank promise the plan? Calls the application's side, without a lock. */
static bool r2_member_accept(struct r2_agree *a, uint64_t epoch, const void *plan, size_t len)
{
    void *object = NULL;
    bool willing;

    if (!a->ops || !a->ops->accept || a->destroyed_ns ||
        a->ops->accept(a->user, epoch, plan, len, &object) != 0) {
        return false;
    }
    pthread_mutex_lock(&a->lock);
    willing = a->nobjects < R2_AGREE_OBJECTS;
    if (willing) {
        a->objects[a->nobjects++] = (struct r2_agree_object){epoch, object};
    } else {
        r2_agree_member_discard(a, object);
    }
    pthread_mutex_unlock(&a->lock);
    return willing;
}

/* Member lock held: no collective from `at` on begins without asking the machine; returns the
 * index of the next one (agree.c has the argument). */
static uint64_t r2_member_hold(struct r2_agree *a, uint64_t at)
{
    if (at < atomic_load(&a->fence)) {
        atomic_store(&a->fence, at);
    }
    return atomic_load(&a->next);
}

static void r2_member_on_machine(struct r2_agree *a, int from, const struct r2_agree_frame *f,
                                 const uint8_t *payload, uint64_t now)
{
    struct r2_agree_out out;
    struct r2_agree_msg msg;
    const uint8_t *plan;
    uint64_t next, at;
    size_t len;
    bool willing = false;

    if (r2_agree_msg_decode(payload, f->len, &msg, &plan, &len) != 0) {
        return;
    }
    next = atomic_load(&a->next);
    pthread_mutex_lock(&a->lock);
    a->stats.received++;
    willing = r2_agree_machine_would_promise(&a->machine, from, &msg, next);
    pthread_mutex_unlock(&a->lock);
    willing = willing && r2_member_accept(a, msg.epoch, plan, len);

    pthread_mutex_lock(&a->lock);
    at = a->machine.proposal.at;
    next = msg.type == R2_AGREE_PROPOSE ? r2_member_hold(a, msg.at) : atomic_load(&a->next);
    r2_agree_machine_receive(&a->machine, from, &msg, next, willing, &out);
    if (willing && !out.promised) { /* the index was reached meanwhile */
        r2_agree_member_drop(a, msg.epoch, false, 0);
    }
    r2_member_settle(a, &out);
    pthread_mutex_unlock(&a->lock);
    if (msg.type == R2_AGREE_PROMISE || msg.type == R2_AGREE_REFUSE) {
        r2_agree_horizon_heard(&a->horizon, next, msg.next, now);
    }
    /* A rank that was past the index may agree to a later one. */
    r2_member_act(a, from, &out, at, msg.type == R2_AGREE_REFUSE && msg.next >= at,
                  "a rank has refused it", now);
    r2_agree_member_collect(a);
}

/* --- leader ------------------------------------------------------------------------------- */

/* Takes over what r2_agree_propose left. */
static void r2_member_take_wanted(struct r2_agree *a, uint64_t now)
{
    pthread_mutex_lock(&a->lock);
    if (a->wanted && a->phase == R2_PHASE_NONE && a->state == R2_AGREE_READY) {
        a->plan = a->wanted;
        a->plan_len = a->wanted_len;
        a->wanted = NULL;
        a->stats.proposals++;
        a->phase = R2_PHASE_WATCH;
        a->phase_ns = now;
        a->tries = 0;
    }
    pthread_mutex_unlock(&a->lock);
    if (a->phase == R2_PHASE_WATCH && a->phase_ns == now) {
        r2_agree_horizon_watch(&a->horizon, atomic_load(&a->next), now);
    }
}

/* Member lock held: the index N of the proposal, and *next, for which the fence stands. The
 * application may pass N between the choice and the fence. From then on it waits for the lock at
 * its next lookup. So it counts one group more at most, and the third choice is sure. */
static uint64_t r2_member_place(struct r2_agree *a, uint64_t now, uint64_t *next)
{
    uint64_t at;

    for (int i = 0; i < R2_MEMBER_PLACES; i++) {
        at = r2_agree_horizon_pick(&a->horizon, atomic_load(&a->next), now);
        at = at > a->machine.committed_at ? at : a->machine.committed_at + 1;
        *next = r2_member_hold(a, at);
        if (*next < at) {
            break;
        }
    }
    return at;
}

static void r2_member_propose(struct r2_agree *a, uint64_t now)
{
    struct r2_agree_out out;
    uint64_t at, epoch, next;
    bool willing;
    int rc = 0;

    pthread_mutex_lock(&a->lock);
    epoch = a->machine.decided + 1;
    pthread_mutex_unlock(&a->lock);
    willing = r2_member_accept(a, epoch, a->plan, a->plan_len);
    pthread_mutex_lock(&a->lock);
    at = r2_member_place(a, now, &next);
    out = (struct r2_agree_out){0};
    rc = willing ? r2_agree_machine_propose(&a->machine, at, next, &out) : -1;
    if (rc != 0) {
        r2_agree_member_drop(a, epoch, false, 0);
    }
    r2_member_settle(a, &out);
    pthread_mutex_unlock(&a->lock);
    a->phase_ns = now;
    a->repeat_ns = now + R2_MEMBER_REPEAT_NS;
    if (rc != 0) {
        r2_member_forget_plan(a);
        r2_member_decided(a, epoch, at, false,
                          willing ? "the leader cannot propose now" : "the leader has refused it");
        return;
    }
    r2_member_enter(a, R2_PHASE_PROPOSED);
    r2_member_act(a, a->rank, &out, at, false, "", now);
}

static void r2_member_repeat(struct r2_agree *a, uint64_t now)
{
    struct r2_agree_msg msg;

    if (now < a->repeat_ns) {
        return;
    }
    a->repeat_ns = now + R2_MEMBER_REPEAT_NS;
    for (int r = 1; r < a->nranks; r++) {
        bool missing;

        pthread_mutex_lock(&a->lock);
        missing = r2_agree_machine_repeat(&a->machine, &msg) &&
                  !r2_agree_machine_has_promise(&a->machine, r);
        pthread_mutex_unlock(&a->lock);
        if (missing) {
            r2_agree_member_say(a, (uint32_t)r, &msg);
        }
    }
}

static void r2_member_give_up(struct r2_agree *a, uint64_t now)
{
    struct r2_agree_out out;
    char why[R2_AGREE_WHY];
    int first = -1;
    uint64_t at;

    pthread_mutex_lock(&a->lock);
    at = a->machine.proposal.at;
    for (int r = 0; r < a->nranks && first < 0; r++) {
        first = r2_agree_machine_has_promise(&a->machine, r) ? -1 : r;
    }
    snprintf(why, sizeof(why), "%d of %d ranks have not answered, rank %d among them",
             a->nranks - a->machine.npromises, a->nranks, first);
    r2_agree_machine_abandon(&a->machine, &out);
    r2_member_settle(a, &out);
    pthread_mutex_unlock(&a->lock);
    r2_member_act(a, a->rank, &out, at, false, why, now);
}

static void r2_member_lead(struct r2_agree *a, uint64_t now)
{
    uint64_t patience =
        a->timeout_ns / 4 < R2_MEMBER_GIVE_UP_NS ? a->timeout_ns / 4 : R2_MEMBER_GIVE_UP_NS;

    r2_member_take_wanted(a, now);
    if (a->phase == R2_PHASE_WATCH) {
        if (a->tries > 0 || now >= a->phase_ns + R2_HORIZON_WATCH_NS) {
            r2_member_propose(a, now);
        }
    }
    if (a->phase == R2_PHASE_PROPOSED && now >= a->phase_ns + patience) {
        r2_member_give_up(a, now);
    } else if (a->phase == R2_PHASE_PROPOSED) {
        r2_member_repeat(a, now);
    }
    if (a->phase == R2_PHASE_WATCH) {
        a->deadline_ns = a->phase_ns + R2_HORIZON_WATCH_NS;
    } else if (a->phase == R2_PHASE_PROPOSED) {
        uint64_t end = a->phase_ns + patience;

        a->deadline_ns = a->repeat_ns < end ? a->repeat_ns : end;
    }
}

/* --- turns -------------------------------------------------------------------------------- */

void r2_agree_member_frame(struct r2_agree *a, const uint8_t process[16],
                           const struct r2_agree_frame *f, const uint8_t *payload)
{
    uint64_t now = r2_agree_service_now();

    if (f->kind == R2_FRAME_ROSTER) {
        r2_agree_join_roster(a, f, payload);
        r2_agree_member_turn(a, now);
        return;
    }
    if (f->kind == R2_FRAME_OFF) {
        r2_agree_join_off(a, f, payload);
        r2_agree_member_turn(a, now);
        return;
    }
    if (!a->roster.seats && f->kind == R2_FRAME_REPORT) {
        r2_agree_join_early(a, process, f, payload);
        return;
    }
    if (!r2_agree_join_knows(a, f->from, process)) {
        return;
    }
    if (f->from == R2_AGREE_LEADER) {
        a->leader_heard_ns = now;
    }
    if (f->kind == R2_FRAME_MACHINE) {
        r2_member_on_machine(a, (int)f->from, f, payload, now);
        r2_agree_member_turn(a, now);
    } else if (f->kind == R2_FRAME_REPORT) {
        r2_agree_join_reported(a, f->from, f, payload);
    } else if (f->kind == R2_FRAME_FAILED) {
        r2_agree_tell_frame(a, f, payload, now);
    } else if (f->kind == R2_FRAME_INVITE || f->kind == R2_FRAME_OFFER ||
               f->kind == R2_FRAME_OFFERS) {
        r2_agree_exchange_frame(a, f, payload);
    }
}

/* Aborted, failed or destroyed: promises nothing more; a leader's proposal is aborted. */
static void r2_member_close(struct r2_agree *a, uint64_t now)
{
    struct r2_agree_out out;
    uint64_t at;

    pthread_mutex_lock(&a->lock);
    at = a->machine.proposal.at;
    r2_agree_machine_close(&a->machine, &out);
    r2_member_settle(a, &out);
    pthread_mutex_unlock(&a->lock);
    r2_member_act(a, a->rank, &out, at, false, "the leader's communicator has ended", now);
    if (a->phase == R2_PHASE_WATCH) {
        r2_member_forget_plan(a);
        r2_member_decided(a, 0, 0, false, "the leader's communicator has ended");
    }
}

/* Releases everything of the application's; the rest goes on answering for a while. */
static void r2_member_bury(struct r2_agree *a, uint64_t now)
{
    r2_agree_member_to_root(a, R2_FRAME_LEAVE, NULL, 0);
    pthread_mutex_lock(&a->lock);
    r2_agree_member_drop(a, UINT64_MAX, true, 0);
    a->object = NULL;
    pthread_mutex_unlock(&a->lock);
    r2_agree_member_collect(a);
    a->destroyed_ns = now;
    pthread_mutex_lock(&a->lock);
    a->ops = NULL;
    r2_agree_live(a, R2_LIFE_GONE);
    pthread_cond_broadcast(&a->wake);
    pthread_mutex_unlock(&a->lock);
}

/* False: its time is over. */
static bool r2_member_work(struct r2_agree *a, uint64_t now)
{
    enum r2_agree_state state;
    bool dying, ended;

    a->deadline_ns = UINT64_MAX;
    if (a->destroyed_ns) {
        a->deadline_ns = a->destroyed_ns + R2_MEMBER_TOMB_NS;
        return now < a->deadline_ns;
    }
    r2_agree_member_collect(a);
    pthread_mutex_lock(&a->lock);
    state = a->state;
    dying = a->life >= R2_LIFE_DYING;
    ended = (a->life != R2_LIFE_ON || a->machine.failed) && !a->machine.closed;
    pthread_mutex_unlock(&a->lock);
    if (ended) {
        r2_member_close(a, now);
    }
    if (dying) {
        r2_member_bury(a, now);
        a->deadline_ns = now + R2_MEMBER_TOMB_NS;
        return true;
    }
    if (state == R2_AGREE_JOINING) {
        r2_agree_join_register(a, now);
    } else if (state == R2_AGREE_READY) {
        r2_agree_join_report(a);
        if (a->rank == R2_AGREE_LEADER) {
            r2_member_lead(a, now);
        }
        r2_agree_ask_turn(a, now);
        r2_agree_exchange_turn(a, now);
    }
    return true;
}

void r2_agree_member_turn(struct r2_agree *a, uint64_t now)
{
    if (r2_member_work(a, now)) {
        r2_agree_tell_turn(a, now);
    } else {
        r2_agree_service_remove(a);
        r2_agree_member_free(a);
    }
}
