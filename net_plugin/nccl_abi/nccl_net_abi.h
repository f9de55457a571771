/* Binary interface between NCCL and a network plugin, net API v6 to v12: our own declarations,
 * written from the documented facts. Only layout matters here: names are ours.
 *
 * One struct r2_ncclnet_vN per version is exported by the plugin as symbol "ncclNetPlugin_vN";
 * NCCL looks for the newest that it knows. All functions return an enum r2_nccl_result (as int).
 *
 *   NCCL 2.14-2.18: v6   2.19: v7   2.20-2.23: v8   2.24, 2.25: v9
 *   2.26, 2.27: v10      2.28, 2.29: v11            2.30 and later: v12
 *
 * What differs: v7 adds device handles and members 17, 18. Version 8 makes the size of regMr a
 * size_t. Version 9 adds makeVDevice and makes message sizes size_t. Version 10 adds the profiler
 * and a configuration at connect. Version 11 adds a context per communicator, finalize and
 * setNetAttr. Version 12 changes only the properties. Out parameters are not initialised by the
 * caller: *request and *done may hold anything on entry (with v9 and later *request may hold
 * R2_NCCL_OPTIONAL_RECV_COMPLETION).
 *
 * Ownership: handles are R2_NCCL_HANDLE_BYTES long and belong to the caller; strings in properties
 * belong to the plugin and must stay valid until finalize (before v11: for ever).
 */
#ifndef R2_NCCL_ABI_NCCL_NET_ABI_H
#define R2_NCCL_ABI_NCCL_NET_ABI_H

#include <stddef.h>
#include <stdint.h>

/* ---- values ---- */

enum r2_nccl_result {
    R2_NCCL_SUCCESS = 0,
    R2_NCCL_UNHANDLED_CUDA_ERROR = 1,
    R2_NCCL_SYSTEM_ERROR = 2,
    R2_NCCL_INTERNAL_ERROR = 3,
    R2_NCCL_INVALID_ARGUMENT = 4,
    R2_NCCL_INVALID_USAGE = 5,
    R2_NCCL_REMOTE_ERROR = 6,
    R2_NCCL_IN_PROGRESS = 7, /* a plugin must never return it */
};

enum r2_nccl_log_level {
    R2_NCCL_LOG_NONE = 0,
    R2_NCCL_LOG_VERSION = 1,
    R2_NCCL_LOG_WARN = 2,
    R2_NCCL_LOG_INFO = 3,
    R2_NCCL_LOG_ABORT = 4,
    R2_NCCL_LOG_TRACE = 5,
};

/* Subsystem bits of the logger's `flags` (NCCL_DEBUG_SUBSYS). */
#define R2_NCCL_SUBSYS_INIT 0x1ul
#define R2_NCCL_SUBSYS_COLL 0x2ul
#define R2_NCCL_SUBSYS_P2P 0x4ul
#define R2_NCCL_SUBSYS_SHM 0x8ul
#define R2_NCCL_SUBSYS_NET 0x10ul
#define R2_NCCL_SUBSYS_GRAPH 0x20ul
#define R2_NCCL_SUBSYS_TUNING 0x40ul
#define R2_NCCL_SUBSYS_ENV 0x80ul
#define R2_NCCL_SUBSYS_ALLOC 0x100ul
#define R2_NCCL_SUBSYS_CALL 0x200ul
#define R2_NCCL_SUBSYS_PROXY 0x400ul
#define R2_NCCL_SUBSYS_BOOTSTRAP 0x1000ul
#define R2_NCCL_SUBSYS_REG 0x2000ul
#define R2_NCCL_SUBSYS_ALL (~0ul)

#define R2_NCCL_HANDLE_BYTES 128
#define R2_NCCL_MAX_REQUESTS 32   /* per connection and grouped receive; 8 up to NCCL 2.18 */
#define R2_NCCL_MAX_REQUESTS_V6 8 /* what NCCL up to 2.18 keeps in flight */
#define R2_NCCL_MAX_MESSAGE_BYTES ((size_t)1 << 40) /* largest legal maxP2pBytes, maxCollBytes */
#define R2_NCCL_MAX_MESSAGE_V8 ((size_t)1 << 30)    /* sizes are int up to v8 */

