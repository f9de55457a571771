#define _GNU_SOURCE
#include "agree/net.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <unistd.h>

#include "util/clock.h"

#define R2_NET_EVENTS 64
#define R2_NET_OUT (64u << 20) /* most bytes that wait for one peer; beyond, it is closed */
#define R2_NET_STRANGER 256    /* most bytes of a frame from one that has shown no token */
#define R2_NET_STRANGER_NS (10 * R2_NS_PER_S)
#define R2_NET_CONNECT_NS (10 * R2_NS_PER_S)
#define R2_NET_DEAF_NS R2_NS_PER_S

bool r2_agree_addr_equal(const struct r2_agree_addr *a, const struct r2_agree_addr *b)
{
    return a->family == b->family && a->port == b->port &&
           memcmp(a->ip, b->ip, a->family == 4 ? 4 : 16) == 0;
}

static uint64_t r2_net_key(const uint8_t process[16])
{
    uint64_t key;

    memcpy(&key, process, sizeof(key)); /* random bytes: any order will do */
    return key;
}

/* --- connections -------------------------------------------------------------------------- */

static bool r2_net_is_stranger(const struct r2_agree_conn *c)
{
    return !c->outgoing && c->stage < R2_CONN_TRUSTED;
}

static void r2_net_close(struct r2_agree_net *net, struct r2_agree_conn *c)
{
    uint64_t key = r2_net_key(c->process);
    /* Anybody may say any name. */
    bool known = c->stage >= R2_CONN_NAMED && !r2_net_is_stranger(c);
    uint8_t process[16];

    memcpy(process, c->process, sizeof(process));
    if (known && r2_hash_get(&net->by_process, key) == c) {
        r2_hash_del(&net->by_process, key);
    }
    net->strangers -= r2_net_is_stranger(c);
    r2_list_del(&c->node);
    /* Not left to the close: a forked child that has not closed its copy yet would keep it in the
     * set. Its next event would be one of a connection that is no more. */
    epoll_ctl(net->epoll, EPOLL_CTL_DEL, c->fd, NULL);
    r2_agree_fds_close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
    if (known) {
        net->on_close(net->user, process);
    }
}

static int r2_net_watch(struct r2_agree_net *net, struct r2_agree_conn *c, int op)
{
    bool writing = c->stage == R2_CONN_CONNECTING || c->out_len > c->out_at;
    struct epoll_event ev = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.ptr = c};

    if (op == EPOLL_CTL_MOD && writing == c->writing) {
        return 0;
    }
    c->writing = writing;
    return epoll_ctl(net->epoll, op, c->fd, &ev) < 0 ? -errno : 0;
}

/* Room for `len` more bytes to send. */
static int r2_net_reserve(struct r2_agree_conn *c, size_t len)
{
    uint8_t *more;
    size_t room = c->out_room ? c->out_room : 1024;

    if (c->out_at > 0) {
        memmove(c->out, c->out + c->out_at, c->out_len - c->out_at);
        c->out_len -= c->out_at;
        c->out_at = 0;
    }
    if (c->out_len + len > R2_NET_OUT) {
        return -ENOBUFS;
    }
    while (room < c->out_len + len) {
        room *= 2;
    }
    if (room != c->out_room) {
        more = realloc(c->out, room);
        if (!more) {
            return -ENOMEM;
        }
        c->out = more;
        c->out_room = room;
    }
    return 0;
}

static int r2_net_queue(struct r2_agree_conn *c, const struct r2_agree_frame *f, const void *first,
                        size_t first_len, const void *second)
{
    int rc = r2_net_reserve(c, R2_AGREE_HEADER + f->len);

    if (rc != 0) {
        return rc;
    }
    r2_agree_frame_encode(c->out + c->out_len, f);
    c->out_len += R2_AGREE_HEADER;
    if (first_len > 0) {
        memcpy(c->out + c->out_len, first, first_len);
    }
    if (f->len > first_len) {
        memcpy(c->out + c->out_len + first_len, second, f->len - first_len);
    }
    c->out_len += f->len;
    return 0;
}

/* Sends what the socket takes. 0, or -errno: the connection is broken. */
static int r2_net_flush(struct r2_agree_conn *c)
{
    while (c->stage != R2_CONN_CONNECTING && c->out_at < c->out_len) {
        ssize_t n = send(c->fd, c->out + c->out_at, c->out_len - c->out_at, MSG_NOSIGNAL);

        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return errno == EAGAIN ? 0 : -errno;
        }
        c->out_at += (size_t)n;
    }
    if (c->out_at == c->out_len) {
        c->out_at = c->out_len = 0;
        if (c->out_room > 65536) { /* hundreds of connections: no large buffer is kept */
            free(c->out);
            c->out = NULL;
            c->out_room = 0;
        }
    }
    return 0;
}

