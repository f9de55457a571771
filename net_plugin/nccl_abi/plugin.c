/* The semantics of NCCL's net API over the engine, and the tables of v12 and v11. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"
#include "nccl_abi/abi.h"
#include "settings/launch.h"
#include "settings/settings.h"
#include "util/log.h"

#define R2_EXPORT __attribute__((visibility("default")))
#define R2_MAX_COMMS 65536

_Static_assert(R2_HANDLE_BYTES == R2_NCCL_HANDLE_BYTES, "the engine fills NCCL's handle");
_Static_assert(R2_MAX_REQUESTS >= R2_NCCL_MAX_REQUESTS, "NCCL may have that many in flight");
_Static_assert((int)R2_LOG_WARN == (int)R2_NCCL_LOG_WARN &&
                   (int)R2_LOG_INFO == (int)R2_NCCL_LOG_INFO &&
                   (int)R2_LOG_TRACE == (int)R2_NCCL_LOG_TRACE,
               "log levels are NCCL's");

const char r2_abi_name[] = "R2CCL";

static enum r2_nccl_result r2_abi_of_errno(int err)
{
    switch (err) {
    case 0:
        return R2_NCCL_SUCCESS;
    case ECONNRESET:
    case ECONNREFUSED:
    case ECONNABORTED:
    case EPIPE:
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case EHOSTDOWN:
    case ENETUNREACH:
    case ENETDOWN:
    case ENOTCONN:
    case ESHUTDOWN:
    case ECANCELED:
        return R2_NCCL_REMOTE_ERROR;
    case EINVAL:
        return R2_NCCL_INVALID_ARGUMENT;
    case EMSGSIZE:
        return R2_NCCL_INVALID_USAGE;
    case EPROTO:
    case EFAULT:
        return R2_NCCL_INTERNAL_ERROR;
    default:
        return R2_NCCL_SYSTEM_ERROR;
    }
}

/* An engine's 0 or -errno as a result; a failure is logged, with the operation's name. */
static int abi_result(int rc, const char *operation)
{
    if (rc >= 0) {
        return R2_NCCL_SUCCESS;
    }
    R2_WARN_LIMIT("%s failed: %s", operation, strerror(-rc));
    return r2_abi_of_errno(-rc);
}

/* The shim sets it when it brings the plugin in. */
__attribute__((visibility("default"))) int r2ccl_shim_uses_plugin;

static void say_without_shim(void)
{
    char names[512];

    r2_settings_of_shim(r2_settings_get(), getenv, names, sizeof(names));
    if (names[0])
        R2_TELL_ONE("%s: no effect without the shim: start the program with `r2ccl-ctl run "
                    "--preload` or LD_PRELOAD=libr2ccl.so",
                    names);
}

/* With the shim preloaded, NCCL's first call has come through it by now. In R2CCL_MODE=off the shim
 * itself says which settings do nothing. */
static void check_shim(void)
{
    static atomic_flag asked = ATOMIC_FLAG_INIT, told = ATOMIC_FLAG_INIT;
    const int *reached = dlsym(RTLD_DEFAULT, "r2ccl_shim_reached");

    if (reached && r2_settings_get()->mode == R2_MODE_OFF)
        return;
    if (!__atomic_load_n(&r2ccl_shim_uses_plugin, __ATOMIC_RELAXED) &&
        !(reached && __atomic_load_n(reached, __ATOMIC_RELAXED)) &&
        !atomic_flag_test_and_set(&told))
        say_without_shim();
    if (!reached || __atomic_load_n(reached, __ATOMIC_RELAXED))
        return;
    if (!atomic_flag_test_and_set(&asked))
        R2_WARN(
            "libr2ccl.so is preloaded, but this program's NCCL calls do not come through it: it "
            "opens NCCL with dlopen (set R2CCL_DLSYM=1), or NCCL is linked into it. The plugin "
            "works all the same; r2ccl-ctl shows no communicators");
}

/* Asked of the library that the logger is in: the one whose calls come here, whatever else in the
 * process has the name, such as the shim. */
static unsigned nccl_version_of(r2_nccl_logger log)
{
    int (*get)(int *version) = NULL;
    int version = 0;
    Dl_info info;
    void *nccl = NULL;

    if (log && dladdr((void *)(uintptr_t)log, &info) && info.dli_fname)
        nccl = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (!nccl)
        return 0;
    *(void **)&get = dlsym(nccl, "ncclGetVersion");
    if (get && get(&version))
        version = 0;
    dlclose(nccl);
    return version > 0 ? (unsigned)version : 0;
}

void r2_abi_called_by(unsigned net_api, r2_nccl_logger log)
{
    r2_engine_called_by(nccl_version_of(log), net_api);
}

void r2_abi_configured(const struct r2_ncclnet_config *config)
{
    if (config && config->traffic_class != R2_NCCL_TRAFFIC_CLASS_UNDEF)
        r2_engine_ask_traffic_class(config->traffic_class);
}