/* ptrSupport and the `type` of regMr. */
#define R2_NCCL_PTR_HOST 0x1
#define R2_NCCL_PTR_CUDA 0x2
#define R2_NCCL_PTR_DMABUF 0x4

/* Value of *request on entry to irecv, v9 and later: arrival is seen by flags in the data. */
#define R2_NCCL_OPTIONAL_RECV_COMPLETION 0x1

#define R2_NCCL_NETDEV_HOST 0   /* netDeviceType: no device offload */
#define R2_NCCL_NETDEV_UNPACK 1 /* netDeviceType */
#define R2_NCCL_TRAFFIC_CLASS_UNDEF (-1)
#define R2_NCCL_ATTR_UNDEF (-1)
#define R2_NCCL_ID_UNDEF (-1) /* railId, planeId */
#define R2_NCCL_VDEVS_V9 4    /* members of a virtual NIC, v9 to v11 */
#define R2_NCCL_VDEVS_V12 8

/* ---- callbacks given to init ---- */

typedef void (*r2_nccl_logger)(int level, unsigned long flags, const char *file, int line,
                               const char *fmt, ...);
/* Only to be called with a phandle that is not NULL. */
typedef int (*r2_nccl_profiler)(void **event, int type, void *phandle, int64_t plugin_id,
                                void *data);

/* ---- properties ---- */

struct r2_ncclnet_props_v6 {
    char *name;      /* unique per device: NCCL keys NICs by it */
    char *pci_path;  /* real path below /sys, or NULL */
    uint64_t guid;   /* unique per physical NIC */
    int ptr_support; /* R2_NCCL_PTR_* */
    int speed;       /* Mbit/s */
    int port;
    float latency; /* microseconds, 0 = unknown */
    int max_comms;
    int max_recvs; /* largest n of irecv */
};

struct r2_ncclnet_props_v7 {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int netdev_type; /* R2_NCCL_NETDEV_* */
    int netdev_version;
};

struct r2_ncclnet_props_v8 {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global; /* a registration holds for every connection of the device */
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int netdev_type;
    int netdev_version;
};

struct r2_ncclnet_vprops_v9 {
    int ndevs;
    int devs[R2_NCCL_VDEVS_V9];
};

struct r2_ncclnet_vprops_v12 {
    int ndevs;
    int devs[R2_NCCL_VDEVS_V12];
};

/* v9 and v10 */
struct r2_ncclnet_props_v9 {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int force_flush;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int netdev_type;
    int netdev_version;
    struct r2_ncclnet_vprops_v9 vprops;
    size_t max_p2p_bytes; /* 1 .. R2_NCCL_MAX_MESSAGE_BYTES */
    size_t max_coll_bytes;
};

struct r2_ncclnet_props_v11 {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int force_flush;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int netdev_type;
    int netdev_version;
    struct r2_ncclnet_vprops_v9 vprops;
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
    int max_multi_request;
};

struct r2_ncclnet_props_v12 {
    char *name;
    char *pci_path;
    uint64_t guid;
    int ptr_support;
    int reg_is_global;
    int force_flush;
    int speed;
    int port;
    float latency;
    int max_comms;
    int max_recvs;
    int netdev_type;
    int netdev_version;
    struct r2_ncclnet_vprops_v12 vprops;
    size_t max_p2p_bytes;
    size_t max_coll_bytes;
    int max_multi_request;
    int16_t rail_id;  /* R2_NCCL_ID_UNDEF = unknown */
    int16_t plane_id; /* R2_NCCL_ID_UNDEF = unknown */
};

/* Per-communicator configuration: given to connect in v10, to init in v11 and later. */
struct r2_ncclnet_config {
    int traffic_class; /* R2_NCCL_TRAFFIC_CLASS_UNDEF = unset */
};

/* Hints of setNetAttr, v11 and later; R2_NCCL_ATTR_UNDEF = unknown. */
struct r2_ncclnet_comm_attr {
    int32_t max_concurrent_peers;
    int32_t min_concurrent_peers;
    int32_t max_flows_per_peer;
    int32_t min_flows_per_peer;
};

