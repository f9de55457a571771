/* A net plugin for testing the stand-in for NCCL: the built-in Socket transport exported as every
 * version from v6 to v12 under the name "Badnet", with receives through a staging buffer, and one
 * fault chosen by BADNET_FAULT. It shows that the stand-in's loader takes each version, and that
 * its harsh checks find what they are there for.
 *
 *   no_devices  init_error            the loader must fall back
 *   shy                               legal: every other isend and irecv has no request free
 *   early_done                        a send is reported done before its bytes were taken
 *   late_write                        a byte is written after a receive was reported done
 *   flag_first                        the last 8 bytes of each line are placed before the rest
 *   short_size  no_request  no_done   out parameters wrong or unwritten
 *   profiler                          calls the profiler without a handle
 *   fail_send  fail_recv              a remote error after some messages
 *   fail_connect                      a remote error: the peer's accept finds nobody
 *   never_accept                      accept asks to be called again, for ever
 */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../pause.h"
#include "net.h"

#define EXPORT __attribute__((visibility("default")))

struct comm {
    void *inner;
    bool send;
    unsigned calls, tests;
    char *last; /* buffer of the last receive that was done */
};

struct request {
    struct comm *comm;
    void *inner;
    char *data, *staging;
    size_t size;
    int reported;
};

static void *context;
static r2_nccl_profiler profile;

static bool fault(const char *name)
{
    const char *wanted = getenv("BADNET_FAULT");
    return wanted && !strcmp(wanted, name);
}

/* util.c needs it, and api.c is not in this plugin. */
const char *ncclGetErrorString(ncclResult_t result)
{
    return result ? "error" : "success";
}

static int start(void)
{
    if (fault("init_error"))
        return R2_NCCL_SYSTEM_ERROR;
    return context ? 0 : hn_socketnet.init(&context, 0, NULL, NULL, NULL);
}

__attribute__((destructor)) static void stop(void)
{
    if (context)
        hn_socketnet.finalize(context);
}

static int init_v6(r2_nccl_logger log)
{
    log(R2_NCCL_LOG_INFO, R2_NCCL_SUBSYS_NET, __FILE__, __LINE__, "Badnet: init, %s", "old");
    return start();
}

static int init_v10(r2_nccl_logger log, r2_nccl_profiler prof)
{
    (void)log;
    profile = prof;
    return start();
}

static int init_v11(void **ctx, uint64_t comm_id, struct r2_ncclnet_config *config,
                    r2_nccl_logger log, r2_nccl_profiler prof)
{
    (void)comm_id, (void)config;
    *ctx = &context;
    return init_v10(log, prof);
}

static int devices(int *ndev)
{
    if (fault("no_devices"))
        *ndev = 0;
    else
        hn_socketnet.devices(ndev);
    return R2_NCCL_SUCCESS;
}

#define PROPERTIES(v)                                                                              \
    static int properties_v##v(int dev, struct r2_ncclnet_props_v##v *p)                           \
    {                                                                                              \
        struct r2_ncclnet_props_v12 q;                                                             \
        int rc = hn_socketnet.get_properties(dev, &q);                                             \
        memset(p, 0, sizeof(*p));                                                                  \
        p->name = q.name;                                                                          \
        p->guid = q.guid;                                                                          \
        p->ptr_support = q.ptr_support;                                                            \
        p->speed = q.speed;                                                                        \
        p->max_comms = q.max_comms;                                                                \
        p->max_recvs = q.max_recvs;                                                                \
        return rc;                                                                                 \
    }
PROPERTIES(6)
PROPERTIES(7)
PROPERTIES(8)
PROPERTIES(9)
PROPERTIES(11)
PROPERTIES(12)

static int listen_v6(int dev, void *handle, void **lcomm)
{
    return hn_socketnet.listen(context, dev, handle, lcomm);
}

static int listen_v11(void *ctx, int dev, void *handle, void **lcomm)
{
    return ctx == &context ? listen_v6(dev, handle, lcomm) : R2_NCCL_INTERNAL_ERROR;
}

static int wrap(void *inner, bool send, void **out)
{
    struct comm *c = inner ? calloc(1, sizeof(*c)) : NULL;
    *out = c;
    if (c) {
        c->inner = inner;
        c->send = send;
    }
    return R2_NCCL_SUCCESS;
}

static int connect_v7(int dev, void *handle, void **scomm, struct r2_ncclnet_device_handle **dh)
{
    void *inner = NULL;
    if (fault("fail_connect"))
        return R2_NCCL_REMOTE_ERROR;
    int rc = hn_socketnet.connect(context, dev, handle, &inner, dh);
    return rc ? rc : wrap(inner, true, scomm);
}

static int connect_v6(int dev, void *handle, void **scomm)
{
    return connect_v7(dev, handle, scomm, NULL);
}