static struct r2_agree_conn *r2_net_add(struct r2_agree_net *net, int fd, bool outgoing,
                                        enum r2_agree_stage stage)
{
    struct r2_agree_frame hello = {.kind = R2_FRAME_HELLO, .len = R2_AGREE_HELLO_BYTES};
    struct r2_agree_conn *c = calloc(1, sizeof(*c));
    uint8_t text[R2_AGREE_HELLO_BYTES];
    int one = 1;

    if (!c) {
        r2_agree_fds_close(fd);
        return NULL;
    }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    c->fd = fd;
    c->outgoing = outgoing;
    c->stage = stage;
    c->born_ns = net->now_ns;
    r2_agree_hello_encode(text, &net->self);
    r2_list_add_tail(&net->conns, &c->node);
    net->strangers += !outgoing;
    if (r2_net_queue(c, &hello, text, sizeof(text), NULL) != 0 ||
        r2_net_watch(net, c, EPOLL_CTL_ADD) != 0) {
        r2_net_close(net, c);
        return NULL;
    }
    return c;
}

static socklen_t r2_net_sockaddr(const struct r2_agree_addr *a, struct sockaddr_storage *out)
{
    struct sockaddr_in *in = (struct sockaddr_in *)out;
    struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)out;

    memset(out, 0, sizeof(*out));
    if (a->family == 4) {
        in->sin_family = AF_INET;
        in->sin_port = htons(a->port);
        memcpy(&in->sin_addr, a->ip, 4);
        return sizeof(*in);
    }
    in6->sin6_family = AF_INET6;
    in6->sin6_port = htons(a->port);
    memcpy(&in6->sin6_addr, a->ip, 16);
    return sizeof(*in6);
}

