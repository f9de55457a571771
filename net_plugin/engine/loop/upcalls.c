/* What the transport tells the engine about endpoints. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop/loop.h"
#include "util/siphash.h"

static int up_secret(const uint8_t process[16], uint8_t secret[16])
{
    if (!r2_tag_equal(process, r2_eng.process))
        return -ESRCH;
    memcpy(secret, r2_eng.secret, 16);
    return 0;
}

static int up_caller(const uint8_t process[16], uint8_t secret[16])
{
    struct r2_peer *p = r2_peer_find(process, true);

    if (!p)
        return -ESRCH;
    memcpy(secret, p->secret, 16); /* never changes */
    r2_peer_put(p);
    return 0;
}

/* S: no path leads to the peer any more, and it has moved. While one does, what it says there has
 * a number, and nothing else is believed. Paths none of which answers are up for seconds yet. */
static void up_called(const uint8_t process[16], int nic, const struct r2_wire_addr *addr)
{
    struct r2_peer *p = r2_peer_find(process, true);

    if (!p)
        return;
    r2_peer_lock(p);
    if ((!p->n_up || p->suspect_since) && p->rnics[nic].known)
        r2_peer_moved(p, nic, addr);
    r2_peer_unlock(p);
    r2_peer_put(p);
}

static bool up_given_up(const uint8_t process[16], bool out)
{
    struct r2_peer *p = r2_peer_find(process, out);
    bool yes;

    if (!p)
        return false;
    r2_peer_lock(p);
    yes = p->life == R2_PEER_GONE && p->error;
    r2_peer_unlock(p);
    r2_peer_put(p);
    return yes;
}

/* R: generations only grow. A newer one tells that the connecting side gave the older ones up. */
static void *up_accepted(struct r2_ep *ep, const struct r2_ep_params *params)
{
    struct r2_peer *p = r2_peer_obtain(params->remote_process, r2_eng.secret, false);
    struct r2_path *path;

    if (!p)
        return NULL;
    r2_peer_lock(p);
    path = p->life == R2_PEER_ALIVE && r2_nic_word(params->local_nic) != R2_NIC_DRAINED
               ? r2_path_obtain(p, params->local_nic, params->remote_nic, params->transport)
               : NULL;
    if (path && (params->gen <= path->gen || params->gen <= path->down.gen))
        path = NULL;
    if (path)
        r2_path_fail(path, path->gen, ECONNRESET, "replaced by a newer generation");
    if (path && !r2_path_end_memory(path))
        path = NULL;
    if (path) {
        path->gen = params->gen;
        path->ep = ep;
        path->test.done =
            0; /* the other side is up already: its test chunks may come before `up` */
        path->state = r2_path_next(path->state, R2_PATH_EV_ATTEMPT);
        r2_path_event(path, R2_HEALTH_EV_PROBE, "the other side tries it");
        r2_peer_get(p); /* the endpoint's, until `released` */
        r2_eng.ops->get(ep);
    }
    r2_peer_unlock(p);
    r2_peer_put(p);
    return path;
}

static void up_rejected(int nic, int err)
{
    (void)nic;
    (void)err;
    r2_count(&r2_eng.n->handshakes_rejected, 1);
}

static void up_up(void *owner, struct r2_ep *ep)
{
    struct r2_path *path = owner;
    struct r2_peer *p = path->peer;

    r2_peer_lock(p);
    if (path->ep == ep && path->state == R2_PATH_CONNECTING)
        r2_path_up(path);
    r2_peer_resync(p);
    r2_peer_unlock(p);
}

static void probe_over(struct r2_peer *p, struct r2_ep *ep, int err, const struct r2_ep_health *h)
{
    r2_peer_lock(p);
    r2_peer_asked(p, ep, err, h);
    r2_peer_wake(p);
    r2_peer_unlock(p);
}

static void up_failed(void *owner, struct r2_ep *ep, int err, const struct r2_ep_health *h)
{
    const struct r2_ep_params *params = r2_eng.ops->params(ep);
    struct r2_path *path = owner;
    struct r2_peer *p;

    if (params->locate) {
        r2_locate_probe_over(owner, err, h);
        return;
    }
    if (params->probe) {
        probe_over(owner, ep, err, h);
        return;
    }
    p = path->peer;
    r2_peer_lock(p);
    if (path->ep == ep) {
        r2_path_refused(path, h->refused || h->other_process);
        /* Its process has proven itself, whatever it says to such a path. */
        if (h->there && path->state == R2_PATH_CONNECTING)
            r2_peer_answers(p);
        r2_path_fail(path, path->gen, err,
                     h->cause              ? h->cause
                     : r2_path_is_up(path) ? "connection error"
                                           : "connect");
        if (h->given_up)
            r2_peer_given_up(p, path->attempt.at);
        if (p->out)
            r2_peer_resync(p); /* DOWN leaves at once */
    }
    r2_peer_unlock(p);
}

static void up_nic_link(int nic, int transport, bool up, const char *cause)
{
    r2_nic_transport(nic, transport, up, cause, r2_now_ns());
}

static void up_shut_over(void *owner, struct r2_ep *ep)
{
    r2_peer_wake(r2_eng.ops->params(ep)->probe ? owner : ((struct r2_path *)owner)->peer);
}

static bool up_alone(void *owner, struct r2_ep *ep)
{
    struct r2_path *path = owner;
    struct r2_peer *p;
    bool alone;

    if (r2_eng.ops->params(ep)->probe || r2_eng.ops->params(ep)->locate)
        return true;
    p = path->peer;
    r2_peer_lock(p);
    alone = !R2_ANY_PATH(other, p,
                         other != path && r2_path_may(other) >= R2_MAY_LAST_RESORT &&
                             r2_path_suffices(other));
    r2_peer_leave(p); /* as of up_ctrl: a question sends nothing */
    return alone;
}

static void up_released(void *owner, const struct r2_ep_params *params)
{
    if (params->locate)
        r2_locate_probe_released(owner);
    else
        r2_peer_put(params->probe ? owner : ((struct r2_path *)owner)->peer);
}

static void up_blind(void)
{
    static const char text[] = "the kernel does not tell how sockets are: silence is found late";
    struct r2_control_event ev = {.event = R2_EV_WARNING, .cause = text};

    r2_control_set_missing(r2_eng.ctl, R2_SEG_MISSING_TCP_INFO);
    r2_control_set_warning(r2_eng.ctl, text);
    r2_control_journal(r2_eng.ctl, &ev);
}

const struct r2_transport_events r2_engine_events = {
    .blind = up_blind,
    .meeting = r2_nic_meeting,
    .nic_link = up_nic_link,
    .shut_over = up_shut_over,
    .alone = up_alone,
    .released = up_released,
    .accepted = up_accepted,
    .secret = up_secret,
    .caller = up_caller,
    .called = up_called,
    .given_up = up_given_up,
    .rejected = up_rejected,
    .up = up_up,
    .failed = up_failed,
    .ctrl = r2_up_ctrl,
    .next_ctrl = r2_up_next_ctrl,
    .ctrl_sent = r2_up_ctrl_sent,
    .next_chunk = r2_up_next_chunk,
    .blocked = r2_up_blocked,
    .chunk_sent = r2_up_chunk_sent,
    .chunk_claim = r2_up_chunk_claim,
    .chunk_done = r2_up_chunk_done,
    .chunk_dropped = r2_up_chunk_dropped,
    .burst_end = r2_up_burst_end,
};
