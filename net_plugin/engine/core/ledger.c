#include "engine/core/ledger.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* True when [off, off+len) lies within total and on chunk boundaries. */
static bool chunk_ok(uint64_t off, uint64_t len, uint64_t total)
{
    if (off > total || len > total - off) {
        return false;
    }
    return off % R2_LEDGER_ALIGN == 0 && ((off + len) % R2_LEDGER_ALIGN == 0 || off + len == total);
}

/* Makes room for one more element in an array that starts inline. Returns the array, or NULL
 * without memory (the old one is untouched). */
static void *array_grow(void *heap, const void *small, size_t size, uint32_t count, uint32_t *cap)
{
    uint32_t fresh_cap = *cap * 2;
    void *fresh;

    if (fresh_cap < *cap) {
        return NULL;
    }
    fresh = realloc(heap, size * fresh_cap);
    if (!fresh) {
        return NULL;
    }
    if (!heap) {
        memcpy(fresh, small, size * count);
    }
    *cap = fresh_cap;
    return fresh;
}

/* ---- Sender ------------------------------------------------------------------------------ */

void r2_send_init(struct r2_send_ledger *l, uint64_t total)
{
    l->total = total;
    l->next = 0;
    r2_ranges_init(&l->queue);
    r2_ranges_init(&l->acked);
    l->heap = NULL;
    l->count = 0;
    l->cap = R2_SEND_INLINE;
    l->next_id = 0;
    l->max_len = 0;
    l->copies = false;
    l->empty_sent = false;
    l->empty_acked = false;
}

void r2_send_free(struct r2_send_ledger *l)
{
    free(l->heap);
    r2_ranges_free(&l->queue);
    r2_ranges_free(&l->acked);
    r2_send_init(l, l->total);
}

static struct r2_send_rec *send_recs(struct r2_send_ledger *l)
{
    return l->heap ? l->heap : l->small;
}

/* Index of the first record whose offset is at least `off`. */
static uint32_t send_lower(struct r2_send_ledger *l, uint64_t off)
{
    const struct r2_send_rec *recs = send_recs(l);
    uint32_t lo = 0;
    uint32_t hi = l->count;

    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;

        if (recs[mid].off >= off) {
            hi = mid;
        } else {
            lo = mid + 1;
        }
    }
    return lo;
}

static void send_remove(struct r2_send_ledger *l, uint32_t i)
{
    struct r2_send_rec *recs = send_recs(l);

    memmove(recs + i, recs + i + 1, (l->count - i - 1) * sizeof(*recs));
    l->count--;
}

/* Room in the queue for everything that path_down may ever put there. Two neighbouring
 * ranges of the queue are separated by at least one acknowledged range or one record in flight.
 * None of these separates two pairs: so acked + records + 1 ranges are enough. */
static int send_reserve_queue(struct r2_send_ledger *l, size_t acked, size_t records)
{
    return r2_ranges_reserve(&l->queue, acked + records + 1);
}

/* Inserts a record after all others of its offset. */
static struct r2_send_rec *send_insert(struct r2_send_ledger *l, uint64_t off)
{
    struct r2_send_rec *recs;
    uint32_t i;

    if (send_reserve_queue(l, l->acked.count, (size_t)l->count + 1) != 0) {
        return NULL;
    }
    if (l->count == l->cap) {
        recs = array_grow(l->heap, l->small, sizeof(*recs), l->count, &l->cap);
        if (!recs) {
            return NULL;
        }
        l->heap = recs;
    }
    recs = send_recs(l);
    i = off == UINT64_MAX ? l->count : send_lower(l, off + 1);
    memmove(recs + i + 1, recs + i, (l->count - i) * sizeof(*recs));
    l->count++;
    return &recs[i];
}

/* A piece of the queue ends where a copy under way begins or ends: its receiver tells the two apart
 * by whole chunks, and what is replayed either is the copy's bytes or has none of them. */
