/* How an endpoint comes up: a socket to the NIC's listener, the proof of the secret, cards, queue
 * pairs. Socket events run on the endpoint's I/O thread, verbs commands on the device's thread;
 * each takes ep->lock for its step, and only one step is under way at a time. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "io/fault.h"
#include "settings/settings.h"
#include "topology/local.h"
#include "transport/verbs/verbs.h"
#include "util/clock.h"
#include "util/log.h"
#include "util/random.h"
#include "util/siphash.h"

static int put(struct r2_ep *ep, const void *data, size_t len)
{
    return r2_hello_put(ep->oob.fd, data, len);
}

static int collect(struct r2_ep *ep, size_t len)
{
    return r2_hello_collect(ep->oob.fd, ep->buf, &ep->buf_len, len);
}

static int say_hello(struct r2_ep *ep)
{
    const struct r2_ep_params *p = &ep->params;
    struct r2_tcp_hello *h = &ep->hello;
    int rc;

    memset(h, 0, sizeof(*h));
    h->magic = R2_TCP_MAGIC;
    h->version = R2_WIRE_VERSION;
    h->kind = R2_HELLO_VERBS;
    h->nic = p->local_nic;
    h->remote_nic = p->remote_nic;
    h->gen = p->gen;
    memcpy(h->from, p->local_process, 16);
    memcpy(h->to, p->remote_process, 16);
    rc = r2_random_bytes(h->nonce, 16);
    ep->stage = R2_V_CHALLENGE;
    return rc ? rc : put(ep, h, sizeof(*h));
}

static int connected(struct r2_ep *ep)
{
    struct sockaddr_storage sa;
    socklen_t len = sizeof(int);
    int err = 0;

    if (getsockopt(ep->oob.fd, SOL_SOCKET, SO_ERROR, &err, &len) < 0)
        return -errno;
    if (err == ECONNREFUSED)
        atomic_store(&ep->refused, true);
    if (err)
        return -err;
    len = sizeof(sa);
    if (getpeername(ep->oob.fd, (struct sockaddr *)&sa, &len) < 0)
        return errno == ENOTCONN ? 0 : -errno;
    return say_hello(ep);
}

static int on_challenge(struct r2_ep *ep)
{
    const struct r2_ep_params *p = &ep->params;
    struct r2_tcp_challenge c;
    struct r2_tcp_proof proof;
    uint8_t want[16];

    memcpy(&c, ep->buf, sizeof(c));
    r2_hello_tag(p->secret, 'R', &ep->hello, c.nonce, want);
    if (c.magic != R2_TCP_MAGIC || c.status || !r2_tag_equal(want, c.tag)) {
        atomic_store(&ep->other_process, true);
        return c.status ? -ESRCH : -EACCES;
    }
    atomic_store(&ep->there, true);
    r2_hello_tag(p->secret, 'S', &ep->hello, c.nonce, proof.tag);
    ep->stage = R2_V_WELCOME;
    return put(ep, &proof, sizeof(proof));
}

static int on_welcome(struct r2_ep *ep)
{
    struct r2_tcp_welcome w;

    memcpy(&w, ep->buf, sizeof(w));
    if (w.magic != R2_TCP_MAGIC || w.status >= 4096)
        return -EPROTO;
    if (w.status)
        return -(int)w.status;
    ep->stage = R2_V_BUILD;
    r2_vep_post(ep, &ep->build);
    return 0;
}

static int on_card(struct r2_ep *ep)
{
    uint8_t link;
    int rc;

    memcpy(&ep->theirs, ep->buf, sizeof(ep->theirs));
    pthread_mutex_lock(&ep->nic->lock);
    link = ep->nic->link;
    pthread_mutex_unlock(&ep->nic->lock);
    rc = r2_verbs_card_check(&ep->theirs, link);
    if (rc)
        return rc;
    if (!ep->params.initiator)
        ep->n_bulk = ep->theirs.n_bulk;
    else if (ep->theirs.n_bulk != ep->n_bulk)
        return -EPROTO;
    ep->stage = ep->params.initiator ? R2_V_LINK : R2_V_BUILD;
    r2_vep_post(ep, ep->params.initiator ? &ep->link : &ep->build);
    return 0;
}

/* One step of the socket. `up`: the endpoint carries frames from now on. */
static int step(struct r2_ep *ep, bool *up)
{
    int rc;

    for (;;) {
        switch (ep->stage) {
        case R2_V_DIAL:
            rc = connected(ep);
            if (rc || ep->stage == R2_V_DIAL)
                return rc;
            break;
        case R2_V_CHALLENGE:
            rc = collect(ep, sizeof(struct r2_tcp_challenge));
            if (rc <= 0 && r2_hello_foreign(ep->buf, ep->buf_len)) {
                atomic_store(&ep->other_process, true);
                return -ESRCH;
            }
            rc = rc > 0 ? on_challenge(ep) : rc ? rc : 1;
            break;
        case R2_V_WELCOME:
            rc = collect(ep, sizeof(struct r2_tcp_welcome));
            rc = rc > 0 ? on_welcome(ep) : rc ? rc : 1;
            break;
        case R2_V_CARD:
            rc = collect(ep, sizeof(struct r2_verbs_card));
            rc = rc > 0 ? on_card(ep) : rc ? rc : 1;
            break;
        case R2_V_READY:
            rc = collect(ep, sizeof(uint32_t));
            if (rc <= 0)
                return rc;
            *up = memcmp(ep->buf, &(uint32_t){R2_VERBS_READY}, 4) == 0;
            ep->stage = R2_V_OPEN;
            return *up ? 0 : -EPROTO;
        case R2_V_OPEN: { /* nothing is said any more: only the end is news */
            uint8_t byte;
            ssize_t n = recv(ep->oob.fd, &byte, 1, MSG_DONTWAIT);

            if (n < 0 && (errno == EAGAIN || errno == EINTR))
                return 0;
            /* What the network does to this socket says nothing about the queue pairs. */
            if (n < 0 && errno != ECONNRESET)
                return 0;
            return n == 0 ? -ECONNRESET : n > 0 && byte == R2_VERBS_TAKEN ? -ECANCELED : -EPROTO;
        }
        default: /* a command is under way */
            return 0;
        }
        if (rc)
            return rc > 0 ? 0 : rc;
    }
}

