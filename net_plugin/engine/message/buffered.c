/* Small messages whose send is done before they are acknowledged.
 *
 * NCCL begins its next operation on a connection when the last send of the one before is done. To
 * wait for an acknowledgement costs each small operation a round trip (docs/decisions.md 36). A
 * message of up to R2CCL_EAGER is copied instead when it is queued on a path that is up, and is
 * done then. Nothing reads the application's buffer any more. The copy is sent again over other
 * paths until the peer's engine has acknowledged every byte. What has no way out, because of credit
 * or because no path is up, is not done. A connection that is closed meanwhile lingers: it is not
 * closed for the peer until the copies are acknowledged, or have failed; and a process that exits
 * waits for them (R2CCL_BUFFERED; only with several I/O threads). */
#include <stdlib.h>
#include <string.h>

#include "engine/message/message.h"

/* Copies of this process that no peer has acknowledged. Relaxed: whoever asks at exit asks again;
 * the bytes are the I/O threads' to send, not its. */
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
    R2_FOR_EACH_REQ (r, c) {
        if (!r->copy)
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

int r2_buffered_unacked(void)
{
    return atomic_load_explicit(&unacked, memory_order_relaxed);
}

int r2_buffered_lingering(void)
{
    return atomic_load_explicit(&lingering, memory_order_relaxed);
}
