/* The ledger: which bytes of a message are unsent, in flight on which path and generation, and
 * acknowledged (sender); which are open, claimed and by whom, and done (receiver).
 *
 * Pure: no clock, socket, thread or lock. Offsets and sizes are bytes from the start of the
 * message; a chunk starts at a multiple of 128 and ends at a multiple of 128 or at the end of the
 * message. Everything that comes from the wire is checked here against that rule and the bounds.
 *
 * Ownership: a ledger owns its arrays; free with *_free. Small messages allocate nothing.
 * Threads: the caller serialises access to one ledger.
 * Memory: only r2_send_next, r2_send_ack and r2_recv_claim can run short of it, and then nothing
 * has changed; what must happen when a path fails (path_down, released, done, release)
 * never needs memory.
 */
#ifndef R2_ENGINE_CORE_LEDGER_H
#define R2_ENGINE_CORE_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/core/pathrate.h"
#include "engine/core/ranges.h"

#define R2_LEDGER_ALIGN 128
#define R2_SEND_INLINE 8
#define R2_RECV_INLINE 8

/* ---- Sender ------------------------------------------------------------------------------ */

/* One transmission of one chunk. It exists until its bytes are acknowledged (or lost with its
 * path) AND the transport no longer reads them. */
struct r2_send_rec {
    uint64_t off;
    uint64_t t_sent_ns;
    struct r2_rate_stamp stamp;
    uint32_t len;
    uint32_t gen;
    uint32_t id;
    uint16_t path;
    bool reading; /* a lane may still read the bytes */
    bool lost;    /* back in the queue: counts no longer as in flight */
    bool copy;    /* of bytes in flight elsewhere: nothing depends on its arrival */
    bool copied;  /* a copy of it was sent */
};

struct r2_send_ledger {
    uint64_t total;
    uint64_t next;          /* everything from here on was never handed out */
    struct r2_ranges queue; /* handed out once, to be sent again */
    struct r2_ranges acked;
    struct r2_send_rec *heap; /* records sorted by (off, id); NULL while `small` suffices */
    uint32_t count;
    uint32_t cap;
    uint32_t next_id;
    uint32_t max_len; /* longest record ever: bounds the search for overlaps */
    bool copies;      /* some were sent */
    bool empty_sent;  /* total == 0: its one chunk of no bytes is in flight */
    bool empty_acked;
    struct r2_send_rec small[R2_SEND_INLINE];
};

struct r2_chunk {
    uint64_t off;
    uint32_t len; /* 0 only for the one chunk of an empty message */
    uint32_t id;  /* number of this transmission within the message */
};

/* What an acknowledgement meant for one transmission that was in flight. */
struct r2_send_report {
    uint64_t off; /* of the transmission */
    uint32_t len;
    uint32_t bytes; /* of it, newly acknowledged by this call */
    uint16_t path;
    uint32_t gen;
    bool complete; /* all of the transmission is now acknowledged */
    bool doubled;  /* it is a copy, or has one: which of them arrived is not known */
    bool copy;
    uint64_t t_sent_ns;
    struct r2_rate_stamp stamp;
};
/* Called while the ledger is being walked: must not call into the same ledger. */
typedef void (*r2_send_report_fn)(void *arg, const struct r2_send_report *report);

void r2_send_init(struct r2_send_ledger *l, uint64_t total);
void r2_send_free(struct r2_send_ledger *l);

/* Hands out the next chunk of at most max_len bytes: first what must be sent again, lowest offset
 * first and cut where a copy under way (r2_send_again) begins or ends, then new bytes. The
 * transmission counts as in flight and being read from now on. A message of size 0 has one chunk of
 * length 0. False: nothing to hand out, max_len below 128 with more than that to send, or no
 * memory. */
bool r2_send_next(struct r2_send_ledger *l, uint32_t max_len, uint16_t path, uint32_t gen,
                  uint64_t now_ns, struct r2_chunk *chunk);
/* Stores the stamp (r2_pathrate_on_send) of a chunk just handed out. */
void r2_send_stamp(struct r2_send_ledger *l, const struct r2_chunk *chunk,
                   const struct r2_rate_stamp *stamp);

/* Sends the bytes of one transmission once more over another path, where that is sooner (two-sided
 * transports only: the receiver takes whichever is whole first). The original stays in flight and
 * answerable: a copy that is lost, with its path or dropped by the receiver, puts nothing into the
 * queue. False: no such transmission is in flight, it is a copy or has one, part of it is
 * acknowledged, `path` carries it itself, or no memory. */
bool r2_send_again(struct r2_send_ledger *l, uint32_t id, uint16_t path, uint32_t gen,
                   uint64_t now_ns, struct r2_chunk *chunk);
/* Transmission number i, 0 <= i < l->count, by offset; valid until the next change. */
static inline const struct r2_send_rec *r2_send_rec_at(const struct r2_send_ledger *l, uint32_t i)
{
    return &(l->heap ? l->heap : l->small)[i];
}

/* The transport no longer reads the bytes of this transmission. 0, or -ENOENT. */
int r2_send_released(struct r2_send_ledger *l, uint64_t off, uint32_t len, uint16_t path,
                     uint32_t gen);

/* The receiver has these bytes, whichever path said so. Idempotent. `report` (may be NULL) is
 * called for every transmission in flight that it concerns, for the path's window and rate; not
 * for transmissions that were lost with their path.
 * Returns the bytes newly acknowledged; -EPROTO: never handed out, out of bounds or not on chunk
 * boundaries; -ENOMEM. */
