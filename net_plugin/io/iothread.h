/* An I/O thread inside: io.c, what it does by itself; iolend.c, what another one does for it.
 * Private to these. */
#ifndef R2_IO_IOTHREAD_H
#define R2_IO_IOTHREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>

#include "io/io.h"

#define R2_LENT_BATCH 4 /* events, and tasks, per call: the caller has other work */

struct r2_io {
    atomic_ulong seen; /* when it last came round; a hint */
    int epoll;
    int wake; /* eventfd, in the epoll set */
    pthread_t thread;
    pthread_mutex_t lock; /* tasks, timers */
    struct r2_list tasks;
    struct r2_heap timers;
    atomic_ulong next_deadline; /* earliest timer, 0 = none; written under lock */
    /* Pairs with r2_io_wake: the thread stores `sleeping`, then looks at `pending`; a producer
     * stores `pending`, then looks at `sleeping`. Both use seq_cst, so one of them sees the
     * other's store and no wake-up is lost. */
    atomic_bool sleeping;
    atomic_bool pending;
    atomic_bool busy; /* runs something; a hint, of no order with anything */
    /* Held by whoever runs callbacks, the thread or one that stands in for it: from collecting
     * events to the end of the tasks. */
    pthread_mutex_t turn;
    struct epoll_event left[R2_LENT_BATCH]; /* what a stand-in may not run; under turn */
    int n_left;
    /* Somebody stands in for the thread until then. A hint: a thread that reads an old value
     * watches descriptors without need, or looks a millisecond later. */
    atomic_ulong lent_until;
    atomic_int brief; /* descriptors; relaxed, a number that orders nothing */
    /* Under lock: the thread sleeps, and looks for tasks by itself when nobody stands in any more.
     */
    bool looks;
};

/* The thread that a stand-in, this thread, is at it for (r2_io_lend); NULL: none. */
extern _Thread_local struct r2_io *r2_io_standing_for;

void r2_io_wake(struct r2_io *io);
/* Of the callback that has just returned on this thread (r2_io_note). */
bool r2_io_did_work(void);
/* One event, one round of tasks, under `turn`; true: what ran was work. `left`: no tasks but those
 * that a stand-in may run, and of those a few; says whether it left any. */
bool r2_io_run_event(struct r2_io *io, const struct epoll_event *ev);
bool r2_io_run_tasks(struct r2_io *io, bool *left);
/* Until the next timer, at most LONGEST_NS. */
uint64_t r2_io_wait_ns(struct r2_io *io);
/* Until there is something to do for the thread itself. While somebody stands in for it, its
 * descriptors are not. */
void r2_io_sleep_on(struct r2_io *io);
/* Under the thread's lock. A task or a timer needs no wake-up: who stands in for the thread comes
 * to it, or the thread looks by itself in time. */
bool r2_io_leaves_task(const struct r2_io *io, bool brief);
bool r2_io_looks_by(const struct r2_io *io, uint64_t deadline);

#endif
