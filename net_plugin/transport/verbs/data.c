/* What moves over the queue pairs, under ep->lock.
 *
 * A chunk is an RDMA write of the payload straight into the receiver's buffer. Behind it on the
 * same queue pair goes a send of its head with the full identity. An immediate of 32 bits could
 * name neither connection nor message nor offset. A table that maps it would have to be agreed on
 * for every chunk. So the send carries the head. Its immediate only counts the queue pair's chunks,
 * which would show a lost or doubled one. Order: a reliable connected queue pair executes requests
 * in order. A receive completes only after the payload of every write before it on the same queue
 * pair is in memory. Nothing is concluded from a completion at the sender except that its own
 * memory is no longer read.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>

#include "io/fault.h"
#include "settings/settings.h"
#include "topology/local.h"
#include "transport/frames.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/crc32c.h"
#include "util/log.h"
#include "util/random.h"

#define POLL_BATCH 32
#define POLL_TURNS 8

int r2_data_post(struct ibv_qp *qp, struct ibv_send_wr *wr)
{
    struct ibv_send_wr *bad;
    int rc = ibv_post_send(qp, wr, &bad);

    return rc ? -(rc > 0 ? rc : EIO) : 0;
}

static int post_rx(struct r2_ep *ep, struct ibv_qp *qp, uint64_t id, void *at, uint32_t len)
{
    struct ibv_sge sge = {.addr = (uint64_t)(uintptr_t)at, .length = len, .lkey = ep->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad;
    int rc = ibv_post_recv(qp, &wr, &bad);

    return rc ? -(rc > 0 ? rc : EIO) : 0;
}

int r2_data_post_ctrl_rx(struct r2_ep *ep, uint32_t slot)
{
    return post_rx(ep, ep->ctrl.qp, r2_wr_id(R2_WR_CTRL_RX, 0, slot), r2_v_ctrl_rx(ep, slot),
                   R2_CTRL_SLOT);
}

int r2_data_post_bulk_rx(struct r2_ep *ep, int q, uint32_t slot)
{
    return post_rx(ep, ep->bulk[q].qp, r2_wr_id(R2_WR_BULK_RX, q, slot), r2_v_head_rx(ep, q, slot),
                   R2_HEAD_SLOT);
}

static bool faulty(struct r2_ep *ep, int dir, size_t *left)
{
    uint64_t retry = 0;

    while (*left) {
        size_t ok = r2_fault_allow(ep->params.local_nic, dir, *left, &retry);

        *left -= ok;
        if (ok)
            continue;
        if (retry)
            r2_timer_sooner(&ep->timer, retry);
        return false;
    }
    return true;
}

/* An injected fault lets `*left` bytes through, now or later. True: all of them. */
static inline bool let_through(struct r2_ep *ep, int dir, size_t *left)
{
    if (!r2_fault_none(ep->params.local_nic))
        return faulty(ep, dir, left);
    *left = 0;
    return true;
}

/* ---- out */

/* Nobody waits for the end of what S sends here. Its completions only give slots back, so one of
 * several is enough, and of those that fill the queue at least one is signalled. The first one
 * behind a heartbeat is signalled, too: it shows that the queue pair works (stalls.c). R's are
 * acknowledgements, of which it wants to know that they have arrived (sent_ctrl). What is not
 * signalled still completes when it fails or is flushed; a signalled one that got lost shows with
 * the next, which the engine's heartbeats bring at the latest. */
static unsigned signals(struct r2_ep *ep)
{
    bool first = ep->ctrl_first;

    _Static_assert(2 * R2_CTRL_SIGNAL <= R2_CTRL_TX && R2_CTRL_TX % R2_CTRL_SIGNAL == 0, "");
    ep->ctrl_first = false;
    return !ep->params.initiator || first ||
                   ep->ctrl.tx_posted % R2_CTRL_SIGNAL == R2_CTRL_SIGNAL - 1
               ? IBV_SEND_SIGNALED
               : 0;
}

