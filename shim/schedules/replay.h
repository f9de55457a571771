/* What the leader of a communicator proposes when it replays a trace of plans (plan/trace.h): the
 * recorded plans, one after the other, each from its recorded operation on, with ids of this run.
 * It does not look at bandwidths.
 *
 * A replay that cannot go on is ended by a plan of its own: no entries, and a reason that begins
 * with R2_REPLAY_ENDED. All ranks agree on it as on any other, so that all run NCCL's own choice
 * from the same operation on; a rank that hears it proposed waits for no recorded plan any more.
 *
 * Ranks tell how many plans they have recorded. A run that was killed may have left one more on
 * some: what not all have is not replayed.
 *
 * Pure: no clock, no NCCL; the caller brings times and unique ids. Threads: none.
 */
#ifndef R2_SCHEDULES_REPLAY_H
#define R2_SCHEDULES_REPLAY_H

#include <stdbool.h>
#include <stdint.h>

#include "api/nccl.h"
#include "plan/trace.h"

#define R2_REPLAY_ENDED "replay ended"
#define R2_REPLAY_COUNTS 32                         /* ranks tell their count modulo this */
#define R2_REPLAY_PATIENCE_NS UINT64_C(60000000000) /* with ranks that make, or refuse */
#define R2_REPLAY_PAUSE_NS UINT64_C(100000000)      /* after a refusal */
#define R2_REPLAY_TRIES 3                           /* where a rank has failed to make something */

enum r2_replay_step { R2_REPLAY_NOTHING, R2_REPLAY_PLAN, R2_REPLAY_END };

struct r2_replay_id {
    uint64_t key;
    bool has;
    struct r2_nccl_id id;
};

struct r2_replay {
    const struct r2_trace_comm *record; /* not owned */
    int nranks;
    int next, limit; /* the plan to come, and how many every rank has */
    bool more;       /* a rank has more than that */
    int nspoken, nmade;
    uint8_t *spoken; /* [nranks]: bit 0 has told its count, bit 1 has made the last plan's */
    uint64_t epoch;  /* of the last plan agreed; 0: none */
    enum r2_replay_step asked;
    bool ending, ended;
    bool failed; /* a rank could not make something of the last plan's */
    int tries;
    uint64_t since_ns, refused_ns, not_before_ns; /* refused_ns: first of the tries */
    int nhave, nwant; /* ids of the communicators of the last plan, and of the one to come */
    struct r2_replay_id have[R2_PLAN_ORDERS], want[R2_PLAN_ORDERS];
    bool prepared;
    char why[R2_PLAN_REASON];
};

/* record NULL: nothing to replay, and nothing is ever due. -ENOMEM. */
int r2_replay_init(struct r2_replay *r, const struct r2_trace_comm *record, int nranks);
void r2_replay_free(struct r2_replay *r);

/* A rank tells how many plans it has recorded, modulo R2_REPLAY_COUNTS. */
void r2_replay_counted(struct r2_replay *r, int rank, int count);
/* A rank has made what the last plan lists, or could not: then it refuses what needs it. */
void r2_replay_made(struct r2_replay *r, int rank, bool failed);

/* What is to be proposed now. Of a PLAN all communicators need an id first: r2_replay_idless is the
 * next without, NULL when there is none. After the proposal is on its way, r2_replay_asked. */
enum r2_replay_step r2_replay_due(struct r2_replay *r, uint64_t now_ns);
struct r2_replay_id *r2_replay_idless(struct r2_replay *r);
void r2_replay_asked(struct r2_replay *r, enum r2_replay_step step);
/* What became of it. A refusal need not be the end: a rank that is at the plan's index, neither
 * begun nor waiting in r2_agree_hold yet, cannot but refuse. */
void r2_replay_decided(struct r2_replay *r, uint64_t epoch, bool committed, const char *why,
                       uint64_t now_ns);
/* It cannot go on. The first reason counts. */
void r2_replay_end(struct r2_replay *r, const char *why);

/* The proposal of a step: *out is malloc'd; *at: the index that it holds from, 0: any. */
int r2_replay_encode(const struct r2_replay *r, enum r2_replay_step step, void **out, size_t *len,
                     uint64_t *at);

#endif
