/* Ports and their addresses, and asynchronous events. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "settings/settings.h"
#include "topology/local.h"
#include "transport/verbs/verbs.h"
#include "util/log.h"

#define GIDS_STEP 16 /* entries by which a view grows */

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

void r2_nic_ip(const struct r2_nic *n, uint8_t ip[16])
{
    memset(ip, 0, 16);
    if (n->family == AF_INET6) {
        memcpy(ip, &((const struct sockaddr_in6 *)&n->addr)->sin6_addr, 16);
        return;
    }
    ip[10] = ip[11] = 0xff;
    memcpy(ip + 12, &((const struct sockaddr_in *)&n->addr)->sin_addr, 4);
}

/* What queue pairs of the port may use at most. The choices of the setting are in the order of enum
 * ibv_mtu, `auto` in the place of none. */
static uint8_t port_mtu(const struct ibv_port_attr *attr)
{
    uint8_t active = (uint8_t)(attr->active_mtu ? attr->active_mtu : IBV_MTU_1024);
    int most = r2_settings_get()->ib_mtu;

    return most && most < active ? (uint8_t)most : active;
}

/* One entry more; false: no memory. */
static bool add_gid(struct r2_port_view *view, int index, enum r2_gid_type type,
                    const uint8_t raw[16])
{
    struct r2_gid_entry *more = view->gids;

    if (view->n_gids % GIDS_STEP == 0)
        more = realloc(more, sizeof(*more) * (size_t)(view->n_gids + GIDS_STEP));
    if (!more)
        return false;
    view->gids = more;
    more[view->n_gids] = (struct r2_gid_entry){.index = index, .type = type};
    memcpy(more[view->n_gids++].raw, raw, 16);
    return true;
}

void r2_port_read(const struct r2_hca *hca, int port, const uint8_t *ip, struct r2_port_view *view)
{
    int asked = r2_wanted_gid_index();
    __be16 pkey;
    bool roce;

    memset(view, 0, sizeof(*view));
    if (r2_ibv.query_port(hca->ctx, (uint8_t)port, &view->attr))
        return;
    view->there = true;
    view->has_pkey = r2_ibv.query_pkey(hca->ctx, (uint8_t)port, r2_qp_pkey_index(), &pkey) == 0;
    view->pkey = view->has_pkey ? ntohs(pkey) : 0;
    roce = view->attr.link_layer == IBV_LINK_LAYER_ETHERNET;
    for (int i = 0; i < view->attr.gid_tbl_len && i < R2_GIDS_MOST; i++) {
        enum r2_gid_type type = R2_GID_UNKNOWN;
        union ibv_gid g;

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
        if (!add_gid(view, i, type, g.raw))
            break;
        if (ip && type == R2_GID_V2 && memcmp(g.raw, ip, 16) == 0 &&
            r2_gid_fits(g.raw, type, r2_wanted_gid()))
            break; /* none is better */
    }
}

void r2_port_free(struct r2_port_view *view)
{
    free(view->gids);
    view->gids = NULL;
    view->n_gids = 0;
}

/* What the user wants comes first, whatever the rule says of it. */
/* The entry to use: index, or -1. `fits`: it is what the user wants (wanted.c). */
static int port_gid(const struct r2_port_view *view, const uint8_t ip[16], uint8_t gid[16],
                    bool *fits)
{
    bool roce = view->attr.link_layer == IBV_LINK_LAYER_ETHERNET;
    int best = -1, score = -1;

    *fits = false;
    for (int i = 0; i < view->n_gids; i++) {
        const struct r2_gid_entry *e = &view->gids[i];
        bool fit =
            !roce || r2_wanted_gid_index() >= 0 || r2_gid_fits(e->raw, e->type, r2_wanted_gid());
        int s = roce ? r2_gid_score(e->raw, e->type, ip) : 0;

        if (fit > *fits || (fit == *fits && s > score)) {
            *fits = fit;
            score = s;
            best = e->index;
            memcpy(gid, e->raw, 16);
        }
    }
    return best;
}

bool r2_port_has(const struct r2_port_view *view, const uint8_t ip[16])
{
    for (int i = 0; i < view->n_gids; i++) {
        if (memcmp(view->gids[i].raw, ip, 16) == 0)
            return true;
    }
    return false;
}

