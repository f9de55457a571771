/* All ranks' executors with devices that queue copies ahead (rung 2): queues hold a few entries and
 * are worked off in order, late, one for each stream or one for all. Messages are late, too. Each
 * operation gets through, has its own input and the right sums; an end lets all queues run empty.
 */
#define _GNU_SOURCE
#include "check.h"

#include "direct/ahead.h"
#include "plan/sizes.h"

#define P_MOST 8
#define OPS 3
#define BYTES_MOST 100000
#define POSTED 256 /* messages of a pipe under way */
#define STALL 20000
#define MIB ((uint64_t)1 << 20)
#define QUEUE 1024                   /* what the driver's queue of a stream holds */
#define PITCH_MOST INT32_MAX         /* CU_DEVICE_ATTRIBUTE_MAX_PITCH */
#define FOR_GOOD (UINT32_C(1) << 30) /* as device/copies.c has it */

enum { APP, IN, OUT, STREAMS };

struct entry {
    enum { FILL, START, HOLD, COPY, TELL, GATE, LOOK } what;
    int stream, op;
    uint32_t number;
    struct r2_copies_rows rows;
};

/* What the caller queues, in its order; [0, queued) are in the device's queues, of which
 * [0, done[s]) of a stream are over. */
struct device {
    struct entry *entries;
    size_t n, room, queued, at[STREAMS]; /* at: where to look for a stream's next */
    unsigned held[STREAMS];
    uint32_t let[2], done[2], seen[2], numbers[2];
    int filled, gate; /* operations */
};

struct pipe {
    struct {
        uint8_t *data;
        size_t len;
        int op;
    } sent[POSTED], wanted[POSTED];
    unsigned n_sent, n_wanted, moved, told_send, told_recv;
};

static struct rank {
    struct r2_exec *x;
    struct r2_schedule schedule[OPS];
    struct device device;
    int me, given, op;
    uint64_t base;
    uint8_t *slots, in[BYTES_MOST], out[BYTES_MOST];
} ranks[P_MOST];

static struct pipe pipes[P_MOST][P_MOST][2]; /* [from][to][sums] */
static int p, ops;
static bool one_queue, in_place[OPS], over, moved;
static unsigned capacity;

static uint8_t input(int op, int rank, size_t i)
{
    return (uint8_t)((i * 2654435761u + (size_t)(op * 7 + rank) * 40503u) >> 7);
}

static size_t bytes_of(const struct r2_schedule *s)
{
    return s->count * s->elem;
}

/* ---- the device */

static void append(struct rank *r, int stream, struct entry e)
{
    struct device *d = &r->device;

    if (d->n == d->room) {
        d->room = d->room ? 2 * d->room : 1024;
        d->entries = realloc(d->entries, d->room * sizeof(*d->entries));
        CHECK(d->entries);
    }
    e.stream = stream;
    e.op = r->given;
    d->entries[d->n++] = e;
}

static int hold(void *user, bool out, unsigned n)
{
    struct rank *r = user;

    r->device.numbers[out] += n;
    append(r, IN + out, (struct entry){.what = HOLD, .number = r->device.numbers[out]});
    return 0;
}

static int queue(void *user, bool out, const struct r2_copies_rows *rows)
{
    append(user, IN + out, (struct entry){.what = COPY, .rows = *rows});
    return 0;
}

static int tell(void *user, bool out)
{
    struct rank *r = user;

    append(r, IN + out, (struct entry){.what = TELL, .number = r->device.numbers[out]});
    return 0;
}

static const struct r2_direct_device device = {.hold = hold, .queue = queue, .tell = tell};

/* The application fills the buffers, calls and looks at the result. */
static void give(struct rank *r)
{
    struct r2_direct_call call = {.in = in_place[r->given] ? r->out : r->in, .out = r->out};
    struct r2_ahead ahead = {&device, r, &call, &r->schedule[r->given], r->x, r->base};

    append(r, APP, (struct entry){.what = FILL});
    append(r, IN, (struct entry){.what = START});
    append(r, OUT, (struct entry){.what = START});
    CHECK_EQ(r2_ahead_queue(&ahead), 0);
    append(r, APP, (struct entry){.what = GATE});
    append(r, APP, (struct entry){.what = LOOK});
    r->base += r->schedule[r->given].n_steps;
    r->given++;
}

