/* Listening and connecting: the handle that an application carries from one process to another; and
 * what is closed when a context ends. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/loop/loop.h"
#include "util/lock.h"

static atomic_ulong next_conn = 1, next_listen = 1; /* 0 is no number */

#define HANDLE_MAGIC 0x48324352u /* "RC2H" */
#define HANDLE_ADDRS 3

/* What an application carries from the listener to the connector. `cookie` is ours on the
 * connecting side: the id of the connection under way; 0 in a fresh handle. */
struct handle {
    uint32_t magic;
    uint8_t version;
    uint8_t home;
    uint8_t n_addrs;
    uint8_t pad;
    uint8_t process[16];
    uint8_t secret[16];
    uint64_t listen;
    uint64_t cookie;
    struct {
        uint8_t nic;
        struct r2_wire_addr addr;
    } __attribute__((packed)) addrs[HANDLE_ADDRS];
} __attribute__((packed));
_Static_assert(sizeof(struct handle) <= R2_HANDLE_BYTES, "the handle is carried in 128 bytes");

static void fill_handle(struct handle *h, const struct r2_listen *l)
{
    struct r2_wire_addr second;
    int has_second = r2_eng.ops->second && r2_eng.ops->second(l->dev, &second) == 0;

    memset(h, 0, R2_HANDLE_BYTES);
    h->magic = HANDLE_MAGIC;
    h->version = R2_WIRE_VERSION;
    h->home = (uint8_t)l->dev;
    h->listen = l->id;
    memcpy(h->process, r2_eng.process, 16);
    memcpy(h->secret, r2_eng.secret, 16);
    /* The home NIC first, then usable ones, and the home's second address last; the rest is told on
     * the first path (INFO). */
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < r2_local.n && h->n_addrs < HANDLE_ADDRS - has_second; i++) {
            int rank = !r2_nic_usable(i) ? 2 : i == l->dev ? 0 : 1;
            struct r2_wire_addr addr;

            if (rank != turn || r2_eng.ops->address(i, &addr))
                continue;
            h->addrs[h->n_addrs].nic = (uint8_t)i;
            h->addrs[h->n_addrs++].addr = addr;
        }
    }
    if (has_second) {
        h->addrs[h->n_addrs].nic = (uint8_t)l->dev;
        h->addrs[h->n_addrs++].addr = second;
    }
}

int r2_engine_listen(struct r2_ctx *ctx, int dev, void *handle, struct r2_listen **out)
{
    R2_UNCANCELLED;
    struct r2_listen *l;
    struct handle h[2];
    int rc = r2_engine_start();

    *out = NULL;
    if (rc)
        return rc;
    if (dev < 0 || dev >= r2_local.n)
        return -EINVAL;
    l = calloc(1, sizeof(*l));
    if (!l)
        return -ENOMEM;
    l->ctx = ctx;
    l->dev = dev;
    l->id = atomic_fetch_add(&next_listen, 1);
    r2_list_init(&l->backlog);
    fill_handle(h, l);
    memcpy(handle, h, R2_HANDLE_BYTES);
    pthread_mutex_lock(&r2_eng.lock);
    r2_list_add_tail(&r2_eng.listens, &l->node);
    r2_list_add_tail(&ctx->listens, &l->ctx_node);
    pthread_mutex_unlock(&r2_eng.lock);
    *out = l;
    return 0;
}

/* A finalize may have closed it under a communicator that shares the context. Under r2_eng.lock;
 * the pointer is compared only. */
static bool is_open(const struct r2_listen *l)
{
    R2_LIST_EACH (open, const struct r2_listen, node, &r2_eng.listens) {
        if (open == l)
            return true;
    }
    return false;
}

int r2_engine_accept(struct r2_listen *l, struct r2_conn **out)
{
    R2_UNCANCELLED;
    struct r2_list *n;

    *out = NULL;
    if (atomic_load(&r2_eng.inert))
        return -EPERM;
    pthread_mutex_lock(&r2_eng.lock);
    if (!is_open(l)) {
        pthread_mutex_unlock(&r2_eng.lock);
        return -EINVAL;
    }
    n = r2_list_first(&l->backlog);
    if (n) {
        *out = R2_CONTAINER_OF(n, struct r2_conn, queue);
        r2_list_del(n);
        r2_list_add_tail(&l->ctx->conns, &(*out)->ctx_node);
    }
    pthread_mutex_unlock(&r2_eng.lock);
    return 0;
}

