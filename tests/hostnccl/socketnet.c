/* The built-in transport "Socket": one TCP connection per NCCL connection, driven by the caller's
 * isend and test, no threads, no second path: any error ends it. The baseline of benchmarks and
 * what remains when no plugin is usable.
 *
 * Wire: the connecting side proves the handle's secret (8 bytes); then per message 8 bytes of
 * length and the payload. HOSTNCCL_SOCKET_ADDRS=127.0.1.1,127.0.2.1 makes each address a device.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "net.h"
#include "sockets.h"

enum { REQUESTS = R2_NCCL_MAX_REQUESTS };

struct request {
    struct conn *conn;
    bool used;
    bool polled; /* receive: the buffer is read before the end, see place_words */
    char *data;
    size_t size;  /* posted, then actual */
    size_t moved; /* header included */
    uint64_t header;
};

struct conn { /* listening, half-open or connected */
    struct context *ctx;
    struct conn *next, **prev; /* list_lock */
    int fd;
    bool is_send;
    uint64_t secret;
    size_t proved; /* bytes of the secret moved */
    int pending;   /* listen: an accepted fd that has not proved itself yet; else -1 */
    char *stage;   /* a polled message is received here */
    size_t stage_size;
    uint64_t first, last; /* requests[first % REQUESTS] is the oldest not fully moved */
    struct request requests[REQUESTS];
};

struct handle {
    struct hn_addr addr;
    uint64_t secret;
    struct conn *under_way; /* connecting side only */
};
_Static_assert(sizeof(struct handle) <= R2_NCCL_HANDLE_BYTES, "handle size");

struct context {
    struct conn *conns; /* list_lock */
};

static struct hn_nic nics[HN_MAX_DEVS];
static int nic_count;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;

static void find_nics(void)
{
    const char *addrs = getenv("HOSTNCCL_SOCKET_ADDRS");
    char list[1024];
    char *rest = NULL;
    if (!addrs || !*addrs) {
        nic_count = hn_sockets_nics(nics, HN_MAX_DEVS);
        return;
    }
    snprintf(list, sizeof(list), "%s", addrs);
    for (char *a = strtok_r(list, ",", &rest); a && nic_count < HN_MAX_DEVS;
         a = strtok_r(NULL, ",", &rest)) {
        if (hn_sockets_parse(a, &nics[nic_count].addr)) {
            HN_WARN("HOSTNCCL_SOCKET_ADDRS: %s is no address: ignored", a);
            continue;
        }
        snprintf(nics[nic_count].name, sizeof(nics[0].name), "%.31s", a);
        nic_count++;
    }
}

static int sk_init(void **ctx, uint64_t comm_id, struct r2_ncclnet_config *config,
                   r2_nccl_logger log, r2_nccl_profiler prof)
{
    (void)comm_id, (void)config, (void)log, (void)prof;
    pthread_once(&once, find_nics);
    *ctx = calloc(1, sizeof(struct context));
    return *ctx ? R2_NCCL_SUCCESS : R2_NCCL_SYSTEM_ERROR;
}

static int sk_devices(int *ndev)
{
    *ndev = nic_count;
    return R2_NCCL_SUCCESS;
}

static int sk_properties(int dev, struct r2_ncclnet_props_v12 *p)
{
    if (dev < 0 || dev >= nic_count)
        return R2_NCCL_INTERNAL_ERROR;
    memset(p, 0, sizeof(*p));
    p->name = nics[dev].name;
    p->guid = (uint64_t)dev + 1;
    p->ptr_support = R2_NCCL_PTR_HOST;
    p->speed = 10000;
    p->max_comms = 65536;
    p->max_recvs = 1;
    p->vprops.ndevs = 1;
    p->vprops.devs[0] = dev;
    p->max_p2p_bytes = p->max_coll_bytes = R2_NCCL_MAX_MESSAGE_BYTES;
    p->max_multi_request = 1;
    p->rail_id = p->plane_id = R2_NCCL_ID_UNDEF;
    return R2_NCCL_SUCCESS;
}

static struct conn *conn_new(struct context *ctx, int fd)
{
    struct conn *c = calloc(1, sizeof(*c));
    if (!c) {
        close(fd);
        return NULL;
    }
    c->ctx = ctx;
    c->fd = fd;
    c->pending = -1;
    pthread_mutex_lock(&list_lock);
    c->next = ctx->conns;
    c->prev = &ctx->conns;
    if (c->next)
        c->next->prev = &c->next;
    ctx->conns = c;
    pthread_mutex_unlock(&list_lock);
    return c;
}

static int sk_close(void *comm)
{
    struct conn *c = comm;
    pthread_mutex_lock(&list_lock);
    *c->prev = c->next;
    if (c->next)
        c->next->prev = c->prev;
    pthread_mutex_unlock(&list_lock);
    close(c->fd);
    if (c->pending >= 0)
        close(c->pending);
    free(c->stage);
    free(c);
    return R2_NCCL_SUCCESS;
}

