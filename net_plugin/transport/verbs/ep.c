/* Endpoints: made, driven, let go of; and the transport's table. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "io/fault.h"
#include "settings/settings.h"
#include "topology/local.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"

struct r2_verbs r2_verbs = {.lock = PTHREAD_MUTEX_INITIALIZER,
                            .hca_lock = PTHREAD_MUTEX_INITIALIZER,
                            .nics = {[0 ... R2_MAX_NICS - 1] = {.slot = -1}}};

#define WAIT_STEP_NS (200 * 1000)
#define LET_GO_NS (UINT64_C(50) * 1000000) /* for chunks to complete before the path is ended */

static void task_run(struct r2_task *t)
{
    struct r2_ep *ep = R2_CONTAINER_OF(t, struct r2_ep, task);
    bool reap;

    if (!atomic_load(&ep->open))
        r2_meet_event(ep);
    pthread_mutex_lock(&ep->lock);
    reap = ep->reap;
    ep->reap = false;
    pthread_mutex_unlock(&ep->lock);
    /* What it was kicked for, unless somebody has done it meanwhile; r2_vep_unlock would kick anew.
     */
    r2_vep_run(ep, 0);
    if (reap) {
        pthread_mutex_lock(&r2_verbs.lock); /* watch has set it then (meet.c) */
        r2_timer_set(&ep->timer, 0);
        pthread_mutex_unlock(&r2_verbs.lock);
        r2_vep_put(ep);
    }
    r2_vep_put(ep); /* the queued task's */
}

static void timer_fire(struct r2_timer *t, uint64_t now)
{
    struct r2_ep *ep = R2_CONTAINER_OF(t, struct r2_ep, timer);

    (void)now;
    if (!atomic_load(&ep->open) && !atomic_load(&ep->dead))
        r2_vep_fail(ep, ETIMEDOUT);
    else
        r2_vep_run(ep, R2_WANT_ALL);
}

struct r2_ep *r2_vep_new(const struct r2_ep_params *params)
{
    struct r2_ep *ep = calloc(1, sizeof(*ep));

    if (!ep)
        return NULL;
    ep->rx_buf = malloc(R2_WIRE_MAX_BODY + sizeof(struct r2_frame) + R2_CTRL_SLOT);
    if (!ep->rx_buf) {
        free(ep);
        return NULL;
    }
    ep->fails = atomic_load(&r2_verbs.fails);
    ep->head.ops = &r2_transport_verbs;
    ep->params = *params;
    ep->owner = params->owner;
    ep->nic = &r2_verbs.nics[params->local_nic];
    ep->hca = r2_vnic_use(ep->nic);
    ep->port = ep->nic->port;
    ep->oob.fd = ep->events.fd = -1;
    atomic_init(&ep->refs, 1);
    r2_lock_init(&ep->lock);
    ep->io = r2_io_pick();
    r2_task_init(&ep->task, ep->io, task_run);
    r2_timer_init(&ep->timer, ep->io, timer_fire);
    ep->build.run = r2_meet_build;
    ep->link.run = r2_meet_link;
    ep->end.run = r2_fence_end;
    ep->destroy.run = r2_fence_destroy;
    r2_list_init(&ep->node);
    return ep;
}

void r2_vep_get(struct r2_ep *ep)
{
    atomic_fetch_add_explicit(&ep->refs, 1, memory_order_relaxed);
}

void r2_vep_put(struct r2_ep *ep)
{
    int refs = atomic_load_explicit(&ep->refs, memory_order_relaxed);
    bool last;

    while (refs > 1) {
        if (atomic_compare_exchange_weak_explicit(&ep->refs, &refs, refs - 1, memory_order_release,
                                                  memory_order_relaxed))
            return;
    }
    /* Under the list's lock, so that whoever finds it there finds a reference, too. acq_rel: what
     * other holders did to the endpoint happens before it is freed. */
    pthread_mutex_lock(&r2_verbs.lock);
    last = atomic_fetch_sub_explicit(&ep->refs, 1, memory_order_acq_rel) == 1;
    if (last)
        r2_list_del(&ep->node);
    pthread_mutex_unlock(&r2_verbs.lock);
    if (!last)
        return;
    if (ep->owner)
        r2_verbs.ev->released(ep->owner, &ep->params);
    if (ep->hca)
        r2_hca_unuse(ep->hca);
    pthread_mutex_destroy(&ep->lock);
    free(ep->rx_buf);
    free(ep->tx);
    free(ep);
}

