/* Peers: found, made, given back; and the unlock that lets frames and chunks go. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/peer/peer.h"
#include "io/pollers.h"
#include "util/lock.h"

#define FLUSH_MAX R2_PATHS_MAX
#define LANE_WORTH (128 * 1024) /* bytes */

static struct r2_peer *find_locked(const uint8_t id[16], bool out)
{
    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
        if (p->out == out && memcmp(p->id, id, 16) == 0) {
            r2_peer_get(p);
            return p;
        }
    }
    return NULL;
}

static struct r2_peer *new_peer(const uint8_t id[16], const uint8_t secret[16], bool out)
{
    struct r2_control_peer row = {.state = R2_SEG_PEER_CONNECTING};
    struct r2_peer *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    r2_mem_more(sizeof(*p));
    r2_lock_init(&p->lock);
    atomic_init(&p->refs, 2); /* the list's and the caller's */
    memcpy(p->id, id, 16);
    memcpy(p->secret, secret, 16);
    p->out = out;
    p->rtt_most = UINT64_MAX;
    r2_hash_init(&p->conns);
    r2_list_init(&p->conn_list);
    r2_list_init(&p->ready);
    r2_list_init(&p->ackq);
    r2_list_init(&p->dying);
    for (int i = 0; i < R2_MAX_NICS; i++)
        p->rnics[i].weight = R2_WEIGHT_FULL;
    p->io = r2_io_pick();
    r2_eng.upper->began(p);
    p->last_tick = r2_peer_now(p);
    p->now = 0;
    memcpy(row.process_id, id, 16);
    p->row = r2_control_peer_add(r2_eng.ctl, &row);
    r2_timer_set(&p->timer, p->last_tick + R2_TICK_NS); /* last: its task may run at once */
    return p;
}

struct r2_peer *r2_peer_obtain(const uint8_t id[16], const uint8_t secret[16], bool out)
{
    struct r2_peer *p;

    if (out)
        r2_pollers_look(); /* how many threads share what will be opened; listen.c for the others */
    pthread_mutex_lock(&r2_eng.lock);
    p = find_locked(id, out);
    if (!p) {
        p = new_peer(id, secret, out);
        if (p)
            r2_list_add_tail(&r2_eng.peers, &p->node);
    }
    pthread_mutex_unlock(&r2_eng.lock);
    return p;
}

struct r2_peer *r2_peer_find(const uint8_t id[16], bool out)
{
    struct r2_peer *p;

    pthread_mutex_lock(&r2_eng.lock);
    p = find_locked(id, out);
    pthread_mutex_unlock(&r2_eng.lock);
    return p;
}

void r2_peer_get(struct r2_peer *p)
{
    atomic_fetch_add_explicit(&p->refs, 1, memory_order_relaxed);
}

struct r2_peer **r2_peers_all(void)
{
    struct r2_peer **out;
    size_t count = 0, at = 0;

    pthread_mutex_lock(&r2_eng.lock);
    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers)
        count++;
    out = calloc(count + 1, sizeof(struct r2_peer *));
    R2_LIST_EACH (p, struct r2_peer, node, &r2_eng.peers) {
        if (!out)
            break;
        r2_peer_get(p);
        out[at++] = p;
    }
    pthread_mutex_unlock(&r2_eng.lock);
    return out;
}

void r2_peers_put(struct r2_peer ***all)
{
    for (struct r2_peer **at = *all; at && *at; at++)
        r2_peer_put(*at);
    free(*all);
}

void r2_peer_wake(struct r2_peer *p)
{
    r2_peer_get(p);
    if (!r2_task_kick(&p->task))
        r2_peer_put(p);
}

/* The last reference goes when the peer's task has taken it off the list and its timer is stopped.
 * No connection and no endpoint is left then. */