static uint64_t send_cut(struct r2_send_ledger *l, uint64_t off, uint64_t piece)
{
    const struct r2_send_rec *recs = send_recs(l);
    uint64_t end = off + piece;

    for (uint32_t i = send_lower(l, off > l->max_len ? off - l->max_len : 0);
         i < l->count && recs[i].off < end; i++) {
        uint64_t copy_end = recs[i].off + recs[i].len;

        if (!recs[i].copy || recs[i].lost)
            continue;
        if (recs[i].off > off)
            end = recs[i].off;
        else if (copy_end > off && copy_end < end)
            end = copy_end;
    }
    return end - off;
}

/* The next piece that may go out. False when there is none. */
static bool send_pick(struct r2_send_ledger *l, uint32_t max_len, uint64_t *off, uint32_t *len)
{
    uint64_t piece;

    if (l->total == 0) {
        *off = 0;
        *len = 0;
        return !l->empty_sent && !l->empty_acked;
    }
    if (l->queue.count > 0) {
        const struct r2_range *first = r2_ranges_at(&l->queue, 0);

        *off = first->off;
        piece = send_cut(l, first->off, first->end - first->off);
    } else {
        *off = l->next;
        piece = l->total - l->next;
    }
    *len = piece <= max_len ? (uint32_t)piece : max_len - max_len % R2_LEDGER_ALIGN;
    return *len > 0;
}

bool r2_send_next(struct r2_send_ledger *l, uint32_t max_len, uint16_t path, uint32_t gen,
                  uint64_t now_ns, struct r2_chunk *chunk)
{
    struct r2_send_rec *rec;
    uint64_t off;
    uint32_t len;

    if (!send_pick(l, max_len, &off, &len)) {
        return false;
    }
    rec = send_insert(l, off);
    if (!rec) {
        return false;
    }
    *rec = (struct r2_send_rec){
        .off = off,
        .len = len,
        .id = l->next_id++,
        .path = path,
        .gen = gen,
        .t_sent_ns = now_ns,
        .reading = true,
    };
    if (len == 0) {
        l->empty_sent = true;
    } else if (off == l->next) {
        l->next += len;
    } else {
        r2_ranges_remove(&l->queue, off, len); /* from the front of a range: needs no memory */
    }
    l->max_len = len > l->max_len ? len : l->max_len;
    chunk->off = off;
    chunk->len = len;
    chunk->id = rec->id;
    return true;
}

bool r2_send_again(struct r2_send_ledger *l, uint32_t id, uint16_t path, uint32_t gen,
                   uint64_t now_ns, struct r2_chunk *chunk)
{
    struct r2_send_rec *rec = send_recs(l), *end = rec + l->count;
    ptrdiff_t at;

    while (rec < end && rec->id != id) {
        rec++;
    }
    if (rec == end || rec->lost || rec->copy || rec->copied || rec->path == path || rec->len == 0 ||
        r2_ranges_overlap(&l->acked, rec->off, rec->len) > 0) {
        return false;
    }
    *chunk = (struct r2_chunk){.off = rec->off, .len = rec->len, .id = l->next_id};
    at = rec - send_recs(l);
    rec = send_insert(l, chunk->off); /* behind the original, which has the same offset */
    if (!rec) {
        return false;
    }
    send_recs(l)[at].copied = l->copies = true;
    *rec = (struct r2_send_rec){
        .off = chunk->off,
        .len = chunk->len,
        .id = l->next_id++,
        .path = path,
        .gen = gen,
        .t_sent_ns = now_ns,
        .reading = true,
        .copy = true,
    };
    return true;
}

void r2_send_stamp(struct r2_send_ledger *l, const struct r2_chunk *chunk,
                   const struct r2_rate_stamp *stamp)
{
    struct r2_send_rec *recs = send_recs(l);

    for (uint32_t i = send_lower(l, chunk->off); i < l->count && recs[i].off == chunk->off; i++) {
        if (recs[i].id == chunk->id) {
            recs[i].stamp = *stamp;
            return;
        }
    }
}

