/* The application's thread, around the call of an operation: the ranks' agreement is asked, the
 * plan taken over, and what NCCL took is counted. */
#include <errno.h>
#include <stdio.h>

#include "comms/follow_inside.h"
#include "reduce/reduce.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/log.h"

/* Another plan is in force from this collective on. */
static void take_over(struct r2_follow *f, const struct r2_agree_view *view)
{
    f->epoch = view->epoch;
    r2_vote_follow(f->vote, view->object, view->epoch, view->at);
    r2_comm_row_epoch(f->comm, view->epoch);
}

int r2_follow_before(struct r2_follow *f, enum r2_seg_collective kind, uint64_t bytes)
{
    bool meet = r2_follow_tells(f) ||
                (kind == R2_SEG_COLL_ALL_REDUCE && bytes >= R2_LEADER_FROM && r2_leader_plans());
    struct r2_agree_view view;
    int rc;

    rc = r2_agree_lookup(f->agree, meet, &view);
    if (rc == 0 && view.epoch != f->epoch && view.object)
        take_over(f, &view);
    /* Relaxed: what was stored before the agreement was ended is seen under its lock. */
    if (rc == -ECANCELED && atomic_load_explicit(&f->revoked, memory_order_relaxed) &&
        !r2_comms_gone(f->comm)) /* an abort since then frees what NCCL would be called with */
        return R2_NCCL_OK;
    if (rc == -ECANCELED)
        return R2_NCCL_INTERNAL; /* as NCCL says to calls that an abort overtakes */
    if (rc == -EREMOTEIO)
        return R2_NCCL_REMOTE; /* r2_comms_told has logged it */
    if (rc) {
        R2_WARN_ONCE(
            "a communicator of %d ranks has failed: this rank cannot learn whether the plan was "
            "changed, since no rank that knows it answers",
            f->nranks);
        r2_comms_broken(f->comm, "nobody knows what became of a plan");
        return R2_NCCL_REMOTE;
    }
    return R2_NCCL_OK;
}

/* What NCCL refuses is none. Those of a group are noted before ncclGroupEnd, which may not return
 * before they are over. */
static void note_call(struct r2_follow *f, uint64_t number, uint64_t bytes, bool taken)
{
    atomic_store_explicit(&f->called_ns, r2_now_ns(), memory_order_relaxed);
    r2_calls_note(&f->calls, number, bytes, taken);
}

void r2_follow_group(struct r2_follow *f, uint64_t n)
{
    uint64_t first = r2_agree_index(f->agree) + 1;

    if (!f->vote || r2_vote_refused(f->vote))
        return;
    for (uint64_t i = 0; i < n && i < R2_CALLS; i++)
        note_call(f, first + i, R2_CALLS_GROUPED, false);
}

void r2_follow_forget(struct r2_follow *f)
{
    r2_calls_forget(&f->calls);
}

static void follow_time(struct r2_follow *f, uint64_t bytes, bool ours, void *stream)
{
    const uint64_t note[R2_TIMING_NOTES] = {bytes, ours, f->epoch};

    if (f->leader)
        r2_leader_saw(f->leader, bytes);
    if (f->timing && f->epoch && /* there is nothing to compare before the first plan */
        r2_times_needs(atomic_load_explicit(&f->timed, memory_order_relaxed), f->epoch, ours,
                       bytes))
        r2_timing_start(f->timing, note, stream);
}

/* An AllReduce, between before and after: true, and *result is what the call
 * returns. False: NCCL has it. */
static bool follow_take(struct r2_follow *f, const uint64_t *word, enum r2_vote_call how,
                        int *result)
{
    int type = (int)word[R2_WORD_TYPE];
    uint64_t bytes = r2_vote_bytes(word);
    bool ours = f->vote && r2_vote_takes(f->vote, word, how);

    /* NCCL runs the others under every plan. Their times would say nothing about a plan. */
    if (bytes >= R2_LEADER_FROM && how == R2_VOTE_PLAIN &&
        atomic_load_explicit(&f->ready, memory_order_relaxed) &&
        r2_reduce_covers(type, (int)word[R2_WORD_OP]))
        follow_time(f, bytes, ours, (void *)word[R2_WORD_STREAM]);
    if (f->vote && how != R2_VOTE_GROUPED && !r2_vote_refused(f->vote))
        note_call(f, r2_agree_index(f->agree) + 1, bytes, ours);
    if (ours)
        *result = r2_vote_run(f->vote, word);
    return ours;
}

/* It is over, whoever took it. */
static void follow_timed(struct r2_follow *f, void *stream, bool good)
{
    if (f->timing)
        r2_timing_stop(f->timing, stream, good);
}

