/* The executor of a schedule alone: all ranks in one process, over queues in memory that deliver
 * late and in any order between lanes (rung 2). Every kind of schedule ends, in every window, with
 * the sum of all ranks everywhere. */
#define _GNU_SOURCE
#include "check.h"

#include "direct/exec.h"
#include "plan/schedule.h"
#include "plan/sizes.h"

#define P_MOST 12
#define COUNT_MOST 4000
#define OPS 3

/* Messages from one rank to another on one stream. Sends wait for receives, in order. */
struct pipe {
    struct {
        void *data;
        size_t len;
    } sent[256], wanted[256];
    unsigned n_sent, n_wanted, moved; /* so many of both have met */
    unsigned told_send, told_recv;
};

static struct pipe pipes[P_MOST][P_MOST][2]; /* [from][to][sums] */

struct rank {
    int me, p;
    struct r2_exec *x;
    struct r2_schedule schedule[OPS];
    uint32_t in[OPS][COUNT_MOST], out[OPS][COUNT_MOST];
    int op; /* the one under way */
    uint64_t base;
    uint64_t copies[2]; /* steps whose copies have begun, or that have none */
    unsigned begun[2], told[2];
    char *slots;
};

static struct rank ranks[P_MOST];
static bool in_place;

static struct pipe *pipe_of(const struct rank *r, enum r2_lane_kind kind, int peer)
{
    bool sums = kind == R2_LANE_DOWN || kind == R2_LANE_OUT;
    bool send = kind == R2_LANE_UP || kind == R2_LANE_OUT;

    return send ? &pipes[r->me][peer][sums] : &pipes[peer][r->me][sums];
}

static int post(void *user, enum r2_lane_kind kind, int peer, void *data, size_t len)
{
    struct pipe *q = pipe_of(user, kind, peer);

    if (check_below(4) == 0)
        return 0; /* not now */
    if (kind == R2_LANE_UP || kind == R2_LANE_OUT) {
        q->sent[q->n_sent % 256].data = data;
        q->sent[q->n_sent++ % 256].len = len;
    } else {
        q->wanted[q->n_wanted % 256].data = data;
        q->wanted[q->n_wanted++ % 256].len = len;
    }
    return 1;
}

static int posted(void *user, enum r2_lane_kind kind, int peer)
{
    struct pipe *q = pipe_of(user, kind, peer);
    unsigned *told = kind == R2_LANE_UP || kind == R2_LANE_OUT ? &q->told_send : &q->told_recv;

    if (*told == q->moved || check_below(3) == 0)
        return 0;
    ++*told;
    return 1;
}

/* Moves a message, if its receive is posted. */
static void deliver(struct pipe *q)
{
    unsigned at = q->moved % 256;

    if (q->moved == q->n_sent || q->moved == q->n_wanted || check_below(3) == 0)
        return;
    CHECK_EQ(q->sent[at].len, q->wanted[at].len);
    memcpy(q->wanted[at].data, q->sent[at].data, q->sent[at].len);
    q->moved++;
}

/* A device may have been told of all copies before the first step began: they come in list order,
 * from and to the slots that were said then. */
static void check_order(struct rank *r, bool out, bool written, const void *slot, uint64_t offset,
                        size_t len)
{
    struct r2_step step;

    do {
        CHECK_LT(r->copies[out], r->schedule[r->op].n_steps);
        r2_schedule_step(&r->schedule[r->op], r->copies[out]++, &step);
    } while (step.count == 0 || (out ? step.own == R2_STEP_NOTHING : !r2_exec_lands(&step)));
    CHECK(slot == r2_exec_slot(r->x, r->base + r->copies[out] - 1));
    CHECK_EQ(offset, step.offset * r->schedule[r->op].elem);
    CHECK_EQ(len, step.count * r->schedule[r->op].elem);
    if (out)
        CHECK_EQ(written, step.own == R2_STEP_OUTPUT);
}

static int copy(void *user, bool out, bool written, void *slot, uint64_t offset, size_t len)
{
    struct rank *r = user;

    CHECK_LE(offset + len, COUNT_MOST * sizeof(r->in[0][0]));
    check_order(r, out, written, slot, offset, len);
    if (out)
        memcpy(slot, (char *)(written || in_place ? r->out : r->in)[r->op] + offset, len);
    else
        memcpy((char *)r->out[r->op] + offset, slot, len);
    r->begun[out]++;
    return 1;
}

static int copied(void *user, bool out)
{
    struct rank *r = user;

    if (r->told[out] == r->begun[out] || check_below(2) == 0)
        return 0;
    r->told[out]++;
    return 1;
}

static void add(void *user, void *sum, const void *const *in, int n, size_t count)
{
    (void)user;
    for (size_t i = 0; i < count; i++) {
        uint32_t value = 0;

        for (int k = 0; k < n; k++)
            value += ((const uint32_t *)in[k])[i];
        ((uint32_t *)sum)[i] = value;
    }
}

static const struct r2_exec_ops ops = {post, posted, copy, copied, add};

/* Ranks have so many rounds each, or more. */
static void make(int p, size_t piece, int rounds)
{
    memset(pipes, 0, sizeof(pipes));
    for (int r = 0; r < p; r++) {
        struct rank *k = &ranks[r];
        struct r2_exec_config config = {.p = p,
                                        .piece = piece,
                                        .n_slots =
                                            (rounds + (int)check_below(4)) * r2_sizes_round(p),
                                        .ops = &ops,
                                        .user = k};

        memset(k, 0, sizeof(*k));
        k->me = r;
        k->p = p;
        k->slots = malloc(piece * (size_t)config.n_slots);
        CHECK(k->slots);
        config.slots = k->slots;
        CHECK_EQ(r2_exec_new(&k->x, &config), 0);
    }
}

