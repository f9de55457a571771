/* Questions to the kernel about interfaces, put by a thread of their own.
 *
 * The kernel answers them under its RTNL lock, which it holds for as long as somebody changes any
 * interface. That takes seconds while a driver resets its device or a container gets its network.
 * It takes for ever when a driver hangs there. The caller sleeps inside sendto() and no timeout of
 * the socket counts. So I/O thread 0 must not ask: it has timers, heartbeats and the operator's
 * words to look after. It puts questions here and goes on. The asker puts them to the kernel one
 * after another (the lock is one for all). It kicks a task of thread 0 that takes the answers.
 *
 * Bounds: of each NIC one question, and one for the tables; who puts one that is out is told so. A
 * question that hangs costs only the asker, which stays in the kernel until it is over. The asker
 * uses static memory and its own stack only, and is never waited for. So neither the end of the
 * process nor a fork has to do with it: a child has no such thread, and does nothing.
 *
 * Locks: `asker.lock` guards the slots and is a leaf, held for a copy at most, never over a
 * question. It carries all there is to order: a question's fields are written under it before the
 * slot is PUT, an answer's before it is ANSWERED, and both are read under it afterwards. The thread
 * looks for slots that are PUT under the lock before it sleeps, and they become so under it: no
 * signal is missed. The task is kicked after the slot is ANSWERED, so its next run finds that. */
#define _GNU_SOURCE
#include <string.h>

#include "engine/nic/nics.h"
#include "topology/linkwatch.h"
#include "util/log.h"
#include "util/thread.h"

enum { FREE, PUT, ASKED, ANSWERED, READY };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct r2_task *answered;
    bool runs;   /* there is a thread; of whoever puts questions */
    bool warned; /* that there is none; likewise */
    uint64_t count;
    unsigned char state[R2_NICASK_SLOTS];
    struct r2_nicask slots[R2_NICASK_SLOTS];
} asker = {.lock = PTHREAD_MUTEX_INITIALIZER, .more = PTHREAD_COND_INITIALIZER};

/* Without the lock: this may take for ever. */
static void ask(int slot, struct r2_nicask *q)
{
    if (slot == R2_NICASK_TABLES)
        q->rc = r2_net_tables_read(&q->tables);
    else
        q->rc = r2_link_query(q->ifindex);
}

/* Of a slot that is PUT. */
static void serve(int slot)
{
    struct r2_nicask q;

    pthread_mutex_lock(&asker.lock);
    q = asker.slots[slot];
    q.number = ++asker.count;
    asker.state[slot] = ASKED;
    pthread_mutex_unlock(&asker.lock);
    ask(slot, &q);
    pthread_mutex_lock(&asker.lock);
    asker.slots[slot] = q;
    asker.state[slot] = ANSWERED;
    pthread_mutex_unlock(&asker.lock);
    r2_task_kick(asker.answered);
}

/* The next one that is PUT, in turn: none waits for ever for the others. */
static int next_put(int after)
{
    int slot = -1;

    pthread_mutex_lock(&asker.lock);
    while (slot < 0) {
        for (int i = 1; i <= R2_NICASK_SLOTS && slot < 0; i++) {
            if (asker.state[(after + i) % R2_NICASK_SLOTS] == PUT)
                slot = (after + i) % R2_NICASK_SLOTS;
        }
        if (slot < 0)
            pthread_cond_wait(&asker.more, &asker.lock);
    }
    pthread_mutex_unlock(&asker.lock);
    return slot;
}

static void *ask_main(void *unused)
{
    (void)unused;
    pthread_setname_np(pthread_self(), "r2ccl-links");
    for (int slot = 0;;) {
        slot = next_put(slot);
        serve(slot);
    }
    return NULL;
}

void r2_nicask_start(struct r2_task *answered)
{
    asker.answered = answered;
}

/* A process without real interfaces never asks, and has no thread for it. One that could not be
 * started is tried again with the next question. */
static bool has_thread(void)
{
    int rc = asker.runs ? 0 : r2_thread_start(ask_main, NULL);

    asker.runs = rc == 0;
    if (rc && !asker.warned)
        R2_WARN("cannot start a thread that asks about links (%s): while an interface of "
                "this node is changed, an I/O thread may have to wait for the kernel",
                strerror(rc));
    asker.warned |= rc != 0;
    return asker.runs;
}

bool r2_nicask_put(int slot, int ifindex, uint64_t moment)
{
    bool put;

    pthread_mutex_lock(&asker.lock);
    put = asker.state[slot] == FREE;
    if (put) {
        asker.slots[slot] = (struct r2_nicask){.ifindex = ifindex, .moment = moment};
        asker.state[slot] = PUT;
        pthread_cond_signal(&asker.more);
    }
    pthread_mutex_unlock(&asker.lock);
    if (put && !has_thread())
        serve(slot);
    return put;
}

void r2_nicask_ready(void)
{
    pthread_mutex_lock(&asker.lock);
    for (int slot = 0; slot < R2_NICASK_SLOTS; slot++) {
        if (asker.state[slot] == ANSWERED)
            asker.state[slot] = READY;
    }
    pthread_mutex_unlock(&asker.lock);
}

bool r2_nicask_take(int slot, struct r2_nicask *out)
{
    bool there;

    pthread_mutex_lock(&asker.lock);
    there = asker.state[slot] == READY;
    if (there) {
        *out = asker.slots[slot];
        asker.state[slot] = FREE;
    }
    pthread_mutex_unlock(&asker.lock);
    return there;
}
