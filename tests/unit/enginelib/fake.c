#define _GNU_SOURCE
#define R2_ENGINELIB
#include "fake.h"

#include "../await.h"
#include "io/iothread.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct r2_transport_events *ev;
pthread_mutex_t fake_all_lock = PTHREAD_MUTEX_INITIALIZER;
struct r2_ep *fake_all;
unsigned fake_unregistered;
_Atomic uint8_t fake_offers;
atomic_uint fake_lanes = 4;
atomic_uint fake_plain;
atomic_uint fake_unreachable;
atomic_bool fake_revoked;
atomic_uint fake_flush_asked;

/* ---- time */

extern _Atomic uint64_t added_ns, frozen_ns; /* added_time.h */
atomic_int fake_held;

/* How far the clock may go at once: to the next timer. */
static uint64_t step_of(uint64_t left)
{
    if (atomic_load(&fake_held))
        return left < R2_NS_PER_MS ? left : R2_NS_PER_MS;
    for (int i = 0; i < r2_io_count(); i++) {
        uint64_t next = atomic_load(&r2_io_at(i)->next_deadline), now = r2_now_ns();

        if (next && next < now + left)
            left = next > now ? next - now : 1;
    }
    return left;
}

/* Looks twice: a thread may have given something to one that was looked at before. */
static bool all_rest(void)
{
    for (int i = 0; i < 2 * r2_io_count(); i++) {
        struct r2_io *io = r2_io_at(i);
        uint64_t next = atomic_load(&io->next_deadline);

        if (!atomic_load(&io->sleeping) || atomic_load(&io->pending) ||
            (next && next <= r2_now_ns()))
            return false;
    }
    return true;
}

static void settle(void)
{
    for (int i = 0; i < r2_io_count(); i++)
        r2_io_wake(r2_io_at(i));
    if (atomic_load(&fake_held))
        await_nap();
    for (int naps = 0; !all_rest() && !atomic_load(&fake_held); naps++) {
        CHECK_MSG(naps < 200000, "the engine's threads come to no rest");
        await_nap();
    }
}

/* The clock stands still while the threads get their cores. Afterwards it goes with the machine's
 * again, and is never behind it. */
void fake_pass_ms(int ms)
{
    uint64_t now = r2_now_ns(), until = now + (uint64_t)ms * R2_NS_PER_MS, machine;
    struct timespec ts;

    for (; now < until; now = atomic_load(&frozen_ns)) {
        atomic_store(&frozen_ns, now + step_of(until - now));
        settle();
    }
    await_nap(); /* for threads that know no engine's clock */
    clock_gettime(CLOCK_MONOTONIC, &ts);
    machine = (uint64_t)ts.tv_sec * R2_NS_PER_S + (uint64_t)ts.tv_nsec;
    atomic_store(&added_ns, now > machine ? now - machine : 0);
    atomic_store(&frozen_ns, 0);
}

static struct r2_ep *ep_new(const struct r2_ep_params *params)
{
    struct r2_ep *ep = calloc(1, sizeof(*ep));

    if (!ep)
        return NULL;
    ep->params = *params;
    atomic_init(&ep->refs, 2); /* the list's and the caller's */
    pthread_mutex_init(&ep->lock, NULL);
    return ep;
}

static void list(struct r2_ep *ep)
{
    pthread_mutex_lock(&fake_all_lock);
    ep->next = fake_all;
    fake_all = ep;
    pthread_mutex_unlock(&fake_all_lock);
}

static void op_get(struct r2_ep *ep)
{
    atomic_fetch_add(&ep->refs, 1);
}

static void op_put(struct r2_ep *ep)
{
    if (atomic_fetch_sub(&ep->refs, 1) != 1)
        return;
    if (ep->params.owner)
        ev->released(ep->params.owner, &ep->params);
    for (int i = 0; i < ep->n_frames; i++)
        free(ep->frames[i].body);
    free(ep->frames);
    free(ep->in);
    pthread_mutex_destroy(&ep->lock);
    free(ep);
}