int64_t r2_send_ack(struct r2_send_ledger *l, uint64_t off, uint64_t len, r2_send_report_fn report,
                    void *arg);

/* The path is dead up to and including generation gen: what was in flight on it and is not
 * acknowledged goes back to the queue, exactly the missing bytes. Idempotent. Transmissions whose
 * bytes are still being read stay until r2_send_released. Adds to *replay (may be NULL) and returns
 * the bytes. The receiver must have fenced the generation first (invariant "receive done = no late
 * write"). */
struct r2_send_replay {
    uint64_t bytes, chunks; /* that go back; chunks of which only a part is missing count as well */
};
uint64_t r2_send_path_down(struct r2_send_ledger *l, uint16_t path, uint32_t gen,
                           struct r2_send_replay *replay);
/* Calls cb for every transmission that is not lost, with the bytes of it that are not acknowledged:
 * what an abandoned message leaves on its paths. */
void r2_send_unacked(const struct r2_send_ledger *l, r2_send_report_fn cb, void *arg);

/* Every byte acknowledged and no lane reads any. */
bool r2_send_complete(const struct r2_send_ledger *l);
/* A copy (r2_send_again) is under way: what it covers may come to its place at any moment, also
 * when the original is lost, and with it the whole message. */
static inline bool r2_send_doubled(const struct r2_send_ledger *l)
{
    for (uint32_t i = 0; l->copies && i < l->count; i++) {
        if (r2_send_rec_at(l, i)->copy && !r2_send_rec_at(l, i)->lost)
            return true;
    }
    return false;
}
/* Something sent over the path is neither acknowledged nor lost, or still being read. */
bool r2_send_on_path(const struct r2_send_ledger *l, uint16_t path);
/* Nothing to hand out. */
bool r2_send_idle(const struct r2_send_ledger *l);

/* Bytes that r2_send_next would hand out. */
static inline uint64_t r2_send_waiting_bytes(const struct r2_send_ledger *l)
{
    return l->queue.bytes + (l->total - l->next);
}

/* ---- Receiver ---------------------------------------------------------------------------- */

struct r2_recv_claim {
    uint64_t off;
    uint32_t len;
    uint32_t gen;
    uint16_t path;
    uint16_t lane;
};

struct r2_recv_ledger {
    uint64_t capacity;
    uint64_t total;
    bool total_known;
    struct r2_ranges done;
    struct r2_recv_claim *heap; /* claims in no order; NULL while `small` suffices */
    uint32_t count;
    uint32_t cap;
    struct r2_recv_claim small[R2_RECV_INLINE];
};

/* capacity: size of the posted buffer. */
void r2_recv_init(struct r2_recv_ledger *l, uint64_t capacity);
void r2_recv_free(struct r2_recv_ledger *l);

/* The size of the message, as its chunks say. 0; -EMSGSIZE: larger than the buffer; -EPROTO: it
 * contradicts what an earlier chunk said. */
int r2_recv_set_total(struct r2_recv_ledger *l, uint64_t total);

/* A chunk wants to write. After return 0 the bytes belong to (path, gen, lane) alone until
 * r2_recv_done or r2_recv_release.
 *   0        open, now claimed.
 *   1        already done, all of it: drain it and acknowledge again.
 *   -EBUSY   part of it is claimed or done. The sender must learn that this transmission is
 *            lost: end the path, which fences and replays its generation.
 *   -EPROTO  out of bounds, not on chunk boundaries, or the total is not known yet.
 *   -ENOMEM  as -EBUSY.
 * `over`: only what is claimed is busy. Done bytes are written once more, with the same contents,
 * and the message is not complete while the claim is open. For transmissions that are not pieces
 * of earlier ones, and whose sender has not heard what is done. */
int r2_recv_claim(struct r2_recv_ledger *l, uint64_t off, uint32_t len, uint16_t path, uint32_t gen,
                  uint16_t lane, bool over);
/* The claimed bytes are in place; the writer has left the buffer. 0, or -ENOENT: no such claim. */
int r2_recv_done(struct r2_recv_ledger *l, uint64_t off, uint32_t len, uint16_t path, uint32_t gen);
/* The claimant has left the buffer without finishing: the bytes are open again. 0 or -ENOENT. */
int r2_recv_release(struct r2_recv_ledger *l, uint64_t off, uint32_t len, uint16_t path,
                    uint32_t gen);

/* The total is known, every byte is done and no claim is open. */
bool r2_recv_complete(const struct r2_recv_ledger *l);
/* Some lane may still write into the buffer. */
static inline bool r2_recv_writing(const struct r2_recv_ledger *l)
{
    return l->count > 0;
}
/* Claim number i, 0 <= i < l->count, in no order; valid until the next change. */
static inline const struct r2_recv_claim *r2_recv_claim_at(const struct r2_recv_ledger *l,
                                                           uint32_t i)
{
    return &(l->heap ? l->heap : l->small)[i];
}

/* Calls cb for every stretch that is done, ascending. cb returns false to stop. */
typedef bool (*r2_range_fn)(void *arg, uint64_t off, uint64_t len);
void r2_recv_arrived(const struct r2_recv_ledger *l, r2_range_fn cb, void *arg);
#endif