static void fill(struct rank *r, int op)
{
    size_t n = bytes_of(&r->schedule[op]);

    memset(r->out, 0xee, sizeof(r->out));
    for (size_t i = 0; i < n; i++)
        (in_place[op] ? r->out : r->in)[i] = input(op, r->me, i);
    r->device.filled = op + 1;
}

static void look(const struct rank *r, int op)
{
    size_t n = bytes_of(&r->schedule[op]);

    for (size_t i = 0; i < n && !over; i++) {
        uint8_t sum = 0;

        for (int k = 0; k < p; k++)
            sum = (uint8_t)(sum + input(op, k, i));
        CHECK_MSG(r->out[i] == sum, "operation %d, rank %d of %d: byte %zu of %zu", op, r->me, p, i,
                  n);
    }
    for (size_t i = n; i < sizeof(r->out) && !over; i++)
        CHECK_EQ(r->out[i], 0xee);
}

/* Within the operation's part of the input or the output. */
static bool is_within(const struct rank *r, const struct entry *e, const void *at, size_t len)
{
    const uint8_t *buffer = e->stream == OUT && !in_place[e->op] ? r->in : r->out, *begin = at;
    size_t n = bytes_of(&r->schedule[e->op]);

    return (begin >= buffer && begin + len <= buffer + n) ||
           (begin >= r->out && begin + len <= r->out + n); /* what was written before */
}

static void copy_rows(struct rank *r, const struct entry *e)
{
    const struct r2_copies_rows *w = &e->rows;

    for (size_t k = 0; k < w->n; k++) {
        uint8_t *to = (uint8_t *)w->to + k * w->to_pitch;
        const uint8_t *from = (const uint8_t *)w->from + k * w->from_pitch;

        CHECK(is_within(r, e, e->stream == OUT ? from : to, w->len));
        CHECK(w->n == 1 || (w->to_pitch >= w->len && w->to_pitch <= PITCH_MOST));
        CHECK(w->n == 1 || (w->from_pitch >= w->len && w->from_pitch <= PITCH_MOST));
        memcpy(to, from, w->len);
    }
}

/* Whether it is over. */
static bool execute(struct rank *r, const struct entry *e)
{
    struct device *d = &r->device;
    int out = e->stream == OUT;

    switch (e->what) {
    case FILL:
        fill(r, e->op);
        break;
    case START:
        return d->filled > e->op;
    case HOLD:
        return (int32_t)(d->let[out] - e->number) >= 0;
    case COPY:
        copy_rows(r, e);
        break;
    case TELL:
        d->done[out] = e->number;
        break;
    case GATE:
        return d->gate > e->op || over;
    case LOOK:
        look(r, e->op);
        break;
    }
    return true;
}

static int queue_of(const struct entry *e)
{
    return one_queue ? 0 : e->stream;
}

/* The caller waits while a queue is full; then the first entry of queue `q`. */
static void turn_device(struct rank *r, int q)
{
    struct device *d = &r->device;

    while (d->queued < d->n && d->held[queue_of(&d->entries[d->queued])] < capacity)
        d->held[queue_of(&d->entries[d->queued++])]++;
    while (d->at[q] < d->queued && queue_of(&d->entries[d->at[q]]) != q)
        d->at[q]++;
    if (d->at[q] == d->queued || !execute(r, &d->entries[d->at[q]]))
        return;
    d->at[q]++;
    d->held[q]--;
    moved = true;
}

/* ---- the executor */

static struct pipe *pipe_of(const struct rank *r, enum r2_lane_kind kind, int peer)
{
    bool sums = kind == R2_LANE_DOWN || kind == R2_LANE_OUT;
    bool send = kind == R2_LANE_UP || kind == R2_LANE_OUT;

    return send ? &pipes[r->me][peer][sums] : &pipes[peer][r->me][sums];
}

static int post(void *user, enum r2_lane_kind kind, int peer, void *data, size_t len)
{
    struct rank *r = user;
    struct pipe *q = pipe_of(r, kind, peer);
    bool send = kind == R2_LANE_UP || kind == R2_LANE_OUT;
    unsigned n = send ? q->n_sent++ : q->n_wanted++;

    (send ? q->sent : q->wanted)[n % POSTED].data = data;
    (send ? q->sent : q->wanted)[n % POSTED].len = len;
    (send ? q->sent : q->wanted)[n % POSTED].op = r->op;
    return 1;
}

