/* CUDA's driver interface, as far as device.h needs it: our own declarations. A runtime stream is a
 * driver stream; a device's number is the same in both. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "device/device.h"
#include "util/clock.h"
#include "util/log.h"

#define CUDA_DISABLE_NOTHING 0 /* flags of an event: with timing */
#define CUDA_NOT_READY 600
#define CUDA_CAPTURE_NONE 0
#define CUDA_CAPTURE_RELAXED 2

static struct {
    atomic_bool found;
    int (*primary)(void **context, int device);
    int (*release)(int device);
    int (*state)(int device, unsigned *flags, int *active);
    int (*set_current)(void *context);
    int (*get_current)(void **context);
    int (*capturing)(void *stream, int *status);
    int (*exchange)(int *mode);
    int (*event_new)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_elapsed)(float *ms, void *from, void *to);
    int (*event_free)(void *event);
} cuda;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void look(void)
{
    void *lib = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);

    if (!lib)
        return;
    cuda.primary = dlsym(lib, "cuDevicePrimaryCtxRetain");
    cuda.release = dlsym(lib, "cuDevicePrimaryCtxRelease_v2");
    cuda.state = dlsym(lib, "cuDevicePrimaryCtxGetState");
    cuda.set_current = dlsym(lib, "cuCtxSetCurrent");
    cuda.get_current = dlsym(lib, "cuCtxGetCurrent");
    cuda.capturing = dlsym(lib, "cuStreamIsCapturing");
    cuda.exchange = dlsym(lib, "cuThreadExchangeStreamCaptureMode");
    cuda.event_new = dlsym(lib, "cuEventCreate");
    cuda.event_record = dlsym(lib, "cuEventRecord");
    cuda.event_query = dlsym(lib, "cuEventQuery");
    cuda.event_elapsed = dlsym(lib, "cuEventElapsedTime");
    cuda.event_free = dlsym(lib, "cuEventDestroy_v2");
    if (cuda.primary && cuda.release && cuda.state && cuda.set_current && cuda.get_current &&
        cuda.capturing && cuda.exchange && cuda.event_new && cuda.event_record &&
        cuda.event_query && cuda.event_elapsed && cuda.event_free)
        /* Release: who sees the flag sees the functions. */
        atomic_store_explicit(&cuda.found, true, memory_order_release);
    else
        dlclose(lib);
}

static bool driver(void)
{
    if (atomic_load_explicit(&cuda.found, memory_order_acquire))
        return true;
    pthread_mutex_lock(&lock);
    if (!atomic_load_explicit(&cuda.found, memory_order_relaxed))
        look();
    pthread_mutex_unlock(&lock);
    return atomic_load_explicit(&cuda.found, memory_order_acquire);
}

bool r2_device_cuda(void)
{
    void *context = NULL;

    /* A loaded driver that nobody has initialised says so here. */
    return driver() && cuda.get_current(&context) == 0;
}

static __thread int entered = -1;

int r2_device_enter(int device)
{
    static __thread bool relaxed;
    int mode = CUDA_CAPTURE_RELAXED, active = 0;
    void *context = NULL;
    unsigned flags;

    if (device < 0 || !r2_device_cuda())
        return 0;
    if (cuda.state(device, &flags, &active))
        return -EIO;
    if (!active)
        return -ENODEV; /* nor is one made for the application that has ended it */
    if (cuda.primary(&context, device))
        return -EIO;
    if (cuda.set_current(context) || (!relaxed && cuda.exchange(&mode))) {
        cuda.release(device);
        return -EIO;
    }
    relaxed = true; /* what the exchange gave back is the old mode */
    entered = device;
    return 0;
}

void r2_device_leave(void)
{
    if (entered < 0)
        return;
    cuda.set_current(NULL);
    cuda.release(entered);
    entered = -1;
}

bool r2_device_capturing(void *stream)
{
    int status = CUDA_CAPTURE_NONE;

    /* An error means the legacy stream while another one captures: NCCL will say so itself. */
    return r2_device_cuda() && (cuda.capturing(stream, &status) || status != CUDA_CAPTURE_NONE);
}

/* Who times stores STOPPED last, who polls KNOWN or IDLE, who takes IDLE; each with release, and is
 * read with acquire by the next: it sees what all before it left in the other fields. The host has
 * no STOPPED. */
enum { IDLE, RUNNING, STOPPED, KNOWN };

int r2_device_watch_start(struct r2_device_watch *w, void *stream)
{
    if (atomic_load_explicit(&w->state, memory_order_acquire) != IDLE)
        return -EBUSY;
    w->device = r2_device_cuda();
    if (!w->device) {
        w->begin_ns = r2_now_ns();
        atomic_store_explicit(&w->state, RUNNING, memory_order_relaxed); /* our own thread */
        return 0;
    }
    if (r2_device_capturing(stream))
        return -EBUSY;
    for (int i = 0; i < 2; i++)
        if (!w->events[i] && cuda.event_new(&w->events[i], CUDA_DISABLE_NOTHING))
            return -EIO;
    if (cuda.event_record(w->events[0], stream))
        return -EIO;
    atomic_store_explicit(&w->state, RUNNING, memory_order_relaxed);
    return 0;
}

void r2_device_watch_stop(struct r2_device_watch *w, void *stream, bool good)
{
    int next = w->device ? STOPPED : KNOWN;

    if (atomic_load_explicit(&w->state, memory_order_relaxed) != RUNNING)
        return;
    if (!w->device)
        w->ns = r2_now_ns() - w->begin_ns;
    else if (good && cuda.event_record(w->events[1], stream))
        good = false;
    atomic_store_explicit(&w->state, good ? next : IDLE, memory_order_release);
}

bool r2_device_watch_asks(const struct r2_device_watch *w)
{
    return atomic_load_explicit(&w->state, memory_order_acquire) == STOPPED;
}

bool r2_device_watch_poll(struct r2_device_watch *w)
{
    float ms = 0;
    bool known;
    int rc;

    if (!r2_device_watch_asks(w))
        return false;
    rc = cuda.event_query(w->events[1]);
    if (rc == CUDA_NOT_READY)
        return false;
    if (rc)
        R2_WARN_ONCE("CUDA's driver does not say how long an operation took (error %d)", rc);
    /* What will never be known (an error of the device that stays) is forgotten. */
    known = rc == 0 && cuda.event_elapsed(&ms, w->events[0], w->events[1]) == 0;
    w->ns = (uint64_t)((double)ms * 1e6);
    atomic_store_explicit(&w->state, known ? KNOWN : IDLE, memory_order_release);
    return known;
}

bool r2_device_watch_take(struct r2_device_watch *w, uint64_t *ns, uint64_t note[R2_DEVICE_NOTES])
{
    if (atomic_load_explicit(&w->state, memory_order_acquire) != KNOWN)
        return false;
    memcpy(note, w->note, sizeof(w->note));
    *ns = w->ns;
    atomic_store_explicit(&w->state, IDLE, memory_order_release);
    return true;
}

void r2_device_watch_free(struct r2_device_watch *w)
{
    for (int i = 0; i < 2; i++)
        if (w->events[i])
            cuda.event_free(w->events[i]);
}
