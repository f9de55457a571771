/* engine/ledger in a simulated world (rung 1), against a reference that keeps one state per byte.
 *
 * A sender and a receiver, up to 4 paths of up to 3 lanes, in one thread: every step is one random
 * event. Paths fail at any point (in a chunk, during a replay, on both sides at different times).
 * What was on the wire is lost from a random point on. Acknowledgements are lost, repeated and
 * overtaken; lanes leave their buffers late. The receiver's lane writes only what it has claimed.
 * After every call the ledger's answer must be the reference's; at the end every byte must have
 * been written into place and never after it was done.
 */
#include "ledger_world_sender.h"

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
    lane->receiving = true;
    lane->placing = false;
    lane->progress = 0;
    /* The path may have died with half of this chunk in the receiver's kernel. */
    lane->cut = !p->up && check_below(2);
    lane->limit = lane->cut ? (uint32_t)check_below(lane->rx.len + 1ull) : lane->rx.len;
    if (lane->rx.copy) {
        return; /* beside its place, until it is whole */
    }
    got = r2_recv_claim(&w.recv, lane->rx.off, lane->rx.len, lane->rx.path, lane->rx.gen,
                        lane_index, false);
    CHECK_EQ(got, ref_claim(&lane->rx));
    if (got == 0) {
        ref_set(&lane->rx, OPEN, CLAIMED);
    }
    lane->placing = got == 0;
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

/* The lane that reads this very chunk into its place lets go of it, if it can be asked now. */
static bool take_back(const struct chunk_msg *c)
{
    for (unsigned i = 0; i < w.paths; i++) {
        for (unsigned k = 0; k < w.lanes; k++) {
            struct lane *lane = &w.path[i].lanes[k];

            if (!lane->receiving || !lane->placing || lane->rx.off != c->off ||
                lane->rx.len != c->len || check_below(4) == 0) {
                continue;
            }
            lane->placing = false;
            CHECK_EQ(r2_recv_release(&w.recv, c->off, c->len, lane->rx.path, lane->rx.gen), 0);
            ref_set(&lane->rx, CLAIMED, OPEN);
            return true;
        }
    }
    return false;
}

/* A copy is whole: it takes the place if that is open, or if its reader lets go of it. */
static void end_of_copy(struct lane *lane, uint16_t lane_index)
{
    const struct chunk_msg *c = &lane->rx;
    uint32_t progress = 0;
    int got = r2_recv_claim(&w.recv, c->off, c->len, c->path, c->gen, lane_index, false);

    CHECK_EQ(got, ref_claim(c));
    if (got == -EBUSY && take_back(c)) {
        got = r2_recv_claim(&w.recv, c->off, c->len, c->path, c->gen, lane_index, false);
        CHECK_EQ(got, 0);
        w.rescues++;
    }
    w.copies_late += got == 1;
    if (got != 0) {
        return; /* dropped without a word: the original answers for the bytes */
    }
    ref_set(c, OPEN, CLAIMED);
    write_some(c, &progress, c->len);
    CHECK_EQ(r2_recv_done(&w.recv, c->off, c->len, c->path, c->gen), 0);
    ref_set(c, CLAIMED, DONE);
    remember(w.to_ack, &w.to_ack_count, c);
    expect_receiver();
}

/* From here on it carries nothing more; some of what is on its way still comes. */
static void break_path(struct path *p)
{
    p->up = false;
    for (unsigned i = 0; i < w.lanes; i++) {
        struct lane *lane = &p->lanes[i];

        lane->wire_count = (unsigned)check_below(lane->wire_count + 1);
        if (lane->receiving && !lane->cut && check_below(2)) {
            lane->cut = true;
            lane->limit =
                lane->progress + (uint32_t)check_below(lane->rx.len - lane->progress + 1ull);
        }
    }
    p->ctrl_count = (unsigned)check_below(p->ctrl_count + 1);
}

static void end_of_chunk(struct path *p, struct lane *lane, uint16_t lane_index)
{
    const struct chunk_msg *c = &lane->rx;

    lane->receiving = false;
    if (c->copy) {
        end_of_copy(lane, lane_index);
        return;
    }
    if (lane->placing) {
        CHECK_EQ(r2_recv_done(&w.recv, c->off, c->len, c->path, c->gen), 0);
        ref_set(c, CLAIMED, DONE);
        CHECK_EQ(r2_recv_done(&w.recv, c->off, c->len, c->path, c->gen), -ENOENT);
        remember(w.to_ack, &w.to_ack_count, c);
    } else if (ref_claim(c) == 1) {
        remember(w.to_ack, &w.to_ack_count, c);
    } else if (p->up) {
        w.refused++;
        break_path(p); /* its generation is sent again */
    }
    expect_receiver();
}

static void step_payload(struct path *p, uint16_t lane_index, struct lane *lane)
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
        end_of_chunk(p, lane, lane_index);
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
    }
    if (r2_recv_complete(&w.recv)) {
        post(p, CTRL_ACK_ALL, &none);
    }
}

static void receiver_down(struct path *p, uint16_t index)
{
    unsigned held = 0, claims = 0;

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
    for (uint32_t i = 0; i < w.recv.count; i++) {
        const struct r2_recv_claim *c = r2_recv_claim_at(&w.recv, i);

        claims += c->path == index && c->gen <= p->gen;
    }
    CHECK_EQ(claims, held);
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
    if (p->up && w.failures_left > 0) {
        w.failures_left--;
        break_path(p);
    }
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
    CHECK_EQ(r2_recv_done(&w.recv, off, len, 99, 1), -ENOENT);
    CHECK_EQ(r2_recv_release(&w.recv, off, len, 99, 1), -ENOENT);
    if (!inside) {
        CHECK_EQ(r2_send_ack(&w.send, off, len, NULL, NULL), -EPROTO);
        CHECK_EQ(r2_recv_claim(&w.recv, off, len, 99, 1, 0, false), -EPROTO);
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
        if (w.with_copies && check_below(4) == 0) {
            step_again(p, index, lane);
            break;
        }
        step_send(p, index, lane);
        break;
    case 4 ... 7:
        step_transmit(p, lane);
        break;
    case 8 ... 12:
        step_header(p, lane_index, lane);
        break;
    case 13 ... 18:
        step_payload(p, lane_index, lane);
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
    w.with_copies = check_below(3) > 0;
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

TEST(worlds)
{
    unsigned long replays = 0;
    unsigned long worlds = check_rounds(400), copies = 0, rescues = 0, late = 0, refused = 0;

    for (unsigned long n = 0; n < worlds; n++) {
        run_world();
        replays += w.replays;
        copies += w.copies;
        rescues += w.rescues;
        late += w.copies_late;
        refused += w.refused;
    }
    /* The test is worth nothing when nothing is ever lost. */
    CHECK_GT(replays, worlds);
    CHECK_GT(copies, worlds);
    CHECK_GT(rescues, worlds / 20);
    CHECK_GT(late, worlds / 20);
    CHECK_GT(refused, worlds / 20);
}