static int connect_v10(int dev, struct r2_ncclnet_config *config, void *handle, void **scomm,
                       struct r2_ncclnet_device_handle **dh)
{
    bool given = config && config->traffic_class == R2_NCCL_TRAFFIC_CLASS_UNDEF;
    return given ? connect_v7(dev, handle, scomm, dh) : R2_NCCL_INTERNAL_ERROR;
}

static int connect_v11(void *ctx, int dev, void *handle, void **scomm,
                       struct r2_ncclnet_device_handle **dh)
{
    return ctx == &context ? connect_v7(dev, handle, scomm, dh) : R2_NCCL_INTERNAL_ERROR;
}

static int accept_v7(void *lcomm, void **rcomm, struct r2_ncclnet_device_handle **dh)
{
    void *inner = NULL;
    if (fault("never_accept"))
        return wrap(NULL, false, rcomm);
    int rc = hn_socketnet.accept(lcomm, &inner, dh);
    return rc ? rc : wrap(inner, false, rcomm);
}

static int accept_v6(void *lcomm, void **rcomm)
{
    return accept_v7(lcomm, rcomm, NULL);
}

static int regmr_v8(void *comm, void *data, size_t size, int type, void **mhandle)
{
    (void)comm, (void)data, (void)size;
    *mhandle = NULL;
    return type == R2_NCCL_PTR_HOST ? R2_NCCL_SUCCESS : R2_NCCL_INTERNAL_ERROR;
}

static int regmr_v6(void *comm, void *data, int size, int type, void **mhandle)
{
    return regmr_v8(comm, data, (size_t)size, type, mhandle);
}

static int deregmr(void *comm, void *mhandle)
{
    (void)comm, (void)mhandle;
    return R2_NCCL_SUCCESS;
}

static int post(struct comm *c, void *data, size_t size, void **out)
{
    struct request *r = NULL;
    c->calls++;
    if (fault("no_request") && c->calls == 5)
        return R2_NCCL_SUCCESS;
    *out = NULL;
    if (fault("shy") && c->calls % 2)
        return R2_NCCL_SUCCESS;
    if (c->calls == 10 && fault(c->send ? "fail_send" : "fail_recv"))
        return R2_NCCL_REMOTE_ERROR;
    if (fault("profiler") && profile)
        profile(NULL, 0, NULL, 0, NULL);
    r = calloc(1, sizeof(*r));
    *r = (struct request){.comm = c, .data = data, .size = size};
    if (!c->send)
        r->staging = calloc(1, size + 1);
    *out = r;
    if (c->send && fault("early_done"))
        return R2_NCCL_SUCCESS; /* it is sent in test, one call after done */
    void *place = c->send ? data : r->staging;
    void *none = NULL;
    int tag = 0;
    if (c->send)
        return hn_socketnet.isend(c->inner, place, size, 0, NULL, NULL, &r->inner);
    return hn_socketnet.irecv(c->inner, 1, &place, &size, &tag, &none, NULL, &r->inner);
}

static int isend_v9(void *scomm, void *data, size_t size, int tag, void *mhandle, void **request)
{
    (void)tag, (void)mhandle;
    return post(scomm, data, size, request);
}

static int isend_v6(void *scomm, void *data, int size, int tag, void *mhandle, void **request)
{
    return isend_v9(scomm, data, (size_t)size, tag, mhandle, request);
}

static int isend_v10(void *scomm, void *data, size_t size, int tag, void *mhandle, void *phandle,
                     void **request)
{
    (void)phandle;
    return isend_v9(scomm, data, size, tag, mhandle, request);
}

static int irecv_v9(void *rcomm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                    void **request)
{
    (void)tags, (void)mhandles;
    return n == 1 ? post(rcomm, data[0], sizes[0], request) : R2_NCCL_INTERNAL_ERROR;
}

static int irecv_v6(void *rcomm, int n, void **data, int *sizes, int *tags, void **mhandles,
                    void **request)
{
    size_t size = (size_t)sizes[0];
    return irecv_v9(rcomm, n, data, &size, tags, mhandles, request);
}

static int irecv_v10(void *rcomm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                     void **phandles, void **request)
{
    (void)phandles;
    return irecv_v9(rcomm, n, data, sizes, tags, mhandles, request);
}

static int iflush(void *rcomm, int n, void **data, int *sizes, void **mhandles, void **request)
{
    (void)rcomm, (void)n, (void)data, (void)sizes, (void)mhandles;
    *request = NULL;
    return R2_NCCL_SUCCESS;
}

/* Word by word in ascending order, which memcpy does not promise. */
static void place_words(char *to, const char *from, size_t size)
{
    size_t at = 0;

    for (; at + 8 <= size; at += 8) {
        uint64_t word;
        memcpy(&word, from + at, 8);
        __atomic_store_n((uint64_t *)(void *)(to + at), word, __ATOMIC_RELEASE);
    }
    memcpy(to + at, from + at, size - at);
}

