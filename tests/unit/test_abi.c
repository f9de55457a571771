/* NCCL's net API over a made-up engine: every version forwards what it is given, writes every out
 * parameter, and turns errors into NCCL's results. */
#include <errno.h>
#include <limits.h>
#include <stdarg.h>

#include "check.h"
#include "engine/engine.h"
#include "nccl_abi/nccl_net_abi.h"

extern const struct r2_ncclnet_v6 ncclNetPlugin_v6;
extern const struct r2_ncclnet_v7 ncclNetPlugin_v7;
extern const struct r2_ncclnet_v8 ncclNetPlugin_v8;
extern const struct r2_ncclnet_v9 ncclNetPlugin_v9;
extern const struct r2_ncclnet_v10 ncclNetPlugin_v10;
extern const struct r2_ncclnet_v11 ncclNetPlugin_v11;
extern const struct r2_ncclnet_v12 ncclNetPlugin_v12;

#define GARBAGE ((void *)(uintptr_t)0xdeadbeef)

/* ---- the engine ---- */

static struct {
    int rc;      /* what every function returns */
    bool later;  /* give no object with success */
    bool done;   /* of test */
    size_t size; /* of test */
    int inits, finalizes, calls;
    void *ctx, *object, *data, *mr, *handle;
    size_t bytes;
    int dev, tag, type;
    r2_log_fn log;
} fake;

/* Addresses that are told apart, never followed. */
static char ctx_mark, conn_mark, listen_mark, mr_mark, req_mark;

static struct r2_nic fake_nics[2] = {
    {.name = "nic0", .speed_mbps = 1000, .guid = 11, .pci_path = "/sys/devices/pci0000:00/x"},
    {.name = "nic1", .speed_mbps = 200000, .guid = 12},
};

static int give(void *mark, void **out)
{
    fake.calls++;
    *out = fake.rc == 0 && !fake.later ? mark : NULL;
    return fake.rc;
}

int r2_engine_init(struct r2_ctx **ctx, uint64_t comm_id, r2_log_fn log)
{
    fake.inits++;
    fake.log = log;
    fake.bytes = comm_id;
    return give(&ctx_mark, (void **)ctx);
}

int r2_engine_devices(int *count)
{
    *count = 2;
    return fake.rc;
}

const struct r2_nic *r2_engine_nic(int dev)
{
    return dev >= 0 && dev < 2 ? &fake_nics[dev] : NULL;
}

int r2_engine_listen(struct r2_ctx *ctx, int dev, void *handle, struct r2_listen **out)
{
    fake.ctx = ctx;
    fake.dev = dev;
    memset(handle, 0x5a, R2_HANDLE_BYTES);
    return give(&listen_mark, (void **)out);
}

int r2_engine_connect(struct r2_ctx *ctx, int dev, void *handle, struct r2_conn **out)
{
    fake.ctx = ctx;
    fake.dev = dev;
    fake.handle = handle;
    return give(&conn_mark, (void **)out);
}

int r2_engine_accept(struct r2_listen *listen, struct r2_conn **out)
{
    fake.object = listen;
    return give(&conn_mark, (void **)out);
}

int r2_engine_reg(struct r2_conn *conn, void *data, size_t size, int type, struct r2_mr **out)
{
    fake.object = conn;
    fake.data = data;
    fake.bytes = size;
    fake.type = type;
    return give(&mr_mark, (void **)out);
}

int r2_engine_dereg(struct r2_conn *conn, struct r2_mr *mr)
{
    fake.calls++;
    fake.object = conn;
    fake.mr = mr;
    return fake.rc;
}

static int transfer(struct r2_conn *conn, void *data, size_t size, int tag, struct r2_mr *mr,
                    struct r2_req **out)
{
    fake.object = conn;
    fake.data = data;
    fake.bytes = size;
    fake.tag = tag;
    fake.mr = mr;
    return give(&req_mark, (void **)out);
}

int r2_engine_isend(struct r2_conn *conn, void *data, size_t size, int tag, struct r2_mr *mr,
                    struct r2_req **out)
{
    return transfer(conn, data, size, tag, mr, out);
}

int r2_engine_irecv(struct r2_conn *conn, void *data, size_t size, int tag, struct r2_mr *mr,
                    struct r2_req **out)
{
    return transfer(conn, data, size, tag + 1000, mr, out);
}