static int send_ctrl(struct r2_ep *ep)
{
    uint32_t slot = ep->ctrl.tx_posted % R2_CTRL_TX;
    struct ibv_sge sge = {.addr = (uint64_t)(uintptr_t)r2_v_ctrl_tx(ep, slot),
                          .length = (uint32_t)ep->ctrl_held,
                          .lkey = ep->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = r2_wr_id(R2_WR_CTRL_TX, 0, slot),
                             .sg_list = &sge,
                             .num_sge = 1,
                             .opcode = IBV_WR_SEND,
                             .send_flags = signals(ep)};

    ep->ctrl_signals = (ep->ctrl_signals & ~(1u << slot)) | (wr.send_flags ? 1u << slot : 0);
    ep->ctrl_len[slot] = (uint32_t)ep->ctrl_held;
    ep->ctrl.tx_posted++;
    ep->ctrl_held = 0;
    return r2_data_post(ep->ctrl.qp, &wr);
}

/* Less than fits a slot was all there is: whoever appends more asks again. */
int r2_data_ctrl(struct r2_ep *ep)
{
    bool more = true, held = ep->ctrl_held > 0;
    int rc = 0;

    ep->ctrl_waits = true;
    while (rc == 0 && more && ep->ctrl.tx_posted - ep->ctrl.tx_done < R2_CTRL_TX) {
        if (!ep->ctrl_held) {
            uint32_t slot = ep->ctrl.tx_posted % R2_CTRL_TX;

            ep->ctrl_held =
                r2_verbs.ev->next_ctrl(ep->owner, ep, r2_v_ctrl_tx(ep, slot), R2_CTRL_SLOT);
            ep->ctrl_left = ep->ctrl_held;
        }
        more = held || ep->ctrl_held == R2_CTRL_SLOT;
        held = false;
        if (ep->ctrl_held && !let_through(ep, R2_FAULT_TX, &ep->ctrl_left))
            return 0;
        if (ep->ctrl_held)
            rc = send_ctrl(ep);
    }
    ep->ctrl_waits = more;
    return rc;
}

/* Test chunks are made of numbers that no other pair of endpoints has: what chance has left in the
 * receiver's memory, or another generation has written, is not taken for them. */
static void test_numbers(const struct r2_ep *ep, struct r2_prng *p)
{
    uint64_t a = ep->params.initiator ? ep->mine.psn : ep->theirs.psn;
    uint64_t b = ep->params.initiator ? ep->theirs.psn : ep->mine.psn;

    r2_prng_seed(p, (a << 40 | b << 16) ^ ep->params.gen);
}

void r2_data_test_fill(struct r2_ep *ep)
{
    uint64_t *at = (uint64_t *)(void *)r2_v_test(ep, 0, 0);
    struct r2_prng p;

    test_numbers(ep, &p);
    for (size_t i = 0; i < R2_TEST_LEN / sizeof(*at); i++)
        at[i] = r2_prng_next(&p);
}

/* Where one is read and written: chunks of the job come behind it. */
static int place_test(struct r2_ep *ep, int q, struct ibv_sge *data, struct ibv_send_wr *write)
{
    uint32_t n = ep->bulk[q].tx_posted;

    if (n >= R2_TEST_EACH || data->length != R2_TEST_LEN)
        return -EPROTO;
    data->addr = (uint64_t)(uintptr_t)r2_v_test(ep, 0, 0);
    data->lkey = ep->mr->lkey;
    write->wr.rdma.remote_addr =
        ep->theirs.test_addr + ((uint64_t)q * R2_TEST_EACH + n) * R2_TEST_LEN;
    write->wr.rdma.rkey = ep->theirs.own_key;
    return 0;
}

/* R: the n-th chunk of the queue pair is a test chunk. Its head has arrived, so must its bytes. */
static int check_test(struct r2_ep *ep, int q, uint32_t n, const struct r2_bulk *c)
{
    const uint64_t *at;
    struct r2_prng p;
    bool right = true;

    if (n >= R2_TEST_EACH || c->len != R2_TEST_LEN)
        return -EPROTO;
    at = (const uint64_t *)(const void *)r2_v_test(ep, q, n);
    test_numbers(ep, &p);
    for (size_t i = 0; i < R2_TEST_LEN / sizeof(*at); i++)
        right &= at[i] == r2_prng_next(&p);
    if (right)
        return 0;
    ep->cause = "a test chunk arrived damaged";
    return -EBADMSG;
}

