/* Reads by which a NIC shows what it has written into memory of devices: a queue pair of its own
 * that is connected to itself. A read's answer does not overtake the writes of the same NIC, so
 * when it has come they are where the device sees them. The queue pair fails alone: paths that end
 * do not touch it, and a NIC whose port is down can still be asked. One that has failed is made
 * anew when the next flush finds it so; that flush has failed. One whose answers stop coming has.
 *
 * Where its port has another address, LID or partition key now, a new one takes its place; reads
 * that are under way stay with the old one, which goes when they have come or failed. Which of the
 * two a read goes by makes no difference: both are the NIC's, behind all that it has written.
 *
 * A NIC whose device is gone cannot be asked; when it is back it gets a new one.
 *
 * Locks: a leaf each. Made and destroyed on the command thread, like all queue pairs. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "settings/settings.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/log.h"

#define DEPTH 128u
#define ANSWER_NS                                                                                  \
    (UINT64_C(900) * 1000000) /* less than what a flush waits (engine/message/flush.c) */

/* What it is made of, of one device, which it uses. */
struct parts {
    struct r2_cmd unmake;
    struct r2_list node; /* r2_hca.unflushed, its command thread's */
    struct r2_hca *hca;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint64_t last;  /* r2_vflush.posted with its last read */
    uint64_t since; /* it waits for the next answer, while it has reads under way */
    uint8_t byte[64];
};

struct r2_vflush {
    pthread_mutex_t lock;
    struct r2_vnic *nic;
    struct parts *now; /* NULL: none */
    struct parts *old; /* `now` before, while it has reads under way: all before those of `now` */
    bool making;
    bool again;            /* once `old` has gone */
    uint64_t posted, done; /* cumulative; all up to `done` have come, but for those lost */
    /* Those behind the one and up to the other are not told to have come. Losses in turn are one
     * range: what came between them and was not asked for yet is flushed otherwise. */
    uint64_t lost_from, lost;
};

struct make {
    struct r2_cmd cmd;
    struct r2_vflush *flush;
    struct r2_hca *hca; /* used */
};