int r2_engine_close_listen(struct r2_listen *l)
{
    R2_UNCANCELLED;
    struct r2_list *n;
    bool open;

    if (!l || atomic_load(&r2_eng.inert))
        return 0;
    pthread_mutex_lock(&r2_eng.lock);
    open = is_open(l);
    if (open) {
        r2_list_del(&l->node);
        r2_list_del(&l->ctx_node);
    }
    pthread_mutex_unlock(&r2_eng.lock);
    if (!open)
        return 0;
    while ((n = r2_list_first(&l->backlog))) /* nobody else reaches the list any more */
        r2_engine_close(R2_CONTAINER_OF(n, struct r2_conn, queue));
    free(l);
    return 0;
}

/* ---- connecting */

/* Under r2_eng.lock. */
static void list_in(struct r2_list *list, struct r2_conn *c)
{
    r2_list_del(&c->ctx_node);
    r2_list_add_tail(list, &c->ctx_node);
}

/* A handle comes from outside: its cookie counts only for a connection that it has begun here and
 * that nobody has yet. It is the caller's from here on, so that a finalize in another thread does
 * not take it away; the caller gives it back if it is not made yet. */
static struct r2_conn *find_cookie(struct r2_ctx *ctx, const struct handle *h)
{
    struct r2_conn *found = NULL;

    pthread_mutex_lock(&r2_eng.lock);
    R2_LIST_EACH (c, struct r2_conn, ctx_node, &ctx->half_made) {
        if (c->id == h->cookie && c->listen_id == h->listen &&
            memcmp(c->peer->id, h->process, 16) == 0)
            found = c;
    }
    if (found)
        list_in(&ctx->conns, found);
    pthread_mutex_unlock(&r2_eng.lock);
    return found;
}

static void learn_second(struct r2_rnic *r, const struct r2_wire_addr *addr)
{
    if (r->addr.family != addr->family && !r->second.family)
        r->second = *addr;
}

static void learn_addrs(struct r2_peer *p, const struct handle *h)
{
    for (int i = 0; i < h->n_addrs && i < HANDLE_ADDRS; i++) {
        int nic = h->addrs[i].nic;

        if (nic >= R2_MAX_NICS)
            continue;
        if (p->rnics[nic].known) {
            learn_second(&p->rnics[nic], &h->addrs[i].addr);
            continue;
        }
        p->rnics[nic].known = true;
        p->rnics[nic].word = R2_NIC_USABLE;
        p->rnics[nic].addr = h->addrs[i].addr;
        if (nic >= p->n_rnics)
            p->n_rnics = nic + 1;
    }
}

/* A peer without connections is being forgotten: the next call finds a new one. Others have to be
 * closed first, by whoever was told that they have failed. */
static int given_up(const struct r2_peer *p)
{
    char who[R2_PEER_WHO];

    if (!p->error || r2_list_empty(&p->conn_list))
        return -EAGAIN;
    R2_WARN_LIMIT("peer %s was given up (%s): there is a new connection to it when the "
                  "communicators that had one are destroyed",
                  r2_peer_who(p, who), strerror(-p->error));
    return p->error;
}

static int begin(struct r2_ctx *ctx, int dev, struct handle *h)
{
    struct r2_peer *p = r2_peer_obtain(h->process, h->secret, true);
    struct r2_conn *c = NULL;
    int rc = -ENOMEM;

    if (!p)
        return -ENOMEM;
    r2_peer_lock(p);
    if (p->life != R2_PEER_ALIVE) {
        rc = given_up(p);
        goto out;
    }
    learn_addrs(p, h);
    c = r2_conn_new(p, atomic_fetch_add(&next_conn, 1));
    if (!c)
        goto out;
    c->listen_id = h->listen;
    c->home = (uint8_t)(dev < 0 ? ~dev : dev);
    c->first = dev < 0 ? R2_ANY_NIC : c->home;
    r2_peer_waits(p, r2_peer_now(p));
    p->opening++;
    r2_conn_out_open(c);
    h->cookie = c->id;
    rc = 0;
out:
    r2_peer_unlock(p);
    if (c) {
        pthread_mutex_lock(&r2_eng.lock);
        r2_list_add_tail(&ctx->half_made, &c->ctx_node);
        pthread_mutex_unlock(&r2_eng.lock);
        r2_peer_wake(p);
    }
    r2_peer_put(p);
    return rc == -EAGAIN ? 0 : rc;
}