static int posted(void *user, enum r2_lane_kind kind, int peer)
{
    struct pipe *q = pipe_of(user, kind, peer);
    unsigned *told = kind == R2_LANE_UP || kind == R2_LANE_OUT ? &q->told_send : &q->told_recv;
    int n = *told != q->moved && check_below(3) ? 1 : 0;

    *told += (unsigned)n;
    return n;
}

/* With the byte behind it, which says of which operation it is. */
static void deliver(struct pipe *q)
{
    unsigned at = q->moved % POSTED;

    if (q->moved == q->n_sent || q->moved == q->n_wanted || check_below(3) == 0)
        return;
    CHECK_EQ(q->sent[at].len, q->wanted[at].len);
    CHECK_EQ(q->sent[at].data[q->sent[at].len], q->wanted[at].op);
    memcpy(q->wanted[at].data, q->sent[at].data, q->sent[at].len + 1);
    q->moved++;
    moved = true;
}

static int copy(void *user, bool out, bool written, void *slot, uint64_t offset, size_t len)
{
    struct rank *r = user;

    (void)written, (void)offset;
    if (out)
        ((uint8_t *)slot)[len] = (uint8_t)r->op;
    r->device.let[out]++;
    return 1;
}

static int copied(void *user, bool out)
{
    struct device *d = &((struct rank *)user)->device;
    int n = (int)(d->done[out] - d->seen[out]);

    d->seen[out] = d->done[out];
    return n;
}

static void add(void *user, void *sum, const void *const *in, int n, size_t count)
{
    const struct rank *r = user;
    size_t len = count * r->schedule[r->op].elem;

    for (size_t i = 0; i < len; i++) {
        unsigned value = 0;

        for (int k = 0; k < n; k++)
            value += ((const uint8_t *)in[k])[i];
        ((uint8_t *)sum)[i] = (uint8_t)value;
    }
    ((uint8_t *)sum)[len] = (uint8_t)r->op;
}

static const struct r2_exec_ops exec_ops = {post, posted, copy, copied, add};

static void begin(struct rank *r)
{
    const struct r2_schedule *s = &r->schedule[r->op];

    r2_exec_begin(r->x, s, 1 + check_below(6 * s->piece * s->elem));
}

static void turn_exec(struct rank *r)
{
    int rc = 0;

    if (r->given > 0 && r->op < 0) {
        r->op = 0;
        begin(r);
        rc = 1;
    }
    if (r->op < 0)
        return;
    rc |= r2_exec_turn(r->x);
    CHECK_GE(rc, 0);
    if (r2_exec_landed(r->x) && r->device.gate < r->op + 1) {
        r->device.gate = r->op + 1;
        rc = 1;
    }
    if (r->device.gate == r->op + 1 && r->op + 1 < r->given) {
        r->op++;
        begin(r);
        rc = 1;
    }
    moved |= rc;
}

/* ---- runs */

static void make(size_t slot, int n_slots)
{
    memset(pipes, 0, sizeof(pipes));
    for (int r = 0; r < p; r++) {
        struct rank *k = &ranks[r];
        struct r2_exec_config config = {
            .p = p, .piece = slot + 8, .n_slots = n_slots, .ops = &exec_ops, .user = k};

        memset(k, 0, sizeof(*k));
        k->me = r;
        k->op = -1;
        k->slots = config.slots = malloc(config.piece * (size_t)n_slots);
        CHECK(k->slots);
        for (int out = 0; out < 2; out++) { /* numbers go round */
            uint32_t at = (uint32_t)-check_below(3000);

            k->device.let[out] = k->device.done[out] = k->device.seen[out] = at;
            k->device.numbers[out] = at;
        }
        CHECK_EQ(r2_exec_new(&k->x, &config), 0);
    }
}

static void unmake(void)
{
    for (int r = 0; r < p; r++) {
        r2_exec_free(ranks[r].x);
        free(ranks[r].slots);
        free(ranks[r].device.entries);
    }
}

