#define _GNU_SOURCE
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "io/fault.h"
#include "settings/settings.h"
#include "topology/local.h"
#include "transport/tcp/errors.h"
#include "transport/tcp/tcp.h"
#include "util/clock.h"
#include "util/log.h"

#define BULK_NOTSENT (256 * 1024)
struct r2_tcp r2_tcp = {.lock = PTHREAD_MUTEX_INITIALIZER,
                        .listen_lock = PTHREAD_MUTEX_INITIALIZER};

struct r2_ep *r2_ep_new(const struct r2_ep_params *params)
{
    struct r2_ep *ep = calloc(1, sizeof(*ep));

    if (!ep)
        return NULL;
    r2_mem_more(sizeof(*ep));
    ep->head.ops = &r2_transport_tcp;
    ep->params = *params;
    ep->owner = params->owner;
    atomic_init(&ep->refs, 1);
    pthread_mutex_init(&ep->lock, NULL);
    r2_list_init(&ep->node);
    return ep;
}

void r2_ep_get(struct r2_ep *ep)
{
    atomic_fetch_add_explicit(&ep->refs, 1, memory_order_relaxed);
}

void r2_ep_put(struct r2_ep *ep)
{
    /* acq_rel: what other holders did to the endpoint happens before it is freed. */
    if (atomic_fetch_sub_explicit(&ep->refs, 1, memory_order_acq_rel) != 1)
        return;
    for (int i = 0; i < R2_TCP_MAX_LANES; i++) {
        if (ep->lanes[i])
            r2_lane_free(ep->lanes[i]);
    }
    pthread_mutex_destroy(&ep->lock);
    if (ep->owner)
        r2_tcp.ev->released(ep->owner, &ep->params);
    r2_mem_less(sizeof(*ep));
    free(ep);
}

struct r2_lane *r2_ep_lane(struct r2_ep *ep, int i)
{
    struct r2_lane *lane;

    pthread_mutex_lock(&ep->lock);
    lane = ep->lanes[i];
    pthread_mutex_unlock(&ep->lock);
    return lane;
}

void r2_ep_fail(struct r2_ep *ep, int err)
{
    struct r2_ep_health health = {0};
    bool nobody;

    pthread_mutex_lock(&ep->lock);
    nobody = ep->asking; /* the engine has it already, and has not said whose it is */
    if (nobody)
        ep->late = err;
    pthread_mutex_unlock(&ep->lock);
    if (nobody) /* r2_lane_event reports it */
        return;
    if (atomic_exchange(&ep->failed, true) || atomic_load(&ep->dead))
        return;
    health.refused = atomic_load(&ep->refused);
    health.cause = r2_tcp_error(err)->cause;
    health.other_process = atomic_load(&ep->other_process);
    health.there = atomic_load(&ep->there);
    health.given_up = atomic_load(&ep->given_up);
    health.answered = atomic_load(&ep->connected);
    r2_tcp.ev->failed(ep->owner, ep, err, &health);
}

/* A process that finishes says so on lane 0, but each lane has a thread of its own. So the end of
 * another lane is often seen before that last frame. A failed endpoint is not read any more
 * (invariant "send done = acknowledged"). */
void r2_ep_lane_failed(struct r2_ep *ep, int err)
{
    struct r2_lane *first = r2_ep_lane(ep, 0);
    int none = 0;

    if ((err != ECONNRESET && err != EPIPE) || !first || !atomic_load(&first->open) ||
        r2_tcp_broken(ep->params.local_nic)) {
        r2_ep_fail(ep, err);
        return;
    }
    atomic_compare_exchange_strong(&ep->ending, &none, err);
    r2_lane_kick(first);
}

int r2_ep_late(struct r2_ep *ep)
{
    int err;

    pthread_mutex_lock(&ep->lock);
    err = ep->late;
    ep->late = 0;
    pthread_mutex_unlock(&ep->lock);
    return err;
}