static void open_up(struct r2_ep *ep)
{
    r2_timer_set(&ep->timer, 0);
    r2_verbs.ev->up(ep->owner, ep);
    /* Frames that arrive before the engine knows the path as up would be ignored. */
    atomic_store(&ep->open, true);
    r2_vep_kick(ep, R2_WANT_ALL);
}

void r2_meet_event(struct r2_ep *ep)
{
    bool up = false;
    int rc = 0;

    if (r2_tcp_broken(ep->params.local_nic) && !atomic_load(&ep->open)) {
        r2_vep_fail(ep, ECONNRESET);
        return;
    }
    pthread_mutex_lock(&ep->lock);
    if (!atomic_load(&ep->dead) && !atomic_load(&ep->failed) && ep->oob.fd >= 0)
        rc = step(ep, &up);
    r2_vep_unlock(ep);
    if (rc < 0)
        r2_vep_fail(ep, -rc);
    else if (up)
        open_up(ep);
}

void r2_meet_close(struct r2_ep *ep)
{
    uint8_t taken = R2_VERBS_TAKEN;

    if (ep->oob.fd < 0)
        return;
    if (ep->on_purpose && ep->stage == R2_V_OPEN)
        put(ep, &taken, 1);
    r2_io_del(&ep->oob);
    r2_tcp_close_fd(ep->oob.fd, false);
    ep->oob.fd = -1;
}

bool r2_meet_reached(struct r2_ep *ep)
{
    int queued = 0, nic = ep->params.local_nic;
    bool all;

    if (r2_fault_is(nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX) ||
        r2_fault_is(nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_RX))
        return false;
    if (pthread_mutex_trylock(&ep->lock))
        return true; /* somebody is at work on it */
    all = ep->stage > R2_V_DIAL && ep->oob.fd >= 0 && ioctl(ep->oob.fd, SIOCOUTQ, &queued) == 0 &&
          queued == 0;
    r2_vep_unlock(ep);
    return all;
}

