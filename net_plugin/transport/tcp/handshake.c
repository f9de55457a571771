#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "io/fault.h"
#include "topology/local.h"
#include "transport/tcp/tcp.h"
#include "util/clock.h"
#include "util/random.h"
#include "util/siphash.h"

int r2_hello_put(int fd, const void *data, size_t len)
{
    ssize_t n = send(fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT);

    if (n == (ssize_t)len)
        return 0;
    return n < 0 ? -errno : -EIO;
}

int r2_hello_collect(int fd, uint8_t *buf, size_t *have, size_t len)
{
    while (*have < len) {
        ssize_t n = recv(fd, buf + *have, len - *have, MSG_DONTWAIT);

        if (n == 0)
            return -ECONNRESET;
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN ? 0 : -errno;
        *have += (size_t)n;
    }
    *have = 0;
    return 1;
}

static int put(struct r2_lane *lane, const void *data, size_t len)
{
    return r2_hello_put(lane->io.fd, data, len);
}

void (*r2_tcp_verbs_taker)(int fd, int nic, const struct r2_tcp_hello *hello);

void r2_hello_tag(const uint8_t secret[16], char who, const struct r2_tcp_hello *hello,
                  const uint8_t nonce[16], uint8_t tag[16])
{
    uint8_t text[1 + sizeof(*hello) + 16];

    text[0] = (uint8_t)who;
    memcpy(text + 1, hello, sizeof(*hello));
    memcpy(text + 1 + sizeof(*hello), nonce, 16);
    r2_siphash128(secret, text, sizeof(text), tag);
}

void r2_hello_call_tag(const uint8_t secret[16], const struct r2_tcp_hello *hello,
                       const uint8_t nonce[16], const struct r2_wire_addr *from, uint8_t tag[16])
{
    uint8_t text[16 + 1 + sizeof(from->ip)];

    r2_hello_tag(secret, 'C', hello, nonce, text);
    text[16] = from->family;
    memcpy(text + 17, from->ip, sizeof(from->ip));
    r2_siphash128(secret, text, sizeof(text), tag);
}

/* Where the listener of a calling NIC is; 0: there is none, and nothing to call for. */
static uint16_t listens_at(int nic)
{
    uint16_t port;

    if (r2_local_nic(nic)->bare)
        return 0;
    pthread_mutex_lock(&r2_tcp.listen_lock);
    port = atomic_load(&r2_tcp.listening[nic]) ? r2_tcp.addrs[nic].port : 0;
    pthread_mutex_unlock(&r2_tcp.listen_lock);
    return port;
}

static int send_hello(struct r2_lane *lane)
{
    const struct r2_ep_params *p = &lane->ep->params;
    struct r2_tcp_hello *h = &lane->hello;
    int rc;

    memset(h, 0, sizeof(*h));
    h->magic = R2_TCP_MAGIC;
    h->version = R2_WIRE_VERSION;
    h->kind = p->probe ? R2_HELLO_PROBE : R2_HELLO_LANE;
    h->lane = lane->index;
    h->lanes = (uint8_t)lane->ep->n_lanes;
    h->nic = p->local_nic;
    h->remote_nic = p->remote_nic;
    h->extra = p->extra;
    h->gen = p->gen;
    if (p->probe && !p->locate && listens_at(p->local_nic)) {
        h->kind = R2_HELLO_CALL;
        h->gen = listens_at(p->local_nic);
    }
    memcpy(h->from, p->local_process, 16);
    memcpy(h->to, p->remote_process, 16);
    rc = r2_random_bytes(h->nonce, 16);
    if (rc)
        return rc;
    lane->phase = R2_LANE_WAIT_CHALLENGE;
    return put(lane, h, sizeof(*h));
}

static int on_hello(struct r2_lane *lane)
{
    struct r2_tcp_challenge c = {.magic = R2_TCP_MAGIC};
    uint8_t secret[16];
    int rc;

    memcpy(&lane->hello, lane->hs_buf, sizeof(lane->hello));
    if (lane->hello.magic != R2_TCP_MAGIC || lane->hello.version != R2_WIRE_VERSION ||
        lane->hello.lane >= R2_TCP_MAX_LANES || lane->hello.lanes >= R2_TCP_MAX_LANES)
        return -EPROTO;
    if (r2_tcp.ev->secret(lane->hello.to, secret)) {
        c.status = ESRCH;
        put(lane, &c, sizeof(c));
        return -ESRCH;
    }
    rc = r2_random_bytes(c.nonce, 16);
    if (rc)
        return rc;
    r2_hello_tag(secret, 'R', &lane->hello, c.nonce, c.tag);
    lane->challenge = c;
    lane->phase = R2_LANE_WAIT_PROOF;
    return put(lane, &c, sizeof(c));
}

