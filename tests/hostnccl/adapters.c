/* Calls of the newest semantics onto the table of any version, as NCCL's own adapters do it. */
#include "net.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define T6(n) ((const struct r2_ncclnet_v6 *)(n)->table)
#define T7(n) ((const struct r2_ncclnet_v7 *)(n)->table)
#define T8(n) ((const struct r2_ncclnet_v8 *)(n)->table)
#define T9(n) ((const struct r2_ncclnet_v9 *)(n)->table)
#define T10(n) ((const struct r2_ncclnet_v10 *)(n)->table)
#define T11(n) ((const struct r2_ncclnet_v11 *)(n)->table)
#define T12(n) ((const struct r2_ncclnet_v12 *)(n)->table)
/* Members 7 to 16 lie at one place in all versions; these have one type in all of them. */
#define SAME(n) T6(n)

static atomic_bool profiler_misused;

bool hn_net_profiler_misused(void)
{
    return atomic_load(&profiler_misused);
}

static int profiler(void **event, int type, void *phandle, int64_t plugin_id, void *data)
{
    (void)event, (void)type, (void)plugin_id, (void)data;
    if (!phandle)
        atomic_store(&profiler_misused, true);
    return R2_NCCL_SUCCESS;
}

static void logger(int level, unsigned long flags, const char *file, int line, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    hn_util_logger(level, flags, file, line, "%s", text);
}

const char *hn_net_name(const struct hn_net *net)
{
    return SAME(net)->name;
}

int hn_net_init(struct hn_net *net, struct hn_netctx *ctx, uint64_t comm_id)
{
    if (net->version >= 11)
        return T12(net)->init(&ctx->ctx, comm_id, &ctx->config, logger, profiler);
    if (net->contexts) /* up to v10: once while a communicator lives */
        return R2_NCCL_SUCCESS;
    return net->version == 10 ? T10(net)->init(logger, profiler) : T6(net)->init(logger);
}

int hn_net_devices(struct hn_net *net, int *ndev)
{
    return SAME(net)->devices(ndev);
}

#define POISON 0xa5 /* a plugin writes every member */

static void widen(struct r2_ncclnet_props_v12 *p, int dev)
{
    memset(p, 0, sizeof(*p));
    p->vprops.ndevs = 1;
    p->vprops.devs[0] = dev;
    p->max_p2p_bytes = p->max_coll_bytes = R2_NCCL_MAX_MESSAGE_V8;
    p->rail_id = p->plane_id = R2_NCCL_ID_UNDEF;
    p->max_multi_request = 1;
}

#define COPY_V6(p, q)                                                                              \
    ((p)->name = (q).name, (p)->pci_path = (q).pci_path, (p)->guid = (q).guid,                     \
     (p)->ptr_support = (q).ptr_support, (p)->speed = (q).speed, (p)->port = (q).port,             \
     (p)->latency = (q).latency, (p)->max_comms = (q).max_comms, (p)->max_recvs = (q).max_recvs)

static int properties_old(struct hn_net *net, int dev, struct r2_ncclnet_props_v12 *p)
{
    struct r2_ncclnet_props_v6 p6;
    struct r2_ncclnet_props_v7 p7;
    struct r2_ncclnet_props_v8 p8;
    int rc;
    memset(&p6, POISON, sizeof(p6));
    memset(&p7, POISON, sizeof(p7));
    memset(&p8, POISON, sizeof(p8));
    widen(p, dev);
    if (net->version == 6) {
        rc = T6(net)->get_properties(dev, &p6);
        COPY_V6(p, p6);
    } else if (net->version == 7) {
        rc = T7(net)->get_properties(dev, &p7);
        COPY_V6(p, p7);
        p->netdev_type = p7.netdev_type;
        p->netdev_version = p7.netdev_version;
    } else {
        rc = T8(net)->get_properties(dev, &p8);
        COPY_V6(p, p8);
        p->reg_is_global = p8.reg_is_global;
        p->netdev_type = p8.netdev_type;
        p->netdev_version = p8.netdev_version;
    }
    return rc;
}

int hn_net_properties(struct hn_net *net, int dev, struct r2_ncclnet_props_v12 *p)
{
    memset(p, POISON, sizeof(*p));
    if (net->version == 12)
        return T12(net)->get_properties(dev, p);
    if (net->version < 9)
        return properties_old(net, dev, p);
    struct r2_ncclnet_props_v9 p9;
    struct r2_ncclnet_props_v11 p11;
    memset(&p9, POISON, sizeof(p9));
    memset(&p11, POISON, sizeof(p11));
    int rc = net->version == 11   ? T11(net)->get_properties(dev, &p11)
             : net->version == 10 ? T10(net)->get_properties(dev, &p9)
                                  : T9(net)->get_properties(dev, &p9);
    if (net->version == 11) /* v11 begins as v9 does */
        memcpy(&p9, &p11, offsetof(struct r2_ncclnet_props_v11, max_multi_request));
    widen(p, dev);
    COPY_V6(p, p9);
    p->reg_is_global = p9.reg_is_global;
    p->force_flush = p9.force_flush;
    p->netdev_type = p9.netdev_type;
    p->netdev_version = p9.netdev_version;
    p->vprops.ndevs = p9.vprops.ndevs;
    memcpy(p->vprops.devs, p9.vprops.devs, sizeof(p9.vprops.devs));
    p->max_p2p_bytes = p9.max_p2p_bytes;
    p->max_coll_bytes = p9.max_coll_bytes;
    if (net->version == 11)
        p->max_multi_request = p11.max_multi_request;
    return rc;
}

