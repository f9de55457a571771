/* Packets between queue pairs. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fake.h"
#include "util/copy.h"

#define RNR 254 /* a status on the wire: no receive is posted */

static bool quiet(const struct fv_dev *dev, uint8_t port)
{
    return dev->fatal || dev->removed || !dev->port[port].up || dev->port[port].blackhole;
}

void fv_wake(void)
{
    uint64_t one = 1;

    if (fv.started && write(fv.wake, &one, sizeof(one)) < 0 && errno != EAGAIN)
        abort();
}

struct fv_conn *fv_conn_new(int fd, struct fv_dev *dev, uint8_t port)
{
    struct fv_conn *c = calloc(1, sizeof(*c));
    struct epoll_event ev = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
    int one = 1;

    if (!c)
        abort();
    c->fd = fd;
    c->dev = dev;
    c->port = port;
    c->next = fv.conns;
    fv.conns = c;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    epoll_ctl(fv.epoll, EPOLL_CTL_ADD, fd, &ev);
    return c;
}

struct fv_conn *fv_conn_open(struct fv_qp *qp)
{
    struct fv_port *p = &qp->dev->port[qp->port];
    struct sockaddr_in me = {.sin_family = AF_INET, .sin_addr.s_addr = p->ip};
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_addr.s_addr = qp->dest_ip};
    int fd;

    if (quiet(qp->dev, qp->port))
        return NULL;
    to.sin_port = htons((uint16_t)(FV_PORT_BASE + qp->dest / FV_QPS));
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return NULL;
    if (bind(fd, (struct sockaddr *)&me, sizeof(me)) < 0 ||
        (connect(fd, (struct sockaddr *)&to, sizeof(to)) < 0 && errno != EINPROGRESS)) {
        close(fd);
        return NULL;
    }
    qp->out = fv_conn_new(fd, qp->dev, qp->port);
    qp->out->qp = qp;
    qp->sent = qp->done; /* what was not acknowledged is sent again */
    return qp->out;
}

void fv_conn_drop(struct fv_conn *c)
{
    if (c->dead)
        return;
    c->dead = true;
    if (c->qp) {
        c->qp->out = NULL;
        c->qp->sent = c->qp->done;
    }
    close(c->fd);
    fv_wake();
}

void fv_conn_reap(void)
{
    for (struct fv_conn **link = &fv.conns; *link;) {
        struct fv_conn *c = *link;

        if (!c->dead) {
            link = &c->next;
            continue;
        }
        *link = c->next;
        free(c->hold);
        free(c);
    }
}

/* ---- out */

static bool push(struct fv_conn *c, const void *head, const void *body, size_t body_len,
                 size_t *off)
{
    size_t whole = sizeof(struct fv_pkt) + body_len;

    while (*off < whole) {
        struct iovec iov[2];
        struct msghdr msg = {.msg_iov = iov};
        ssize_t n;

        if (*off < sizeof(struct fv_pkt)) {
            iov[msg.msg_iovlen].iov_base = (char *)(uintptr_t)head + *off;
            iov[msg.msg_iovlen++].iov_len = sizeof(struct fv_pkt) - *off;
        }
        if (body_len) {
            size_t at = *off < sizeof(struct fv_pkt) ? 0 : *off - sizeof(struct fv_pkt);

            iov[msg.msg_iovlen].iov_base = (char *)(uintptr_t)body + at;
            iov[msg.msg_iovlen++].iov_len = body_len - at;
        }
        n = sendmsg(c->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            if (errno != EAGAIN)
                fv_conn_drop(c);
            return false;
        }
        *off += (size_t)n;
    }
    return true;
}

/* All of the request goes when its last byte may, which comes to the same for all but its device.
 */
static bool is_early(const struct fv_qp *qp, struct fv_wqe *w)
{
    uint64_t now;

    if (!qp->slow)
        return false;
    now = fv_now();
    if (!w->leaves)
        w->leaves = now + w->len * UINT64_C(1000000000) / qp->slow;
    return now < w->leaves;
}

