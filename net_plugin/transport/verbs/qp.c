/* Queue pairs through their states, on the device's command thread. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "settings/settings.h"
#include "topology/local.h"
#include "transport/verbs/verbs.h"
#include "util/log.h"

static int vqp_count(const struct r2_ep *ep)
{
    return 2 + ep->n_bulk;
}

static struct r2_vqp *vqp_at(struct r2_ep *ep, int i)
{
    return i == 0 ? &ep->ctrl : i == 1 ? &ep->beat : &ep->bulk[i - 2];
}

static int make_memory(struct r2_ep *ep)
{
    void *p;

    ep->memory_len = (r2_v_memory_len(ep) + 4095) & ~(size_t)4095;
    p = mmap(NULL, ep->memory_len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return -ENOMEM;
    madvise(p, ep->memory_len, MADV_DONTFORK);
    ep->memory = p;
    ep->mr = r2_ibv.reg_mr(ep->hca->pd, p, ep->memory_len,
                           IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    return ep->mr ? 0 : -EIO;
}

static int make_cq(struct r2_ep *ep)
{
    int per_bulk = 3 * R2_BULK_TX + R2_COUNTS_AGAIN + R2_BULK_RX, flags;
    int want = R2_CTRL_TX + R2_CTRL_RX + 8 + ep->n_bulk * (per_bulk + 4) + 2 * vqp_count(ep);

    ep->channel = r2_ibv.create_comp_channel(ep->hca->ctx);
    if (!ep->channel)
        return -EIO;
    r2_io_fd_track(ep->channel->fd);
    flags = fcntl(ep->channel->fd, F_GETFL);
    if (fcntl(ep->channel->fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return -errno;
    ep->cq = r2_ibv.create_cq(ep->hca->ctx, want, ep, ep->channel, 0);
    if (!ep->cq)
        return -EIO;
    return ibv_req_notify_cq(ep->cq, 0) ? -EIO : 0;
}

uint16_t r2_qp_pkey_index(void)
{
    return (uint16_t)r2_wanted_number("NCCL_IB_PKEY", r2_settings_get()->nccl_ib_pkey, 0, 0, 65535);
}

int r2_qp_init(struct ibv_qp *qp, uint8_t port, unsigned access)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT,
        .pkey_index = r2_qp_pkey_index(),
        .port_num = port,
        .qp_access_flags = access,
    };

    return r2_ibv.modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
               ? -EIO
               : 0;
}

/* A communicator's traffic class, as NCCL reads it: the service level of InfiniBand, the type of
 * service of RoCE. It counts where users have set nothing. */
static int service_level(uint8_t link)
{
    static atomic_bool told;
    const char *set = r2_settings_get()->nccl_ib_sl;
    int class = link == IBV_LINK_LAYER_ETHERNET ? -1 : r2_traffic_class(), v;

    if (class > 15 && !r2_wanted_is_number(set, 0, 15, &v) && !atomic_exchange(&told, true))
        R2_TELL("a communicator's traffic class is %d, but InfiniBand's service levels end at 15: "
                "it has no effect there, and 0 is used; NCCL_IB_SL (0 to 15) sets another one",
                class);
    return r2_wanted_number("NCCL_IB_SL", set, class < 0 || class > 15 ? 0 : class, 0, 15);
}

static int type_of_service(uint8_t link)
{
    int class = r2_traffic_class();

    return link != IBV_LINK_LAYER_ETHERNET || class < 0 ? 0 : class;
}

void r2_qp_route(struct ibv_ah_attr *ah, uint8_t port, uint8_t link, uint16_t lid,
                 const uint8_t *gid, int gid_index)
{
    const struct r2_settings *set = r2_settings_get();

    ah->port_num = port;
    ah->sl = (uint8_t)service_level(link);
    ah->dlid = lid;
    ah->is_global = gid != NULL;
    if (!gid)
        return;
    memcpy(ah->grh.dgid.raw, gid, 16);
    ah->grh.sgid_index = (uint8_t)gid_index;
    ah->grh.hop_limit = 255;
    ah->grh.traffic_class =
        (uint8_t)r2_wanted_number("NCCL_IB_TC", set->nccl_ib_tc, type_of_service(link), 0, 255);
}

static int make_qp(struct r2_ep *ep, struct r2_vqp *q, int tx, int rx)
{
    struct ibv_qp_init_attr init = {
        .qp_context = ep, /* for its events (device.c) */
        .send_cq = ep->cq,
        .recv_cq = ep->cq,
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = (uint32_t)tx,
                .max_recv_wr = (uint32_t)rx,
                .max_send_sge = 1,
                .max_recv_sge = 1},
    };

    q->qp = r2_ibv.create_qp(ep->hca->pd, &init);
    if (!q->qp)
        return -EIO;
    atomic_fetch_add(&ep->nic->qps, 1);
    return r2_qp_init(q->qp, ep->port, IBV_ACCESS_REMOTE_WRITE);
}