/* ---- on the command thread */

static void fill_card(struct r2_ep *ep)
{
    struct r2_verbs_card *c = &ep->mine;
    struct r2_vnic *v = ep->nic;

    memset(c, 0, sizeof(*c));
    c->magic = R2_VERBS_MAGIC;
    c->version = R2_VERBS_VERSION;
    c->len = sizeof(*c);
    pthread_mutex_lock(&v->lock);
    c->link = v->link;
    c->mtu = v->mtu;
    c->lid = v->lid;
    memcpy(c->gid, v->gid, 16);
    pthread_mutex_unlock(&v->lock);
    c->port = ep->port;
    c->n_bulk = (uint8_t)ep->n_bulk;
    r2_random_bytes(&c->psn, sizeof(c->psn));
    c->psn &= 0xffffff;
    c->ctrl = ep->ctrl.qp->qp_num;
    c->beat = ep->beat.qp->qp_num;
    for (int i = 0; i < ep->n_bulk; i++)
        c->bulk[i] = ep->bulk[i].qp->qp_num;
    c->beat_addr = (uint64_t)(uintptr_t)r2_v_beat(ep, 1);
    c->test_addr = ep->params.initiator ? 0 : (uint64_t)(uintptr_t)r2_v_test(ep, 0, 0);
    c->own_key = ep->mr->rkey;
}

/* Only this thread changes queue pairs. Before the endpoint is open only the fence looks at them,
 * and that comes after it in the same queue: no lock while the kernel works. */
static int make(struct r2_ep *ep)
{
    int rc = atomic_load(&ep->dead) || atomic_load(&ep->hca->gone) ? -ESHUTDOWN : r2_qps_make(ep);

    if (rc == 0) {
        fill_card(ep);
        rc = ep->params.initiator ? 0 : r2_qps_connect(ep);
    }
    return rc;
}

static int say_card(struct r2_ep *ep)
{
    int rc = 0;

    pthread_mutex_lock(&ep->lock);
    if (atomic_load(&ep->dead) || ep->oob.fd < 0)
        rc = -ESHUTDOWN;
    else
        rc = put(ep, &ep->mine, sizeof(ep->mine));
    ep->stage = ep->params.initiator ? R2_V_CARD : R2_V_READY;
    r2_vep_unlock(ep);
    return rc;
}

static void refuse(struct r2_ep *ep, int err)
{
    struct r2_verbs_card no = {.magic = R2_VERBS_MAGIC,
                               .version = R2_VERBS_VERSION,
                               .len = sizeof(no),
                               .status = (uint32_t)err};

    pthread_mutex_lock(&ep->lock);
    if (ep->oob.fd >= 0)
        put(ep, &no, sizeof(no));
    r2_vep_unlock(ep);
}

/* R: the engine hears of the endpoint. It may have failed just now, when there was nobody to tell.
 */
static int introduce(struct r2_ep *ep)
{
    void *owner = r2_verbs.ev->accepted(ep, &ep->params);
    struct r2_ep_health none = {0};
    bool late;

    if (!owner)
        return -ESTALE;
    pthread_mutex_lock(&ep->lock);
    ep->owner = owner;
    late = atomic_load(&ep->failed);
    r2_vep_unlock(ep);
    if (late)
        r2_verbs.ev->failed(owner, ep, ECONNRESET, &none);
    return late ? -ECONNRESET : 0;
}

void r2_meet_build(struct r2_cmd *cmd)
{
    struct r2_ep *ep = R2_CONTAINER_OF(cmd, struct r2_ep, build);
    int rc = make(ep);

    if (!ep->params.initiator) {
        if (rc == 0)
            rc = introduce(ep);
        if (rc)
            refuse(ep, -rc);
    }
    if (rc == 0)
        rc = say_card(ep);
    if (rc)
        r2_vep_fail(ep, -rc);
    else
        r2_vep_kick(ep, R2_WANT_ALL); /* what the peer said meanwhile has had its edge */
    r2_vep_posted(ep);
}