struct r2_ncclnet_attr {
    struct r2_ncclnet_comm_attr send;
    struct r2_ncclnet_comm_attr recv;
    uint32_t op; /* bit masks of NCCL's function, algorithm and protocol numbers */
    uint32_t algo;
    uint32_t proto;
};

/* Device-side handle of a connection; a host plugin leaves the pointer alone. */
struct r2_ncclnet_device_handle {
    int netdev_type;
    int netdev_version;
    void *handle;
    size_t size;
    int needs_proxy_progress;
};

/* ---- function types shared by several versions ---- */

typedef int (*r2_ncclnet_init_v6)(r2_nccl_logger log);                         /* v6-v9 */
typedef int (*r2_ncclnet_init_v10)(r2_nccl_logger log, r2_nccl_profiler prof); /* v10 */
typedef int (*r2_ncclnet_init_v11)(void **ctx, uint64_t comm_id, struct r2_ncclnet_config *config,
                                   r2_nccl_logger log, r2_nccl_profiler prof); /* v11, v12 */
typedef int (*r2_ncclnet_devices)(int *ndev);
typedef int (*r2_ncclnet_listen_v6)(int dev, void *handle, void **lcomm);             /* v6-v10 */
typedef int (*r2_ncclnet_listen_v11)(void *ctx, int dev, void *handle, void **lcomm); /* v11-v12 */
typedef int (*r2_ncclnet_connect_v6)(int dev, void *handle, void **scomm);
typedef int (*r2_ncclnet_connect_v7)(int dev, void *handle, void **scomm,
                                     struct r2_ncclnet_device_handle **dev_handle); /* v7-v9 */
typedef int (*r2_ncclnet_connect_v10)(int dev, struct r2_ncclnet_config *config, void *handle,
                                      void **scomm, struct r2_ncclnet_device_handle **dev_handle);
typedef int (*r2_ncclnet_connect_v11)(void *ctx, int dev, void *handle, void **scomm,
                                      struct r2_ncclnet_device_handle **dev_handle); /* v11-v12 */
typedef int (*r2_ncclnet_accept_v6)(void *lcomm, void **rcomm);
typedef int (*r2_ncclnet_accept_v7)(void *lcomm, void **rcomm,
                                    struct r2_ncclnet_device_handle **dev_handle); /* v7-v12 */
typedef int (*r2_ncclnet_regmr_v6)(void *comm, void *data, int size, int type,
                                   void **mhandle); /* v6, v7 */
typedef int (*r2_ncclnet_regmr_v8)(void *comm, void *data, size_t size, int type,
                                   void **mhandle); /* v8-v12 */
typedef int (*r2_ncclnet_regmr_dmabuf)(void *comm, void *data, size_t size, int type,
                                       uint64_t offset, int fd, void **mhandle);
typedef int (*r2_ncclnet_deregmr)(void *comm, void *mhandle);
typedef int (*r2_ncclnet_isend_v6)(void *scomm, void *data, int size, int tag, void *mhandle,
                                   void **request); /* v6-v8 */
typedef int (*r2_ncclnet_isend_v9)(void *scomm, void *data, size_t size, int tag, void *mhandle,
                                   void **request); /* v9 */
typedef int (*r2_ncclnet_isend_v10)(void *scomm, void *data, size_t size, int tag, void *mhandle,
                                    void *phandle, void **request); /* v10-v12 */
typedef int (*r2_ncclnet_irecv_v6)(void *rcomm, int n, void **data, int *sizes, int *tags,
                                   void **mhandles, void **request); /* v6-v8 */
typedef int (*r2_ncclnet_irecv_v9)(void *rcomm, int n, void **data, size_t *sizes, int *tags,
                                   void **mhandles, void **request); /* v9 */
typedef int (*r2_ncclnet_irecv_v10)(void *rcomm, int n, void **data, size_t *sizes, int *tags,
                                    void **mhandles, void **phandles, void **request); /* v10-v12 */
typedef int (*r2_ncclnet_iflush)(void *rcomm, int n, void **data, int *sizes, void **mhandles,
                                 void **request);
