#define _GNU_SOURCE
#include "device/copies.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "device/device.h"

#define CUDA_DISABLE_TIMING 2
#define CUDA_NOT_READY 600
#define CUDA_STREAM_NON_BLOCKING 1
#define CUDA_WAIT_GEQ 0
#define CUDA_HOST_ALLOC_DEVICEMAP 2

#define UNDER_WAY 64 /* copies each way; a power of two */

static struct {
    int (*primary)(void **context, int device);
    int (*release)(int device);
    int (*set_current)(void *context);
    int (*get_current)(void **context);
    int (*host_alloc)(void **memory, size_t len, unsigned flags);
    int (*host_free)(void *memory);
    int (*host_device)(uint64_t *device, void *memory, unsigned flags);
    int (*copy)(uint64_t to, uint64_t from, size_t len, void *stream);
    int (*stream_new)(void **stream, unsigned flags, int priority);
    int (*stream_free)(void *stream);
    int (*priorities)(int *least, int *greatest);
    int (*stream_wait_event)(void *stream, void *event, unsigned flags);
    int (*stream_wait_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    int (*event_new)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event);
    int (*event_free)(void *event);
} cuda;

struct way {
    void *stream;
    void *events[UNDER_WAY];
    uint32_t begun, ended;
};

struct r2_copies {
    int device;
    void *context;
    size_t len;
    char *window; /* then, on a cache line of its own, the gate */
    _Atomic uint32_t *gate;
    uint64_t gate_address;
    struct way ways[2]; /* in, out */
};

static bool found;

static void look(void)
{
    void *lib = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);

    if (!lib)
        return;
    cuda.primary = dlsym(lib, "cuDevicePrimaryCtxRetain");
    cuda.release = dlsym(lib, "cuDevicePrimaryCtxRelease_v2");
    cuda.set_current = dlsym(lib, "cuCtxSetCurrent");
    cuda.get_current = dlsym(lib, "cuCtxGetCurrent");
    cuda.host_alloc = dlsym(lib, "cuMemHostAlloc");
    cuda.host_free = dlsym(lib, "cuMemFreeHost");
    cuda.host_device = dlsym(lib, "cuMemHostGetDevicePointer_v2");
    cuda.copy = dlsym(lib, "cuMemcpyAsync");
    cuda.stream_new = dlsym(lib, "cuStreamCreateWithPriority");
    cuda.stream_free = dlsym(lib, "cuStreamDestroy_v2");
    cuda.priorities = dlsym(lib, "cuCtxGetStreamPriorityRange");
    cuda.stream_wait_event = dlsym(lib, "cuStreamWaitEvent");
    cuda.stream_wait_value = dlsym(lib, "cuStreamWaitValue32_v2");
    cuda.event_new = dlsym(lib, "cuEventCreate");
    cuda.event_record = dlsym(lib, "cuEventRecord");
    cuda.event_query = dlsym(lib, "cuEventQuery");
    cuda.event_free = dlsym(lib, "cuEventDestroy_v2");
    found = cuda.primary && cuda.release && cuda.set_current && cuda.get_current &&
            cuda.host_alloc && cuda.host_free && cuda.host_device && cuda.copy && cuda.stream_new &&
            cuda.stream_free && cuda.priorities && cuda.stream_wait_event &&
            cuda.stream_wait_value && cuda.event_new && cuda.event_record && cuda.event_query &&
            cuda.event_free;
}

/* The device's primary context in place of the caller's. */
static int enter(const struct r2_copies *c, void **before)
{
    return cuda.get_current(before) || (*before != c->context && cuda.set_current(c->context))
               ? -EIO
               : 0;
}

static void leave(const struct r2_copies *c, void *before)
{
    if (before != c->context)
        cuda.set_current(before);
}

/* ---- gates */

int r2_copies_mark(struct r2_copies *c, void *stream, void **event)
{
    void *before;
    int rc = enter(c, &before);

    *event = NULL;
    if (rc)
        return rc;
    if (cuda.event_new(event, CUDA_DISABLE_TIMING))
        rc = -EIO;
    if (rc == 0 && cuda.event_record(*event, stream)) {
        cuda.event_free(*event);
        rc = -EIO;
    }
    leave(c, before);
    return rc;
}

void r2_copies_forget(struct r2_copies *c, void *event)
{
    void *before;

    if (enter(c, &before))
        return;
    cuda.event_free(event);
    leave(c, before);
}

int r2_copies_gate(struct r2_copies *c, void *stream, uint64_t number)
{
    void *before;
    int rc = enter(c, &before);

    if (rc)
        return rc;
    rc = cuda.stream_wait_value(stream, c->gate_address, (uint32_t)number, CUDA_WAIT_GEQ);
    leave(c, before);
    return rc ? -EIO : 0;
}