static int connect_self(const struct r2_vflush *f, struct ibv_qp *qp)
{
    struct r2_vnic *v = f->nic;
    struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
                              .dest_qp_num = qp->qp_num,
                              .max_dest_rd_atomic = 1,
                              .min_rnr_timer = 12};
    struct ibv_qp_attr rts = {
        .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 3, .rnr_retry = 7, .max_rd_atomic = 1};

    pthread_mutex_lock(&v->lock);
    rtr.path_mtu = (enum ibv_mtu)v->mtu;
    r2_qp_route(&rtr.ah_attr, v->port, v->link, v->lid,
                v->link == IBV_LINK_LAYER_ETHERNET ? v->gid : NULL, v->gid_index);
    pthread_mutex_unlock(&v->lock);
    if (r2_qp_init(qp, v->port, IBV_ACCESS_REMOTE_READ) ||
        r2_ibv.modify_qp(qp, &rtr,
                         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                             IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) ||
        r2_ibv.modify_qp(qp, &rts,
                         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                             IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        return -EIO;
    return 0;
}

/* A queue pair that is not destroyed still has the rest. */
static void unmake(struct parts *p)
{
    bool left = p->qp && r2_ibv.destroy_qp(p->qp);

    if (p->cq && !left)
        r2_ibv.destroy_cq(p->cq);
    left |= p->mr && r2_ibv.dereg_mr(p->mr);
    if (left && !r2_hca_removed(p->hca)) {
        r2_list_add_tail(&p->hca->unflushed, &p->node); /* the device may still write to `byte` */
        return;
    }
    r2_hca_unuse(p->hca);
    free(p);
}

void r2_vflush_forget(struct r2_hca *hca)
{
    struct r2_list *n;

    while ((n = r2_list_first(&hca->unflushed))) {
        r2_list_del(n);
        r2_hca_unuse(hca);
        free(R2_CONTAINER_OF(n, struct parts, node));
    }
}

static void run_unmake(struct r2_cmd *cmd)
{
    unmake(R2_CONTAINER_OF(cmd, struct parts, unmake));
}

static struct parts *make_parts(const struct r2_vflush *f, struct r2_hca *hca)
{
    struct ibv_qp_init_attr attr = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    struct parts *p = atomic_load(&hca->gone) ? NULL : calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    r2_hca_use(hca);
    p->hca = hca;
    p->mr = r2_ibv.reg_mr(hca->pd, p->byte, sizeof(p->byte), IBV_ACCESS_LOCAL_WRITE);
    p->cq = r2_ibv.create_cq(hca->ctx, (int)DEPTH + 8, NULL, NULL, 0);
    attr.send_cq = attr.recv_cq = p->cq;
    p->qp = p->mr && p->cq ? r2_ibv.create_qp(hca->pd, &attr) : NULL;
    if (p->qp && connect_self(f, p->qp) == 0)
        return p;
    unmake(p);
    return NULL;
}

static bool under_way(const struct r2_vflush *f, const struct parts *p)
{
    return p->last > f->done && p->last > f->lost;
}

/* Under the lock: it is for its own device's thread to destroy, and what it had under way is lost.
 */
static void let_go(struct r2_vflush *f, struct parts **p)
{
    if (!*p)
        return;
    if (under_way(f, *p)) {
        f->lost_from = f->lost ? f->lost_from : f->done;
        f->lost = (*p)->last;
    }
    r2_cmd_give((*p)->hca, &(*p)->unmake, run_unmake);
    *p = NULL;
}

static void drop(struct r2_vflush *f)
{
    let_go(f, &f->old);
    let_go(f, &f->now);
}

static void run_make(struct r2_cmd *cmd)
{
    struct make *m = R2_CONTAINER_OF(cmd, struct make, cmd);
    struct r2_vflush *f = m->flush;
    struct parts *p = make_parts(f, m->hca);

    if (!p && !atomic_load(&m->hca->gone))
        R2_WARN_LIMIT("%s: no queue pair to flush GPU memory with", m->hca->name);
    pthread_mutex_lock(&f->lock);
    f->making = false;
    if (p && atomic_load(&p->hca->gone)) { /* else r2_vflush_stop is still to come */
        r2_cmd_give(p->hca, &p->unmake, run_unmake);
    } else if (p) {
        let_go(f, &f->old);
        f->old = f->now;
        if (f->old && !under_way(f, f->old))
            let_go(f, &f->old);
        f->now = p;
    }
    pthread_mutex_unlock(&f->lock);
    r2_hca_unuse(m->hca);
    free(m);
}

/* Under the lock. */
static void make(struct r2_vflush *f)
{
    struct r2_hca *hca = f->making ? NULL : r2_vnic_use(f->nic);
    struct make *m = hca ? calloc(1, sizeof(*m)) : NULL;

    if (!m) {
        if (hca)
            r2_hca_unuse(hca);
        return;
    }
    f->making = true;
    m->flush = f;
    m->hca = hca;
    r2_cmd_give(hca, &m->cmd, run_make);
}

void r2_vflush_start(struct r2_vnic *nic)
{
    struct r2_vflush *f = nic->flush;

    if (r2_verbs_memory((int)(nic - r2_verbs.nics)) == R2_MEMORY_HOST ||
        r2_settings_get()->gpu_memory != R2_GPU_MEMORY_DIRECT)
        return;
    if (!f) {
        f = calloc(1, sizeof(*f));
        if (!f)
            return;
        pthread_mutex_init(&f->lock, NULL);
        f->nic = nic;
        nic->flush = f;
    }
    pthread_mutex_lock(&f->lock);
    f->making = false; /* one that was asked of a device that is gone will find that out */
    make(f);
    pthread_mutex_unlock(&f->lock);
}

static bool has_address(struct r2_vnic *v)
{
    static const uint8_t none[16];
    bool has;

    pthread_mutex_lock(&v->lock);
    has = v->link != IBV_LINK_LAYER_ETHERNET || memcmp(v->gid, none, sizeof(none)) != 0;
    pthread_mutex_unlock(&v->lock);
    return has;
}

/* Without an address the one that there is may still work; the address comes with an event. */
void r2_vflush_again(struct r2_vnic *nic)
{
    struct r2_vflush *f = nic->flush;

    if (!f || !has_address(nic))
        return;
    pthread_mutex_lock(&f->lock);
    f->again = f->old != NULL;
    if (!f->again)
        make(f);
    pthread_mutex_unlock(&f->lock);
}

void r2_vflush_stop(struct r2_vnic *nic)
{
    struct r2_vflush *f = nic->flush;

    if (!f)
        return;
    pthread_mutex_lock(&f->lock);
    drop(f);
    pthread_mutex_unlock(&f->lock);
}

/* What is under way will not come; the next one finds a new queue pair. */
static int failed(struct r2_vflush *f)
{
    drop(f);
    make(f);
    return -EIO;
}

static int post_read(struct r2_vflush *f, const void *at, uint32_t key)
{
    struct parts *p = f->now;
    struct ibv_sge sge = {.addr = (uint64_t)(uintptr_t)p->byte, .length = 1, .lkey = p->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = ++f->posted,
                             .sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_RDMA_READ,
                             .send_flags = IBV_SEND_SIGNALED,
                             .wr.rdma = {.remote_addr = (uint64_t)(uintptr_t)at, .rkey = key}};
    struct ibv_send_wr *bad;

    if (!under_way(f, p))
        p->since = r2_now_ns();
    p->last = f->posted;
    return ibv_post_send(p->qp, &wr, &bad) ? failed(f) : 0;
}

int r2_verbs_flush_memory(int nic, const struct r2_mr_keys *keys, const void *at, uint64_t *ticket)
{
    struct r2_vnic *v = &r2_verbs.nics[nic];
    struct r2_vflush *f = v->flush;
    int rc;

    if (!f || !keys || !atomic_load(&keys->has[v->slot]))
        return -ENODEV;
    pthread_mutex_lock(&f->lock);
    rc = f->now && f->posted - (f->done > f->lost ? f->done : f->lost) < DEPTH - 1
             ? post_read(f, at, atomic_load(&keys->rkey[v->slot]))
             : failed(f);
    *ticket = f->posted;
    pthread_mutex_unlock(&f->lock);
    return rc;
}

/* Takes what has come; false: it has failed, or an answer is missing for too long. */
static bool take(struct r2_vflush *f, struct parts *p)
{
    struct ibv_wc wc;
    int n;

    while ((n = ibv_poll_cq(p->cq, 1, &wc)) > 0) {
        if (wc.status != IBV_WC_SUCCESS) {
            R2_WARN_LIMIT("%s: flush of GPU memory: %s", p->hca->name,
                          r2_wc_info((int)wc.status)->meaning);
            return false;
        }
        f->done = wc.wr_id;
        p->since = r2_now_ns();
    }
    if (n == 0 && under_way(f, p) && r2_now_ns() - p->since > ANSWER_NS) {
        R2_WARN_LIMIT("%s: a flush of GPU memory has no answer", p->hca->name);
        return false;
    }
    return n == 0;
}

int r2_verbs_flushed(int nic, uint64_t ticket)
{
    struct r2_vflush *f = r2_verbs.nics[nic].flush;
    int rc;

    pthread_mutex_lock(&f->lock);
    if (f->old && (!take(f, f->old) || !under_way(f, f->old))) {
        let_go(f, &f->old);
        if (f->now)
            f->now->since = r2_now_ns(); /* only now it is looked at */
        if (f->again)
            make(f);
        f->again = false;
    }
    if (f->now && !f->old && !take(f, f->now)) /* in order: `done` stands for all before */
        failed(f);
    rc = ticket > f->lost_from && ticket <= f->lost ? -EIO : f->done >= ticket;
    pthread_mutex_unlock(&f->lock);
    return rc;
}