static void some_weights(uint32_t *weights)
{
    uint32_t left = R2_SCHEDULE_UNIT;

    for (int r = 0; r < p - 1; r++) {
        weights[r] = check_below(3) ? (uint32_t)check_below(2 * left / (uint32_t)(p - r) + 1) : 0;
        weights[r] = check_below(2) && weights[r] ? left / (uint32_t)(p - r) : weights[r];
        left -= weights[r];
    }
    weights[p - 1] = left;
}

static void plan(int op, enum r2_schedule_kind kind, size_t slot)
{
    size_t elem = (size_t)1 << check_below(4), most = BYTES_MOST / elem, piece = slot;
    struct r2_schedule_data data = {.p = p, .elem = elem};
    uint32_t weights[P_MOST], tail = (uint32_t)check_below(R2_SCHEDULE_UNIT / 2);
    int slow = (int)check_below((uint64_t)p), rc = 0;
    unsigned chunks = 1 + (unsigned)check_below(6);

    data.count = check_below(3) ? check_below(most + 1) : check_below(most / 50);
    data.piece = check_below(2) ? piece : piece / 2;
    in_place[op] = check_below(2);
    some_weights(weights);
    for (int r = 0; r < p && rc == 0; r++) {
        struct r2_schedule *s = &ranks[r].schedule[op];

        rc = kind == R2_SCHEDULE_DIRECT ? r2_schedule_direct(s, &data, r, weights)
             : kind == R2_SCHEDULE_RING ? r2_schedule_ring(s, &data, r)
                                        : r2_schedule_r2ccl(s, &data, r, slow, tail, chunks);
    }
    CHECK_EQ(rc, 0);
}

static bool ended(void)
{
    for (int r = 0; r < p; r++) {
        const struct device *d = &ranks[r].device;

        if (ranks[r].given < ops || d->queued < d->n || d->held[0] || d->held[1] || d->held[2] ||
            (!over && !r2_exec_ended(ranks[r].x)))
            return false;
    }
    return true;
}

/* One rank may be slow. From `end` on nobody carries operations out: device/copies.h, open_all. */
static void run(unsigned end)
{
    int slow = (int)check_below(2 * (uint64_t)p), still = 0;

    over = false;
    for (unsigned turn = 0; !ended(); turn++) {
        struct rank *r = &ranks[check_below((uint64_t)p)];

        moved = false;
        if (r->me == slow && check_below(8))
            continue;
        if (turn == end) {
            for (int k = 0; k < p; k++)
                for (int out = 0; out < 2; out++)
                    ranks[k].device.let[out] += FOR_GOOD;
            over = true;
        }
        if (r->given < ops && check_below(16) == 0) {
            give(r);
            moved = true;
        }
        if (!over)
            turn_exec(r);
        for (int k = 0; k < 12; k++)
            turn_device(r, one_queue ? 0 : (int)check_below(STREAMS));
        for (int peer = 0; peer < p && !over; peer++)
            for (int sums = 0; sums < 2; sums++)
                deliver(&pipes[r->me][peer][sums]);
        still = moved ? 0 : still + 1;
        CHECK_MSG(still < STALL, "nothing moves: p %d, one queue %d, capacity %u, turn %u", p,
                  one_queue, capacity, turn);
    }
}

/* kind < 0: any, from one operation to the next. */
static void many(int kind, bool ends)
{
    for (unsigned long k = 0; k < check_rounds(60); k++) {
        bool direct = kind == R2_SCHEDULE_DIRECT;
        int least = r2_exec_least(direct ? R2_SCHEDULE_DIRECT : R2_SCHEDULE_R2CCL), rounds;
        size_t slot = 8 * (4 + check_below(30));

        p = direct ? 2 + (int)check_below(P_MOST - 1) : 3 + (int)check_below(P_MOST - 2);
        ops = 1 + (int)check_below(OPS);
        one_queue = check_below(2);
        capacity = 1 + (unsigned)check_below(check_below(2) ? 4 : 1024);
        rounds = least + (int)check_below(30);
        make(slot, rounds * r2_sizes_round(p) + (int)check_below((uint64_t)p));
        for (int op = 0; op < ops; op++)
            plan(op, kind < 0 ? (enum r2_schedule_kind)check_below(3) : (enum r2_schedule_kind)kind,
                 slot);
        run(ends ? (unsigned)check_below(6000) : UINT_MAX);
        unmake();
    }
}