int r2_qps_make(struct r2_ep *ep)
{
    int rc;

    ep->tx = calloc((size_t)ep->n_bulk * R2_BULK_TX, sizeof(*ep->tx));
    rc = ep->tx ? make_memory(ep) : -ENOMEM;
    if (rc == 0)
        rc = make_cq(ep);
    /* One work request more on each queue for the drain. Of counts, bulk ones have at most one more
     * than chunks, and R2_COUNTS_AGAIN that repeat another. */
    if (rc == 0)
        rc = make_qp(ep, &ep->ctrl, R2_CTRL_TX + 1, R2_CTRL_RX + 1);
    if (rc == 0)
        rc = make_qp(ep, &ep->beat, 4, 2);
    for (int i = 0; i < ep->n_bulk && rc == 0; i++)
        rc = make_qp(ep, &ep->bulk[i], 3 * R2_BULK_TX + R2_COUNTS_AGAIN + 2, R2_BULK_RX + 1);
    for (uint32_t s = 0; s < R2_CTRL_RX && rc == 0; s++)
        rc = r2_data_post_ctrl_rx(ep, s);
    for (int i = 0; i < ep->n_bulk && !ep->params.initiator; i++) {
        for (uint32_t s = 0; s < R2_BULK_RX && rc == 0; s++)
            rc = r2_data_post_bulk_rx(ep, i, s);
    }
    return rc ? rc : r2_vep_watch(ep);
}

static bool same_subnet(const struct r2_ep *ep)
{
    return memcmp(ep->mine.gid, ep->theirs.gid, 8) == 0;
}

static void route(const struct r2_ep *ep, struct ibv_ah_attr *ah)
{
    bool global = ep->mine.link != IBV_LINK_LAYER_INFINIBAND || !same_subnet(ep);

    r2_qp_route(ah, ep->port, ep->mine.link, ep->theirs.lid, global ? ep->theirs.gid : NULL,
                ep->nic->gid_index);
}

static int connect_qp(struct r2_ep *ep, struct r2_vqp *q, uint32_t remote)
{
    uint8_t mtu = ep->mine.mtu < ep->theirs.mtu ? ep->mine.mtu : ep->theirs.mtu;
    struct ibv_qp_attr rtr = {
        .qp_state = IBV_QPS_RTR,
        .path_mtu = (enum ibv_mtu)mtu,
        .dest_qp_num = remote,
        .rq_psn = ep->theirs.psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 5, /* 0.06 ms: receives are posted again at once */
    };
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS,
        .timeout = (uint8_t)r2_wanted_timeout(),
        .retry_cnt = (uint8_t)r2_wanted_retry_cnt(),
        .rnr_retry = 7, /* for ever: a stopped process is no failed path */
        .sq_psn = ep->mine.psn,
        .max_rd_atomic = 1,
    };

    route(ep, &rtr.ah_attr);
    if (r2_ibv.modify_qp(q->qp, &rtr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                             IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        return -EHOSTUNREACH; /* on RoCE the kernel resolves the address here */
    return r2_ibv.modify_qp(q->qp, &rts,
                            IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)
               ? -EIO
               : 0;
}

int r2_qps_connect(struct r2_ep *ep)
{
    int rc = connect_qp(ep, &ep->ctrl, ep->theirs.ctrl);

    if (rc == 0)
        rc = connect_qp(ep, &ep->beat, ep->theirs.beat);
    for (int i = 0; i < ep->n_bulk && rc == 0; i++)
        rc = connect_qp(ep, &ep->bulk[i], ep->theirs.bulk[i]);
    return rc;
}

int r2_qps_error(struct r2_ep *ep)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
    int rc = 0;

    for (int i = 0; i < vqp_count(ep); i++) {
        struct r2_vqp *q = vqp_at(ep, i);

        if (q->qp && r2_ibv.modify_qp(q->qp, &attr, IBV_QP_STATE))
            rc = -EIO;
    }
    return rc;
}

int r2_qps_destroy(struct r2_ep *ep)
{
    int rc = 0;

    for (int i = 0; i < vqp_count(ep); i++) {
        struct r2_vqp *q = vqp_at(ep, i);

        if (!q->qp)
            continue;
        if (r2_ibv.destroy_qp(q->qp)) {
            rc = -EIO;
            continue;
        }
        q->qp = NULL;
        atomic_fetch_sub(&ep->nic->qps, 1);
    }
    return rc;
}

/* What a device that was removed does not give back is no use to anybody: the library keeps it. */
void r2_qps_release(struct r2_ep *ep)
{
    bool removed = false;

    if (r2_qps_destroy(ep)) {
        removed = r2_hca_removed(ep->hca);
        if (!removed) {
            R2_WARN_LIMIT("%s does not destroy a queue pair: it is left behind", ep->hca->name);
            return; /* the rest is still in use */
        }
        for (int i = 0; i < vqp_count(ep); i++) {
            if (vqp_at(ep, i)->qp)
                atomic_fetch_sub(&ep->nic->qps, 1);
            vqp_at(ep, i)->qp = NULL;
        }
    }
    if (ep->cq && !removed)
        r2_ibv.destroy_cq(ep->cq);
    if (ep->channel)
        r2_io_fd_untrack(ep->channel->fd);
    if (ep->channel && (removed || r2_ibv.destroy_comp_channel(ep->channel)))
        close(ep->channel->fd); /* the library does not, while it still has the queue */
    if (ep->mr && r2_ibv.dereg_mr(ep->mr) && !r2_hca_removed(ep->hca))
        return; /* the device may still write there */
    if (ep->memory)
        munmap(ep->memory, ep->memory_len);
    ep->cq = NULL;
    ep->channel = NULL;
    ep->mr = NULL;
    ep->memory = NULL;
}
