/* Queues all copies of an operation ahead. The device makes them when the progress thread allows it
 * (r2_direct_device).
 *
 * A driver's queue is short: CUDA's holds 1024 entries for a stream, and a call that finds it full
 * waits. Meanwhile the application could queue nothing either. So copies go in groups of pieces:
 * one entry lets a group go, one says that it is done, and pieces at equal distances are one copy.
 *
 * Threads: the application's, one call at a time.
 */
#ifndef R2_DIRECT_AHEAD_H
#define R2_DIRECT_AHEAD_H

#include "direct/direct.h"
#include "direct/exec.h"

struct r2_ahead {
    const struct r2_direct_device *device;
    void *user; /* the device's */
    const struct r2_direct_call *call;
    const struct r2_schedule *schedule;
    const struct r2_exec *exec;
    uint64_t base; /* steps of all operations before */
};

/* 0, or what the device's functions returned. */
int r2_ahead_queue(const struct r2_ahead *a);

#endif
