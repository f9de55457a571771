#define _GNU_SOURCE
#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "io/fault.h"
#include "settings/settings.h"
#include "transport/frames.h"
#include "transport/tcp/tcp.h"
#include "util/copy.h"
#include "util/crc32c.h"

/* Bytes per turn: the other lanes of the thread, and what it has to send, wait that long. */
#define RX_BUDGET (256 * 1024)
#define SCRATCH (64 * 1024)

/* Where drained bytes go; every thread may write to it, nobody reads it. */
static _Thread_local uint8_t scratch[SCRATCH];

/* Bytes that may be read now; arranges the next look when none may. */
static size_t rx_allow(struct r2_lane *lane, size_t want)
{
    uint64_t retry = 0;
    size_t ok = r2_fault_allow(lane->nic, R2_FAULT_RX, want, &retry);

    if (ok == 0 && retry)
        r2_timer_sooner(&lane->timer, retry);
    return ok;
}

/* `n`: what the read that was allowed `ok` bytes returned. */
static void rx_moved(const struct r2_lane *lane, size_t ok, ssize_t n)
{
    size_t moved = n > 0 ? (size_t)n : 0;
    int saved = errno;

    if (moved < ok)
        r2_fault_unmoved(lane->nic, R2_FAULT_RX, ok - moved);
    errno = saved;
}

/* The kernel copies into a buffer in no order within a line. A chunk that must be checked first,
 * or whose reader polls flags inside it, is received beside its place and copied there. */
static bool staged(const struct r2_bulk *c)
{
    return c->flags & (R2_BULK_CRC | R2_BULK_LINES | R2_BULK_COPY);
}

static int begin_body(struct r2_lane *lane)
{
    struct r2_bulk *c = &lane->rx_chunk;
    struct r2_ep *ep = lane->ep;
    struct r2_data_head h;
    int rc;

    memcpy(&h, lane->rx_head, sizeof(h));
    if (h.magic != R2_DATA_MAGIC || h.version != R2_WIRE_VERSION || h.gen != ep->params.gen ||
        h.head_crc != r2_crc32c(0, &h, offsetof(struct r2_data_head, head_crc)) || h.len == 0 ||
        h.len > R2_TCP_MAX_CHUNK)
        return -EPROTO;
    memset(c, 0, sizeof(*c));
    c->conn = h.conn;
    c->seq = h.seq;
    c->offset = h.offset;
    c->total = h.total;
    c->len = h.len;
    c->crc = h.crc;
    c->flags = h.flags & (R2_BULK_CRC | R2_BULK_COPY | R2_BULK_LIMITED);
    lane->rx_off = 0;
    lane->rx_head_len = 0;
    /* A copy claims nothing until it is whole: meanwhile the original may come. */
    rc = c->flags & R2_BULK_COPY ? 0 : r2_tcp.ev->chunk_claim(ep->owner, ep, c, lane->index);
    if (rc < 0)
        return rc;
    lane->rx_state = rc ? R2_RX_DRAIN : R2_RX_BODY;
    if (rc == 0 && staged(c) && c->len > lane->rx_stage_len) {
        r2_mem_less(lane->rx_stage_len);
        free(lane->rx_stage);
        lane->rx_stage = malloc(c->len);
        lane->rx_stage_len = lane->rx_stage ? c->len : 0;
        r2_mem_more(lane->rx_stage_len);
        if (!lane->rx_stage) {
            lane->rx_state = R2_RX_DRAIN;
            if (!(c->flags & R2_BULK_COPY))
                r2_tcp.ev->chunk_dropped(ep->owner, ep, c, false);
            return -ENOMEM; /* the path is lost, the bytes come over another one */
        }
    }
    return 0;
}

static int end_body(struct r2_lane *lane)
{
    struct r2_bulk *c = &lane->rx_chunk;
    struct r2_ep *ep = lane->ep;
    bool mine = lane->rx_state == R2_RX_BODY;

    lane->rx_state = R2_RX_HEAD;
    if (!mine)
        return 0;
    if ((c->flags & R2_BULK_CRC) && r2_crc32c(0, lane->rx_stage, c->len) != c->crc) {
        r2_tcp.ev->chunk_dropped(ep->owner, ep, c, true);
        return -EBADMSG;
    }
    if (c->flags & R2_BULK_COPY) {
        int rc = r2_tcp.ev->chunk_claim(ep->owner, ep, c, lane->index);

        if (rc)
            return rc < 0 ? rc : 0;
    }
    if (staged(c))
        r2_copy_lines(c->data, lane->rx_stage, c->len, c->offset);
    r2_tcp.ev->chunk_done(ep->owner, ep, c);
    return 0;
}

