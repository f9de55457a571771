/* Inside comms/: a communicator whose plans are recorded or replayed (R2CCL_PLAN_TRACE).
 *
 * In a replay the leader proposes the recorded plans at the recorded operations
 * (schedules/replay.h), and a rank that comes to such an operation before its plan has been
 * proposed waits there: the run may be faster than the recorded one was, and a communicator takes
 * time to make. The wait ends, at the latest after 60 s, with the plan or with the
 * replay; nothing depends on it but that the plan can be agreed.
 *
 * All ranks must replay traces of one run: the run's mark is among the settings that ranks compare
 * when they meet. */
#ifndef R2_COMMS_REPLAY_H
#define R2_COMMS_REPLAY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "agree/agree.h"
#include "comms/trace.h"
#include "schedules/replay.h"

struct r2_follow;

struct r2_follow_trace {
    enum r2_tracing mode; /* R2CCL_PLAN_TRACE */
    uint64_t name;        /* of the communicator, in traces */
    _Atomic uint64_t children;
    const struct r2_trace_comm *was; /* replay: what was recorded; NULL: nothing */
    atomic_bool over;                /* replay: no plan is waited for any more */
    atomic_bool gave_up;             /* ... because this rank has waited too long */
    /* the application's thread */
    int taken;        /* recorded plans that have come into force */
    uint64_t hold_at; /* index of the next one */
    /* leader; r2_follow.lock */
    struct r2_replay lead;
};

static inline bool r2_trace_replays(const struct r2_follow_trace *trace)
{
    return trace->mode == R2_TRACING_REPLAY;
}

/* parent, salt: what it was made of; NULL: nothing. 0 or -ENOMEM. */
int r2_trace_begin(struct r2_follow *f, struct r2_follow *parent, uint64_t salt);
void r2_trace_end(struct r2_follow *f);
/* Of the settings that must be equal on all ranks; 0: no replay. */
uint64_t r2_trace_mark(const struct r2_follow *f);
/* Of a replay, words for the leader. */
uint32_t r2_trace_words(const struct r2_follow *f);

/* The application's thread. Before a lookup: waits where a plan is to come. After one: whether to
 * look up once more. When a plan has come into force. */
void r2_trace_hold(struct r2_follow *f);
bool r2_trace_again(struct r2_follow *f);
void r2_trace_taken(struct r2_follow *f, const struct r2_agree_view *view);

/* The service thread: whether a rank that replays may promise it; the ranks do not meet. */
bool r2_trace_accept(struct r2_follow *f, const struct r2_plan_table *table);
void r2_trace_off(struct r2_follow *f);

/* leader; `lock` is held. */
void r2_trace_reported(struct r2_follow *f, int rank, uint32_t words);
void r2_trace_decided(struct r2_follow *f, uint64_t epoch, bool committed, const char *why);
void r2_trace_turn(struct r2_follow *f, uint64_t now_ns);

#endif
