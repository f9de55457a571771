#define _GNU_SOURCE
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "transport/tcp/tcp.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"

#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif
#ifndef TCP_RTO_MIN_US
#define TCP_RTO_MIN_US 45
#endif
#ifndef TCP_DELACK_MAX_US
#define TCP_DELACK_MAX_US 46
#endif

static void lane_ready(struct r2_io_fd *f, uint32_t events)
{
    struct r2_lane *lane = R2_CONTAINER_OF(f, struct r2_lane, io);

    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
        atomic_store(&lane->rx_end, true);
    if (events & ~(uint32_t)EPOLLOUT)
        atomic_store(&lane->rx_again, true);
    r2_lane_event(lane);
}

#define ENTER_NS (20 * R2_NS_PER_US)

bool r2_lane_enter(struct r2_lane *lane)
{
    uint64_t until = 0, now;

    if (r2_io_alone()) /* cores are few, and who is in there may have none */
        return false;
    while (atomic_exchange_explicit(&lane->in_call, true, memory_order_relaxed)) {
        now = r2_now_ns();
        until = until ? until : now + ENTER_NS;
        if (now > until)
            return false;
    }
    return true;
}

void r2_lane_leave(struct r2_lane *lane, bool entered)
{
    if (entered)
        atomic_store_explicit(&lane->in_call, false, memory_order_relaxed);
}

/* A lane that belongs to an endpoint lives as long as it: others reach it through ep->lanes. */
void r2_lane_free(struct r2_lane *lane)
{
    pthread_mutex_destroy(&lane->tx_lock);
    pthread_mutex_destroy(&lane->rx_lock);
    r2_mem_less(sizeof(*lane) + lane->tx_priv_len + lane->rx_stage_len +
                (lane->ctrl_buf ? R2_TCP_CTRL_TX : 0) + (lane->rx_buf ? R2_TCP_CTRL_RX : 0));
    free(lane->tx_priv);
    free(lane->ctrl_buf);
    free(lane->rx_stage);
    free(lane->rx_buf);
    free(lane);
}

static void lane_task(struct r2_task *t)
{
    struct r2_lane *lane = R2_CONTAINER_OF(t, struct r2_lane, task);
    struct r2_ep *ep = lane->ep; /* whoever queued the task took a reference to it */
    bool closed;

    r2_io_lock(&lane->rx_lock);
    closed = lane->closed;
    pthread_mutex_unlock(&lane->rx_lock);
    /* r2_lane_shut has unhooked the descriptor and kicked this task: no event names the lane. */
    if (!closed) {
        r2_lane_event(lane);
    } else if (!lane->reaped) {
        lane->reaped = true;
        if (lane->ep)
            r2_ep_put(lane->ep);
        else
            r2_lane_free(lane);
    }
    if (ep)
        r2_ep_put(ep);
}

void r2_lane_kick(struct r2_lane *lane)
{
    struct r2_ep *ep = lane->ep;

    if (ep)
        r2_ep_get(ep);
    if (!r2_task_kick(&lane->task) && ep)
        r2_ep_put(ep);
}

/* What has come is looked at before anybody is judged: this thread may be the one that is late.
 * False: it went on, or it is over. */
static bool stuck(struct r2_lane *lane, enum r2_lane_phase before)
{
    bool late;

    r2_lane_event(lane);
    pthread_mutex_lock(&lane->rx_lock);
    late = !lane->closed && lane->phase == before;
    if (!lane->closed && !late && lane->phase != R2_LANE_OPEN)
        r2_timer_set(&lane->timer, r2_now_ns() + R2_TCP_HANDSHAKE_NS); /* closing stops it */
    pthread_mutex_unlock(&lane->rx_lock);
    return late;
}

static void lane_timer(struct r2_timer *t, uint64_t now)
{
    struct r2_lane *lane = R2_CONTAINER_OF(t, struct r2_lane, timer);
    enum r2_lane_phase phase;
    bool late;

    (void)now;
    pthread_mutex_lock(&lane->rx_lock);
    phase = lane->phase;
    late = !lane->closed && phase != R2_LANE_OPEN;
    pthread_mutex_unlock(&lane->rx_lock);
    if (late && !stuck(lane, phase))
        return;
    if (!late) {
        atomic_store(&lane->rx_again, true);
        r2_lane_event(lane);
    } else if (lane->ep) {
        r2_ep_fail(lane->ep, ETIMEDOUT);
    } else {
        r2_tcp.ev->rejected(lane->nic, ETIMEDOUT);
        r2_lane_shut(lane, true);
    }
}

/* What a lost segment costs when nothing behind it tells of the loss: the kernel waits 200 ms at
 * least, a hundred times what a data centre's round trip takes. A repetition may come 30 ms after
 * the round trip: the other end, ours too, delays no acknowledgement for more than 10 ms where its
 * kernel can. Older kernels keep their times. */
static void set_timers(int fd)
{
    int one = 1, max_ms = 1000, min_us = 30000, ack_us = 10000;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &max_ms, sizeof(max_ms));    /* Linux 6.15 */
    setsockopt(fd, IPPROTO_TCP, TCP_RTO_MIN_US, &min_us, sizeof(min_us));    /* the same */
    setsockopt(fd, IPPROTO_TCP, TCP_DELACK_MAX_US, &ack_us, sizeof(ack_us)); /* the same */
}

struct r2_lane *r2_lane_new(int fd, int nic, struct r2_io *io, enum r2_lane_phase phase)
{
    struct r2_lane *lane = calloc(1, sizeof(*lane));

