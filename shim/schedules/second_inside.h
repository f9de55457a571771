/* Inside schedules/: one of the communicators beside the application's, and their set (second.h).
 */
#ifndef R2_SCHEDULES_SECOND_INSIDE_H
#define R2_SCHEDULES_SECOND_INSIDE_H

#include <pthread.h>
#include <stdatomic.h>

#include "device/device.h"
#include "schedules/second.h"

enum r2_second_state { R2_SECOND_MAKING, R2_SECOND_MADE, R2_SECOND_FAILED, R2_SECOND_ENDED };

/* One communicator. Shared by the set and its thread; the last one frees it. */
struct r2_second {
    struct r2_second *next;
    atomic_int holders;
    struct r2_seconds_config config;
    char net_name[64];
    uint64_t key;
    struct r2_nccl_id id;
    int rank;            /* in its own order */
    r2_nccl_comm ending; /* the handle, with the thread that ends the set */
    atomic_bool suspended;
    /* Under the set's lock. agreed: a plan in force has named it, all ranks have it. dropped: none
     * lists it any more; it waits for its last operation, and can be aborted until then. */
    bool agreed, dropped;
    struct r2_device_mark mark; /* behind its last operation; of the thread that runs these */

    pthread_mutex_t lock; /* guards the rest */
    pthread_cond_t wake;
    enum r2_second_state state;
    bool abandoned, pinned;
    bool theirs; /* the application finalized or revoked it, maybe in a group that is still open: it
                  * ends with the set alone */
    r2_nccl_comm handle;
    int askers;  /* threads that ask NCCL about it, which takes no time: its end waits for them */
    int callers; /* ... that have NCCL do something to it: its end waits, an abort does not */
    uint64_t bytes, make_ns;
};

struct r2_seconds {
    struct r2_seconds_config config;
    char net_name[64];
    pthread_mutex_t lock;         /* guards the rest; taken before a second's */
    struct r2_second *all, *over; /* over: taken out by the end of the set */
    uint64_t epoch;               /* of the newest plan */
    bool lacking;                 /* one of it could not even be begun */
    bool ended, aborted;
    uint64_t make_ns;
};

/* Gives up a hold; the last one frees it. */
void r2_second_drop(struct r2_second *c);

#endif