static int common_divisor(int a, int b)
{
    while (b) {
        int rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

/* An endpoint's sockets go to the threads in turn. The first bulk lanes carry most of what is
 * small. Where those of all endpoints would come to fewer threads than if one were left out, one
 * is. */
static void stagger(const struct r2_ep *ep)
{
    int threads = r2_io_used(), each = ep->n_lanes + 1;

    if (ep->n_lanes && common_divisor(threads, each + 1) < common_divisor(threads, each))
        r2_io_pick();
}

static void set_lane(struct r2_ep *ep, struct r2_lane *lane, int index)
{
    int notsent = BULK_NOTSENT;

    lane->index = (uint8_t)index;
    lane->ep = ep;
    r2_ep_get(ep);
    if (index)
        setsockopt(lane->io.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &notsent, sizeof(notsent));
}

static int ep_connect_lane(struct r2_ep *ep, int index)
{
    struct r2_lane *lane;
    int fd = r2_tcp_socket(ep->params.local_nic, &ep->params.remote_addr, ep->params.packet), rc;

    if (fd < 0)
        return fd;
    lane = r2_lane_new(fd, ep->params.local_nic, r2_io_pick(), R2_LANE_CONNECTING);
    if (!lane) {
        r2_tcp_close_fd(fd, true);
        return -ENOMEM;
    }
    set_lane(ep, lane, index);
    r2_timer_set(&lane->timer, r2_now_ns() + R2_TCP_CONNECT_NS);
    pthread_mutex_lock(&ep->lock);
    ep->lanes[index] = lane;
    rc = atomic_load(&ep->dead) ? -ESHUTDOWN : r2_lane_start(lane);
    pthread_mutex_unlock(&ep->lock);
    if (rc)
        r2_lane_shut(lane, true);
    return rc;
}

static struct r2_ep *find_accepted(const struct r2_tcp_hello *h)
{
    struct r2_list *n;

    R2_LIST_FOR_EACH (n, &r2_tcp.accepted) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (ep->params.gen == h->gen && ep->params.remote_nic == h->nic &&
            ep->params.local_nic == h->remote_nic &&
            memcmp(ep->params.remote_process, h->from, 16) == 0) {
            r2_ep_get(ep);
            return ep;
        }
    }
    return NULL;
}

static int accept_new(struct r2_lane *lane, const struct r2_tcp_hello *h)
{
    struct r2_ep_params p = {.local_nic = (uint8_t)lane->nic, .remote_nic = h->nic, .gen = h->gen};
    struct r2_ep *ep;
    void *owner;

    if (h->remote_nic != lane->nic)
        return EPROTO;
    if (h->extra && r2_io_fds_short())
        return EMFILE;
    memcpy(p.local_process, h->to, 16);
    memcpy(p.remote_process, h->from, 16);
    r2_tcp.ev->secret(h->to, p.secret);
    ep = r2_ep_new(&p);
    if (!ep)
        return ENOMEM;
    ep->n_lanes = h->lanes;
    r2_bulk_use(ep, h->lanes);
    stagger(ep);
    ep->asking = true;
    set_lane(ep, lane, 0);
    ep->lanes[0] = lane;
    owner = r2_tcp.ev->accepted(ep, &p);
    pthread_mutex_lock(&ep->lock);
    ep->owner = owner;
    ep->asking = false; /* r2_ep_fail may have come before */
    pthread_mutex_unlock(&ep->lock);
    if (!owner) {
        ep->lanes[0] = NULL;
        lane->ep = NULL;
        r2_ep_put(ep);
        r2_ep_put(ep);
        return ESTALE;
    }
    pthread_mutex_lock(&r2_tcp.lock);
    r2_ep_get(ep); /* the table's */
    r2_list_add_tail(&r2_tcp.accepted, &ep->node);
    pthread_mutex_unlock(&r2_tcp.lock);
    r2_ep_put(ep); /* the engine took its own reference in `accepted` */
    return 0;
}

int r2_ep_attach(struct r2_lane *lane, const struct r2_tcp_hello *h)
{
    struct r2_ep *ep;
    int rc = 0;

    if (h->lane == 0) {
        rc = accept_new(lane, h);
        goto out;
    }
    pthread_mutex_lock(&r2_tcp.lock);
    ep = find_accepted(h);
    pthread_mutex_unlock(&r2_tcp.lock);
    if (!ep)
        return ESTALE;
    pthread_mutex_lock(&ep->lock);
    if (atomic_load(&ep->dead) || ep->lanes[h->lane] || h->lane > ep->n_lanes) {
        rc = ESTALE;
    } else {
        set_lane(ep, lane, h->lane); /* before others can find the lane */
        ep->lanes[h->lane] = lane;
    }
    pthread_mutex_unlock(&ep->lock);
    r2_ep_put(ep);
out:
    if (!rc) {
        atomic_fetch_sub(&r2_tcp.pending, 1);
        r2_timer_set(&lane->timer, 0);
    }
    return rc;
}

void r2_ep_lane_open(struct r2_lane *lane)
{
    struct r2_ep *ep = lane->ep;
    int rc = 0;

    r2_timer_set(&lane->timer, 0);
    atomic_store(&lane->open, true);
    if (lane->index) {
        atomic_fetch_add(&ep->open_lanes, 1);
        r2_lane_kick(lane);
        return;
    }
    r2_tcp.ev->up(ep->owner, ep);
    if (!ep->params.initiator)
        return;
    for (int i = 1; i <= ep->n_lanes && !rc; i++)
        rc = ep_connect_lane(ep, i);
    if (rc)
        r2_ep_fail(ep, -rc);
}

static int tcp_start(const struct r2_transport_events *events, const uint8_t process[16])
{
    r2_tcp.ev = events;
    memcpy(r2_tcp.process, process, 16);
    r2_list_init(&r2_tcp.accepted);
    return r2_tcp_listen_all();
}

static int tcp_ports(const struct r2_nic *nics, int n, struct r2_nic *out, uint64_t *seed, int max)
{
    (void)nics, (void)n, (void)out, (void)seed, (void)max;
    return 0;
}

static bool tcp_left_out(const char *device)
{
    (void)device;
    return false;
}

static int address_of(int nic, int turn, struct r2_wire_addr *out)
{
    const struct r2_nic *n = r2_local_nic(nic);
    bool bare = n && n->bare;

    if (bare) /* met elsewhere, and only to agree on queue pairs */
        nic = r2_tcp.ev->meeting();
    if (nic < 0 || nic >= R2_TCP_NICS || !r2_tcp.listening[nic])
        return -ENODEV;
    pthread_mutex_lock(&r2_tcp.listen_lock);
    *out = r2_tcp.addrs[nic + turn * R2_TCP_NICS];
    pthread_mutex_unlock(&r2_tcp.listen_lock);
    out->offers |= bare ? R2_OFFER_NO_TCP : 0;
    return out->family ? 0 : -ENODEV;
}

static int tcp_address(int nic, struct r2_wire_addr *out)
{
    return address_of(nic, 0, out);
}

static int tcp_second(int nic, struct r2_wire_addr *out)
{
    return address_of(nic, 1, out);
}

static unsigned tcp_sockets(void)
{
    return (unsigned)atomic_load(&r2_tcp.sockets);
}

static int tcp_connect(const struct r2_ep_params *params, struct r2_ep **out)
{
    struct r2_ep *ep = r2_ep_new(params);
    int rc;

    if (!ep) {
        r2_tcp.ev->released(params->owner, params);
        return -ENOMEM;
    }
    ep->n_lanes = params->probe ? 0 : r2_bulk_plan(params->local_nic);
    r2_bulk_use(ep, (unsigned)ep->n_lanes);
    stagger(ep);
    rc = ep_connect_lane(ep, 0);
    if (rc) {
        atomic_store(&ep->dead, true);
        r2_ep_put(ep);
        return rc;
    }
    *out = ep;
    return 0;
}

static void tcp_flush(struct r2_ep *ep)
{
    struct r2_lane *lane = r2_ep_lane(ep, 0);

    if (lane)
        r2_lane_flush(lane);
}

#define SELDOM_NS (60 * R2_NS_PER_US)

/* A call to send takes several microseconds: where there are several threads one at hand does it,
 * but for messages of who had none for a while (docs/decisions.md 44). */
static void tcp_flush_soon(struct r2_ep *ep, bool lone, bool data)
{
    static _Thread_local uint64_t last;
    struct r2_lane *lane = r2_ep_lane(ep, 0);
    bool now = r2_io_alone() ? lone : data && r2_now_ns() - last >= SELDOM_NS;

    if (lane && r2_io_at_hand(lane->io.io) && !now)
        r2_lane_flush_later(lane);
    else if (lane)
        r2_lane_flush(lane);
    last = data ? r2_now_ns() : last;
}

static bool tcp_help(struct r2_ep *ep)
{
    struct r2_lane *lane = r2_ep_lane(ep, 0);
    int rc = 0;

    if (!lane || r2_io_at_hand(lane->io.io))
        return false;
    if (!pthread_mutex_trylock(&lane->rx_lock)) {
        if (!lane->closed && lane->phase == R2_LANE_OPEN)
            rc = r2_lane_rx_ctrl(lane);
        pthread_mutex_unlock(&lane->rx_lock);
    }
    if (rc < 0)
        r2_ep_lane_failed(ep, -rc);
    return !r2_io_awake(lane->io.io); /* else it is late, and needs help now and then */
}

static int tcp_shut(struct r2_ep *ep)
{
    pthread_mutex_lock(&ep->lock);
    atomic_store(&ep->dead, true);
    pthread_mutex_unlock(&ep->lock);
    for (int i = 0; i < R2_TCP_MAX_LANES; i++) {
        struct r2_lane *lane = r2_ep_lane(ep, i);

        if (lane)
            r2_lane_shut(lane, true);
    }
    pthread_mutex_lock(&r2_tcp.lock);
    if (!r2_list_empty(&ep->node)) {
        r2_list_del(&ep->node);
        pthread_mutex_unlock(&r2_tcp.lock);
        r2_ep_put(ep);
        return 0;
    }
    pthread_mutex_unlock(&r2_tcp.lock);
    return 0;
}

static bool same(const struct r2_bulk *b, uint64_t conn, uint64_t first, uint64_t last)
{
    return b->conn == conn && b->seq >= first && b->seq <= last;
}

/* The rest of a half-written chunk is copied, so that the stream stays in step; should memory be
 * short, the lane is lost instead. */
static void detach_tx(struct r2_lane *lane, uint64_t conn, uint64_t first, uint64_t last)
{
    pthread_mutex_lock(&lane->tx_lock);
    if (!lane->closed && lane->tx_active && !lane->tx_released &&
        same(&lane->tx_chunk, conn, first, last)) {
        if (!lane->tx_priv && (lane->tx_priv = malloc(r2_settings_get()->chunk))) {
            lane->tx_priv_len = r2_settings_get()->chunk;
            r2_mem_more(lane->tx_priv_len);
        }
        if (lane->tx_priv) {
            memcpy(lane->tx_priv, lane->tx_data, lane->tx_chunk.len);
            lane->tx_data = lane->tx_priv;
        } else {
            shutdown(lane->io.fd, SHUT_RDWR);
            lane->tx_active = false;
        }
        lane->tx_released = true;
        r2_tcp.ev->chunk_sent(lane->ep->owner, lane->ep, &lane->tx_chunk);
    }
    pthread_mutex_unlock(&lane->tx_lock);
}

static int tcp_detach(struct r2_ep *ep, uint64_t conn, uint64_t first, uint64_t last, bool cleared)
{
    (void)cleared; /* no byte is placed but by our own threads */
    for (int i = 1; i < R2_TCP_MAX_LANES; i++) {
        struct r2_lane *lane = r2_ep_lane(ep, i);

        if (!lane)
            continue;
        pthread_mutex_lock(&lane->rx_lock);
        if (!lane->closed && lane->rx_state == R2_RX_BODY &&
            same(&lane->rx_chunk, conn, first, last)) {
            lane->rx_state = R2_RX_DRAIN;
            r2_tcp.ev->chunk_dropped(ep->owner, ep, &lane->rx_chunk, false);
        }
        pthread_mutex_unlock(&lane->rx_lock);
        detach_tx(lane, conn, first, last);
    }
    return 0;
}

static bool tcp_revoke(struct r2_ep *ep, unsigned index, const struct r2_bulk *chunk)
{
    struct r2_lane *lane = index && index < R2_TCP_MAX_LANES ? r2_ep_lane(ep, (int)index) : NULL;
    const struct r2_bulk *c = lane ? &lane->rx_chunk : NULL;
    bool mine;

    /* Its holder is inside a read, or waits in turn for the caller's lane: neither is waited for.
     */
    if (!lane || pthread_mutex_trylock(&lane->rx_lock))
        return false;
    mine = !lane->closed && lane->rx_state == R2_RX_BODY && !(c->flags & R2_BULK_COPY) &&
           c->conn == chunk->conn && c->seq == chunk->seq && c->offset == chunk->offset &&
           c->len == chunk->len;
    if (mine) {
        lane->rx_state = R2_RX_DRAIN;
        r2_tcp.ev->chunk_dropped(ep->owner, ep, c, false);
    }
    pthread_mutex_unlock(&lane->rx_lock);
    return mine;
}

static const struct r2_ep_params *tcp_params(const struct r2_ep *ep)
{
    return &ep->params;
}

static void tcp_nudge(struct r2_ep *ep)
{
    int nic = ep->params.local_nic;

    if (r2_tcp_broken(nic)) {
        r2_ep_fail(ep, ECONNRESET);
        return;
    }
    for (int i = 0; i < R2_TCP_MAX_LANES; i++) {
        struct r2_lane *lane = r2_ep_lane(ep, i);

        if (lane) {
            atomic_store(&lane->rx_again, true);
            r2_lane_kick(lane);
        }
    }
}

static bool tcp_rdma(int nic, struct r2_rdma_info *out)
{
    (void)nic, (void)out;
    return false;
}

static unsigned tcp_memory(int nic)
{
    (void)nic;
    return R2_MEMORY_HOST;
}

static int tcp_reg(const struct r2_memory *memory, struct r2_mr_keys **out)
{
    *out = NULL; /* sockets read and write any memory that threads can */
    return memory->device ? -EOPNOTSUPP : 0;
}

static int tcp_dereg(struct r2_mr_keys *keys, bool revoke)
{
    (void)keys, (void)revoke;
    return 0;
}

static int tcp_remote_keys(const struct r2_mr_keys *keys, uint32_t out[R2_WIRE_MAX_NICS])
{
    (void)keys, (void)out;
    return 0;
}

static bool tcp_registered(const struct r2_ep *ep, const struct r2_mr_keys *keys)
{
    (void)ep, (void)keys;
    return true;
}

static int tcp_flush_memory(int nic, const struct r2_mr_keys *keys, const void *at,
                            uint64_t *ticket)
{
    (void)nic, (void)keys, (void)at, (void)ticket;
    return -EOPNOTSUPP;
}

static int tcp_flushed(int nic, uint64_t ticket)
{
    (void)nic, (void)ticket;
    return -EOPNOTSUPP;
}

static void tcp_child(void)
{
    r2_io_child();
}

const struct r2_transport_ops r2_transport_tcp = {
    .name = "tcp",
    .memory = tcp_memory,
    .rdma = tcp_rdma,
    .start = tcp_start,
    .address = tcp_address,
    .second = tcp_second,
    .ports = tcp_ports,
    .left_out = tcp_left_out,
    .rebind = r2_tcp_rebind,
    .sockets = tcp_sockets,
    .connect = tcp_connect,
    .kick = r2_bulk_kick,
    .push = r2_bulk_push,
    .flush = tcp_flush,
    .flush_soon = tcp_flush_soon,
    .help = tcp_help,
    .shut = tcp_shut,
    .detach = tcp_detach,
    .revoke = tcp_revoke,
    .get = r2_ep_get,
    .put = r2_ep_put,
    .mark = r2_tcp_mark,
    .health = r2_tcp_health,
    .reached = r2_tcp_reached,
    .lanes = r2_bulk_lanes,
    .planned = r2_bulk_planned,
    .use = r2_bulk_use,
    .params = tcp_params,
    .nudge = tcp_nudge,
    .reg = tcp_reg,
    .dereg = tcp_dereg,
    .remote_keys = tcp_remote_keys,
    .registered = tcp_registered,
    .flush_memory = tcp_flush_memory,
    .flushed = tcp_flushed,
    .child = tcp_child,
};
