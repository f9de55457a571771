/* How an endpoint ends, so that nothing of it can land or read afterwards.
 *
 * 1. Every queue pair is moved to ERR. From then on its responder executes no request that arrives,
 *    and its requester starts none.
 * 2. A last work request is posted on each of its queues that is used (receives). Work requests of
 *    a queue are flushed in order. So when the last one comes back flushed, all before it have, and
 *    with them whatever the device was still writing: a completion is written behind the data that
 *    belongs to it.
 * 3. Only then is the fence confirmed, chunks go back to the engine, and it may say FENCED.
 * A queue pair that is not flushed in time is destroyed instead, which the device confirms too. If
 * it confirms neither, the fence is never assumed: nothing that was in flight is sent again. A
 * device that was removed confirms nothing; the kernel's word that it has let go of it does
 * (hca.c), at once or when it comes. An endpoint of S that never was open has nothing to confirm.
 */
#include <errno.h>
#include <string.h>

#include "topology/local.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/log.h"

#define LOOK_NS (UINT64_C(500) * 1000)

static struct r2_vqp *vqp_at(struct r2_ep *ep, int i)
{
    return i == 0 ? &ep->ctrl : i == 1 ? &ep->beat : &ep->bulk[i - 2];
}

bool r2_fence_idle(const struct r2_ep *ep)
{
    return ep->params.initiator && atomic_load(&ep->dead) && ep->stage < R2_V_OPEN;
}

/* What has come: the ends of last work requests, and the peer's last words. What ibv_poll_cq says.
 * Not while the queue pairs are destroyed. */
static int look(struct r2_ep *ep)
{
    bool heard = false;
    struct ibv_wc wc[16];
    int n;

    do {
        /* Given up before its queue pairs were made: nothing to wait for. */
        n = ep->cq ? ibv_poll_cq(ep->cq, 16, wc) : 0;
        for (int i = 0; i < n; i++) {
            int q = (int)(wc[i].wr_id >> 32 & 0xffff);

            heard |= ep->owner && r2_data_last_words(ep, &wc[i]);
            if (wc[i].wr_id >> 48 != R2_WR_DRAIN || q >= 2 + ep->n_bulk)
                continue;
            if ((uint32_t)wc[i].wr_id)
                vqp_at(ep, q)->drain_rx = true;
            else
                vqp_at(ep, q)->drain_tx = true;
        }
    } while (n > 0);
    if (heard)
        r2_verbs.ev->burst_end(ep->owner, ep);
    return n;
}

static void confirmed(struct r2_ep *ep)
{
    if (atomic_load(&ep->open) && ep->fence < R2_FENCE_KILL)
        look(ep);
    ep->fence = R2_FENCE_DONE;
    r2_timer_set(&ep->timer, 0);
    if (ep->owner && !r2_fence_idle(ep)) {
        r2_data_give_back(ep);
        r2_verbs.ev->shut_over(ep->owner, ep);
    }
    r2_vep_retire(ep);
}

void r2_fence_begin(struct r2_ep *ep)
{
    if (ep->fence != R2_FENCE_NONE)
        return;
    atomic_store(&ep->dead, true);
    ep->fence_at = r2_now_ns();
    r2_meet_close(ep); /* tells the peer */
    if (!ep->on_purpose)
        r2_hcas_doubt();
    /* Without queue pairs, and none being made, there is nothing to fence. */
    if ((!ep->commands && !ep->memory) || atomic_load(&ep->hca->removed)) {
        confirmed(ep);
        return;
    }
    ep->fence = R2_FENCE_ASKED;
    r2_vep_post(ep, &ep->end);
}

/* No receive is ever posted on heartbeats' queue pairs, nor on those that S sends chunks by.
 * Nothing of a message is written through them either, so there is nothing to wait for: heartbeats'
 * words lie in the endpoint's own memory, which stays until they are destroyed. And a device may
 * never flush a receive that comes to such a queue in ERR (soft-RoCE, docs/rdma.md). */
static bool receives(const struct r2_ep *ep, int i)
{
    return i == 0 || (i >= 2 && !ep->params.initiator);
}

static int post_last(struct r2_ep *ep)
{
    for (int i = 0; i < 2 + ep->n_bulk; i++) {
        struct r2_vqp *v = vqp_at(ep, i);
        struct ibv_send_wr tx = {.wr_id = r2_wr_id(R2_WR_DRAIN, i, 0),
                                 .opcode = IBV_WR_SEND,
                                 .send_flags = IBV_SEND_SIGNALED},
                           *bad_tx;
        struct ibv_recv_wr rx = {.wr_id = r2_wr_id(R2_WR_DRAIN, i, 1)}, *bad_rx;

        if (!v->qp)
            continue;
        if (ibv_post_send(v->qp, &tx, &bad_tx))
            return -EIO;
        if (receives(ep, i) && ibv_post_recv(v->qp, &rx, &bad_rx))
            return -EIO;
    }
    return 0;
}