static int sk_finalize(void *ctx)
{
    struct context *context = ctx;
    while (context->conns)
        sk_close(context->conns);
    free(context);
    return R2_NCCL_SUCCESS;
}

static int sk_listen(void *ctx, int dev, void *opaque, void **lcomm)
{
    struct handle h = {.addr = nics[dev].addr, .secret = hn_util_random()};
    int fd = hn_sockets_listen(&h.addr);
    if (fd < 0) {
        HN_WARN("NET/Socket: cannot listen on %s: %s", nics[dev].name, strerror(-fd));
        return R2_NCCL_SYSTEM_ERROR;
    }
    struct conn *c = conn_new(ctx, fd);
    if (!c)
        return R2_NCCL_SYSTEM_ERROR;
    c->secret = h.secret;
    memcpy(opaque, &h, sizeof(h));
    *lcomm = c;
    return R2_NCCL_SUCCESS;
}

static int sk_connect(void *ctx, int dev, void *opaque, void **scomm,
                      struct r2_ncclnet_device_handle **dev_handle)
{
    (void)dev_handle;
    struct handle h;
    *scomm = NULL;
    memcpy(&h, opaque, sizeof(h));
    if (!h.under_way) {
        int fd = hn_sockets_connect(&h.addr, &nics[dev].addr);
        if (fd < 0)
            return R2_NCCL_REMOTE_ERROR;
        h.under_way = conn_new(ctx, fd);
        if (!h.under_way)
            return R2_NCCL_SYSTEM_ERROR;
        h.under_way->is_send = true;
        h.under_way->secret = h.secret;
        memcpy(opaque, &h, sizeof(h));
    }
    struct conn *c = h.under_way;
    int rc = hn_sockets_connected(c->fd);
    if (rc < 0) {
        HN_WARN("NET/Socket: connect from %s: %s", nics[dev].name, strerror(-rc));
        return R2_NCCL_REMOTE_ERROR;
    }
    if (!rc)
        return R2_NCCL_SUCCESS;
    /* An empty send buffer takes 8 bytes whole. */
    if (send(c->fd, &c->secret, sizeof(c->secret), MSG_NOSIGNAL) != (ssize_t)sizeof(c->secret))
        return R2_NCCL_REMOTE_ERROR;
    *scomm = c;
    return R2_NCCL_SUCCESS;
}

static int sk_accept(void *lcomm, void **rcomm, struct r2_ncclnet_device_handle **dev_handle)
{
    (void)dev_handle;
    struct conn *l = lcomm;
    uint64_t secret;
    *rcomm = NULL;
    if (l->pending < 0) {
        l->pending = hn_sockets_accept(l->fd);
        if (l->pending == -EAGAIN)
            return R2_NCCL_SUCCESS;
        if (l->pending < 0) {
            l->pending = -1;
            return R2_NCCL_SYSTEM_ERROR;
        }
    }
    ssize_t n = recv(l->pending, &secret, sizeof(secret), MSG_PEEK | MSG_DONTWAIT);
    if (n > 0 && n < (ssize_t)sizeof(secret))
        return R2_NCCL_SUCCESS;
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return R2_NCCL_SUCCESS;
    if (n != (ssize_t)sizeof(secret) || secret != l->secret) { /* a stranger */
        close(l->pending);
        l->pending = -1;
        return R2_NCCL_SUCCESS;
    }
    (void)!recv(l->pending, &secret, sizeof(secret), MSG_DONTWAIT);
    struct conn *c = conn_new(l->ctx, l->pending);
    l->pending = -1;
    *rcomm = c;
    return c ? R2_NCCL_SUCCESS : R2_NCCL_SYSTEM_ERROR;
}

static int sk_regmr(void *comm, void *data, size_t size, int type, void **mhandle)
{
    (void)comm, (void)data, (void)size;
    *mhandle = NULL;
    return type == R2_NCCL_PTR_HOST ? R2_NCCL_SUCCESS : R2_NCCL_INTERNAL_ERROR;
}

static int sk_deregmr(void *comm, void *mhandle)
{
    (void)comm, (void)mhandle;
    return R2_NCCL_SUCCESS;
}

static int result_of(int err)
{
    if (err == EPIPE || err == ECONNRESET || err == ETIMEDOUT || err == EHOSTUNREACH)
        return R2_NCCL_REMOTE_ERROR;
    return R2_NCCL_SYSTEM_ERROR;
}

/* Moves what the socket takes of one request. 1 all moved, 0 not yet, -result. */
static int move_send(struct conn *c, struct request *r)
{
    struct iovec iov[2] = {{&r->header, sizeof(r->header)}, {r->data, r->size}};
    size_t total = sizeof(r->header) + r->size;
    while (r->moved < total) {
        size_t in_header = r->moved < 8 ? r->moved : 8;
        size_t in_data = r->moved - in_header;
        iov[0] = (struct iovec){(char *)&r->header + in_header, 8 - in_header};
        iov[1] = (struct iovec){r->data + in_data, r->size - in_data};
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};
        ssize_t n = sendmsg(c->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        if (n < 0)
            return -result_of(errno);
        r->moved += (size_t)n;
    }
    return 1;
}