static void fill_head(struct r2_ep *ep, const struct r2_bulk *c, struct r2_data_head *h)
{
    memset(h, 0, sizeof(*h));
    h->magic = R2_DATA_MAGIC;
    h->version = R2_WIRE_VERSION;
    h->conn = c->conn;
    h->seq = c->seq;
    h->offset = c->offset;
    h->total = c->total;
    h->len = c->len;
    h->gen = ep->params.gen;
    if (r2_settings_get()->verify && c->conn != R2_CONN_TEST && !c->keys->device) {
        h->flags = R2_BULK_CRC;
        h->crc = r2_crc32c(0, c->data, c->len);
    }
    h->head_crc = r2_crc32c(0, h, offsetof(struct r2_data_head, head_crc));
}

static int send_chunk(struct r2_ep *ep, int q, const struct r2_bulk *c)
{
    struct r2_vqp *v = &ep->bulk[q];
    uint32_t slot = v->tx_posted % R2_BULK_TX;
    uint8_t *head = r2_v_head_tx(ep, q, slot);
    struct ibv_sge data = {.addr = (uint64_t)(uintptr_t)c->data, .length = c->len};
    struct ibv_sge id = {.addr = (uint64_t)(uintptr_t)head,
                         .length = sizeof(struct r2_data_head),
                         .lkey = ep->mr->lkey};
    struct ibv_send_wr say = {.wr_id = r2_wr_id(R2_WR_BULK_TX, q, slot),
                              .sg_list = &id,
                              .num_sge = 1,
                              .opcode = IBV_WR_SEND_WITH_IMM,
                              .send_flags = IBV_SEND_SIGNALED,
                              .imm_data = htonl(v->tx_posted)};
    struct ibv_send_wr write = {.wr_id = say.wr_id,
                                .next = &say,
                                .sg_list = &data,
                                .num_sge = 1,
                                .opcode = IBV_WR_RDMA_WRITE,
                                .wr.rdma = {.remote_addr = c->remote_addr, .rkey = c->remote_key}};
    struct r2_data_head h;
    int rc = 0;

    if (c->conn == R2_CONN_TEST)
        rc = place_test(ep, q, &data, &write);
    else
        data.lkey = atomic_load(&c->keys->lkey[ep->nic->slot]);
    if (rc)
        return rc;
    fill_head(ep, c, &h);
    memcpy(head, &h, sizeof(h));
    ep->tx[q * R2_BULK_TX + (int)slot] = *c;
    v->tx_posted++;
    return r2_data_post(v->qp, &write);
}

/* One that a fault has held back stays with its lane, which has room: nothing came before it. */
static int free_queue(struct r2_ep *ep)
{
    if (ep->has_held && ep->held.conn == R2_CONN_TEST)
        return ep->held.lane;
    for (int i = 0; i < ep->n_bulk; i++) {
        int q = (int)(ep->next_bulk++ % (unsigned)ep->n_bulk);

        if (ep->bulk[q].tx_posted - ep->bulk[q].tx_done < R2_BULK_TX)
            return q;
    }
    return -1;
}

int r2_data_bulk(struct r2_ep *ep)
{
    int rc = 0, q;

    ep->bulk_waits = ep->params.initiator;
    while (rc == 0 && ep->bulk_waits && (q = free_queue(ep)) >= 0) {
        if (!ep->has_held) {
            ep->held.lane = (uint16_t)q;
            ep->has_held = r2_verbs.ev->next_chunk(ep->owner, ep, &ep->held);
            ep->held_left = ep->held.len;
        }
        ep->bulk_waits = ep->has_held;
        if (!ep->has_held || !let_through(ep, R2_FAULT_TX, &ep->held_left))
            break;
        ep->has_held = false;
        rc = send_chunk(ep, q, &ep->held);
    }
    return rc;
}