static void unmake(int p)
{
    for (int r = 0; r < p; r++) {
        r2_exec_free(ranks[r].x);
        free(ranks[r].slots);
    }
}

static void begin(struct rank *r)
{
    const struct r2_schedule *s = &r->schedule[r->op];

    r->copies[0] = r->copies[1] = 0;
    r2_exec_begin(r->x, s, 1 + check_below(4 * s->piece * s->elem));
}

static void next_op(struct rank *r, int ops)
{
    if (r->op + 1 == ops || !r2_exec_landed(r->x))
        return;
    r->base += r->schedule[r->op].n_steps;
    memset(&r->schedule[r->op], 0xff, sizeof(r->schedule[0])); /* it is the caller's again */
    r->op++;
    begin(r);
}

static void check_sums(int p, int op, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint32_t sum = 0;

        for (int r = 0; r < p; r++)
            sum += ranks[r].in[op][i];
        for (int r = 0; r < p; r++)
            CHECK_EQ(ranks[r].out[op][i], sum);
    }
}

/* Schedules are set. Each rank begins the next operation when the one before has landed there. */
static void run(int p, int ops, const uint64_t *counts)
{
    int ended = 0;

    in_place = check_below(2);
    for (int r = 0; r < p; r++) {
        for (int op = 0; op < ops; op++)
            for (uint64_t i = 0; i < counts[op]; i++)
                ranks[r].in[op][i] = ranks[r].out[op][i] = (uint32_t)check_random();
    }
    for (int r = 0; r < p; r++)
        begin(&ranks[r]);
    for (int turn = 0; turn < 6000000 && ended < p; turn++) {
        int r = (int)check_below((uint64_t)p);

        CHECK_GE(r2_exec_turn(ranks[r].x), 0);
        next_op(&ranks[r], ops);
        for (int peer = 0; peer < p; peer++)
            for (int sums = 0; sums < 2; sums++)
                deliver(&pipes[r][peer][sums]);
        ended = 0;
        for (int k = 0; k < p; k++)
            ended += ranks[k].op == ops - 1 && r2_exec_ended(ranks[k].x);
    }
    CHECK_EQ(ended, p);
    for (int op = 0; op < ops; op++)
        check_sums(p, op, counts[op]);
}

static void random_weights(int p, uint32_t *weights)
{
    uint32_t left = R2_SCHEDULE_UNIT;

    for (int r = 0; r < p - 1; r++) {
        weights[r] = check_below(3) ? (uint32_t)check_below(left + 1) : 0;
        left -= weights[r];
    }
    weights[p - 1] = left;
}

/* A random schedule of this kind, and of what size. */
static uint64_t plan(int p, int op, size_t piece, enum r2_schedule_kind kind)
{
    struct r2_schedule_data data = {
        .p = p, .count = check_below(COUNT_MOST), .elem = 4, .piece = piece};
    uint32_t weights[P_MOST], tail = (uint32_t)check_below(R2_SCHEDULE_UNIT / 2);
    int slow = (int)check_below((uint64_t)p);
    unsigned chunks = 1 + (unsigned)check_below(6);

    random_weights(p, weights);
    for (int r = 0; r < p; r++) {
        struct r2_schedule *s = &ranks[r].schedule[op];

        if (kind == R2_SCHEDULE_DIRECT)
            CHECK_EQ(r2_schedule_direct(s, &data, r, weights), 0);
        else if (kind == R2_SCHEDULE_RING)
            CHECK_EQ(r2_schedule_ring(s, &data, r), 0);
        else
            CHECK_EQ(r2_schedule_r2ccl(s, &data, r, slow, tail, chunks), 0);
    }
    return data.count;
}

/* kind < 0: any, from one operation to the next. */
static void run_many(unsigned long rounds, int kind)
{
    for (unsigned long round = 0; round < check_rounds(rounds); round++) {
        int p = kind == R2_SCHEDULE_DIRECT || kind == R2_SCHEDULE_RING ? 2 : 3;
        int least = r2_exec_least(kind < 0 ? R2_SCHEDULE_R2CCL : (enum r2_schedule_kind)kind);
        size_t piece = 4 * (20 + check_below(200));
        uint64_t counts[OPS];
        int ops = 1 + (int)check_below(OPS);

        p += (int)check_below((uint64_t)(P_MOST + 1 - p));
        make(p, piece, least);
        for (int op = 0; op < ops; op++)
            counts[op] = plan(p, op, piece,
                              kind < 0 ? (enum r2_schedule_kind)check_below(3)
                                       : (enum r2_schedule_kind)kind);
        run(p, ops, counts);
        unmake(p);
    }
}

TEST(direct)
{
    run_many(200, R2_SCHEDULE_DIRECT);
}

TEST(ring)
{
    run_many(150, R2_SCHEDULE_RING);
}

TEST(r2ccl)
{
    run_many(150, R2_SCHEDULE_R2CCL);
}

TEST(one_kind_after_another)
{
    run_many(150, -1);
}

TEST(too_few_slots)
{
    struct r2_exec_config config = {
        .p = 4, .piece = 64, .n_slots = r2_sizes_round(4) - 1, .ops = &ops};
    struct r2_exec *x;

    CHECK_EQ(r2_exec_new(&x, &config), -EINVAL);
    CHECK(!x);
}
