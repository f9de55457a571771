/* engine/ledger in a simulated world, against a reference that keeps one state per byte.
 *
 * A sender and a receiver, up to 4 paths of up to 3 lanes, in one thread: every step is one random
 * event. Paths fail at any point (in a chunk, during a replay, on both sides at different times),
 * what was on the wire is lost from a random point on, acknowledgements are lost, repeated and
 * overtaken, lanes leave their buffers late. The receiver's lane writes only what it has claimed.
 * After every call the ledger's answer must be the reference's; at the end every byte must have
 * been written into place and never after it was done.
 */
#include "check.h"

#include "engine/ledger.h"

#define MAX_PATHS 4
#define MAX_LANES 3
#define MAX_BYTES (128 * 48)
#define MAX_IDS 8192
#define WIRE 32
#define CTRL 256
#define LATE 512
#define STEPS 400000

struct chunk_msg {
    uint64_t off;
    uint32_t len;
    uint32_t gen;
    uint32_t id;
    uint16_t path;
};

struct ctrl_msg {
    enum { CTRL_ACK, CTRL_ACK_ALL, CTRL_NACK } type;
    struct chunk_msg about;
};

struct lane {
    bool sending;         /* the sender's side reads tx */
    struct chunk_msg tx;
    struct chunk_msg wire[WIRE];
    unsigned wire_count;
    bool receiving;
    bool placing;         /* rx is claimed; else it is being drained */
    bool cut;             /* the rest of rx never comes */
    uint32_t progress;
    uint32_t limit;       /* where rx is cut */
    struct chunk_msg rx;
};

struct path {
    bool up;              /* the truth */
    bool sender_up;       /* what the sender thinks */
    bool receiver_up;
    uint32_t gen;
    struct lane lanes[MAX_LANES];
    struct ctrl_msg ctrl[CTRL]; /* receiver to sender */
    unsigned ctrl_count;
};

/* The reference's view of one transmission. */
struct ref_tx {
    struct chunk_msg c;
    bool reading;
    bool lost;
};

/* A writer that has not left the buffer yet although its path is dead. */
struct leaver {
    struct chunk_msg c;
    uint32_t progress;
};

static struct world {
    uint32_t total;
    unsigned paths;
    unsigned lanes;
    unsigned failures_left;
    unsigned chunk_max; /* in units of 128 */
    unsigned char src[MAX_BYTES];
    unsigned char dst[MAX_BYTES];

    struct r2_send_ledger send;
    struct r2_recv_ledger recv;
    struct path path[MAX_PATHS];

    /* sender's reference */
    enum { UNSENT, QUEUED, FLYING } out[MAX_BYTES];
    uint32_t owner[MAX_BYTES]; /* FLYING: number of the transmission */
    bool acked[MAX_BYTES];
    bool empty_out;
    bool empty_acked;
    struct ref_tx tx[MAX_IDS];
    uint32_t tx_count;
    uint32_t late[LATE]; /* transmissions to be released some time */
    unsigned late_count;

    /* receiver's reference */
    enum { OPEN, CLAIMED, DONE } in[MAX_BYTES];
    uint32_t claimant[MAX_BYTES];
    bool total_seen;
    struct chunk_msg refused[LATE]; /* drained, and the sender does not know yet */
    unsigned refused_count;
    struct leaver leaving[LATE];
    unsigned leaving_count;
    struct chunk_msg to_ack[LATE];
    unsigned to_ack_count;
    unsigned replays;
} w;

/* ---- Reference answers ------------------------------------------------------------------- */

static uint32_t ref_count_acked(void)
{
    uint32_t n = 0;

    for (uint32_t b = 0; b < w.total; b++) {
        n += w.acked[b];
    }
    return n;
}

static bool ref_tx_over(const struct ref_tx *t)
{
    if (t->c.len == 0) {
        return w.empty_acked;
    }
    for (uint32_t b = 0; b < t->c.len; b++) {
        if (!w.acked[t->c.off + b]) {
            return false;
        }
    }
    return true;
}

static bool ref_reading(void)
{
    for (uint32_t i = 0; i < w.tx_count; i++) {
        if (w.tx[i].reading) {
            return true;
        }
    }
    return false;
}

