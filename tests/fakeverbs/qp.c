#include <arpa/inet.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fake.h"

static struct fv_qp *of(struct ibv_qp *qp)
{
    return (struct fv_qp *)(void *)qp;
}

struct fv_qp *fv_qp_find(uint32_t qpn)
{
    struct fv_qp *qp = fv.qps[qpn % FV_QPS];

    return qp && qp->base.qp_num == qpn ? qp : NULL;
}

FV_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct fv_dev *dev = fv_dev_of(pd->context);
    struct fv_qp *qp = NULL;

    pthread_mutex_lock(&fv.lock);
    fv_may_hang(dev);
    for (unsigned i = 0; i < FV_QPS && !qp && !dev->fatal; i++) {
        unsigned at = (fv.next_qp + i) % FV_QPS;

        if (fv.qps[at] || at == 0)
            continue;
        qp = calloc(1, sizeof(*qp));
        fv.next_qp = at + 1;
        fv.qps[at] = qp;
        qp->base.context = pd->context;
        qp->base.qp_context = attr->qp_context;
        qp->base.pd = pd;
        qp->base.send_cq = attr->send_cq;
        qp->base.recv_cq = attr->recv_cq;
        qp->base.qp_num = fv.slot * FV_QPS + at;
        qp->base.state = IBV_QPS_RESET;
        qp->base.qp_type = attr->qp_type;
        qp->dev = dev;
        qp->cap = attr->cap;
        qp->sq = calloc(qp->cap.max_send_wr, sizeof(*qp->sq));
        qp->rq = calloc(qp->cap.max_recv_wr, sizeof(*qp->rq));
        qp->late_end = &qp->late;
    }
    pthread_mutex_unlock(&fv.lock);
    if (!qp)
        errno = ENOMEM;
    return qp ? &qp->base : NULL;
}

/* The kernel has destroyed them; the library keeps what the caller still names. */
void fv_qps_vanish(struct fv_dev *dev)
{
    for (int i = 0; i < FV_QPS; i++) {
        struct fv_qp *qp = fv.qps[i];

        if (!qp || qp->dev != dev)
            continue;
        while (qp->late) { /* it never arrives */
            struct fv_late *l = qp->late;

            qp->late = l->next;
            free(l->bytes);
            free(l);
        }
        qp->late_end = &qp->late;
        if (qp->out)
            fv_conn_drop(qp->out);
        qp->base.state = IBV_QPS_ERR;
        qp->flush_at = UINT64_MAX;
        qp->kept = fv.kept_qps;
        fv.kept_qps = qp;
        fv.qps[i] = NULL;
    }
}

FV_EXPORT int ibv_destroy_qp(struct ibv_qp *base)
{
    struct fv_qp *qp = of(base);

    pthread_mutex_lock(&fv.lock);
    fv_may_hang(qp->dev);
    if (qp->dev->removed && qp->dev->fatal) {
        pthread_mutex_unlock(&fv.lock);
        return EIO; /* as rdma-core answers; the object stays */
    }
    if (qp->dev->no_destroy > 0) {
        qp->dev->no_destroy--;
        pthread_mutex_unlock(&fv.lock);
        return EIO;
    }
    /* A device waits for its own writes to memory. */
    while ((fv.script.no_destroy && base->qp_num == fv.script.dest) || fv_holds(qp))
        pthread_cond_wait(&fv.unhang, &fv.lock);
    fv_events_over(qp->dev, base);
    fv_place_late(qp, 0, true);
    if (qp->out)
        fv_conn_drop(qp->out);
    fv.qps[base->qp_num % FV_QPS] = NULL;
    pthread_mutex_unlock(&fv.lock);
    free(qp->sq);
    free(qp->rq);
    free(qp);
    return 0;
}

static int to_init(struct fv_qp *qp, const struct ibv_qp_attr *a)
{
    if (a->port_num < 1 || a->port_num > qp->dev->n_ports)
        return EINVAL;
    if (a->pkey_index >= FV_PKEYS)
        return EINVAL;
    qp->pkey = qp->dev->port[a->port_num].pkey[a->pkey_index];
    qp->attr.pkey_index = a->pkey_index;
    qp->port = a->port_num;
    return 0;
}