    if (!lane)
        return NULL;
    r2_mem_more(sizeof(*lane));
    set_timers(fd);
    lane->io.fd = fd;
    lane->io.io = io;
    lane->io.ready = lane_ready;
    lane->io.brief = true;
    lane->nic = nic;
    lane->phase = phase;
    atomic_init(&lane->tx_idle, true);
    r2_lock_init(&lane->tx_lock);
    r2_lock_init(&lane->rx_lock);
    r2_task_init(&lane->task, io, lane_task);
    lane->task.brief = true;
    r2_timer_init(&lane->timer, io, lane_timer);
    return lane;
}

int r2_lane_start(struct r2_lane *lane)
{
    return r2_io_add(lane->io.io, &lane->io);
}

/* The upcalls take the peer's lock; they come after the lane is marked closed, so that nothing of
 * it moves any more. */
static void give_back(struct r2_lane *lane)
{
    struct r2_ep *ep = lane->ep;

    if (!ep || lane->index == 0)
        return;
    if (lane->rx_state == R2_RX_BODY) {
        lane->rx_state = R2_RX_DRAIN;
        r2_tcp.ev->chunk_dropped(ep->owner, ep, &lane->rx_chunk, false);
    }
    if (lane->tx_active && !lane->tx_released) {
        size_t head = sizeof(lane->tx_head), moved = lane->tx_off > head ? lane->tx_off - head : 0;

        lane->tx_released = true;
        lane->tx_chunk.unsent = lane->tx_chunk.len - (uint32_t)moved;
        r2_tcp.ev->chunk_sent(ep->owner, ep, &lane->tx_chunk);
    }
}

void r2_lane_shut(struct r2_lane *lane, bool abort)
{
    int fd = -1;

    pthread_mutex_lock(&lane->rx_lock);
    pthread_mutex_lock(&lane->tx_lock);
    if (!lane->closed) {
        lane->closed = true;
        fd = lane->io.fd;
        if (!lane->ep)
            atomic_fetch_sub(&r2_tcp.pending, 1);
        give_back(lane);
        r2_timer_set(&lane->timer, 0);
        r2_io_del(&lane->io);
        r2_tcp_close_fd(fd, abort);
        lane->io.fd = -1;
    }
    pthread_mutex_unlock(&lane->tx_lock);
    pthread_mutex_unlock(&lane->rx_lock);
    if (fd >= 0)
        r2_lane_kick(lane);
}

/* Lets go of the socket of a lane without an endpoint, and returns it; the lane frees itself. */
static int lane_release(struct r2_lane *lane)
{
    int fd;

    pthread_mutex_lock(&lane->rx_lock);
    pthread_mutex_lock(&lane->tx_lock);
    fd = lane->closed ? -1 : lane->io.fd;
    if (fd >= 0) {
        lane->closed = true;
        atomic_fetch_sub(&r2_tcp.pending, 1);
        r2_timer_set(&lane->timer, 0);
        r2_io_del(&lane->io);
        lane->io.fd = -1;
    }
    pthread_mutex_unlock(&lane->tx_lock);
    pthread_mutex_unlock(&lane->rx_lock);
    if (fd >= 0)
        r2_lane_kick(lane);
    return fd;
}

static int receive(struct r2_lane *lane, bool *opened)
{
    int rc = 0;

    if (lane->phase != R2_LANE_OPEN) {
        rc = r2_lane_handshake(lane);
        if (rc != 1)
            return rc;
        *opened = true;
        return 0;
    }
    if (lane->index == 0 && atomic_load(&lane->ep->ending)) {
        rc = r2_lane_rx_rest(lane);
        return rc ? rc : -atomic_load(&lane->ep->ending);
    }
    if (!atomic_exchange(&lane->rx_again, false))
        return 0; /* kicked to send; edge-triggered: nothing has come since it was last empty */
    return lane->index ? r2_lane_rx_bulk(lane) : r2_lane_rx_ctrl(lane);
}

void r2_lane_event(struct r2_lane *lane)
{
    bool opened = false, open, unknown, young;
    struct r2_ep *ep;
    int rc = 0;

    r2_io_lock(&lane->rx_lock); /* a caller may be reading just this */
    if (lane->closed) {
        pthread_mutex_unlock(&lane->rx_lock);
        return;
    }
    young = lane->phase != R2_LANE_OPEN;
    rc = receive(lane, &opened);
    open = lane->phase == R2_LANE_OPEN;
    ep = lane->ep;
    unknown = !ep;
    if (ep)
        r2_ep_get(ep);
    pthread_mutex_unlock(&lane->rx_lock);
    if (unknown) {
        if (rc == 2) {
            struct r2_tcp_hello hello = lane->hello;
            int nic = lane->nic, fd = lane_release(lane);

            if (fd >= 0)
                r2_tcp_verbs_taker(fd, nic, &hello);
        }
        if (rc < 0) {
            if (rc != -ECONNRESET && rc != -EPIPE) /* it left by itself, as a probe does */
                r2_tcp.ev->rejected(lane->nic, -rc);
            r2_lane_shut(lane, true);
        }
        return;
    }
    if (young && rc == 0)
        rc = -r2_ep_late(ep);
    if (opened && rc == 0) {
        r2_ep_lane_open(lane);
        atomic_store(&lane->rx_again, true);
        r2_lane_flush_later(lane); /* what came behind the handshake has had its edge */
    }
    if (rc == 0 && open) {
        if (lane->index == 0) {
            if (r2_lane_has_flush(lane))
                r2_lane_flush(lane);
        } else {
            pthread_mutex_lock(&lane->tx_lock);
            if (!lane->closed)
                rc = r2_lane_tx_bulk(lane, R2_TCP_TX_TURN);
            pthread_mutex_unlock(&lane->tx_lock);
        }
    }
    if (rc < 0 && lane->index)
        r2_ep_lane_failed(ep, -rc);
    else if (rc < 0)
        r2_ep_fail(ep, -rc);
    r2_ep_put(ep);
}
