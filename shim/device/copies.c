#define _GNU_SOURCE
#include "device/copies.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "device/device.h"
#include "util/thread.h"

#define CUDA_DISABLE_TIMING 2
#define CUDA_NOT_READY 600
#define CUDA_STREAM_NON_BLOCKING 1
#define CUDA_WAIT_GEQ 0
#define CUDA_HOST_ALLOC_DEVICEMAP 2
#define CUDA_MEMORY_UNIFIED 4 /* the address says where it is */

#define FOR_GOOD (UINT32_C(1) << 30) /* so much ahead, a word lets all waits pass */

/* CUDA_MEMCPY2D of the driver. */
struct side {
    size_t x, y;
    int memory;
    const void *host;
    uint64_t device;
    void *array;
    size_t pitch;
};
struct rectangle {
    struct side from, to;
    size_t width, height;
};

static struct {
    int (*primary)(void **context, int device);
    int (*release)(int device);
    int (*set_current)(void *context);
    int (*get_current)(void **context);
    int (*host_alloc)(void **memory, size_t len, unsigned flags);
    int (*host_free)(void *memory);
    int (*host_device)(uint64_t *device, void *memory, unsigned flags);
    int (*copy)(uint64_t to, uint64_t from, size_t len, void *stream);
    int (*copy_rows)(const struct rectangle *rows, void *stream);
    int (*stream_new)(void **stream, unsigned flags, int priority);
    int (*stream_query)(void *stream);
    int (*stream_sync)(void *stream);
    int (*stream_free)(void *stream);
    int (*priorities)(int *least, int *greatest);
    int (*stream_wait_event)(void *stream, void *event, unsigned flags);
    int (*stream_wait_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    int (*stream_write_value)(void *stream, uint64_t address, uint32_t value, unsigned flags);
    int (*event_new)(void **event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_free)(void *event);
} cuda;

/* Words that the host and the device share, each in a cache line of its own. Waits compare them
 * as numbers on a circle. */
enum word { GATE, LET, DONE = LET + 2, WORDS = DONE + 2 };

#define LINE 64

struct way {
    void *stream;
    uint32_t queued; /* pieces; the application's thread */
    uint32_t seen;   /* of those that are done; the progress thread */
};

struct r2_copies {
    int device;
    void *context;
    void *event; /* the application's thread */
    size_t len;
    char *window; /* then the words */
    uint64_t words;
    struct way ways[2];    /* in, out */
    atomic_flag let, open; /* for good */
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
    cuda.copy_rows = dlsym(lib, "cuMemcpy2DAsync_v2");
    cuda.stream_new = dlsym(lib, "cuStreamCreateWithPriority");
    cuda.stream_query = dlsym(lib, "cuStreamQuery");
    cuda.stream_sync = dlsym(lib, "cuStreamSynchronize");
    cuda.stream_free = dlsym(lib, "cuStreamDestroy_v2");
    cuda.priorities = dlsym(lib, "cuCtxGetStreamPriorityRange");
    cuda.stream_wait_event = dlsym(lib, "cuStreamWaitEvent");
    cuda.stream_wait_value = dlsym(lib, "cuStreamWaitValue32_v2");
    cuda.event_new = dlsym(lib, "cuEventCreate");
    cuda.event_record = dlsym(lib, "cuEventRecord");
    cuda.stream_write_value = dlsym(lib, "cuStreamWriteValue32_v2");
    cuda.event_free = dlsym(lib, "cuEventDestroy_v2");
    found = cuda.primary && cuda.release && cuda.set_current && cuda.get_current &&
            cuda.host_alloc && cuda.host_free && cuda.host_device && cuda.copy && cuda.copy_rows &&
            cuda.stream_new && cuda.stream_query && cuda.stream_sync && cuda.stream_free &&
            cuda.priorities && cuda.stream_wait_event && cuda.stream_wait_value &&
            cuda.stream_write_value && cuda.event_new && cuda.event_record && cuda.event_free;
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

/* ---- words */

static _Atomic uint32_t *word(const struct r2_copies *c, int w)
{
    return (_Atomic uint32_t *)(void *)(c->window + c->len + (size_t)w * LINE);
}

static uint64_t address(const struct r2_copies *c, int w)
{
    return c->words + (uint64_t)w * LINE;
}

/* Forward only. Release: what was written before is there when the device, or its next reader, sees
 * the word. */
static void raise_to(_Atomic uint32_t *word, uint32_t value)
{
    uint32_t now = atomic_load_explicit(word, memory_order_relaxed);

    while ((int32_t)(value - now) > 0 &&
           !atomic_compare_exchange_weak_explicit(word, &now, value, memory_order_release,
                                                  memory_order_relaxed))
        ;
}

void r2_copies_open(struct r2_copies *c, uint64_t number)
{
    raise_to(word(c, GATE), (uint32_t)number);
}

/* Beside r2_copies_let, too: that adds one to what is here. */
void r2_copies_let_all(struct r2_copies *c)
{
    if (atomic_flag_test_and_set(&c->let))
        return;
    for (int w = LET; w < DONE; w++)
        atomic_fetch_add_explicit(word(c, w), FOR_GOOD, memory_order_release);
}

void r2_copies_open_all(struct r2_copies *c)
{
    r2_copies_let_all(c);
    if (!atomic_flag_test_and_set(&c->open))
        atomic_fetch_add_explicit(word(c, GATE), FOR_GOOD, memory_order_release);
}

void r2_copies_let(struct r2_copies *c, bool out)
{
    atomic_fetch_add_explicit(word(c, LET + out), 1, memory_order_release);
}

int r2_copies_copied(struct r2_copies *c, bool out)
{
    /* Acquire: what the device has copied is there. */
    uint32_t done = atomic_load_explicit(word(c, DONE + out), memory_order_acquire);
    int n = (int)(done - c->ways[out].seen);

    c->ways[out].seen = done;
    return n;
}

/* ---- the application's thread */

int r2_copies_start(struct r2_copies *c, void *stream)
{
    void *before;
    int rc = enter(c, &before);

    if (rc)
        return rc;
    rc = cuda.event_record(c->event, stream);
    for (int i = 0; i < 2 && rc == 0; i++)
        rc = cuda.stream_wait_event(c->ways[i].stream, c->event, 0);
    leave(c, before);
    return rc ? -EIO : 0;
}

int r2_copies_hold(struct r2_copies *c, bool out, unsigned n)
{
    struct way *way = &c->ways[out];
    void *before;
    int rc = enter(c, &before);

    if (rc)
        return rc;
    way->queued += n;
    rc = cuda.stream_wait_value(way->stream, address(c, LET + out), way->queued, CUDA_WAIT_GEQ);
    leave(c, before);
    return rc ? -EIO : 0;
}

int r2_copies_queue(struct r2_copies *c, bool out, const struct r2_copies_rows *r)
{
    uint64_t to = (uint64_t)(uintptr_t)r->to, from = (uint64_t)(uintptr_t)r->from;
    struct rectangle rows = {
        .from = {.memory = CUDA_MEMORY_UNIFIED, .device = from, .pitch = r->from_pitch},
        .to = {.memory = CUDA_MEMORY_UNIFIED, .device = to, .pitch = r->to_pitch},
        .width = r->len,
        .height = r->n};
    void *before;
    int rc = enter(c, &before);

    if (rc)
        return rc;
    rc = r->n == 1 ? cuda.copy(to, from, r->len, c->ways[out].stream)
                   : cuda.copy_rows(&rows, c->ways[out].stream);
    leave(c, before);
    return rc ? -EIO : 0;
}

int r2_copies_tell(struct r2_copies *c, bool out)
{
    struct way *way = &c->ways[out];
    void *before;
    int rc = enter(c, &before);

    if (rc)
        return rc;
    rc = cuda.stream_write_value(way->stream, address(c, DONE + out), way->queued, 0);
    leave(c, before);
    return rc ? -EIO : 0;
}

int r2_copies_gate(struct r2_copies *c, void *stream, uint64_t number)
{
    void *before;
    int rc = enter(c, &before);

    if (rc)
        return rc;
    rc = cuda.stream_wait_value(stream, address(c, GATE), (uint32_t)number, CUDA_WAIT_GEQ);
    leave(c, before);
    return rc ? -EIO : 0;
}

/* ---- life */

void *r2_copies_window(struct r2_copies *c)
{
    return c->window;
}

static int make(struct r2_copies *c)
{
    int least = 0, greatest = 0;
    void *window = NULL;
    uint64_t at = 0;

    if (cuda.host_alloc(&window, c->len + (size_t)WORDS * LINE, CUDA_HOST_ALLOC_DEVICEMAP))
        return -ENOMEM;
    c->window = window;
    for (int w = 0; w < WORDS; w++)
        atomic_init(word(c, w), 0);
    if (cuda.host_device(&at, c->window, 0) || cuda.priorities(&least, &greatest) ||
        cuda.event_new(&c->event, CUDA_DISABLE_TIMING))
        return -EIO;
    c->words = at + c->len;
    for (int i = 0; i < 2; i++)
        if (cuda.stream_new(&c->ways[i].stream, CUDA_STREAM_NON_BLOCKING, greatest))
            return -EIO;
    /* Words as they are: whether the device can. */
    if (cuda.stream_wait_value(c->ways[0].stream, address(c, GATE), 0, CUDA_WAIT_GEQ) ||
        cuda.stream_write_value(c->ways[0].stream, address(c, DONE), 0, 0))
        return -ENOTSUP;
    return 0;
}

static void unmake(struct r2_copies *c)
{
    for (int i = 0; i < 2; i++) {
        if (!c->ways[i].stream)
            continue;
        cuda.stream_sync(c->ways[i].stream); /* the application may free its buffers next */
        cuda.stream_free(c->ways[i].stream);
    }
    if (c->event)
        cuda.event_free(c->event);
    if (c->window)
        cuda.host_free(c->window);
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

static void *free_main(void *arg)
{
    struct r2_copies *c = arg;

    pthread_setname_np(pthread_self(), "r2ccl-free");
    if (r2_device_enter(c->device) == 0) {
        unmake(c);
        r2_device_leave();
    }
    free(c);
    return NULL;
}

/* They may wait behind another communicator's work, which the caller ends next. */
static bool busy(const struct r2_copies *c)
{
    for (int i = 0; i < 2; i++)
        if (c->ways[i].stream && cuda.stream_query(c->ways[i].stream) == CUDA_NOT_READY)
            return true;
    return false;
}

void r2_copies_free(struct r2_copies *c)
{
    void *before = NULL;

    if (!c)
        return;
    cuda.get_current(&before);
    /* An application that has ended the device has ended all that was on it. */
    if (r2_device_enter(c->device) == 0) {
        bool later = busy(c) && r2_thread_start(free_main, c) == 0;

        if (!later)
            unmake(c);
        r2_device_leave();
        cuda.set_current(before);
        if (later)
            return;
    }
    free(c);
}