/* ---- operations */

static int op_start(const struct r2_transport_events *events, const uint8_t process[16])
{
    (void)process;
    ev = events;
    return 0;
}

static int op_address(int nic, struct r2_wire_addr *out)
{
    *out = (struct r2_wire_addr){.family = 4,
                                 .offers = fake_plain >> nic & 1 ? 0 : fake_offers,
                                 .port = 4000,
                                 .ip = {127, 0, (uint8_t)(nic + 1), 1}};
    return 0;
}

static int op_rebind(int nic)
{
    (void)nic;
    return 0;
}

static unsigned op_sockets(void)
{
    return 0;
}

static int op_connect(const struct r2_ep_params *params, struct r2_ep **out)
{
    int rc = fake_policy_of(params->remote_process);
    struct r2_ep *ep;

    if (!rc && (atomic_load(&fake_unreachable) >> params->transport & 1))
        rc = -EHOSTUNREACH;
    if (rc) { /* as an endpoint that is let go of at once, but the caller holds its owner's lock */
        ev->released(params->owner, params);
        return rc;
    }
    ep = ep_new(params);
    if (!ep)
        return -ENOMEM;
    list(ep);
    *out = ep;
    return 0;
}

static void op_kick(struct r2_ep *ep, unsigned chunks, unsigned lanes)
{
    (void)lanes;
    atomic_fetch_add(&ep->kicks, (int)chunks);
}

static bool op_push(struct r2_ep *ep)
{
    (void)ep;
    return false;
}

static void op_nothing(struct r2_ep *ep)
{
    (void)ep;
}

static void op_flush(struct r2_ep *ep)
{
    atomic_fetch_add(&ep->flushes, 1);
}

static void op_flush_soon(struct r2_ep *ep, bool lone, bool data)
{
    (void)lone;
    (void)data;
    op_flush(ep);
}

static bool op_help(struct r2_ep *ep)
{
    (void)ep;
    return false;
}

static void drop_held(struct r2_ep *ep, uint64_t conn, bool any)
{
    for (int i = 0; i < ep->n_rx;) {
        struct r2_bulk b = ep->rx[i];

        if (!any && b.conn != conn) {
            i++;
            continue;
        }
        ep->rx[i] = ep->rx[--ep->n_rx];
        ev->chunk_dropped(ep->params.owner, ep, &b, false);
    }
    for (int i = 0; i < ep->n_tx;) {
        struct r2_bulk b = ep->tx[i];

        if (!any && b.conn != conn) {
            i++;
            continue;
        }
        ep->tx[i] = ep->tx[--ep->n_tx];
        ev->chunk_sent(ep->params.owner, ep, &b);
    }
}

static int op_shut(struct r2_ep *ep)
{
    if (atomic_load(&ep->unconfirmed)) {
        atomic_fetch_add(&ep->waiting, 1);
        return -EINPROGRESS;
    }
    atomic_fetch_add(&fake_held, 1);
    atomic_fetch_add(&ep->waiting, 1);
    WHILE_MS (5000, atomic_load(&ep->hold_shut))
        ;
    atomic_fetch_sub(&fake_held, 1);
    pthread_mutex_lock(&ep->lock);
    ep->dead = true;
    drop_held(ep, 0, true);
    pthread_mutex_unlock(&ep->lock);
    atomic_store(&ep->is_shut, true);
    return 0;
}

static bool op_revoke(struct r2_ep *ep, unsigned lane, const struct r2_bulk *chunk)
{
    struct r2_bulk held = *chunk;
    bool mine;

    held.flags &= ~R2_BULK_COPY;
    if (lane != 1 || atomic_load(&ep->reading) || pthread_mutex_trylock(&ep->lock))
        return false;
    if ((mine = !ep->dead && unhold(ep->rx, &ep->n_rx, &held)))
        ev->chunk_dropped(ep->params.owner, ep, &held, false);
    pthread_mutex_unlock(&ep->lock);
    return mine;
}