typedef int (*r2_ncclnet_test)(void *request, int *done, int *sizes); /* sizes may be NULL */
typedef int (*r2_ncclnet_close)(void *comm);
typedef int (*r2_ncclnet_get_device_mr)(void *comm, void *mhandle, void **dptr);
typedef int (*r2_ncclnet_irecv_consumed)(void *rcomm, int n, void *request);
typedef int (*r2_ncclnet_make_vdevice_v9)(int *dev, struct r2_ncclnet_vprops_v9 *props);
typedef int (*r2_ncclnet_make_vdevice_v12)(int *dev, struct r2_ncclnet_vprops_v12 *props);
typedef int (*r2_ncclnet_finalize)(void *ctx);
typedef int (*r2_ncclnet_set_attr)(void *ctx, struct r2_ncclnet_attr *attr);

/* ---- function tables ---- */

struct r2_ncclnet_v6 {
    const char *name;
    r2_ncclnet_init_v6 init;
    r2_ncclnet_devices devices;
    int (*get_properties)(int dev, struct r2_ncclnet_props_v6 *props);
    r2_ncclnet_listen_v6 listen;
    r2_ncclnet_connect_v6 connect;
    r2_ncclnet_accept_v6 accept;
    r2_ncclnet_regmr_v6 regmr;
    r2_ncclnet_regmr_dmabuf regmr_dmabuf; /* may be NULL, all versions */
    r2_ncclnet_deregmr deregmr;
    r2_ncclnet_isend_v6 isend;
    r2_ncclnet_irecv_v6 irecv;
    r2_ncclnet_iflush iflush;
    r2_ncclnet_test test;
    r2_ncclnet_close close_send;
    r2_ncclnet_close close_recv;
    r2_ncclnet_close close_listen;
};

struct r2_ncclnet_v7 {
    const char *name;
    r2_ncclnet_init_v6 init;
    r2_ncclnet_devices devices;
    int (*get_properties)(int dev, struct r2_ncclnet_props_v7 *props);
    r2_ncclnet_listen_v6 listen;
    r2_ncclnet_connect_v7 connect;
    r2_ncclnet_accept_v7 accept;
    r2_ncclnet_regmr_v6 regmr;
    r2_ncclnet_regmr_dmabuf regmr_dmabuf;
    r2_ncclnet_deregmr deregmr;
    r2_ncclnet_isend_v6 isend;
    r2_ncclnet_irecv_v6 irecv;
    r2_ncclnet_iflush iflush;
    r2_ncclnet_test test;
    r2_ncclnet_close close_send;
    r2_ncclnet_close close_recv;
    r2_ncclnet_close close_listen;
    r2_ncclnet_get_device_mr get_device_mr;   /* may be NULL, all versions */
    r2_ncclnet_irecv_consumed irecv_consumed; /* may be NULL, all versions */
};

struct r2_ncclnet_v8 {
    const char *name;
    r2_ncclnet_init_v6 init;
    r2_ncclnet_devices devices;
    int (*get_properties)(int dev, struct r2_ncclnet_props_v8 *props);
    r2_ncclnet_listen_v6 listen;
    r2_ncclnet_connect_v7 connect;
    r2_ncclnet_accept_v7 accept;
    r2_ncclnet_regmr_v8 regmr;
    r2_ncclnet_regmr_dmabuf regmr_dmabuf;
    r2_ncclnet_deregmr deregmr;
    r2_ncclnet_isend_v6 isend;
    r2_ncclnet_irecv_v6 irecv;
    r2_ncclnet_iflush iflush;
    r2_ncclnet_test test;
    r2_ncclnet_close close_send;
    r2_ncclnet_close close_recv;
    r2_ncclnet_close close_listen;
    r2_ncclnet_get_device_mr get_device_mr;
    r2_ncclnet_irecv_consumed irecv_consumed;
};