/* The next request becomes a packet. False: none, or it fails. */
static bool begin(struct fv_conn *c)
{
    struct fv_qp *qp = c->qp;
    struct fv_wqe *w = &qp->sq[qp->sent % qp->cap.max_send_wr];

    if (qp->sent == qp->posted || (qp->dev->most && w->len > qp->dev->most))
        return false;
    if (is_early(qp, w))
        return false;
    if (w->len && !fv_mr_find(w->lkey, w->addr, w->len, 0)) {
        if (qp->sent == qp->done)
            fv_qp_fail(qp, IBV_WC_LOC_PROT_ERR);
        return false;
    }
    if ((fv.inject && (!fv.inject_dev || fv.inject_dev == qp->dev)) ||
        fv_chance(fv.chaos.error, 1000000)) {
        static const enum ibv_wc_status some[] = {IBV_WC_RETRY_EXC_ERR, IBV_WC_LOC_QP_OP_ERR,
                                                  IBV_WC_REM_OP_ERR, IBV_WC_GENERAL_ERR};
        enum ibv_wc_status status = fv.inject ? (enum ibv_wc_status)fv.inject : some[fv_random(4)];

        if (fv.inject)
            fv.injected_ns = fv_now();
        fv.inject = 0;
        fv_qp_fail(qp, status);
        return false;
    }
    memset(&c->head, 0, sizeof(c->head));
    c->head = (struct fv_pkt){.magic = FV_MAGIC,
                              .op = (uint8_t)w->op,
                              .pkey = qp->pkey,
                              .mtu = (uint8_t)qp->attr.path_mtu,
                              .dest = qp->dest,
                              .src = qp->base.qp_num,
                              .psn = qp->sent,
                              .len = w->len,
                              .rkey = w->rkey,
                              .imm = w->imm,
                              .raddr = w->raddr};
    if (!w->first_sent)
        w->first_sent = fv_now();
    c->tx_off = 0;
    c->tx_active = true;
    return true;
}

static void send_requests(struct fv_conn *c)
{
    while (!c->dead && (c->tx_active || begin(c))) {
        struct fv_qp *qp = c->qp;
        struct fv_wqe *w = &qp->sq[qp->sent % qp->cap.max_send_wr];

        if (!push(c, &c->head, w->data, w->op == IBV_WR_RDMA_READ ? 0 : w->len, &c->tx_off))
            return;
        c->tx_active = false;
        qp->sent++;
    }
}

static void send_ack(struct fv_conn *c)
{
    while (!c->dead && (c->ack_active || c->ack_wanted)) {
        if (!c->ack_active) {
            c->ack = (struct fv_pkt){.magic = FV_MAGIC,
                                     .op = FV_ACK,
                                     .status = c->ack_status,
                                     .dest = c->ack_src,
                                     .src = c->ack_qpn,
                                     .psn = c->ack_psn,
                                     .raddr = c->ack_data};
            c->ack_off = 0;
            c->ack_active = true;
            c->ack_wanted = false;
        }
        if (!push(c, &c->ack, NULL, 0, &c->ack_off))
            return;
        c->ack_active = false;
    }
}

void fv_conn_send(struct fv_conn *c)
{
    if (c->dead || quiet(c->dev, c->port) || (c->qp && c->qp->mute))
        return;
    if (c->qp)
        send_requests(c);
    else
        send_ack(c);
}

/* ---- in */

static void answer(struct fv_conn *c, uint8_t status)
{
    c->ack_wanted = true;
    c->ack_psn = c->in.psn;
    c->ack_status = status;
    c->ack_data = 0;
    c->ack_qpn = c->in.dest;
    c->ack_src = c->in.src;
}

/* Ends the responder's queue pair as well, as a device does. */
static void refuse(struct fv_conn *c, struct fv_qp *qp, uint8_t status)
{
    answer(c, status);
    send_ack(c);
    fv_async(qp->dev, IBV_EVENT_QP_ACCESS_ERR, 0, &qp->base);
    fv_qp_error(qp);
}

