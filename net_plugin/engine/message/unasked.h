/* Messages that are larger than the small ones and come unasked all the same.
 *
 * Up to R2CCL_UNASKED they need not wait for their clear-to-send: up to R2_UNASKED_AHEAD of a
 * connection beyond the receives that the sender has heard of travel over bulk lanes like any
 * other, in chunks, with all that follows from it (claims, acknowledgements, replay). What comes
 * before its receive is put beside it, acknowledged from there, and copied when the receive is
 * posted; a message that began there ends there. So a connection keeps at most R2_UNASKED_AHEAD
 * messages for receives to come, and those of posted receives whose copy is under way.
 * Sockets only: queue pairs write where a clear-to-send says. Included by internal.h. */
#ifndef R2_ENGINE_MESSAGE_UNASKED_H
#define R2_ENGINE_MESSAGE_UNASKED_H

#define R2_UNASKED_AHEAD 8

/* R: a message that came before its receive. Under the peer's lock, but for the bytes: who has a
 * claim of the ledger writes them, and while `copied` an I/O thread reads them. */
struct r2_unasked {
    struct r2_unasked *next; /* spare ones */
    uint64_t seq;
    uint32_t cap, size;
    bool whole;  /* all bytes are in place */
    bool copied; /* ... and on their way into the receive's buffer */
    uint8_t *data;
    struct r2_recv_ledger led; /* while it is not whole */
};

/* Part of a connection. */
struct r2_unasked_set {
    uint64_t most; /* S: size up to which messages go unasked; 0: none */
    struct r2_unasked *at[R2_WINDOW], *spare;
    unsigned kept; /* in `at` */
    unsigned spares, copying;
    struct r2_task copy; /* of those that are whole and whose receive is posted */
};

struct r2_conn;
struct r2_req;
struct r2_path;
struct r2_bulk;

void r2_unasked_init(struct r2_conn *c);
void r2_unasked_free(struct r2_conn *c);
/* R: what it says to the sender in OPEN_ACK's flags. */
uint32_t r2_unasked_word(void);
/* S: the receiver has said so. */
void r2_unasked_heard(struct r2_conn *c, uint32_t flags);
/* S: the message may go at once, or those that may now that more receives are known: they are
 * counted among what waits for bulk lanes. */
void r2_unasked_grant(struct r2_conn *c, struct r2_req *r);
void r2_unasked_grant_all(struct r2_conn *c);

/* S: its clear-to-send has come; if nothing of it went before, it is a message like any other. */
void r2_unasked_cleared(struct r2_req *r);

/* R: the message of that number that came before its receive, or NULL. */
struct r2_unasked *r2_unasked_at(struct r2_conn *c, uint64_t seq);
/* R: the first chunk of one. NULL: it may not come (-EPROTO), or memory is short (-ENOMEM). */
struct r2_unasked *r2_unasked_begin(struct r2_conn *c, const struct r2_path *path,
                                    const struct r2_bulk *bulk, int *err);
/* R: all of it has come. */
void r2_unasked_whole(struct r2_conn *c, struct r2_unasked *u);
/* R: some of the message has come in chunks, and its receive is not full: no small message any
 * more. */
bool r2_unasked_in_chunks(struct r2_conn *c, uint64_t seq);
/* R: its sender says it as a small message and in chunks. Each half might wait for ever for the
 * rest, and another path would bring the same: the connection fails (-EPROTO). */
void r2_unasked_both_ways(struct r2_conn *c, uint64_t seq);
/* R: the receive of that message is posted: true when it is served from here. */
bool r2_unasked_posted(struct r2_conn *c, struct r2_req *r);
/* R: everything of them that has arrived, queued for acknowledgement again. */
void r2_unasked_repeat(struct r2_conn *c);
/* R: waits until no thread copies into buffers of the connection, which begins no copy any more:
 * no longer than one copy takes. Lets go of the lock meanwhile. */
void r2_unasked_settle(struct r2_conn *c);
/* R: a copy of one that is whole is to come, or under way. */
bool r2_unasked_pending(struct r2_conn *c);
/* R: bytes may still be written beside receives: closing has to wait for that. */
bool r2_unasked_writing(const struct r2_conn *c);

#endif