TEST(direct)
{
    many(R2_SCHEDULE_DIRECT, false);
}

TEST(one_kind_after_another)
{
    many(-1, false);
}

TEST(an_end_lets_all_go)
{
    many(-1, true);
}

/* ---- how much of a queue an operation takes */

static int entries[2];

static int count_group(void *user, bool out, unsigned n)
{
    (void)user;
    entries[out] += n > 0;
    return 0;
}

static int count_copy(void *user, bool out, const struct r2_copies_rows *rows)
{
    return count_group(user, out, (unsigned)rows->n);
}

static int count_end(void *user, bool out)
{
    return count_group(user, out, 1);
}

/* The larger of both ways. */
static int entries_of(const struct r2_schedule *s, size_t slot, int n_slots)
{
    static const struct r2_direct_device counts = {
        .hold = count_group, .queue = count_copy, .tell = count_end};
    struct r2_direct_call call = {.in = (void *)MIB, .out = (void *)MIB};
    struct r2_exec_config config = {
        .p = s->p, .slots = malloc(slot * (size_t)n_slots), .piece = slot, .n_slots = n_slots};
    struct r2_ahead ahead = {.device = &counts, .call = &call, .schedule = s};
    struct r2_exec *x;

    CHECK(config.slots);
    CHECK_EQ(r2_exec_new(&x, &config), 0);
    ahead.exec = x;
    entries[0] = entries[1] = 0;
    CHECK_EQ(r2_ahead_queue(&ahead), 0);
    r2_exec_free(x);
    free(config.slots);
    return entries[0] > entries[1] ? entries[0] : entries[1];
}

/* The application is not held up: all of an operation fits the driver's queue. */
TEST(a_large_operation_fits_the_queue)
{
    static const struct {
        enum r2_schedule_kind kind;
        int p;
        uint64_t most; /* MiB */
        uint32_t weights[8];
    } cases[] = {
        {R2_SCHEDULE_DIRECT, 2, 128, {32768, 32768}},
        {R2_SCHEDULE_DIRECT, 4, 128, {16384, 16384, 16384, 16384}},
        {R2_SCHEDULE_DIRECT, 4, 128, {0, 0, 32768, 32768}},
        {R2_SCHEDULE_DIRECT, 4, 128, {6554, 19661, 19661, 19660}},
        {R2_SCHEDULE_DIRECT, 8, 128, {8192, 8192, 8192, 8192, 8192, 8192, 8192, 8192}},
        {R2_SCHEDULE_R2CCL, 4, 16, {16384, 16384, 16384, 16384}},
    };

    /* With the smallest and the largest memory. With two ranks on a node a quarter of it: half of
     * 64 MiB for each. */
    for (size_t i = 0; i < 3 * sizeof(cases) / sizeof(cases[0]); i++)
        for (uint64_t mib = 1; mib <= (i % 3 < 2 ? 1 : 0.25) * cases[i / 3].most; mib *= 2) {
            size_t k = i / 3;
            const uint32_t *weights = cases[k].weights;
            int n = cases[k].p, got, rc;
            struct r2_sizes_window w =
                r2_sizes_window(n, i % 3 == 1 ? UINT64_MAX : 0, 1 + (i % 3 == 2));
            struct r2_schedule_data data = {.p = n, .count = mib * MIB / 4, .elem = 4};
            struct r2_schedule s;

            data.piece = r2_sizes_piece(w.slot, n, mib * MIB, weights);
            rc = cases[k].kind == R2_SCHEDULE_DIRECT
                     ? r2_schedule_direct(&s, &data, 0, weights)
                     : r2_schedule_r2ccl(&s, &data, 1, 0, R2_SCHEDULE_UNIT / 2, 16);
            CHECK_EQ(rc, 0);
            got = entries_of(&s, w.slot + R2_SIZES_BEHIND, w.n_slots);
            CHECK_MSG(got < QUEUE, "case %zu, %llu MiB: %d entries", k, (unsigned long long)mib,
                      got);
        }
}

int main(int argc, char **argv)
{
    return check_main(argc, argv);
}