/* Where the payload goes. False: not now, or the connection is over. */
static bool place(struct fv_conn *c)
{
    struct fv_qp *qp = fv_qp_find(c->in.dest);
    struct fv_pkt *p = &c->in;

    c->body = NULL;
    c->word = false;
    free(c->hold);
    c->hold = NULL;
    /* What is kept already is not caught once more by a new script. */
    if (!c->kept && fv.script.in_network && fv_catches(p))
        c->kept = true;
    if (c->kept)
        return false;
    if (!qp || qp->dest != p->src || qp->pkey != p->pkey || qp->attr.path_mtu != p->mtu ||
        (qp->base.state != IBV_QPS_RTR && qp->base.state != IBV_QPS_RTS)) {
        fv_conn_drop(c); /* nobody answers */
        return false;
    }
    if (p->psn != qp->psn) /* sent again: acknowledged, not executed */
        return true;
    if (p->op == IBV_WR_RDMA_WRITE || p->op == IBV_WR_RDMA_READ) {
        bool read = p->op == IBV_WR_RDMA_READ;
        struct fv_mr *mr = fv_mr_find(p->rkey, p->raddr, p->len,
                                      read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE);

        if (p->len && !mr) {
            refuse(c, qp, IBV_WC_REM_ACCESS_ERR);
            return false;
        }
        c->body = read ? NULL : fv_reach(mr, p->raddr);
        c->behind = !read && fv.chaos.gpu && mr && mr->view;
        if (read)
            return true;
        c->word = !c->behind && p->len == sizeof(c->word_data) && p->raddr % p->len == 0;
        if (c->word)
            c->body = (uint8_t *)&c->word_data;
        if (c->behind)
            c->body = c->hold = malloc(p->len ? p->len : 1);
        else if (p->len &&
                 ((!fv.script.in_network && fv_catches(p)) || fv_chance(fv.chaos.late_write, 1000)))
            c->body = c->hold = malloc(p->len);
        if (fv.script.in_network && fv.script.caught && p->src == fv.script.src)
            fv.script.landed = true;
        return true;
    }
    if (fv_holds(qp)) { /* the rule: a receive completes behind the writes before it */
        c->kept = true;
        return false;
    }
    if (qp->r_done == qp->r_posted) {
        c->rnr = true;
        answer(c, RNR);
        return false;
    }
    if (p->len > qp->rq[qp->r_done % qp->cap.max_recv_wr].len) {
        refuse(c, qp, IBV_WC_REM_INV_REQ_ERR);
        return false;
    }
    c->body = qp->rq[qp->r_done % qp->cap.max_recv_wr].data;
    return true;
}

static void received(struct fv_qp *qp, const struct fv_pkt *p)
{
    struct fv_rqe *r = &qp->rq[qp->r_done++ % qp->cap.max_recv_wr];
    struct ibv_wc wc = {.wr_id = r->wr_id,
                        .status = IBV_WC_SUCCESS,
                        .opcode = IBV_WC_RECV,
                        .byte_len = p->len,
                        .qp_num = qp->base.qp_num};

    if (p->op == IBV_WR_SEND_WITH_IMM) {
        wc.wc_flags = IBV_WC_WITH_IMM;
        wc.imm_data = p->imm;
    }
    fv_place_late(qp, 0, true); /* the rule: every write before it is in memory */
    fv_complete(qp, true, &wc);
}

static void executed(struct fv_conn *c)
{
    struct fv_qp *qp = fv_qp_find(c->in.dest);

    if (!qp || (qp->base.state != IBV_QPS_RTR && qp->base.state != IBV_QPS_RTS)) {
        fv_conn_drop(c);
        return;
    }
    answer(c, IBV_WC_SUCCESS);
    if (c->in.psn != qp->psn) {
        c->ack_psn = qp->psn - 1;
        return;
    }
    qp->psn++;
    fv_spoil(&c->in, c->body);
    if (c->in.op == IBV_WR_RDMA_READ) {
        fv_show(qp->dev);
        memcpy(&c->ack_data,
               fv_reach(fv_mr_find(c->in.rkey, c->in.raddr, c->in.len, IBV_ACCESS_REMOTE_READ),
                        c->in.raddr),
               c->in.len);
    } else if (c->in.op != IBV_WR_RDMA_WRITE) {
        received(qp, &c->in);
    } else if (c->behind) {
        fv_behind(qp->dev, c->in.raddr, c->hold, c->in.len, c->in.rkey);
        c->hold = NULL;
    } else if (c->word && !c->hold) {
        fv_land_word(&c->in, c->word_data);
    } else if (c->hold) {
        fv_land_late(qp, &c->in, c->hold);
        c->hold = NULL;
    }
}

static void acknowledged(struct fv_conn *c)
{
    struct fv_qp *qp = c->qp;

    c->rnr = c->in.status == RNR;
    if (c->in.status == IBV_WC_SUCCESS) {
        struct fv_wqe *w = &qp->sq[c->in.psn % qp->cap.max_send_wr];

        if (w->op == IBV_WR_RDMA_READ && c->in.psn - qp->done < qp->sent - qp->done)
            memcpy((void *)(uintptr_t)w->data, &c->in.raddr, w->len);
        fv_qp_acked(qp, c->in.psn);
        fv_conn_send(c);
    } else if (c->in.status != RNR) {
        fv_qp_acked(qp, c->in.psn - 1);
        fv_qp_fail(qp, (enum ibv_wc_status)c->in.status);
    }
}