void r2_peer_put(struct r2_peer *p)
{
    if (atomic_fetch_sub_explicit(&p->refs, 1, memory_order_acq_rel) != 1)
        return;
    r2_eng.upper->ended(p);
    r2_mem_less(sizeof(*p));
    r2_hash_free(&p->conns);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

void r2_peer_lock(struct r2_peer *p)
{
    r2_io_lock(&p->lock);
}

uint64_t r2_peer_read_clock(struct r2_peer *p)
{
    return p->now = r2_now_ns();
}

#define LONE_NS (15 * R2_NS_PER_US)
/* A frame that comes alone is sent at once by whoever has it; one of a burst is better left to an
 * I/O thread, which sends many with one call. */
static bool in_burst(struct r2_path *path, uint64_t now)
{
    bool burst = now - path->outbox.last_post < LONE_NS;

    path->outbox.last_post = now;
    return burst;
}

/* Bulk lanes that what waits for the peer is worth, of each of its paths: one, and one more for
 * every LANE_WORTH. Each of them costs both sides a thread that is awake, or wakes up. */
static unsigned lanes_worth(const struct r2_peer *p)
{
    uint64_t waiting = 0;

    R2_FOR_EACH_READY (c, p) {
        waiting += c->waiting;
        if (waiting >= (uint64_t)LANE_WORTH * R2_LANES_MAX)
            return R2_LANES_MAX;
    }
    return 1 + (unsigned)(waiting / LANE_WORTH);
}

void r2_recheck_by(unsigned long at)
{
    unsigned long before = atomic_load(&r2_eng.recheck_at);

    while ((!before || at < before) &&
           !atomic_compare_exchange_weak(&r2_eng.recheck_at, &before, at))
        ;
}

/* Here the peer's time is written before the engine's is read; who looks clears the engine's before
 * it reads the peers'. All seq_cst, so one of the two sees what the other has written. */
static void recheck_later(struct r2_peer *p, uint64_t now)
{
    /* Written under the lock only. One that is due stays, too, unless nobody takes it. */
    unsigned long at = atomic_load_explicit(&p->recheck_at, memory_order_relaxed);

    if (at && at + R2_RECHECK_NS > now)
        return;
    atomic_store(&p->recheck_at, now + R2_RECHECK_NS);
    r2_recheck_by(now + R2_RECHECK_NS);
}

/* push: a single chunk may be sent here; soon: frames may be left to an I/O thread that is awake */
static void unlock(struct r2_peer *p, bool push, bool soon, bool data)
{
    struct r2_ep *eps[FLUSH_MAX];
    bool flush[FLUSH_MAX], lone[FLUSH_MAX];
    unsigned kick[FLUSH_MAX], lanes[FLUSH_MAX], worth = 0;
    bool left = false; /* to others, or may be */
    int n = 0;

    if (p->todo)
        r2_eng.upper->carry_out(p);
    for (int i = 0; i < p->n_paths && n < FLUSH_MAX; i++) {
        struct r2_path *path = p->paths[i];

        if (!path->ep || !r2_path_is_up(path) ||
            !(path->outbox.due == R2_OUT_NOW || path->outbox.kick_wanted))
            continue;
        eps[n] = path->ep;
        r2_eng.ops->get(path->ep);
        flush[n] = path->outbox.due == R2_OUT_NOW;
        lone[n] = soon && flush[n] && !in_burst(path, r2_peer_now(p));
        kick[n] = path->outbox.kick_wanted;
        if (path->outbox.kick_wanted && !worth)
            worth = lanes_worth(p);
        left |= kick[n] || (soon && flush[n]);
        lanes[n] =
            path->state == R2_PATH_TESTING ? R2_LANES_MAX : worth; /* each has its own to show */
        path->outbox.due = flush[n] ? 0 : path->outbox.due;
        path->outbox.kick_wanted = 0;
        n++;
    }
    if (left && !r2_io_alone())
        recheck_later(p, r2_peer_now(p));
    p->now = 0;
    pthread_mutex_unlock(&p->lock);
    for (int i = 0; i < n; i++) {
        if (kick[i] == 1 && push && r2_eng.ops->push(eps[i]))
            kick[i] = 0;
        if (kick[i])
            r2_eng.ops->kick(eps[i], kick[i], lanes[i]);
        if (flush[i] && soon)
            r2_eng.ops->flush_soon(eps[i], lone[i], data);
        else if (flush[i])
            r2_eng.ops->flush(eps[i]);
        r2_eng.ops->put(eps[i]);
    }
}

void r2_peer_leave(struct r2_peer *p)
{
    if (p->todo)
        r2_eng.upper->carry_out(p);
    p->now = 0;
    pthread_mutex_unlock(&p->lock);
}

void r2_peer_unlock(struct r2_peer *p)
{
    unlock(p, false, false, false);
}

void r2_peer_unlock_soon(struct r2_peer *p)
{
    unlock(p, false, true, false);
}

void r2_peer_unlock_posted(struct r2_peer *p, bool eager, bool push)
{
    unlock(p, push, true, eager);
}

int r2_peer_eps(struct r2_peer *p, struct r2_ep **out, int max)
{
    int n = 0;

    for (int i = 0; i < p->n_paths && n < max; i++) {
        if (p->paths[i]->ep)
            out[n++] = p->paths[i]->ep;
    }
    R2_LIST_EACH (d, struct r2_dying, node, &p->dying) {
        if (n < max)
            out[n++] = d->ep;
    }
    for (int i = 0; i < n; i++)
        r2_eng.ops->get(out[i]);
    return n;
}

const char *r2_peer_who(const struct r2_peer *p, char out[R2_PEER_WHO])
{
    char rank[24] = "";

    if (p->rank)
        snprintf(rank, sizeof(rank), " rank %u", p->rank - 1);
    if (p->pid)
        snprintf(out, R2_PEER_WHO, "%s pid %u%s", p->host[0] ? p->host : "?", p->pid, rank);
    else
        snprintf(out, R2_PEER_WHO, "that was never reached");
    return out;
}
