#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"
#include "util/copy.h"

FV_EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *ctx)
{
    struct ibv_pd *pd = calloc(1, sizeof(*pd));

    pthread_mutex_lock(&fv.lock);
    fv_may_stick(fv_dev_of(ctx), FV_AT_PD);
    pthread_mutex_unlock(&fv.lock);
    if (pd)
        pd->context = ctx;
    return pd;
}

FV_EXPORT int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    return 0;
}

/* Keys: the entry and how often it was used, so that an old key is not a new one. */
static struct ibv_mr *reg(struct ibv_pd *pd, void *addr, size_t len, int access)
{
    struct fv_dev *dev = fv_dev_of(pd->context);
    static uint32_t use;
    struct fv_mr *mr = NULL;

    pthread_mutex_lock(&fv.lock);
    fv_may_hang(dev);
    if (dev->no_reg > 0 || dev->fatal) {
        dev->no_reg--;
        errno = dev->fatal ? EIO : ENOMEM;
    } else {
        for (unsigned i = 0; i < FV_MRS && !mr; i++) {
            unsigned at = (fv.next_mr + i) % FV_MRS;

            if (fv.mrs[at])
                continue;
            mr = calloc(1, sizeof(*mr));
            fv.next_mr = at + 1;
            fv.mrs[at] = mr;
            mr->base.context = pd->context;
            mr->base.pd = pd;
            mr->base.addr = addr;
            mr->base.length = len;
            mr->base.lkey = mr->base.rkey = (++use << 16) | at;
            mr->access = access;
        }
    }
    pthread_mutex_unlock(&fv.lock);
    return mr ? &mr->base : NULL;
}

/* What a peer memory module knows, under fv.lock; of no address more than one. */
static struct {
    uint8_t *addr, *view;
    size_t len;
} peers[64];

void fv_peer(void *addr, size_t len, void *view)
{
    for (size_t i = 0; i < sizeof(peers) / sizeof(*peers); i++) {
        if (peers[i].len && peers[i].addr != addr)
            continue;
        peers[i].addr = addr;
        peers[i].len = len;
        peers[i].view = view;
        return;
    }
    abort();
}

static uint8_t *peer_view(uint8_t *addr, size_t len)
{
    uint8_t *view = NULL;

    pthread_mutex_lock(&fv.lock);
    for (size_t i = 0; i < sizeof(peers) / sizeof(*peers) && !view; i++)
        if (peers[i].len && addr >= peers[i].addr && len <= peers[i].len &&
            (size_t)(addr - peers[i].addr) <= peers[i].len - len)
            view = peers[i].view + (addr - peers[i].addr);
    pthread_mutex_unlock(&fv.lock);
    return view;
}

#undef ibv_reg_mr
FV_EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t len, int access)
{
    uint8_t *view = peer_view(addr, len);
    struct ibv_mr *mr = reg(pd, addr, len, access);

    if (mr)
        ((struct fv_mr *)(void *)mr)->view = view;
    return mr;
}

uint8_t *fv_reach(const struct fv_mr *mr, uint64_t addr)
{
    if (!mr || !mr->view)
        return (uint8_t *)(uintptr_t)addr;
    return mr->view + (addr - (uint64_t)(uintptr_t)mr->base.addr);
}

static void show(struct fv_late *l)
{
    struct fv_mr *mr = fv_mr_find(l->rkey, l->addr, l->len, IBV_ACCESS_REMOTE_WRITE);

    if (mr)
        r2_copy_lines(fv_reach(mr, l->addr), l->bytes, l->len, l->addr);
    free(l->bytes);
    free(l);
}

void fv_show(struct fv_dev *dev)
{
    while (dev->behind) {
        struct fv_late *l = dev->behind;

        dev->behind = l->next;
        show(l);
    }
    dev->behind_end = &dev->behind;
}

void fv_behind(struct fv_dev *dev, uint64_t addr, uint8_t *bytes, uint32_t len, uint32_t rkey)
{
    struct fv_late *l = calloc(1, sizeof(*l));

    if (!l)
        abort();
    *l = (struct fv_late){.addr = addr, .bytes = bytes, .len = len, .rkey = rkey};
    if (!dev->behind)
        dev->behind_end = &dev->behind;
    *dev->behind_end = l;
    dev->behind_end = &l->next;
}

/* Memory of a "device": any file that can be mapped. The caller's own address of it need not be
 * mapped, and is never touched. */