/* Line by line in ascending order, or with the flag before the rest. */
static void place(struct request *r, size_t size)
{
    for (size_t at = 0; at < size; at += 128) {
        size_t n = size - at < 128 ? size - at : 128;
        if (n == 128 && fault("flag_first")) {
            memcpy(r->data + at + 120, r->staging + at + 120, 8);
            pause_us(at == 0 ? 2000 : 1);
        }
        place_words(r->data + at, r->staging + at, n);
    }
}

static int finish_recv(struct request *r, int *done, int *sizes, int size)
{
    struct comm *c = r->comm;
    place(r, (size_t)size);
    if (sizes)
        *sizes = fault("short_size") && size ? size - 1 : size;
    *done = 1;
    c->last = r->data;
    free(r->staging);
    free(r);
    return R2_NCCL_SUCCESS;
}

/* Reports done, and reads the bytes only during later calls of the same thread, when the caller has
 * overwritten them. */
static _Thread_local struct request *late[64];

static void send_late(void)
{
    for (int i = 0; i < 64; i++) {
        struct request *r = late[i];
        int moved = 0;
        if (!r)
            continue;
        if (!r->inner)
            hn_socketnet.isend(r->comm->inner, r->data, r->size, 0, NULL, NULL, &r->inner);
        if (r->inner && !hn_socketnet.test(r->inner, &moved, NULL) && moved) {
            free(r);
            late[i] = NULL;
        }
    }
}

static int finish_early(struct request *r, int *done)
{
    for (int i = 0; i < 64; i++) {
        if (!late[i]) {
            late[i] = r;
            *done = 1;
            break;
        }
    }
    return R2_NCCL_SUCCESS;
}

static int test(void *request, int *done, int *sizes)
{
    struct request *r = request;
    struct comm *c = r->comm;
    int size = 0;
    if (fault("no_done") && ++c->tests == 7)
        return R2_NCCL_SUCCESS;
    *done = 0;
    if (c->send && fault("early_done"))
        return finish_early(r, done);
    send_late();
    int rc = hn_socketnet.test(r->inner, done, &size);
    if (!c->send && c->last && fault("late_write")) {
        c->last[0] ^= 1;
        c->last = NULL;
    }
    if (rc || !*done)
        return rc;
    if (!c->send)
        return finish_recv(r, done, sizes, size);
    free(r);
    return rc;
}

static int close_comm(void *comm)
{
    struct comm *c = comm;
    int rc = hn_socketnet.close_send(c->inner);
    free(c);
    return rc;
}

static int finalize(void *ctx)
{
    return ctx == &context ? R2_NCCL_SUCCESS : R2_NCCL_INTERNAL_ERROR;
}

#define TABLE(v, init_fn, props, listen_fn, connect_fn, accept_fn, regmr_fn, isend_fn, irecv_fn,   \
              ...)                                                                                 \
    EXPORT const struct r2_ncclnet_v##v ncclNetPlugin_v##v = {.name = "Badnet",                    \
                                                              .init = init_fn,                     \
                                                              .devices = devices,                  \
                                                              .get_properties = props,             \
                                                              .listen = listen_fn,                 \
                                                              .connect = connect_fn,               \
                                                              .accept = accept_fn,                 \
                                                              .regmr = regmr_fn,                   \
                                                              .deregmr = deregmr,                  \
                                                              .isend = isend_fn,                   \
                                                              .irecv = irecv_fn,                   \
                                                              .iflush = iflush,                    \
                                                              .test = test,                        \
                                                              .close_send = close_comm,            \
                                                              .close_recv = close_comm,            \
                                                              __VA_ARGS__}

static int close_listen(void *lcomm)
{
    return hn_socketnet.close_listen(lcomm);
}

TABLE(6, init_v6, properties_v6, listen_v6, connect_v6, accept_v6, regmr_v6, isend_v6, irecv_v6,
      .close_listen = close_listen);
TABLE(7, init_v6, properties_v7, listen_v6, connect_v7, accept_v7, regmr_v6, isend_v6, irecv_v6,
      .close_listen = close_listen);
TABLE(8, init_v6, properties_v8, listen_v6, connect_v7, accept_v7, regmr_v8, isend_v6, irecv_v6,
      .close_listen = close_listen);
TABLE(9, init_v6, properties_v9, listen_v6, connect_v7, accept_v7, regmr_v8, isend_v9, irecv_v9,
      .close_listen = close_listen);
TABLE(10, init_v10, properties_v9, listen_v6, connect_v10, accept_v7, regmr_v8, isend_v10,
      irecv_v10, .close_listen = close_listen);
TABLE(11, init_v11, properties_v11, listen_v11, connect_v11, accept_v7, regmr_v8, isend_v10,
      irecv_v10, .close_listen = close_listen, .finalize = finalize);
TABLE(12, init_v11, properties_v12, listen_v11, connect_v11, accept_v7, regmr_v8, isend_v10,
      irecv_v10, .close_listen = close_listen, .finalize = finalize);