static bool send_rec_acked(const struct r2_send_ledger *l, const struct r2_send_rec *rec)
{
    return rec->len ? r2_ranges_contains(&l->acked, rec->off, rec->len) : l->empty_acked;
}

int r2_send_released(struct r2_send_ledger *l, uint64_t off, uint32_t len, uint16_t path,
                     uint32_t gen)
{
    struct r2_send_rec *recs = send_recs(l);

    for (uint32_t i = send_lower(l, off); i < l->count && recs[i].off == off; i++) {
        struct r2_send_rec *rec = &recs[i];

        if (rec->reading && rec->len == len && rec->path == path && rec->gen == gen) {
            rec->reading = false;
            if (rec->lost || send_rec_acked(l, rec)) {
                send_remove(l, i);
            }
            return 0;
        }
    }
    return -ENOENT;
}

static void send_tell(const struct r2_send_rec *rec, uint64_t bytes, bool complete,
                      r2_send_report_fn report, void *arg)
{
    struct r2_send_report r = {
        .off = rec->off,
        .len = rec->len,
        .bytes = (uint32_t)bytes,
        .path = rec->path,
        .gen = rec->gen,
        .complete = complete,
        .doubled = rec->copy || rec->copied,
        .copy = rec->copy,
        .t_sent_ns = rec->t_sent_ns,
        .stamp = rec->stamp,
    };

    report(arg, &r);
}

/* Tells the caller what an acknowledgement of [lo, hi) of `rec` means, before it is entered.
 * Returns true when nothing of the record stays unacknowledged. */
static bool send_report(const struct r2_send_ledger *l, const struct r2_send_rec *rec, uint64_t lo,
                        uint64_t hi, r2_send_report_fn report, void *arg)
{
    uint64_t before = r2_ranges_overlap(&l->acked, rec->off, rec->len);
    uint64_t fresh = (hi - lo) - r2_ranges_overlap(&l->acked, lo, hi - lo);
    bool complete = before + fresh == rec->len;

    if (report && !rec->lost && (fresh > 0 || rec->len == 0))
        send_tell(rec, fresh, complete, report, arg);
    return complete;
}

/* Walks the records that touch [off, end): reports, and drops those that are over. */
static void send_settle(struct r2_send_ledger *l, uint64_t off, uint64_t end,
                        r2_send_report_fn report, void *arg)
{
    struct r2_send_rec *recs = send_recs(l);
    uint32_t from = send_lower(l, off > l->max_len ? off - l->max_len : 0);
    uint32_t keep = from;
    uint32_t i;

    for (i = from; i < l->count && (recs[i].off < end || recs[i].len == 0); i++) {
        struct r2_send_rec *rec = &recs[i];
        uint64_t rec_end = rec->off + rec->len;
        uint64_t lo = rec->off > off ? rec->off : off;
        uint64_t hi = rec_end < end ? rec_end : end;

        if (lo <= hi && (lo < hi || rec->len == 0) && send_report(l, rec, lo, hi, report, arg) &&
            !rec->reading) {
            continue;
        }
        recs[keep++] = *rec;
    }
    memmove(recs + keep, recs + i, (l->count - i) * sizeof(*recs));
    l->count -= i - keep;
}

static int64_t send_ack_empty(struct r2_send_ledger *l, r2_send_report_fn report, void *arg)
{
    if (l->next_id == 0) {
        return -EPROTO;
    }
    if (!l->empty_acked) {
        send_settle(l, 0, 0, report, arg);
        l->empty_acked = true;
    }
    return 0;
}