static struct r2_agree_conn *r2_net_connect(struct r2_agree_net *net,
                                            const struct r2_agree_addr *addr)
{
    struct sockaddr_storage sa;
    socklen_t len = r2_net_sockaddr(addr, &sa);
    struct r2_agree_conn *c;
    bool connecting;
    int fd;

    if (addr->family == 0) {
        return NULL;
    }
    r2_agree_fds_begin();
    fd = r2_agree_fds_made(socket(sa.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd < 0) {
        return NULL;
    }
    connecting = connect(fd, (struct sockaddr *)&sa, len) < 0;
    if (connecting && errno != EINPROGRESS) {
        r2_agree_fds_close(fd);
        return NULL;
    }
    c = r2_net_add(net, fd, true, connecting ? R2_CONN_CONNECTING : R2_CONN_OPEN);
    if (c) {
        c->addr = *addr;
    }
    return c;
}

static struct r2_agree_conn *r2_net_find(struct r2_agree_net *net, const uint8_t *process,
                                         const struct r2_agree_addr *addr)
{
    struct r2_agree_conn *c = process ? r2_hash_get(&net->by_process, r2_net_key(process)) : NULL;
    struct r2_list *it;

    if (c && memcmp(c->process, process, 16) == 0) {
        return c;
    }
    /* On its way, or known by its address only. */
    R2_LIST_FOR_EACH (it, &net->conns) {
        c = R2_CONTAINER_OF(it, struct r2_agree_conn, node);
        if (c->outgoing && r2_agree_addr_equal(&c->addr, addr) &&
            (!process || c->stage < R2_CONN_NAMED || memcmp(c->process, process, 16) == 0)) {
            return c;
        }
    }
    return NULL;
}

int r2_agree_net_send(struct r2_agree_net *net, const uint8_t *process,
                      const struct r2_agree_addr *addr, const struct r2_agree_frame *f,
                      const void *first, size_t first_len, const void *second)
{
    struct r2_agree_conn *c = r2_net_find(net, process, addr);
    int rc;

    if (!c) {
        c = r2_net_connect(net, addr);
    }
    if (!c) {
        return -EHOSTUNREACH;
    }
    rc = r2_net_queue(c, f, first, first_len, second);
    if (rc == 0) {
        rc = r2_net_flush(c);
    }
    if (rc == 0) {
        return r2_net_watch(net, c, EPOLL_CTL_MOD);
    }
    /* Closed in its turn: the caller may be in a handler of this very connection. */
    shutdown(c->fd, SHUT_RDWR);
    return rc;
}

enum r2_agree_way r2_agree_net_way(struct r2_agree_net *net, const uint8_t *process,
                                   const struct r2_agree_addr *addr)
{
    struct r2_agree_conn *c = r2_net_find(net, process, addr);
    struct tcp_info info = {0};
    socklen_t len = sizeof(info);

    if (!c) {
        return R2_WAY_NONE;
    }
    if (c->stage == R2_CONN_CONNECTING) {
        return net->now_ns - c->born_ns < R2_NET_LONG_NS ? R2_WAY_WAIT : R2_WAY_LONG;
    }
    /* The end of a peer that died is with the kernel before this thread has read of it. */
    if (getsockopt(c->fd, IPPROTO_TCP, TCP_INFO, &info, &len) < 0 ||
        info.tcpi_state != TCP_ESTABLISHED) {
        return R2_WAY_NONE;
    }
    return c->out_at < c->out_len ? R2_WAY_WAIT : R2_WAY_SENT;
}

/* --- receiving ---------------------------------------------------------------------------- */

static bool r2_net_hello(struct r2_agree_net *net, struct r2_agree_conn *c,
                         const struct r2_agree_frame *f, const uint8_t *payload)
{
    struct r2_agree_hello h;

    if (c->stage >= R2_CONN_NAMED || f->kind != R2_FRAME_HELLO ||
        r2_agree_hello_decode(payload, f->len, &h) != 0) {
        return false;
    }
    c->stage = R2_CONN_NAMED;
    memcpy(c->process, h.process, sizeof(c->process));
    if (!c->outgoing) {
        c->addr = h.addr;
    }
    /* Two that connect to each other at once have two connections; the first is used. An
     * accepted one counts only when it has shown a token. */
    if (c->outgoing) {
        r2_hash_put(&net->by_process, r2_net_key(c->process), c);
    }
    return true;
}

static bool r2_net_frame(struct r2_agree_net *net, struct r2_agree_conn *c,
                         const struct r2_agree_frame *f, const uint8_t *payload)
{
    bool stranger = r2_net_is_stranger(c);

    if (c->stage < R2_CONN_NAMED || f->kind == R2_FRAME_HELLO) {
        return r2_net_hello(net, c, f, payload);
    }
    if (net->on_frame(net->user, c, f, payload)) {
        c->stage = R2_CONN_TRUSTED;
        if (stranger) {
            net->strangers--;
            r2_hash_put(&net->by_process, r2_net_key(c->process), c);
        }
    }
    /* A stranger must show a token with its first frame; a friend may be late for one that has
     * been destroyed. */
    return !r2_net_is_stranger(c);
}

/* Takes whole frames out of c->in. False: the connection is to be closed. */
static bool r2_net_parse(struct r2_agree_net *net, struct r2_agree_conn *c)
{
    size_t at = 0;
    bool good = true;

    while (good && c->in_len - at >= R2_AGREE_HEADER) {
        struct r2_agree_frame f;

        if (r2_agree_frame_decode(c->in + at, &f) != 0 ||
            (r2_net_is_stranger(c) && f.len > R2_NET_STRANGER &&
             !(c->stage == R2_CONN_NAMED && net->knows(net->user, &f)))) {
            return false;
        }
        if (c->in_len - at < R2_AGREE_HEADER + f.len) {
            break;
        }
        good = r2_net_frame(net, c, &f, c->in + at + R2_AGREE_HEADER);
        at += R2_AGREE_HEADER + f.len;
    }
    memmove(c->in, c->in + at, c->in_len - at);
    c->in_len -= at;
    return good;
}

/* Room for what the frame at hand still needs; shrinks after a large one. */
static bool r2_net_room(struct r2_agree_conn *c)
{
    size_t need = 4096;
    struct r2_agree_frame f;
    uint8_t *other;

    if (c->in_len >= R2_AGREE_HEADER && r2_agree_frame_decode(c->in, &f) == 0) {
        need = R2_AGREE_HEADER + f.len > need ? R2_AGREE_HEADER + f.len : need;
    }
    if (c->in_room >= need && (c->in_room <= 65536 || c->in_len > 0)) {
        return true;
    }
    other = realloc(c->in, need);
    if (!other) {
        return false;
    }
    c->in = other;
    c->in_room = need;
    return true;
}

/* A bounded number of reads: one loud peer does not keep the others waiting. */
static bool r2_net_read(struct r2_agree_net *net, struct r2_agree_conn *c)
{
    for (int i = 0; i < 16; i++) {
        ssize_t n;

        if (!r2_net_room(c)) {
            return false;
        }
        n = recv(c->fd, c->in + c->in_len, c->in_room - c->in_len, 0);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            return n < 0 && errno == EAGAIN;
        }
        c->in_len += (size_t)n;
        if (!r2_net_parse(net, c)) {
            return false;
        }
    }
    return true;
}

/* 0, or why not: ECONNREFUSED and others. */
static int r2_net_connected(struct r2_agree_conn *c)
{
    int error = 0;
    socklen_t len = sizeof(error);

    c->stage = R2_CONN_OPEN;
    return getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &len) < 0 ? errno : error;
}

