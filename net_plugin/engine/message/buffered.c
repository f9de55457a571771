#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/message/message.h"
#include "util/exit.h"

#define EXIT_NS (5 * R2_NS_PER_S)
#define LOOK_NS (100 * R2_NS_PER_US)
#define EXIT_ACKS_NS (50 * R2_NS_PER_MS)

/* Copies of this process that no peer has acknowledged. Relaxed: at_exit alone asks, and it asks
 * again; the bytes are the I/O threads' to send, not its. */
static atomic_int unacked;
/* Connections that linger, until the peer knows their end or is gone. Likewise. */
static atomic_int lingering;

bool r2_buffered_take(struct r2_req *r)
{
    /* With one I/O thread NCCL's waits for acknowledgements in its place; it would have to wake. */
    if (r->copy || !r2_eng.set->buffered || r2_io_alone())
        return r->copy;
    r->copy = malloc(r->size ? r->size : 1);
    if (!r->copy)
        return false;
    r2_mem_more(r->size);
    if (r->size)
        memcpy(r->copy, r->data, r->size);
    r->data = r->copy;
    r->mr = NULL;
    atomic_fetch_add_explicit(&unacked, 1, memory_order_relaxed);
    return true;
}

void r2_buffered_done(struct r2_req *r)
{
    /* Pairs with the acquire in r2_engine_test: the buffer has been read. Once: who is told frees
     * the slot, and a message that is sent again leaves it alone. */
    if (r->copy && !r->done_early) {
        r->done_early = true;
        atomic_store_explicit(&r->state, R2_REQ_DONE, memory_order_release);
    }
}

void r2_buffered_free(struct r2_req *r)
{
    struct r2_conn *c = r->conn;

    r2_mem_less(r->size);
    free(r->copy);
    r->copy = NULL;
    atomic_fetch_sub_explicit(&unacked, 1, memory_order_relaxed);
    if (c->linger && c->oldest == c->next_seq)
        r2_peer_wake(c->peer);
}

bool r2_buffered_lingers(struct r2_conn *c)
{
    if (!c->peer->out || c->state != R2_CONN_OPEN || c->oldest == c->next_seq)
        return false;
    for (uint64_t s = c->oldest; s < c->next_seq; s++) {
        struct r2_req *r = r2_conn_req(c, s);

        if (r && !r->copy)
            return false;
    }
    c->linger = R2_LINGER_AWAITED;
    atomic_fetch_add_explicit(&lingering, 1, memory_order_relaxed);
    return true;
}

void r2_buffered_left(struct r2_conn *c)
{
    if (c->linger != R2_LINGER_AWAITED)
        return;
    atomic_fetch_sub_explicit(&lingering, 1, memory_order_relaxed);
    c->linger = R2_LINGER_LEFT;
}

void r2_buffered_leave(struct r2_peer *p)
{
    R2_FOR_EACH_CONN_SAFE (c, p) {
        /* A connection that did not linger waits for no path either to say its end. */
        if (c->state >= R2_CONN_CLOSING && !p->n_up)
            r2_buffered_left(c);
        if (!c->linger || c->state >= R2_CONN_CLOSING || c->oldest != c->next_seq)
            continue;
        r2_conn_end(c);
        r2_conn_out_closed(c);
        r2_conn_put(c);
    }
}

static int some(atomic_int *count)
{
    return atomic_load_explicit(count, memory_order_relaxed);
}

static void wait_until(atomic_int *zero, uint64_t until)
{
    while (some(zero) > 0 && r2_now_ns() < until)
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
}

/* What was done for the application must not be lost with the process while a NIC fails. The I/O
 * threads go on meanwhile; no lock is waited for, whoever calls exit may hold one. */
__attribute__((destructor(R2_EXIT_ENGINE))) static void at_exit(void)
{
    uint64_t ns = EXIT_NS;

    if (atomic_load(&r2_eng.inert) || r2_eng.pid != getpid())
        return;
    for (uint64_t until = r2_now_ns() + EXIT_ACKS_NS; r2_acks_unsaid() && r2_now_ns() < until;)
        nanosleep(&(struct timespec){.tv_nsec = LOOK_NS}, NULL);
    if (some(&unacked) <= 0 && some(&lingering) <= 0)
        return;
    if (r2_eng.set->no_path_timeout_ns < ns)
        ns = r2_eng.set->no_path_timeout_ns;
    ns += r2_now_ns();
    wait_until(&unacked, ns);
    if (some(&unacked) > 0)
        R2_WARN("%d small messages were not acknowledged before this process ended",
                some(&unacked));
    else
        wait_until(&lingering, ns);
}
