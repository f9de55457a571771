/* All transports side by side behind one table: each endpoint belongs to one of them.
 *
 * Which of them connects two NICs is the engine's choice (r2_ep_params.transport,
 * engine/loop/maintain.c): queue pairs where both ends offer them, sockets elsewhere and as the
 * last resort. Sockets are always there, and their listeners are where queue pairs are agreed on.
 * Verbs may be missing altogether: not built, no library, no device; then nothing here offers them.
 */
#include <errno.h>
#include <string.h>

#include "transport/transport.h"
#include "util/log.h"

static const struct r2_transport_ops *const via[R2_VIA_COUNT] = {
    [R2_VIA_TCP] = &r2_transport_tcp,
#ifdef R2_HAVE_VERBS
    [R2_VIA_VERBS] = &r2_transport_verbs,
#endif
};
static bool started[R2_VIA_COUNT];

static const struct r2_transport_ops *of(const struct r2_ep *ep)
{
    return ((const struct r2_ep_head *)(const void *)ep)->ops;
}

static const struct r2_transport_ops *verbs(void)
{
    return started[R2_VIA_VERBS] ? via[R2_VIA_VERBS] : NULL;
}

static int mux_start(const struct r2_transport_events *events, const uint8_t process[16])
{
    int rc;

    if (via[R2_VIA_VERBS]) {
        rc = via[R2_VIA_VERBS]->start(events, process);
        started[R2_VIA_VERBS] = rc == 0;
        if (rc && rc != -ENODEV)
            R2_WARN("no RDMA: %s; the NICs are used by sockets", strerror(-rc));
    }
    rc = via[R2_VIA_TCP]->start(events, process);
    started[R2_VIA_TCP] = rc == 0;
    return rc;
}

static int mux_second(int nic, struct r2_wire_addr *out)
{
    return via[R2_VIA_TCP]->second(nic, out);
}

static int mux_address(int nic, struct r2_wire_addr *out)
{
    struct r2_wire_addr more;
    int rc = via[R2_VIA_TCP]->address(nic, out);

    if (rc == 0 && verbs() && verbs()->address(nic, &more) == 0)
        out->offers |= more.offers;
    return rc;
}

static int mux_rebind(int nic)
{
    int rc = via[R2_VIA_TCP]->rebind(nic);

    if (verbs())
        verbs()->rebind(nic);
    return rc;
}

static unsigned mux_sockets(void)
{
    unsigned n = via[R2_VIA_TCP]->sockets();

    return verbs() ? n + verbs()->sockets() : n;
}

static int mux_ports(const struct r2_nic *nics, int n, struct r2_nic *out, uint64_t *seed, int max)
{
    return via[R2_VIA_VERBS] ? via[R2_VIA_VERBS]->ports(nics, n, out, seed, max) : 0;
}

static bool mux_left_out(const char *device)
{
    return via[R2_VIA_VERBS] && via[R2_VIA_VERBS]->left_out(device);
}

static int mux_connect(const struct r2_ep_params *params, struct r2_ep **out)
{
    int t = params->probe ? R2_VIA_TCP : params->transport;

    /* The engine asks for what both ends offer; nothing else may reach this. */
    return via[t]->connect(params, out);
}

static void mux_kick(struct r2_ep *ep, unsigned chunks, unsigned lanes)
{
    of(ep)->kick(ep, chunks, lanes);
}

static bool mux_push(struct r2_ep *ep)
{
    return of(ep)->push(ep);
}

static void mux_flush(struct r2_ep *ep)
{
    of(ep)->flush(ep);
}

static void mux_flush_soon(struct r2_ep *ep, bool lone, bool data)
{
    of(ep)->flush_soon(ep, lone, data);
}

static bool mux_help(struct r2_ep *ep)
{
    return of(ep)->help(ep);
}

static int mux_shut(struct r2_ep *ep)
{
    return of(ep)->shut(ep);
}

static int mux_detach(struct r2_ep *ep, uint64_t conn, uint64_t first, uint64_t last, bool cleared)
{
    return of(ep)->detach(ep, conn, first, last, cleared);
}

