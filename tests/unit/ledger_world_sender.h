/* The sender's side of the world of test_ledger_model.c: every step compares the ledger's answer
 * with the reference's. */
#ifndef R2_TESTS_UNIT_LEDGER_WORLD_SENDER_H
#define R2_TESTS_UNIT_LEDGER_WORLD_SENDER_H

#include "ledger_world.h"

/* Nothing that is repeated reaches over an end of a copy under way. */
static bool ref_border(uint32_t at)
{
    for (uint32_t i = 0; i < w.tx_count; i++) {
        const struct ref_tx *t = &w.tx[i];
        bool gone = true;

        if (!t->c.copy || t->lost || (t->c.off != at && t->c.off + t->c.len != at))
            continue;
        for (uint32_t b = t->c.off; b < t->c.off + t->c.len; b++)
            gone &= w.acked[b];
        if (!gone)
            return true;
    }
    return false;
}

/* Checks that a chunk is the one that had to come next, and enters it. */
static void ref_next(const struct r2_chunk *c, uint32_t max, uint16_t path, uint32_t gen)
{
    uint32_t off = 0;
    uint32_t end;

    CHECK(!ref_idle());
    CHECK_LE(c->len, max);
    CHECK_LT(w.tx_count, MAX_IDS);
    CHECK_EQ(c->id, w.tx_count);
    while (off < w.total && (w.acked[off] || w.out[off] != QUEUED)) {
        off++;
    }
    if (off == w.total) { /* nothing to repeat: the first byte never sent */
        for (off = 0; off < w.total && w.out[off] != UNSENT; off++) {
        }
    }
    CHECK_EQ(c->off, off);
    for (end = off; end < w.total && !w.acked[end] && w.out[end] == w.out[off]; end++) {
        if (end > off && w.out[off] == QUEUED && ref_border(end))
            break;
    }
    /* As long as max allows; cut at a multiple of 128. */
    CHECK_EQ(c->len, end - off <= max ? end - off : max / 128 * 128);
    for (uint32_t b = off; b < off + c->len; b++) {
        w.replays += w.out[b] == QUEUED;
        w.out[b] = FLYING;
        w.owner[b] = w.tx_count;
    }
    w.empty_out = w.empty_out || w.total == 0;
    w.tx[w.tx_count++] = (struct ref_tx){
        .c = {.off = c->off, .len = c->len, .gen = gen, .id = c->id, .path = path},
        .reading = true,
    };
}

static void step_send(struct path *p, uint16_t index, struct lane *lane)
{
    uint32_t max =
        (uint32_t)(check_below(4) ? 128 * (1 + check_below(w.chunk_max)) : check_below(1600));
    struct r2_chunk c;

    if (lane->sending || !p->sender_up) {
        return;
    }
    if (!r2_send_next(&w.send, max, index, p->gen, check_below(1000), &c)) {
        CHECK(ref_idle() || max < 128);
        return;
    }
    ref_next(&c, max, index, p->gen);
    lane->sending = true;
    lane->tx = w.tx[c.id].c;
    expect_sender();
}

/* A transmission that is in flight goes over another path as well. */
static void step_again(struct path *p, uint16_t index, struct lane *lane)
{
    struct r2_chunk c;
    struct ref_tx *t;
    bool partly = false, want;

    if (lane->sending || !p->sender_up || w.tx_count == 0 || w.tx_count == MAX_IDS)
        return;
    t = &w.tx[w.tx_count - 1 - check_below(w.tx_count < 12 ? w.tx_count : 12)];
    for (uint32_t b = 0; b < t->c.len; b++)
        partly |= w.acked[t->c.off + b];
    want = !t->lost && !t->c.copy && !t->copied && t->c.path != index && t->c.len > 0 && !partly;
    CHECK_EQ(r2_send_again(&w.send, t->c.id, index, p->gen, 5, &c), want);
    if (!want)
        return;
    CHECK(c.off == t->c.off && c.len == t->c.len && c.id == w.tx_count);
    t->copied = true;
    w.tx[w.tx_count++] = (struct ref_tx){
        .c = {.off = c.off, .len = c.len, .gen = p->gen, .id = c.id, .path = index, .copy = true},
        .reading = true,
    };
    w.copies++;
    lane->sending = true;
    lane->tx = w.tx[c.id].c;
    expect_sender();
}

static void do_release(uint32_t id)
{
    struct chunk_msg *c = &w.tx[id].c;
    uint32_t i;

    /* Equal keys are released oldest first. */
    for (i = 0; i < w.tx_count; i++) {
        struct chunk_msg *x = &w.tx[i].c;

        if (w.tx[i].reading && x->off == c->off && x->len == c->len && x->path == c->path &&
            x->gen == c->gen) {
            break;
        }
    }
    CHECK_LT(i, w.tx_count);
    CHECK_EQ(r2_send_released(&w.send, c->off, c->len, c->path, c->gen), 0);
    w.tx[i].reading = false;
    expect_sender();
}

static void release_late(uint32_t id)
{
    if (check_below(2) || w.late_count == LATE) {
        do_release(id);
    } else {
        w.late[w.late_count++] = id;
    }
}

