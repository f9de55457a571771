#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "io/fault.h"
#include "settings/settings.h"
#include "transport/tcp/tcp.h"
#include "util/clock.h"
#include "util/crc32c.h"

/* `n`: what the call that was allowed `ok` bytes returned. */
static void tx_moved(const struct r2_lane *lane, size_t ok, ssize_t n)
{
    size_t moved = n > 0 ? (size_t)n : 0;
    int saved = errno;

    if (moved < ok)
        r2_fault_unmoved(lane->nic, R2_FAULT_TX, ok - moved);
    errno = saved;
}

static void begin_chunk(struct r2_lane *lane)
{
    struct r2_bulk *c = &lane->tx_chunk;
    struct r2_data_head *h = &lane->tx_head;

    memset(h, 0, sizeof(*h));
    h->magic = R2_DATA_MAGIC;
    h->version = R2_WIRE_VERSION;
    h->conn = c->conn;
    h->seq = c->seq;
    h->offset = c->offset;
    h->total = c->total;
    h->len = c->len;
    h->gen = lane->ep->params.gen;
    h->flags = c->flags & (R2_BULK_COPY | R2_BULK_LIMITED);
    if (r2_settings_get()->verify) {
        h->flags |= R2_BULK_CRC;
        h->crc = r2_crc32c(0, c->data, c->len);
    }
    h->head_crc = r2_crc32c(0, h, offsetof(struct r2_data_head, head_crc));
    lane->tx_off = 0;
    lane->tx_data = c->data;
    lane->tx_released = false;
    lane->tx_active = true;
}