/* Said to the user: the job ends here, as a rule at its start, and NCCL calls it an invalid usage.
 */
static bool is_ours(const struct handle *h)
{
    if (h->magic != HANDLE_MAGIC)
        R2_TELL("a peer listens with another net plugin (or NCCL's own network): all ranks need "
                "R2CCL, see NCCL_NET_PLUGIN and LD_PRELOAD on the other nodes");
    else if (h->version != R2_WIRE_VERSION)
        R2_TELL("a peer's R2CCL speaks version %u of the protocol, this one %u: install the same "
                "build on all nodes",
                (unsigned)h->version, (unsigned)R2_WIRE_VERSION);
    else if (h->n_addrs > HANDLE_ADDRS)
        R2_TELL("a peer's handle is damaged: %u addresses where %u have room", (unsigned)h->n_addrs,
                (unsigned)HANDLE_ADDRS);
    else
        return true;
    return false;
}

int r2_engine_connect(struct r2_ctx *ctx, int dev, void *handle, struct r2_conn **out)
{
    R2_UNCANCELLED;
    struct handle *h = handle;
    struct r2_conn *c;
    int rc = r2_engine_start(), state, err;

    *out = NULL;
    if (rc)
        return rc;
    if ((dev < 0 ? ~dev : dev) >= r2_local.n)
        return -EINVAL;
    if (!is_ours(h))
        return -EINVAL;
    if (!h->cookie)
        return begin(ctx, dev, h);
    c = find_cookie(ctx, h);
    if (!c)
        return -EINVAL;
    r2_peer_lock(c->peer);
    state = c->state;
    err = c->error;
    r2_peer_unlock(c->peer);
    if (state == R2_CONN_OPEN) {
        h->cookie = 0;
        *out = c;
    } else if (state == R2_CONN_FAILED) {
        h->cookie = 0;
        r2_engine_close(c);
        return err;
    } else {
        pthread_mutex_lock(&r2_eng.lock);
        list_in(&ctx->half_made, c);
        pthread_mutex_unlock(&r2_eng.lock);
    }
    return 0;
}

/* ---- the end of a context */

/* Nobody else is at these: another finalize finds the context empty, and a connect that looks at
 * one right now counts as its owner. What is made from now on is not among them. A communicator
 * that shares the context and has nothing but listens and half-made connections cannot be told from
 * none: these are closed under it, and its next accept or connect says -EINVAL. */
static void close_all(struct r2_list *listens, struct r2_list *half_made)
{
    struct r2_list *n;

    while ((n = r2_list_first(listens)))
        r2_engine_close_listen(R2_CONTAINER_OF(n, struct r2_listen, ctx_node));
    while ((n = r2_list_first(half_made)))
        r2_engine_close(R2_CONTAINER_OF(n, struct r2_conn, ctx_node));
}

int r2_engine_finalize(struct r2_ctx *ctx)
{
    R2_UNCANCELLED;
    struct r2_list listens, half_made;

    if (atomic_load(&r2_eng.inert))
        return 0;
    r2_list_init(&listens);
    r2_list_init(&half_made);
    pthread_mutex_lock(&r2_eng.lock);
    /* NCCL closes its connections before it finalizes the context that was theirs alone. Some that
     * are still in use tell that a communicator shares it, which may be making others just now. */
    if (r2_list_empty(&ctx->conns)) {
        r2_list_splice_tail(&listens, &ctx->listens);
        r2_list_splice_tail(&half_made, &ctx->half_made);
    }
    pthread_mutex_unlock(&r2_eng.lock);
    close_all(&listens, &half_made);
    return 0;
}