static bool ref_idle(void)
{
    if (w.total == 0) {
        return w.empty_out || w.empty_acked;
    }
    for (uint32_t b = 0; b < w.total; b++) {
        if (!w.acked[b] && w.out[b] != FLYING) {
            return false;
        }
    }
    return true;
}

static bool ref_send_complete(void)
{
    bool all = w.total ? ref_count_acked() == w.total : w.empty_acked;

    return all && !ref_reading();
}

static void expect_sender(void)
{
    uint32_t waiting = 0;

    for (uint32_t b = 0; b < w.total; b++) {
        waiting += !w.acked[b] && w.out[b] != FLYING;
    }
    CHECK_EQ(r2_send_acked_bytes(&w.send), ref_count_acked());
    CHECK_EQ(r2_send_waiting_bytes(&w.send), waiting);
    CHECK_EQ(r2_send_idle(&w.send), ref_idle());
    CHECK_EQ(r2_send_reading(&w.send), ref_reading());
    CHECK_EQ(r2_send_complete(&w.send), ref_send_complete());
    if (w.tx_count > 0 && check_below(4) == 0) {
        uint32_t records = 0;

        for (uint32_t i = 0; i < w.tx_count; i++) {
            records += w.tx[i].reading || (!w.tx[i].lost && !ref_tx_over(&w.tx[i]));
        }
        CHECK_EQ(w.send.count, records); /* none is kept longer than it must be */
    }
}

static void expect_receiver(void)
{
    uint32_t done = 0;
    uint32_t prefix = 0;
    bool claimed = false;

    for (uint32_t b = 0; b < w.total; b++) {
        done += w.in[b] == DONE;
        claimed = claimed || w.in[b] == CLAIMED;
    }
    while (prefix < w.total && w.in[prefix] == DONE) {
        prefix++;
    }
    CHECK_EQ(r2_recv_done_bytes(&w.recv), done);
    CHECK_EQ(r2_recv_prefix(&w.recv), prefix);
    CHECK_EQ(r2_recv_writing(&w.recv), claimed);
    CHECK_EQ(r2_recv_complete(&w.recv), w.total_seen && done == w.total);
}

/* ---- Sender ------------------------------------------------------------------------------ */

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
    uint32_t max = (uint32_t)(check_below(4) ? 128 * (1 + check_below(w.chunk_max))
                                       : check_below(1600));
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
    uint64_t want = 0;
    uint64_t counted = 3;

    if (!p->sender_up) {
        return;
    }
    for (uint32_t i = 0; i < w.tx_count; i++) {
        struct ref_tx *t = &w.tx[i];

        if (t->c.path == index && t->c.gen <= p->gen && !t->lost && !ref_tx_over(t)) {
            want += ref_lose(t);
        }
    }
    CHECK_EQ(r2_send_path_down(&w.send, index, p->gen, &counted), want);
    CHECK_EQ(counted, want + 3);
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
    if (r->len > 0) {
        CHECK_GT(fresh, 0);
        CHECK_LT(id, w.tx_count);
        CHECK_EQ(w.tx[id].c.off, r->off);
        CHECK_EQ(w.tx[id].c.path, r->path);
        CHECK_EQ(w.tx[id].c.gen, r->gen);
        CHECK(!w.tx[id].lost);
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
    CHECK_EQ(all ? r2_send_ack_all(&w.send, on_report, &a)
                 : r2_send_ack(&w.send, off, len, on_report, &a), fresh);
    CHECK_EQ(a.sum, flying);
    for (uint64_t b = off; b < off + len; b++) {
        w.acked[b] = true;
    }
    w.empty_acked = w.empty_acked || w.total == 0;
    expect_sender();
}

static void sender_nack(const struct chunk_msg *c)
{
    uint64_t want = 0;

    for (uint32_t i = 0; i < w.tx_count; i++) {
        struct ref_tx *t = &w.tx[i];

        if (!t->lost && t->c.off == c->off && t->c.len == c->len && t->c.path == c->path &&
            t->c.gen == c->gen && !ref_tx_over(t)) {
            want = ref_lose(t);
            break;
        }
    }
    CHECK_EQ(r2_send_nack(&w.send, c->off, c->len, c->path, c->gen), want);
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
    case CTRL_NACK:
        sender_nack(&m.about);
        break;
    }
}

/* ---- Receiver ---------------------------------------------------------------------------- */