/* 1 when the chunk is with the kernel, 0 when the socket is full or the NIC holds back. */
static int push_chunk(struct r2_lane *lane)
{
    size_t whole = sizeof(lane->tx_head) + lane->tx_chunk.len;

    while (lane->tx_off < whole) {
        struct iovec iov[2];
        struct msghdr msg = {.msg_iov = iov};
        size_t head = sizeof(lane->tx_head), off = lane->tx_off, want = whole - off, ok, may;
        uint64_t retry = 0;
        ssize_t n;

        ok = r2_fault_allow(lane->nic, R2_FAULT_TX, want, &retry);
        if (ok == 0) {
            if (retry)
                r2_timer_sooner(&lane->timer, retry);
            return r2_tcp_broken(lane->nic) ? -ECONNRESET : 0;
        }
        may = ok;
        if (off < head) {
            iov[msg.msg_iovlen].iov_base = (uint8_t *)&lane->tx_head + off;
            iov[msg.msg_iovlen++].iov_len = head - off < ok ? head - off : ok;
            ok -= iov[0].iov_len;
            off = head;
        }
        if (ok) {
            iov[msg.msg_iovlen].iov_base = (void *)(uintptr_t)(lane->tx_data + (off - head));
            iov[msg.msg_iovlen++].iov_len = ok;
        }
        n = sendmsg(lane->io.fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        tx_moved(lane, may, n);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : -errno;
        lane->tx_off += (size_t)n;
        lane->moved += (size_t)n;
    }
    return 1;
}

int r2_lane_tx_bulk(struct r2_lane *lane, int chunks)
{
    struct r2_ep *ep = lane->ep;

    if (!ep->params.initiator)
        return 0;
    for (int i = 0; i < chunks; i++) {
        int rc;

        if (!lane->tx_active) {
            /* Idle before asking: work that appears after a refusal finds the lane idle and
             * kicks it; seq_cst on both sides, with the peer's lock in between. */
            atomic_store(&lane->tx_idle, true);
            if (!r2_bulk_uses(ep, lane->index)) { /* not any more: others do what there is */
                r2_bulk_kick(ep, 1, R2_TCP_MAX_LANES);
                return 0;
            }
            lane->tx_chunk.lane = (uint16_t)(lane->index - 1);
            if (!r2_tcp.ev->next_chunk(ep->owner, ep, &lane->tx_chunk))
                return 0;
            atomic_store(&lane->tx_idle, false);
            atomic_store_explicit(&lane->tx_since, r2_now_ns(), memory_order_relaxed);
            begin_chunk(lane);
        }
        rc = push_chunk(lane);
        if (rc == 0 && !atomic_exchange(&lane->tx_full, true) && r2_bulk_keeps_to_few(ep))
            r2_tcp.ev->blocked(ep->owner, ep);
        if (rc <= 0)
            return rc;
        if (atomic_load_explicit(&lane->tx_full, memory_order_relaxed)) /* only it writes it */
            atomic_store(&lane->tx_full, false);
        lane->tx_active = false;
        if (!lane->tx_released) {
            lane->tx_released = true;
            r2_tcp.ev->chunk_sent(ep->owner, ep, &lane->tx_chunk);
        }
    }
    r2_lane_kick(lane);
    return 0;
}

/* Sends what is in ctrl_buf. 1 all gone, 0 blocked. */
static int push_ctrl(struct r2_lane *lane)
{
    while (lane->ctrl_off < lane->ctrl_len) {
        uint64_t retry = 0;
        size_t want = lane->ctrl_len - lane->ctrl_off, ok;
        bool entered;
        ssize_t n;

        ok = r2_fault_allow(lane->nic, R2_FAULT_TX, want, &retry);
        if (ok == 0) {
            if (retry)
                r2_timer_sooner(&lane->timer, retry);
            return r2_tcp_broken(lane->nic) ? -ECONNRESET : 0;
        }
        entered = r2_lane_enter(lane);
        n = send(lane->io.fd, lane->ctrl_buf + lane->ctrl_off, ok, MSG_NOSIGNAL | MSG_DONTWAIT);
        r2_lane_leave(lane, entered);
        tx_moved(lane, ok, n);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : -errno;
        lane->ctrl_off += (size_t)n;
        atomic_fetch_add(&lane->ctrl_total, (uint64_t)n);
    }
    lane->ctrl_off = lane->ctrl_len = 0;
    return 1;
}

static int lane_tx_ctrl(struct r2_lane *lane)
{
    struct r2_ep *ep = lane->ep;
    int rc;

    if (!lane->ctrl_buf) {
        lane->ctrl_buf = malloc(R2_TCP_CTRL_TX);
        if (!lane->ctrl_buf)
            return -ENOMEM;
        r2_mem_more(R2_TCP_CTRL_TX);
    }
    for (;;) {
        uint64_t total;

        rc = push_ctrl(lane);
        if (rc <= 0)
            return rc;
        total = atomic_load(&lane->ctrl_total);
        if (total != lane->ctrl_said)
            r2_tcp.ev->ctrl_sent(ep->owner, ep, total);
        lane->ctrl_said = total;
        lane->ctrl_len = r2_tcp.ev->next_ctrl(ep->owner, ep, lane->ctrl_buf, R2_TCP_CTRL_TX);
        if (lane->ctrl_len == 0)
            break;
        atomic_store(&lane->tx_full, true); /* before: it may be full, and empty again, at once */
    }
    if (atomic_load_explicit(&lane->tx_full, memory_order_relaxed))
        atomic_store(&lane->tx_full, false);
    return 0;
}

void r2_lane_flush_later(struct r2_lane *lane)
{
    atomic_exchange(&lane->flush_wanted, 1);
    r2_lane_kick(lane);
}

/* Most events are bytes that have come: no look at the peer's outbox then. */
bool r2_lane_has_flush(struct r2_lane *lane)
{
    return atomic_load(&lane->flush_wanted) || atomic_load(&lane->tx_full);
}

/* Combining: whoever holds the lock looks again after it let go, so a thread that found it taken
 * may leave its frames to the holder. `flush_wanted` is set before the lock is tried and looked at
 * after it is released. Both are read-modify-write operations, acquire and release, so one comes
 * after the other. Either the holder sees the flag, or who sets it reads what the holder wrote and
 * finds the lock free. A load there would not do: a lock that is not had orders nothing.
 */
void r2_lane_flush(struct r2_lane *lane)
{
    int rc = 0;

    atomic_exchange(&lane->flush_wanted, 1);
    while (atomic_fetch_or(&lane->flush_wanted, 0)) {
        if (pthread_mutex_trylock(&lane->tx_lock))
            return;
        atomic_store(&lane->flush_wanted, 0);
        if (!lane->closed && atomic_load(&lane->open))
            rc = lane_tx_ctrl(lane);
        pthread_mutex_unlock(&lane->tx_lock);
        if (rc < 0) {
            r2_ep_lane_failed(lane->ep, -rc);
            return;
        }
    }
}