static int to_rtr(struct fv_qp *qp, const struct ibv_qp_attr *a)
{
    const struct ibv_ah_attr *ah = &a->ah_attr;
    const struct fv_port *p = &qp->dev->port[qp->port];

    qp->attr.ah_attr = a->ah_attr;
    qp->attr.path_mtu = a->path_mtu;
    qp->attr.min_rnr_timer = a->min_rnr_timer;
    if (qp->base.state != IBV_QPS_INIT || (!p->ib && !ah->is_global) || ah->port_num != qp->port)
        return EINVAL;
    qp->dest = a->dest_qp_num;
    if (ah->is_global) {
        if (ah->grh.sgid_index >= FV_GIDS || !p->gid[ah->grh.sgid_index].raw[15])
            return EINVAL;
        memcpy(&qp->dest_ip, ah->grh.dgid.raw + 12, 4);
    } else {
        /* LIDs are the low bits of the address, and lead nowhere outside the subnet. */
        qp->dest_ip = htonl(0x7f000000u | (uint32_t)p->gid[0].raw[7] << 16 | ah->dlid);
    }
    return 0;
}

FV_EXPORT int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *a, int mask)
{
    struct fv_qp *qp = of(base);
    int rc = 0;

    pthread_mutex_lock(&fv.lock);
    fv_may_hang(qp->dev);
    if (!(mask & IBV_QP_STATE)) {
        rc = EINVAL;
    } else if (a->qp_state == IBV_QPS_ERR) {
        if (qp->dev->no_modify_err > 0 || qp->dev->fatal) {
            qp->dev->no_modify_err--;
            rc = EIO;
        } else {
            fv_qp_error(qp);
        }
    } else if (qp->dev->fatal || base->state == IBV_QPS_ERR) {
        rc = EIO;
    } else if (a->qp_state == IBV_QPS_INIT) {
        rc = to_init(qp, a);
    } else if (a->qp_state == IBV_QPS_RTR) {
        rc = to_rtr(qp, a);
    } else if (a->qp_state == IBV_QPS_RTS) {
        qp->timeout = a->timeout;
        qp->retry = a->retry_cnt;
        qp->attr.timeout = a->timeout;
        qp->attr.retry_cnt = a->retry_cnt;
        qp->attr.rnr_retry = a->rnr_retry;
        fv.tally->queue_pairs++;
    }
    if (rc == 0 && a->qp_state != IBV_QPS_ERR)
        base->state = a->qp_state;
    fv_wake();
    pthread_mutex_unlock(&fv.lock);
    return rc;
}

static int attribute(const struct ibv_qp_attr *a, const char *name)
{
    const struct {
        const char *name;
        int value;
    } all[] = {{"sl", a->ah_attr.sl},
               {"tc", a->ah_attr.is_global ? a->ah_attr.grh.traffic_class : -3},
               {"dlid", a->ah_attr.dlid},
               {"hop_limit", a->ah_attr.is_global ? a->ah_attr.grh.hop_limit : -3},
               {"sgid_index", a->ah_attr.is_global ? a->ah_attr.grh.sgid_index : -3},
               {"pkey_index", a->pkey_index},
               {"mtu", (int)a->path_mtu},
               {"timeout", a->timeout},
               {"retry_cnt", a->retry_cnt},
               {"rnr_retry", a->rnr_retry},
               {"min_rnr_timer", a->min_rnr_timer}};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        if (strcmp(all[i].name, name) == 0)
            return all[i].value;
    }
    return -4;
}

int fv_attr_seen(const char *name)
{
    int seen = -1;

    for (int i = 0; i < FV_QPS && seen != -2; i++) {
        const struct fv_qp *qp = fv.qps[i];
        int value = -1;

        if (qp && qp->base.state == IBV_QPS_RTS)
            value = strcmp(name, "pkey") == 0 ? qp->pkey : attribute(&qp->attr, name);
        if (value != -1)
            seen = seen == -1 || seen == value ? value : -2;
    }
    return seen;
}

FV_EXPORT int fv_attr(const char *name)
{
    int seen;

    pthread_mutex_lock(&fv.lock);
    seen = fv_attr_seen(name);
    pthread_mutex_unlock(&fv.lock);
    return seen;
}

/* ---- posting */

static int post_one(struct fv_qp *qp, const struct ibv_send_wr *wr)
{
    struct fv_wqe *w = &qp->sq[qp->posted % qp->cap.max_send_wr];

    if (qp->posted - qp->done >= qp->cap.max_send_wr)
        return ENOMEM;
    memset(w, 0, sizeof(*w));
    w->wr_id = wr->wr_id;
    w->op = wr->opcode;
    w->signaled = wr->send_flags & IBV_SEND_SIGNALED;
    w->imm = wr->imm_data;
    w->raddr = wr->wr.rdma.remote_addr;
    w->rkey = wr->wr.rdma.rkey;
    if (wr->num_sge) {
        w->addr = wr->sg_list[0].addr;
        w->len = wr->sg_list[0].length;
        w->lkey = wr->sg_list[0].lkey;
        w->data = fv_reach(fv_mr_find(w->lkey, w->addr, w->len, 0), w->addr);
        if (w->op == IBV_WR_RDMA_READ && w->len > sizeof(w->raddr))
            return EINVAL;
    }
    qp->posted++;
    return 0;
}