int hn_net_listen(struct hn_netctx *ctx, int dev, void *handle, void **lcomm)
{
    struct hn_net *net = ctx->net;
    if (net->version >= 11)
        return T12(net)->listen(ctx->ctx, dev, handle, lcomm);
    return T6(net)->listen(dev, handle, lcomm);
}

int hn_net_connect(struct hn_netctx *ctx, int dev, void *handle, void **scomm)
{
    struct hn_net *net = ctx->net;
    struct r2_ncclnet_device_handle *none = NULL;
    if (net->version >= 11)
        return T12(net)->connect(ctx->ctx, dev, handle, scomm, &none);
    if (net->version == 10)
        return T10(net)->connect(dev, &ctx->config, handle, scomm, &none);
    if (net->version >= 7)
        return T7(net)->connect(dev, handle, scomm, &none);
    return T6(net)->connect(dev, handle, scomm);
}

int hn_net_accept(struct hn_netctx *ctx, void *lcomm, void **rcomm)
{
    struct r2_ncclnet_device_handle *none = NULL;
    if (ctx->net->version >= 7)
        return T7(ctx->net)->accept(lcomm, rcomm, &none);
    return T6(ctx->net)->accept(lcomm, rcomm);
}

int hn_net_regmr(struct hn_netctx *ctx, void *comm, void *data, size_t size, int type,
                 void **mhandle)
{
    if (ctx->net->version >= 8)
        return T8(ctx->net)->regmr(comm, data, size, type, mhandle);
    return T6(ctx->net)->regmr(comm, data, (int)size, type, mhandle);
}

int hn_net_deregmr(struct hn_netctx *ctx, void *comm, void *mhandle)
{
    return SAME(ctx->net)->deregmr(comm, mhandle);
}

int hn_net_isend(struct hn_netctx *ctx, void *scomm, void *data, size_t size, int tag,
                 void *mhandle, void **request)
{
    struct hn_net *net = ctx->net;
    if (net->version >= 10)
        return T10(net)->isend(scomm, data, size, tag, mhandle, NULL, request);
    if (net->version == 9)
        return T9(net)->isend(scomm, data, size, tag, mhandle, request);
    return T6(net)->isend(scomm, data, (int)size, tag, mhandle, request);
}

int hn_net_irecv(struct hn_netctx *ctx, void *rcomm, void *data, size_t size, int tag,
                 void *mhandle, void **request)
{
    struct hn_net *net = ctx->net;
    void *phandle = NULL;
    int int_size = (int)size;
    if (net->version >= 10)
        return T10(net)->irecv(rcomm, 1, &data, &size, &tag, &mhandle, &phandle, request);
    if (net->version == 9)
        return T9(net)->irecv(rcomm, 1, &data, &size, &tag, &mhandle, request);
    if (*request == (void *)R2_NCCL_OPTIONAL_RECV_COMPLETION)
        *request = NULL;
    return T6(net)->irecv(rcomm, 1, &data, &int_size, &tag, &mhandle, request);
}

int hn_net_test(struct hn_netctx *ctx, void *request, int *done, int *size)
{
    return SAME(ctx->net)->test(request, done, size);
}

int hn_net_close_comm(struct hn_netctx *ctx, void *comm, bool send)
{
    return send ? SAME(ctx->net)->close_send(comm) : SAME(ctx->net)->close_recv(comm);
}

int hn_net_close_listen(struct hn_netctx *ctx, void *lcomm)
{
    return SAME(ctx->net)->close_listen(lcomm);
}

int hn_net_finalize(struct hn_netctx *ctx)
{
    if (ctx->net->version >= 11)
        return T12(ctx->net)->finalize(ctx->ctx);
    return R2_NCCL_SUCCESS;
}

void hn_net_set_attr(struct hn_netctx *ctx, unsigned op, unsigned proto)
{
    if (ctx->net->version < 11 || !T12(ctx->net)->set_attr)
        return;
    struct r2_ncclnet_attr attr;
    memset(&attr, 0xff, sizeof(attr)); /* R2_NCCL_ATTR_UNDEF everywhere */
    attr.op = op;
    attr.algo = 1u << 1; /* ring */
    attr.proto = proto;
    T12(ctx->net)->set_attr(ctx->ctx, &attr);
}