static int op_detach(struct r2_ep *ep, uint64_t conn, uint64_t first, uint64_t last, bool cleared)
{
    atomic_store(&ep->cleared, cleared);
    pthread_mutex_lock(&ep->lock);
    if (!ep->dead && first <= last)
        drop_held(ep, conn, false);
    pthread_mutex_unlock(&ep->lock);
    atomic_fetch_add(&ep->detached, 1);
    return 0;
}

static void op_health(struct r2_ep *ep, struct r2_ep_health *out)
{
    int ms = atomic_load(&ep->health_ms);

    memset(out, 0, sizeof(*out));
    atomic_fetch_add(atomic_load(&frozen_ns) ? &frozen_ns : &added_ns, (uint64_t)ms * R2_NS_PER_MS);
    atomic_fetch_add(&ep->asked, 1);
    out->rtt_ns = (uint64_t)atomic_load(&ep->rtt_us) * 1000;
    out->segments = (uint64_t)atomic_load(&ep->segments);
    out->retransmits = (uint64_t)atomic_load(&ep->retransmits);
    out->answered = ep->params.probe ? atomic_load(&ep->connected) : !atomic_load(&ep->silent);
}

static bool op_reached(struct r2_ep *ep)
{
    return atomic_load(&ep->connected);
}

static unsigned op_lanes(struct r2_ep *ep)
{
    (void)ep;
    return atomic_load(&fake_lanes);
}

static const struct r2_ep_params *op_params(const struct r2_ep *ep)
{
    return &ep->params;
}

static bool op_rdma(int nic, struct r2_rdma_info *out)
{
    (void)out;
    return fake_offers && !(fake_plain >> nic & 1);
}

static int op_ports(const struct r2_nic *nics, int n, struct r2_nic *out, uint64_t *seed, int max)
{
    (void)nics, (void)n, (void)out, (void)seed, (void)max;
    return 0;
}

static bool op_left_out(const char *device)
{
    (void)device;
    return false;
}

static unsigned op_memory(int nic)
{
    (void)nic;
    return R2_MEMORY_HOST;
}

static int op_reg(const struct r2_memory *memory, struct r2_mr_keys **out)
{
    /* Only compared, never looked into. */
    *out = fake_offers ? (struct r2_mr_keys *)memory->data : NULL;
    return 0;
}

static int op_dereg(struct r2_mr_keys *keys, bool revoke)
{
    (void)keys;
    atomic_store(&fake_revoked, revoke);
    return 0;
}

static int op_remote_keys(const struct r2_mr_keys *keys, uint32_t out[R2_WIRE_MAX_NICS])
{
    (void)keys;
    for (int i = 0; i < r2_local.n; i++)
        out[i] = fake_key(i);
    return r2_local.n;
}

static bool op_registered(const struct r2_ep *ep, const struct r2_mr_keys *keys)
{
    return ep->params.transport == R2_VIA_TCP ||
           (keys && !(fake_unregistered >> ep->params.local_nic & 1));
}

static int op_flush_memory(int nic, const struct r2_mr_keys *keys, const void *at, uint64_t *ticket)
{
    (void)keys, (void)at, (void)ticket;
    atomic_fetch_or(&fake_flush_asked, 1u << nic);
    return 0;
}

static int op_flushed(int nic, uint64_t ticket)
{
    (void)nic, (void)ticket;
    return 1;
}

static void op_child(void) {}

const struct r2_transport_ops fake_ops = {
    .name = "fake",
    .memory = op_memory,
    .rdma = op_rdma,
    .ports = op_ports,
    .left_out = op_left_out,
    .start = op_start,
    .address = op_address,
    .rebind = op_rebind,
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
    .get = op_get,
    .put = op_put,
    .mark = op_nothing,
    .health = op_health,
    .reached = op_reached,
    .lanes = op_lanes,
    .planned = op_lanes,
    .params = op_params,
    .nudge = op_nothing,
    .reg = op_reg,
    .dereg = op_dereg,
    .remote_keys = op_remote_keys,
    .registered = op_registered,
    .flush_memory = op_flush_memory,
    .flushed = op_flushed,
    .child = op_child,
};

