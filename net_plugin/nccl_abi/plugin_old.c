/* The tables of v6 to v10, whose functions know no context and no finalize. */
#include <pthread.h>
#include <string.h>

#include "engine/engine.h"
#include "nccl_abi/abi.h"
#include "util/log.h"

#define R2_EXPORT __attribute__((visibility("default")))

/* One context stands for all communicators of the process. NCCL does not say when the last one
 * ends, so it is made by the first init and stays: the library is never unloaded, and what each
 * communicator closes itself is closed. */
static struct {
    pthread_mutex_t lock;
    void *ctx; /* set once, read under the lock */
} r2_old = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int r2_old_init(unsigned net_api, r2_nccl_logger log)
{
    int result = R2_NCCL_SUCCESS;
    void *none;

    if (r2_engine_in_child()) /* the lock may be that of a thread which is not here */
        return r2_abi_init(&none, 0, NULL, log, NULL);
    pthread_mutex_lock(&r2_old.lock);
    if (!r2_old.ctx) {
        r2_abi_called_by(net_api, log);
        result = r2_abi_init(&r2_old.ctx, 0, NULL, log, NULL);
    } else if (log) {
        /* NCCL may have been loaded anew since. */
        r2_log_set(log);
    }
    pthread_mutex_unlock(&r2_old.lock);
    return result;
}

static int r2_old_init_v10(r2_nccl_logger log, r2_nccl_profiler prof)
{
    (void)prof;
    return r2_old_init(10, log);
}

#define R2_OLD_INIT(version)                                                                       \
    static int r2_old_init_v##version(r2_nccl_logger log)                                          \
    {                                                                                              \
        return r2_old_init(version, log);                                                          \
    }

R2_OLD_INIT(9)
R2_OLD_INIT(8)
R2_OLD_INIT(7)
R2_OLD_INIT(6)

static void *r2_old_ctx(void)
{
    void *ctx;

    pthread_mutex_lock(&r2_old.lock);
    ctx = r2_old.ctx;
    pthread_mutex_unlock(&r2_old.lock);
    return ctx;
}

/* ---- connections ---- */

static int r2_old_listen(int dev, void *handle, void **lcomm)
{
    void *ctx = r2_old_ctx();

    *lcomm = NULL;
    return ctx ? r2_abi_listen(ctx, dev, handle, lcomm) : R2_NCCL_INTERNAL_ERROR;
}

static int r2_old_connect(int dev, void *handle, void **scomm,
                          struct r2_ncclnet_device_handle **dev_handle)
{
    void *ctx = r2_old_ctx();

    *scomm = NULL;
    return ctx ? r2_abi_connect(ctx, dev, handle, scomm, dev_handle) : R2_NCCL_INTERNAL_ERROR;
}

static int r2_old_connect_v6(int dev, void *handle, void **scomm)
{
    return r2_old_connect(dev, handle, scomm, NULL);
}

static int r2_old_connect_v10(int dev, struct r2_ncclnet_config *config, void *handle, void **scomm,
                              struct r2_ncclnet_device_handle **dev_handle)
{
    r2_abi_configured(config);
    return r2_old_connect(dev, handle, scomm, dev_handle);
}

static int r2_old_accept_v6(void *lcomm, void **rcomm)
{
    return r2_abi_accept(lcomm, rcomm, NULL);
}

/* ---- data ---- */

static int r2_old_regmr_v6(void *comm, void *data, int size, int type, void **mhandle)
{
    *mhandle = NULL;
    return size < 0 ? R2_NCCL_INVALID_USAGE : r2_abi_regmr(comm, data, (size_t)size, type, mhandle);
}

static int r2_old_isend_v9(void *scomm, void *data, size_t size, int tag, void *mhandle,
                           void **request)
{
    return r2_abi_isend(scomm, data, size, tag, mhandle, NULL, request);
}

static int r2_old_isend_v6(void *scomm, void *data, int size, int tag, void *mhandle,
                           void **request)
{
    *request = NULL;
    return size < 0 ? R2_NCCL_INVALID_USAGE
                    : r2_abi_isend(scomm, data, (size_t)size, tag, mhandle, NULL, request);
}

static int r2_old_irecv_v9(void *rcomm, int n, void **data, size_t *sizes, int *tags,
                           void **mhandles, void **request)
{
    return r2_abi_irecv(rcomm, n, data, sizes, tags, mhandles, NULL, request);
}

