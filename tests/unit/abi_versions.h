/* Every version of the plugin's net API in one shape, for tests that try them all. */
#ifndef R2_TESTS_UNIT_ABI_VERSIONS_H
#define R2_TESTS_UNIT_ABI_VERSIONS_H

#include <stdbool.h>
#include <string.h>

#include "check.h"
#include "nccl_abi/nccl_net_abi.h"

extern const struct r2_ncclnet_v6 ncclNetPlugin_v6;
extern const struct r2_ncclnet_v7 ncclNetPlugin_v7;
extern const struct r2_ncclnet_v8 ncclNetPlugin_v8;
extern const struct r2_ncclnet_v9 ncclNetPlugin_v9;
extern const struct r2_ncclnet_v10 ncclNetPlugin_v10;
extern const struct r2_ncclnet_v11 ncclNetPlugin_v11;
extern const struct r2_ncclnet_v12 ncclNetPlugin_v12;

static void quiet_log(int level, unsigned long flags, const char *file, int line, const char *fmt,
                      ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)fmt;
}

/* The members that the versions do not share, with the newest shape. */
struct version {
    int number;
    const void *table;
    int (*init)(void **ctx);
    int (*properties)(int dev, struct r2_ncclnet_props_v12 *out);
    int (*listen)(void *ctx, int dev, void *handle, void **out);
    int (*connect)(void *ctx, int dev, void *handle, void **out);
    int (*accept)(void *listen, void **out);
    int (*regmr)(void *comm, void *data, size_t size, int type, void **out);
    int (*isend)(void *comm, void *data, size_t size, int tag, void *mr, void **out);
    int (*irecv)(void *comm, int n, void **data, size_t *sizes, int *tags, void **mrs, void **out);
};

#define COPY(to, from, member) (to)->member = (from).member
#define COPY_BASE(to, from)                                                                        \
    do {                                                                                           \
        COPY(to, from, name);                                                                      \
        COPY(to, from, pci_path);                                                                  \
        COPY(to, from, guid);                                                                      \
        COPY(to, from, ptr_support);                                                               \
        COPY(to, from, speed);                                                                     \
        COPY(to, from, port);                                                                      \
        COPY(to, from, latency);                                                                   \
        COPY(to, from, max_comms);                                                                 \
        COPY(to, from, max_recvs);                                                                 \
    } while (0)

/* The properties start as garbage: every member must be written. What a version does not have is
 * what NCCL's own adapter puts there. */
#define PROPERTIES(n, props_type, extra)                                                           \
    static int properties_##n(int dev, struct r2_ncclnet_props_v12 *out)                           \
    {                                                                                              \
        struct props_type p;                                                                       \
        int rc;                                                                                    \
        memset(&p, 0xa5, sizeof(p));                                                               \
        rc = ncclNetPlugin_v##n.get_properties(dev, &p);                                           \
        memset(out, 0, sizeof(*out));                                                              \
        COPY_BASE(out, p);                                                                         \
        out->vprops.ndevs = 1;                                                                     \
        out->vprops.devs[0] = dev;                                                                 \
        out->max_p2p_bytes = out->max_coll_bytes = R2_NCCL_MAX_MESSAGE_BYTES;                      \
        out->max_multi_request = 1;                                                                \
        out->rail_id = out->plane_id = R2_NCCL_ID_UNDEF;                                           \
        extra return rc;                                                                           \
    }

#define EXTRA_V7                                                                                   \
    COPY(out, p, netdev_type);                                                                     \
    COPY(out, p, netdev_version);
#define EXTRA_V8 EXTRA_V7 COPY(out, p, reg_is_global);
#define EXTRA_V9                                                                                   \
    EXTRA_V8 COPY(out, p, force_flush);                                                            \
    COPY(out, p, vprops.ndevs);                                                                    \
    COPY(out, p, vprops.devs[0]);                                                                  \
    COPY(out, p, max_p2p_bytes);                                                                   \
    COPY(out, p, max_coll_bytes);
#define EXTRA_V11 EXTRA_V9 COPY(out, p, max_multi_request);
#define EXTRA_V12                                                                                  \
    EXTRA_V11 COPY(out, p, rail_id);                                                               \
    COPY(out, p, plane_id);

PROPERTIES(6, r2_ncclnet_props_v6, )
PROPERTIES(7, r2_ncclnet_props_v7, EXTRA_V7)
PROPERTIES(8, r2_ncclnet_props_v8, EXTRA_V8)
PROPERTIES(9, r2_ncclnet_props_v9, EXTRA_V9)
PROPERTIES(10, r2_ncclnet_props_v9, EXTRA_V9)
PROPERTIES(11, r2_ncclnet_props_v11, EXTRA_V11)
PROPERTIES(12, r2_ncclnet_props_v12, EXTRA_V12)

static struct r2_ncclnet_config config = {R2_NCCL_TRAFFIC_CLASS_UNDEF};