static bool drained(struct r2_ep *ep)
{
    bool all = true;

    for (int i = 0; i < 2 + ep->n_bulk; i++) {
        struct r2_vqp *v = vqp_at(ep, i);

        all &= !v->qp || (v->drain_tx && (v->drain_rx || !receives(ep, i)));
    }
    return all;
}

static void kill(struct r2_ep *ep)
{
    if (atomic_load(&ep->open))
        look(ep);
    ep->fence = R2_FENCE_KILL;
    r2_vep_post(ep, &ep->end);
}

void r2_fence_poll(struct r2_ep *ep)
{
    int n;

    if (ep->fence != R2_FENCE_DRAIN)
        return;
    n = look(ep);
    if (n == 0 && drained(ep))
        confirmed(ep);
    else if (n < 0 || r2_now_ns() > ep->drain_until)
        kill(ep);
    else
        r2_timer_set(&ep->timer, r2_now_ns() + LOOK_NS);
}

/* What follows from a command, under the lock. */
static void ended(struct r2_ep *ep, bool error, int rc)
{
    if (error && rc == 0)
        rc = post_last(ep);
    if (error && rc == 0) {
        ep->fence = R2_FENCE_DRAIN;
        ep->drain_until = r2_now_ns() + R2_VERBS_DRAIN_NS;
        r2_fence_poll(ep);
    } else if (error) {
        kill(ep);
    } else if (rc == 0) {
        confirmed(ep);
    } else {
        ep->fence = R2_FENCE_LOST;
        R2_WARN("NIC %s (%s): a queue pair cannot be flushed or destroyed. What it carried is "
                "not sent again, because it might still arrive",
                r2_local_nic(ep->params.local_nic)->name, ep->hca->name);
    }
}

/* On the command thread: to ERR, or (after that has not helped) destroyed. The kernel's word may
 * have been quicker (r2_fence_removed). */
void r2_fence_end(struct r2_cmd *cmd)
{
    struct r2_ep *ep = R2_CONTAINER_OF(cmd, struct r2_ep, end);
    enum r2_v_fence stage;
    int rc = 0;

    pthread_mutex_lock(&ep->lock);
    stage = ep->fence;
    r2_vep_unlock(ep);
    if (stage == R2_FENCE_ASKED)
        rc = r2_qps_error(ep);
    else if (stage == R2_FENCE_KILL)
        rc = r2_qps_destroy(ep);
    if (stage == R2_FENCE_KILL && rc && r2_hca_removed(ep->hca))
        rc = 0; /* the kernel has destroyed them, and confirms it for the device */
    pthread_mutex_lock(&ep->lock);
    if (ep->fence == stage && stage != R2_FENCE_DONE)
        ended(ep, stage == R2_FENCE_ASKED, rc);
    r2_vep_unlock(ep);
    r2_vep_posted(ep);
}

void r2_fence_removed(struct r2_hca *hca)
{
    struct r2_ep *eps[64];
    struct r2_list *n;
    int count;

    do { /* each once: what begins later sees `removed` */
        count = 0;
        pthread_mutex_lock(&r2_verbs.lock);
        R2_LIST_FOR_EACH (n, &r2_verbs.eps) {
            struct r2_ep *ep = R2_CONTAINER_OF(n, struct r2_ep, node);

            if (ep->hca != hca || count == 64 || atomic_exchange(&ep->told_removed, true))
                continue;
            r2_vep_get(ep);
            eps[count++] = ep;
        }
        pthread_mutex_unlock(&r2_verbs.lock);
        for (int i = 0; i < count; i++) {
            pthread_mutex_lock(&eps[i]->lock);
            if (eps[i]->fence != R2_FENCE_NONE && eps[i]->fence != R2_FENCE_DONE)
                confirmed(eps[i]);
            r2_vep_unlock(eps[i]);
            r2_vep_put(eps[i]);
        }
    } while (count == 64);
}

/* On the command thread, after the fence. */
void r2_fence_destroy(struct r2_cmd *cmd)
{
    struct r2_ep *ep = R2_CONTAINER_OF(cmd, struct r2_ep, destroy);

    r2_qps_release(ep);
    pthread_mutex_lock(&ep->lock);
    ep->reap = true;
    r2_vep_unlock(ep);
    r2_vep_kick(ep, R2_WANT_ALL);
    r2_vep_posted(ep);
}