int64_t r2_send_ack(struct r2_send_ledger *l, uint64_t off, uint64_t len, r2_send_report_fn report,
                    void *arg)
{
    uint64_t fresh;
    int err;

    if (!chunk_ok(off, len, l->total) || off + len > l->next) {
        return -EPROTO;
    }
    if (l->total == 0) {
        return send_ack_empty(l, report, arg);
    }
    fresh = len - r2_ranges_overlap(&l->acked, off, len);
    if (fresh == 0) {
        return 0;
    }
    err = r2_ranges_reserve(&l->acked, (size_t)l->acked.count + 1);
    if (!err) {
        err = send_reserve_queue(l, (size_t)l->acked.count + 1, l->count);
    }
    if (err) {
        return err;
    }
    send_settle(l, off, off + len, report, arg);
    r2_ranges_add(&l->acked, off, len); /* cannot fail: reserved above, as is the next one */
    r2_ranges_remove(&l->queue, off, len);
    return (int64_t)fresh;
}

/* Puts what is missing of a record back into the queue and marks it lost. Returns the bytes.
 * The adds cannot fail: see send_reserve_queue. */
static uint64_t send_lose(struct r2_send_ledger *l, struct r2_send_rec *rec)
{
    uint64_t end = rec->off + rec->len;
    uint64_t at = rec->off;
    uint64_t gap_end;
    uint64_t bytes = 0;

    while (!rec->copy && r2_ranges_gap(&l->acked, &at, end, &gap_end)) {
        r2_ranges_add(&l->queue, at, gap_end - at);
        bytes += gap_end - at;
        at = gap_end;
    }
    if (rec->len == 0) {
        l->empty_sent = false;
    }
    rec->lost = true;
    return bytes;
}

uint64_t r2_send_path_down(struct r2_send_ledger *l, uint16_t path, uint32_t gen,
                           struct r2_send_replay *replay)
{
    struct r2_send_rec *recs = send_recs(l);
    struct r2_send_replay none = {0, 0}, *sum = replay ? replay : &none;
    uint64_t before = sum->bytes;
    uint32_t keep = 0;

    for (uint32_t i = 0; i < l->count; i++) {
        struct r2_send_rec *rec = &recs[i];

        if (rec->path == path && rec->gen <= gen && !rec->lost) {
            uint64_t lost = send_lose(l, rec);

            sum->bytes += lost;
            sum->chunks += lost > 0;
        }
        if (!rec->lost || rec->reading) {
            recs[keep++] = *rec;
        }
    }
    l->count = keep;
    return sum->bytes - before;
}

bool r2_send_complete(const struct r2_send_ledger *l)
{
    bool acked = l->total ? l->acked.bytes == l->total : l->empty_acked;

    return acked && l->count == 0;
}

bool r2_send_idle(const struct r2_send_ledger *l)
{
    if (l->total == 0) {
        return l->empty_sent || l->empty_acked;
    }
    return l->queue.count == 0 && l->next == l->total;
}

void r2_send_unacked(const struct r2_send_ledger *l, r2_send_report_fn cb, void *arg)
{
    for (uint32_t i = 0; i < l->count; i++) {
        const struct r2_send_rec *rec = r2_send_rec_at(l, i);
        uint64_t acked = r2_ranges_overlap(&l->acked, rec->off, rec->len);

        if (!rec->lost)
            send_tell(rec, rec->len - acked, false, cb, arg);
    }
}

bool r2_send_on_path(const struct r2_send_ledger *l, uint16_t path)
{
    for (uint32_t i = 0; i < l->count; i++) {
        const struct r2_send_rec *rec = r2_send_rec_at(l, i);

        if (rec->path == path && (rec->reading || !rec->lost))
            return true;
    }
    return false;
}

/* ---- Receiver ---------------------------------------------------------------------------- */

void r2_recv_init(struct r2_recv_ledger *l, uint64_t capacity)
{
    l->capacity = capacity;
    l->total = 0;
    l->total_known = false;
    r2_ranges_init(&l->done);
    l->heap = NULL;
    l->count = 0;
    l->cap = R2_RECV_INLINE;
}

