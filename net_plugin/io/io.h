/* The engine's I/O threads: epoll, deferred tasks, timers.
 *
 * Every descriptor, task and timer belongs to one thread, whose callbacks run one after another.
 * Callbacks of different threads run concurrently. Threads start with the first r2_io_start and
 * sleep when there is nothing to do; they poll for at most R2CCL_SPIN after activity.
 */
#ifndef R2_IO_IO_H
#define R2_IO_IO_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "util/heap.h"
#include "util/list.h"

struct r2_io;

/* A descriptor watched edge-triggered for input and output. `ready` runs on the owner thread. */
struct r2_io_fd {
    int fd;
    struct r2_io *io;
    bool brief; /* a stand-in may run it (r2_io_lend) */
    bool reads; /* nothing is ever written to it: that it could be is no event */
    void (*ready)(struct r2_io_fd *f, uint32_t events);
};

/* Work for a thread; at most once in its queue. `run` runs on the owner thread, without locks,
 * never while that thread is inside a batch of descriptor events. */
struct r2_task {
    struct r2_list node;
    struct r2_io *io;
    bool queued; /* under the thread's lock */
    bool brief;  /* a stand-in may run it (r2_io_lend) */
    void (*run)(struct r2_task *t);
};

struct r2_timer {
    struct r2_heap_node node;
    struct r2_io *io;
    uint64_t deadline; /* ns, 0 = off; under the thread's lock */
    void (*fire)(struct r2_timer *t, uint64_t now);
};

/* Starts the threads (once per process; `count` 0 = by the allowed cores). `spin`: ns that a thread
 * polls after activity; fewer than four threads poll at most 50 us. 0 or -errno. */
int r2_io_start(int count, const char *cpus, uint64_t spin);
int r2_io_count(void);
/* From now on only the first `n` threads are given something new (1 to all): who shares the machine
 * with many others is served best by a few threads that poll. What the others have they keep. Any
 * thread. */
void r2_io_use(int n);
int r2_io_used(void);
/* With more of them in use little traffic keeps to few sockets (docs/decisions.md 41). */
#define R2_MANY_THREADS 8
/* One thread is in use: cores are few, and whoever wakes it takes one from NCCL. */
static inline bool r2_io_alone(void)
{
    return r2_io_used() == 1;
}
/* Locks a mutex that is usually held for about a microsecond. With several I/O threads it spins for
 * up to 20 us before it sleeps (docs/decisions.md 45). Any thread; the caller unlocks. */
void r2_io_lock(pthread_mutex_t *m);
/* Owner for something new, in turn. */
struct r2_io *r2_io_pick(void);
struct r2_io *r2_io_at(int index);
/* The thread is running or spinning: it sees a task within a microsecond or so. A hint. */
bool r2_io_awake(struct r2_io *io);
/* ... and has come round lately: it has a core, and nothing long to do. A hint. */
bool r2_io_at_hand(struct r2_io *io);
/* ... and at once: it is awake, has nothing to do, and has not been given anything. A hint. */
bool r2_io_polls(struct r2_io *io);
/* All threads in use are. A hint. */
bool r2_io_all_awake(void);

/* For a caller that polls anyway, without locks. Runs what a sleeping thread would do now, of
 * descriptors and tasks that are `brief` (they wait for nobody). The thread goes on sleeping as
 * long as the caller comes again soon. Where cores are few that saves a wake-up per message. What
 * is left to do, a few events and tasks being all that it is asked for, is left to the thread,
 * which is woken. The callbacks of one I/O thread still run one after another. The caller is not
 * cancelled meanwhile. False: it did nothing, because the thread is awake or somebody else stands
 * in. `*worked`: something was due, or the thread is awake. */
bool r2_io_lend(struct r2_io *io, bool *worked);
/* It has descriptors that a stand-in may run. A hint. */
bool r2_io_lends(struct r2_io *io);
/* Nobody stands in any more: the threads that sleep for that look themselves, at once. Any thread,
 * any lock. */
void r2_io_take_back(void);

int r2_io_add(struct r2_io *io, struct r2_io_fd *f);
/* After return no new event of `f` is collected; a batch in hand may still name it: free what
 * holds `f` only from a task of the same thread that was kicked after this call. */
void r2_io_del(struct r2_io_fd *f);

void r2_task_init(struct r2_task *t, struct r2_io *io, void (*run)(struct r2_task *));
/* Returns true when the task was not queued yet. Any thread, any lock. A brief task is left to who
 * stands in for its sleeping thread, where there are several threads. */
bool r2_task_kick(struct r2_task *t);

void r2_timer_init(struct r2_timer *t, struct r2_io *io, void (*fire)(struct r2_timer *, uint64_t));
/* Sets, moves or (deadline 0) stops. Any thread, any lock. A timer stopped on its own thread does
 * not fire afterwards. */
void r2_timer_set(struct r2_timer *t, uint64_t deadline);
/* Sets one that is not set and does not fire just now, on the I/O thread that calls or that the
 * caller stands in for. That thread need not be woken for it. Elsewhere as r2_timer_set, but a
 * thread that sleeps because others stand in for it is not woken: it fires when that looks, up to
 * 2.3 ms late. */
void r2_timer_here(struct r2_timer *t, uint64_t deadline);
/* Only moves it to an earlier moment. */
void r2_timer_sooner(struct r2_timer *t, uint64_t deadline);

/* Said by `ready` or `run`: what it was woken for was work, or no more than upkeep (a heartbeat, a
 * peer's tick), after which polling would find nothing. A callback that says neither did work, and
 * so did one that says both. */
void r2_io_note(bool work);

/* Descriptors made by the engine, so that a forked child can close its copies. */
void r2_io_fd_track(int fd);
void r2_io_fd_untrack(int fd);
/* Raises the soft limit of descriptors to the hard one (65536 at most), as NCCL does. */
void r2_io_fds_raise(void);
/* The limit, 0 before r2_io_fds_raise. */
int r2_io_fds_limit(void);
/* So many are in use that the others are kept for peers without any path. */
bool r2_io_fds_short(void);
/* In a forked child: closes every tracked descriptor. Async-signal-safe. */
void r2_io_child(void);
/* CPU time of all I/O threads so far. */
uint64_t r2_io_cpu_ns(void);

#endif