/* ---- endpoints */

static bool is_of(const struct r2_ep *ep, const uint8_t process[16])
{
    return memcmp(ep->params.remote_process, process, 16) == 0;
}

struct r2_ep *fake_accept(const uint8_t process[16], int lnic, int rnic, uint32_t gen)
{
    struct r2_ep_params params = {.local_nic = (uint8_t)lnic,
                                  .remote_nic = (uint8_t)rnic,
                                  .transport = fake_offers & (R2_OFFER_ROCE | R2_OFFER_INFINIBAND)
                                                   ? R2_VIA_VERBS
                                                   : R2_VIA_TCP,
                                  .gen = gen};
    struct r2_ep *ep;

    memcpy(params.local_process, r2_eng.process, 16);
    memcpy(params.remote_process, process, 16);
    memcpy(params.secret, r2_eng.secret, 16);
    ep = ep_new(&params);
    if (!ep)
        return NULL;
    ep->params.owner = ev->accepted(ep, &params);
    if (!ep->params.owner) {
        op_put(ep);
        op_put(ep);
        return NULL;
    }
    list(ep);
    op_put(ep);
    return ep;
}

void fake_forget(const uint8_t process[16])
{
    struct r2_ep **link, *mine = NULL;

    fake_policy(process, -EHOSTUNREACH);
    pthread_mutex_lock(&fake_all_lock);
    for (link = &fake_all; *link;) {
        struct r2_ep *e = *link;

        if (is_of(e, process)) {
            *link = e->next;
            e->next = mine;
            mine = e;
        } else {
            link = &e->next;
        }
    }
    pthread_mutex_unlock(&fake_all_lock);
    while (mine) {
        struct r2_ep *e = mine;

        mine = e->next;
        atomic_store(&e->hold_shut, false);
        fake_fail(e, ECONNRESET, false);
        op_put(e);
    }
}

/* ---- upcalls */

bool fake_up(struct r2_ep *ep)
{
    bool ok;

    pthread_mutex_lock(&ep->lock);
    ok = !ep->dead;
    if (ok)
        ev->up(ep->params.owner, ep);
    pthread_mutex_unlock(&ep->lock);
    return ok;
}

void fake_shut_over(struct r2_ep *ep)
{
    atomic_store(&ep->unconfirmed, false);
    ev->shut_over(ep->params.owner, ep);
}

bool fake_alone(struct r2_ep *ep)
{
    return ev->alone(ep->params.owner, ep);
}

void fake_fail(struct r2_ep *ep, int err, bool refused)
{
    struct r2_ep_health h = {.refused = refused,
                             .other_process = err == ESRCH,
                             .there = err == ESTALE || atomic_load(&ep->there),
                             .given_up = atomic_load(&ep->given_up)};

    /* Once, as transports do: the engine may not have come to the first word yet. */
    if (!atomic_load(&ep->is_shut) && !atomic_exchange(&ep->failed, true))
        ev->failed(ep->params.owner, ep, err, &h);
}

int fake_ctrl(struct r2_ep *ep, uint8_t type, const void *body, size_t len)
{
    int rc = -EPIPE;

    pthread_mutex_lock(&ep->lock);
    if (!ep->dead) {
        rc = ev->ctrl(ep->params.owner, ep, type, body, len);
        ev->burst_end(ep->params.owner, ep);
    }
    pthread_mutex_unlock(&ep->lock);
    return rc;
}

bool fake_next(struct r2_ep *ep, struct r2_bulk *bulk)
{
    bool ok = false;

    pthread_mutex_lock(&ep->lock);
    bulk->lane = (uint16_t)(ep->turn++ % (ep->asking ? ep->asking : 4));
    if (!ep->dead && ep->n_tx < FAKE_HELD && ev->next_chunk(ep->params.owner, ep, bulk)) {
        ep->tx[ep->n_tx++] = *bulk;
        ok = true;
    }
    pthread_mutex_unlock(&ep->lock);
    return ok;
}

