/* Completions of chunks that never come, under ep->lock.
 *
 * A queue pair completes in order. So a completion that got lost shows as soon as a later one
 * comes, at the sender as at the receiver. Behind the last chunk there may be none. So some time
 * after it a count of the chunks is sent, without a payload, again after twice that time, and so
 * on. What tells of a count may get lost as well, at either end, and neither end sees what the
 * other one misses. The receive that was used for such an arrival is posted again with the next one
 * (post_skipped in data.c). No time is judged: where a stopped receiver has no receive left, counts
 * wait behind the chunks.
 */
#include <arpa/inet.h>
#include <errno.h>

#include "topology/local.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/log.h"

#define FIRST_NS (500 * R2_NS_PER_MS)
#define MOST_NS (60 * R2_NS_PER_S)

static int send_count(struct r2_vqp *v, int q, uint64_t now)
{
    struct ibv_send_wr wr = {.wr_id = r2_wr_id(R2_WR_COUNT, q, v->tx_posted),
                             .opcode = IBV_WR_SEND_WITH_IMM,
                             .send_flags = IBV_SEND_SIGNALED,
                             .imm_data = htonl(v->tx_posted)};

    v->said = v->tx_posted;
    v->said_again++;
    v->since = now;
    v->wait = 2 * v->wait < MOST_NS ? 2 * v->wait : MOST_NS;
    return r2_data_post(v->qp, &wr);
}

/* The first one after a chunk goes in any case, as chunks bound how many of those are under way;
 * of all others there are R2_COUNTS_AGAIN at most. */
static bool is_due(const struct r2_vqp *v, uint64_t now)
{
    return v->tx_posted && now - v->since > v->wait &&
           (v->said != v->tx_posted || v->said_again < R2_COUNTS_AGAIN);
}

int r2_counts_send(struct r2_ep *ep, uint64_t now)
{
    int rc = 0;

    for (int q = 0; q < ep->n_bulk && rc == 0; q++) {
        struct r2_vqp *v = &ep->bulk[q];

        if (v->tx_posted != v->seen_posted || v->tx_done != v->seen_done) {
            v->seen_posted = v->tx_posted;
            v->seen_done = v->tx_done;
            v->since = now;
            v->wait = FIRST_NS;
        } else if (is_due(v, now)) {
            rc = send_count(v, q, now);
        }
    }
    return rc;
}

int r2_counts_missing(struct r2_ep *ep, uint32_t count)
{
    R2_WARN_LIMIT("NIC %s (%s port %u): %u completions of chunks never came",
                  r2_local_nic(ep->params.local_nic)->name, ep->hca->name, ep->port, count);
    ep->cause = "a completion never came";
    return -EPROTO;
}

int r2_counts_sent(struct r2_ep *ep, const struct ibv_wc *wc)
{
    int q = (int)(wc->wr_id >> 32 & 0xffff);
    uint32_t said = (uint32_t)wc->wr_id;
    struct r2_vqp *v;

    if (q >= ep->n_bulk)
        return -EPROTO;
    v = &ep->bulk[q];
    v->ended++;
    if (v->tx_done != said)
        return r2_counts_missing(ep, said - v->tx_done);
    v->said_again = 0;
    return 0;
}
