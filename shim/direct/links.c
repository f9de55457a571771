#include "direct/links.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_abi/nccl_net_abi.h"
#include "util/log.h"

_Static_assert(R2_LINKS_HANDLE == R2_NCCL_HANDLE_BYTES, "a handle of the net API");

#define HELLO_MAGIC UINT32_C(0x45324352) /* "RC2E" */

enum { CONTRIBUTIONS, SUMS, STREAMS };

/* Beside those of the peers. */
#define OTHERS 16

/* The first message on a connection. */
struct hello {
    uint32_t magic;
    uint16_t rank, stream;
};

struct link {
    void *comm, *mr;
    void *requests[R2_NCCL_MAX_REQUESTS]; /* ring, and the bytes of each */
    size_t len[R2_NCCL_MAX_REQUESTS];
    struct {
        const char *at; /* where it comes; NULL: sent */
        uint64_t is;
    } word[R2_NCCL_MAX_REQUESTS];
    uint32_t posted, done;
    bool ready; /* hello has been said, or heard */
};

/* Made by a peer that has not said yet which it is. */
struct stranger {
    void *comm, *request;
    struct hello hello;
};

struct r2_links {
    const struct r2_ncclnet_v12 *net;
    void *ctx;
    int rank, p;
    struct r2_links_card own, *cards; /* cards [p] */
    void *listens[R2_LINKS_NICS];
    struct link *out, *in;       /* [p * STREAMS] */
    struct stranger **strangers; /* [most_strangers], the oldest first */
    int n_strangers, most_strangers;
    int dropped, ended; /* strangers; those of them that ended by themselves */
    struct hello said[STREAMS];
};

static int as_errno(int result)
{
    switch (result) {
    case R2_NCCL_SUCCESS:
        return 0;
    case R2_NCCL_REMOTE_ERROR:
        return -ECONNRESET;
    case R2_NCCL_INVALID_USAGE: /* a message does not fit its receive */
        return -EMSGSIZE;
    case R2_NCCL_INVALID_ARGUMENT:
        return -EINVAL;
    default:
        return -EIO;
    }
}

static struct link *link_of(struct r2_links *l, enum r2_lane_kind kind, int peer)
{
    bool out = kind == R2_LANE_UP || kind == R2_LANE_OUT;
    int stream = kind == R2_LANE_UP || kind == R2_LANE_IN ? CONTRIBUTIONS : SUMS;

    return &(out ? l->out : l->in)[peer * STREAMS + stream];
}

/* ---- making them */

static int listen_all(struct r2_links *l)
{
    int n = 0, rc = as_errno(l->net->devices(&n));

    if (rc == 0 && n < 1)
        rc = -ENODEV;
    if (n > R2_LINKS_NICS)
        n = R2_LINKS_NICS;
    for (int dev = 0; dev < n && rc == 0; dev++) {
        rc = as_errno(l->net->listen(l->ctx, dev, l->own.handle[dev], &l->listens[dev]));
        l->own.nics += rc == 0;
    }
    return rc;
}

int r2_links_new(struct r2_links **out, const struct r2_ncclnet_v12 *net, uint64_t id, int rank,
                 int p)
{
    struct r2_ncclnet_config config = {.traffic_class = R2_NCCL_TRAFFIC_CLASS_UNDEF};
    struct r2_links *l = calloc(1, sizeof(*l));
    size_t n = (size_t)p * STREAMS;
    int rc = -ENOMEM;

    *out = NULL;
    if (!l)
        return rc;
    l->net = net;
    l->rank = rank;
    l->p = p;
    l->out = calloc(n, sizeof(*l->out));
    l->in = calloc(n, sizeof(*l->in));
    l->most_strangers = (int)n + OTHERS;
    l->strangers = calloc((size_t)l->most_strangers, sizeof(*l->strangers));
    l->cards = calloc((size_t)p, sizeof(*l->cards));
    for (int s = 0; s < STREAMS; s++)
        l->said[s] = (struct hello){HELLO_MAGIC, (uint16_t)rank, (uint16_t)s};
    if (l->out && l->in && l->strangers && l->cards)
        rc = as_errno(net->init(&l->ctx, id, &config, NULL, NULL));
    if (rc == 0)
        rc = listen_all(l);
    if (rc) {
        r2_links_free(l);
        return rc;
    }
    *out = l;
    return 0;
}

const struct r2_links_card *r2_links_own(const struct r2_links *l)
{
    return &l->own;
}

int r2_links_connect(struct r2_links *l, int rank, const void *card, size_t len)
{
    struct r2_links_card *to = &l->cards[rank];

    if (len > sizeof(*to) || len < offsetof(struct r2_links_card, handle))
        return -EPROTO;
    memcpy(to, card, len);
    if (to->nics < 1 || to->nics > R2_LINKS_NICS || r2_links_card_bytes(to) != len)
        return -EPROTO;
    return 0;
}