static int ref_claim(const struct chunk_msg *c)
{
    uint32_t open = 0;
    uint32_t done = 0;

    for (uint32_t b = (uint32_t)c->off; b < c->off + c->len; b++) {
        open += w.in[b] == OPEN;
        done += w.in[b] == DONE;
    }
    if (done == c->len) {
        return 1;
    }
    return open == c->len ? 0 : -EBUSY;
}

static void ref_set(const struct chunk_msg *c, int from, int to)
{
    for (uint32_t b = (uint32_t)c->off; b < c->off + c->len; b++) {
        CHECK((int)w.in[b] == from);
        CHECK(from != CLAIMED || w.claimant[b] == c->id);
        w.in[b] = to;
        w.claimant[b] = c->id;
    }
}

static void remember(struct chunk_msg *list, unsigned *count, const struct chunk_msg *c)
{
    CHECK_LT(*count, LATE);
    list[(*count)++] = *c;
}

/* A header arrives. */
static void step_header(struct path *p, uint16_t lane_index, struct lane *lane)
{
    int got;

    if (lane->receiving || lane->wire_count == 0 || !p->receiver_up) {
        return;
    }
    lane->rx = lane->wire[0];
    memmove(lane->wire, lane->wire + 1, --lane->wire_count * sizeof(lane->wire[0]));
    CHECK_EQ(lane->rx.gen, p->gen);
    CHECK_EQ(r2_recv_set_total(&w.recv, w.total), 0);
    w.total_seen = true;
    got = r2_recv_claim(&w.recv, lane->rx.off, lane->rx.len, lane->rx.path, lane->rx.gen,
                        lane_index);
    CHECK_EQ(got, ref_claim(&lane->rx));
    if (got == 0) {
        ref_set(&lane->rx, OPEN, CLAIMED);
    }
    lane->receiving = true;
    lane->placing = got == 0;
    lane->progress = 0;
    /* The path may have died with half of this chunk in the receiver's kernel. */
    lane->cut = !p->up && check_below(2);
    lane->limit = lane->cut ? (uint32_t)check_below(lane->rx.len + 1ull) : lane->rx.len;
    expect_receiver();
}

/* Writes some more of a claimed chunk, as its claimant. */
static void write_some(const struct chunk_msg *c, uint32_t *progress, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++, (*progress)++) {
        uint64_t b = c->off + *progress;

        CHECK(w.in[b] == CLAIMED && w.claimant[b] == c->id);
        w.dst[b] = w.src[b];
    }
}

static void end_of_chunk(struct lane *lane)
{
    const struct chunk_msg *c = &lane->rx;

    lane->receiving = false;
    if (lane->placing) {
        CHECK_EQ(r2_recv_done(&w.recv, c->off, c->len, c->path, c->gen), 0);
        ref_set(c, CLAIMED, DONE);
        CHECK_EQ(r2_recv_done(&w.recv, c->off, c->len, c->path, c->gen),
                 -ENOENT);
        remember(w.to_ack, &w.to_ack_count, c);
    } else if (ref_claim(c) == 1) {
        remember(w.to_ack, &w.to_ack_count, c);
    } else {
        remember(w.refused, &w.refused_count, c);
    }
    expect_receiver();
}

static void step_payload(struct path *p, struct lane *lane)
{
    uint32_t n;

    if (!lane->receiving || !p->receiver_up) {
        return;
    }
    n = (uint32_t)check_below(lane->limit - lane->progress + 1ull);
    if (lane->placing) {
        write_some(&lane->rx, &lane->progress, n);
    } else {
        lane->progress += n;
    }
    if (lane->progress == lane->rx.len) {
        end_of_chunk(lane);
    }
}

static void post(struct path *p, int type, const struct chunk_msg *c)
{
    if (p->up && p->ctrl_count < CTRL) {
        p->ctrl[p->ctrl_count].type = type;
        p->ctrl[p->ctrl_count++].about = *c;
    }
}

static bool post_arrived(void *arg, uint64_t off, uint64_t len)
{
    struct chunk_msg c = {.off = off, .len = (uint32_t)len};

    post(arg, CTRL_ACK, &c);
    return true;
}

