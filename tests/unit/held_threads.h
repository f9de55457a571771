/* All I/O threads, held by the test in a task of each. One test thread; waits are bounded. */
#ifndef R2_TESTS_HELD_THREADS_H
#define R2_TESTS_HELD_THREADS_H

#include <stdatomic.h>

#include "await.h"
#include "check.h"
#include "io/iothread.h"
#include "util/clock.h"
#include "util/list.h"

static struct hold {
    struct r2_task task;
    atomic_bool on;
} holds[16];
static atomic_bool let_go;
static atomic_bool late; /* they are not at hand: they have no core, or too much to do */

static void stay(struct r2_task *t)
{
    struct hold *h = R2_CONTAINER_OF(t, struct hold, task);

    do { /* as if it came round */
        atomic_store(&t->io->seen, atomic_load(&late) ? 0 : r2_now_ns() + 60 * R2_NS_PER_S);
        atomic_store(&h->on, true);
        await_nap();
    } while (!atomic_load(&let_go));
    atomic_store(&h->on, false);
}

/* All I/O threads are awake, and do nothing else until let_go. */
static void keep_awake(void)
{
    atomic_store(&let_go, false);
    for (int i = 0; i < r2_io_count(); i++) {
        r2_task_init(&holds[i].task, r2_io_at(i), stay);
        r2_task_kick(&holds[i].task);
    }
    for (int i = 0; i < r2_io_count(); i++) {
        AWAIT(atomic_load(&holds[i].on));
    }
}

static void release(void)
{
    atomic_store(&let_go, true);
    for (int i = 0; i < r2_io_count(); i++) {
        AWAIT(!atomic_load(&holds[i].on));
    }
}

#endif