static int prove_call(struct r2_lane *lane, const uint8_t nonce[16])
{
    struct sockaddr_storage sa;
    socklen_t len = sizeof(sa);
    struct r2_wire_addr here;
    struct r2_tcp_proof proof;

    if (getsockname(lane->io.fd, (struct sockaddr *)&sa, &len) < 0 ||
        r2_wire_from_sockaddr(&here, &sa))
        return -ENOTCONN;
    r2_hello_call_tag(lane->ep->params.secret, &lane->hello, nonce, &here, proof.tag);
    lane->phase = R2_LANE_WAIT_WELCOME;
    return put(lane, &proof, sizeof(proof));
}

static int on_challenge(struct r2_lane *lane)
{
    const struct r2_ep_params *p = &lane->ep->params;
    struct r2_tcp_challenge c;
    struct r2_tcp_proof proof;
    uint8_t want[16];

    memcpy(&c, lane->hs_buf, sizeof(c));
    if (c.magic != R2_TCP_MAGIC || c.status != 0) {
        atomic_store(&lane->ep->other_process, true);
        return -ESRCH;
    }
    lane->challenge = c;
    if (p->probe)
        atomic_store(&lane->ep->there, true);
    if (lane->hello.kind == R2_HELLO_CALL)
        return prove_call(lane, c.nonce);
    if (p->probe) /* the asked-for process answered; an accepting side knows no secret of it */
        return -EALREADY;
    r2_hello_tag(p->secret, 'R', &lane->hello, c.nonce, want);
    if (!r2_tag_equal(want, c.tag)) {
        atomic_store(&lane->ep->other_process, true);
        return -EACCES;
    }
    atomic_store(&lane->ep->there, true);
    r2_hello_tag(p->secret, 'S', &lane->hello, c.nonce, proof.tag);
    lane->phase = R2_LANE_WAIT_WELCOME;
    return put(lane, &proof, sizeof(proof));
}

static int say_gone(struct r2_lane *lane, const uint8_t secret[16])
{
    struct {
        struct r2_tcp_welcome w;
        struct r2_tcp_proof proof;
    } __attribute__((packed)) word = {.w = {.magic = R2_TCP_MAGIC, .status = R2_WELCOME_GONE}};

    r2_hello_tag(secret, 'G', &lane->hello, lane->challenge.nonce, word.proof.tag);
    return put(lane, &word, sizeof(word));
}

static int on_call(struct r2_lane *lane, const struct r2_tcp_proof *proof)
{
    struct r2_tcp_welcome w = {.magic = R2_TCP_MAGIC};
    const struct r2_tcp_hello *h = &lane->hello;
    struct sockaddr_storage sa;
    struct r2_wire_addr addr;
    socklen_t len = sizeof(sa);
    uint8_t secret[16], want[16];

    if (r2_tcp.ev->caller(h->from, secret))
        return -ESRCH;
    if (getpeername(lane->io.fd, (struct sockaddr *)&sa, &len) < 0 ||
        r2_wire_from_sockaddr(&addr, &sa))
        return -ENOTCONN;
    r2_hello_call_tag(secret, h, lane->challenge.nonce, &addr, want);
    if (!r2_tag_equal(want, proof->tag))
        return -EACCES;
    if (h->nic >= R2_WIRE_MAX_NICS || h->gen == 0 || h->gen > UINT16_MAX)
        return -EPROTO;
    if (r2_tcp.ev->given_up(h->from, true))
        return say_gone(lane, secret);
    addr.port = (uint16_t)h->gen;
    r2_tcp.ev->called(h->from, h->nic, &addr);
    return put(lane, &w, sizeof(w)); /* the caller leaves then */
}