static void post_refused(struct path *p)
{
    for (unsigned i = 0; i < w.refused_count; i++) {
        struct chunk_msg *c = &w.refused[i];

        if (ref_claim(c) == 1) {
            *c = w.refused[--w.refused_count];
            i--;
        } else if (ref_claim(c) == 0 || check_below(2)) {
            post(p, CTRL_NACK, c);
        }
    }
}

/* Acknowledges what is due over this path, and now and then says everything again. A message
 * that could not be posted because the path is dead is lost, as in life. */
static void step_report(struct path *p, bool again)
{
    struct chunk_msg none = {0};

    if (!p->receiver_up) {
        return;
    }
    while (w.to_ack_count > 0 && check_below(4)) {
        post(p, CTRL_ACK, &w.to_ack[--w.to_ack_count]);
    }
    if (again) {
        r2_recv_arrived(&w.recv, post_arrived, p);
        post_refused(p);
    }
    if (r2_recv_complete(&w.recv)) {
        post(p, CTRL_ACK_ALL, &none);
    }
}

static void receiver_down(struct path *p, uint16_t index)
{
    unsigned held = 0;

    if (!p->receiver_up) {
        return;
    }
    p->receiver_up = false;
    for (unsigned i = 0; i < w.lanes; i++) {
        struct lane *lane = &p->lanes[i];

        lane->wire_count = 0;
        if (lane->receiving && lane->placing) { /* its writer leaves the buffer later */
            CHECK_LT(w.leaving_count, LATE);
            w.leaving[w.leaving_count++] =
                (struct leaver){.c = lane->rx, .progress = lane->progress};
        }
        lane->receiving = false;
    }
    for (unsigned i = 0; i < w.leaving_count; i++) {
        held += w.leaving[i].c.path == index && w.leaving[i].c.gen <= p->gen;
    }
    CHECK_EQ(r2_recv_claims_on(&w.recv, index, p->gen), held);
    for (unsigned i = 0; i < w.paths; i++) { /* repeat on the others what has arrived */
        step_report(&w.path[i], true);
    }
}

static void step_leave(void)
{
    struct leaver *l;
    unsigned i;

    if (w.leaving_count == 0) {
        return;
    }
    i = (unsigned)check_below(w.leaving_count);
    l = &w.leaving[i];
    if (check_below(2)) { /* the last call of the writer still copies something */
        write_some(&l->c, &l->progress, (uint32_t)check_below(l->c.len - l->progress + 1ull));
        return;
    }
    CHECK_EQ(r2_recv_release(&w.recv, l->c.off, l->c.len, l->c.path, l->c.gen), 0);
    CHECK_EQ(r2_recv_release(&w.recv, l->c.off, l->c.len, l->c.path, l->c.gen), -ENOENT);
    ref_set(&l->c, CLAIMED, OPEN);
    *l = w.leaving[--w.leaving_count];
    expect_receiver();
}

/* ---- Paths ------------------------------------------------------------------------------- */

static void step_fail(struct path *p)
{
    if (!p->up || w.failures_left == 0) {
        return;
    }
    w.failures_left--;
    p->up = false;
    for (unsigned i = 0; i < w.lanes; i++) {
        struct lane *lane = &p->lanes[i];

        lane->wire_count = (unsigned)check_below(lane->wire_count + 1);
        if (lane->receiving && !lane->cut && check_below(2)) {
            lane->cut = true;
            lane->limit = lane->progress +
                          (uint32_t)check_below(lane->rx.len - lane->progress + 1ull);
        }
    }
    p->ctrl_count = (unsigned)check_below(p->ctrl_count + 1);
}

static void step_repair(struct path *p, uint16_t index)
{
    if (p->up || p->sender_up) {
        return;
    }
    receiver_down(p, index); /* the handshake of the new generation says that the old is dead */
    p->gen += 1 + (uint32_t)check_below(3);
    p->up = p->sender_up = p->receiver_up = true;
    p->ctrl_count = 0;
    step_report(p, true);
}