/* The lane has handed all bytes to the kernel; that may still read them (zero copy). */
static void step_transmit(struct path *p, struct lane *lane)
{
    if (!lane->sending || !p->up || lane->wire_count == WIRE) {
        return;
    }
    lane->wire[lane->wire_count++] = lane->tx;
    lane->sending = false;
    release_late(lane->tx.id);
}

static void step_release(void)
{
    if (w.late_count > 0) {
        unsigned i = (unsigned)check_below(w.late_count);
        uint32_t id = w.late[i];

        w.late[i] = w.late[--w.late_count];
        do_release(id);
    }
}

/* Puts the missing bytes of a transmission back, in the reference. Returns them. */
static uint32_t ref_lose(struct ref_tx *t)
{
    uint32_t n = 0;

    t->lost = true;
    if (t->c.copy) {
        return 0;
    }
    for (uint32_t b = (uint32_t)t->c.off; b < t->c.off + t->c.len; b++) {
        if (!w.acked[b]) {
            CHECK(w.out[b] == FLYING && w.owner[b] == t->c.id);
            w.out[b] = QUEUED;
            n++;
        }
    }
    if (t->c.len == 0) {
        w.empty_out = false;
    }
    return n;
}

static void sender_down(struct path *p, uint16_t index)
{
    uint64_t want = 0, chunks = 0;
    struct r2_send_replay counted = {.bytes = 3, .chunks = 4};

    if (!p->sender_up) {
        return;
    }
    for (uint32_t i = 0; i < w.tx_count; i++) {
        struct ref_tx *t = &w.tx[i];

        if (t->c.path == index && t->c.gen <= p->gen && !t->lost && !ref_tx_over(t)) {
            uint64_t lost = ref_lose(t);

            want += lost;
            chunks += lost > 0;
        }
    }
    CHECK_EQ(r2_send_path_down(&w.send, index, p->gen, &counted), want);
    CHECK_EQ(counted.bytes, want + 3);
    CHECK_EQ(counted.chunks, chunks + 4);
    CHECK_EQ(r2_send_path_down(&w.send, index, p->gen, NULL), 0);
    p->sender_up = false;
    expect_sender();
    for (unsigned i = 0; i < w.lanes; i++) {
        struct lane *lane = &p->lanes[i];

        if (lane->sending) {
            lane->sending = false;
            release_late(lane->tx.id);
        }
    }
}

struct ack_check {
    uint64_t off;
    uint64_t end;
    uint64_t sum;
};

/* Each report must name one live transmission and exactly its share. Called before the reference
 * enters the acknowledgement. */
static void on_report(void *arg, const struct r2_send_report *r)
{
    struct ack_check *a = arg;
    uint32_t fresh = 0;
    uint32_t left = 0;
    uint32_t id = UINT32_MAX;

    for (uint32_t b = (uint32_t)r->off; b < r->off + r->len; b++) {
        if (!w.acked[b]) {
            id = w.owner[b];
            if (b >= a->off && b < a->end) {
                fresh++;
            } else {
                left++;
            }
        }
    }
    CHECK_EQ(r->bytes, fresh);
    CHECK_EQ(r->complete, left == 0);
    if (r->copy) { /* of a live one, and not counted among the bytes in flight */
        bool found = false;

        for (uint32_t i = 0; i < w.tx_count; i++) {
            struct ref_tx *t = &w.tx[i];

            found |= t->c.copy && !t->lost && t->c.off == r->off && t->c.len == r->len &&
                     t->c.path == r->path && t->c.gen == r->gen;
        }
        CHECK(found && r->doubled);
        return;
    }
    if (r->len > 0) {
        CHECK_GT(fresh, 0);
        CHECK_LT(id, w.tx_count);
        CHECK_EQ(w.tx[id].c.off, r->off);
        CHECK_EQ(w.tx[id].c.path, r->path);
        CHECK_EQ(w.tx[id].c.gen, r->gen);
        CHECK(!w.tx[id].lost);
        CHECK_EQ(r->doubled, w.tx[id].copied);
    }
    a->sum += r->bytes;
}

static void sender_ack(uint64_t off, uint64_t len, bool all)
{
    struct ack_check a = {.off = off, .end = off + len};
    uint64_t fresh = 0;
    uint64_t flying = 0;

    for (uint64_t b = off; b < off + len; b++) {
        fresh += !w.acked[b];
        flying += !w.acked[b] && w.out[b] == FLYING;
    }
    CHECK_EQ(all ? r2_send_ack(&w.send, 0, w.send.total, on_report, &a)
                 : r2_send_ack(&w.send, off, len, on_report, &a),
             fresh);
    CHECK_EQ(a.sum, flying);
    for (uint64_t b = off; b < off + len; b++) {
        w.acked[b] = true;
    }
    w.empty_acked = w.empty_acked || w.total == 0;
    expect_sender();
}

static void step_control(struct path *p)
{
    unsigned i;
    struct ctrl_msg m;

    if (p->ctrl_count == 0 || !p->sender_up) {
        return;
    }
    i = (unsigned)check_below(p->ctrl_count); /* overtaking */
    m = p->ctrl[i];
    if (check_below(8)) { /* else it comes again */
        p->ctrl[i] = p->ctrl[--p->ctrl_count];
    }
    switch (m.type) {
    case CTRL_ACK:
        sender_ack(m.about.off, m.about.len, false);
        break;
    case CTRL_ACK_ALL:
        sender_ack(0, w.total, true);
        break;
    }
}

#endif