/* Consumers of LL and LL128 poll flags inside the buffer, and the kernel's copy has no order: words
 * ascend, each stored once. */
static void place_words(char *to, const char *from, size_t size)
{
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word;
        memcpy(&word, from + i, 8);
        __atomic_store_n((uint64_t *)(void *)(to + i), word, __ATOMIC_RELEASE);
    }
    for (; i < size; i++)
        __atomic_store_n(to + i, from[i], __ATOMIC_RELEASE);
}

static bool stage_for(struct conn *c, const struct request *r)
{
    if (!r->polled || r->size <= c->stage_size)
        return true;
    free(c->stage);
    c->stage = malloc(r->size);
    c->stage_size = c->stage ? r->size : 0;
    return c->stage;
}

static int move_recv(struct conn *c, struct request *r)
{
    for (;;) {
        bool head = r->moved < sizeof(r->header);
        size_t at = head ? r->moved : r->moved - sizeof(r->header);
        size_t left = (head ? sizeof(r->header) : r->size) - at;
        if (!head && !left) {
            if (r->polled)
                place_words(r->data, c->stage, r->size);
            return 1;
        }
        char *to = head ? (char *)&r->header : r->polled ? c->stage : r->data;
        ssize_t n = recv(c->fd, to + at, left, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        if (n <= 0)
            return -(n ? result_of(errno) : R2_NCCL_REMOTE_ERROR);
        r->moved += (size_t)n;
        if (r->moved == sizeof(r->header) && head) {
            if (r->header > r->size) {
                HN_WARN("NET/Socket: message of %llu bytes for a buffer of %zu",
                        (unsigned long long)r->header, r->size);
                return -R2_NCCL_INVALID_USAGE;
            }
            r->size = (size_t)r->header;
            if (!stage_for(c, r))
                return -R2_NCCL_SYSTEM_ERROR;
        }
    }
}

static int drive(struct conn *c)
{
    while (c->first < c->last) {
        struct request *r = &c->requests[c->first % REQUESTS];
        int rc = c->is_send ? move_send(c, r) : move_recv(c, r);
        if (rc <= 0)
            return -rc;
        c->first++;
    }
    return R2_NCCL_SUCCESS;
}

static int post(struct conn *c, void *data, size_t size, bool polled, void **request)
{
    struct request *r = &c->requests[c->last % REQUESTS];
    *request = NULL;
    if (r->used)
        return R2_NCCL_SUCCESS;
    *r = (struct request){
        .conn = c, .used = true, .polled = polled, .data = data, .size = size, .header = size};
    c->last++;
    *request = r;
    return drive(c);
}

static int sk_isend(void *scomm, void *data, size_t size, int tag, void *mhandle, void *phandle,
                    void **request)
{
    (void)tag, (void)mhandle, (void)phandle;
    return post(scomm, data, size, false, request);
}

static int sk_irecv(void *rcomm, int n, void **data, size_t *sizes, int *tags, void **mhandles,
                    void **phandles, void **request)
{
    (void)tags, (void)mhandles, (void)phandles;
    if (n != 1)
        return R2_NCCL_INTERNAL_ERROR;
    bool polled = *request == (void *)R2_NCCL_OPTIONAL_RECV_COMPLETION;
    return post(rcomm, data[0], sizes[0], polled, request);
}

static int sk_iflush(void *rcomm, int n, void **data, int *sizes, void **mhandles, void **request)
{
    (void)rcomm, (void)n, (void)data, (void)sizes, (void)mhandles;
    *request = NULL;
    return R2_NCCL_SUCCESS;
}

static int sk_test(void *request, int *done, int *sizes)
{
    struct request *r = request;
    *done = 0;
    int rc = drive(r->conn);
    if (rc)
        return rc;
    uint64_t index = (uint64_t)(r - r->conn->requests);
    uint64_t first = r->conn->first; /* moved <=> it is not among first .. last-1 */
    for (uint64_t i = first; i < r->conn->last; i++)
        if (i % REQUESTS == index)
            return R2_NCCL_SUCCESS;
    *done = 1;
    if (sizes)
        *sizes = (int)r->size;
    r->used = false;
    return R2_NCCL_SUCCESS;
}

const struct r2_ncclnet_v12 hn_socketnet = {
    .name = "Socket",
    .init = sk_init,
    .devices = sk_devices,
    .get_properties = sk_properties,
    .listen = sk_listen,
    .connect = sk_connect,
    .accept = sk_accept,
    .regmr = sk_regmr,
    .deregmr = sk_deregmr,
    .isend = sk_isend,
    .irecv = sk_irecv,
    .iflush = sk_iflush,
    .test = sk_test,
    .close_send = sk_close,
    .close_recv = sk_close,
    .close_listen = sk_close,
    .finalize = sk_finalize,
};