static void r2_net_event(struct r2_agree_net *net, struct r2_agree_conn *c, uint32_t events)
{
    struct r2_agree_addr addr = c->addr;
    int error = 0;
    bool good;

    if (c->stage == R2_CONN_CONNECTING && (events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) {
        error = r2_net_connected(c);
    }
    good = error == 0;
    if (good && c->stage != R2_CONN_CONNECTING && (events & (EPOLLIN | EPOLLERR | EPOLLHUP))) {
        good = r2_net_read(net, c);
    }
    if (good) {
        good = r2_net_flush(c) == 0 && r2_net_watch(net, c, EPOLL_CTL_MOD) == 0;
    }
    if (!good) {
        r2_net_close(net, c);
    }
    if (error == ECONNREFUSED) {
        net->on_refused(net->user, &addr);
    }
}

/* Who waits to be accepted, while there are no descriptors, would wake the thread again and again:
 * the listener is left alone for a while. */
static void r2_net_listen(struct r2_agree_net *net, bool on)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = net};
    int rc = epoll_ctl(net->epoll, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, net->listener, &ev);

    net->deaf_ns = on && rc == 0 ? 0 : net->now_ns + R2_NET_DEAF_NS;
}

static void r2_net_accept(struct r2_agree_net *net)
{
    for (int i = 0; i < R2_NET_EVENTS; i++) {
        int fd;

        r2_agree_fds_begin();
        fd = r2_agree_fds_made(
            accept4(net->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)); /* does not block */
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                r2_net_listen(net, false);
            }
            return;
        }
        r2_net_add(net, fd, false, R2_CONN_OPEN);
    }
}

/* Too many strangers: the oldest go, unless what they have sent meanwhile shows that they are none.
 */
static void r2_net_crowd(struct r2_agree_net *net)
{
    struct r2_list *it, *tmp;

    R2_LIST_FOR_EACH_SAFE (it, tmp, &net->conns) { /* in the order in which they came */
        struct r2_agree_conn *c = R2_CONTAINER_OF(it, struct r2_agree_conn, node);

        if (net->strangers <= net->most_strangers) {
            return;
        }
        if (r2_net_is_stranger(c) && (!r2_net_read(net, c) || r2_net_is_stranger(c))) {
            r2_net_close(net, c);
        }
    }
}

static void r2_net_expire(struct r2_agree_net *net)
{
    struct r2_list *it, *tmp;

    R2_LIST_FOR_EACH_SAFE (it, tmp, &net->conns) {
        struct r2_agree_conn *c = R2_CONTAINER_OF(it, struct r2_agree_conn, node);

        if ((r2_net_is_stranger(c) && net->now_ns - c->born_ns > R2_NET_STRANGER_NS) ||
            (c->stage == R2_CONN_CONNECTING && net->now_ns - c->born_ns > R2_NET_CONNECT_NS)) {
            r2_net_close(net, c);
        }
    }
}

void r2_agree_net_turn(struct r2_agree_net *net, int timeout_ms)
{
    struct epoll_event events[R2_NET_EVENTS];
    int n = epoll_wait(net->epoll, events, R2_NET_EVENTS, timeout_ms);

    net->now_ns = r2_now_ns();
    for (int i = 0; i < n; i++) {
        void *who = events[i].data.ptr;

        /* Each connection has one event, and only its own event closes it. */
        if (who == net) {
            r2_net_accept(net);
        } else if (who) {
            r2_net_event(net, who, events[i].events);
        }
    }
    if (net->deaf_ns && net->now_ns >= net->deaf_ns) {
        r2_net_listen(net, true);
    }
    r2_net_crowd(net);
    r2_net_expire(net);
}

static int r2_net_most_strangers(void)
{
    struct rlimit limit;
    rlim_t part;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0) {
        return R2_AGREE_STRANGERS;
    }
    part = limit.rlim_cur / R2_AGREE_STRANGERS_PART;
    return part < R2_AGREE_STRANGERS ? (int)part : R2_AGREE_STRANGERS;
}

int r2_agree_net_init(struct r2_agree_net *net, int listener)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = net};

    r2_list_init(&net->conns);
    r2_hash_init(&net->by_process);
    net->listener = listener;
    net->now_ns = r2_now_ns();
    net->most_strangers = r2_net_most_strangers();
    r2_agree_fds_begin();
    net->epoll = r2_agree_fds_made(epoll_create1(EPOLL_CLOEXEC));
    if (net->epoll < 0) {
        return -errno;
    }
    if (listener >= 0 && epoll_ctl(net->epoll, EPOLL_CTL_ADD, listener, &ev) < 0) {
        int rc = -errno;

        r2_agree_fds_close(net->epoll);
        return rc;
    }
    return 0;
}