/* Reads the rest of the payload and, in the same call, the next head. `*asked`: for how much. */
static ssize_t read_body(struct r2_lane *lane, size_t ok, size_t *asked)
{
    struct r2_bulk *c = &lane->rx_chunk;
    struct iovec iov[2];
    struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 2};
    size_t rest = c->len - lane->rx_off;
    ssize_t n;

    if (lane->rx_state == R2_RX_DRAIN) {
        iov[0].iov_base = scratch;
        iov[0].iov_len = rest < SCRATCH ? rest : SCRATCH;
    } else {
        iov[0].iov_base = (staged(c) ? lane->rx_stage : c->data) + lane->rx_off;
        iov[0].iov_len = rest;
    }
    if (iov[0].iov_len > ok)
        iov[0].iov_len = ok;
    if (iov[0].iov_len < rest)
        msg.msg_iovlen = 1;
    iov[1].iov_base = lane->rx_head;
    iov[1].iov_len = sizeof(lane->rx_head);
    *asked = iov[0].iov_len + (msg.msg_iovlen == 2 ? iov[1].iov_len : 0);
    n = recvmsg(lane->io.fd, &msg, MSG_DONTWAIT);
    if (n <= 0)
        return n;
    if ((size_t)n > rest) {
        lane->rx_head_len = (size_t)n - rest;
        lane->rx_off = c->len;
    } else {
        lane->rx_off += (size_t)n;
    }
    return n;
}

static ssize_t read_head(struct r2_lane *lane)
{
    ssize_t n = recv(lane->io.fd, lane->rx_head + lane->rx_head_len,
                     sizeof(lane->rx_head) - lane->rx_head_len, MSG_DONTWAIT);

    if (n > 0)
        lane->rx_head_len += (size_t)n;
    return n;
}

/* One read and what follows from it: > 0 go on, 0 empty, -errno. */
static int rx_step(struct r2_lane *lane, size_t *moved)
{
    size_t rest = lane->rx_state == R2_RX_HEAD ? sizeof(lane->rx_head) - lane->rx_head_len
                                               : lane->rx_chunk.len - lane->rx_off;
    bool dry = false;
    ssize_t n;

    if (rest) {
        size_t ok = rx_allow(lane, rest), asked = rest;

        if (ok == 0)
            return 0;
        n = lane->rx_state == R2_RX_HEAD ? read_head(lane) : read_body(lane, ok, &asked);
        rx_moved(lane, ok, n);
        if (n == 0)
            return -ECONNRESET;
        if (n < 0)
            return errno == EINTR ? 1 : errno == EAGAIN ? 0 : -errno;
        *moved += (size_t)n;
        /* It was emptied, and what comes now is an event of its own, unless it is the end. */
        dry = (size_t)n < asked && !atomic_load(&lane->rx_end);
    }
    if (lane->rx_state == R2_RX_HEAD) {
        int rc = lane->rx_head_len == sizeof(lane->rx_head) ? begin_body(lane) : 0;

        return rc < 0 ? rc : !dry;
    }
    if (lane->rx_off == lane->rx_chunk.len) {
        int rc = end_body(lane);

        return rc < 0 ? rc : !dry || lane->rx_head_len == sizeof(lane->rx_head);
    }
    return !dry;
}

/* There is more to read, after others had their turn. */
static void rx_again_later(struct r2_lane *lane)
{
    atomic_store(&lane->rx_again, true);
    r2_lane_kick(lane);
}

int r2_lane_rx_bulk(struct r2_lane *lane)
{
    size_t moved = 0;
    int rc;

    do {
        rc = rx_step(lane, &moved);
    } while (rc > 0 && moved < RX_BUDGET);
    if (moved)
        r2_tcp.ev->burst_end(lane->ep->owner, lane->ep);
    if (rc > 0)
        rx_again_later(lane);
    return rc < 0 ? rc : 0;
}

int r2_lane_rx_ctrl(struct r2_lane *lane)
{
    size_t moved = 0;
    int rc = 0;

    if (!lane->rx_buf) {
        lane->rx_buf = malloc(R2_TCP_CTRL_RX);
        if (!lane->rx_buf)
            return -ENOMEM;
        r2_mem_more(R2_TCP_CTRL_RX);
    }
    while (moved < RX_BUDGET) {
        size_t room = R2_TCP_CTRL_RX - lane->rx_len, ok = rx_allow(lane, room);
        bool entered;
        ssize_t n;

        if (ok == 0)
            break;
        entered = r2_lane_enter(lane);
        n = recv(lane->io.fd, lane->rx_buf + lane->rx_len, ok, MSG_DONTWAIT);
        r2_lane_leave(lane, entered);
        rx_moved(lane, ok, n);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            rc = n == 0 ? -ECONNRESET : errno == EAGAIN ? 0 : -errno;
            break;
        }
        lane->rx_len += (size_t)n;
        moved += (size_t)n;
        atomic_fetch_add_explicit(&lane->rx_got, (size_t)n, memory_order_relaxed);
        rc = r2_frames_take(r2_tcp.ev, lane->ep->owner, lane->ep, lane->rx_buf, &lane->rx_len);
        if (rc < 0 || ((size_t)n < ok && !atomic_load(&lane->rx_end)))
            break;
    }
    if (moved)
        r2_tcp.ev->burst_end(lane->ep->owner, lane->ep);
    if (moved >= RX_BUDGET)
        rx_again_later(lane);
    return rc;
}

/* Bounded: a peer that lives may go on talking. */
int r2_lane_rx_rest(struct r2_lane *lane)
{
    int left = 0, rc;

    if (ioctl(lane->io.fd, SIOCINQ, &left) < 0)
        left = 0;
    do {
        rc = r2_lane_rx_ctrl(lane);
        left -= RX_BUDGET;
    } while (rc == 0 && left > 0);
    return rc;
}