static int send_beat(struct r2_ep *ep)
{
    struct ibv_sge sge = {
        .addr = (uint64_t)(uintptr_t)r2_v_beat(ep, 0), .length = 8, .lkey = ep->mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = r2_wr_id(R2_WR_BEAT, 0, 0),
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_WRITE,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = ep->theirs.beat_addr, .rkey = ep->theirs.own_key}};
    int rc;

    ep->beat_busy = true;
    ep->ctrl_first = true;
    ep->beat_at = r2_now_ns();
    rc = r2_stalls_look(ep, ep->beat_at);
    r2_stalls_word(ep);
    if (rc == 0)
        rc = r2_data_post(ep->beat.qp, &wr);
    return rc || !ep->params.initiator ? rc : r2_counts_send(ep, ep->beat_at);
}

int r2_data_beat(struct r2_ep *ep)
{
    unsigned asked = atomic_load(&ep->marked);
    int rc;

    if (ep->beat_busy || asked == ep->beat_done ||
        r2_fault_is(ep->params.local_nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX))
        return 0;
    rc = r2_data_poll(ep); /* what has completed is not to be judged by this one */
    ep->beat_asked = asked;
    return rc ? rc : send_beat(ep);
}

/* ---- in */

/* Arrivals are taken first, and the next ones when a fault has let these through (may_take). */
static void owe(struct r2_ep *ep, size_t bytes)
{
    ep->rx_debt = r2_fault_none(ep->params.local_nic) ? 0 : ep->rx_debt + bytes;
}

/* The next piece of the stream of frames. */
static int piece(struct r2_ep *ep, const struct ibv_wc *wc)
{
    uint32_t slot = (uint32_t)wc->wr_id;

    if (slot != ep->ctrl.rx_done++ % R2_CTRL_RX || wc->byte_len > R2_CTRL_SLOT)
        return -EPROTO; /* or one before it never came: a piece of the stream would be missing */
    memcpy(ep->rx_buf + ep->rx_len, r2_v_ctrl_rx(ep, slot), wc->byte_len);
    ep->rx_len += wc->byte_len;
    return 0;
}

static int take_ctrl(struct r2_ep *ep, const struct ibv_wc *wc)
{
    int rc = piece(ep, wc);

    if (rc == 0) {
        owe(ep, wc->byte_len);
        rc = r2_data_post_ctrl_rx(ep, (uint32_t)wc->wr_id);
    }
    if (rc == 0)
        rc = r2_frames_take(r2_verbs.ev, ep->owner, ep, ep->rx_buf, &ep->rx_len);
    ep->deaf |= rc < 0;
    return rc;
}

/* Acknowledgements count whoever brings them, and who said them may not be there any more to repeat
 * them: its NIC was told that they have arrived (sent_ctrl). What a fault holds back has not. */
bool r2_data_last_words(struct r2_ep *ep, const struct ibv_wc *wc)
{
    if (wc->status != IBV_WC_SUCCESS || wc->wr_id >> 48 != R2_WR_CTRL_RX || ep->deaf ||
        !ep->params.initiator || !r2_fault_none(ep->params.local_nic))
        return false;
    ep->deaf = piece(ep, wc) || r2_frames_take(r2_verbs.ev, ep->owner, ep, ep->rx_buf, &ep->rx_len);
    return true;
}

static int arrived(struct r2_ep *ep, struct r2_bulk *c, uint16_t lane)
{
    int rc = r2_verbs.ev->chunk_claim(ep->owner, ep, c, lane);

    if (rc)
        return rc < 0 ? rc : 0;
    if ((c->flags & R2_BULK_CRC) && r2_crc32c(0, c->data, c->len) != c->crc) {
        r2_verbs.ev->chunk_dropped(ep->owner, ep, c, true);
        ep->cause = "a chunk arrived damaged (CRC32C)";
        return -EBADMSG;
    }
    r2_verbs.ev->chunk_done(ep->owner, ep, c);
    return 0;
}

/* A queue pair uses its receives in the order in which they were posted. Those that it left out
 * were used by counts whose arrivals got lost, as the chunks are all there: they are posted again,
 * in that order. One that comes late instead is far ahead, which ends the path. */
