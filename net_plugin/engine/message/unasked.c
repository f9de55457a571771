#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdlib.h>

#include "engine/internal.h"
#include "util/copy.h"

#define KIB 1024

/* ---- the sender */

uint32_t r2_unasked_word(void)
{
    uint64_t most = r2_eng.device_memory ? 0 : r2_eng.set->unasked;

    return (uint32_t)(most / KIB) << R2_OPEN_UNASKED_SHIFT;
}

void r2_unasked_heard(struct r2_conn *c, uint32_t flags)
{
    uint64_t theirs = (uint64_t)(flags >> R2_OPEN_UNASKED_SHIFT) * KIB;
    uint64_t ours = r2_eng.device_memory ? 0 : r2_eng.set->unasked;

    c->unasked.most = theirs < ours ? theirs : ours;
}

/* Where queue pairs lead to the peer, the clear-to-send is worth waiting for. */
static bool only_sockets(const struct r2_peer *p)
{
    for (int i = 0; i < p->n_paths; i++) {
        if (p->paths[i]->transport != R2_VIA_TCP)
            return false;
    }
    return true;
}

void r2_unasked_grant(struct r2_conn *c, struct r2_req *r)
{
    if (r->unasked || r->size <= c->eager || r->size > c->unasked.most || c->revoked ||
        c->state != R2_CONN_OPEN || r->seq >= c->posted + R2_UNASKED_AHEAD ||
        r2_send_cts(c, r->seq) || !only_sockets(c->peer))
        return;
    r->unasked = true;
    r2_conn_begins(c, r);
    r2_send_more(c, r2_send_waiting(r));
}

void r2_unasked_grant_all(struct r2_conn *c)
{
    for (uint64_t s = c->oldest; c->unasked.most && s < c->next_seq; s++) {
        struct r2_req *r = r2_conn_req(c, s);

        if (r)
            r2_unasked_grant(c, r);
    }
}

void r2_unasked_cleared(struct r2_req *r)
{
    r->unasked = r->unasked && (r->led.send.next || r->led.send.count);
}

/* ---- the receiver */

static void copy_task(struct r2_task *t);

void r2_unasked_init(struct r2_conn *c)
{
    r2_task_init(&c->unasked.copy, r2_eng.set->unasked ? r2_io_pick() : r2_io_at(0), copy_task);
    c->unasked.copy.brief = true;
}

static void forget(struct r2_unasked *u)
{
    r2_mem_less(sizeof(*u) + u->cap);
    free(u->data);
    free(u);
}

void r2_unasked_free(struct r2_conn *c)
{
    for (int i = 0; i < R2_WINDOW; i++) {
        if (!c->unasked.at[i])
            continue;
        if (!c->unasked.at[i]->whole)
            r2_recv_free(&c->unasked.at[i]->led);
        forget(c->unasked.at[i]);
    }
    while (c->unasked.spare) {
        struct r2_unasked *u = c->unasked.spare;

        c->unasked.spare = u->next;
        forget(u);
    }
}

struct r2_unasked *r2_unasked_at(struct r2_conn *c, uint64_t seq)
{
    struct r2_unasked *u = c->unasked.at[seq % R2_WINDOW];

    return u && u->seq == seq ? u : NULL;
}

/* A spare one, or a new one, with room for `size`. */
static struct r2_unasked *obtain(struct r2_unasked_set *set, uint32_t size)
{
    struct r2_unasked *u = set->spare;
    uint8_t *data;

    if (u) {
        set->spare = u->next;
        set->spares--;
    } else {
        u = calloc(1, sizeof(*u));
        if (!u)
            return NULL;
        r2_mem_more(sizeof(*u));
    }
    if (u->cap < size) {
        data = malloc(size);
        if (!data) {
            forget(u);
            return NULL;
        }
        free(u->data);
        r2_mem_more(size - u->cap);
        u->data = data;
        u->cap = size;
    }
    return u;
}

static void give_back(struct r2_unasked_set *set, struct r2_unasked *u)
{
    set->at[u->seq % R2_WINDOW] = NULL;
    set->kept--;
    if (set->spares >= R2_UNASKED_AHEAD) {
        forget(u);
        return;
    }
    u->next = set->spare;
    set->spare = u;
    set->spares++;
}

struct r2_unasked *r2_unasked_begin(struct r2_conn *c, const struct r2_path *path,
                                    const struct r2_bulk *bulk, int *err)
{
    struct r2_unasked_set *set = &c->unasked;
    struct r2_unasked *u;

    *err = -EPROTO; /* beyond the credit, or of a size that nobody allowed */
    if (r2_eng.device_memory || path->transport != R2_VIA_TCP || !bulk->total ||
        bulk->total > r2_eng.set->unasked || bulk->seq >= c->next_seq + R2_UNASKED_AHEAD ||
        set->at[bulk->seq % R2_WINDOW])
        return NULL;
    *err = -ENOMEM;
    u = obtain(set, (uint32_t)bulk->total);
    if (!u)
        return NULL;
    u->seq = bulk->seq;
    u->size = (uint32_t)bulk->total;
    u->whole = u->copied = false;
    r2_recv_init(&u->led, bulk->total);
    set->at[u->seq % R2_WINDOW] = u;
    set->kept++;
    return u;
}

bool r2_unasked_in_chunks(struct r2_conn *c, uint64_t seq)
{
    const struct r2_req *r = r2_conn_req(c, seq);

    return r2_unasked_at(c, seq) || (r && !r->arrived && r->led.recv.total_known);
}

