/* Inside comms/: what a communicator's ranks know of each other. follow.c meets and reports;
 * operation.c is what an operation does around the call; leader.c plans. */
#ifndef R2_COMMS_FOLLOW_INSIDE_H
#define R2_COMMS_FOLLOW_INSIDE_H

#include <pthread.h>
#include <stdatomic.h>

#include "agree/agree.h"
#include "comms/follow.h"
#include "comms/inside.h"
#include "comms/replay.h"
#include "comms/timing.h"
#include "comms/vote.h"
#include "comms/watch.h"
#include "device/device.h"
#include "plan/plan.h"
#include "plan/policy.h"
#include "plan/table.h"
#include "schedules/lead.h"
#include "schedules/second.h"
#include "schedules/steer.h"

#define R2_FOLLOW_ELIGIBLE (UINT64_C(1) << 20) /* bytes */

/* Words of a rank to the leader, in r2_agree_report.flags. */
#define R2_FOLLOW_EPOCH UINT32_C(0x007fffff)   /* the newest plan that it has made, its low bits */
#define R2_FOLLOW_GAVE_UP UINT32_C(0x00800000) /* replay: it waits for no plan any more */
#define R2_FOLLOW_COUNT UINT32_C(0x1f000000)   /* replay: plans that it has recorded, low bits */
#define R2_FOLLOW_FAILED UINT32_C(0x20000000)  /* ... or could not make */
#define R2_FOLLOW_STOP UINT32_C(0x40000000)    /* its operator wants stock */
#define R2_FOLLOW_UNABLE UINT32_C(0x80000000)  /* Tree cannot be forced there */

struct r2_follow {
    struct r2_agree *agree;
    struct r2_comm *comm; /* outlives it */
    int rank, nranks, device;
    int family; /* ranks of the communicator that it was split from, in the end; else its own */
    uint64_t node;
    atomic_bool revoked;
    _Atomic(uint64_t) bytes; /* of the largest eligible operation */
    struct r2_watch_entry entry;
    struct r2_seconds *seconds; /* R2CCL_PLAN=on */
    struct r2_vote *vote;       /* R2CCL_ALLREDUCE=direct */
    struct r2_timing *timing;   /* the leader's, R2CCL_PLAN=on */
    struct r2_follow_trace trace;

    /* the application's thread */
    uint64_t epoch; /* of the plan in force */
    const struct r2_plan_table *table;

    pthread_mutex_t lock; /* guards the rest */
    bool ready, unable;
    bool told_any;
    struct r2_agree_report told; /* last reported */
    /* leader */
    int nnodes;
    int *rank_node; /* [nranks] */
    struct r2_plan_node *nodes;
    uint32_t *words;  /* [nranks]: flags that ranks reported */
    uint32_t *shares; /* [nranks]: what their processes have left, in 1/65536 */
    struct r2_policy policy;
    struct r2_steer steer;
    struct r2_lead lead;
    uint64_t *made;                  /* steer's */
    uint64_t switch_epoch;           /* of the newest plan */
    uint64_t wait_ns;                /* when the switch that waits for measurements became ready */
    unsigned wait_measured;          /* operations of stock that were measured then */
    double running_ns;               /* predicted, for the size last planned for */
    struct r2_plan running, next;    /* what is in force; what was aimed at last */
    int changed_node;                /* the one that an event came from last */
    bool changed_lost;               /* ... has less than before */
    int lost_node;                   /* that has less since a plan was aimed at; -1: none */
    bool withdrawn;                  /* a plan was, and no node has changed since */
    int orders;                      /* a plan may have so many */
    uint32_t events, rounds;         /* changes of what nodes have left; looks of the planner */
    struct r2_leader_errand *errand; /* for a unique id; NULL: none */
};

/* follow.c: whether its ranks are told of each other's errors. All ranks of a family meet at one
 * process, which has a descriptor for each of theirs. */
bool r2_follow_tells(const struct r2_follow *f);
/* Whether plans of the agreement are weights of `direct`. */
bool r2_follow_weighs(const struct r2_follow *f);

/* leader.c; `lock` is held. */
int r2_leader_init(struct r2_follow *f);
void r2_leader_free(struct r2_follow *f);
void r2_leader_reported(struct r2_follow *f, int rank, const struct r2_agree_report *report);
void r2_leader_decided(struct r2_follow *f, uint64_t epoch, bool committed);
void r2_leader_turn(struct r2_follow *f, uint64_t now_ns);
/* How many orders a plan may have here. Asks the driver: without `lock`. */
int r2_leader_orders(void);
/* Whether a switch waits a while, for operations of stock to measure the plan against: where enough
 * of them are predicted to come, and do come. */
bool r2_leader_waits(struct r2_follow *f, uint64_t now_ns);
/* A unique id for a communicator; false: not yet, it is being fetched. */
bool r2_leader_fetch(struct r2_follow *f, struct r2_nccl_id *id);

#endif