int fv_post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct fv_qp *qp = of(base);
    int rc = 0;

    pthread_mutex_lock(&fv.lock);
    if (base->state != IBV_QPS_RTS && base->state != IBV_QPS_ERR)
        rc = EINVAL;
    if (rc == 0 && wr->next && qp->dev->no_chain > 0) {
        qp->dev->no_chain--;
        rc = post_one(qp, wr);
        wr = rc ? wr : wr->next;
        rc = ENOMEM;
    }
    for (; wr && rc == 0; wr = rc ? wr : wr->next)
        rc = post_one(qp, wr);
    *bad = wr;
    if (base->state == IBV_QPS_ERR) {
        fv_qp_tick(qp, fv_now());
        fv_wake();
    } else if (qp->out && qp->out->connected && !fv.apart) {
        fv_conn_send(qp->out);
    } else {
        fv_wake();
    }
    pthread_mutex_unlock(&fv.lock);
    return rc;
}

int fv_post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct fv_qp *qp = of(base);
    int rc = 0;

    pthread_mutex_lock(&fv.lock);
    for (; wr && rc == 0; wr = wr->next) {
        struct fv_rqe *r = &qp->rq[qp->r_posted % qp->cap.max_recv_wr];

        if (base->state == IBV_QPS_RESET || qp->r_posted - qp->r_done >= qp->cap.max_recv_wr) {
            rc = ENOMEM;
            *bad = wr;
            break;
        }
        r->wr_id = wr->wr_id;
        r->data = wr->num_sge ? (uint8_t *)(uintptr_t)wr->sg_list[0].addr : NULL;
        r->len = wr->num_sge ? wr->sg_list[0].length : 0;
        r->lkey = wr->num_sge ? wr->sg_list[0].lkey : 0;
        qp->r_posted++;
    }
    for (struct fv_conn *c = fv.conns; c; c = c->next) {
        if (c->rnr && c->in.dest == base->qp_num)
            fv_conn_ready(c);
    }
    if (base->state == IBV_QPS_ERR) {
        fv_qp_tick(qp, fv_now());
        fv_wake();
    }
    pthread_mutex_unlock(&fv.lock);
    return rc;
}

/* ---- completion and failure */

static void complete_send(struct fv_qp *qp, enum ibv_wc_status status)
{
    struct fv_wqe *w = &qp->sq[qp->done % qp->cap.max_send_wr];
    struct ibv_wc wc = {.wr_id = w->wr_id, .status = status, .qp_num = qp->base.qp_num};

    qp->done++;
    if ((int32_t)(qp->sent - qp->done) < 0)
        qp->sent = qp->done;
    if (status == IBV_WC_SUCCESS && w->op == IBV_WR_RDMA_WRITE && w->len > sizeof(uint64_t))
        fv.tally->written += w->len;
    wc.opcode = w->op == IBV_WR_RDMA_WRITE  ? IBV_WC_RDMA_WRITE
                : w->op == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ
                                            : IBV_WC_SEND;
    if (status != IBV_WC_SUCCESS) {
        wc.opcode = (enum ibv_wc_opcode)0x55; /* not valid then */
        wc.vendor_err = 0x81;
    }
    if (w->signaled || status != IBV_WC_SUCCESS)
        fv_complete(qp, false, &wc);
}

void fv_qp_acked(struct fv_qp *qp, uint32_t psn)
{
    while (qp->base.state == IBV_QPS_RTS && (int32_t)(psn - qp->done) >= 0 && qp->done != qp->sent)
        complete_send(qp, IBV_WC_SUCCESS);
}

void fv_qp_fail(struct fv_qp *qp, enum ibv_wc_status status)
{
    if (qp->base.state == IBV_QPS_ERR)
        return;
    if (qp->done != qp->posted)
        complete_send(qp, status);
    fv_qp_error(qp);
}