int r2_abi_init(void **ctx, uint64_t comm_id, struct r2_ncclnet_config *config, r2_nccl_logger log,
                r2_nccl_profiler prof)
{
    struct r2_ctx *made = NULL;
    int rc = r2_engine_init(&made, comm_id, log);

    (void)prof;
    r2_abi_configured(config);
    *ctx = rc == 0 ? made : NULL;
    if (rc == 0)
        check_shim();
    return abi_result(rc, "init");
}

int r2_abi_devices(int *ndev)
{
    *ndev = 0;
    return abi_result(r2_engine_devices(ndev), "devices");
}

int r2_abi_properties(int dev, struct r2_ncclnet_props_v12 *props)
{
    const struct r2_nic *nic = r2_engine_nic(dev);

    memset(props, 0, sizeof(*props));
    if (!nic) {
        R2_WARN("NCCL asked for NIC %d, which does not exist", dev);
        return R2_NCCL_INVALID_USAGE;
    }
    /* NCCL does not write to the strings; its type only lacks the const. */
    props->name = (char *)(uintptr_t)nic->name;
    props->pci_path = nic->pci_path[0] ? (char *)(uintptr_t)nic->pci_path : NULL;
    props->guid = nic->guid;
    props->ptr_support = (int)r2_engine_memory(dev); /* the same bits */
    props->reg_is_global = 0;
    props->force_flush = 0;
    props->speed = r2_nic_report_speed(nic);
    props->port = 1;
    props->latency = 0; /* NCCL's own figures, one for each protocol, are better than one of ours */
    props->max_comms = R2_MAX_COMMS;
    props->max_recvs = 1;
    props->netdev_type = R2_NCCL_NETDEV_HOST;
    props->netdev_version = 0;
    props->vprops.ndevs = 1;
    props->vprops.devs[0] = dev;
    props->max_p2p_bytes = R2_NCCL_MAX_MESSAGE_BYTES;
    props->max_coll_bytes = R2_NCCL_MAX_MESSAGE_BYTES;
    props->max_multi_request = 1;
    props->rail_id = R2_NCCL_ID_UNDEF;
    props->plane_id = R2_NCCL_ID_UNDEF;
    return R2_NCCL_SUCCESS;
}

int r2_abi_listen(void *ctx, int dev, void *handle, void **lcomm)
{
    struct r2_listen *made = NULL;
    int rc = r2_engine_listen(ctx, dev, handle, &made);

    *lcomm = rc == 0 ? made : NULL;
    return abi_result(rc, "listen");
}

int r2_abi_connect(void *ctx, int dev, void *handle, void **scomm,
                   struct r2_ncclnet_device_handle **dev_handle)
{
    struct r2_conn *made = NULL;
    int rc = r2_engine_connect(ctx, dev, handle, &made);

    (void)dev_handle; /* no device offload: NCCL's NULL stays */
    *scomm = rc == 0 ? made : NULL;
    return abi_result(rc, "connect");
}

int r2_abi_accept(void *lcomm, void **rcomm, struct r2_ncclnet_device_handle **dev_handle)
{
    struct r2_conn *made = NULL;
    int rc = r2_engine_accept(lcomm, &made);

    (void)dev_handle;
    *rcomm = rc == 0 ? made : NULL;
    return abi_result(rc, "accept");
}

int r2_abi_regmr(void *comm, void *data, size_t size, int type, void **mhandle)
{
    struct r2_mr *made = NULL;
    int rc = r2_engine_reg(comm, data, size, type, &made);

    *mhandle = rc == 0 ? made : NULL;
    return abi_result(rc, type == R2_NCCL_PTR_HOST ? "regMr" : "regMr of memory of a device");
}

int r2_abi_regmr_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                        void **mhandle)
{
    struct r2_mr *made = NULL;
    int rc = r2_engine_reg_dmabuf(comm, data, size, type, offset, fd, &made);

    *mhandle = rc == 0 ? made : NULL;
    return abi_result(rc, "regMrDmaBuf");
}

int r2_abi_deregmr(void *comm, void *mhandle)
{
    return mhandle ? abi_result(r2_engine_dereg(comm, mhandle), "deregMr") : R2_NCCL_SUCCESS;
}

int r2_abi_isend(void *scomm, void *data, size_t size, int tag, void *mhandle, void *phandle,
                 void **request)
{
    struct r2_req *made = NULL;
    int rc = r2_engine_isend(scomm, data, size, tag, mhandle, &made);

    (void)phandle;
    *request = rc == 0 ? made : NULL;
    return abi_result(rc, "isend");
}

/* With LL and LL128 the GPU reads lines before the receive is done. From v9 on NCCL marks those
 * receives as needing no completion (unless told not to by its own variable); before, any receive
 * may be one of them. */
