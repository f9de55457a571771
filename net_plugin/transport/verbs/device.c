/* Devices, their ports, and which of them is behind which NIC. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine.h"
#include "settings/settings.h"
#include "transport/verbs/verbs.h"
#include "util/log.h"

/* One line of a file in sysfs; false where there is none. */
static bool sysfs_line(const char *path, char *out, size_t cap)
{
    FILE *f = fopen(path, "re");
    bool ok = f && fgets(out, (int)cap, f);

    if (f)
        fclose(f);
    if (ok)
        out[strcspn(out, "\n")] = '\0';
    return ok;
}

static enum r2_gid_type gid_type(const struct r2_hca *hca, int port, int index)
{
    char path[256], text[64];

    snprintf(path, sizeof(path), "/sys/class/infiniband/%s/ports/%d/gid_attrs/types/%d", hca->name,
             port, index);
    if (!sysfs_line(path, text, sizeof(text)))
        return R2_GID_UNKNOWN;
    return strstr(text, "v2") ? R2_GID_V2 : R2_GID_V1;
}

/* A NIC's address as a GID has it. */
static void nic_ip(const struct r2_nic *n, uint8_t ip[16])
{
    memset(ip, 0, 16);
    if (n->family == AF_INET6) {
        memcpy(ip, &((const struct sockaddr_in6 *)&n->addr)->sin6_addr, 16);
        return;
    }
    ip[10] = ip[11] = 0xff;
    memcpy(ip + 12, &((const struct sockaddr_in *)&n->addr)->sin_addr, 4);
}

static int query_port(const struct r2_hca *hca, int port, struct ibv_port_attr *attr)
{
    memset(attr, 0, sizeof(*attr));
    return r2_ibv.query_port(hca->ctx, (uint8_t)port, attr);
}

static int wanted_gid_index(void)
{
    const struct r2_settings *set = r2_settings_get();

    const char *text = set->ib_gid_index[0] ? set->ib_gid_index : set->nccl_ib_gid_index;

    return text[0] ? atoi(text) : -1;
}

/* The entry to use of a port's table: index, or -1. `score` says how good it is. */
static int best_gid(const struct r2_hca *hca, int port, const struct ibv_port_attr *attr,
                    const uint8_t *ip, uint8_t gid[16], int *score)
{
    int asked = wanted_gid_index(), best = -1;
    bool roce = attr->link_layer == IBV_LINK_LAYER_ETHERNET;

    *score = -1;
    for (int i = 0; i < attr->gid_tbl_len; i++) {
        enum r2_gid_type type = R2_GID_UNKNOWN;
        union ibv_gid g;
        int s;

        if (asked >= 0 && i != asked)
            continue;
        if (!roce && asked < 0 && i > 0)
            break; /* InfiniBand: the port's own */
        if (r2_ibv.query_gid(hca->ctx, (uint8_t)port, i, &g))
            continue;
        /* Tables have up to 1024 entries, nearly all empty, and the type is a file to read. */
        if (roce && r2_gid_score(g.raw, R2_GID_UNKNOWN, ip) < 0)
            continue;
        if (roce)
            type = gid_type(hca, port, i);
        s = roce ? r2_gid_score(g.raw, type, ip) : 0;
        if (s > *score) {
            *score = s;
            best = i;
            memcpy(gid, g.raw, 16);
        }
        if (type == R2_GID_V2 && memcmp(g.raw, ip, 16) == 0)
            break; /* none is better */
    }
    return best;
}