bool r2_vnic_take(struct r2_vnic *v, struct r2_hca *hca, const uint8_t ip[16],
                  const struct r2_port_view *view)
{
    const struct ibv_port_attr *attr = &view->attr;
    uint8_t gid[16] = {0};
    bool changed, gone, has_gid, fits = true;
    int index = view->there ? port_gid(view, ip, gid, &fits) : -1;

    has_gid = index >= 0;
    if (has_gid && !fits)
        R2_WARN_LIMIT("%s port %u: no entry of its GID table is what NCCL_IB_ADDR_FAMILY, "
                      "NCCL_IB_ADDR_RANGE or NCCL_IB_ROCE_VERSION_NUM ask for; entry %d is taken",
                      hca->name, v->port, index);
    pthread_mutex_lock(&v->lock);
    /* One that is gone answers late, when another may be in its place. Who is gone later than this
     * look is taken down behind it: r2_vnics_down comes after `gone` and takes the lock as well. */
    gone = atomic_load(&hca->gone);
    if (gone || !view->there) {
        v->active = gone && v->active;
        pthread_mutex_unlock(&v->lock);
        return !gone;
    }
    /* A key that could not be read is no other one: it is the last one that was. */
    index = index < 0 ? 0 : index;
    changed = memcmp(gid, v->gid, 16) != 0 || index != v->gid_index || attr->lid != v->lid ||
              (view->has_pkey && v->has_pkey && view->pkey != v->pkey);
    if (view->has_pkey) {
        v->has_pkey = true;
        v->pkey = view->pkey;
    }
    v->active =
        attr->state == IBV_PORT_ACTIVE && (has_gid || attr->link_layer != IBV_LINK_LAYER_ETHERNET);
    v->link = attr->link_layer == IBV_LINK_LAYER_ETHERNET ? IBV_LINK_LAYER_ETHERNET
                                                          : IBV_LINK_LAYER_INFINIBAND;
    v->mtu = port_mtu(attr);
    v->lid = attr->lid;
    v->gid_index = index;
    memcpy(v->gid, gid, 16);
    v->state = attr->state;
    v->phys = attr->phys_state;
    v->rate_gbps = r2_port_rate_gbps(attr->active_width, attr->active_speed);
    pthread_mutex_unlock(&v->lock);
    return changed;
}

/* On the command thread: reads the NIC's port. As r2_vnic_take. */
static bool vnic_refresh(struct r2_vnic *v, struct r2_hca *hca)
{
    struct r2_port_view view;
    struct r2_nic n;
    uint8_t ip[16];
    bool changed;

    r2_local_now((int)(v - r2_verbs.nics), &n);
    r2_nic_ip(&n, ip);
    r2_port_read(hca, v->port, ip, &view);
    changed = r2_vnic_take(v, hca, ip, &view);
    r2_port_free(&view);
    return changed;
}

/* ---- asynchronous events */

static bool on_port(const struct r2_ep *ep, const struct r2_hca *hca, int port)
{
    return ep->hca == hca && (port < 0 || ep->port == port);
}

/* Whose queue an event is about. The queue is there until the event is acknowledged (destroying it
 * waits for that); the endpoint need not be, so it is only compared with those that are. What it
 * has in ep->cq and its queue pairs is not looked at: its command thread may be changing that. */
static const struct r2_ep *ep_of(const struct ibv_async_event *ev, enum r2_async_scope scope)
{
    if (scope == R2_ASYNC_CQ)
        return ev->element.cq->cq_context;
    return scope == R2_ASYNC_QP ? ev->element.qp->qp_context : NULL;
}

/* Endpoints in the scope of an event, each with a reference. */
static struct r2_ep **in_scope(struct r2_hca *hca, const struct ibv_async_event *ev,
                               enum r2_async_scope scope, int *count)
{
    const struct r2_ep *one = ep_of(ev, scope);
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
                   (scope == R2_ASYNC_PORT && on_port(ep, hca, ev->element.port_num)) || ep == one;

        if (hit && out) {
            r2_vep_get(ep);
            out[(*count)++] = ep;
        }
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    return out;
}

static void fail_all(struct r2_hca *hca, const struct ibv_async_event *ev,
                     enum r2_async_scope scope, int err)
{
    struct r2_ep **eps;
    int n;

    atomic_fetch_add(&r2_verbs.fails, 1);
    eps = in_scope(hca, ev, scope, &n);
    for (int i = 0; i < n; i++) {
        r2_vep_fail(eps[i], err);
        r2_vep_put(eps[i]);
    }
    free(eps);
}

void r2_veps_fail(struct r2_hca *hca, int err)
{
    struct ibv_async_event none = {.element.port_num = 0};

    fail_all(hca, &none, R2_ASYNC_DEVICE, err);
}

/* A port is looked at again. It asks the device, which may not answer: on the command thread. */
struct refresh {
    struct r2_cmd cmd;
    struct r2_hca *hca; /* used */
    int nic;
    const char *cause;
};