void r2_vep_fail(struct r2_ep *ep, int err)
{
    struct r2_ep_health health = {0};
    const char *cause;
    void *owner;

    if (atomic_exchange(&ep->failed, true) || atomic_load(&ep->dead))
        return;
    pthread_mutex_lock(&ep->lock);
    owner = ep->owner;
    cause = ep->cause;
    if (!owner) /* nobody else will end it */
        r2_fence_begin(ep);
    r2_vep_unlock(ep);
    R2_TRACE("verbs endpoint to NIC %u generation %u: %s at stage %d", ep->params.remote_nic,
             ep->params.gen, strerror(err), (int)ep->stage);
    health.cause = cause;
    if (ep->hca && atomic_load(&ep->hca->gone))
        health.cause = "its RDMA device failed or was removed";
    health.refused = atomic_load(&ep->refused);
    health.other_process = atomic_load(&ep->other_process);
    health.there = atomic_load(&ep->there);
    if (owner)
        r2_verbs.ev->failed(owner, ep, err, &health);
}

static bool broken(int nic)
{
    return !r2_fault_none(nic) && (r2_fault_is(nic, R2_SEG_FAULT_ERROR, R2_FAULT_TX) ||
                                   r2_fault_is(nic, R2_SEG_FAULT_ERROR, R2_FAULT_RX));
}

/* One, because it is armed once for each: another look would be a system call in vain. What came
 * before it is armed again is polled afterwards. */
static void take_event(struct r2_ep *ep)
{
    struct ibv_cq *cq;
    void *arg;

    if (ep->fence >= R2_FENCE_KILL || !ep->channel || r2_ibv.get_cq_event(ep->channel, &cq, &arg))
        return;
    r2_ibv.ack_cq_events(ep->cq, 1);
    ibv_req_notify_cq(ep->cq, 0);
}

/* What arrives leads to frames and chunks, which are asked for meanwhile. */
static int pump(struct r2_ep *ep, unsigned want)
{
    const unsigned out = R2_WANT_CTRL | R2_WANT_BULK | R2_WANT_BEAT;
    int rc = 0;

    if (want & R2_WANT_EVENT)
        take_event(ep);
    if (ep->fence == R2_FENCE_DRAIN) {
        r2_fence_poll(ep);
        return 0;
    }
    if (!atomic_load(&ep->open) || atomic_load(&ep->failed) || atomic_load(&ep->dead))
        return 0;
    if (broken(ep->params.local_nic))
        return -ECONNRESET;
    if (want & R2_WANT_POLL)
        rc = r2_data_poll(ep);
    if (atomic_load(&ep->want) & out)
        want |= atomic_fetch_and(&ep->want, ~out);
    if (rc == 0 && ((want & R2_WANT_CTRL) || ep->ctrl_waits))
        rc = r2_data_ctrl(ep);
    if (rc == 0 && (want & R2_WANT_BEAT))
        rc = r2_data_beat(ep);
    if (rc == 0 && ((want & R2_WANT_BULK) || ep->bulk_waits))
        rc = r2_data_bulk(ep);
    return rc;
}

/* What is wanted, seen by somebody who has just let go of the lock. Who finds it taken has written
 * `want` before. Both are read-modify-write operations, so one comes after the other: either this
 * one sees that bit, or the other's reads what this one wrote and, both being acquire and release,
 * finds the lock free. A load here would not do: nothing keeps it behind the unlock. */
static unsigned wanted(struct r2_ep *ep)
{
    return atomic_fetch_or_explicit(&ep->want, 0, memory_order_acq_rel);
}

/* With the lock, which it lets go of. */
static void run_locked(struct r2_ep *ep)
{
    int rc;

    do {
        rc = pump(ep, atomic_exchange(&ep->want, 0));
        pthread_mutex_unlock(&ep->lock);
    } while (rc == 0 && wanted(ep) && !pthread_mutex_trylock(&ep->lock));
    if (rc < 0)
        r2_vep_fail(ep, -rc);
}

