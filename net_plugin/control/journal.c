/* The journal ring: any number of writers, readers that hold nobody up. */
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

#include "control/impl.h"
#include "util/ratelimit.h"

#define SPINS 1000

/* Takes the slot of event `number`: its stamp goes from an older event's (even) to our odd one.
 * The acquire pairs with the release of the older event's writer, whose stores thus come before
 * ours. False: a newer event has the slot already, or an older one is still being written. */
static bool slot_take(uint64_t *stamp, uint64_t number)
{
    for (int spin = 0; spin < SPINS; spin++) {
        uint64_t now = __atomic_load_n(stamp, __ATOMIC_RELAXED);

        if (now > 2 * number)
            return false;
        if (!(now & 1) && __atomic_compare_exchange_n(stamp, &now, 2 * number + 1, false,
                                                      __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return true;
        sched_yield();
    }
    return false;
}

void r2_control_journal(struct r2_control *ctl, const struct r2_control_event *event)
{
    struct r2_segment *seg = ctl->seg;
    uint64_t number = __atomic_fetch_add(&seg->header.event_head, 1, __ATOMIC_RELAXED);
    uint32_t row = (uint32_t)(number % R2_SEG_MAX_EVENTS);
    struct r2_seg_journal_entry *e = &seg->events[row];

    if (!slot_take(&e->stamp, number)) {
        r2_count(&seg->counters.journal_dropped, 1);
        return;
    }
    r2_row_u64(&e->real_ns, r2_control_clock(CLOCK_REALTIME));
    r2_row_u64(&e->mono_ns, r2_control_clock(CLOCK_MONOTONIC));
    r2_row_u32(&e->event, (uint32_t)event->event);
    r2_row_u32(&e->peer_pid, event->peer_pid);
    r2_row_u64(&e->generation, event->generation);
    r2_row_u64(&e->bytes, event->bytes);
    r2_row_u64(&e->duration_us, event->duration_us);
    r2_row_text(e->nic, sizeof(e->nic), event->nic);
    r2_row_text(e->remote_nic, sizeof(e->remote_nic), event->remote_nic);
    r2_row_text(e->peer_host, sizeof(e->peer_host), event->peer_host);
    r2_row_cause(e->cause, sizeof(e->cause), event->cause);
    r2_row_mark(ctl, R2_SEG_KIND_EVENTS, row);
    /* Pairs with the reader's acquire of the stamp: an even stamp means that all above is there. */
    __atomic_store_n(&e->stamp, 2 * number + 2, __ATOMIC_RELEASE);
    r2_control_publish_events(ctl);
}

bool r2_control_journal_seldom(struct r2_control *ctl, const struct r2_control_event *event,
                               struct r2_ratelimit *kind, bool anyway, uint64_t now)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all kinds; a leaf */
    struct r2_control_event ev = *event;
    unsigned untold = 0;
    char text[128];
    bool pass;

    pthread_mutex_lock(&lock);
    pass = r2_ratelimit_pass(kind, anyway, now, &untold);
    pthread_mutex_unlock(&lock);
    if (!pass)
        return false;
    if (untold) {
        snprintf(text, sizeof(text), "%s (and %u before, not shown)", event->cause, untold);
        ev.cause = text;
    }
    r2_control_journal(ctl, &ev);
    return true;
}
