/* NCCL's net API over a made-up engine (rung 1): every version forwards what it is given, writes
 * every out parameter, and turns errors into NCCL's results. It cannot prove what NCCL and the
 * engine make of it. */
#include <errno.h>
#include <limits.h>
#include <stdarg.h>

#include "../hostnccl/adapters.c" /* every version in one shape */
#include "check.h"
#include "engine/engine.h"

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
    int dev, tag, type, fd;
    uint64_t offset;
    unsigned api;
    unsigned memory; /* kinds */
    int traffic_class;
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

bool r2_engine_in_child(void)
{
    return false;
}

void r2_engine_called_by(unsigned nccl_version, unsigned net_api)
{
    CHECK_EQ(nccl_version, 0); /* the logger is in no NCCL */
    fake.api = net_api;
}

void r2_engine_ask_traffic_class(int asked)
{
    fake.traffic_class = asked;
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

int r2_engine_reg_dmabuf(struct r2_conn *conn, void *data, size_t size, int type, uint64_t offset,
                         int fd, struct r2_mr **out)
{
    fake.offset = offset;
    fake.fd = fd;
    return r2_engine_reg(conn, data, size, type, out);
}

unsigned r2_engine_memory(int dev)
{
    (void)dev;
    return fake.memory;
}

int r2_engine_iflush(struct r2_conn *conn, void *data, struct r2_mr *mr, struct r2_req **out)
{
    fake.object = conn;
    fake.data = data;
    fake.mr = mr;
    return give(&req_mark, (void **)out);
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

int r2_engine_irecv_lines(struct r2_conn *conn, void *data, size_t size, int tag, struct r2_mr *mr,
                          struct r2_req **out)
{
    return r2_engine_irecv(conn, data, size, tag, mr, out);
}

int r2_engine_test(struct r2_req *req, int *done, size_t *size)
{
    fake.calls++;
    fake.object = req;
    if (fake.rc == 0) {
        *done = fake.done;
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

/* ---- tests ---- */

static struct hn_net net;
static struct hn_netctx ctx = {.net = &net, .config = {R2_NCCL_TRAFFIC_CLASS_UNDEF}};

void hn_util_logger(int level, unsigned long flags, const char *file, int line, const char *fmt,
                    ...)
{
    (void)level, (void)flags, (void)file, (void)line, (void)fmt;
}

static bool use(int version)
{
    static const void *const tables[] = {&ncclNetPlugin_v6, &ncclNetPlugin_v7,  &ncclNetPlugin_v8,
                                         &ncclNetPlugin_v9, &ncclNetPlugin_v10, &ncclNetPlugin_v11,
                                         &ncclNetPlugin_v12};

    if (version > 12)
        return false;
    net = (struct hn_net){.version = version, .table = tables[version - 6]};
    return true;
}

#define EACH_VERSION for (int version_ = 6; use(version_); version_++)

static void start(void)
{
    fake.rc = 0;
    fake.later = false;
    CHECK_EQ(hn_net_init(&net, &ctx, 77), R2_NCCL_SUCCESS);
    if (net.version >= 11)
        CHECK_EQ(fake.api, (unsigned)net.version);
}

TEST(init)
{
    struct r2_ncclnet_config config = {R2_NCCL_TRAFFIC_CLASS_UNDEF};
    void *ctx = GARBAGE;

    fake.rc = -ENOMEM;
    CHECK_EQ(ncclNetPlugin_v12.init(&ctx, 5, &config, hn_util_logger, NULL), R2_NCCL_SYSTEM_ERROR);
    CHECK(ctx == NULL);
    fake.rc = 0;
    CHECK_EQ(ncclNetPlugin_v12.init(&ctx, 5, &config, hn_util_logger, NULL), 0);
    CHECK(ctx == &ctx_mark && fake.bytes == 5 && fake.log == hn_util_logger);
    CHECK_EQ(fake.traffic_class, 0); /* none was asked for */
    CHECK_EQ(ncclNetPlugin_v12.finalize(ctx), 0);
    CHECK_EQ(ncclNetPlugin_v11.finalize(ctx), 0);
    CHECK_EQ(fake.finalizes, 2);
    CHECK_EQ(ncclNetPlugin_v12.finalize(NULL), 0);
    CHECK_EQ(fake.finalizes, 2);
}

/* The versions without contexts share one, made once however often NCCL calls init; before it, a
 * call fails instead of crashing. */
TEST(init_of_old_versions)
{
    char handle[R2_HANDLE_BYTES];
    void *out = GARBAGE;
    int before;

    fake.rc = 0;
    CHECK_EQ(ncclNetPlugin_v8.listen(0, handle, &out), R2_NCCL_INTERNAL_ERROR);
    CHECK(out == NULL);
    fake.rc = -EMFILE;
    CHECK_EQ(ncclNetPlugin_v8.init(hn_util_logger), R2_NCCL_SYSTEM_ERROR);
    CHECK_EQ(fake.api, 8);
    fake.rc = 0;
    before = fake.inits;
    EACH_VERSION
    {
        if (net.version < 11) {
            start();
        }
    }
    CHECK_EQ(fake.inits, before + 1);
}

TEST(devices)
{
    EACH_VERSION
    {
        int n = -7;

        fake.rc = 0;
        CHECK_EQ(hn_net_devices(&net, &n), 0);
        CHECK_EQ(n, 2);
        CHECK_STR(hn_net_name(&net), "R2CCL");
    }
}

TEST(properties)
{
    EACH_VERSION
    {
        struct r2_ncclnet_props_v12 p;

        fake.memory = R2_NCCL_PTR_HOST | R2_NCCL_PTR_DMABUF;
        CHECK_EQ(hn_net_properties(&net, 1, &p), 0);
        CHECK_STR(p.name, "nic1");
        CHECK(p.pci_path == NULL);
        CHECK_EQ(p.guid, 12);
        CHECK_EQ(p.ptr_support, R2_NCCL_PTR_HOST | R2_NCCL_PTR_DMABUF);
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
        CHECK_EQ(hn_net_properties(&net, 0, &p), 0);
        CHECK_STR(p.pci_path, "/sys/devices/pci0000:00/x");
        CHECK_EQ(p.speed, R2_NIC_MIN_REPORT); /* less would round to nothing in NCCL's search */
        CHECK_EQ(hn_net_properties(&net, 2, &p), R2_NCCL_INVALID_USAGE);
        CHECK_EQ(hn_net_properties(&net, -1, &p), R2_NCCL_INVALID_USAGE);
    }
}

TEST(tables_are_full)
{
    EACH_VERSION
    {
        const struct r2_ncclnet_v6 *t = SAME(&net);

        CHECK(t->name && t->init && t->devices && t->get_properties && t->listen && t->connect);
        CHECK(t->accept && t->regmr && t->regmr_dmabuf && t->deregmr && t->isend && t->irecv);
        CHECK(t->iflush && t->test && t->close_send && t->close_recv && t->close_listen);
    }
    CHECK(ncclNetPlugin_v11.finalize && ncclNetPlugin_v12.finalize);
    CHECK(!ncclNetPlugin_v9.make_vdevice && !ncclNetPlugin_v12.make_vdevice);
}

TEST(connections)
{
    EACH_VERSION
    {
        char handle[R2_HANDLE_BYTES] = {0};
        void *out = GARBAGE;

        ctx.config.traffic_class = net.version;
        start();
        CHECK_EQ(hn_net_listen(&ctx, 1, handle, &out), 0);
        CHECK(out == &listen_mark && fake.ctx == &ctx_mark && fake.dev == 1);
        CHECK_EQ((unsigned char)handle[R2_HANDLE_BYTES - 1], 0x5a);
        out = GARBAGE;
        CHECK_EQ(hn_net_connect(&ctx, 0, handle, &out), 0);
        CHECK(out == &conn_mark && fake.dev == 0 && fake.handle == handle);
        CHECK_EQ(fake.traffic_class, net.version < 10 ? 0 : net.version); /* older ones have none */
        out = GARBAGE;
        CHECK_EQ(hn_net_accept(&ctx, &listen_mark, &out), 0);
        CHECK(out == &conn_mark && fake.object == &listen_mark);
        /* "Call again" is success without a connection. */
        fake.later = true;
        out = GARBAGE;
        CHECK_EQ(hn_net_connect(&ctx, 0, handle, &out), 0);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(hn_net_accept(&ctx, &listen_mark, &out), 0);
        CHECK(out == NULL);
        fake.later = false;
        fake.rc = -ECONNREFUSED;
        out = GARBAGE;
        CHECK_EQ(hn_net_connect(&ctx, 0, handle, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(hn_net_accept(&ctx, &listen_mark, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(hn_net_listen(&ctx, 1, handle, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
    }
}

TEST(registration)
{
    char data[16];

    EACH_VERSION
    {
        void *out = GARBAGE;
        int calls;

        start();
        CHECK_EQ(hn_net_regmr(&ctx, &conn_mark, data, 16, R2_NCCL_PTR_HOST, &out), 0);
        CHECK(out == &mr_mark && fake.object == &conn_mark && fake.data == data);
        CHECK_EQ(fake.bytes, 16);
        out = GARBAGE;
        CHECK_EQ(hn_net_regmr(&ctx, &conn_mark, data, 16, R2_NCCL_PTR_CUDA, &out), 0);
        CHECK(out == &mr_mark && fake.type == R2_NCCL_PTR_CUDA);
        out = GARBAGE;
        CHECK_EQ(SAME(&net)->regmr_dmabuf(&conn_mark, data, 17, R2_NCCL_PTR_CUDA, 64, 3, &out), 0);
        CHECK(out == &mr_mark && fake.offset == 64 && fake.fd == 3 && fake.bytes == 17);
        CHECK_EQ(SAME(&net)->deregmr(&conn_mark, &mr_mark), 0);
        CHECK(fake.mr == &mr_mark && fake.object == &conn_mark);
        calls = fake.calls;
        CHECK_EQ(SAME(&net)->deregmr(&conn_mark, NULL), 0);
        CHECK_EQ(fake.calls, calls);
        fake.rc = -ENOMEM;
        out = GARBAGE;
        CHECK_EQ(hn_net_regmr(&ctx, &conn_mark, data, 16, R2_NCCL_PTR_HOST, &out),
                 R2_NCCL_SYSTEM_ERROR);
        CHECK(out == NULL);
    }
}

TEST(data)
{
    char buffer[16];
    void *data[2] = {buffer, buffer}, *mrs[2] = {&mr_mark, &mr_mark};

    EACH_VERSION
    {
        void *out = GARBAGE;

        start();
        CHECK_EQ(hn_net_isend(&ctx, &conn_mark, buffer, 16, 7, &mr_mark, &out), 0);
        CHECK(out == &req_mark && fake.data == buffer && fake.mr == &mr_mark);
        CHECK(fake.bytes == 16 && fake.tag == 7);
        /* With v9 and later NCCL may say here that it needs no completion. */
        out = (void *)R2_NCCL_OPTIONAL_RECV_COMPLETION;
        CHECK_EQ(hn_net_irecv(&ctx, &conn_mark, buffer, 16, 3, &mr_mark, &out), 0);
        CHECK(out == &req_mark && fake.bytes == 16 && fake.tag == 1003);
        fake.later = true;
        out = GARBAGE;
        CHECK_EQ(hn_net_isend(&ctx, &conn_mark, buffer, 16, 7, NULL, &out), 0);
        CHECK(out == NULL && fake.mr == NULL);
        out = GARBAGE;
        CHECK_EQ(hn_net_irecv(&ctx, &conn_mark, buffer, 16, 3, &mr_mark, &out), 0);
        CHECK(out == NULL);
        fake.later = false;
        fake.rc = -EPIPE;
        out = GARBAGE;
        CHECK_EQ(hn_net_isend(&ctx, &conn_mark, buffer, 16, 7, NULL, &out), R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
        out = GARBAGE;
        CHECK_EQ(hn_net_irecv(&ctx, &conn_mark, buffer, 16, 3, &mr_mark, &out),
                 R2_NCCL_REMOTE_ERROR);
        CHECK(out == NULL);
        fake.rc = 0;
        out = GARBAGE;
        fake.data = NULL;
        CHECK_EQ(SAME(&net)->iflush(&conn_mark, 1, data, NULL, mrs, &out), 0);
        CHECK(out == &req_mark && fake.data == buffer && fake.mr == &mr_mark);
        fake.later = true;
        out = GARBAGE;
        CHECK_EQ(SAME(&net)->iflush(&conn_mark, 1, data, NULL, mrs, &out), 0);
        CHECK(out == NULL);
        fake.rc = -EIO;
        out = GARBAGE;
        CHECK_EQ(SAME(&net)->iflush(&conn_mark, 1, data, NULL, mrs, &out), R2_NCCL_SYSTEM_ERROR);
        CHECK(out == NULL);
    }
}

/* What no version announces: max_recvs is 1. */
TEST(two_receives_at_once)
{
    char buffer[16];
    void *data[2] = {buffer, buffer}, *mrs[2] = {&mr_mark, &mr_mark}, *out = GARBAGE;
    size_t sizes[2] = {16, 16};
    int old[2] = {16, 16}, tags[2] = {3, 3};

    use(6);
    start();
    CHECK_EQ(ncclNetPlugin_v6.irecv(&conn_mark, 2, data, old, tags, mrs, &out),
             R2_NCCL_INVALID_USAGE);
    CHECK(out == NULL);
    out = GARBAGE;
    CHECK_EQ(ncclNetPlugin_v9.irecv(&conn_mark, 2, data, sizes, tags, mrs, &out),
             R2_NCCL_INVALID_USAGE);
    CHECK(out == NULL);
    out = GARBAGE;
    CHECK_EQ(ncclNetPlugin_v12.irecv(&conn_mark, 2, data, sizes, tags, mrs, NULL, &out),
             R2_NCCL_INVALID_USAGE);
    CHECK(out == NULL);
}

TEST(sizes_of_old_versions)
{
    void *out = GARBAGE;
    void *data[1] = {&out};
    int sizes[1] = {-1};
    int tags[1] = {0};
    int calls;

    use(6);
    start();
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

TEST(big_sizes)
{
    size_t size = (size_t)5 << 30;
    void *out = GARBAGE;

    EACH_VERSION
    {
        start();
        if (net.version >= 9) {
            CHECK_EQ(hn_net_isend(&ctx, &conn_mark, &out, size, 0, NULL, &out), 0);
            CHECK_EQ(fake.bytes, size);
            CHECK_EQ(hn_net_irecv(&ctx, &conn_mark, &out, size, 0, NULL, &out), 0);
            CHECK_EQ(fake.bytes, size);
        }
        if (net.version >= 8) {
            CHECK_EQ(hn_net_regmr(&ctx, &conn_mark, &out, size, R2_NCCL_PTR_HOST, &out), 0);
            CHECK_EQ(fake.bytes, size);
        }
    }
}

TEST(test)
{
    EACH_VERSION
    {
        int done = -5;
        int size = -5;

        start();
        fake.done = false;
        CHECK_EQ(SAME(&net)->test(&req_mark, &done, &size), 0);
        CHECK_EQ(done, 0);
        CHECK_EQ(size, -5);
        fake.done = true;
        fake.size = 1234;
        done = -5;
        CHECK_EQ(SAME(&net)->test(&req_mark, &done, &size), 0);
        CHECK(done == 1 && size == 1234 && fake.object == &req_mark);
        CHECK_EQ(SAME(&net)->test(&req_mark, &done, NULL), 0);
        fake.size = (size_t)5 << 30;
        CHECK_EQ(SAME(&net)->test(&req_mark, &done, &size), 0);
        CHECK_EQ(size, INT_MAX);
        fake.rc = -ECONNRESET;
        done = -5;
        CHECK_EQ(SAME(&net)->test(&req_mark, &done, &size), R2_NCCL_REMOTE_ERROR);
        CHECK_EQ(done, 0);
    }
}

TEST(close)
{
    EACH_VERSION
    {
        int calls;

        start();
        CHECK_EQ(SAME(&net)->close_send(&conn_mark), 0);
        CHECK(fake.object == &conn_mark);
        CHECK_EQ(SAME(&net)->close_listen(&listen_mark), 0);
        CHECK(fake.object == &listen_mark);
        CHECK_EQ(SAME(&net)->close_recv(&conn_mark), 0);
        CHECK(fake.object == &conn_mark);
        calls = fake.calls;
        CHECK_EQ(SAME(&net)->close_send(NULL), 0);
        CHECK_EQ(SAME(&net)->close_listen(NULL), 0);
        CHECK_EQ(fake.calls, calls);
    }
}

TEST(errors)
{
    static const struct {
        int err;
        int result;
    } cases[] = {
        {ECONNRESET, R2_NCCL_REMOTE_ERROR},   {EPIPE, R2_NCCL_REMOTE_ERROR},
        {ETIMEDOUT, R2_NCCL_REMOTE_ERROR},    {EHOSTUNREACH, R2_NCCL_REMOTE_ERROR},
        {ECANCELED, R2_NCCL_REMOTE_ERROR},    {ENETUNREACH, R2_NCCL_REMOTE_ERROR},
        {ECONNREFUSED, R2_NCCL_REMOTE_ERROR}, {ENETDOWN, R2_NCCL_REMOTE_ERROR},
        {EINVAL, R2_NCCL_INVALID_ARGUMENT},   {EMSGSIZE, R2_NCCL_INVALID_USAGE},
        {EPROTO, R2_NCCL_INTERNAL_ERROR},     {EFAULT, R2_NCCL_INTERNAL_ERROR},
        {ENOMEM, R2_NCCL_SYSTEM_ERROR},       {EMFILE, R2_NCCL_SYSTEM_ERROR},
        {EIO, R2_NCCL_SYSTEM_ERROR},
    };

    use(12);
    start();
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

int main(int argc, char **argv)
{
    r2_log_set(hn_util_logger);
    return check_main(argc, argv);
}
