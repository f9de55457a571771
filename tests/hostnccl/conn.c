/* Connections: made, given memory, and taken apart as NCCL does it: deregMr, the memory goes away,
 * then closeSend or closeRecv. Half-open ones are left to finalize. Job steps run on the service
 * thread. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels.h"

enum { AGAIN = -1 };

static int plugin_error(const struct hn_conn *c, const char *call, int rc)
{
    hn_util_fail((ncclResult_t)rc, "NET/%s: %s, device %d, rank %d %s rank %d, returned %d",
                 hn_net_name(c->comm->net->net), call, c->dev, c->comm->rank,
                 c->send ? "to" : "from", c->peer, rc);
    return rc;
}

static size_t simple_bytes(bool p2p)
{
    long bytes = p2p ? hn_util_env("NCCL_P2P_NET_CHUNKSIZE", 128 << 10, 4 << 10, 64 << 20)
                     : hn_util_env("NCCL_BUFFSIZE", 4 << 20, 16 << 10, 256 << 20) / 4;
    return (size_t)bytes & ~(size_t)4095;
}

struct hn_conn *hn_conn_new(struct ncclComm *comm, int peer, int channel, bool send, bool p2p)
{
    struct hn_conn *c = calloc(1, sizeof(*c));
    if (!c)
        return NULL;
    *c = (struct hn_conn){.comm = comm, .peer = peer, .channel = channel, .send = send, .p2p = p2p};
    int shift = !send && hn_util_env("HOSTNCCL_CROSS_NIC", 0, 0, 1); /* receive elsewhere */
    c->dev = (channel + shift) % comm->net->net->ndev;
    c->lanes[HN_LL] = (struct hn_lane){.slot_bytes = 64 << 10, .depth = 8};
    c->lanes[HN_LL128] = (struct hn_lane){.slot_bytes = 128 << 10, .depth = p2p ? 0 : 8};
    c->lanes[HN_SIMPLE] = (struct hn_lane){.slot_bytes = simple_bytes(p2p), .depth = p2p ? 8 : 4};
    return c;
}

/* Maps and registers the buffers; nothing was scribbled before, so all of it is. */
static int give_memory(struct hn_conn *c)
{
    for (int p = 0; p < HN_PROTOS; p++) {
        struct hn_lane *lane = &c->lanes[p];
        size_t bytes = lane->slot_bytes * (size_t)lane->depth;
        if (!bytes)
            continue;
        void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED)
            return hn_util_fail(ncclSystemError, "no memory for buffers of %zu bytes", bytes);
        lane->base = base;
        for (int s = 0; s < lane->depth; s++) {
            hn_scribble(lane->base + (size_t)s * lane->slot_bytes, lane->slot_bytes);
            lane->scribbled[s] = true;
        }
        int rc =
            hn_net_regmr(c->comm->net, c->net_comm, base, bytes, R2_NCCL_PTR_HOST, &lane->mhandle);
        if (rc)
            return plugin_error(c, "regMr", rc);
    }
    atomic_store(&c->ready, true);
    return 0;
}

static int conn_listen(struct hn_conn *c)
{
    memset(c->handle, 0xa5, sizeof(c->handle));
    int rc = hn_net_listen(c->comm->net, c->dev, c->handle, &c->listen);
    return rc ? plugin_error(c, "listen", rc) : 0;
}

static int conn_connect(struct hn_conn *c)
{
    int rc = hn_net_connect(c->comm->net, c->dev, c->handle, &c->net_comm);
    if (rc)
        return plugin_error(c, "connect", rc);
    return c->net_comm ? give_memory(c) : AGAIN;
}

static int conn_accept(struct hn_conn *c)
{
    int rc = hn_net_accept(c->comm->net, c->listen, &c->net_comm);
    if (rc)
        return plugin_error(c, "accept", rc);
    if (!c->net_comm)
        return AGAIN;
    rc = hn_net_close_listen(c->comm->net, c->listen);
    c->listen = NULL;
    return rc ? plugin_error(c, "closeListen", rc) : give_memory(c);
}

/* After deregMr the memory is gone at once, but its addresses stay reserved until the connection is
 * closed: whoever still touches it dies. */
int hn_conn_close(struct hn_conn *c)
{
    if (!c->net_comm)
        return 0;
    int worst = 0;
    for (int p = 0; p < HN_PROTOS; p++) {
        struct hn_lane *lane = &c->lanes[p];
        if (!lane->base)
            continue;
        int rc = hn_net_deregmr(c->comm->net, c->net_comm, lane->mhandle);
        if (rc)
            worst = plugin_error(c, "deregMr", rc);
        mmap(lane->base, lane->slot_bytes * (size_t)lane->depth, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    }
    int rc = hn_net_close_comm(c->comm->net, c->net_comm, c->send);
    if (rc)
        worst = plugin_error(c, "close", rc);
    for (int p = 0; p < HN_PROTOS; p++)
        if (c->lanes[p].base)
            munmap(c->lanes[p].base, c->lanes[p].slot_bytes * (size_t)c->lanes[p].depth);
    return worst;
}

static uint64_t tag_of(const struct hn_conn *c)
{
    return (uint64_t)c->channel << 1 | c->p2p;
}

static ncclResult_t run_steps(struct ncclComm *comm, struct hn_conn **sends, int nsends,
                              struct hn_conn **recvs, int nrecvs, bool listens)
{
    int count = listens ? nrecvs : nsends + nrecvs;
    struct hn_job *jobs = calloc((size_t)count + 1, sizeof(*jobs));
    if (!jobs)
        return hn_util_fail(ncclSystemError, "out of memory");
    for (int i = 0; i < count; i++) {
        bool is_recv = i < nrecvs;
        jobs[i].conn = is_recv ? recvs[i] : sends[i - nrecvs];
        jobs[i].step = listens ? conn_listen : is_recv ? conn_accept : conn_connect;
    }
    ncclResult_t result = hn_service_run(comm, jobs, count, hn_boot_deadline());
    free(jobs);
    return result;
}

ncclResult_t hn_conn_setup(struct ncclComm *comm, struct hn_conn **sends, int nsends,
                           struct hn_conn **recvs, int nrecvs)
{
    ncclResult_t result = run_steps(comm, sends, 0, recvs, nrecvs, true);
    for (int i = 0; i < nrecvs && result == ncclSuccess; i++)
        result = hn_boot_send(comm->boot, recvs[i]->peer, tag_of(recvs[i]), recvs[i]->handle,
                              sizeof(recvs[i]->handle));
    for (int i = 0; i < nsends && result == ncclSuccess; i++)
        result = hn_boot_recv(comm->boot, sends[i]->peer, tag_of(sends[i]), sends[i]->handle,
                              sizeof(sends[i]->handle));
    if (result != ncclSuccess)
        return result;
    return run_steps(comm, sends, nsends, recvs, nrecvs, false);
}