/* What no honest peer sends must be refused and change nothing. */
static void step_nonsense(void)
{
    uint64_t off = check_below(2) ? check_random() : check_below(w.total + 300ull);
    uint32_t len = (uint32_t)check_below(check_below(2) ? UINT32_MAX : 300);
    bool inside = off <= w.total && len <= w.total - off && off % 128 == 0 &&
                  ((off + len) % 128 == 0 || off + len == w.total);

    CHECK_EQ(r2_send_released(&w.send, off, len, 99, 1), -ENOENT);
    CHECK_EQ(r2_send_nack(&w.send, off, len, 99, 1), 0);
    CHECK_EQ(r2_recv_done(&w.recv, off, len, 99, 1), -ENOENT);
    CHECK_EQ(r2_recv_release(&w.recv, off, len, 99, 1), -ENOENT);
    if (!inside) {
        CHECK_EQ(r2_send_ack(&w.send, off, len, NULL, NULL), -EPROTO);
        CHECK_EQ(r2_recv_claim(&w.recv, off, len, 99, 1, 0), -EPROTO);
    }
    if (w.total_seen) {
        CHECK_EQ(r2_recv_set_total(&w.recv, w.total + 1 + check_below(1000)), -EPROTO);
    }
    expect_sender();
    expect_receiver();
}

static void step(void)
{
    uint16_t index = (uint16_t)check_below(w.paths);
    struct path *p = &w.path[index];
    uint16_t lane_index = (uint16_t)check_below(w.lanes);
    struct lane *lane = &p->lanes[lane_index];

    switch (check_below(p->up ? 32 : 40)) {
    case 0 ... 3:
        step_send(p, index, lane);
        break;
    case 4 ... 7:
        step_transmit(p, lane);
        break;
    case 8 ... 12:
        step_header(p, lane_index, lane);
        break;
    case 13 ... 18:
        step_payload(p, lane);
        break;
    case 19 ... 20:
        step_release();
        break;
    case 21 ... 22:
        step_leave();
        break;
    case 23 ... 25:
        step_report(p, check_below(16) == 0);
        break;
    case 26 ... 29:
        step_control(p);
        break;
    case 30:
        step_fail(p);
        break;
    case 31:
        step_nonsense();
        break;
    case 32 ... 34:
        sender_down(p, index);
        break;
    case 35 ... 37:
        receiver_down(p, index);
        break;
    default:
        step_repair(p, index);
    }
}

static void world_init(void)
{
    static const uint32_t sizes[] = {0, 1, 127, 128, 129, 256, 4096};
    uint32_t total = check_below(3) ? (uint32_t)check_below(MAX_BYTES)
                                    : sizes[check_below(sizeof(sizes) / sizeof(sizes[0]))];
    uint32_t spare = (uint32_t)check_below(3) * 100;

    memset(&w, 0, sizeof(w));
    w.total = total;
    w.paths = 1 + (unsigned)check_below(MAX_PATHS);
    w.lanes = 1 + (unsigned)check_below(MAX_LANES);
    w.failures_left = (unsigned)check_below(24);
    w.chunk_max = 1 + (unsigned)check_below(12);
    for (uint32_t b = 0; b < total; b++) {
        w.src[b] = (unsigned char)check_random();
        w.dst[b] = (unsigned char)~w.src[b];
    }
    r2_send_init(&w.send, total);
    r2_recv_init(&w.recv, total + spare);
    for (unsigned i = 0; i < w.paths; i++) {
        w.path[i].gen = 1 + (uint32_t)check_below(5);
        w.path[i].up = w.path[i].sender_up = w.path[i].receiver_up = true;
    }
}

static void run_world(void)
{
    uint32_t steps = 0;

    world_init();
    expect_sender();
    expect_receiver();
    while (!r2_send_complete(&w.send) || !r2_recv_complete(&w.recv) || w.leaving_count > 0) {
        CHECK_MSG(++steps < STEPS, "total %u paths %u: no end after %u steps, %u acked", w.total,
                  w.paths, steps, ref_count_acked());
        step();
    }
    CHECK_MEM(w.dst, w.src, w.total);
    CHECK_EQ(w.send.count, 0);
    CHECK_EQ(w.recv.count, 0);
    CHECK(r2_send_idle(&w.send));
    r2_send_free(&w.send);
    r2_recv_free(&w.recv);
}

static void test_worlds(void)
{
    unsigned long replays = 0;
    unsigned long worlds = check_rounds(400);

    for (unsigned long n = 0; n < worlds; n++) {
        run_world();
        replays += w.replays;
    }
    /* The test is worth nothing when nothing is ever lost. */
    CHECK_GT(replays, worlds);
}

static const struct check_test tests[] = {
    {"worlds", test_worlds},
    {NULL, NULL},
};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