void r2_vep_run(struct r2_ep *ep, unsigned want)
{
    if (want)
        atomic_fetch_or_explicit(&ep->want, want, memory_order_acq_rel);
    else if (!wanted(ep))
        return;
    if (!pthread_mutex_trylock(&ep->lock))
        run_locked(ep);
}

void r2_vep_unlock(struct r2_ep *ep)
{
    pthread_mutex_unlock(&ep->lock);
    if (wanted(ep))
        r2_vep_kick(ep, 0);
}

void r2_vep_kick(struct r2_ep *ep, unsigned want)
{
    atomic_fetch_or(&ep->want, want);
    r2_vep_get(ep);
    if (!r2_task_kick(&ep->task))
        r2_vep_put(ep);
}

void r2_vep_post(struct r2_ep *ep, struct r2_cmd *cmd)
{
    ep->commands++;
    r2_vep_get(ep);
    r2_cmd_post(ep->hca, cmd);
}

void r2_vep_posted(struct r2_ep *ep)
{
    pthread_mutex_lock(&ep->lock);
    ep->commands--;
    r2_vep_unlock(ep);
    r2_vep_put(ep);
}

/* Whoever has the lock takes the event: this one waits for nobody (r2_io_lend). */
static void events_ready(struct r2_io_fd *f, uint32_t events)
{
    (void)events;
    r2_vep_run(R2_CONTAINER_OF(f, struct r2_ep, events), R2_WANT_EVENT | R2_WANT_POLL);
}

int r2_vep_watch(struct r2_ep *ep)
{
    int rc = -ESHUTDOWN;

    pthread_mutex_lock(&ep->lock);
    if (ep->fence == R2_FENCE_NONE) { /* else nobody might take it out again */
        ep->events.fd = ep->channel->fd;
        ep->events.ready = events_ready;
        ep->events.reads = ep->events.brief = true;
        rc = r2_io_add(ep->io, &ep->events);
    }
    r2_vep_unlock(ep);
    return rc;
}

void r2_vep_retire(struct r2_ep *ep)
{
    r2_meet_close(ep);
    if (ep->events.fd >= 0) {
        r2_io_del(&ep->events);
        ep->events.fd = -1;
    }
    /* A command that is under way (the device was removed) may be making them just now: destroyed
     * behind it. */
    if (ep->commands || ep->memory || ep->channel) {
        r2_vep_post(ep, &ep->destroy);
        return;
    }
    ep->reap = true;
    r2_vep_kick(ep, R2_WANT_POLL);
}

/* ---- operations */

static int op_start(const struct r2_transport_events *events, const uint8_t process[16])
{
    int rc = r2_verbs_prepare();

    r2_verbs.ev = events;
    memcpy(r2_verbs.process, process, 16);
    r2_list_init(&r2_verbs.eps);
    if (rc)
        return rc;
    for (int i = 0; i < R2_MAX_NICS; i++) {
        if (r2_verbs.nics[i].slot >= 0)
            r2_vflush_start(&r2_verbs.nics[i]);
    }
    r2_hcas_watch(); /* behind that: a port's event looks at its flush */
    r2_tcp_verbs_taker = r2_meet_accepted;
    return 0;
}

static int op_address(int nic, struct r2_wire_addr *out)
{
    struct r2_vnic *v = nic >= 0 && nic < R2_MAX_NICS ? &r2_verbs.nics[nic] : NULL;

    /* Offered while its device is away, too: peers that come meanwhile try until it is back. */
    if (!v || v->slot < 0)
        return -ENODEV;
    memset(out, 0, sizeof(*out));
    pthread_mutex_lock(&v->lock);
    out->offers = v->link == IBV_LINK_LAYER_ETHERNET ? R2_OFFER_ROCE : R2_OFFER_INFINIBAND;
    pthread_mutex_unlock(&v->lock);
    return 0;
}

static unsigned op_sockets(void)
{
    unsigned n = 0;
    int nics;

    nics = r2_local.n;
    for (int i = 0; i < nics; i++)
        n += (unsigned)atomic_load(&r2_verbs.nics[i].qps);
    return n;
}