bool r2_vnic_refresh(struct r2_vnic *v)
{
    struct ibv_port_attr attr;
    struct r2_nic n;
    uint8_t gid[16] = {0}, ip[16];
    int score, index;
    bool changed;

    r2_engine_nic_now((int)(v - r2_verbs.nics), &n);
    nic_ip(&n, ip);
    if (query_port(v->hca, v->port, &attr)) {
        pthread_mutex_lock(&v->lock);
        v->active = false;
        pthread_mutex_unlock(&v->lock);
        return true;
    }
    index = best_gid(v->hca, v->port, &attr, ip, gid, &score);
    pthread_mutex_lock(&v->lock);
    changed = memcmp(gid, v->gid, 16) != 0 || attr.lid != v->lid;
    v->active =
        attr.state == IBV_PORT_ACTIVE && (index >= 0 || attr.link_layer != IBV_LINK_LAYER_ETHERNET);
    v->link = attr.link_layer == IBV_LINK_LAYER_ETHERNET ? IBV_LINK_LAYER_ETHERNET
                                                         : IBV_LINK_LAYER_INFINIBAND;
    v->mtu = (uint8_t)(attr.active_mtu ? attr.active_mtu : IBV_MTU_1024);
    v->lid = attr.lid;
    v->gid_index = index < 0 ? 0 : index;
    memcpy(v->gid, gid, 16);
    v->state = attr.state;
    v->phys = attr.phys_state;
    v->rate_gbps = r2_port_rate_gbps(attr.active_width, attr.active_speed);
    pthread_mutex_unlock(&v->lock);
    return changed;
}

/* ---- asynchronous events */

static bool on_port(const struct r2_ep *ep, const struct r2_hca *hca, int port)
{
    return ep->hca == hca && (port < 0 || ep->port == port);
}

static bool has_qp(const struct r2_ep *ep, const struct ibv_qp *qp)
{
    bool found = ep->ctrl.qp == qp || ep->beat.qp == qp;

    for (int i = 0; i < ep->n_bulk; i++)
        found |= ep->bulk[i].qp == qp;
    return found;
}

/* Endpoints in the scope of an event, each with a reference. */
static struct r2_ep **in_scope(struct r2_hca *hca, const struct ibv_async_event *ev,
                               enum r2_async_scope scope, int *count)
{
    struct r2_ep **out;
    struct r2_list *n;
    int cap = 0;

    *count = 0;
    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps)
        cap++;
    out = calloc((size_t)cap + 1, sizeof(*out));
    R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);
        bool hit = (scope == R2_ASYNC_DEVICE && ep->hca == hca) ||
                   (scope == R2_ASYNC_PORT && on_port(ep, hca, ev->element.port_num)) ||
                   (scope == R2_ASYNC_CQ && ep->cq == ev->element.cq) ||
                   (scope == R2_ASYNC_QP && has_qp(ep, ev->element.qp));

        if (hit && out) {
            r2_vep_get(ep);
            out[(*count)++] = ep;
        }
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    return out;
}

static void fail_all(struct r2_ep **eps, int n, int err)
{
    for (int i = 0; i < n; i++) {
        r2_vep_fail(eps[i], err);
        r2_vep_put(eps[i]);
    }
    free(eps);
}

/* The NICs of the port: its state is read again, and the engine hears of it. */
static void refresh_port(struct r2_hca *hca, int port, const struct r2_async_info *info)
{
    for (int i = 0; i < R2_MAX_NICS; i++) {
        struct r2_vnic *v = &r2_verbs.nics[i];
        struct ibv_async_event ev = {.element.port_num = port};
        bool changed, active;

        if (v->hca != hca || (port >= 0 && v->port != port))
            continue;
        changed = r2_vnic_refresh(v);
        pthread_mutex_lock(&v->lock);
        if (info->act == R2_ASYNC_DOWN || info->act == R2_ASYNC_GONE)
            v->active = false;
        active = v->active;
        pthread_mutex_unlock(&v->lock);
        if (info->act == R2_ASYNC_REFRESH && changed) {
            struct r2_ep **eps;
            int n;

            ev.element.port_num = v->port;
            eps = in_scope(hca, &ev, R2_ASYNC_PORT, &n);
            fail_all(eps, n, EADDRNOTAVAIL);
        }
        r2_verbs.ev->nic_link(i, R2_VIA_VERBS, active, info->meaning);
    }
}

