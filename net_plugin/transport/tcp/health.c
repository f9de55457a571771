/* How an endpoint is, as the kernels of both sides see it. Nothing here depends on what the peer's
 * process does: a stopped one's kernel acknowledges what its buffers can hold, and then answers
 * probes of the closed window. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sockios.h>
#include <linux/tcp.h> /* the whole of tcp_info: not together with netinet/tcp.h */
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "io/fault.h"
#include "settings/settings.h"
#include "transport/tcp/tcp.h"
#include "util/clock.h"
#include "util/log.h"

/* tcp_info.tcpi_state: netinet/tcp.h has names for them, and is not to be had here. */
enum { STATE_ESTABLISHED = 1, STATE_SYN_SENT = 2, STATE_CLOSE = 7 };

/* Where the kernel does not tell: how long a lane may show nothing. An idle path's heartbeats may
 * be further apart than that. */
#define HEARD_S 5
#define HEARD_BEATS 5

static uint64_t heard_ns(void)
{
    uint64_t beats = HEARD_BEATS * r2_settings_get()->heartbeat_idle_ns;

    return beats > HEARD_S * R2_NS_PER_S ? beats : HEARD_S * R2_NS_PER_S;
}

void r2_tcp_mark(struct r2_ep *ep)
{
    struct r2_lane *lane = r2_ep_lane(ep, 0);

    if (lane)
        atomic_store(&ep->marked, atomic_load(&lane->ctrl_total));
}

/* A sandbox may forbid what the kernel is asked here (seccomp, gVisor). That says nothing of NICs:
 * from then on a path answers as long as the peer is heard on it. */
static atomic_bool no_info, no_queue; /* TCP_INFO, SIOCOUTQ */

static bool is_blind(void)
{
    return atomic_load(&no_info) || atomic_load(&no_queue);
}

static bool is_denial(int err)
{
    return err == EPERM || err == EACCES || err == ENOSYS || err == EOPNOTSUPP ||
           err == ENOPROTOOPT || err == ENOTTY;
}

static bool ask_denied(atomic_bool *denied, const char *what)
{
    static atomic_bool told;

    if (!is_denial(errno))
        return false;
    atomic_store(denied, true);
    if (!atomic_exchange(&told, true)) {
        R2_TELL("the kernel does not tell how sockets are (%s: %s): a sandbox or a seccomp filter "
                "forbids it. Silent NICs are found after %d s, slow and lossy ones are not",
                what, strerror(errno), (int)(heard_ns() / R2_NS_PER_S));
        r2_tcp.ev->blind();
    }
    return true;
}

static bool look(const struct r2_lane *lane, struct tcp_info *ti)
{
    socklen_t len = sizeof(*ti);

    memset(ti, 0, sizeof(*ti));
    if (atomic_load(&no_info))
        return false;
    if (getsockopt(lane->io.fd, IPPROTO_TCP, TCP_INFO, ti, &len) == 0)
        return true;
    ask_denied(&no_info, "TCP_INFO");
    return false;
}

/* `sum` has grown lately: what a control lane has received (each side says something at each
 * heartbeat), or what is acknowledged of a bulk lane. Under tx_lock. */
static bool moves_on(struct r2_lane *lane, uint64_t sum)
{
    uint64_t now = r2_now_ns();

    if (!lane->sum_at || sum != lane->sum_seen)
        lane->sum_at = now;
    lane->sum_seen = sum;
    return now - lane->sum_at < heard_ns();
}

/* Bytes that are not acknowledged. As a rule there are none, which TCP_INFO says already: one call
 * less. A kernel before 4.6 says nothing of those that were not sent yet. But with none under way
 * the window is closed then, and with that they count as answered. */
static bool ask_queued(const struct r2_lane *lane, const struct tcp_info *ti, int *queued)
{
    *queued = 0;
    return (ti->tcpi_state == STATE_ESTABLISHED && ti->tcpi_unacked == 0 &&
            ti->tcpi_notsent_bytes == 0) ||
           ioctl(lane->io.fd, SIOCOUTQ, queued) == 0 || (ask_denied(&no_queue, "SIOCOUTQ"), false);
}

/* All that was sent is acknowledged, what waits cannot go because the other process has closed the
 * window, and its kernel answers probes of it. Two unanswered ones are allowed for: an answer may
 * be under way. */
static bool window_closed(const struct tcp_info *ti)
{
    return ti->tcpi_unacked == 0 && ti->tcpi_probes < 2;
}

/* Control bytes: acknowledged up to the mark? */
static bool ctrl_health(struct r2_ep *ep, struct r2_lane *lane, struct r2_ep_health *out)
{
    struct tcp_info ti;
    int queued;
    bool ok;

    pthread_mutex_lock(&lane->tx_lock);
    ok = !lane->closed && !is_blind() && look(lane, &ti) && ask_queued(lane, &ti, &queued);
    if (ok)
        out->answered =
            atomic_load(&lane->ctrl_total) - (uint64_t)queued >= atomic_load(&ep->marked);
    else if (!lane->closed && is_blind())
        out->answered = moves_on(lane, atomic_load_explicit(&lane->rx_got, memory_order_relaxed));
    pthread_mutex_unlock(&lane->tx_lock);
    if (atomic_fetch_or(&lane->flush_wanted, 0)) /* somebody left it to the holder of the lock */
        r2_lane_flush(lane);
    if (!ok)
        return false;
    out->answered = out->answered || window_closed(&ti);
    out->rtt_ns = (uint64_t)ti.tcpi_rtt * 1000;
    out->rttvar_ns = (uint64_t)ti.tcpi_rttvar * 1000;
    out->segments = ti.tcpi_data_segs_out;
    out->retransmits = ti.tcpi_total_retrans;
    return true;
}

