#define _GNU_SOURCE
#include "comms/replay.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comms/follow_inside.h"
#include "util/clock.h"
#include "util/log.h"

static uint64_t next_hold(const struct r2_follow_trace *t)
{
    return t->was && t->taken < t->was->nplans ? t->was->plans[t->taken].from : UINT64_MAX;
}

static void begin_replay(struct r2_follow *f)
{
    struct r2_follow_trace *t = &f->trace;

    t->was = f->unable ? NULL : r2_tracing_recorded(t->name); /* that was said */
    if (t->was && (t->was->nranks != f->nranks || t->was->rank != f->rank))
        t->was = NULL;
    if (!t->was && !f->unable && !r2_tracing_unusable())
        R2_WARN_ONCE("R2CCL_PLAN_TRACE: a communicator of %d ranks was not made in the run that %s "
                     "is of, or not in this order: its AllReduces are NCCL's own choice",
                     f->nranks, r2_tracing_path());
    t->hold_at = next_hold(t);
    atomic_store(&t->over, t->was == NULL);
}

int r2_trace_begin(struct r2_follow *f, struct r2_follow *parent, uint64_t salt)
{
    struct r2_follow_trace *t = &f->trace;
    enum r2_tracing mode = f->nranks > 1 ? r2_tracing_mode(f->rank) : R2_TRACING_OFF;

    t->mode = mode;
    t->hold_at = UINT64_MAX;
    if (parent)
        t->name = r2_trace_name(parent->trace.name, atomic_load(&parent->trace.children), salt,
                                f->nranks, f->rank, f->device);
    else if (mode != R2_TRACING_OFF)
        t->name = r2_tracing_root(f->nranks, f->rank, f->device);
    if (mode == R2_TRACING_RECORD) {
        r2_tracing_put_comm(&(struct r2_trace_comm){
            .name = t->name, .run = f->comm->id, .nranks = f->nranks, .rank = f->rank});
    }
    if (mode == R2_TRACING_REPLAY)
        begin_replay(f);
    return mode == R2_TRACING_REPLAY && f->rank == 0 ? r2_replay_init(&t->lead, t->was, f->nranks)
                                                     : 0;
}

void r2_trace_end(struct r2_follow *f)
{
    r2_replay_free(&f->trace.lead);
}

uint64_t r2_trace_mark(const struct r2_follow *f)
{
    const struct r2_follow_trace *t = &f->trace;

    if (!r2_trace_replays(t))
        return 0;
    if (!t->was)
        return f->unable ? 3 : r2_tracing_unusable() ? 1 : 2;
    return t->was->run | 4;
}

uint32_t r2_trace_words(const struct r2_follow *f)
{
    const struct r2_follow_trace *t = &f->trace;
    uint32_t words;

    if (!t->was)
        return 0;
    words = (uint32_t)(t->was->nplans % R2_REPLAY_COUNTS) * (R2_FOLLOW_COUNT & -R2_FOLLOW_COUNT);
    return words | (atomic_load(&t->gave_up) ? R2_FOLLOW_GAVE_UP : 0);
}

/* ---- the application's thread */

static bool more(void *user)
{
    struct r2_follow *f = user;

    return !atomic_load(&f->trace.over);
}

static void give_up(struct r2_follow *f)
{
    struct r2_follow_trace *t = &f->trace;

    R2_WARN("communicator %016llx: the replay of %s has ended before plan %d of %d, at operation "
            "%llu: it has not come in time; AllReduce goes back to NCCL's "
            "own choice on all ranks",
            (unsigned long long)f->comm->id, r2_tracing_path(), t->taken + 1, t->was->nplans,
            (unsigned long long)r2_agree_index(f->agree));
    r2_watch_journal(R2_REPLAY_ENDED ": a rank has waited for a plan in vain");
    atomic_store(&t->gave_up, true);
    atomic_store(&t->over, true);
    r2_watch_wake();
}

void r2_trace_hold(struct r2_follow *f)
{
    struct r2_follow_trace *t = &f->trace;

    if (!r2_trace_again(f))
        return;
    switch (r2_agree_hold(f->agree, t->hold_at, more, f)) {
    case -ETIMEDOUT:
        give_up(f);
        break;
    case -ESTALE: /* the end of the replay is on its way: it says why */
        atomic_store(&t->gave_up, true);
        atomic_store(&t->over, true);
        break;
    case -ENOTCONN: /* with its parent, say, for which that was said */
        atomic_store(&t->over, true);
        break;
    default:
        break; /* the lookup says what is wrong */
    }
}

bool r2_trace_again(struct r2_follow *f)
{
    return r2_agree_index(f->agree) >= f->trace.hold_at && more(f);
}