static ssize_t get(struct fv_conn *c, void *to, size_t len)
{
    ssize_t n;

    do {
        n = recv(c->fd, to, len, MSG_DONTWAIT);
    } while (n < 0 && errno == EINTR);
    if (n == 0 || (n < 0 && errno != EAGAIN))
        fv_conn_drop(c);
    return n;
}

/* The next piece of a payload, NULL: it is dropped. A device writes memory in ascending order, and
 * words of eight bytes whole, which readers of flags inside it (LL, LL128) rely on; the kernel and
 * memcpy do not. Returns how many bytes there are; 0: fewer than a word, the rest is to come. */
static ssize_t get_payload(struct fv_conn *c, uint8_t *to, size_t len)
{
    static _Thread_local uint8_t bounce[65536];
    size_t room = len < sizeof(bounce) ? len : sizeof(bounce), all, whole;
    ssize_t n;

    if (!to)
        return get(c, bounce, room);
    memcpy(bounce, c->part, c->n_part);
    n = get(c, bounce + c->n_part, room - c->n_part);
    if (n <= 0)
        return n;
    all = c->n_part + (size_t)n;
    whole = all == len ? all : all & ~(size_t)7;
    r2_copy_lines(to, bounce, whole, (uintptr_t)to);
    c->n_part = (uint8_t)(all - whole);
    memcpy(c->part, bounce + whole, c->n_part);
    return (ssize_t)whole;
}

/* One head or piece of a payload; false: nothing more now. */
static bool receive(struct fv_conn *c)
{
    ssize_t n;

    if (!c->in_body) {
        if (c->in_off < sizeof(c->in)) {
            n = get(c, (uint8_t *)&c->in + c->in_off, sizeof(c->in) - c->in_off);
            if (n <= 0)
                return false;
            c->in_off += (size_t)n;
            if (c->in_off < sizeof(c->in))
                return true;
        }
        if (c->in.magic != FV_MAGIC || (c->in.op == FV_ACK) != (c->qp != NULL)) {
            fv_conn_drop(c);
            return false;
        }
        if (c->qp) {
            c->in_off = 0;
            acknowledged(c);
            return true;
        }
        if (!place(c))
            return false;
        c->in_body = true;
        c->body_off = 0;
    }
    if (c->body_off < c->in.len && c->in.op != IBV_WR_RDMA_READ) {
        struct fv_qp *qp = fv_qp_find(c->in.dest);

        /* In ERR, or with the key gone, nothing lands any more. */
        if (c->body && !c->hold &&
            (!qp || qp->base.state == IBV_QPS_ERR ||
             (c->in.op == IBV_WR_RDMA_WRITE &&
              !fv_mr_find(c->in.rkey, c->in.raddr, c->in.len, IBV_ACCESS_REMOTE_WRITE)))) {
            fv_conn_drop(c);
            return false;
        }
        n = get_payload(c, c->body ? c->body + c->body_off : NULL, c->in.len - c->body_off);
        if (n <= 0)
            return false;
        c->body_off += (size_t)n;
        if (c->body_off < c->in.len)
            return true;
    }
    c->in_body = false;
    c->in_off = 0;
    executed(c);
    return true;
}

void fv_conn_serve(struct fv_conn *c)
{
    int turns = 256;

    if (c->dead || quiet(c->dev, c->port))
        return;
    c->connected = true;
    while (!c->dead && !(c->rnr && !c->qp) && turns-- && receive(c)) {
    }
    if (!c->dead)
        fv_conn_send(c);
    if (turns <= 0)
        fv_wake();
}

void fv_conn_ready(struct fv_conn *c)
{
    c->rnr = false;
    fv_wake();
}

/* ---- ports */

int fv_listen(struct fv_dev *dev, int port)
{
    struct sockaddr_in sa = {.sin_family = AF_INET,
                             .sin_addr.s_addr = dev->port[port].ip,
                             .sin_port = htons((uint16_t)(FV_PORT_BASE + fv.slot))};
    struct epoll_event ev = {.events = EPOLLIN};
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, (struct sockaddr *)&sa, sizeof(sa)) < 0 || listen(fd, 256) < 0) {
        int rc = -errno;

        close(fd);
        return rc;
    }
    dev->listener[port] = fd;
    ev.data.ptr = &dev->listener[port];
    epoll_ctl(fv.epoll, EPOLL_CTL_ADD, fd, &ev);
    return 0;
}