static int op_connect(const struct r2_ep_params *params, struct r2_ep **out)
{
    struct r2_vnic *v = &r2_verbs.nics[params->local_nic];
    struct r2_ep *ep = r2_vep_new(params);
    bool active;
    int rc;

    if (!ep) {
        r2_verbs.ev->released(params->owner, params);
        return -ENOMEM;
    }
    pthread_mutex_lock(&v->lock);
    active = v->active;
    pthread_mutex_unlock(&v->lock);
    rc = !ep->hca                ? -ENODEV
         : !active               ? -ENETDOWN
         : r2_cmd_stuck(ep->hca) ? -EBUSY
                                 : r2_meet_dial(ep);
    if (rc) { /* the owner is told by `released` */
        r2_vep_put(ep);
        return rc;
    }
    *out = ep;
    return 0;
}

static void op_kick(struct r2_ep *ep, unsigned chunks, unsigned lanes)
{
    (void)chunks, (void)lanes;
    r2_vep_kick(ep, R2_WANT_BULK);
}

static bool op_push(struct r2_ep *ep)
{
    if (!atomic_load(&ep->open))
        return false;
    r2_vep_run(ep, R2_WANT_BULK);
    return true;
}

static void op_flush(struct r2_ep *ep)
{
    r2_vep_run(ep, R2_WANT_CTRL);
}

/* To post a frame costs less than to hand it over. */
static void op_flush_soon(struct r2_ep *ep, bool lone, bool data)
{
    bool now = lone || (data && r2_settings_get()->buffered);

    if (r2_io_awake(ep->io) && !now)
        r2_vep_kick(ep, R2_WANT_CTRL);
    else
        r2_vep_run(ep, R2_WANT_CTRL);
}

static bool op_help(struct r2_ep *ep)
{
    if (r2_io_awake(ep->io))
        return false;
    if (atomic_load(&ep->open))
        r2_vep_run(ep, R2_WANT_POLL);
    return true;
}

static int op_shut(struct r2_ep *ep)
{
    int rc;

    pthread_mutex_lock(&ep->lock);
    r2_fence_begin(ep);
    rc = ep->fence == R2_FENCE_DONE || r2_fence_idle(ep) ? 0 : -EINPROGRESS;
    r2_vep_unlock(ep);
    return rc;
}

static bool reads(const struct r2_ep *ep, uint64_t conn, uint64_t first, uint64_t last)
{
    /* Before it is open it is the command thread's, and no chunk has been taken. */
    if (!atomic_load(&ep->open))
        return false;
    if (ep->has_held && ep->held.conn == conn)
        return true;
    for (int q = 0; q < ep->n_bulk && ep->tx; q++) {
        const struct r2_vqp *v = &ep->bulk[q];

        for (uint32_t s = v->tx_done; s != v->tx_posted; s++) {
            const struct r2_bulk *b = &ep->tx[q * R2_BULK_TX + (int)(s % R2_BULK_TX)];

            if (b->conn == conn && b->seq >= first && b->seq <= last)
                return true;
        }
    }
    return false;
}

/* Nothing of a one-sided transport is sent twice unfenced, so nobody asks. */
static bool op_revoke(struct r2_ep *ep, unsigned lane, const struct r2_bulk *chunk)
{
    (void)ep;
    (void)lane;
    (void)chunk;
    return false;
}

/* Memory is taken back from a peer that may write there. All endpoints that it can write by are
 * fenced at once: the wait takes no longer than for the slowest. */
static void fence_peer(const struct r2_ep *of)
{
    struct r2_ep *eps[R2_MAX_NICS * R2_MAX_NICS];
    struct r2_list *n;
    int count = 0;

    pthread_mutex_lock(&r2_verbs.lock);
    R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
        struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

        if (ep->params.initiator ||
            memcmp(ep->params.remote_process, of->params.remote_process, 16))
            continue;
        r2_vep_get(ep);
        eps[count++] = ep;
        if (count == (int)(sizeof(eps) / sizeof(eps[0])))
            break; /* the others are found one by one */
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    for (int i = 0; i < count; i++) {
        pthread_mutex_lock(&eps[i]->lock);
        eps[i]->on_purpose = true;
        r2_vep_unlock(eps[i]);
        r2_vep_fail(eps[i], ECANCELED);
        op_shut(eps[i]);
        r2_vep_put(eps[i]);
    }
}