FV_EXPORT struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t len,
                                           uint64_t iova, int fd, int access)
{
    uint64_t page = offset & ~UINT64_C(4095);
    uint8_t *view = MAP_FAILED;
    struct ibv_mr *mr;

    pthread_mutex_lock(&fv.lock);
    fv_may_hang(fv_dev_of(pd->context));
    pthread_mutex_unlock(&fv.lock);
    if (fd >= 0)
        view = mmap(NULL, len + (size_t)(offset - page), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                    (off_t)page);
    if (view == MAP_FAILED) {
        errno = EBADF;
        return NULL;
    }
    mr = reg(pd, (void *)(uintptr_t)iova, len, access);
    if (mr) /* never unmapped: requests that name a dead key must not end this process */
        ((struct fv_mr *)(void *)mr)->view = view + (offset - page);
    return mr;
}

void fv_mrs_vanish(struct fv_dev *dev)
{
    for (unsigned i = 0; i < FV_MRS; i++) {
        struct fv_mr *mr = fv.mrs[i];

        if (!mr || fv_dev_of(mr->base.context) != dev)
            continue;
        mr->kept = fv.kept_mrs;
        fv.kept_mrs = mr;
        fv.mrs[i] = NULL;
    }
}

FV_EXPORT int ibv_dereg_mr(struct ibv_mr *base)
{
    struct fv_dev *dev = fv_dev_of(base->context);

    pthread_mutex_lock(&fv.lock);
    fv_may_hang(dev);
    if ((dev->removed && dev->fatal) ||
        (dev->no_dereg > 0 && base->length >= 4096 && (!fv.only || fv.only == base->addr))) {
        dev->no_dereg--;
        pthread_mutex_unlock(&fv.lock);
        return EIO;
    }
    fv_show(dev); /* the key was good when it was written by */
    fv.mrs[base->rkey & 0xffff] = NULL;
    pthread_mutex_unlock(&fv.lock);
    free(base);
    return 0;
}

struct fv_mr *fv_mr_find(uint32_t key, uint64_t addr, uint64_t len, int access)
{
    struct fv_mr *mr = fv.mrs[key & 0xffff];
    uint64_t start;

    if (!mr || mr->base.rkey != key || (mr->access & access) != access)
        return NULL;
    start = (uint64_t)(uintptr_t)mr->base.addr;
    return addr >= start && addr + len <= start + mr->base.length && addr + len >= addr ? mr : NULL;
}

/* ---- completion queues */

FV_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *ctx)
{
    struct ibv_comp_channel *ch = calloc(1, sizeof(*ch));

    if (!ch)
        return NULL;
    ch->context = ctx;
    ch->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK | EFD_SEMAPHORE);
    return ch;
}

/* Refuses while a completion queue has it. */
FV_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *ch)
{
    if (ch->refcnt)
        return EBUSY;
    close(ch->fd);
    free(ch);
    return 0;
}

FV_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *ctx, int cqe, void *arg,
                                       struct ibv_comp_channel *ch, int vector)
{
    struct fv_cq *cq = calloc(1, sizeof(*cq));

    (void)vector;
    if (!cq)
        return NULL;
    cq->base.context = ctx;
    cq->base.channel = ch;
    cq->base.cq_context = arg;
    cq->base.cqe = cqe;
    cq->size = (unsigned)cqe;
    cq->ring = calloc(cq->size, sizeof(*cq->ring));
    if (ch)
        ch->refcnt++;
    return &cq->base;
}

FV_EXPORT int ibv_destroy_cq(struct ibv_cq *base)
{
    struct fv_cq *cq = (struct fv_cq *)(void *)base;

    pthread_mutex_lock(&fv.lock);
    for (int i = 0; i < FV_QPS; i++) {
        if (fv.qps[i] && (fv.qps[i]->base.send_cq == base || fv.qps[i]->base.recv_cq == base)) {
            pthread_mutex_unlock(&fv.lock);
            return EBUSY;
        }
    }
    fv_events_over(fv_dev_of(base->context), base);
    if (base->channel)
        base->channel->refcnt--;
    pthread_mutex_unlock(&fv.lock);
    free(cq->ring);
    free(cq);
    return 0;
}

FV_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **arg)
{
    uint64_t one;

    if (read(ch->fd, &one, sizeof(one)) < 0)
        return -1;
    *cq = NULL;
    *arg = NULL;
    return 0;
}