bool r2_comms_take(struct r2_comm *comm, const uint64_t *word, bool configured, int *result)
{
    enum r2_vote_call how = r2_comms_in_group() ? R2_VOTE_GROUPED
                            : configured        ? R2_VOTE_CONFIGURED
                                                : R2_VOTE_PLAIN;

    return comm->follow && follow_take(comm->follow, word, how, result);
}

/* ---- around the call */

/* Relaxed: words for operators to read, each by itself. */
static void show_call(struct r2_comm *comm, enum r2_seg_collective kind, uint64_t bytes,
                      uint64_t now)
{
    struct r2_seg_comm *row = r2_comm_row(comm);

    __atomic_store_n(&row->op_mono_ns, now, __ATOMIC_RELAXED);
    __atomic_store_n(&row->op_bytes, bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&row->op, (uint32_t)kind, __ATOMIC_RELAXED);
    __atomic_store_n(&row->calling, 1, __ATOMIC_RELAXED);
}

/* Point-to-point operations have no plan; in a group the ranks of a communicator may meet by them.
 */
int r2_comms_begin(struct r2_comm *comm, enum r2_seg_collective kind, size_t count, int type)
{
    uint64_t bytes = count * r2_nccl_type_size(type), now;

    if (r2_comms_elsewhere(comm))
        return R2_NCCL_REMOTE;
    if (r2_comms_in_group() && !r2_comms_group_reserve(comm) && comm->follow)
        return R2_NCCL_SYSTEM; /* one that is not counted would part this rank from the others */
    now = r2_now_ns();
    show_call(comm, kind, bytes, now); /* before what may wait for a plan's fate: it has called */
    if (comm->follow && (kind < R2_SEG_COLL_SEND || r2_comms_in_group())) {
        int result = r2_follow_before(comm->follow, kind, bytes);

        if (result != R2_NCCL_OK) {
            __atomic_store_n(&r2_comm_row(comm)->calling, 0, __ATOMIC_RELAXED);
            return result;
        }
        show_call(comm, kind, bytes, now); /* that may have taken a while: another row */
    }
    return R2_NCCL_OK;
}

/* What the newest operation moves, as nccl-tests counts bus bandwidth. */
static uint64_t bus_bytes(struct r2_seg_comm *row)
{
    uint64_t ranks = __atomic_load_n(&row->ranks, __ATOMIC_RELAXED);
    uint64_t bytes = __atomic_load_n(&row->op_bytes, __ATOMIC_RELAXED);

    if (ranks < 2)
        return 0;
    switch (__atomic_load_n(&row->op, __ATOMIC_RELAXED)) {
    case R2_SEG_COLL_ALL_REDUCE:
        return 2 * (bytes - bytes / ranks);
    case R2_SEG_COLL_BROADCAST:
    case R2_SEG_COLL_REDUCE:
        return bytes;
    default: /* NCCL's count is that of one rank's part */
        return bytes * (ranks - 1);
    }
}

void r2_comms_end(struct r2_comm *comm, int result, bool collective, r2_nccl_stream stream)
{
    struct r2_seg_comm *row = r2_comm_row(comm);
    bool taken = result == R2_NCCL_OK || result == R2_NCCL_IN_PROGRESS;
    uint64_t bus = taken && collective ? bus_bytes(row) : 0;

    if (comm->follow && collective && !r2_comms_in_group())
        follow_timed(comm->follow, stream, taken);
    if (result == R2_NCCL_OK &&
        atomic_load_explicit(&comm->state, memory_order_relaxed) == R2_SEG_COMM_INIT)
        r2_comms_async(comm, comm->handle, R2_NCCL_OK);
    if (r2_comms_in_group()) {
        if (taken)
            r2_comms_group_count(comm, collective, bus);
        else
            r2_comms_group_refuse();
    } else if (taken) {
        r2_comms_handed(comm, collective, !collective, (int64_t)bus);
        if (collective && comm->follow)
            r2_follow_after(comm->follow, 1);
    }
    if (result == R2_NCCL_REMOTE || result == R2_NCCL_SYSTEM)
        r2_comms_async(comm, comm->handle, result);
    row = r2_comm_row(comm); /* again: that may have taken a while */
    __atomic_store_n(&row->calling, 0, __ATOMIC_RELAXED);
    if (atomic_load_explicit(&comm->row_number, memory_order_relaxed) < 0)
        r2_comms_row_again(comm, __atomic_load_n(&row->op_mono_ns, __ATOMIC_RELAXED));
}
