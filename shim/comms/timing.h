/* How long operations of a communicator take on its device: what plans are judged by.
 *
 * CUDA's driver is asked by a thread of its own, one of the process. It is started when the first
 * operation has been timed with CUDA, and holds no lock while it asks. The driver may not answer
 * before another thread's call ends, for example cudaFree. That call waits for kernels, which wait
 * for other ranks, and those may wait for what the planning thread has to say. */
#ifndef R2_COMMS_TIMING_H
#define R2_COMMS_TIMING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

#define R2_TIMING_WATCHES 16 /* operations that are timed between two looks at them */

/* What stopwatches note: bytes of the operation, whether a plan took it, and the epoch that was in
 * force. */
enum { R2_TIMING_BYTES, R2_TIMING_PLANNED, R2_TIMING_EPOCH, R2_TIMING_NOTES };
_Static_assert((int)R2_TIMING_NOTES == R2_DEVICE_NOTES, "a stopwatch has room for these");

struct r2_timing {
    int device;
    struct r2_device_watch watches[R2_TIMING_WATCHES];
    /* the thread that times */
    atomic_uint timed; /* operations that a watch was started for */
    struct r2_device_watch *now;
    bool polled;     /* the process's thread knows it */
    atomic_int turn; /* whose the driver's part is: timing.c */
    atomic_bool aborted;
    struct r2_timing *next;
};

/* Of a communicator on this device, or NULL. */
struct r2_timing *r2_timing_new(int device);
/* Around an operation that this thread puts on `stream`: what r2_timing_take gives back.
 * Nothing is timed while all watches are in use, or the stream is being captured. */
void r2_timing_start(struct r2_timing *t, const uint64_t note[R2_TIMING_NOTES], void *stream);
/* good false: the operation was refused. */
void r2_timing_stop(struct r2_timing *t, void *stream, bool good);
/* The oldest operation whose time is known: true. One thread, which may hold locks: no call of the
 * driver, no wait. */
bool r2_timing_take(struct r2_timing *t, uint64_t *ns, uint64_t note[R2_TIMING_NOTES]);
/* Its communicator is being aborted: r2_timing_free makes no call of the driver. */
void r2_timing_abort(struct r2_timing *t);
/* Nobody times or takes any more. Its events are destroyed when this returns, so that the
 * application may end its device; but while the driver is being asked about them, and after an
 * abort, that is left to the thread: nothing is waited for. */
void r2_timing_free(struct r2_timing *t);

#endif