static bool ends(const struct r2_plan_table *table)
{
    return strncmp(table->reason, R2_REPLAY_ENDED, strlen(R2_REPLAY_ENDED)) == 0;
}

void r2_trace_taken(struct r2_follow *f, const struct r2_agree_view *view)
{
    struct r2_follow_trace *t = &f->trace;
    const struct r2_plan_table *table = view->object;

    if (t->mode == R2_TRACING_RECORD)
        r2_tracing_put_plan(t->name, view->index, table);
    if (!r2_trace_replays(t))
        return;
    if (ends(table)) {
        atomic_store(&t->over, true);
        r2_watch_journal(table->reason);
        if (f->rank == 0)
            R2_WARN("communicator %016llx, R2CCL_PLAN_TRACE, %s; from operation %llu on AllReduce "
                    "is NCCL's own choice on all ranks",
                    (unsigned long long)f->comm->id, table->reason,
                    (unsigned long long)view->index);
        return;
    }
    t->taken++;
    t->hold_at = next_hold(t);
    if (f->rank == 0 && t->was && t->taken == t->was->nplans) {
        r2_watch_journal("replay complete: all that rank 0 recorded is in force");
        R2_WARN("communicator %016llx: the replay of %s is complete at operation %llu; the last "
                "plan stays if all ranks recorded as many, and nothing is planned for what happens "
                "in this run",
                (unsigned long long)f->comm->id, r2_tracing_path(),
                (unsigned long long)view->index);
    }
}

/* ---- the service thread */

/* What comes next follows from the index; here only what it is. */
bool r2_trace_accept(struct r2_follow *f, const struct r2_plan_table *table)
{
    const struct r2_trace_comm *was = f->trace.was;

    if (!r2_trace_replays(&f->trace))
        return true;
    if (ends(table))
        return true; /* once it is promised, hold returns */
    for (int p = 0; was && p < was->nplans; p++)
        if (r2_trace_same(was->plans[p].table, table))
            return !atomic_load(&f->trace.over);
    return false;
}

void r2_trace_off(struct r2_follow *f)
{
    if (!r2_trace_replays(&f->trace))
        return;
    R2_WARN_ONCE("R2CCL_PLAN_TRACE: %s is not replayed: every rank must replay its own trace of "
                 "the same run, with as many ranks",
                 r2_tracing_path());
    atomic_store(&f->trace.over, true);
    r2_agree_nudge(f->agree);
}

/* ---- leader */

static void heed_made(struct r2_follow *f, int rank, uint32_t words)
{
    uint64_t epoch = f->trace.lead.epoch;

    if (epoch && (words & R2_FOLLOW_EPOCH) == (epoch & R2_FOLLOW_EPOCH))
        r2_replay_made(&f->trace.lead, rank, words & R2_FOLLOW_FAILED);
}

void r2_trace_reported(struct r2_follow *f, int rank, uint32_t words)
{
    struct r2_replay *r = &f->trace.lead;

    r2_replay_counted(r, rank,
                      (int)((words & R2_FOLLOW_COUNT) / (R2_FOLLOW_COUNT & -R2_FOLLOW_COUNT)));
    heed_made(f, rank, words);
    if (words & R2_FOLLOW_STOP)
        r2_replay_end(r, "an operator wants NCCL's own choice");
    if (words & R2_FOLLOW_GAVE_UP)
        r2_replay_end(r, "a rank has waited for it in vain");
}

void r2_trace_decided(struct r2_follow *f, uint64_t epoch, bool committed, const char *why)
{
    r2_replay_decided(&f->trace.lead, epoch, committed, why, r2_now_ns());
    for (int r = 0; committed && r < f->nranks; r++) /* a rank may have said so before we knew */
        heed_made(f, r, f->words[r]);
}

void r2_trace_turn(struct r2_follow *f, uint64_t now_ns)
{
    struct r2_replay *r = &f->trace.lead;
    enum r2_replay_step step = r2_replay_due(r, now_ns);
    struct r2_replay_id *missing;
    uint64_t at = 0;
    void *plan = NULL;
    size_t len = 0;

    while (step == R2_REPLAY_PLAN && (missing = r2_replay_idless(r)) != NULL) {
        if (!r2_leader_fetch(f, &missing->id))
            return; /* one is being fetched */
        missing->has = true;
    }
    if (step == R2_REPLAY_NOTHING || r2_replay_encode(r, step, &plan, &len, &at))
        return;
    if (r2_agree_propose_at(f->agree, plan, len, at) == 0)
        r2_replay_asked(r, step);
    free(plan);
}