/* Neighbours by distance take NICs in turn, on both sides alike. */
static uint32_t nic_of(const struct r2_links *l, int peer, int stream)
{
    return (uint32_t)((peer - l->rank - 1 + l->p) % l->p + stream);
}

/* 1: it is there and has said hello. */
static int dial(struct r2_links *l, int peer, int stream)
{
    struct link *k = &l->out[peer * STREAMS + stream];
    struct r2_ncclnet_device_handle *device = NULL;
    uint32_t nic = nic_of(l, peer, stream);
    int rc = 0, done = 0;

    if (k->ready)
        return 1;
    if (!k->comm)
        rc = as_errno(l->net->connect(l->ctx, ~(int)(nic % l->own.nics),
                                      l->cards[peer].handle[nic % l->cards[peer].nics], &k->comm,
                                      &device));
    if (rc == 0 && k->comm && !k->requests[0])
        rc = as_errno(l->net->isend(k->comm, &l->said[stream], sizeof(struct hello), 0, NULL, NULL,
                                    &k->requests[0]));
    if (rc == 0 && k->requests[0])
        rc = as_errno(l->net->test(k->requests[0], &done, NULL));
    if (rc || !done)
        return rc;
    k->requests[0] = NULL;
    k->ready = true;
    return 1;
}

/* No peer made it, or that peer has given up. -EPROTO: there are too many of them. */
static int drop(struct r2_links *l, const char *why)
{
    if (l->dropped == 0)
        R2_WARN("a connection for AllReduce was dropped: %s", why);
    return ++l->dropped > l->most_strangers ? -EPROTO : 0;
}

static void forget(struct r2_links *l, int at)
{
    free(l->strangers[at]);
    l->n_strangers--;
    memmove(&l->strangers[at], &l->strangers[at + 1],
            (size_t)(l->n_strangers - at) * sizeof(*l->strangers));
}

static int accept_one(struct r2_links *l, void *comm)
{
    struct stranger *s = calloc(1, sizeof(*s));
    int rc = 0;

    if (!s) {
        l->net->close_recv(comm);
        return -ENOMEM;
    }
    if (l->n_strangers == l->most_strangers) {
        l->net->close_recv(l->strangers[0]->comm);
        forget(l, 0);
        rc = drop(l, "it did not say whose it is");
    }
    s->comm = comm;
    l->strangers[l->n_strangers++] = s;
    return rc;
}

static int accept_some(struct r2_links *l)
{
    struct r2_ncclnet_device_handle *device = NULL;
    int rc = 0;

    for (uint32_t nic = 0; nic < l->own.nics; nic++) {
        for (void *comm = &comm; comm && rc == 0;) {
            comm = NULL;
            rc = as_errno(l->net->accept(l->listens[nic], &comm, &device));
            if (rc == 0 && comm)
                rc = accept_one(l, comm);
        }
    }
    return rc;
}

/* 1: it has said who it is, or was dropped; then strangers[at] is another. */
static int hear(struct r2_links *l, int at)
{
    struct stranger *s = l->strangers[at];
    void *data = &s->hello, *none = NULL;
    size_t size = sizeof(s->hello);
    int tag = 0, done = 0, got = 0, rc = 0;
    struct link *k = NULL;

    if (!s->request)
        rc = as_errno(l->net->irecv(s->comm, 1, &data, &size, &tag, &none, &none, &s->request));
    if (rc == 0 && s->request)
        rc = as_errno(l->net->test(s->request, &done, &got));
    if (rc == 0 && !done)
        return 0;
    if (rc == 0 && (size_t)got == size && s->hello.magic == HELLO_MAGIC && s->hello.rank < l->p &&
        s->hello.rank != l->rank && s->hello.stream < STREAMS)
        k = &l->in[s->hello.rank * STREAMS + s->hello.stream];
    if (k && !k->comm) {
        k->comm = s->comm;
        k->ready = true;
        rc = 0;
    } else {
        l->net->close_recv(s->comm);
        l->ended += rc == -ECONNRESET;
        rc = drop(l, rc == -ECONNRESET ? "it ended"
                     : k               ? "there is one already"
                                       : "no rank made it");
    }
    forget(l, at);
    return rc ? rc : 1;
}

static int hear_all(struct r2_links *l)
{
    int rc = 0;

    for (int i = 0; i < l->n_strangers && rc >= 0; i += rc == 0)
        rc = hear(l, i);
    return rc < 0 ? rc : 0;
}

int r2_links_turn(struct r2_links *l)
{
    bool all = true;
    int rc = accept_some(l);

    if (rc == 0)
        rc = hear_all(l);
    for (int peer = 0; peer < l->p && rc >= 0; peer++) {
        for (int s = 0; s < STREAMS && rc >= 0 && peer != l->rank; s++) {
            rc = dial(l, peer, s);
            all = all && rc == 1 && l->in[peer * STREAMS + s].ready;
        }
    }
    return rc < 0 ? rc : all;
}