int r2_engine_test(struct r2_req *req, int *done, size_t *size)
{
    fake.calls++;
    fake.object = req;
    *done = fake.rc == 0 && fake.done;
    if (*done && size) {
        *size = fake.size;
    }
    return fake.rc;
}

int r2_engine_close(struct r2_conn *conn)
{
    fake.calls++;
    fake.object = conn;
    return fake.rc;
}

int r2_engine_close_listen(struct r2_listen *listen)
{
    fake.calls++;
    fake.object = listen;
    return fake.rc;
}

int r2_engine_finalize(struct r2_ctx *ctx)
{
    fake.finalizes++;
    fake.ctx = ctx;
    return fake.rc;
}

static void quiet_log(int level, unsigned long flags, const char *file, int line, const char *fmt,
                      ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)fmt;
}

/* ---- any version as one ---- */

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
    {n,          &ncclNetPlugin_v##n, init_##n,  properties_##n, listen_##n,                       \
     connect_##n, accept_##n,         regmr_##n, isend_##n,      irecv_##n}

static const struct version versions[] = {ROW(6),  ROW(7),  ROW(8), ROW(9),
                                          ROW(10), ROW(11), ROW(12)};

#define EACH_VERSION(v)                                                                            \
    for (const struct version *v = versions; v < versions + sizeof(versions) / sizeof(versions[0]);\
         v++)

/* Members at the same place in all versions: see the list of members of net API v6. */
static r2_ncclnet_devices devices_of(const struct version *v)
{
    return ((const struct r2_ncclnet_v6 *)v->table)->devices;
}

static const struct r2_ncclnet_v6 *common(const struct version *v)
{
    return v->table;
}

static void *start(const struct version *v)
{
    void *ctx = GARBAGE;

    fake.rc = 0;
    fake.later = false;
    CHECK_EQ(v->init(&ctx), R2_NCCL_SUCCESS);
    return v->number >= 11 ? ctx : &ctx_mark;
}

/* ---- tests ---- */

static void test_init(void)
{
    void *ctx = GARBAGE;

    fake.rc = -ENOMEM;
    CHECK_EQ(ncclNetPlugin_v12.init(&ctx, 5, &config, quiet_log, NULL), R2_NCCL_SYSTEM_ERROR);
    CHECK(ctx == NULL);
    fake.rc = 0;
    CHECK_EQ(ncclNetPlugin_v12.init(&ctx, 5, &config, quiet_log, NULL), 0);
    CHECK(ctx == &ctx_mark && fake.bytes == 5 && fake.log == quiet_log);
    CHECK_EQ(ncclNetPlugin_v12.finalize(ctx), 0);
    CHECK_EQ(ncclNetPlugin_v11.finalize(ctx), 0);
    CHECK_EQ(fake.finalizes, 2);
    CHECK_EQ(ncclNetPlugin_v12.finalize(NULL), 0);
    CHECK_EQ(fake.finalizes, 2);
}

/* The versions without contexts share one, made once however often NCCL calls init; before it, a
 * call fails instead of crashing. */
static void test_init_of_old_versions(void)
{
    char handle[R2_HANDLE_BYTES];
    void *out = GARBAGE;
    int before;

    fake.rc = 0;
    CHECK_EQ(ncclNetPlugin_v8.listen(0, handle, &out), R2_NCCL_INTERNAL_ERROR);
    CHECK(out == NULL);
    fake.rc = -EMFILE;
    CHECK_EQ(ncclNetPlugin_v8.init(quiet_log), R2_NCCL_SYSTEM_ERROR);
    fake.rc = 0;
    before = fake.inits;
    EACH_VERSION(v) {
        if (v->number < 11) {
            start(v);
        }
    }
    CHECK_EQ(fake.inits, before + 1);
}

static void test_devices(void)
{
    EACH_VERSION(v) {
        int n = -7;

        fake.rc = 0;
        CHECK_EQ(devices_of(v)(&n), 0);
        CHECK_EQ(n, 2);
        CHECK_STR(common(v)->name, "R2CCL");
    }
}

static void test_properties(void)
{
    EACH_VERSION(v) {
        struct r2_ncclnet_props_v12 p;

        CHECK_EQ(v->properties(1, &p), 0);
        CHECK_STR(p.name, "nic1");
        CHECK(p.pci_path == NULL);
        CHECK_EQ(p.guid, 12);
        CHECK_EQ(p.ptr_support, R2_NCCL_PTR_HOST);
        CHECK_EQ(p.reg_is_global, 0);
        CHECK_EQ(p.force_flush, 0);
        CHECK_EQ(p.speed, 200000);
        CHECK_EQ(p.port, 1);
        CHECK(p.latency == 0);
        CHECK_GE(p.max_comms, 1024);
        CHECK_EQ(p.max_recvs, 1);
        CHECK_EQ(p.netdev_type, R2_NCCL_NETDEV_HOST);
        CHECK_EQ(p.netdev_version, 0);
        CHECK_EQ(p.vprops.ndevs, 1);
        CHECK_EQ(p.vprops.devs[0], 1);
        CHECK(p.max_p2p_bytes > 0 && p.max_p2p_bytes <= R2_NCCL_MAX_MESSAGE_BYTES);
        CHECK(p.max_coll_bytes > 0);
        CHECK_EQ(p.max_multi_request, 1);
        CHECK_EQ(p.rail_id, R2_NCCL_ID_UNDEF);
        CHECK_EQ(p.plane_id, R2_NCCL_ID_UNDEF);
        CHECK_EQ(v->properties(0, &p), 0);
        CHECK_STR(p.pci_path, "/sys/devices/pci0000:00/x");
        CHECK_EQ(p.speed, R2_NIC_MIN_REPORT); /* less would round to nothing in NCCL's search */
        CHECK_EQ(v->properties(2, &p), R2_NCCL_INVALID_USAGE);
        CHECK_EQ(v->properties(-1, &p), R2_NCCL_INVALID_USAGE);
    }
}

static void test_tables_are_full(void)
{
    EACH_VERSION(v) {
        const struct r2_ncclnet_v6 *t = common(v);

        CHECK(t->name && t->init && t->devices && t->get_properties && t->listen && t->connect);
        CHECK(t->accept && t->regmr && t->regmr_dmabuf && t->deregmr && t->isend && t->irecv);
        CHECK(t->iflush && t->test && t->close_send && t->close_recv && t->close_listen);
    }
    CHECK(ncclNetPlugin_v11.finalize && ncclNetPlugin_v12.finalize);
    CHECK(!ncclNetPlugin_v9.make_vdevice && !ncclNetPlugin_v12.make_vdevice);
}

static void test_connections(void)
{
    EACH_VERSION(v) {
        void *ctx = start(v);
        char handle[R2_HANDLE_BYTES] = {0};
        void *out = GARBAGE;

        CHECK_EQ(v->listen(ctx, 1, handle, &out), 0);
        CHECK(out == &listen_mark && fake.ctx == &ctx_mark && fake.dev == 1);
        CHECK_EQ((unsigned char)handle[R2_HANDLE_BYTES - 1], 0x5a);
        out = GARBAGE;
        CHECK_EQ(v->connect(ctx, 0, handle, &out), 0);
        CHECK(out == &conn_mark && fake.dev == 0 && fake.handle == handle);
        out = GARBAGE;
        CHECK_EQ(v->accept(&listen_mark, &out), 0);
        CHECK(out == &conn_mark && fake.object == &listen_mark);
        /* "Call again" is success without a connection. */
        fake.later = true;
        out = GARBAGE;
        CHECK_EQ(v->connect(ctx, 0, handle, &out), 0);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(v->accept(&listen_mark, &out), 0);
        CHECK(out == NULL);
        fake.later = false;
        fake.rc = -ECONNREFUSED;
        out = GARBAGE;
        CHECK_EQ(v->connect(ctx, 0, handle, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(v->accept(&listen_mark, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(v->listen(ctx, 1, handle, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
    }
}

static void test_registration(void)
{
    char data[16];

    EACH_VERSION(v) {
        void *out = GARBAGE;
        int calls;

        start(v);
        CHECK_EQ(v->regmr(&conn_mark, data, 16, R2_NCCL_PTR_HOST, &out), 0);
        CHECK(out == &mr_mark && fake.object == &conn_mark && fake.data == data);
        CHECK_EQ(fake.bytes, 16);
        out = GARBAGE;
        CHECK_EQ(v->regmr(&conn_mark, data, 16, R2_NCCL_PTR_CUDA, &out), R2_NCCL_INVALID_USAGE);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(common(v)->regmr_dmabuf(&conn_mark, data, 16, R2_NCCL_PTR_CUDA, 0, 3, &out),
                 R2_NCCL_INTERNAL_ERROR);
        CHECK(out == NULL);
        CHECK_EQ(common(v)->deregmr(&conn_mark, &mr_mark), 0);
        CHECK(fake.mr == &mr_mark && fake.object == &conn_mark);
        calls = fake.calls;
        CHECK_EQ(common(v)->deregmr(&conn_mark, NULL), 0);
        CHECK_EQ(fake.calls, calls);
        fake.rc = -ENOMEM;
        out = GARBAGE;
        CHECK_EQ(v->regmr(&conn_mark, data, 16, R2_NCCL_PTR_HOST, &out), R2_NCCL_SYSTEM_ERROR);
        CHECK(out == NULL);
    }
}

static void test_data(void)
{
    char buffer[16];
    void *data[2] = {buffer, buffer};
    void *mrs[2] = {&mr_mark, &mr_mark};
    size_t sizes[2] = {16, 16};
    int tags[2] = {3, 3};

    EACH_VERSION(v) {
        void *out = GARBAGE;

        start(v);
        CHECK_EQ(v->isend(&conn_mark, buffer, 16, 7, &mr_mark, &out), 0);
        CHECK(out == &req_mark && fake.data == buffer && fake.mr == &mr_mark);
        CHECK(fake.bytes == 16 && fake.tag == 7);
        /* With v9 and later NCCL may say here that it needs no completion. */
        out = (void *)R2_NCCL_OPTIONAL_RECV_COMPLETION;
        CHECK_EQ(v->irecv(&conn_mark, 1, data, sizes, tags, mrs, &out), 0);
        CHECK(out == &req_mark && fake.bytes == 16 && fake.tag == 1003);
        out = GARBAGE;
        CHECK_EQ(v->irecv(&conn_mark, 2, data, sizes, tags, mrs, &out), R2_NCCL_INVALID_USAGE);
        CHECK(out == NULL);
        fake.later = true;
        out = GARBAGE;
        CHECK_EQ(v->isend(&conn_mark, buffer, 16, 7, NULL, &out), 0);
        CHECK(out == NULL && fake.mr == NULL);
        out = GARBAGE;
        CHECK_EQ(v->irecv(&conn_mark, 1, data, sizes, tags, mrs, &out), 0);
        CHECK(out == NULL);
        fake.later = false;
        fake.rc = -EPIPE;
        out = GARBAGE;
        CHECK_EQ(v->isend(&conn_mark, buffer, 16, 7, NULL, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(v->irecv(&conn_mark, 1, data, sizes, tags, mrs, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
        fake.rc = 0;
        out = GARBAGE;
        CHECK_EQ(common(v)->iflush(&conn_mark, 1, data, NULL, mrs, &out), 0);
        CHECK(out == NULL);
    }
}

static void test_sizes_of_old_versions(void)
{
    void *out = GARBAGE;
    void *data[1] = {&out};
    int sizes[1] = {-1};
    int tags[1] = {0};
    int calls;

    start(&versions[0]);
    calls = fake.calls;
    CHECK_EQ(ncclNetPlugin_v6.isend(&conn_mark, data, -1, 0, NULL, &out), R2_NCCL_INVALID_USAGE);
    CHECK(out == NULL);
    out = GARBAGE;
    CHECK_EQ(ncclNetPlugin_v8.irecv(&conn_mark, 1, data, sizes, tags, NULL, &out),
             R2_NCCL_INVALID_USAGE);
    CHECK(out == NULL);
    out = GARBAGE;
    CHECK_EQ(ncclNetPlugin_v7.regmr(&conn_mark, data, -1, R2_NCCL_PTR_HOST, &out),
             R2_NCCL_INVALID_USAGE);
    CHECK(out == NULL);
    CHECK_EQ(fake.calls, calls);
}

static void test_big_sizes(void)
{
    size_t size = (size_t)5 << 30;
    void *out = GARBAGE;
    void *data[1] = {&out};
    int tags[1] = {0};

    EACH_VERSION(v) {
        start(v);
        if (v->number >= 9) {
            CHECK_EQ(v->isend(&conn_mark, data, size, 0, NULL, &out), 0);
            CHECK_EQ(fake.bytes, size);
            CHECK_EQ(v->irecv(&conn_mark, 1, data, &size, tags, NULL, &out), 0);
            CHECK_EQ(fake.bytes, size);
        }
        if (v->number >= 8) {
            CHECK_EQ(v->regmr(&conn_mark, data, size, R2_NCCL_PTR_HOST, &out), 0);
            CHECK_EQ(fake.bytes, size);
        }
    }
}

static void test_test(void)
{
    EACH_VERSION(v) {
        int done = -5;
        int size = -5;

        start(v);
        fake.done = false;
        CHECK_EQ(common(v)->test(&req_mark, &done, &size), 0);
        CHECK_EQ(done, 0);
        CHECK_EQ(size, -5);
        fake.done = true;
        fake.size = 1234;
        done = -5;
        CHECK_EQ(common(v)->test(&req_mark, &done, &size), 0);
        CHECK(done == 1 && size == 1234 && fake.object == &req_mark);
        CHECK_EQ(common(v)->test(&req_mark, &done, NULL), 0);
        fake.size = (size_t)5 << 30;
        CHECK_EQ(common(v)->test(&req_mark, &done, &size), 0);
        CHECK_EQ(size, INT_MAX);
        fake.rc = -ECONNRESET;
        done = -5;
        CHECK_EQ(common(v)->test(&req_mark, &done, &size), R2_NCCL_REMOTE_ERROR);
        CHECK_EQ(done, 0);
    }
}

static void test_close(void)
{
    EACH_VERSION(v) {
        int calls;

        start(v);
        CHECK_EQ(common(v)->close_send(&conn_mark), 0);
        CHECK(fake.object == &conn_mark);
        CHECK_EQ(common(v)->close_listen(&listen_mark), 0);
        CHECK(fake.object == &listen_mark);
        CHECK_EQ(common(v)->close_recv(&conn_mark), 0);
        CHECK(fake.object == &conn_mark);
        calls = fake.calls;
        CHECK_EQ(common(v)->close_send(NULL), 0);
        CHECK_EQ(common(v)->close_listen(NULL), 0);
        CHECK_EQ(fake.calls, calls);
    }
}

static void test_errors(void)
{
    static const struct {
        int err;
        int result;
    } cases[] = {
        {ECONNRESET, R2_NCCL_REMOTE_ERROR},   {EPIPE, R2_NCCL_REMOTE_ERROR},
        {ETIMEDOUT, R2_NCCL_REMOTE_ERROR},    {EHOSTUNREACH, R2_NCCL_REMOTE_ERROR},
        {ECANCELED, R2_NCCL_REMOTE_ERROR},    {ENETUNREACH, R2_NCCL_REMOTE_ERROR},
        {ECONNREFUSED, R2_NCCL_REMOTE_ERROR}, {ENETDOWN, R2_NCCL_REMOTE_ERROR},
        {EINVAL, R2_NCCL_INVALID_USAGE},      {EMSGSIZE, R2_NCCL_INVALID_USAGE},
        {EPROTO, R2_NCCL_INTERNAL_ERROR},     {EFAULT, R2_NCCL_INTERNAL_ERROR},
        {ENOMEM, R2_NCCL_SYSTEM_ERROR},       {EMFILE, R2_NCCL_SYSTEM_ERROR},
        {EIO, R2_NCCL_SYSTEM_ERROR},
    };

    start(&versions[6]);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int done;

        fake.rc = -cases[i].err;
        CHECK_EQ(ncclNetPlugin_v12.test(&req_mark, &done, NULL), cases[i].result);
    }
    /* NCCL takes this one as "not an error": a plugin must never return it. */
    for (int err = 1; err < 200; err++) {
        fake.rc = -err;
        CHECK_NE(ncclNetPlugin_v12.close_send(&conn_mark), R2_NCCL_IN_PROGRESS);
        CHECK_NE(ncclNetPlugin_v12.close_send(&conn_mark), R2_NCCL_SUCCESS);
    }
}

static const struct check_test tests[] = {
    {"init", test_init},
    {"init_of_old_versions", test_init_of_old_versions},
    {"devices", test_devices},
    {"properties", test_properties},
    {"tables_are_full", test_tables_are_full},
    {"connections", test_connections},
    {"registration", test_registration},
    {"data", test_data},
    {"sizes_of_old_versions", test_sizes_of_old_versions},
    {"big_sizes", test_big_sizes},
    {"test", test_test},
    {"close", test_close},
    {"errors", test_errors},
    {0},
};

int main(int argc, char **argv)
{
    r2_log_set(quiet_log);
    return check_main(argc, argv, tests);
}