int r2_vnic_rebind(int nic)
{
    static const struct r2_async_info info = {
        .name = "address", .act = R2_ASYNC_REFRESH, .meaning = "its NIC has another address"};
    struct r2_vnic *v = &r2_verbs.nics[nic];

    if (v->hca && !atomic_load(&v->hca->gone))
        refresh_port(v->hca, v->port, &info);
    return 0;
}

static void on_async(struct r2_hca *hca, const struct ibv_async_event *ev)
{
    const struct r2_async_info *info = r2_async_info(ev->event_type);
    int port = info->scope == R2_ASYNC_PORT ? ev->element.port_num : -1;

    if (info->act == R2_ASYNC_IGNORE)
        return;
    if (info->scope == R2_ASYNC_PORT)
        R2_INFO("%s port %d: %s (%s)", hca->name, port, info->meaning, info->name);
    else
        R2_WARN_LIMIT("%s: %s (%s)", hca->name, info->meaning, info->name);
    if (info->act == R2_ASYNC_GONE)
        atomic_store(&hca->gone, true);
    if (info->scope == R2_ASYNC_PORT || info->scope == R2_ASYNC_DEVICE)
        refresh_port(hca, port, info);
    if (info->act == R2_ASYNC_FAIL || info->act == R2_ASYNC_DOWN || info->act == R2_ASYNC_GONE) {
        int n;
        struct r2_ep **eps = in_scope(hca, ev, info->scope, &n);

        fail_all(eps, n, info->act == R2_ASYNC_DOWN ? ENETDOWN : EIO);
    }
}

static void async_ready(struct r2_io_fd *f, uint32_t events)
{
    struct r2_hca *hca = R2_CONTAINER_OF(f, struct r2_hca, async);
    struct ibv_async_event ev;

    (void)events;
    while (r2_ibv.get_async_event(hca->ctx, &ev) == 0) {
        on_async(hca, &ev);
        r2_ibv.ack_async_event(&ev);
    }
}

/* ---- start */

static bool module_loaded(const char *name)
{
    char path[128];

    snprintf(path, sizeof(path), "/sys/module/%s", name);
    return access(path, F_OK) == 0;
}

/* The kernel refuses a descriptor of -1 in its own way where it knows DMA buffers at all. */
static bool knows_dmabuf(struct ibv_pd *pd)
{
    struct ibv_mr *mr;

    if (!r2_ibv.reg_dmabuf_mr)
        return false;
    mr = r2_ibv.reg_dmabuf_mr(pd, 0, 0, 0, -1, 0);
    if (mr) {
        r2_ibv.dereg_mr(mr);
        return true;
    }
    return errno != EOPNOTSUPP && errno != EPROTONOSUPPORT && errno != ENOSYS;
}

static int open_one(struct ibv_device *dev, struct r2_hca *hca)
{
    int flags, rc;

    snprintf(hca->name, sizeof(hca->name), "%s", r2_ibv.get_device_name(dev));
    hca->ctx = r2_ibv.open_device(dev);
    if (!hca->ctx)
        return -EIO;
    hca->pd = r2_ibv.alloc_pd(hca->ctx);
    rc = hca->pd && r2_ibv.query_device(hca->ctx, &hca->attr) == 0 ? r2_cmd_start(hca) : -EIO;
    if (rc) {
        if (hca->pd)
            r2_ibv.dealloc_pd(hca->pd);
        r2_ibv.close_device(hca->ctx);
        return rc;
    }
    hca->dmabuf = knows_dmabuf(hca->pd);
    /* Where NCCL looks, and the modules' names. */
    hca->peermem = module_loaded("nvidia_peermem") || module_loaded("nv_peer_mem") ||
                   access("/sys/kernel/mm/memory_peers/nv_mem/version", F_OK) == 0 ||
                   access("/sys/kernel/mm/memory_peers/nv_mem_nc/version", F_OK) == 0;
    flags = fcntl(hca->ctx->async_fd, F_GETFL);
    fcntl(hca->ctx->async_fd, F_SETFL, flags | O_NONBLOCK);
    hca->async.fd = hca->ctx->async_fd;
    hca->async.ready = async_ready;
    return 0;
}

