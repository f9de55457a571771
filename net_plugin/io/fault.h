/* Injected faults of a NIC: what `r2ccl-ctl fail-nic` does to it in this process.
 *
 * A transport asks before it moves bytes. The engine is not told: it has to find out by its own
 * signals, as with a real failure.
 *
 * Threads: any; the settings change under a lock, the healthy case is one relaxed load.
 */
#ifndef R2_IO_FAULT_H
#define R2_IO_FAULT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "control/segment.h"
#include "topology/nics.h"

struct r2_fault {
    enum r2_seg_fault kind;
    bool tx, rx;
    uint64_t rate;        /* bytes per second and direction */
    uint32_t loss_ppm;    /* of pieces of 64 KiB */
    uint64_t after_bytes; /* begins when that many further bytes have moved */
    uint64_t after_ops;   /* ... or at that many further operations */
    uint64_t for_ns;      /* from when it comes into force; 0: until cleared */
};

enum { R2_FAULT_RX = 0, R2_FAULT_TX = 1 };

extern atomic_bool r2_fault_armed[R2_MAX_NICS]; /* a fault is set, in force or not; fault.c */

/* Whoever is asked often asks this first. Relaxed: a fault may be seen a moment later. */
static inline bool r2_fault_none(int nic)
{
    return !atomic_load_explicit(&r2_fault_armed[nic], memory_order_relaxed);
}

extern const char r2_fault_kinds[]; /* as they are written, for messages */
/* "blackhole", "slow=100mbit": kind and value. 0 or -EINVAL. `f` has no kind yet. */
int r2_fault_kind(const char *text, struct r2_fault *f);
void r2_fault_set(int nic, const struct r2_fault *fault);
void r2_fault_clear(int nic);
enum r2_fault_news {
    R2_FAULT_SAME,
    R2_FAULT_CHANGED, /* it was set or cleared, or its `after_bytes` or `after_ops` are reached */
    R2_FAULT_OVER,    /* its time is */
};

/* Clears what has expired; what has changed since the last call. */
enum r2_fault_news r2_fault_tick(int nic, uint64_t now);
/* How many of `want` bytes may move now, 0 .. want. At 0, *retry_ns is when to ask again, or 0:
 * not before r2_transport_ops.nudge. */
size_t r2_fault_allow(int nic, int dir, size_t want, uint64_t *retry_ns);
/* Of what was allowed, so many bytes did not move after all (a full socket, an empty one): they are
 * not counted. */
void r2_fault_unmoved(int nic, int dir, size_t bytes);
/* The process begins a send or a receive. */
void r2_fault_op(void);
/* True while the fault is of this kind and in force for the direction. */
bool r2_fault_is(int nic, enum r2_seg_fault kind, int dir);
/* "" or for example "blackhole tx", "slow 125000000 B/s both". */
void r2_fault_text(int nic, char *out, size_t cap);

#endif