static int r2_old_irecv_v6(void *rcomm, int n, void **data, int *sizes, int *tags, void **mhandles,
                           void **request)
{
    size_t size;

    *request = NULL;
    if (n != 1 || sizes[0] < 0) {
        return R2_NCCL_INVALID_USAGE;
    }
    size = (size_t)sizes[0];
    *request = (void *)R2_NCCL_OPTIONAL_RECV_COMPLETION; /* these versions do not mark LL */
    return r2_abi_irecv(rcomm, n, data, &size, tags, mhandles, NULL, request);
}

/* ---- properties ---- */

static int r2_old_properties_v9(int dev, struct r2_ncclnet_props_v9 *props)
{
    struct r2_ncclnet_props_v12 full;
    int result = r2_abi_properties(dev, &full);

    memset(props, 0, sizeof(*props));
    R2_PROPS_V9(props, &full);
    return result;
}

static int r2_old_properties_v8(int dev, struct r2_ncclnet_props_v8 *props)
{
    struct r2_ncclnet_props_v12 full;
    int result = r2_abi_properties(dev, &full);

    memset(props, 0, sizeof(*props));
    R2_PROPS_V8(props, &full);
    return result;
}

static int r2_old_properties_v7(int dev, struct r2_ncclnet_props_v7 *props)
{
    struct r2_ncclnet_props_v12 full;
    int result = r2_abi_properties(dev, &full);

    memset(props, 0, sizeof(*props));
    R2_PROPS_V7(props, &full);
    return result;
}

static int r2_old_properties_v6(int dev, struct r2_ncclnet_props_v6 *props)
{
    struct r2_ncclnet_props_v12 full;
    int result = r2_abi_properties(dev, &full);

    memset(props, 0, sizeof(*props));
    R2_PROPS_V6(props, &full);
    return result;
}

/* ---- tables ---- */

/* The members that are the same in v6 to v10. */
#define R2_OLD_COMMON                                                                              \
    .name = r2_abi_name, .devices = r2_abi_devices, .listen = r2_old_listen,                       \
    .regmr_dmabuf = r2_abi_regmr_dmabuf, .deregmr = r2_abi_deregmr, .iflush = r2_abi_iflush,       \
    .test = r2_abi_test, .close_send = r2_abi_close, .close_recv = r2_abi_close,                   \
    .close_listen = r2_abi_close_listen

R2_EXPORT extern const struct r2_ncclnet_v10 ncclNetPlugin_v10;
R2_EXPORT extern const struct r2_ncclnet_v9 ncclNetPlugin_v9;
R2_EXPORT extern const struct r2_ncclnet_v8 ncclNetPlugin_v8;
R2_EXPORT extern const struct r2_ncclnet_v7 ncclNetPlugin_v7;
R2_EXPORT extern const struct r2_ncclnet_v6 ncclNetPlugin_v6;

const struct r2_ncclnet_v10 ncclNetPlugin_v10 = {
    R2_OLD_COMMON,
    .init = r2_old_init_v10,
    .get_properties = r2_old_properties_v9,
    .connect = r2_old_connect_v10,
    .accept = r2_abi_accept,
    .regmr = r2_abi_regmr,
    .isend = r2_abi_isend,
    .irecv = r2_abi_irecv,
};

const struct r2_ncclnet_v9 ncclNetPlugin_v9 = {
    R2_OLD_COMMON,
    .init = r2_old_init_v9,
    .get_properties = r2_old_properties_v9,
    .connect = r2_old_connect,
    .accept = r2_abi_accept,
    .regmr = r2_abi_regmr,
    .isend = r2_old_isend_v9,
    .irecv = r2_old_irecv_v9,
};

const struct r2_ncclnet_v8 ncclNetPlugin_v8 = {
    R2_OLD_COMMON,
    .init = r2_old_init_v8,
    .get_properties = r2_old_properties_v8,
    .connect = r2_old_connect,
    .accept = r2_abi_accept,
    .regmr = r2_abi_regmr,
    .isend = r2_old_isend_v6,
    .irecv = r2_old_irecv_v6,
};

const struct r2_ncclnet_v7 ncclNetPlugin_v7 = {
    R2_OLD_COMMON,
    .init = r2_old_init_v7,
    .get_properties = r2_old_properties_v7,
    .connect = r2_old_connect,
    .accept = r2_abi_accept,
    .regmr = r2_old_regmr_v6,
    .isend = r2_old_isend_v6,
    .irecv = r2_old_irecv_v6,
};

const struct r2_ncclnet_v6 ncclNetPlugin_v6 = {
    R2_OLD_COMMON,
    .init = r2_old_init_v6,
    .get_properties = r2_old_properties_v6,
    .connect = r2_old_connect_v6,
    .accept = r2_old_accept_v6,
    .regmr = r2_old_regmr_v6,
    .isend = r2_old_isend_v6,
    .irecv = r2_old_irecv_v6,
};