void fv_qp_error(struct fv_qp *qp)
{
    if (qp->base.state == IBV_QPS_ERR)
        return;
    qp->base.state = IBV_QPS_ERR;
    /* What is on its way into memory may still arrive until the flushes are delivered. */
    qp->flush_at = fv_now() + (qp->late ? fv_random(20000) * 1000 : 0);
    if (fv.chaos.dry) { /* as measured (docs/rdma.md) */
        qp->dry = qp->r_done == qp->r_posted;
        qp->flush_at += 10000000;
    }
    if (fv_holds(qp))
        qp->flush_at = UINT64_MAX;
    if (qp->out)
        fv_conn_drop(qp->out);
    fv_qp_tick(qp, fv_now());
    fv_wake();
}

static void flush(struct fv_qp *qp)
{
    while (qp->done != qp->posted)
        complete_send(qp, IBV_WC_WR_FLUSH_ERR);
    while (qp->r_done != qp->r_posted && !qp->dry) {
        struct fv_rqe *r = &qp->rq[qp->r_done++ % qp->cap.max_recv_wr];
        struct ibv_wc wc = {
            .wr_id = r->wr_id, .status = IBV_WC_WR_FLUSH_ERR, .qp_num = qp->base.qp_num};

        fv_complete(qp, true, &wc);
    }
    qp->dry = fv.chaos.dry;
}

bool fv_holds(const struct fv_qp *qp)
{
    for (const struct fv_late *l = qp->late; l; l = l->next) {
        if (l->held)
            return true;
    }
    return false;
}

/* Devices write an aligned word as a whole, and whoever reads it then has no need of a lock. */
static void land(uint8_t *at, const uint8_t *bytes, size_t len)
{
    uint64_t word;

    if (len != sizeof(word) || (uintptr_t)at % len) {
        memcpy(at, bytes, len);
        return;
    }
    memcpy(&word, bytes, len);
    __atomic_store_n((uint64_t *)(void *)at, word, __ATOMIC_RELAXED);
}

void fv_land_word(const struct fv_pkt *p, uint64_t word)
{
    struct fv_mr *mr = fv_mr_find(p->rkey, p->raddr, p->len, IBV_ACCESS_REMOTE_WRITE);

    if (mr)
        land(fv_reach(mr, p->raddr), (const uint8_t *)&word, p->len);
}

void fv_land_late(struct fv_qp *qp, const struct fv_pkt *p, uint8_t *bytes)
{
    struct fv_late *l = calloc(1, sizeof(*l));

    if (!l)
        abort();
    l->due = fv_now() + fv_random(fv.chaos.late_us + 1) * 1000;
    l->addr = p->raddr;
    l->bytes = bytes;
    l->len = p->len;
    l->rkey = p->rkey;
    l->held = !fv.script.in_network && fv.script.caught && p->dest == fv.script.dest;
    *qp->late_end = l;
    qp->late_end = &l->next;
}

void fv_place_late(struct fv_qp *qp, uint64_t now, bool all)
{
    while (qp->late && !qp->late->held && (all || qp->late->due <= now)) {
        struct fv_late *l = qp->late;
        struct fv_mr *mr;

        qp->late = l->next;
        if (!qp->late)
            qp->late_end = &qp->late;
        /* A key that is gone protects the memory even then. */
        mr = fv_mr_find(l->rkey, l->addr, l->len, IBV_ACCESS_REMOTE_WRITE);
        if (mr)
            land(fv_reach(mr, l->addr), l->bytes, l->len);
        free(l->bytes);
        free(l);
    }
}

static void check_retries(struct fv_qp *qp, uint64_t now)
{
    struct fv_wqe *w = &qp->sq[qp->done % qp->cap.max_send_wr];
    uint64_t limit;

    if (qp->done == qp->posted || !qp->timeout || qp->frozen || qp->slow)
        return;
    if (!w->first_sent)
        w->first_sent = now;
    limit = (UINT64_C(4096) << qp->timeout) * (qp->retry + 1u);
    /* A receiver without receives answers "not ready", which is no silence. */
    if (now - w->first_sent > limit && !(qp->out && qp->out->connected && qp->out->rnr))
        fv_qp_fail(qp, IBV_WC_RETRY_EXC_ERR);
}

void fv_qp_tick(struct fv_qp *qp, uint64_t now)
{
    fv_place_late(qp, now, false);
    if (qp->base.state == IBV_QPS_ERR) {
        if (now >= qp->flush_at) {
            fv_place_late(qp, now, true);
            flush(qp);
        }
        return;
    }
    if (qp->base.state != IBV_QPS_RTS)
        return;
    check_retries(qp, now);
    if (qp->base.state == IBV_QPS_RTS && !qp->out && qp->done != qp->posted &&
        now >= qp->next_connect) {
        qp->next_connect = now + 20000000;
        fv_conn_open(qp);
    }
}