/* Chunks that are with the NIC come to their end by themselves, or the endpoint is fenced. Where
 * the peer may write at any moment (`cleared`) only the fence helps. */
static int op_detach(struct r2_ep *ep, uint64_t conn, uint64_t first, uint64_t last, bool cleared)
{
    uint64_t begin = r2_now_ns(), now = begin, since = begin;
    bool fence = cleared && !ep->params.initiator, done = false;

    if (fence && !atomic_load(&ep->dead))
        fence_peer(ep);
    do {
        struct timespec step = {.tv_nsec = WAIT_STEP_NS};

        pthread_mutex_lock(&ep->lock);
        since = ep->fence_at ? ep->fence_at : begin;
        if (ep->has_held && ep->held.conn == conn && ep->fence == R2_FENCE_NONE) {
            ep->has_held = false; /* not with the NIC yet */
            ep->held.unsent = ep->held.len;
            r2_verbs.ev->chunk_sent(ep->owner, ep, &ep->held);
        }
        done = ep->fence == R2_FENCE_DONE || (!fence && !reads(ep, conn, first, last));
        fence |= now - begin > LET_GO_NS;
        r2_vep_unlock(ep);
        if (done)
            break;
        if (fence) {
            r2_vep_fail(ep, ECANCELED);
            op_shut(ep);
        }
        r2_vep_run(ep, R2_WANT_ALL);
        nanosleep(&step, NULL);
        now = r2_now_ns();
    } while (now - since < R2_VERBS_FENCE_NS);
    return done ? 0 : -ETIMEDOUT;
}

static void op_mark(struct r2_ep *ep)
{
    atomic_fetch_add(&ep->marked, 1);
    r2_vep_kick(ep, R2_WANT_BEAT);
    r2_hcas_glance();
}

static void op_health(struct r2_ep *ep, struct r2_ep_health *out)
{
    int nic = ep->params.local_nic;

    memset(out, 0, sizeof(*out));
    r2_vep_run(ep, R2_WANT_POLL); /* drain what came before judging */
    pthread_mutex_lock(&ep->lock);
    out->answered = ep->beat_done == atomic_load(&ep->marked);
    out->rtt_ns = ep->rtt_ns;
    r2_vep_unlock(ep);
    if (r2_fault_is(nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX) ||
        r2_fault_is(nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_RX))
        out->answered = false; /* the NIC does not know of the injected hole */
}

static unsigned op_lanes(struct r2_ep *ep)
{
    return atomic_load(&ep->open) ? (unsigned)ep->n_bulk : 0;
}

static unsigned op_planned(struct r2_ep *ep)
{
    return (unsigned)ep->n_bulk;
}

static const struct r2_ep_params *op_params(const struct r2_ep *ep)
{
    return &ep->params;
}

static void op_nudge(struct r2_ep *ep)
{
    r2_vep_kick(ep, R2_WANT_ALL);
}

/* The kernel keeps the parent's mappings out of the child (MADV_DONTFORK); the descriptors are
 * closed with the others. */
static void op_child(void) {}

const struct r2_transport_ops r2_transport_verbs = {
    .name = "verbs",
    .start = op_start,
    .address = op_address,
    .rebind = r2_vnic_rebind,
    .sockets = op_sockets,
    .connect = op_connect,
    .kick = op_kick,
    .push = op_push,
    .flush = op_flush,
    .flush_soon = op_flush_soon,
    .help = op_help,
    .shut = op_shut,
    .detach = op_detach,
    .revoke = op_revoke,
    .get = r2_vep_get,
    .put = r2_vep_put,
    .mark = op_mark,
    .health = op_health,
    .reached = r2_meet_reached,
    .lanes = op_lanes,
    .planned = op_planned,
    .params = op_params,
    .nudge = op_nudge,
    .memory = r2_verbs_memory,
    .rdma = r2_verbs_rdma,
    .ports = r2_verbs_ports,
    .left_out = r2_verbs_left_out,
    .reg = r2_verbs_reg,
    .dereg = r2_verbs_dereg,
    .remote_keys = r2_verbs_remote_keys,
    .registered = r2_verbs_registered,
    .flush_memory = r2_verbs_flush_memory,
    .flushed = r2_verbs_flushed,
    .child = op_child,
};