static int post_skipped(struct r2_ep *ep, int q, uint32_t slot)
{
    struct r2_vqp *v = &ep->bulk[q];
    uint32_t skipped = (slot - v->rx_slot) % R2_BULK_RX;
    int rc = skipped < R2_BULK_RX / 2 ? 0 : -EPROTO;

    for (; rc == 0 && skipped; skipped--)
        rc = r2_data_post_bulk_rx(ep, q, v->rx_slot++ % R2_BULK_RX);
    v->rx_slot++;
    return rc;
}

static int take_chunk(struct r2_ep *ep, const struct ibv_wc *wc)
{
    int q = (int)(wc->wr_id >> 32 & 0xffff), rc;
    uint32_t slot = (uint32_t)wc->wr_id;
    struct r2_data_head h;
    struct r2_bulk c = {0};

    if (q >= ep->n_bulk || slot >= R2_BULK_RX || !(wc->wc_flags & IBV_WC_WITH_IMM))
        return -EPROTO;
    if (ntohl(wc->imm_data) != ep->bulk[q].rx_done)
        return r2_counts_missing(ep, ntohl(wc->imm_data) - ep->bulk[q].rx_done);
    rc = post_skipped(ep, q, slot);
    if (rc)
        return rc;
    if (wc->byte_len == 0) /* a count, and it is right */
        return r2_data_post_bulk_rx(ep, q, slot);
    if (wc->byte_len != sizeof(h))
        return -EPROTO;
    ep->bulk[q].rx_done++;
    memcpy(&h, r2_v_head_rx(ep, q, slot), sizeof(h));
    if (h.magic != R2_DATA_MAGIC || h.version != R2_WIRE_VERSION || h.gen != ep->params.gen ||
        h.head_crc != r2_crc32c(0, &h, offsetof(struct r2_data_head, head_crc)) || h.len == 0)
        return -EPROTO;
    c.conn = h.conn;
    c.seq = h.seq;
    c.offset = h.offset;
    c.total = h.total;
    c.len = h.len;
    c.crc = h.crc;
    c.flags = h.flags & R2_BULK_CRC;
    owe(ep, c.len);
    if (c.conn == R2_CONN_TEST) {
        c.flags = 0; /* all of it is looked at */
        rc = check_test(ep, q, ep->bulk[q].rx_done - 1, &c);
        if (rc)
            return rc;
    }
    rc = arrived(ep, &c, (uint16_t)(q + 1));
    return rc ? rc : r2_data_post_bulk_rx(ep, q, slot);
}

static int sent_ctrl(struct r2_ep *ep, const struct ibv_wc *wc)
{
    uint32_t slot;
    bool signalled = false;

    ep->ctrl.ended++;
    while (!signalled && ep->ctrl.tx_done != ep->ctrl.tx_posted) {
        slot = ep->ctrl.tx_done++ % R2_CTRL_TX;
        signalled = ep->ctrl_signals >> slot & 1;
        ep->ctrl_sent += ep->ctrl_len[slot];
    }
    if (!signalled || slot != (uint32_t)wc->wr_id)
        return -EPROTO; /* one before it never came */
    /* Acknowledged by the peer's NIC: it gets there even if this process ends now. */
    r2_verbs.ev->ctrl_sent(ep->owner, ep, ep->ctrl_sent);
    return 0;
}

static int sent_chunk(struct r2_ep *ep, const struct ibv_wc *wc)
{
    int q = (int)(wc->wr_id >> 32 & 0xffff);
    struct r2_vqp *v;

    if (q >= ep->n_bulk || (uint32_t)wc->wr_id != ep->bulk[q].tx_done % R2_BULK_TX)
        return -EPROTO; /* a queue pair completes in order */
    v = &ep->bulk[q];
    v->tx_done++;
    v->ended++;
    ep->bulk_waits = true;
    r2_verbs.ev->chunk_sent(ep->owner, ep,
                            &ep->tx[q * R2_BULK_TX + (int)((v->tx_done - 1) % R2_BULK_TX)]);
    return 0;
}

