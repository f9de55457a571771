/* The application's thread: what its operations ask of the ranks' agreement, and the plan that they
 * run under. */
#include <errno.h>
#include <stdio.h>

#include "comms/follow_inside.h"
#include "settings/settings.h"
#include "util/log.h"

/* All ranks of a family meet at one process, which has a descriptor for each of theirs. */
static bool tells(const struct r2_follow *f)
{
    return f->family <= r2_settings_get()->tell_errors;
}

/* Another plan is in force from this collective on. */
static void take_over(struct r2_follow *f, const struct r2_agree_view *view)
{
    const struct r2_plan_table *table = view->object;
    /* The table before is released already. */
    bool before = atomic_load_explicit(&f->comm->planned, memory_order_relaxed);
    bool now = table->nentries > 0;
    char text[80], plan[40] = "";

    f->epoch = view->epoch;
    f->table = table;
    r2_seconds_follow(f->seconds, table, view->epoch);
    if (now)
        snprintf(plan, sizeof(plan), "tree, %d order%s", table->entries[0].segments,
                 table->entries[0].segments == 1 ? "" : "s");
    r2_comm_row_plan(f->comm, plan, table->reason);
    r2_comm_row_epoch(f->comm, view->epoch);
    atomic_store_explicit(&f->comm->planned, now, memory_order_relaxed);
    if (now || before) {
        snprintf(text, sizeof(text), "plan %llu from operation %llu on: %s",
                 (unsigned long long)view->epoch, (unsigned long long)view->at,
                 now ? plan : "NCCL's own choice");
        r2_watch_journal(text);
    }
    r2_trace_taken(f, view);
    r2_watch_wake();
}

int r2_follow_before(struct r2_follow *f, enum r2_seg_collective kind, uint64_t bytes)
{
    bool eligible = kind == R2_SEG_COLL_ALL_REDUCE && bytes >= R2_FOLLOW_ELIGIBLE &&
                    r2_settings_get()->plan != R2_PLAN_SETTING_OFF;
    bool meet = eligible || tells(f);
    struct r2_agree_view view;
    int rc;

    if (eligible && bytes > atomic_load_explicit(&f->bytes, memory_order_relaxed))
        atomic_store_explicit(&f->bytes, bytes, memory_order_relaxed);
    do {
        r2_trace_hold(f);
        rc = r2_agree_lookup(f->agree, meet, &view);
        if (rc == 0 && view.epoch != f->epoch && view.object)
            take_over(f, &view);
    } while (rc == 0 && r2_trace_again(f));
    /* Relaxed: what was stored before the agreement was ended is seen under its lock. */
    if (rc == -ECANCELED && atomic_load_explicit(&f->revoked, memory_order_relaxed) &&
        !r2_comms_gone(f->comm)) /* an abort since then frees what NCCL would be called with */
        return R2_NCCL_OK;
    if (rc == -ECANCELED)
        return R2_NCCL_INTERNAL; /* as NCCL says to calls that an abort overtakes */
    if (rc == -EREMOTEIO)
        return R2_NCCL_REMOTE; /* r2_comms_told has said so */
    if (rc) {
        R2_WARN_ONCE(
            "a communicator of %d ranks has failed: a rank that knows whether the plan was "
            "changed does not answer, and none may guess",
            f->nranks);
        r2_comms_broken(f->comm, "nobody knows what became of a plan");
        return R2_NCCL_REMOTE;
    }
    return R2_NCCL_OK;
}

void r2_follow_tell(struct r2_follow *f, int error)
{
    if (tells(f))
        r2_agree_tell(f->agree, (uint32_t)error);
}

void r2_follow_after(struct r2_follow *f, uint64_t n)
{
    r2_agree_advance(f->agree, n);
}

const struct r2_plan_table *r2_follow_table(const struct r2_follow *f)
{
    return f->table;
}

struct r2_vote *r2_follow_vote(const struct r2_follow *f)
{
    return f->vote;
}

struct r2_seconds *r2_follow_seconds(const struct r2_follow *f)
{
    return f->seconds;
}

void r2_follow_time(struct r2_follow *f, uint64_t bytes, bool under, void *stream)
{
    if (f->timing && f->seconds && !r2_trace_replays(&f->trace) && bytes >= R2_FOLLOW_ELIGIBLE)
        r2_timing_start(f->timing, bytes, under ? f->epoch : 0, stream);
}

void r2_follow_timed(struct r2_follow *f, void *stream, bool good)
{
    if (f->timing)
        r2_timing_stop(f->timing, stream, good);
}
