/* The receiver's acknowledgements: queued under the peer's lock, said at the end of a burst of
 * arrivals, or a little later when nobody waits for them. Included by objects.h. */
#ifndef R2_ENGINE_MESSAGE_ACKS_H
#define R2_ENGINE_MESSAGE_ACKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "io/io.h"

struct r2_conn;
struct r2_ep;
struct r2_path;
struct r2_peer;

/* R, part of a peer: what is queued are acknowledgements of messages that their sender has done
 * with (R2_EAGER_BUFFERED), and only those. Each would cost a call to send in which the next
 * message waits. */
struct r2_ack_delay {
    struct r2_timer timer;
    bool armed; /* ... and nobody stops it: it holds a reference to the peer until it has fired */
    bool hurry; /* there are others: they wait for nothing */
    unsigned late; /* messages since the last one was said */
};

void r2_acks_init(struct r2_peer *p);
/* Over which path they leave when the one that brought the bytes is gone; may be NULL. */
struct r2_path *r2_acks_path(struct r2_conn *c);
/* `len` bytes of a message beyond c->cum; 0: c->cum alone is news. path: that brought them, or
 * NULL. */
void r2_recv_queue_ack(struct r2_conn *c, struct r2_path *path, uint64_t seq, uint64_t off,
                       uint64_t len);
/* The same for a whole message that its sender has a copy of. */
void r2_recv_queue_late_ack(struct r2_conn *c, struct r2_path *path, uint64_t seq, uint64_t len);
/* Turns queued acknowledgements into frames. */
void r2_recv_out_acks(struct r2_peer *p);
/* The kernel has what says that all messages below `cum` are here. */
void r2_recv_flushed(struct r2_conn *c, uint64_t cum);
/* Everything that has arrived, queued for acknowledgement again. */
void r2_recv_repeat(struct r2_conn *c, struct r2_path *path);
/* At exit, as a hint and without waiting for a lock: a message is here whose sender will not know
 * it, or a frame (the end of a connection) is queued, though there is a path to say so over. */
bool r2_acks_unsaid(void);
void r2_up_burst_end(void *owner, struct r2_ep *ep);

#endif
