/* Reads by which a NIC shows what it has written into memory of devices: a queue pair of its own
 * that is connected to itself. A read's answer does not overtake the writes of the same NIC, so
 * when it has come they are where the device sees them. The queue pair fails alone: paths that end
 * do not touch it, and a NIC whose port is down can still be asked. One that has failed is made
 * anew when the next flush finds it so; that flush has failed.
 *
 * Locks: a leaf each. Made and destroyed on the command thread, like all queue pairs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/verbs/verbs.h"
#include "util/log.h"

#define DEPTH 128u

struct r2_vflush {
    pthread_mutex_t lock;
    struct r2_vnic *nic;
    struct r2_cmd make;
    bool ready, making;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint64_t posted, done; /* cumulative; all up to `done` have come */
    uint64_t lost;         /* all up to it will not */
    uint8_t byte[64];
};

static int connect_self(const struct r2_vflush *f, struct ibv_qp *qp)
{
    struct r2_vnic *v = f->nic;
    struct ibv_qp_attr init = {
        .qp_state = IBV_QPS_INIT, .port_num = v->port, .qp_access_flags = IBV_ACCESS_REMOTE_READ};
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .dest_qp_num = qp->qp_num,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12,
                              .ah_attr.port_num = v->port};
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 3, .rnr_retry = 7, .max_rd_atomic = 1};

    pthread_mutex_lock(&v->lock);
    rtr.path_mtu = (enum ibv_mtu)v->mtu;
    rtr.ah_attr.dlid = v->lid;
    if (v->link == IBV_LINK_LAYER_ETHERNET) {
        rtr.ah_attr.is_global = 1;
        memcpy(rtr.ah_attr.grh.dgid.raw, v->gid, 16);
        rtr.ah_attr.grh.sgid_index = (uint8_t)v->gid_index;
        rtr.ah_attr.grh.hop_limit = 255;
    }
    pthread_mutex_unlock(&v->lock);
    if (r2_ibv.modify_qp(qp, &init,
                         IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
        r2_ibv.modify_qp(qp, &rtr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                             IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) ||
        r2_ibv.modify_qp(qp, &rts,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        return -EIO;
    return 0;
}

static void unmake(struct r2_vflush *f)
{
    if (f->qp && r2_ibv.destroy_qp(f->qp))
        return;
    f->qp = NULL;
    if (f->cq)
        r2_ibv.destroy_cq(f->cq);
    f->cq = NULL;
}

static void run_make(struct r2_cmd *cmd)
{
    struct r2_vflush *f = R2_CONTAINER_OF(cmd, struct r2_vflush, make);
    struct r2_hca *hca = f->nic->hca;
    struct ibv_qp_init_attr attr = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    bool ok;

    unmake(f); /* only this thread touches it while `ready` is not set */
    if (!f->qp && !atomic_load(&hca->gone)) {
        if (!f->mr)
            f->mr = r2_ibv.reg_mr(hca->pd, f->byte, sizeof(f->byte), IBV_ACCESS_LOCAL_WRITE);
        f->cq = r2_ibv.create_cq(hca->ctx, (int)DEPTH + 8, NULL, NULL, 0);
        attr.send_cq = attr.recv_cq = f->cq;
        f->qp = f->mr && f->cq ? r2_ibv.create_qp(hca->pd, &attr) : NULL;
    }
    ok = f->qp && connect_self(f, f->qp) == 0;
    pthread_mutex_lock(&f->lock);
    f->ready = ok;
    f->making = false;
    pthread_mutex_unlock(&f->lock);
    if (!ok)
        R2_WARN_LIMIT("%s: no queue pair to flush GPU memory with", hca->name);
}

void r2_vflush_start(struct r2_vnic *nic)
{
    struct r2_vflush *f = calloc(1, sizeof(*f));

    if (!f)
        return;
    pthread_mutex_init(&f->lock, NULL);
    f->nic = nic;
    r2_list_init(&f->make.node);
    f->make.run = run_make;
    f->making = true;
    nic->flush = f;
    r2_cmd_post(nic->hca, &f->make);
}

/* What is under way will not come; the next one finds a new queue pair. */
static int failed(struct r2_vflush *f)
{
    f->lost = f->posted;
    f->ready = false;
    if (!f->making) {
        f->making = true;
        r2_cmd_post(f->nic->hca, &f->make);
    }
    return -EIO;
}

static int post_read(struct r2_vflush *f, const void *at, uint32_t key)
{
    struct ibv_sge sge = {.addr = (uint64_t)(uintptr_t)f->byte, .length = 1, .lkey = f->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = ++f->posted,
                             .sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_RDMA_READ,
                             .send_flags = IBV_SEND_SIGNALED,
                             .wr.rdma = {.remote_addr = (uint64_t)(uintptr_t)at, .rkey = key}};
    struct ibv_send_wr *bad;

    return ibv_post_send(f->qp, &wr, &bad) ? failed(f) : 0;
}

int r2_verbs_flush_memory(int nic, const struct r2_mr_keys *keys, const void *at, uint64_t *ticket)
{
    struct r2_vnic *v = &r2_verbs.nics[nic];
    struct r2_vflush *f = v->flush;
    int rc = -ENODEV;

    if (!f || !keys || !atomic_load(&keys->has[v->hca_index]))
        return -ENODEV;
    pthread_mutex_lock(&f->lock);
    if (f->ready && !atomic_load(&v->hca->gone))
        rc = f->posted - f->done < DEPTH - 1
                 ? post_read(f, at, atomic_load(&keys->rkey[v->hca_index]))
                 : failed(f);
    else if (!f->ready)
        rc = failed(f);
    *ticket = f->posted;
    pthread_mutex_unlock(&f->lock);
    return rc;
}

int r2_verbs_flushed(int nic, uint64_t ticket)
{
    struct r2_vflush *f = r2_verbs.nics[nic].flush;
    struct ibv_wc wc;
    int rc, n = 0;

    pthread_mutex_lock(&f->lock);
    while (f->ready && (n = ibv_poll_cq(f->cq, 1, &wc)) > 0) {
        if (wc.status != IBV_WC_SUCCESS) {
            R2_WARN_LIMIT("%s: flush of GPU memory: %s", f->nic->hca->name,
                          r2_wc_info((int)wc.status)->meaning);
            n = -1;
            break;
        }
        f->done = wc.wr_id;
    }
    if (n < 0)
        failed(f);
    rc = f->done >= ticket ? 1 : f->lost >= ticket ? -EIO : 0;
    pthread_mutex_unlock(&f->lock);
    return rc;
}