bool r2_links_ended(const struct r2_links *l)
{
    return l->ended > 0;
}

static int register_on(struct r2_links *l, struct link *k, void *data, size_t len)
{
    return k->comm ? as_errno(l->net->regmr(k->comm, data, len, R2_NCCL_PTR_HOST, &k->mr)) : 0;
}

int r2_links_register(struct r2_links *l, void *data, size_t len)
{
    int rc = 0;

    for (int i = 0; i < l->p * STREAMS && rc == 0; i++) {
        rc = register_on(l, &l->out[i], data, len);
        if (rc == 0)
            rc = register_on(l, &l->in[i], data, len);
    }
    return rc;
}

/* ---- messages */

/* A message of another size than its receive (the plugin refuses a larger one), or with another
 * word: ranks do not give the same operations. */
static int unequal(const struct r2_links *l, int peer)
{
    R2_WARN("nodes %d and %d do not give the same AllReduce: all ranks must give the same count, "
            "type and operation, in the same order",
            l->rank, peer);
    return -EMSGSIZE;
}

void r2_links_sign(void *data, size_t len, uint64_t word)
{
    char *at = (char *)data + len;

    if (memcmp(at, &word, sizeof(word)))
        memcpy(at, &word, sizeof(word));
}

int r2_links_post(struct r2_links *l, enum r2_lane_kind kind, int peer, void *data, size_t len,
                  uint64_t word)
{
    bool out = kind == R2_LANE_UP || kind == R2_LANE_OUT;
    struct link *k = link_of(l, kind, peer);
    uint32_t at = k->posted % R2_NCCL_MAX_REQUESTS;
    void **request = &k->requests[at], *none = NULL;
    int tag = 0, rc;

    if (k->posted - k->done >= R2_NCCL_MAX_REQUESTS)
        return 0;
    *request = NULL;
    k->word[at].at = out ? NULL : (const char *)data + len;
    k->word[at].is = word;
    len += sizeof(word);
    k->len[at] = len;
    if (out)
        rc = l->net->isend(k->comm, data, len, tag, k->mr, NULL, request);
    else
        rc = l->net->irecv(k->comm, 1, &data, &len, &tag, &k->mr, &none, request);
    rc = as_errno(rc);
    if (rc)
        return rc == -EMSGSIZE ? unequal(l, peer) : rc;
    k->posted += *request != NULL;
    return *request != NULL;
}

/* What has been received is what was posted for. */
static bool is_equal(const struct link *k, uint32_t at, size_t got)
{
    const char *word = k->word[at].at;

    return !word || (got == k->len[at] && !memcmp(word, &k->word[at].is, sizeof(uint64_t)));
}

int r2_links_posted(struct r2_links *l, enum r2_lane_kind kind, int peer)
{
    struct link *k = link_of(l, kind, peer);
    int n = 0;

    while (k->done != k->posted) {
        uint32_t at = k->done % R2_NCCL_MAX_REQUESTS;
        int done = 0, got = 0, rc = as_errno(l->net->test(k->requests[at], &done, &got));

        if (rc == -EMSGSIZE || (rc == 0 && done && !is_equal(k, at, (size_t)got)))
            return unequal(l, peer);
        if (rc) {
            k->done = k->posted; /* a request is not asked again after its error */
            return rc;
        }
        if (!done)
            break;
        k->done++;
        n++;
    }
    return n;
}

int r2_links_reason(struct r2_links *l, int error)
{
    for (int i = 0; error == -ECONNRESET && i < l->p * R2_LANE_KINDS; i++) {
        int rc = r2_links_posted(l, (enum r2_lane_kind)(i % R2_LANE_KINDS), i / R2_LANE_KINDS);

        error = rc == -EMSGSIZE ? rc : error;
    }
    return error;
}

/* ---- the end */

static void end(struct r2_links *l, struct link *k, bool out)
{
    if (!k->comm)
        return;
    if (k->mr)
        l->net->deregmr(k->comm, k->mr);
    (out ? l->net->close_send : l->net->close_recv)(k->comm);
}

void r2_links_free(struct r2_links *l)
{
    if (!l)
        return;
    for (int i = 0; l->out && l->in && i < l->p * STREAMS; i++) {
        end(l, &l->out[i], true);
        end(l, &l->in[i], false);
    }
    while (l->n_strangers > 0) {
        l->net->close_recv(l->strangers[0]->comm);
        forget(l, 0);
    }
    for (uint32_t nic = 0; nic < l->own.nics; nic++)
        l->net->close_listen(l->listens[nic]);
    if (l->ctx)
        l->net->finalize(l->ctx);
    free(l->out);
    free(l->in);
    free(l->strangers);
    free(l->cards);
    free(l);
}