void r2_hcas_watch(void)
{
    for (int i = 0; i < r2_verbs.n_hcas; i++) {
        r2_io_fd_track(r2_verbs.hcas[i].async.fd);
        r2_io_add(r2_io_at(0), &r2_verbs.hcas[i].async);
    }
}

int r2_hcas_open(void)
{
    const char *list = r2_settings_get()->nccl_ib_hca;
    struct ibv_device **devs;
    int n = 0;

    devs = r2_ibv.get_device_list(&n);
    for (int i = 0; devs && i < n && r2_verbs.n_hcas < R2_MAX_HCAS; i++) {
        const char *name = r2_ibv.get_device_name(devs[i]);
        bool wanted = false;

        for (int port = 1; port <= 4; port++)
            wanted |= r2_hca_match(list, name, port);
        if (!wanted)
            continue;
        if (open_one(devs[i], &r2_verbs.hcas[r2_verbs.n_hcas]) == 0)
            r2_verbs.n_hcas++;
        else
            R2_WARN("RDMA device %s cannot be opened (%s)", name, strerror(errno));
    }
    if (devs)
        r2_ibv.free_device_list(devs);
    return r2_verbs.n_hcas;
}

/* The port whose address is the NIC's; for InfiniBand and ports without addresses, that of the
 * NIC's own PCI device. */
static int match_score(const struct r2_nic *n, const struct r2_hca *hca, int port)
{
    struct ibv_port_attr attr;
    uint8_t gid[16], ip[16];
    int score, index;

    if (query_port(hca, port, &attr))
        return -1;
    nic_ip(n, ip);
    index = best_gid(hca, port, &attr, ip, gid, &score);
    if (attr.link_layer == IBV_LINK_LAYER_ETHERNET) {
        if (index >= 0 && memcmp(gid, ip, 16) == 0)
            return 1000;
        if (strcmp(n->rdma, hca->name) == 0 && index >= 0)
            return 100;
        return -1;
    }
    if (strcmp(n->rdma, hca->name) != 0)
        return -1;
    return n->rdma_port == port ? 500 : n->rdma_port ? -1 : 50;
}

static void match_one(int i)
{
    const struct r2_nic *n = r2_engine_nic(i);
    struct r2_vnic *v = &r2_verbs.nics[i];
    int best = -1;

    for (int h = 0; h < r2_verbs.n_hcas; h++) {
        struct r2_hca *hca = &r2_verbs.hcas[h];

        for (int port = 1; port <= hca->attr.phys_port_cnt; port++) {
            int score = r2_hca_match(r2_settings_get()->nccl_ib_hca, hca->name, port)
                            ? match_score(n, hca, port)
                            : -1;

            if (score > best) {
                best = score;
                v->hca = hca;
                v->hca_index = h;
                v->port = (uint8_t)port;
            }
        }
    }
}

int r2_vnics_match(void)
{
    int n, found = 0;

    r2_engine_devices(&n);
    for (int i = 0; i < n; i++) {
        struct r2_vnic *v = &r2_verbs.nics[i];

        pthread_mutex_init(&v->lock, NULL);
        match_one(i);
        if (!v->hca)
            continue;
        r2_vnic_refresh(v);
        found++;
        R2_INFO("NIC %s: RDMA device %s port %d, %s, %s", r2_engine_nic(i)->name, v->hca->name,
                v->port, v->link == IBV_LINK_LAYER_ETHERNET ? "RoCE" : "InfiniBand",
                r2_port_state_text(v->state));
    }
    return found;
}