void r2_recv_free(struct r2_recv_ledger *l)
{
    free(l->heap);
    r2_ranges_free(&l->done);
    r2_recv_init(l, l->capacity);
}

int r2_recv_set_total(struct r2_recv_ledger *l, uint64_t total)
{
    if (l->total_known) {
        return total == l->total ? 0 : -EPROTO;
    }
    if (total > l->capacity) {
        return -EMSGSIZE;
    }
    l->total = total;
    l->total_known = true;
    return 0;
}

static struct r2_recv_claim *recv_claims(struct r2_recv_ledger *l)
{
    return l->heap ? l->heap : l->small;
}

static struct r2_recv_claim *recv_find(struct r2_recv_ledger *l, uint64_t off, uint32_t len,
                                       uint16_t path, uint32_t gen)
{
    struct r2_recv_claim *claims = recv_claims(l);

    for (uint32_t i = 0; i < l->count; i++) {
        if (claims[i].off == off && claims[i].len == len && claims[i].path == path &&
            claims[i].gen == gen) {
            return &claims[i];
        }
    }
    return NULL;
}

static bool recv_claimed(const struct r2_recv_ledger *l, uint64_t off, uint32_t len)
{
    for (uint32_t i = 0; i < l->count; i++) {
        const struct r2_recv_claim *c = r2_recv_claim_at(l, i);

        if (c->off < off + len && off < c->off + c->len) {
            return true;
        }
    }
    return false;
}

/* Room for one more claim, and in `done` for all claims, so that r2_recv_done cannot fail. */
static int recv_reserve(struct r2_recv_ledger *l)
{
    if (l->count == l->cap) {
        struct r2_recv_claim *fresh =
            array_grow(l->heap, l->small, sizeof(*fresh), l->count, &l->cap);

        if (!fresh) {
            return -ENOMEM;
        }
        l->heap = fresh;
    }
    return r2_ranges_reserve(&l->done, (size_t)l->done.count + l->count + 1);
}

int r2_recv_claim(struct r2_recv_ledger *l, uint64_t off, uint32_t len, uint16_t path, uint32_t gen,
                  uint16_t lane, bool over)
{
    int err;

    if (!l->total_known || !chunk_ok(off, len, l->total) || (len == 0 && l->total > 0)) {
        return -EPROTO;
    }
    if (r2_ranges_contains(&l->done, off, len)) {
        return 1;
    }
    if ((!over && r2_ranges_overlap(&l->done, off, len) > 0) || recv_claimed(l, off, len)) {
        return -EBUSY;
    }
    err = recv_reserve(l);
    if (err) {
        return err;
    }
    recv_claims(l)[l->count++] =
        (struct r2_recv_claim){.off = off, .len = len, .path = path, .gen = gen, .lane = lane};
    return 0;
}

int r2_recv_release(struct r2_recv_ledger *l, uint64_t off, uint32_t len, uint16_t path,
                    uint32_t gen)
{
    struct r2_recv_claim *claim = recv_find(l, off, len, path, gen);

    if (!claim) {
        return -ENOENT;
    }
    *claim = recv_claims(l)[--l->count];
    return 0;
}

int r2_recv_done(struct r2_recv_ledger *l, uint64_t off, uint32_t len, uint16_t path, uint32_t gen)
{
    int err = r2_recv_release(l, off, len, path, gen);

    return err ? err : r2_ranges_add(&l->done, off, len);
}

bool r2_recv_complete(const struct r2_recv_ledger *l)
{
    return l->total_known && l->done.bytes == l->total && l->count == 0;
}

void r2_recv_arrived(const struct r2_recv_ledger *l, r2_range_fn cb, void *arg)
{
    for (uint32_t i = 0; i < l->done.count; i++) {
        const struct r2_range *r = r2_ranges_at(&l->done, i);

        if (!cb(arg, r->off, r->end - r->off)) {
            return;
        }
    }
}
