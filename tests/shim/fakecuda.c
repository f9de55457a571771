/* As much of CUDA's driver as shim/device uses, so that its code runs without a GPU. A stream whose
 * address is FAKE_CAPTURING is being captured, one at FAKE_BEGINS from the second question about it
 * on; events are times. While fake_cuda_hold(1) holds, a question about an event is not
 * answered, nor is one destroyed, as when another thread is inside cudaFree. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../pause.h"

#define API __attribute__((visibility("default")))
/* In the room that glibc keeps for it: LeakSanitizer cannot follow a living thread's other kind. */
#define PER_THREAD static __thread __attribute__((tls_model("initial-exec")))
#define FAKE_CAPTURING ((void *)0xca)
#define FAKE_BEGINS ((void *)0xcb)

#define DEVICES 64
#define DESTROYED 709 /* the context is */
PER_THREAD void *current;
static atomic_int retained, ended, forbidden;
static atomic_uintptr_t life = 1; /* of all contexts, which a reset ends */

API int fake_cuda_retained(void); /* contexts that were retained and not released */
int fake_cuda_retained(void)
{
    return atomic_load(&retained);
}

API void fake_cuda_reset(int on); /* the application ends its devices, or has them again */
void fake_cuda_reset(int on)
{
    atomic_fetch_add(&life, on != 0);
    atomic_store(&ended, on);
}

API void fake_cuda_forbid(int on); /* nobody may ask whether there is a driver */
void fake_cuda_forbid(int on)
{
    atomic_store(&forbidden, on);
}

/* On this thread, in a context that is not destroyed. */
static int there(void)
{
    char name[16] = "";

    pthread_getname_np(pthread_self(), name, sizeof(name));
    if (strcmp(name, "r2ccl-direct") == 0)
        abort(); /* an application that frees memory may hold the driver's lock until this thread
                    has ended an operation */
    return current && (uintptr_t)current / DEVICES == atomic_load(&life);
}

API int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active);
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    (void)device;
    *flags = 0;
    *active = !atomic_load(&ended);
    return 0;
}

API int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRetain(void **context, int device)
{
    if (atomic_load(&ended))
        abort(); /* would begin one that the application has ended */
    atomic_fetch_add(&retained, 1);
    *context = (void *)(atomic_load(&life) * DEVICES + (uintptr_t)device % DEVICES);
    return 0;
}

API int cuDevicePrimaryCtxRelease_v2(int device);
int cuDevicePrimaryCtxRelease_v2(int device)
{
    (void)device;
    atomic_fetch_sub(&retained, 1);
    return 0;
}

API int cuCtxSetCurrent(void *context);
int cuCtxSetCurrent(void *context)
{
    current = context;
    return 0;
}

API int cuCtxGetCurrent(void **context);
int cuCtxGetCurrent(void **context)
{
    if (atomic_load(&forbidden))
        abort(); /* it could block: a lock is held */
    *context = current;
    return 0;
}

API int cuStreamIsCapturing(void *stream, int *status);
int cuStreamIsCapturing(void *stream, int *status)
{
    static atomic_int asked;

    *status = stream == FAKE_CAPTURING || (stream == FAKE_BEGINS && atomic_fetch_add(&asked, 1));
    return 0;
}

API int cuThreadExchangeStreamCaptureMode(int *mode);
int cuThreadExchangeStreamCaptureMode(int *mode)
{
    PER_THREAD int now;
    int before = now;

    now = *mode;
    *mode = before;
    return 0;
}

API int cuMemGetInfo_v2(size_t *left, size_t *total);
int cuMemGetInfo_v2(size_t *left, size_t *total)
{
    *left = there() ? (size_t)1 << 30 : 0; /* nobody has a device before it entered one */
    *total = (size_t)1 << 34;
    return there() ? 0 : 201;
}

static atomic_int events;

API int fake_cuda_events(void); /* that were made and not destroyed */
int fake_cuda_events(void)
{
    return atomic_load(&events);
}

static struct event {
    atomic_int used;
    void *context;
    struct timespec at;
} pool[4096];

static struct event *event_of(void *event)
{
    return (struct event *)((char *)event - offsetof(struct event, at));
}

API int cuEventCreate(void **event, unsigned flags);
int cuEventCreate(void **event, unsigned flags)
{
    (void)flags;
    for (int i = 0; i < 4096; i++) {
        int unused = 0;

        if (atomic_compare_exchange_strong(&pool[i].used, &unused, 1)) {
            atomic_fetch_add(&events, 1);
            pool[i].context = current;
            *event = &pool[i].at;
            return 0;
        }
    }
    return 2;
}

API int cuEventRecord(void *event, void *stream);
int cuEventRecord(void *event, void *stream)
{
    if (stream == FAKE_CAPTURING)
        abort(); /* would be recorded into the application's graph */
    if (event_of(event)->context != current)
        return 400; /* it and the stream belong to different contexts */
    clock_gettime(CLOCK_MONOTONIC, event);
    return 0;
}

static atomic_int hold, held, slow, answer, asked;

API int fake_cuda_asked(void); /* questions about events */
int fake_cuda_asked(void)
{
    return atomic_load(&asked);
}

API void fake_cuda_answer(int is_slow, int what); /* of questions about events, from now on */
void fake_cuda_answer(int is_slow, int what)
{
    atomic_store(&slow, is_slow);
    atomic_store(&answer, what);
}

API void fake_cuda_hold(int on);
void fake_cuda_hold(int on)
{
    atomic_store(&hold, on);
}

API int fake_cuda_held(void); /* threads that wait for an answer */
int fake_cuda_held(void)
{
    return atomic_load(&held);
}

static void await_answer(void)
{
    if (!atomic_load(&hold))
        return;
    atomic_fetch_add(&held, 1);
    UNTIL(!atomic_load(&hold));
    atomic_fetch_sub(&held, 1);
}