void r2_copies_open(struct r2_copies *c, uint64_t number)
{
    uint32_t now = atomic_load(c->gate);

    /* Forward only. Release: what the copies brought is there before. */
    while ((int32_t)((uint32_t)number - now) > 0 &&
           !atomic_compare_exchange_weak(c->gate, &now, (uint32_t)number))
        ;
}

/* ---- copies */

int r2_copies_begin(struct r2_copies *c, void *event)
{
    int rc = r2_device_enter(c->device);

    if (rc)
        return rc;
    for (int out = 0; out < 2 && rc == 0; out++)
        rc = cuda.stream_wait_event(c->ways[out].stream, event, 0) ? -EIO : 0;
    cuda.event_free(event); /* the waits keep what they need */
    if (rc)
        r2_device_leave();
    return rc;
}

void r2_copies_end(struct r2_copies *c)
{
    (void)c;
    r2_device_leave();
}

int r2_copies_copy(struct r2_copies *c, bool out, void *to, const void *from, size_t len)
{
    struct way *way = &c->ways[out];

    if (way->begun - way->ended == UNDER_WAY)
        return 0;
    if (cuda.copy((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, len, way->stream) ||
        cuda.event_record(way->events[way->begun % UNDER_WAY], way->stream))
        return -EIO;
    way->begun++;
    return 1;
}

int r2_copies_copied(struct r2_copies *c, bool out)
{
    struct way *way = &c->ways[out];
    int n = 0;

    while (way->ended != way->begun) {
        int rc = cuda.event_query(way->events[way->ended % UNDER_WAY]);

        if (rc == CUDA_NOT_READY)
            break;
        if (rc)
            return -EIO;
        way->ended++;
        n++;
    }
    return n;
}

/* ---- life */

void *r2_copies_window(struct r2_copies *c)
{
    return c->window;
}

static int make_way(struct way *way, int priority)
{
    if (cuda.stream_new(&way->stream, CUDA_STREAM_NON_BLOCKING, priority))
        return -EIO;
    for (int i = 0; i < UNDER_WAY; i++)
        if (cuda.event_new(&way->events[i], CUDA_DISABLE_TIMING))
            return -EIO;
    return 0;
}

static int make(struct r2_copies *c)
{
    int least = 0, greatest = 0, rc = 0;
    void *window = NULL;

    if (cuda.host_alloc(&window, c->len + 64, CUDA_HOST_ALLOC_DEVICEMAP))
        return -ENOMEM;
    c->window = window;
    c->gate = (_Atomic uint32_t *)(void *)(c->window + c->len);
    atomic_init(c->gate, 0);
    if (cuda.host_device(&c->gate_address, c->window, 0) || cuda.priorities(&least, &greatest))
        return -EIO;
    c->gate_address += c->len;
    for (int i = 0; i < 2 && rc == 0; i++)
        rc = make_way(&c->ways[i], greatest);
    /* A gate that is open: whether the device can. */
    if (rc == 0 && cuda.stream_wait_value(c->ways[0].stream, c->gate_address, 0, CUDA_WAIT_GEQ))
        rc = -ENOTSUP;
    return rc;
}

static void unmake(struct r2_copies *c)
{
    for (int i = 0; i < 2; i++) {
        if (c->ways[i].stream)
            cuda.stream_free(c->ways[i].stream);
        for (int e = 0; e < UNDER_WAY; e++)
            if (c->ways[i].events[e])
                cuda.event_free(c->ways[i].events[e]);
    }
    if (c->window)
        cuda.host_free(c->window); /* waits for copies under way */
}

int r2_copies_new(struct r2_copies **out, int device, size_t len)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct r2_copies *c;
    void *before = NULL;
    int rc;

    *out = NULL;
    pthread_once(&once, look);
    if (!found || len % 64 || cuda.get_current(&before))
        return -ENOTSUP;
    rc = r2_device_enter(device);
    if (rc)
        return rc;
    c = calloc(1, sizeof(*c));
    if (c) {
        c->device = device;
        c->len = len;
        rc = cuda.get_current(&c->context) ? -EIO : make(c);
    } else {
        rc = -ENOMEM;
    }
    if (rc && c) {
        unmake(c);
        free(c);
        c = NULL;
    }
    r2_device_leave();
    cuda.set_current(before);
    *out = c;
    return rc;
}

void r2_copies_free(struct r2_copies *c)
{
    void *before = NULL;

    if (!c)
        return;
    cuda.get_current(&before);
    /* An application that has ended the device has ended all that was on it. */
    if (r2_device_enter(c->device) == 0) {
        unmake(c);
        r2_device_leave();
        cuda.set_current(before);
    }
    free(c);
}