bool fake_chunk_sent(struct r2_ep *ep, const struct r2_bulk *bulk)
{
    bool ok;

    pthread_mutex_lock(&ep->lock);
    ok = !ep->dead && unhold(ep->tx, &ep->n_tx, bulk);
    if (ok)
        ev->chunk_sent(ep->params.owner, ep, bulk);
    pthread_mutex_unlock(&ep->lock);
    return ok;
}

int fake_claim(struct r2_ep *ep, struct r2_bulk *bulk)
{
    int rc = -EPIPE;

    pthread_mutex_lock(&ep->lock);
    if (!ep->dead && ep->n_rx < FAKE_HELD) {
        rc = ev->chunk_claim(ep->params.owner, ep, bulk, 1);
        if (rc == 0)
            ep->rx[ep->n_rx++] = *bulk;
    }
    pthread_mutex_unlock(&ep->lock);
    return rc;
}

bool fake_done(struct r2_ep *ep, const struct r2_bulk *bulk)
{
    bool ok;

    pthread_mutex_lock(&ep->lock);
    ok = !ep->dead && unhold(ep->rx, &ep->n_rx, bulk);
    if (ok)
        ev->chunk_done(ep->params.owner, ep, bulk);
    pthread_mutex_unlock(&ep->lock);
    if (ok)
        ev->burst_end(ep->params.owner, ep);
    return ok;
}

bool fake_dropped(struct r2_ep *ep, const struct r2_bulk *bulk, bool bad_crc)
{
    bool ok;

    pthread_mutex_lock(&ep->lock);
    ok = !ep->dead && unhold(ep->rx, &ep->n_rx, bulk);
    if (ok)
        ev->chunk_dropped(ep->params.owner, ep, bulk, bad_crc);
    pthread_mutex_unlock(&ep->lock);
    return ok;
}

/* ---- what the engine says */

static void *grow(void *p, size_t size)
{
    void *q = realloc(p, size);

    if (!q)
        abort();
    return q;
}

static void take_frames(struct r2_ep *ep)
{
    size_t off = 0;

    while (ep->in_len - off >= sizeof(struct r2_frame)) {
        struct r2_frame f;
        struct fake_frame *out;

        memcpy(&f, ep->in + off, sizeof(f));
        if (ep->in_len - off < sizeof(f) + f.len)
            break;
        if (f.version != R2_WIRE_VERSION ||
            r2_wire_check(f.type, ep->in + off + sizeof(f), f.len)) {
            fprintf(stderr, "the engine sent a bad frame: type %u length %u\n", f.type, f.len);
            abort();
        }
        ep->frames = grow(ep->frames, (size_t)(ep->n_frames + 1) * sizeof(*ep->frames));
        out = &ep->frames[ep->n_frames++];
        *out = (struct fake_frame){.type = f.type, .len = f.len, .body = grow(NULL, f.len + 1u)};
        memcpy(out->body, ep->in + off + sizeof(f), f.len);
        off += sizeof(f) + f.len;
    }
    memmove(ep->in, ep->in + off, ep->in_len - off);
    ep->in_len -= off;
}

void fake_sent(struct r2_ep *ep)
{
    pthread_mutex_lock(&ep->lock);
    if (!ep->dead)
        ev->ctrl_sent(ep->params.owner, ep, ep->pulled);
    pthread_mutex_unlock(&ep->lock);
}

void fake_pull(struct r2_ep *ep)
{
    size_t n;

    pthread_mutex_lock(&ep->lock);
    while (!ep->dead) {
        ep->in = grow(ep->in, ep->in_len + 16384);
        n = ev->next_ctrl(ep->params.owner, ep, ep->in + ep->in_len, 16384);
        if (!n)
            break;
        ep->in_len += n;
        ep->pulled += n;
    }
    pthread_mutex_unlock(&ep->lock);
    if (ep->in_len)
        take_frames(ep);
    if (!ep->manual_sent)
        fake_sent(ep);
}