static void run_refresh(struct r2_cmd *cmd)
{
    struct refresh *r = R2_CONTAINER_OF(cmd, struct refresh, cmd);
    struct r2_vnic *v = &r2_verbs.nics[r->nic];
    struct ibv_async_event ev = {.element.port_num = v->port};
    bool active;

    /* Whichever event has made us look: the one of the change finds nothing new any more. */
    if (!atomic_load(&r->hca->gone) && vnic_refresh(v, r->hca)) {
        r2_vflush_again(v); /* before paths are made anew: this thread makes both */
        fail_all(r->hca, &ev, R2_ASYNC_PORT, EADDRNOTAVAIL);
    }
    pthread_mutex_lock(&v->lock);
    active = v->active;
    pthread_mutex_unlock(&v->lock);
    if (!atomic_load(&r->hca->gone))
        r2_verbs.ev->nic_link(r->nic, R2_VIA_VERBS, active, r->cause);
    r2_hca_unuse(r->hca);
    free(r);
}

static void refresh(struct r2_hca *hca, int nic, const char *cause)
{
    struct refresh *r = calloc(1, sizeof(*r));

    if (!r)
        return; /* the next event does it */
    r2_hca_use(hca);
    r->hca = hca;
    r->nic = nic;
    r->cause = cause;
    r2_cmd_give(hca, &r->cmd, run_refresh);
}

/* The NICs of the port. Down is told at once; what else there is to know is asked. */
static void port_event(struct r2_hca *hca, int port, const struct r2_async_info *info)
{
    for (int i = 0; i < R2_MAX_NICS; i++) {
        struct r2_vnic *v = &r2_verbs.nics[i];

        if (v->slot != hca->slot || v->port != port)
            continue;
        if (info->act == R2_ASYNC_DOWN) {
            pthread_mutex_lock(&v->lock);
            v->active = false;
            pthread_mutex_unlock(&v->lock);
            r2_verbs.ev->nic_link(i, R2_VIA_VERBS, false, info->meaning);
        }
        refresh(hca, i, info->meaning);
    }
}

void r2_vnics_down(int slot, const char *why)
{
    for (int i = 0; i < R2_MAX_NICS; i++) {
        struct r2_vnic *v = &r2_verbs.nics[i];

        if (v->slot != slot)
            continue;
        pthread_mutex_lock(&v->lock);
        v->active = false;
        v->state = IBV_PORT_DOWN;
        v->phys = 3; /* disabled */
        pthread_mutex_unlock(&v->lock);
        r2_vflush_stop(v);
        r2_verbs.ev->nic_link(i, R2_VIA_VERBS, false, why);
    }
}

void r2_vnics_up(struct r2_hca *hca)
{
    for (int i = 0; i < R2_MAX_NICS; i++) {
        struct r2_vnic *v = &r2_verbs.nics[i];
        bool active;

        if (v->slot != hca->slot)
            continue;
        vnic_refresh(v, hca);
        r2_vflush_start(v);
        pthread_mutex_lock(&v->lock);
        active = v->active;
        pthread_mutex_unlock(&v->lock);
        r2_verbs.ev->nic_link(i, R2_VIA_VERBS, active, "its RDMA device is back");
    }
}

int r2_vnic_rebind(int nic)
{
    struct r2_hca *hca = r2_vnic_use(&r2_verbs.nics[nic]);

    if (!hca)
        return 0;
    refresh(hca, nic, "its NIC has another address");
    r2_hca_unuse(hca);
    return 0;
}

static void on_async(struct r2_hca *hca, const struct ibv_async_event *ev)
{
    const struct r2_async_info *info = r2_async_info(ev->event_type);

    if (info->act == R2_ASYNC_IGNORE)
        return;
    if (info->scope == R2_ASYNC_PORT)
        R2_INFO("%s port %d: %s (%s)", hca->name, ev->element.port_num, info->meaning, info->name);
    else
        R2_WARN_LIMIT("%s: %s (%s)", hca->name, info->meaning, info->name);
    if (info->act == R2_ASYNC_GONE) {
        r2_hca_gone(hca, info->meaning);
        return;
    }
    if (info->scope == R2_ASYNC_PORT)
        port_event(hca, ev->element.port_num, info);
    if (info->act == R2_ASYNC_FAIL || info->act == R2_ASYNC_DOWN)
        fail_all(hca, ev, info->scope, info->act == R2_ASYNC_DOWN ? ENETDOWN : EIO);
}

void r2_hca_events(struct r2_io_fd *f, uint32_t events)
{
    struct r2_hca *hca = R2_CONTAINER_OF(f, struct r2_hca, async);
    struct ibv_async_event ev;

    (void)events;
    while (!atomic_load(&hca->gone) && r2_ibv.get_async_event(hca->ctx, &ev) == 0) {
        on_async(hca, &ev);
        r2_ibv.ack_async_event(&ev);
    }
}