struct r2_ncclnet_v9 {
    const char *name;
    r2_ncclnet_init_v6 init;
    r2_ncclnet_devices devices;
    int (*get_properties)(int dev, struct r2_ncclnet_props_v9 *props);
    r2_ncclnet_listen_v6 listen;
    r2_ncclnet_connect_v7 connect;
    r2_ncclnet_accept_v7 accept;
    r2_ncclnet_regmr_v8 regmr;
    r2_ncclnet_regmr_dmabuf regmr_dmabuf;
    r2_ncclnet_deregmr deregmr;
    r2_ncclnet_isend_v9 isend;
    r2_ncclnet_irecv_v9 irecv;
    r2_ncclnet_iflush iflush;
    r2_ncclnet_test test;
    r2_ncclnet_close close_send;
    r2_ncclnet_close close_recv;
    r2_ncclnet_close close_listen;
    r2_ncclnet_get_device_mr get_device_mr;
    r2_ncclnet_irecv_consumed irecv_consumed;
    r2_ncclnet_make_vdevice_v9 make_vdevice; /* NULL: no fused devices, all versions */
};

struct r2_ncclnet_v10 {
    const char *name;
    r2_ncclnet_init_v10 init;
    r2_ncclnet_devices devices;
    int (*get_properties)(int dev, struct r2_ncclnet_props_v9 *props);
    r2_ncclnet_listen_v6 listen;
    r2_ncclnet_connect_v10 connect;
    r2_ncclnet_accept_v7 accept;
    r2_ncclnet_regmr_v8 regmr;
    r2_ncclnet_regmr_dmabuf regmr_dmabuf;
    r2_ncclnet_deregmr deregmr;
    r2_ncclnet_isend_v10 isend;
    r2_ncclnet_irecv_v10 irecv;
    r2_ncclnet_iflush iflush;
    r2_ncclnet_test test;
    r2_ncclnet_close close_send;
    r2_ncclnet_close close_recv;
    r2_ncclnet_close close_listen;
    r2_ncclnet_get_device_mr get_device_mr;
    r2_ncclnet_irecv_consumed irecv_consumed;
    r2_ncclnet_make_vdevice_v9 make_vdevice;
};

struct r2_ncclnet_v11 {
    const char *name;
    r2_ncclnet_init_v11 init;
    r2_ncclnet_devices devices;
    int (*get_properties)(int dev, struct r2_ncclnet_props_v11 *props);
    r2_ncclnet_listen_v11 listen;
    r2_ncclnet_connect_v11 connect;
    r2_ncclnet_accept_v7 accept;
    r2_ncclnet_regmr_v8 regmr;
    r2_ncclnet_regmr_dmabuf regmr_dmabuf;
    r2_ncclnet_deregmr deregmr;
    r2_ncclnet_isend_v10 isend;
    r2_ncclnet_irecv_v10 irecv;
    r2_ncclnet_iflush iflush;
    r2_ncclnet_test test;
    r2_ncclnet_close close_send;
    r2_ncclnet_close close_recv;
    r2_ncclnet_close close_listen;
    r2_ncclnet_get_device_mr get_device_mr;
    r2_ncclnet_irecv_consumed irecv_consumed;
    r2_ncclnet_make_vdevice_v9 make_vdevice;
    r2_ncclnet_finalize finalize; /* called unconditionally: must not be NULL */
    r2_ncclnet_set_attr set_attr; /* may be NULL */
};

struct r2_ncclnet_v12 {
    const char *name;
    r2_ncclnet_init_v11 init;
    r2_ncclnet_devices devices;
    int (*get_properties)(int dev, struct r2_ncclnet_props_v12 *props);
    r2_ncclnet_listen_v11 listen;
    r2_ncclnet_connect_v11 connect;
    r2_ncclnet_accept_v7 accept;
    r2_ncclnet_regmr_v8 regmr;
    r2_ncclnet_regmr_dmabuf regmr_dmabuf;
    r2_ncclnet_deregmr deregmr;
    r2_ncclnet_isend_v10 isend;
    r2_ncclnet_irecv_v10 irecv;
    r2_ncclnet_iflush iflush;
    r2_ncclnet_test test;
    r2_ncclnet_close close_send;
    r2_ncclnet_close close_recv;
    r2_ncclnet_close close_listen;
    r2_ncclnet_get_device_mr get_device_mr;
    r2_ncclnet_irecv_consumed irecv_consumed;
    r2_ncclnet_make_vdevice_v12 make_vdevice;
    r2_ncclnet_finalize finalize;
    r2_ncclnet_set_attr set_attr;
};