static int report(struct r2_ep *ep, const struct ibv_wc *wc)
{
    const struct r2_wc_info *info = r2_wc_info(wc->status);
    int nic = ep->params.local_nic;

    if (info->blame != R2_BLAME_NOBODY) {
        ep->cause = info->meaning;
        R2_WARN_LIMIT("NIC %s (%s port %u): completion %s: %s (vendor 0x%x)",
                      r2_local_nic(nic)->name, ep->hca->name, ep->port, info->name, info->meaning,
                      wc->vendor_err);
    }
    return -info->err;
}

static int one(struct r2_ep *ep, const struct ibv_wc *wc)
{
    if (wc->status != IBV_WC_SUCCESS)
        return report(ep, wc);
    switch (wc->wr_id >> 48) {
    case R2_WR_CTRL_TX:
        return sent_ctrl(ep, wc);
    case R2_WR_CTRL_RX:
        return take_ctrl(ep, wc);
    case R2_WR_BULK_TX:
        return sent_chunk(ep, wc);
    case R2_WR_BULK_RX:
        return take_chunk(ep, wc);
    case R2_WR_BEAT:
        ep->beat_busy = false;
        ep->beat_done = ep->beat_asked;
        if (atomic_load(&ep->marked) != ep->beat_done)
            atomic_fetch_or(&ep->want, R2_WANT_BEAT); /* asked for while it was under way */
        ep->rtt_ns = r2_now_ns() - ep->beat_at;
        return 0;
    case R2_WR_COUNT:
        return r2_counts_sent(ep, wc);
    default:
        return -EPROTO;
    }
}

/* Without a fault nothing is owed. What has been taken is through the fault; of nothing, one byte
 * is asked for. */
static bool may_take(struct r2_ep *ep)
{
    size_t debt = ep->rx_debt ? ep->rx_debt : 1;
    bool clear = let_through(ep, R2_FAULT_RX, &debt);

    ep->rx_debt = ep->rx_debt ? debt : 0;
    return clear;
}

/* Where the engine may have something to say or to kick then. */
static bool ends_burst(const struct ibv_wc *wc)
{
    uint64_t kind = wc->wr_id >> 48;

    return kind >= R2_WR_CTRL_RX && kind <= R2_WR_BULK_RX;
}

int r2_data_poll(struct r2_ep *ep)
{
    struct ibv_wc wc[POLL_BATCH];
    bool any = false, clear = true;
    int n = 0, rc = 0;

    ep->cq_empty = false;
    for (int turn = 0; turn < POLL_TURNS && rc == 0; turn++) {
        clear = r2_fault_none(ep->params.local_nic) || may_take(ep);
        if (!clear)
            break;
        n = ibv_poll_cq(ep->cq, POLL_BATCH, wc);
        for (int i = 0; i < n; i++) {
            if (rc)
                r2_data_last_words(ep, &wc[i]);
            else
                rc = one(ep, &wc[i]);
            any |= ends_burst(&wc[i]);
        }
        if (n < POLL_BATCH)
            break;
    }
    if (n >= 0 && n < POLL_BATCH && rc == 0 && clear)
        r2_stalls_empty(ep);
    if (any)
        r2_verbs.ev->burst_end(ep->owner, ep);
    if (n == POLL_BATCH)
        atomic_fetch_or(&ep->want, R2_WANT_POLL);
    return n < 0 ? -EIO : rc;
}

void r2_data_give_back(struct r2_ep *ep)
{
    for (int q = 0; q < ep->n_bulk && ep->tx; q++) {
        struct r2_vqp *v = &ep->bulk[q];

        while (v->tx_done != v->tx_posted) {
            struct r2_bulk *c = &ep->tx[q * R2_BULK_TX + (int)(v->tx_done++ % R2_BULK_TX)];

            c->unsent = c->len; /* for all that is known */
            r2_verbs.ev->chunk_sent(ep->owner, ep, c);
        }
    }
    ep->held.unsent = ep->held.len;
    if (ep->has_held)
        r2_verbs.ev->chunk_sent(ep->owner, ep, &ep->held);
    ep->has_held = false;
}
