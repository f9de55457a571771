/* Mutexes that spin a little before they sleep: the engine's critical sections are short, and a
 * thread that sleeps costs more than they last. Condition variables. Blocks that are not cancelled.
 */
#ifndef R2_UTIL_LOCK_H
#define R2_UTIL_LOCK_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

#ifndef __USE_GNU
#error "the kind of mutex is an extension: define _GNU_SOURCE before the first include"
#endif

/* First line of a block that takes locks and makes calls of the kernel: its thread, which may be
 * the application's, is not cancelled before the block's end; what was asked meanwhile happens
 * later. */
#define R2_UNCANCELLED                                                                             \
    __attribute__((cleanup(r2_cancel_again), unused)) int uncancelled_ = r2_cancel_later()

static inline int r2_cancel_later(void)
{
    int state;

    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    return state;
}

static inline void r2_cancel_again(const int *state)
{
    pthread_setcancelstate(*state, NULL);
}

static inline void r2_lock_init(pthread_mutex_t *m)
{
    pthread_mutexattr_t attr;

    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(m, &attr);
    pthread_mutexattr_destroy(&attr);
}

/* Locks `m`, awake for up to `ns` nanoseconds of waiting, then as pthread_mutex_lock. For locks
 * that are held for a microsecond by threads with cores of their own: to sleep takes the one who
 * waits ten times as long, and who holds it a system call to wake it. Any thread; the caller
 * unlocks. */
void r2_lock_awake(pthread_mutex_t *m, uint64_t ns);

/* Its timed waits go by CLOCK_MONOTONIC: a wall clock that is set back must not make one long. */
static inline void r2_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;

    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

#endif