/* ---- proof of layout (LP64) ---- */

#if defined(__LP64__) && !defined(__cplusplus)
#define R2_ABI_SIZE(s, bytes) _Static_assert(sizeof(struct s) == (bytes), #s " size")
#define R2_ABI_AT(s, m, at) _Static_assert(offsetof(struct s, m) == (at), #s "." #m " offset")
R2_ABI_SIZE(r2_ncclnet_props_v6, 48);
R2_ABI_AT(r2_ncclnet_props_v6, guid, 16);
R2_ABI_AT(r2_ncclnet_props_v6, speed, 28);
R2_ABI_AT(r2_ncclnet_props_v6, max_recvs, 44);
R2_ABI_SIZE(r2_ncclnet_props_v7, 56);
R2_ABI_AT(r2_ncclnet_props_v7, netdev_type, 48);
R2_ABI_SIZE(r2_ncclnet_props_v8, 64);
R2_ABI_AT(r2_ncclnet_props_v8, reg_is_global, 28);
R2_ABI_AT(r2_ncclnet_props_v8, speed, 32);
R2_ABI_AT(r2_ncclnet_props_v8, netdev_version, 56);
R2_ABI_SIZE(r2_ncclnet_vprops_v9, 20);
R2_ABI_SIZE(r2_ncclnet_vprops_v12, 36);
R2_ABI_SIZE(r2_ncclnet_props_v9, 104);
R2_ABI_AT(r2_ncclnet_props_v9, force_flush, 32);
R2_ABI_AT(r2_ncclnet_props_v9, speed, 36);
R2_ABI_AT(r2_ncclnet_props_v9, vprops, 64);
R2_ABI_AT(r2_ncclnet_props_v9, max_p2p_bytes, 88);
R2_ABI_SIZE(r2_ncclnet_props_v11, 112);
R2_ABI_AT(r2_ncclnet_props_v11, max_multi_request, 104);
R2_ABI_SIZE(r2_ncclnet_props_v12, 128);
R2_ABI_AT(r2_ncclnet_props_v12, vprops, 64);
R2_ABI_AT(r2_ncclnet_props_v12, max_p2p_bytes, 104);
R2_ABI_AT(r2_ncclnet_props_v12, max_multi_request, 120);
R2_ABI_AT(r2_ncclnet_props_v12, rail_id, 124);
R2_ABI_AT(r2_ncclnet_props_v12, plane_id, 126);
R2_ABI_SIZE(r2_ncclnet_config, 4);
R2_ABI_SIZE(r2_ncclnet_attr, 44);
R2_ABI_SIZE(r2_ncclnet_device_handle, 32);
R2_ABI_SIZE(r2_ncclnet_v6, 17 * 8);
R2_ABI_AT(r2_ncclnet_v6, close_listen, 16 * 8);
R2_ABI_SIZE(r2_ncclnet_v7, 19 * 8);
R2_ABI_AT(r2_ncclnet_v7, irecv_consumed, 18 * 8);
R2_ABI_SIZE(r2_ncclnet_v8, 19 * 8);
R2_ABI_AT(r2_ncclnet_v8, irecv_consumed, 18 * 8);
R2_ABI_SIZE(r2_ncclnet_v9, 20 * 8);
R2_ABI_AT(r2_ncclnet_v9, make_vdevice, 19 * 8);
R2_ABI_SIZE(r2_ncclnet_v10, 20 * 8);
R2_ABI_AT(r2_ncclnet_v10, isend, 10 * 8);
R2_ABI_SIZE(r2_ncclnet_v11, 22 * 8);
R2_ABI_AT(r2_ncclnet_v11, finalize, 20 * 8);
R2_ABI_SIZE(r2_ncclnet_v12, 22 * 8);
R2_ABI_AT(r2_ncclnet_v12, test, 13 * 8);
R2_ABI_AT(r2_ncclnet_v12, set_attr, 21 * 8);
#undef R2_ABI_SIZE
#undef R2_ABI_AT
#endif

#endif