/* S */
void r2_meet_link(struct r2_cmd *cmd)
{
    struct r2_ep *ep = R2_CONTAINER_OF(cmd, struct r2_ep, link);
    uint32_t ready = R2_VERBS_READY;
    int rc = atomic_load(&ep->dead) ? -ESHUTDOWN : r2_qps_connect(ep);

    if (rc == 0) {
        r2_data_test_fill(ep); /* nobody looks at it before it is open */
        pthread_mutex_lock(&ep->lock);
        rc = atomic_load(&ep->dead) || ep->oob.fd < 0 ? -ESHUTDOWN : put(ep, &ready, sizeof(ready));
        ep->stage = rc ? ep->stage : R2_V_OPEN; /* one that is dead before is never used */
        r2_vep_unlock(ep);
    }
    if (rc)
        r2_vep_fail(ep, -rc);
    else
        open_up(ep);
    r2_vep_posted(ep);
}

/* ---- beginnings */

static void oob_ready(struct r2_io_fd *f, uint32_t events)
{
    (void)events;
    r2_meet_event(R2_CONTAINER_OF(f, struct r2_ep, oob));
}

/* Takes the socket, also if it fails. The I/O thread's reference goes with r2_ep.reap. What has
 * failed since the endpoint was made did not find it in the list (fail_all counts before it looks);
 * from here on it does. The thread that ends the timer takes the lock, too, so the timer is set
 * before. */
static int watch(struct r2_ep *ep, int fd, enum r2_v_stage stage)
{
    int rc;

    ep->oob.fd = fd;
    ep->oob.ready = oob_ready;
    ep->stage = stage;
    r2_vep_get(ep);
    pthread_mutex_lock(&r2_verbs.lock);
    rc = ep->fails != atomic_load(&r2_verbs.fails) ? -ESHUTDOWN : r2_io_add(ep->io, &ep->oob);
    if (rc == 0) {
        r2_list_add_tail(&r2_verbs.eps, &ep->node);
        r2_timer_set(&ep->timer, r2_now_ns() + R2_VERBS_MEET_NS);
    }
    pthread_mutex_unlock(&r2_verbs.lock);
    if (rc) {
        ep->oob.fd = -1;
        r2_tcp_close_fd(fd, true);
        r2_vep_put(ep);
    }
    return rc;
}

int r2_meet_dial(struct r2_ep *ep)
{
    int fd = r2_tcp_socket(ep->params.local_nic, &ep->params.remote_addr, 0);

    if (fd < 0)
        return fd;
    ep->n_bulk = r2_wanted_qps();
    return watch(ep, fd, R2_V_DIAL);
}

/* A NIC without an address of its own is met at the listener of any other. */
static bool meets_here(int nic, int listener)
{
    const struct r2_nic *n = r2_local_nic(nic);

    return n && (nic == listener || n->bare);
}

void r2_meet_accepted(int fd, int nic, const struct r2_tcp_hello *h)
{
    struct r2_ep_params p = {
        .local_nic = h->remote_nic, .remote_nic = h->nic, .transport = R2_VIA_VERBS, .gen = h->gen};
    struct r2_vnic *v = &r2_verbs.nics[h->remote_nic % R2_MAX_NICS];
    struct r2_ep *ep;

    memcpy(p.local_process, h->to, 16);
    memcpy(p.remote_process, h->from, 16);
    if (!meets_here(h->remote_nic, nic) || v->slot < 0 || r2_verbs.ev->secret(h->to, p.secret) ||
        !(ep = r2_vep_new(&p))) {
        r2_tcp_close_fd(fd, true);
        return;
    }
    if (!ep->hca || r2_cmd_stuck(ep->hca)) { /* not there */
        r2_tcp_close_fd(fd, true);
        r2_vep_put(ep);
        return;
    }
    watch(ep, fd, R2_V_CARD);
    r2_vep_put(ep); /* the I/O thread has its own, and the engine, once it accepts */
}