/* A closed window looks like a stall here, so it is one only after a long time. With SIOCOUTQ
 * denied as well, the kernel's own time-out ends a lane that alone is stalled. Under tx_lock. */
static void bulk_without_info(struct r2_lane *lane, struct r2_ep_health *out)
{
    int queued = 0;

    if (atomic_load(&no_queue))
        return;
    if (ioctl(lane->io.fd, SIOCOUTQ, &queued) < 0) {
        ask_denied(&no_queue, "SIOCOUTQ");
        return;
    }
    lane->sum_at = queued ? lane->sum_at : 0;
    if (!moves_on(lane, lane->moved - (uint64_t)queued))
        out->stalled = true;
    lane->out_seen = queued > 0;
    lane->moved_seen = lane->moved;
}

/* Bulk bytes: a rule of a firewall or a fault may hit these sockets alone. How many wait says
 * nothing, a slow NIC may need seconds for a full buffer: progress does. */
static void bulk_health(struct r2_lane *lane, struct r2_ep_health *out)
{
    struct tcp_info ti;
    bool idle;

    pthread_mutex_lock(&lane->tx_lock);
    /* All was acknowledged at the last look, and nothing came after it: nobody needs to be asked.
     */
    idle = !lane->out_seen && lane->moved == lane->moved_seen;
    if (idle) {
        out->segments += lane->segments_seen;
        out->retransmits += lane->resent_seen;
    } else if (!lane->closed && atomic_load(&lane->open) && look(lane, &ti)) {
        bool waiting = ti.tcpi_unacked > 0 || ti.tcpi_notsent_bytes > 0;

        if (waiting && lane->out_seen && lane->acked_seen == ti.tcpi_bytes_acked &&
            !window_closed(&ti))
            out->stalled = true;
        lane->out_seen = waiting;
        lane->acked_seen = ti.tcpi_bytes_acked;
        lane->moved_seen = lane->moved;
        lane->segments_seen = ti.tcpi_data_segs_out;
        lane->resent_seen = ti.tcpi_total_retrans;
        out->segments += ti.tcpi_data_segs_out;
        out->retransmits += ti.tcpi_total_retrans;
    } else if (!lane->closed && atomic_load(&lane->open) && atomic_load(&no_info)) {
        bulk_without_info(lane, out);
    }
    pthread_mutex_unlock(&lane->tx_lock);
}

static bool hole(const struct r2_ep *ep)
{
    int nic = ep->params.local_nic;

    return r2_fault_is(nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX) ||
           r2_fault_is(nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_RX);
}

/* Under the lane's tx_lock. The host's kernel has answered, whether or not the lane's own thread
 * has come to see it. */
static bool established(const struct r2_lane *lane)
{
    struct tcp_info ti;

    struct pollfd p = {.fd = lane->io.fd, .events = POLLOUT};

    if (lane->closed)
        return false;
    if (look(lane, &ti))
        return ti.tcpi_state != STATE_SYN_SENT && ti.tcpi_state != STATE_CLOSE;
    return is_blind() && poll(&p, 1, 0) == 1 && p.revents == POLLOUT;
}

static bool kernel_answered(struct r2_ep *ep, struct r2_lane *lane)
{
    bool yes = atomic_load(&ep->connected);

    if (yes || !lane || hole(ep))
        return yes;
    pthread_mutex_lock(&lane->tx_lock);
    yes = established(lane);
    pthread_mutex_unlock(&lane->tx_lock);
    return yes;
}

void r2_tcp_health(struct r2_ep *ep, struct r2_ep_health *out)
{
    struct r2_lane *lane = r2_ep_lane(ep, 0);

    memset(out, 0, sizeof(*out));
    if (ep->params.probe)
        out->answered = kernel_answered(ep, lane);
    if (ep->params.probe || !lane || (!ctrl_health(ep, lane, out) && !is_blind()))
        return;
    for (int i = 1; i <= ep->n_lanes && ep->params.initiator; i++) {
        lane = r2_ep_lane(ep, i);
        if (lane)
            bulk_health(lane, out);
    }
    /* The kernel does not know of the injected hole. What is heard does, as late as with a real
     * one.
     */
    if (!is_blind() && hole(ep))
        out->answered = false;
}

/* The lane's lock may be held by a thread that waits for the caller's: then it is at work, which is
 * as good an answer. */
bool r2_tcp_reached(struct r2_ep *ep)
{
    struct r2_lane *lane = r2_ep_lane(ep, 0);
    int queued = 0;
    bool all;

    if (!lane || hole(ep))
        return false;
    if (pthread_mutex_trylock(&lane->tx_lock))
        return true;
    all = established(lane) &&
          (is_blind() || (ioctl(lane->io.fd, SIOCOUTQ, &queued) == 0 && queued == 0));
    pthread_mutex_unlock(&lane->tx_lock);
    return all;
}
