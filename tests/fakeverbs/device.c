#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "../pause.h"
#include "fake.h"

struct fake fv = {.lock = PTHREAD_MUTEX_INITIALIZER, .unhang = PTHREAD_COND_INITIALIZER};

uint64_t fv_now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Paths that are there until their descriptor is closed. High numbers, so that it is not soon taken
 * by another file. */
static int path_open(char *path, size_t cap)
{
    int low = memfd_create("r2fv-path", MFD_CLOEXEC), fd = low;

    if (low >= 0) {
        fd = fcntl(low, F_DUPFD_CLOEXEC, 800);
        close(low);
    }
    path[0] = '\0';
    if (fd >= 0)
        snprintf(path, cap, "/proc/self/fd/%d", fd);
    return fd;
}

static void path_close(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void show_paths(struct fv_dev *d)
{
    d->entry = path_open(d->base.dev_path, sizeof(d->base.dev_path));
    d->folder = path_open(d->base.ibdev_path, sizeof(d->base.ibdev_path));
}

static void add_port(struct fv_dev *d, const char *addr)
{
    const char *text = getenv("R2_FAKEVERBS_GID");
    const char *text6 = getenv("R2_FAKEVERBS_GID6");
    int also = text ? atoi(text) : 1, six = text6 ? atoi(text6) : 0;
    struct fv_port *p = &d->port[++d->n_ports];

    memset(p, 0, sizeof(*p));
    p->ib = strncmp(addr, "ib:", 3) == 0;
    p->ip = inet_addr(addr + (p->ib ? 3 : 0));
    p->up = true;
    p->lid = p->ib ? (uint16_t)(ntohl(p->ip) & 0x7fff) : 0;
    for (int i = 0; i < FV_PKEYS; i++)
        p->pkey[i] = (uint16_t)(0xffff - i); /* the default one, and others */
    /* Entry 0 is link-local, as devices have it; 127.S.x.y is in subnet S of InfiniBand. */
    p->gid[0].raw[0] = 0xfe;
    p->gid[0].raw[1] = 0x80;
    p->gid[0].raw[7] = p->ib ? (uint8_t)(ntohl(p->ip) >> 16) : 0;
    memcpy(p->gid[0].raw + 12, &p->ip, 4);
    if (p->ib)
        return;
    p->gid[1].raw[10] = p->gid[1].raw[11] = 0xff;
    memcpy(p->gid[1].raw + 12, &p->ip, 4);
    if (also > 1 && also < FV_GIDS)
        p->gid[also] = p->gid[1];
    if (six > 1 && six < FV_GIDS) {
        p->gid[six].raw[0] = 0xfd;
        memcpy(p->gid[six].raw + 12, &p->ip, 4);
    }
}

static void add_device(char *spec, int index)
{
    struct fv_dev *d = &fv.dev[fv.n_dev];
    char *eq = strchr(spec, '='), *save = NULL;

    memset(d, 0, sizeof(*d));
    if (eq) {
        *eq = '\0';
        snprintf(d->base.name, sizeof(d->base.name), "%.60s", spec);
        spec = eq + 1;
    } else {
        snprintf(d->base.name, sizeof(d->base.name), "fv%d", index);
    }
    d->base.node_type = IBV_NODE_CA;
    d->base.transport_type = IBV_TRANSPORT_IB;
    for (char *a = strtok_r(spec, "+", &save); a && d->n_ports < FV_PORTS;
         a = strtok_r(NULL, "+", &save))
        add_port(d, a);
    for (int i = 0; i <= FV_PORTS; i++)
        d->listener[i] = -1;
    d->guid = htobe64(UINT64_C(0x0002c90300000000) + (uint64_t)index);
    show_paths(d);
    fv.n_dev++;
}

static void conns_vanish(struct fv_dev *dev)
{
    for (struct fv_conn *c = fv.conns; c; c = c->next) {
        if (c->dev == dev)
            fv_conn_drop(c);
    }
    for (int p = 1; p <= dev->n_ports; p++) {
        if (dev->listener[p] >= 0)
            close(dev->listener[p]);
        dev->listener[p] = -1;
    }
}

void fv_remove(struct fv_dev *d, bool quiet)
{
    d->removed = true;
    fv_show(d); /* what it has posted gets there, whatever becomes of it */
    if (!quiet) {
        d->fatal = true;
        fv_qps_vanish(d);
        fv_mrs_vanish(d);
        fv_async(d, IBV_EVENT_DEVICE_FATAL, 0, NULL);
    }
    conns_vanish(d);
    path_close(&d->entry);
    path_close(&d->folder);
}

void fv_unload(struct fv_dev *d)
{
    if (!d->ctx) {
        fv_remove(d, true);
        return;
    }
    d->unloaded = true;
    path_close(&d->entry);
}

void fv_restore(const struct fv_dev *old, const char *name)
{
    struct fv_dev *d = &fv.dev[fv.n_dev];

    if (fv.n_dev == FV_DEVICES || !old->removed)
        return;
    memset(d, 0, sizeof(*d));
    d->base = old->base;
    snprintf(d->base.name, sizeof(d->base.name), "%.60s", name);
    d->guid = old->guid;
    d->no_reg = old->no_reg;
    d->n_ports = old->n_ports;
    for (int p = 1; p <= d->n_ports; p++) {
        d->port[p] = old->port[p];
        d->port[p].up = true;
        d->port[p].blackhole = false;
    }
    for (int i = 0; i <= FV_PORTS; i++)
        d->listener[i] = -1;
    show_paths(d);
    fv.n_dev++;
}

static enum ibv_mtu active_mtu(const char *bytes)
{
    int mtu = IBV_MTU_256;

    while (bytes && mtu < IBV_MTU_4096 && 128 << mtu < atoi(bytes))
        mtu++;
    return bytes ? (enum ibv_mtu)mtu : IBV_MTU_1024;
}

static void hang_some(const char *list)
{
    char text[256], name[64], word[16], *save = NULL;

    snprintf(text, sizeof(text), "%s", list ? list : "");
    for (char *w = strtok_r(text, ",", &save); w; w = strtok_r(NULL, ",", &save)) {
        if (sscanf(w, "list %d", &fv.no_list) == 1)
            continue;
        for (int i = 0; i < fv.n_dev && sscanf(w, "%63s %15s", name, word) == 2; i++) {
            if (strcmp(fv.dev[i].base.name, name) != 0)
                continue;
            fv.dev[i].stuck |= fv_call(word);
            for (int p = 1; p <= FV_PORTS && strncmp(word, "down", 4) == 0; p++)
                fv.dev[i].port[p].up &= atoi(word + 4) != p;
        }
    }
}

static void find_devices(void)
{
    const char *list = getenv("R2_FAKEVERBS"), *some = getenv("R2_FAKEVERBS_DEVICES");
    char text[1024], *save = NULL;
    int index = 0, most = some ? atoi(some) : FV_DEVICES;

    if (!list)
        list = getenv("R2CCL_NICS");
    fv.mtu = active_mtu(getenv("R2_FAKEVERBS_MTU"));
    snprintf(text, sizeof(text), "%s", list ? list : "");
    for (char *s = strtok_r(text, ",", &save); s && fv.n_dev < FV_DEVICES && index < most;
         s = strtok_r(NULL, ",", &save))
        add_device(s, index++);
    hang_some(getenv("R2_FAKEVERBS_HANG"));
}

struct fv_dev *fv_dev_of(struct ibv_context *ctx)
{
    return (struct fv_dev *)(void *)ctx->device;
}

static void hang_from(struct fv_dev *dev, int least)
{
    dev->hung++;
    while (dev->hang >= least)
        pthread_cond_wait(&fv.unhang, &fv.lock);
    dev->hung--;
}

void fv_may_hang(struct fv_dev *dev)
{
    hang_from(dev, 1);
    if (fv.chaos.cmd_us) {
        unsigned long us = fv_random(fv.chaos.cmd_us);

        pthread_mutex_unlock(&fv.lock);
        pause_us(us);
        pthread_mutex_lock(&fv.lock);
    }
}

void fv_may_stick(struct fv_dev *dev, unsigned at)
{
    while (dev->stuck & at)
        pthread_cond_wait(&fv.unhang, &fv.lock);
}

int fv_bound(const char *name, int type)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    size_t len = strlen(name);

    memcpy(sa.sun_path + 1, name, len);
    if (fd >= 0 && bind(fd, (struct sockaddr *)&sa,
                        (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + len)) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

FV_EXPORT struct ibv_device **ibv_get_device_list(int *n)
{
    struct ibv_device **out;
    int there = 0;

    pthread_mutex_lock(&fv.lock);
    if (!fv.n_dev)
        find_devices();
    if (fv.no_list > 1)
        fv.no_list--;
    else
        while (fv.no_list)
            pthread_cond_wait(&fv.unhang, &fv.lock);
    out = calloc((size_t)fv.n_dev + 1, sizeof(*out));
    for (int i = 0; out && i < fv.n_dev; i++) {
        if (!fv.dev[i].removed && !fv.dev[i].unloaded)
            out[there++] = &fv.dev[i].base;
    }
    if (n)
        *n = there;
    pthread_mutex_unlock(&fv.lock);
    return out;
}

FV_EXPORT void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

FV_EXPORT const char *ibv_get_device_name(struct ibv_device *dev)
{
    return dev->name;
}

FV_EXPORT __be64 ibv_get_device_guid(struct ibv_device *dev)
{
    return ((struct fv_dev *)(void *)dev)->guid;
}

int fv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int fv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int fv_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int fv_req_notify_cq(struct ibv_cq *cq, int solicited);

FV_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *dev)
{
    struct fv_dev *d = (struct fv_dev *)(void *)dev;
    struct ibv_context *ctx = calloc(1, sizeof(*ctx));
    int rc;

    if (!ctx)
        return NULL;
    pthread_mutex_lock(&fv.lock);
    fv_may_hang(d);
    fv_may_stick(d, FV_AT_OPEN);
    rc = d->removed || d->unloaded ? -ENODEV : d->stuck & FV_FAILS ? -EIO : fv_start();
    for (int p = 1; p <= d->n_ports && rc == 0; p++)
        rc = fv_listen(d, p);
    ctx->device = dev;
    ctx->ops.post_send = fv_post_send;
    ctx->ops.post_recv = fv_post_recv;
    ctx->ops.poll_cq = fv_poll_cq;
    ctx->ops.req_notify_cq = fv_req_notify_cq;
    ctx->async_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    ctx->cmd_fd = memfd_create("r2fv-cmd", MFD_CLOEXEC);
    ctx->num_comp_vectors = 1;
    d->ctx = rc ? NULL : ctx;
    pthread_mutex_unlock(&fv.lock);
    if (rc) {
        close(ctx->async_fd);
        close(ctx->cmd_fd);
        free(ctx);
        errno = -rc;
        return NULL;
    }
    return ctx;
}

FV_EXPORT int ibv_close_device(struct ibv_context *ctx)
{
    struct fv_dev *d = fv_dev_of(ctx);

    pthread_mutex_lock(&fv.lock);
    d->ctx = NULL; /* before its descriptors may be another's: an event may be on its way */
    fv.n_closed++;
    if (d->unloaded)
        fv_remove(d, true);
    pthread_mutex_unlock(&fv.lock);
    close(ctx->async_fd);
    close(ctx->cmd_fd);
    free(ctx);
    return 0;
}

FV_EXPORT int ibv_query_device(struct ibv_context *ctx, struct ibv_device_attr *attr)
{
    pthread_mutex_lock(&fv.lock);
    fv_may_stick(fv_dev_of(ctx), FV_AT_DEVICE);
    pthread_mutex_unlock(&fv.lock);
    memset(attr, 0, sizeof(*attr));
    attr->max_qp = FV_QPS;
    attr->max_qp_wr = 16384;
    attr->max_cqe = 1 << 20;
    attr->max_mr = FV_MRS;
    attr->phys_port_cnt = (uint8_t)fv_dev_of(ctx)->n_ports;
    return 0;
}

#undef ibv_query_port
FV_EXPORT int ibv_query_port(struct ibv_context *ctx, uint8_t port,
                             struct _compat_ibv_port_attr *compat)
{
    struct ibv_port_attr attr;
    struct fv_dev *d = fv_dev_of(ctx);
    struct fv_port *p = &d->port[port];

    if (port < 1 || port > d->n_ports)
        return EINVAL;
    memset(&attr, 0, sizeof(attr));
    pthread_mutex_lock(&fv.lock);
    hang_from(d, 2);
    fv_may_stick(d, FV_AT_PORT(0) | FV_AT_PORT(port));
    if ((d->removed && d->fatal) || d->stuck & FV_PORTS_FAIL) {
        pthread_mutex_unlock(&fv.lock);
        return EIO;
    }
    attr.state = p->up && !d->fatal ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
    attr.phys_state = p->up ? 5 : 3;
    attr.max_mtu = IBV_MTU_4096;
    attr.active_mtu = fv.mtu;
    attr.gid_tbl_len = FV_GIDS;
    attr.pkey_tbl_len = FV_PKEYS;
    attr.max_msg_sz = 1u << 30;
    attr.lid = p->lid;
    attr.link_layer = p->ib ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
    attr.active_width = 2;
    attr.active_speed = 32;
    pthread_mutex_unlock(&fv.lock);
    /* As the real symbol does: up to and with `flags`. */
    memcpy(compat, &attr, offsetof(struct ibv_port_attr, flags) + 1);
    return 0;
}

FV_EXPORT int ibv_query_gid(struct ibv_context *ctx, uint8_t port, int index, union ibv_gid *gid)
{
    struct fv_dev *d = fv_dev_of(ctx);

    if (port < 1 || port > d->n_ports || index < 0 || index >= FV_GIDS)
        return -1;
    pthread_mutex_lock(&fv.lock);
    fv_may_stick(d, FV_AT_GID);
    *gid = d->port[port].gid[index];
    pthread_mutex_unlock(&fv.lock);
    return 0;
}

FV_EXPORT int ibv_query_pkey(struct ibv_context *ctx, uint8_t port, int index, __be16 *pkey)
{
    struct fv_dev *d = fv_dev_of(ctx);

    if (port < 1 || port > d->n_ports || index < 0 || index >= FV_PKEYS)
        return -1;
    pthread_mutex_lock(&fv.lock);
    *pkey = htons(d->port[port].pkey[index]);
    pthread_mutex_unlock(&fv.lock);
    return 0;
}

void fv_async(struct fv_dev *dev, enum ibv_event_type type, int port, struct ibv_qp *qp)
{
    struct ibv_async_event *ev = &dev->events[dev->ev_tail % FV_EVENTS];
    uint64_t one = 1;

    if (!dev->ctx || dev->ev_tail - dev->ev_head == FV_EVENTS)
        return;
    memset(ev, 0, sizeof(*ev));
    ev->event_type = type;
    if (qp && type == IBV_EVENT_CQ_ERR)
        ev->element.cq = qp->send_cq;
    else if (qp)
        ev->element.qp = qp;
    else
        ev->element.port_num = port;
    dev->ev_tail++;
    if (write(dev->ctx->async_fd, &one, sizeof(one)) < 0)
        abort();
}

/* Of a queue pair or completion queue: not destroyed before the event is acknowledged. */
static bool is_of_object(const struct ibv_async_event *ev)
{
    switch (ev->event_type) {
    case IBV_EVENT_CQ_ERR:
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        return true;
    default:
        return false;
    }
}

FV_EXPORT int ibv_get_async_event(struct ibv_context *ctx, struct ibv_async_event *ev)
{
    struct fv_dev *d = fv_dev_of(ctx);
    uint64_t one;
    int rc = -1;

    if (read(ctx->async_fd, &one, sizeof(one)) < 0)
        return -1;
    pthread_mutex_lock(&fv.lock);
    while (rc < 0 && d->ev_head != d->ev_tail) {
        *ev = d->events[d->ev_head++ % FV_EVENTS];
        if (is_of_object(ev))
            d->told = *ev;
        rc = is_of_object(ev) && !ev->element.qp ? -1 : 0; /* -1: fv_events_over */
    }
    pthread_mutex_unlock(&fv.lock);
    return rc;
}

FV_EXPORT void ibv_ack_async_event(struct ibv_async_event *ev)
{
    if (!is_of_object(ev))
        return;
    pthread_mutex_lock(&fv.lock);
    for (int i = 0; i < fv.n_dev; i++) {
        if (fv.dev[i].told.element.qp == ev->element.qp)
            memset(&fv.dev[i].told, 0, sizeof(fv.dev[i].told));
    }
    pthread_cond_broadcast(&fv.unhang);
    pthread_mutex_unlock(&fv.lock);
}

void fv_events_over(struct fv_dev *dev, const void *object)
{
    for (unsigned i = dev->ev_head; i != dev->ev_tail; i++) {
        struct ibv_async_event *ev = &dev->events[i % FV_EVENTS];

        if (is_of_object(ev) && ev->element.qp == object)
            memset(ev, 0, sizeof(*ev));
    }
    while (dev->told.element.qp == object)
        pthread_cond_wait(&fv.unhang, &fv.lock);
}

FV_EXPORT int ibv_fork_init(void)
{
    return 0;
}
