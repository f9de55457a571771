/* Queue pairs that neither complete nor fail, while heartbeats pass: under ep->lock.
 *
 * A device either executes a request or gives up after its retries; one with a fault, or whose
 * fault the kernel's driver hides, may do neither (docs/rdma.md). Time alone does not tell: where
 * the other process stands still and has no receive left, requests wait for ever, by right. So the
 * process is asked. Each end's heartbeat carries a word: the number of its last question, and that
 * of the last one it has answered. A process answers a question after it has read it and then found
 * its completion queue empty. By then every receive that it knows to be used was posted again. From
 * then on receives cannot run out, whatever becomes of the process: on no queue pair are more
 * requests under way than receives posted (verbs.h). What then completes nothing for longer than a
 * device may take for it has failed, if nothing that has completed waits to be polled.
 *
 * How long that is depends on the length: retries are counted anew with each packet that is
 * acknowledged, so that a request which gets on slowly never gives up. Where nothing else could
 * carry it, it goes on while it is as fast as a queue pair must be to be proven: the path would be
 * made anew for nothing.
 *
 * Memory order: the peer's word is written by its device, aligned, as a whole, and nothing else is
 * read because of it. Our own is written while no heartbeat is under way.
 */
#include <errno.h>

#include "topology/local.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/log.h"

_Static_assert(R2_CTRL_TX <= R2_CTRL_RX && 2 * R2_BULK_TX + 1 + R2_COUNTS_AGAIN < R2_BULK_RX,
               "requests under way never use up the receives");

#define ASK_NS (500 * R2_NS_PER_MS)
#define LEAST_NS (2 * R2_NS_PER_S)
#define LOOK_NS R2_NS_PER_S /* of a longer time since the last look no more counts */

/* Bytes/s of a queue pair, at the least: of the only path to the peer what test chunks must show
 * within 2 s (engine/path/pathtest.c), of others what is worth waiting for. */
#define ALONE_RATE (R2_TEST_EACH * R2_TEST_LEN / 2)
#define RATE (8 * ALONE_RATE)

/* What a device may take until it gives up on a packet: it tries once and then its retries, and its
 * timer runs out between T and 4T, by the specification. */
static uint64_t for_packet(void)
{
    uint64_t ns =
        4 * (UINT64_C(4096) << r2_wanted_timeout()) * ((unsigned)r2_wanted_retry_cnt() + 1);

    return ns > LEAST_NS ? ns : LEAST_NS;
}

/* Something that must complete by itself. */
static bool is_under_way(const struct r2_ep *ep, const struct r2_vqp *v)
{
    if (v != &ep->ctrl)
        return v->tx_done != v->tx_posted;
    for (uint32_t i = v->tx_done; i != v->tx_posted; i++)
        if (ep->ctrl_signals >> i % R2_CTRL_TX & 1)
            return true;
    return false;
}

/* Of what must be acknowledged before anything completes. */
static uint64_t bytes_ahead(const struct r2_ep *ep, const struct r2_vqp *v)
{
    uint64_t bytes = 0;

    if (v != &ep->ctrl)
        return ep->tx[(v - ep->bulk) * R2_BULK_TX + v->tx_done % R2_BULK_TX].len;
    for (uint32_t i = v->tx_done; i != v->tx_posted; i++) {
        bytes += ep->ctrl_len[i % R2_CTRL_TX];
        if (ep->ctrl_signals >> i % R2_CTRL_TX & 1)
            break;
    }
    return bytes;
}

static bool is_stalled(struct r2_ep *ep, const struct r2_vqp *v)
{
    uint64_t packet = for_packet(), bytes = bytes_ahead(ep, v);

    if (!v->answered || !ep->cq_empty || v->waited < packet + bytes * R2_NS_PER_S / RATE)
        return false;
    return v->waited >= packet + bytes * R2_NS_PER_S / ALONE_RATE ||
           !r2_verbs.ev->alone(ep->owner, ep);
}

static uint64_t theirs(struct r2_ep *ep)
{
    return __atomic_load_n((const uint64_t *)(const void *)r2_v_beat(ep, 1), __ATOMIC_RELAXED);
}

static bool is_answered(struct r2_ep *ep, const struct r2_vqp *v)
{
    return (int32_t)((uint32_t)(theirs(ep) >> 32) - v->question) >= 0;
}

static int look(struct r2_ep *ep, struct r2_vqp *v, uint64_t waited)
{
    if (!is_under_way(ep, v) || v->ended != v->seen_ended) {
        v->seen_ended = v->ended;
        v->waited = 0;
        v->question = 0;
        v->answered = false;
        return 0;
    }
    v->waited += waited;
    if (!v->question && v->waited >= ASK_NS) {
        ep->question += ep->question + 1 ? 1 : 2; /* 0 is none */
        v->question = ep->question;
    } else if (v->question && !v->answered && is_answered(ep, v)) {
        v->answered = true;
        v->waited = 0;
    } else if (is_stalled(ep, v)) {
        ep->cause = "requests neither completed nor failed";
        R2_WARN_LIMIT("NIC %s (%s port %u): a queue pair has completed nothing for %.1f s, while "
                      "heartbeats pass and the other process takes what arrives",
                      r2_local_nic(ep->params.local_nic)->name, ep->hca->name, ep->port,
                      (double)v->waited / (double)R2_NS_PER_S);
        return -ETIMEDOUT;
    }
    return 0;
}

int r2_stalls_look(struct r2_ep *ep, uint64_t now)
{
    uint64_t since = ep->stalls_at ? now - ep->stalls_at : 0;
    uint64_t waited = since < LOOK_NS ? since : LOOK_NS;
    int rc = look(ep, &ep->ctrl, waited);

    ep->stalls_at = now;
    for (int q = 0; q < ep->n_bulk && rc == 0 && ep->params.initiator; q++)
        rc = look(ep, &ep->bulk[q], waited);
    return rc;
}

void r2_stalls_word(struct r2_ep *ep)
{
    uint64_t *mine = (uint64_t *)(void *)r2_v_beat(ep, 0);

    *mine = ep->question | (uint64_t)ep->answer << 32;
    ep->asked = (uint32_t)theirs(ep);
}

void r2_stalls_empty(struct r2_ep *ep)
{
    ep->answer = ep->asked;
    ep->cq_empty = true;
}