static void mux_get(struct r2_ep *ep)
{
    of(ep)->get(ep);
}

static void mux_put(struct r2_ep *ep)
{
    of(ep)->put(ep);
}

static void mux_mark(struct r2_ep *ep)
{
    of(ep)->mark(ep);
}

static void mux_health(struct r2_ep *ep, struct r2_ep_health *out)
{
    of(ep)->health(ep, out);
}

static bool mux_reached(struct r2_ep *ep)
{
    return of(ep)->reached(ep);
}

static bool mux_revoke(struct r2_ep *ep, unsigned lane, const struct r2_bulk *chunk)
{
    return of(ep)->revoke(ep, lane, chunk);
}

static unsigned mux_lanes(struct r2_ep *ep)
{
    return of(ep)->lanes(ep);
}

static unsigned mux_planned(struct r2_ep *ep)
{
    return of(ep)->planned(ep);
}

static void mux_use(struct r2_ep *ep, unsigned lanes)
{
    if (of(ep)->use)
        of(ep)->use(ep, lanes);
}

static const struct r2_ep_params *mux_params(const struct r2_ep *ep)
{
    return of(ep)->params(ep);
}

static void mux_nudge(struct r2_ep *ep)
{
    of(ep)->nudge(ep);
}

static bool mux_rdma(int nic, struct r2_rdma_info *out)
{
    return verbs() && verbs()->rdma(nic, out);
}

static unsigned mux_memory(int nic)
{
    return via[R2_VIA_TCP]->memory(nic) | (via[R2_VIA_VERBS] ? via[R2_VIA_VERBS]->memory(nic) : 0);
}

/* Registrations are the verbs transport's: sockets need none. */
static int mux_reg(const struct r2_memory *memory, struct r2_mr_keys **out)
{
    return verbs() ? verbs()->reg(memory, out) : via[R2_VIA_TCP]->reg(memory, out);
}

static int mux_dereg(struct r2_mr_keys *keys, bool revoke)
{
    return keys ? via[R2_VIA_VERBS]->dereg(keys, revoke) : 0;
}

static int mux_remote_keys(const struct r2_mr_keys *keys, uint32_t out[R2_WIRE_MAX_NICS])
{
    return keys ? via[R2_VIA_VERBS]->remote_keys(keys, out) : 0;
}

static bool mux_registered(const struct r2_ep *ep, const struct r2_mr_keys *keys)
{
    return of(ep)->registered(ep, keys);
}

static int mux_flush_memory(int nic, const struct r2_mr_keys *keys, const void *at,
                            uint64_t *ticket)
{
    return verbs() ? verbs()->flush_memory(nic, keys, at, ticket) : -EOPNOTSUPP;
}

static int mux_flushed(int nic, uint64_t ticket)
{
    return verbs() ? verbs()->flushed(nic, ticket) : -EOPNOTSUPP;
}

static void mux_child(void)
{
    if (verbs())
        verbs()->child();
    via[R2_VIA_TCP]->child();
}

const struct r2_transport_ops r2_transport_mux = {
    .name = "mux",
    .start = mux_start,
    .address = mux_address,
    .second = mux_second,
    .rebind = mux_rebind,
    .sockets = mux_sockets,
    .ports = mux_ports,
    .left_out = mux_left_out,
    .connect = mux_connect,
    .kick = mux_kick,
    .push = mux_push,
    .flush = mux_flush,
    .flush_soon = mux_flush_soon,
    .help = mux_help,
    .shut = mux_shut,
    .detach = mux_detach,
    .revoke = mux_revoke,
    .get = mux_get,
    .put = mux_put,
    .mark = mux_mark,
    .health = mux_health,
    .reached = mux_reached,
    .lanes = mux_lanes,
    .planned = mux_planned,
    .use = mux_use,
    .params = mux_params,
    .nudge = mux_nudge,
    .memory = mux_memory,
    .rdma = mux_rdma,
    .reg = mux_reg,
    .dereg = mux_dereg,
    .remote_keys = mux_remote_keys,
    .registered = mux_registered,
    .flush_memory = mux_flush_memory,
    .flushed = mux_flushed,
    .child = mux_child,
};