#define VERSION(n, init_call, listen_call, connect_call, accept_call, size_of_reg, isend_call,     \
                size_type, irecv_call)                                                             \
    static int init_##n(void **ctx)                                                                \
    {                                                                                              \
        (void)ctx;                                                                                 \
        return ncclNetPlugin_v##n.init init_call;                                                  \
    }                                                                                              \
    static int listen_##n(void *ctx, int dev, void *handle, void **out)                            \
    {                                                                                              \
        (void)ctx;                                                                                 \
        return ncclNetPlugin_v##n.listen listen_call;                                              \
    }                                                                                              \
    static int connect_##n(void *ctx, int dev, void *handle, void **out)                           \
    {                                                                                              \
        struct r2_ncclnet_device_handle *device = NULL;                                            \
        (void)ctx;                                                                                 \
        (void)device;                                                                              \
        int rc = ncclNetPlugin_v##n.connect connect_call;                                          \
        CHECK(device == NULL);                                                                     \
        return rc;                                                                                 \
    }                                                                                              \
    static int accept_##n(void *listen, void **out)                                                \
    {                                                                                              \
        struct r2_ncclnet_device_handle *device = NULL;                                            \
        (void)device;                                                                              \
        return ncclNetPlugin_v##n.accept accept_call;                                              \
    }                                                                                              \
    static int regmr_##n(void *comm, void *data, size_t size, int type, void **out)                \
    {                                                                                              \
        return ncclNetPlugin_v##n.regmr(comm, data, (size_of_reg)size, type, out);                 \
    }                                                                                              \
    static int isend_##n(void *comm, void *data, size_t size, int tag, void *mr, void **out)       \
    {                                                                                              \
        return ncclNetPlugin_v##n.isend isend_call;                                                \
    }                                                                                              \
    static int irecv_##n(void *comm, int n_, void **data, size_t *sizes, int *tags, void **mrs,    \
                         void **out)                                                               \
    {                                                                                              \
        size_type s[2] = {(size_type)sizes[0], (size_type)sizes[0]};                               \
        return ncclNetPlugin_v##n.irecv irecv_call;                                                \
    }

VERSION(6, (quiet_log), (dev, handle, out), (dev, handle, out), (listen, out), int,
        (comm, data, (int)size, tag, mr, out), int, (comm, n_, data, s, tags, mrs, out))
VERSION(7, (quiet_log), (dev, handle, out), (dev, handle, out, &device), (listen, out, &device),
        int, (comm, data, (int)size, tag, mr, out), int, (comm, n_, data, s, tags, mrs, out))
VERSION(8, (quiet_log), (dev, handle, out), (dev, handle, out, &device), (listen, out, &device),
        size_t, (comm, data, (int)size, tag, mr, out), int, (comm, n_, data, s, tags, mrs, out))
VERSION(9, (quiet_log), (dev, handle, out), (dev, handle, out, &device), (listen, out, &device),
        size_t, (comm, data, size, tag, mr, out), size_t, (comm, n_, data, s, tags, mrs, out))
VERSION(10, (quiet_log, NULL), (dev, handle, out), (dev, &config, handle, out, &device),
        (listen, out, &device), size_t, (comm, data, size, tag, mr, NULL, out), size_t,
        (comm, n_, data, s, tags, mrs, NULL, out))
VERSION(11, (ctx, 77, &config, quiet_log, NULL), (ctx, dev, handle, out),
        (ctx, dev, handle, out, &device), (listen, out, &device), size_t,
        (comm, data, size, tag, mr, NULL, out), size_t, (comm, n_, data, s, tags, mrs, NULL, out))
VERSION(12, (ctx, 77, &config, quiet_log, NULL), (ctx, dev, handle, out),
        (ctx, dev, handle, out, &device), (listen, out, &device), size_t,
        (comm, data, size, tag, mr, NULL, out), size_t, (comm, n_, data, s, tags, mrs, NULL, out))

#define ROW(n)                                                                                     \
    {                                                                                              \
        n, &ncclNetPlugin_v##n, init_##n, properties_##n, listen_##n, connect_##n, accept_##n,     \
            regmr_##n, isend_##n, irecv_##n                                                        \
    }

static const struct version versions[] = {ROW(6),  ROW(7),  ROW(8), ROW(9),
                                          ROW(10), ROW(11), ROW(12)};

#define EACH_VERSION(v)                                                                            \
    for (const struct version *v = versions;                                                       \
         v < versions + sizeof(versions) / sizeof(versions[0]); v++)

/* Members at the same place in all versions: see the list of members of net API v6. */
static r2_ncclnet_devices devices_of(const struct version *v)
{
    return ((const struct r2_ncclnet_v6 *)v->table)->devices;
}

static const struct r2_ncclnet_v6 *common(const struct version *v)
{
    return v->table;
}

#endif
