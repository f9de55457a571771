/* Inside comms/: what a communicator's ranks know of each other. follow.c meets and reports;
 * operation.c is what an operation does around the call. */
#ifndef R2_COMMS_FOLLOW_INSIDE_H
#define R2_COMMS_FOLLOW_INSIDE_H

#include <pthread.h>
#include <stdatomic.h>

#include "agree/agree.h"
#include "comms/calls.h"
#include "comms/follow.h"
#include "comms/inside.h"
#include "comms/leader.h"
#include "comms/timing.h"
#include "comms/vote.h"
#include "comms/watch.h"

struct r2_follow {
    struct r2_agree *agree;
    struct r2_comm *comm; /* outlives it */
    int rank, nranks;
    int family; /* ranks of the communicator that it was split from, in the end; else its own */
    uint64_t node;
    atomic_bool revoked;
    struct r2_watch_entry entry;
    struct r2_vote *vote;     /* NULL: no plan is ever carried out */
    struct r2_leader *leader; /* rank 0, where there may be plans */
    struct r2_timing *timing; /* NULL: this rank measures nothing */
    struct r2_times times;    /* the watching thread's */
    _Atomic uint64_t timed;   /* what is known of them, for the application's thread */

    uint64_t epoch; /* of the plan in force; the application's thread */

    struct r2_calls_log calls;
    _Atomic uint64_t called_ns; /* the last of them */

    atomic_bool ready; /* ranks have met, and there may be plans */

    pthread_mutex_t lock; /* guards the rest */
    bool told_any;
    struct r2_agree_report told; /* last reported */
    uint64_t stood;              /* calls, when it was last reported that this rank stands */
};

/* comm.c: whether its ranks are told of each other's errors. All ranks of a family meet at one
 * process, which has a descriptor for each of theirs. */
bool r2_follow_tells(const struct r2_follow *f);

#endif
