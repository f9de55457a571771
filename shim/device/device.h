/* What the executors need of the device that communicators run on: CUDA's driver, where this
 * process uses it, else the host (the stand-in for NCCL, whose streams are nothing).
 *
 * The driver is never loaded or initialised here: a process that has not done so itself has no
 * device. Every function may be called from any thread. Errors: 0 or -errno.
 */
#ifndef R2_DEVICE_DEVICE_H
#define R2_DEVICE_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Whether this process has CUDA's driver in use. */
bool r2_device_cuda(void);

/* For a thread of the shim, around what it does with NCCL or the driver. `device` becomes its
 * current one. The primary context is held only meanwhile, since the application may reset the
 * device between two such times. What the thread does disturbs no capture of another thread.
 * Returns 0. -ENODEV: the application has ended the device, and all that was on it is gone. Or
 * -EIO. The host: nothing. */
int r2_device_enter(int device);
/* After an enter that returned 0. */
void r2_device_leave(void);

/* Whether work that is put on `stream` now would be recorded into a graph. */
bool r2_device_capturing(void *stream);

/* A stopwatch on a stream. On the host it measures from start to stop; with CUDA it puts two events
 * on the stream, between other work and without a wait. Three threads share it, one for each task.
 * One starts and stops it. One asks the driver (poll), which may block for as long as another
 * thread's call does. One takes what is known and never waits. */
#define R2_DEVICE_NOTES 3
struct r2_device_watch {
    atomic_int state;
    bool device;
    void *events[2];
    uint64_t begin_ns, ns;
    uint64_t note[R2_DEVICE_NOTES]; /* the caller's, between start and stop */
};
/* 0; -EBUSY: the last time was not read yet, or the stream is being captured; -EIO. */
int r2_device_watch_start(struct r2_device_watch *w, void *stream);
/* good false: forget it. */
void r2_device_watch_stop(struct r2_device_watch *w, void *stream, bool good);
/* Whether the driver is to be asked. */
bool r2_device_watch_asks(const struct r2_device_watch *w);
/* Asks CUDA's driver whether the time is known; true: it is now, r2_device_watch_take has it. For a
 * thread that holds no lock and has entered the device, since asking for an event can break another
 * thread's capture. On the host there is nothing to ask. */
bool r2_device_watch_poll(struct r2_device_watch *w);
/* True once, when the time is known, with the notes of its start. */
bool r2_device_watch_take(struct r2_device_watch *w, uint64_t *ns, uint64_t note[R2_DEVICE_NOTES]);
/* Nobody uses it any more. Asks the driver, too. */
void r2_device_watch_free(struct r2_device_watch *w);

#endif