static int on_proof(struct r2_lane *lane)
{
    struct r2_tcp_welcome w = {.magic = R2_TCP_MAGIC};
    struct r2_tcp_proof proof;
    uint8_t secret[16], want[16];
    int rc;

    memcpy(&proof, lane->hs_buf, sizeof(proof));
    if (lane->hello.kind == R2_HELLO_CALL)
        return on_call(lane, &proof);
    if (r2_tcp.ev->secret(lane->hello.to, secret))
        return -ESRCH;
    r2_hello_tag(secret, 'S', &lane->hello, lane->challenge.nonce, want);
    if (!r2_tag_equal(want, proof.tag))
        return -EACCES;
    if (lane->hello.kind == R2_HELLO_VERBS) {
        w.status = r2_tcp_verbs_taker ? 0 : EPROTONOSUPPORT;
        put(lane, &w, sizeof(w));
        return w.status ? -EPROTONOSUPPORT : 2;
    }
    if (lane->hello.kind != R2_HELLO_LANE)
        return -EPROTO;
    rc = r2_ep_attach(lane, &lane->hello);
    w.status = (uint32_t)rc;
    if (rc == ESTALE && lane->hello.lane == 0 && r2_tcp.ev->given_up(lane->hello.from, false))
        say_gone(lane, secret);
    else
        put(lane, &w, sizeof(w));
    if (rc)
        return -rc;
    lane->phase = R2_LANE_OPEN;
    return 1;
}

static int on_welcome(struct r2_lane *lane)
{
    struct r2_tcp_welcome w;

    memcpy(&w, lane->hs_buf, sizeof(w));
    if (w.magic != R2_TCP_MAGIC)
        return -EPROTO;
    if (w.status == R2_WELCOME_GONE) {
        lane->phase = R2_LANE_WAIT_GONE;
        return 0;
    }
    if (lane->ep->params.probe) /* the called process has heard it */
        return -EALREADY;
    if (w.status)
        return w.status < 4096 ? -(int)w.status : -EPROTO;
    lane->phase = R2_LANE_OPEN;
    return 1;
}

static int on_gone(struct r2_lane *lane)
{
    struct r2_tcp_proof proof;
    uint8_t want[16];

    memcpy(&proof, lane->hs_buf, sizeof(proof));
    r2_hello_tag(lane->ep->params.secret, 'G', &lane->hello, lane->challenge.nonce, want);
    if (!r2_tag_equal(want, proof.tag))
        return -EACCES;
    atomic_store(&lane->ep->given_up, true);
    return -R2_WELCOME_GONE;
}

/* S: the socket is connected. */
static int lane_begin(struct r2_lane *lane)
{
    int err = 0;
    socklen_t len = sizeof(err);
    struct sockaddr_storage sa;

    if (getsockopt(lane->io.fd, SOL_SOCKET, SO_ERROR, &err, &len) < 0)
        return -errno;
    if (err) {
        if (err == ECONNREFUSED)
            atomic_store(&lane->ep->refused, true);
        return -err;
    }
    len = sizeof(sa);
    if (getpeername(lane->io.fd, (struct sockaddr *)&sa, &len) < 0)
        return errno == ENOTCONN ? 0 : -errno;
    atomic_store(&lane->ep->connected, true);
    return send_hello(lane);
}

int r2_lane_handshake(struct r2_lane *lane)
{
    static const size_t want[] = {
        [R2_LANE_WAIT_HELLO] = sizeof(struct r2_tcp_hello),
        [R2_LANE_WAIT_CHALLENGE] = sizeof(struct r2_tcp_challenge),
        [R2_LANE_WAIT_PROOF] = sizeof(struct r2_tcp_proof),
        [R2_LANE_WAIT_WELCOME] = sizeof(struct r2_tcp_welcome),
        [R2_LANE_WAIT_GONE] = sizeof(struct r2_tcp_proof),
    };
    int rc;

    for (;;) {
        if (r2_fault_is(lane->nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_RX) ||
            r2_fault_is(lane->nic, R2_SEG_FAULT_BLACKHOLE, R2_FAULT_TX))
            return 0; /* the deadline ends it, or the nudge goes on */
        if (lane->phase == R2_LANE_CONNECTING) {
            rc = lane_begin(lane);
            if (rc || lane->phase == R2_LANE_CONNECTING)
                return rc;
        }
        rc = r2_hello_collect(lane->io.fd, lane->hs_buf, &lane->hs_len, want[lane->phase]);
        if (rc <= 0 && lane->phase == R2_LANE_WAIT_CHALLENGE &&
            r2_hello_foreign(lane->hs_buf, lane->hs_len)) {
            atomic_store(&lane->ep->other_process, true);
            return -ESRCH;
        }
        if (rc <= 0)
            return rc;
        switch (lane->phase) {
        case R2_LANE_WAIT_HELLO:
            rc = on_hello(lane);
            break;
        case R2_LANE_WAIT_CHALLENGE:
            rc = on_challenge(lane);
            break;
        case R2_LANE_WAIT_PROOF:
            return on_proof(lane);
        case R2_LANE_WAIT_GONE:
            return on_gone(lane);
        default:
            rc = on_welcome(lane);
        }
        if (rc)
            return rc;
    }
}
