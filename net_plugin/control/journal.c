/* The journal ring: any number of writers, readers that hold nobody up. */
#include <sched.h>

#include "control/impl.h"

#define SPINS 1000

static const char *const names[] = {
    [R2_EV_NONE] = "none",
    [R2_EV_STARTED] = "started",
    [R2_EV_ENDED] = "ended",
    [R2_EV_CONFIG] = "config",
    [R2_EV_NIC_DOWN] = "nic-down",
    [R2_EV_NIC_UP] = "nic-up",
    [R2_EV_NIC_SUSPECT] = "nic-suspect",
    [R2_EV_NIC_PROBING] = "nic-probing",
    [R2_EV_NIC_RAMPING] = "nic-ramping",
    [R2_EV_NIC_DRAINED] = "nic-drained",
    [R2_EV_NIC_DAMPED] = "nic-damped",
    [R2_EV_PATH_UP] = "path-up",
    [R2_EV_PATH_DOWN] = "path-down",
    [R2_EV_PATH_SUSPECT] = "path-suspect",
    [R2_EV_PATH_PROBING] = "path-probing",
    [R2_EV_FENCE] = "fence",
    [R2_EV_FENCED] = "fenced",
    [R2_EV_REPLAY] = "replay",
    [R2_EV_RESUME] = "resume",
    [R2_EV_FAULT_INJECTED] = "fault-injected",
    [R2_EV_FAULT_CLEARED] = "fault-cleared",
    [R2_EV_PEER_SUSPECT] = "peer-suspect",
    [R2_EV_PEER_GONE] = "peer-gone",
    [R2_EV_CONNECTION_OPENED] = "connection-opened",
    [R2_EV_CONNECTION_CLOSED] = "connection-closed",
    [R2_EV_CONNECTION_FAILED] = "connection-failed",
    [R2_EV_NO_PATH] = "no-path",
    [R2_EV_CRC_ERROR] = "crc-error",
    [R2_EV_WEIGHT] = "weight",
    [R2_EV_VERDICT] = "verdict",
    [R2_EV_OPERATOR] = "operator",
    [R2_EV_WARNING] = "warning",
    [R2_EV_ERROR] = "error",
    [R2_EV_PLAN] = "plan",
    [R2_EV_PATH_HEALTHY] = "path-healthy",
    [R2_EV_PATH_DRAINED] = "path-drained",
    [R2_EV_PATH_DAMPED] = "path-damped",
    [R2_EV_PATH_RAMPING] = "path-ramping",
    [R2_EV_PATH_CLOSED] = "path-closed",
    [R2_EV_NIC_HEALTHY] = "nic-healthy",
};

const char *r2_control_event_name(enum r2_seg_event event)
{
    if ((unsigned)event >= sizeof(names) / sizeof(names[0]) || !names[event])
        return "unknown";
    return names[event];
}

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
