#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/prctl.h>

#include "tuner/tuner.h"
#include "tuner/want.h"

#define SLOTS 64
/* Timer slack in ns that marks a thread: near the default of 50 us, told apart by a number that
 * does not come again for a long time, as NCCL's threads of a communicator keep what they
 * inherited. */
#define MARK_FIRST 50001
#define MARK_COUNT 9973

struct slot {
    int mark; /* 0: free */
    int taken;
    struct r2ccl_tuner_want want;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the slots and `marks` */
static struct slot slots[SLOTS];
static unsigned marks;
static atomic_bool announced;
static _Thread_local struct slot *own;
static _Thread_local int own_slack; /* what the thread had before, -1: unknown */

/* Under the lock. */
static struct slot *slot_of_mark(int mark)
{
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].mark == mark) {
            return &slots[i];
        }
    }
    return NULL;
}

static int take_back(void)
{
    struct slot *slot = own;
    int taken;

    if (!slot) {
        return 0;
    }
    if (own_slack > 0) {
        prctl(PR_SET_TIMERSLACK, (unsigned long)own_slack, 0, 0, 0);
    }
    own = NULL;
    pthread_mutex_lock(&lock);
    taken = slot->taken;
    slot->mark = 0;
    pthread_mutex_unlock(&lock);
    return taken;
}

R2_TUNER_EXPORT int r2ccl_tuner_expect(const struct r2ccl_tuner_want *want)
{
    struct slot *slot;
    int mark = 0;

    atomic_store(&announced, true);
    if (!want) {
        return take_back();
    }
    if (want->size < sizeof(*want) || want->algo > R2CCL_TUNER_RING) {
        return -EINVAL;
    }
    take_back();
    pthread_mutex_lock(&lock);
    slot = slot_of_mark(0);
    if (slot) {
        do {
            mark = MARK_FIRST + (int)(marks++ % MARK_COUNT);
        } while (slot_of_mark(mark));
        *slot = (struct slot){.mark = mark, .want = *want};
    }
    pthread_mutex_unlock(&lock);
    if (!slot) {
        return -EBUSY;
    }
    own = slot;
    own_slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    if (own_slack > 0) {
        prctl(PR_SET_TIMERSLACK, (unsigned long)mark, 0, 0, 0);
    }
    return 0;
}

bool r2_tuner_announced(void)
{
    return atomic_load(&announced);
}

bool r2_tuner_take_want(struct r2ccl_tuner_want *want)
{
    struct slot *slot = own;
    int mark;

    pthread_mutex_lock(&lock);
    if (!slot) {
        mark = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
        slot = mark >= MARK_FIRST && mark < MARK_FIRST + MARK_COUNT ? slot_of_mark(mark) : NULL;
    }
    if (slot) {
        *want = slot->want;
        slot->taken++;
    }
    pthread_mutex_unlock(&lock);
    return slot != NULL;
}
