/* Rank 0 of a communicator: it hears what bandwidth every node has left, asks the planner
 * (shim/plan) what to run, and proposes that to all ranks. All ranks time operations, and tell it.
 * It gives a plan up for the sizes in which it is slower than NCCL's own choice.
 *
 * Threads: reported, decided come from the service thread of shim/agree, turn from the watching
 * one, saw from the application's. Lock order: the leader's, a vote's, shim/agree's.
 */
#ifndef R2_COMMS_LEADER_H
#define R2_COMMS_LEADER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "agree/agree.h"
#include "comms/calls.h"
#include "comms/comms.h"
#include "comms/vote.h"
#include "plan/plan.h"
#include "plan/policy.h"

#define R2_LEADER_FROM (UINT64_C(1) << 20) /* bytes; smaller operations are NCCL's */

/* The words of a rank's report. */
struct r2_leader_word {
    struct r2_calls calls; /* what it has called */
    uint64_t epoch;        /* what is in force there, which these belong to */
    struct r2_medians medians;
};
_Static_assert(sizeof(struct r2_leader_word) == sizeof(((struct r2_agree_report *)0)->words),
               "words");

struct r2_leader {
    struct r2_comm *comm; /* outlives it */
    struct r2_vote *vote;
    struct r2_agree *agree;
    int nranks;
    int p, *rank_node;       /* nodes, and that of each rank; from ready on */
    _Atomic(uint64_t) bytes; /* of the largest operation */

    pthread_mutex_t lock;       /* guards the rest */
    struct r2_plan_node *ranks; /* [nranks]: as each of them says of its node */
    uint32_t *words;            /* [nranks]: flags of their reports */
    int unknown;                /* ranks that have not said what they have */
    struct r2_policy policy;
    struct r2_plan force, asked; /* what runs, and what was proposed last */
    uint32_t asked_at;           /* events before that */
    bool asking;
    uint64_t invited_ns;    /* when ranks were first asked to connect; 0: not yet */
    uint64_t planned_bytes; /* the size that was planned for */
    uint32_t events, rounds;
    char said[R2_PLAN_WHY];      /* the last line in log, journal and row */
    struct r2_leader_word *told; /* [nranks]: what they have told beside */
    int differs; /* the rank whose calls are not rank 0's; 0: none, -1: it was said */
    struct r2_calls_difference difference;
};

/* wanted.c: what R2CCL_ALLREDUCE, R2CCL_PLAN and R2CCL_MODE say. */
bool r2_leader_always(void);  /* direct, healthy or not */
bool r2_leader_plans(void);   /* ranks tell what they have left, and somebody looks at it */
bool r2_leader_carries(void); /* ... and plans are carried out, not only shown */

enum r2_plan_wish r2_leader_wish(void);
bool r2_leader_asked(void); /* plans are not only the default: the user wants them */

/* A communicator has none, and why: in its row, and in the log, as a warning where plans were asked
 * for. */
void r2_leader_none(struct r2_comm *comm, const char *why);

/* vote: of the same rank, or NULL: nothing is carried out. NULL: no memory. */
struct r2_leader *r2_leader_new(struct r2_comm *comm, struct r2_vote *vote, int nranks);
/* Before anything that follows is called. */
void r2_leader_bind(struct r2_leader *l, struct r2_agree *agree);
/* All ranks have met; as r2_vote_ready. Before the first turn. False: no memory. */
bool r2_leader_ready(struct r2_leader *l, const int *rank_node, int nodes);
void r2_leader_free(struct r2_leader *l);

/* stop: its operator wants no plans. */
void r2_leader_reported(struct r2_leader *l, int rank, const struct r2_agree_report *report);
#define R2_LEADER_STOP UINT32_C(1) /* in a report's flags */
/* epoch: of the plan that was proposed last. */
void r2_leader_decided(struct r2_leader *l, uint64_t epoch, bool committed);
/* Returns when to call again at the latest. */
uint64_t r2_leader_turn(struct r2_leader *l, uint64_t now_ns);
/* Changes of what nodes have left, and looks of the planner. */
void r2_leader_counts(struct r2_leader *l, uint32_t *events, uint32_t *rounds);

/* There was an operation of R2_LEADER_FROM bytes or more of which plans may take the like. */
void r2_leader_saw(struct r2_leader *l, uint64_t bytes);

#endif