FV_EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
    (void)cq, (void)n;
}

static void notify(struct fv_cq *cq)
{
    uint64_t one = 1;

    if (!cq->armed || !cq->base.channel)
        return;
    cq->armed = false;
    if (write(cq->base.channel->fd, &one, sizeof(one)) < 0)
        abort();
}

void fv_complete(struct fv_qp *qp, bool recv, const struct ibv_wc *wc)
{
    struct fv_cq *cq = (struct fv_cq *)(void *)(recv ? qp->base.recv_cq : qp->base.send_cq);
    struct fv_cqe *e = &cq->ring[cq->tail % cq->size];

    if (cq->tail - cq->head == cq->size) { /* overrun */
        fv.violations++;
        fv_async(qp->dev, IBV_EVENT_CQ_ERR, 0, NULL);
        return;
    }
    if (wc->status == IBV_WC_SUCCESS && fv_chance(fv.chaos.lost_cqe, 1000000))
        return;
    if (wc->status == IBV_WC_SUCCESS && qp->dev->lose &&
        wc->wr_id >> 48 == (uint64_t)qp->dev->lose) {
        if (--qp->dev->lose_n == 0)
            qp->dev->lose = 0;
        return;
    }
    e->wc = *wc;
    e->recv = recv;
    e->due = 0;
    if (fv_chance(fv.chaos.late_cqe, 1000))
        e->due = fv_now() + fv_random(fv.chaos.late_us) * 1000;
    __atomic_store_n(&cq->tail, cq->tail + 1, __ATOMIC_RELEASE); /* fv_poll_cq looks unlocked */
    if (!e->due)
        notify(cq);
    else
        fv_wake();
}

static struct fv_cqe *entry(const struct fv_cq *cq, unsigned at)
{
    return &cq->ring[at % cq->size];
}

/* An older one of the same work queue is still in the ring: in the order of that queue is the rule.
 */
static bool held_up(const struct fv_cq *cq, unsigned at)
{
    const struct fv_cqe *e = entry(cq, at);

    for (unsigned i = cq->head; i != at; i++) {
        if (entry(cq, i)->wc.qp_num == e->wc.qp_num && entry(cq, i)->recv == e->recv)
            return true;
    }
    return false;
}

/* Out of the ring; what is older moves up. */
static void take(struct fv_cq *cq, unsigned at, struct ibv_wc *wc)
{
    *wc = entry(cq, at)->wc;
    fv.overtaken += at != cq->head;
    for (; at != cq->head; at--)
        *entry(cq, at) = *entry(cq, at - 1);
    cq->head++;
}

/* The rule is order within a work queue. Delayed completions hold back all that is behind them, or
 * (chaos `overtake`) only those of their own. */
int fv_poll_cq(struct ibv_cq *base, int n, struct ibv_wc *wc)
{
    struct fv_cq *cq = (struct fv_cq *)(void *)base;
    uint64_t now = 0;
    int got = 0;

    if (__atomic_load_n(&cq->tail, __ATOMIC_ACQUIRE) == cq->head)
        return 0;
    pthread_mutex_lock(&fv.lock);
    for (unsigned at = cq->head; got < n && at != cq->tail; at++) {
        uint64_t due = entry(cq, at)->due;

        if (due && !now)
            now = fv_now();
        if (due <= now && !held_up(cq, at))
            take(cq, at, &wc[got++]);
        else if (!fv.chaos.overtake)
            break;
    }
    pthread_mutex_unlock(&fv.lock);
    return got;
}

int fv_req_notify_cq(struct ibv_cq *base, int solicited)
{
    struct fv_cq *cq = (struct fv_cq *)(void *)base;

    (void)solicited;
    pthread_mutex_lock(&fv.lock);
    cq->armed = true;
    pthread_mutex_unlock(&fv.lock);
    return 0;
}

/* A delayed completion has become due: whoever is armed hears of it. */
void fv_cq_tick(uint64_t now)
{
    for (int i = 0; i < FV_QPS; i++) {
        struct fv_qp *qp = fv.qps[i];
        struct fv_cq *cq = qp ? (struct fv_cq *)(void *)qp->base.recv_cq : NULL;

        for (unsigned at = cq ? cq->head : 0; cq && at != cq->tail; at++) {
            if (entry(cq, at)->due && entry(cq, at)->due <= now) {
                notify(cq);
                break;
            }
            if (!fv.chaos.overtake)
                break;
        }
    }
}