API int cuEventQuery(void *event);
int cuEventQuery(void *event)
{
    int mode = 2;

    atomic_fetch_add(&asked, 1);
    await_answer();
    if (atomic_load(&slow))
        pause_us(1000);
    cuThreadExchangeStreamCaptureMode(&mode);
    if (mode != 2)
        abort(); /* could break another thread's capture */
    (void)event;
    return there() ? atomic_load(&answer) : DESTROYED;
}

API int cuEventElapsedTime(float *ms, void *from, void *to);
int cuEventElapsedTime(float *ms, void *from, void *to)
{
    const struct timespec *a = from, *b = to;

    *ms = (float)(b->tv_sec - a->tv_sec) * 1e3f + (float)(b->tv_nsec - a->tv_nsec) * 1e-6f;
    return 0;
}

API int cuEventDestroy_v2(void *event);
int cuEventDestroy_v2(void *event)
{
    char name[16] = "";
    int mode = 2;
    bool ours;

    pthread_getname_np(pthread_self(), name, sizeof(name));
    ours = strncmp(name, "r2ccl-", 6) == 0;
    if (ours && !there())
        abort(); /* in no context of the device */
    cuThreadExchangeStreamCaptureMode(&mode);
    if (ours && mode != 2)
        abort(); /* could break another thread's capture */
    cuThreadExchangeStreamCaptureMode(&mode);
    if (atomic_load(&hold) && !ours)
        abort(); /* would keep a thread of the application */
    await_answer();
    atomic_fetch_sub(&events, 1);
    atomic_store(&event_of(event)->used, 0);
    return 0;
}

/* ---- copies and gates: done at once, on the calling thread, as by a device with one queue for all
 * streams. A gate that is closed keeps the caller, as it would keep the stream. */

API int fake_cuda_copies(void); /* that were made */
static atomic_int copies;
int fake_cuda_copies(void)
{
    return atomic_load(&copies);
}

API int cuMemHostAlloc(void **memory, size_t len, unsigned flags);
int cuMemHostAlloc(void **memory, size_t len, unsigned flags)
{
    (void)flags;
    if (!there())
        return 201;
    if (getenv("R2_FAKECUDA_FULL")) /* no memory can be pinned */
        return 2;
    if (getenv("R2_FAKECUDA_DIES"))
        raise(SIGKILL);
    return posix_memalign(memory, 4096, len) ? 2 : 0;
}

API int cuMemFreeHost(void *memory);
int cuMemFreeHost(void *memory)
{
    free(memory);
    return there() ? 0 : DESTROYED;
}

API int cuMemHostGetDevicePointer_v2(uint64_t *device, void *memory, unsigned flags);
int cuMemHostGetDevicePointer_v2(uint64_t *device, void *memory, unsigned flags)
{
    (void)flags;
    *device = (uintptr_t)memory;
    return 0;
}

API int cuMemcpyAsync(uint64_t to, uint64_t from, size_t len, void *stream);
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t len, void *stream)
{
    (void)stream;
    if (!there())
        return 201;
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, len);
    atomic_fetch_add(&copies, 1);
    return 0;
}

struct rectangle { /* CUDA_MEMCPY2D */
    struct {
        size_t x, y;
        int memory;
        const void *host;
        uint64_t device;
        void *array;
        size_t pitch;
    } from, to;
    size_t width, height;
};

API int cuMemcpy2DAsync_v2(const struct rectangle *r, void *stream);
int cuMemcpy2DAsync_v2(const struct rectangle *r, void *stream)
{
    if (r->from.memory != 4 || r->to.memory != 4 || r->from.pitch < r->width ||
        r->to.pitch < r->width || r->from.pitch > INT32_MAX || r->to.pitch > INT32_MAX)
        return 1;
    for (size_t i = 0; i < r->height; i++) {
        int rc = cuMemcpyAsync(r->to.device + i * r->to.pitch, r->from.device + i * r->from.pitch,
                               r->width, stream);

        if (rc)
            return rc;
    }
    return 0;
}

API int cuCtxGetStreamPriorityRange(int *least, int *greatest);
int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return 0;
}

API int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority);
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    *stream = malloc(1);
    return *stream && there() ? 0 : 201;
}

API int cuStreamQuery(void *stream);
int cuStreamQuery(void *stream)
{
    (void)stream;
    return there() ? 0 : DESTROYED;
}

API int cuStreamSynchronize(void *stream);
int cuStreamSynchronize(void *stream)
{
    (void)stream;
    return there() ? 0 : DESTROYED;
}

API int cuStreamDestroy_v2(void *stream);
int cuStreamDestroy_v2(void *stream)
{
    free(stream);
    return there() ? 0 : DESTROYED;
}

API int cuStreamWaitEvent(void *stream, void *event, unsigned flags);
int cuStreamWaitEvent(void *stream, void *event, unsigned flags)
{
    (void)stream, (void)flags;
    return atomic_load(&event_of(event)->used) && there() ? 0 : 400;
}

API int cuStreamWaitValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags);
int cuStreamWaitValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags)
{
    const uint32_t *word = (const uint32_t *)(uintptr_t)address;

    (void)stream;
    if (!there() || flags != 0)
        return 201;
    if (getenv("R2_FAKECUDA_NO_WAITS"))
        return 801; /* not supported */
    UNTIL((int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) >= 0);
    return 0;
}

API int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags);
int cuStreamWriteValue32_v2(void *stream, uint64_t address, uint32_t value, unsigned flags)
{
    (void)stream;
    if (!there() || flags != 0)
        return 201;
    __atomic_store_n((uint32_t *)(uintptr_t)address, value, __ATOMIC_RELEASE);
    return 0;
}