static bool polled_early(const void *hint)
{
    static atomic_int unmarked = -1;

    if (hint == (void *)R2_NCCL_OPTIONAL_RECV_COMPLETION)
        return true;
    if (atomic_load_explicit(&unmarked, memory_order_relaxed) < 0) {
        const char *marks = r2_settings_getenv("NCCL_NET_OPTIONAL_RECV_COMPLETION");

        atomic_store_explicit(&unmarked, marks && !strcmp(marks, "0"), memory_order_relaxed);
    }
    return atomic_load_explicit(&unmarked, memory_order_relaxed) == 1;
}

int r2_abi_irecv(void *rcomm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                 void **phandles, void **request)
{
    const void *hint = *request; /* on entry: no completion is needed; one is given all the same */
    struct r2_req *made = NULL;
    int rc;

    (void)phandles;
    *request = NULL;
    if (n != 1) {
        R2_WARN("irecv of %d buffers, although maxRecvs is 1", n);
        return R2_NCCL_INVALID_USAGE;
    }
    rc = (polled_early(hint) ? r2_engine_irecv_lines : r2_engine_irecv)(
        rcomm, data[0], sizes[0], tags ? tags[0] : 0, mhandles ? mhandles[0] : NULL, &made);
    *request = rc == 0 ? made : NULL;
    return abi_result(rc, "irecv");
}

int r2_abi_iflush(void *rcomm, int n, void **data, int *sizes, void **mhandles, void **request)
{
    struct r2_req *made = NULL;
    int rc = 0;

    (void)sizes;
    *request = NULL;
    if (n > 0 && mhandles) /* one, as in irecv */
        rc = r2_engine_iflush(rcomm, data[0], mhandles[0], &made);
    *request = rc == 0 ? made : NULL;
    return abi_result(rc, "iflush");
}

int r2_abi_test(void *request, int *done, int *sizes)
{
    size_t size = 0;
    int rc;

    *done = 0;
    rc = r2_engine_test(request, done, &size);
    if (rc == 0 && *done && sizes) {
        sizes[0] = size > INT_MAX ? INT_MAX : (int)size;
    }
    return abi_result(rc, "test");
}

int r2_abi_close(void *comm)
{
    return comm ? abi_result(r2_engine_close(comm), "close") : R2_NCCL_SUCCESS;
}

int r2_abi_close_listen(void *lcomm)
{
    return lcomm ? abi_result(r2_engine_close_listen(lcomm), "closeListen") : R2_NCCL_SUCCESS;
}

static int abi_finalize(void *ctx)
{
    return ctx ? abi_result(r2_engine_finalize(ctx), "finalize") : R2_NCCL_SUCCESS;
}

static int r2_abi_properties_v11(int dev, struct r2_ncclnet_props_v11 *props)
{
    struct r2_ncclnet_props_v12 full;
    int result = r2_abi_properties(dev, &full);

    memset(props, 0, sizeof(*props));
    R2_PROPS_V9(props, &full);
    props->max_multi_request = full.max_multi_request;
    return result;
}

R2_EXPORT extern const struct r2_ncclnet_v12 ncclNetPlugin_v12;
R2_EXPORT extern const struct r2_ncclnet_v11 ncclNetPlugin_v11;

static int r2_init_v12(void **ctx, uint64_t comm_id, struct r2_ncclnet_config *config,
                       r2_nccl_logger log, r2_nccl_profiler prof)
{
    r2_abi_called_by(12, log);
    return r2_abi_init(ctx, comm_id, config, log, prof);
}

static int r2_init_v11(void **ctx, uint64_t comm_id, struct r2_ncclnet_config *config,
                       r2_nccl_logger log, r2_nccl_profiler prof)
{
    r2_abi_called_by(11, log);
    return r2_abi_init(ctx, comm_id, config, log, prof);
}

/* No devices of NVIDIA's own, and no fused ones: each NIC is a NIC. */
#define R2_NEW_COMMON                                                                              \
    .name = r2_abi_name, .devices = r2_abi_devices, .listen = r2_abi_listen,                       \
    .connect = r2_abi_connect, .accept = r2_abi_accept, .regmr = r2_abi_regmr,                     \
    .regmr_dmabuf = r2_abi_regmr_dmabuf, .deregmr = r2_abi_deregmr, .isend = r2_abi_isend,         \
    .irecv = r2_abi_irecv, .iflush = r2_abi_iflush, .test = r2_abi_test,                           \
    .close_send = r2_abi_close, .close_recv = r2_abi_close, .close_listen = r2_abi_close_listen,   \
    .finalize = abi_finalize

const struct r2_ncclnet_v12 ncclNetPlugin_v12 = {
    R2_NEW_COMMON,
    .init = r2_init_v12,
    .get_properties = r2_abi_properties,
};

const struct r2_ncclnet_v11 ncclNetPlugin_v11 = {
    R2_NEW_COMMON,
    .init = r2_init_v11,
    .get_properties = r2_abi_properties_v11,
};