void r2_unasked_both_ways(struct r2_conn *c, uint64_t seq)
{
    R2_WARN_LIMIT("peer %s pid %u breaks the protocol: message %llu of connection %llu comes as a "
                  "small message and in chunks; the connection fails",
                  c->peer->host[0] ? c->peer->host : "?", c->peer->pid, (unsigned long long)seq,
                  (unsigned long long)c->id);
    r2_conn_fail(c, -EPROTO);
}

/* Its bytes go into the receive's buffer, which they have to themselves. */
static int claim_all(struct r2_req *r, uint32_t size)
{
    int rc = r2_recv_set_total(&r->led.recv, size);

    return rc ? rc : r2_recv_claim(&r->led.recv, 0, size, UINT16_MAX, 0, 0);
}

/* The first that is whole, whose receive is posted, and that nobody copies yet. */
static struct r2_unasked *next_copy(struct r2_conn *c, struct r2_req **r)
{
    for (uint64_t s = c->oldest; c->unasked.kept && s < c->next_seq; s++) {
        struct r2_unasked *u = r2_unasked_at(c, s);

        *r = r2_conn_req(c, s);
        if (u && u->whole && !u->copied && *r)
            return u;
    }
    return NULL;
}

/* Under the lock, which it lets go of for the copy. */
static void copy_one(struct r2_conn *c, struct r2_unasked *u, struct r2_req *r)
{
    uint8_t *to = r->data;
    int rc = claim_all(r, u->size);

    if (rc) {
        if (rc == -EMSGSIZE)
            R2_WARN("a message of %u bytes does not fit its receive of %llu", u->size,
                    (unsigned long long)r->size);
        r2_conn_fail(c, rc);
        return;
    }
    u->copied = true;
    c->unasked.copying++;
    pthread_mutex_unlock(&c->peer->lock);
    r2_copy_lines(to, u->data, u->size, 0);
    r2_peer_lock(c->peer);
    c->unasked.copying--;
    r = r2_conn_req(c, u->seq); /* it may have ended meanwhile */
    if (r && r2_recv_done(&r->led.recv, 0, u->size, UINT16_MAX, 0) == 0)
        r2_recv_placed(r);
    give_back(&c->unasked, u);
}

static void copy_task(struct r2_task *t)
{
    struct r2_unasked_set *set = R2_CONTAINER_OF(t, struct r2_unasked_set, copy);
    struct r2_conn *c = R2_CONTAINER_OF(set, struct r2_conn, unasked);
    struct r2_unasked *u;
    struct r2_req *r;

    r2_peer_lock(c->peer);
    while (c->state == R2_CONN_OPEN && (u = next_copy(c, &r)))
        copy_one(c, u, r);
    r2_peer_unlock(c->peer);
    r2_conn_put(c);
}

/* Copying is for an I/O thread: NCCL's has its own work, and the lock is not held that long. */
static void want_copy(struct r2_conn *c)
{
    atomic_fetch_add_explicit(&c->refs, 1, memory_order_relaxed); /* the queued task's */
    if (!r2_task_kick(&c->unasked.copy))
        atomic_fetch_sub_explicit(&c->refs, 1, memory_order_relaxed); /* not the last: it has one */
}

void r2_unasked_whole(struct r2_conn *c, struct r2_unasked *u)
{
    r2_recv_free(&u->led);
    u->whole = true;
    if (u->seq < c->next_seq)
        want_copy(c);
}

bool r2_unasked_posted(struct r2_conn *c, struct r2_req *r)
{
    struct r2_unasked *u = r2_unasked_at(c, r->seq);

    if (u && u->whole && r2_io_alone()) /* its one thread is to be woken for nothing */
        copy_one(c, u, r);
    else if (u && u->whole)
        want_copy(c);
    return u;
}

struct message {
    struct r2_conn *conn;
    uint64_t seq;
};

static bool repeat_range(void *arg, uint64_t off, uint64_t len)
{
    const struct message *m = arg;

    r2_recv_queue_ack(m->conn, NULL, m->seq, off, len);
    return true;
}

void r2_unasked_repeat(struct r2_conn *c)
{
    for (int i = 0; i < R2_WINDOW && c->unasked.kept; i++) {
        struct r2_unasked *u = c->unasked.at[i];
        struct message m = {.conn = c, .seq = u ? u->seq : 0};

        if (u && u->whole && u->seq >= c->cum)
            r2_recv_queue_ack(c, NULL, u->seq, 0, u->size);
        else if (u && !u->whole)
            r2_recv_arrived(&u->led, repeat_range, &m);
    }
}

void r2_unasked_settle(struct r2_conn *c)
{
    while (c->unasked.copying) {
        pthread_mutex_unlock(&c->peer->lock);
        sched_yield();
        r2_peer_lock(c->peer);
    }
}

bool r2_unasked_pending(struct r2_conn *c)
{
    for (uint64_t s = c->oldest; c->unasked.kept && s < c->next_seq; s++) {
        const struct r2_unasked *u = r2_unasked_at(c, s);

        if (u && u->whole && r2_conn_req(c, s))
            return true;
    }
    return false;
}

bool r2_unasked_writing(const struct r2_conn *c)
{
    for (int i = 0; i < R2_WINDOW && c->unasked.kept; i++) {
        const struct r2_unasked *u = c->unasked.at[i];

        if (u && (u->whole ? u->copied : r2_recv_writing(&u->led)))
            return true;
    }
    return false;
}
