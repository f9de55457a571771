/* Schedules, carried out with symbols in place of numbers: every rank ends with every contribution
 * once for every element, whatever the order of events, and nothing waits for ever. Input and
 * output are one buffer. A stream has no buffer: a message moves when its sender has it and its
 * receiver has posted for it, both in the order of their lists. Rung 1.
 */
#include <math.h>

#include "check.h"
#include "plan/schedule.h"
#include "plan/shard.h"

#define RANKS 64

/* What an element consists of. */
struct sum {
    uint64_t ranks;
    bool doubled;  /* some contribution more than once */
    bool in_order; /* by ranks, ascending */
};

struct task {
    struct r2_step step;
    int received, sent; /* contributions, sums */
    bool up_done, has_sum, ended;
    struct sum *in;  /* n_in x count */
    struct sum *acc; /* the contribution, or NULL: own input, read when it is sent */
};

struct rank {
    struct r2_schedule s;
    struct task *tasks;
    uint64_t ended; /* the first that many have */
    struct sum *data;
};

/* Messages from one rank to another, contributions or sums, by the two lists. */
struct stream {
    int from, to;
    bool sums;
    uint64_t n, n_received, moved, started;
    uint64_t *sender, *receiver; /* index of the step */
};

static struct stream all_streams[RANKS][RANKS][2], *streams[RANKS * RANKS * 2];
static int n_streams;

static struct rank ranks[RANKS];
static int p;
static uint64_t count, window;

static struct sum both(struct sum a, struct sum b)
{

    bool before = 64 - __builtin_clzll(a.ranks) <= __builtin_ctzll(b.ranks);
    return (struct sum){a.ranks | b.ranks, a.doubled || b.doubled || a.ranks & b.ranks,
                        a.in_order && b.in_order && before};
}

static bool begun(const struct rank *r, const struct task *t)
{
    return t->step.round < r->tasks[r->ended].step.round + window && t->step.after <= r->ended;
}

static bool complete(const struct task *t)
{
    return t->received == t->step.n_in;
}

static void add_up(const struct rank *r, struct task *t)
{
    const struct r2_step *step = &t->step;

    t->acc = calloc(step->count, sizeof(*t->acc));
    for (uint64_t e = 0; e < step->count; e++)
        for (int k = 0, n = 0; k <= step->n_in; k++) {
            bool own = k == step->own_at;
            struct sum one;

            if (own && step->own == R2_STEP_NOTHING)
                continue;
            one = own ? r->data[step->offset + e]
                      : t->in[(uint64_t)(k - (k > step->own_at)) * step->count + e];
            t->acc[e] = n++ ? both(t->acc[e], one) : one;
        }
}

static void look(const struct rank *r, struct task *t)
{
    const struct r2_step *step = &t->step;
    bool makes = step->up < 0 && step->down < 0, sends_only = step->up >= 0 && step->down < 0;

    if (complete(t) && step->n_in && !t->acc)
        add_up(r, t);
    if (makes && complete(t) && !t->has_sum) {
        t->has_sum = true;
        if (t->acc)
            memcpy(r->data + step->offset, t->acc, step->count * sizeof(*t->acc));
    }
    t->ended = (step->up < 0 || t->up_done) && (t->has_sum || sends_only) && t->sent == step->n_out;
    if (t->ended) {
        free(t->acc);
        free(t->in);
        t->acc = t->in = NULL;
    }
}

/* After something has moved: adds up, notes what has ended. */
static void advance(struct rank *r)
{
    uint64_t before;

    do {
        before = r->ended;
        for (uint64_t i = before;
             r->tasks[i].step.round < r->tasks[before].step.round + window && i < r->s.n_steps; i++)
            if (!r->tasks[i].ended && begun(r, &r->tasks[i]))
                look(r, &r->tasks[i]);
        while (r->ended < r->s.n_steps && r->tasks[r->ended].ended)
            r->ended++;
    } while (r->ended != before);
}

/* Whether message `k` of the stream can start: its data is there, its receiver has posted for it.
 */
static bool ready(const struct stream *m, uint64_t k)
{
    const struct rank *from = &ranks[m->from], *to = &ranks[m->to];
    const struct task *a = &from->tasks[m->sender[k]], *b = &to->tasks[m->receiver[k]];

    if (!begun(from, a) || !begun(to, b))
        return false;
    if (!m->sums)
        return complete(a);
    if (b->step.reader && !to->tasks[b->step.reader - 1].ended)
        return false;
    return a->has_sum && (b->step.up < 0 || b->up_done);
}

/* The next message of the stream has arrived. */
static void deliver(struct stream *m)
{
    struct rank *from = &ranks[m->from], *to = &ranks[m->to];
    struct task *a = &from->tasks[m->sender[m->moved]], *b = &to->tasks[m->receiver[m->moved]];
    const struct sum *data = from->data + a->step.offset;
    uint64_t n = a->step.count;
    int place = 0;

    m->moved++;
    if (m->sums) {
        memcpy(to->data + b->step.offset, data, n * sizeof(*data));
        b->has_sum = true;
        a->sent++;
    } else {
        while (b->step.in[place] != m->from)
            place++;
        if (!b->in)
            b->in = calloc((size_t)b->step.n_in * n, sizeof(*b->in));
        memcpy(b->in + (uint64_t)place * n, a->acc ? a->acc : data, n * sizeof(*data));
        b->received++;
        a->up_done = true;
    }
    advance(from);
    advance(to);
}

static void append(uint64_t **list, uint64_t *n, uint64_t index)
{
    if ((*n & (*n - 1)) == 0)
        *list = realloc(*list, (*n ? 2 * *n : 1) * sizeof(**list));
    (*list)[(*n)++] = index;
}

static void sends(int from, int to, bool sums, uint64_t index)
{
    struct stream *m = &all_streams[from][to][sums];

    append(&m->sender, &m->n, index);
}

static void receives(int from, int to, bool sums, uint64_t index)
{
    struct stream *m = &all_streams[from][to][sums];

    append(&m->receiver, &m->n_received, index);
}

/* Both sides of a stream have the same pieces, in the same order. Returns the streams that are
 * used. */
static int make_streams(void)
{
    int n = 0;

    memset(all_streams, 0, sizeof(all_streams));
    for (int r = 0; r < p; r++)
        for (uint64_t i = 0; i < ranks[r].s.n_steps; i++) {
            const struct r2_step *step = &ranks[r].tasks[i].step;

            for (int k = 0; step->count && k < step->n_out; k++)
                sends(r, step->out[k], true, i);
            for (int k = 0; step->count && k < step->n_in; k++)
                receives(step->in[k], r, false, i);
            if (step->count && step->up >= 0)
                sends(r, step->up, false, i);
            if (step->count && step->down >= 0)
                receives(step->down, r, true, i);
        }
    for (int i = 0; i < p * p * 2; i++) {
        struct stream *m = &all_streams[i / 2 / p][i / 2 % p][i % 2];

        m->from = i / 2 / p;
        m->to = i / 2 % p;
        m->sums = i % 2;
        CHECK_EQ(m->n, m->n_received);
        CHECK(m->n == 0 || m->from != m->to);
        for (uint64_t k = 0; k < m->n; k++) {
            const struct r2_step *a = &ranks[m->from].tasks[m->sender[k]].step;
            const struct r2_step *b = &ranks[m->to].tasks[m->receiver[k]].step;

            CHECK(a->offset == b->offset && a->count == b->count && a->round == b->round);
        }
        if (m->n)
            streams[n++] = m;
    }
    return n;
}

static void load(struct rank *r, int me, size_t piece)
{
    uint64_t round = 0;

    CHECK_EQ(r->s.me, me);
    r->tasks = calloc(r->s.n_steps + 1, sizeof(*r->tasks));
    r->data = calloc(count + 1, sizeof(*r->data));
    r->ended = 0;
    for (uint64_t e = 0; e < count; e++)
        r->data[e] = (struct sum){UINT64_C(1) << me, false, true};
    for (uint64_t i = 0; i < r->s.n_steps; i++) {
        struct r2_step *step = &r->tasks[i].step;

        r2_schedule_step(&r->s, i, step);
        CHECK_LE(step->after, i);
        CHECK_LE(step->count * r->s.elem, piece);
        CHECK_LE(step->offset + step->count, count);
        CHECK(step->round == round || step->round > round);
        round = step->round;
        r->tasks[i].ended = step->count == 0;
    }
    CHECK(r->s.n_steps == 0 || round < r->s.n_rounds);
    r->tasks[r->s.n_steps].step.round = r->s.n_rounds;
    advance(r);
}

static void begin(size_t piece)
{
    for (int i = 0; i < p; i++)
        load(&ranks[i], i, piece);
    n_streams = make_streams();
}

static void check_end(void)
{
    for (int i = 0; i < p; i++) {
        CHECK_MSG(ranks[i].ended == ranks[i].s.n_steps, "rank %d of %d waits for ever at step %llu",
                  i, p, (unsigned long long)ranks[i].ended);
        for (uint64_t e = 0; e < count; e++) {
            struct sum got = ranks[i].data[e];

            CHECK_MSG(got.ranks == UINT64_MAX >> (64 - p) && !got.doubled,
                      "rank %d of %d, element %llu of %llu: ranks %llx%s", i, p,
                      (unsigned long long)e, (unsigned long long)count,
                      (unsigned long long)got.ranks, got.doubled ? ", one twice" : "");
            CHECK(got.in_order || ranks[i].s.kind != R2_SCHEDULE_DIRECT);
        }
        free(ranks[i].tasks);
        free(ranks[i].data);
    }
    while (n_streams--) {
        free(streams[n_streams]->sender);
        free(streams[n_streams]->receiver);
    }
}

/* `ranks[].s` are made. Streams move in a random order until none can. */
static void carry_out(size_t piece)
{
    bool moved = true;

    begin(piece);
    while (moved) {
        uint64_t start = check_random();

        moved = false;
        for (int i = 0; i < n_streams; i++) {
            struct stream *m =
                streams[(start % (uint64_t)n_streams + (uint64_t)i) % (uint64_t)n_streams];
            uint64_t burst = 1 + check_random() % 3;

            while (burst-- && m->moved < m->n && ready(m, m->moved)) {
                deliver(m);
                moved = true;
            }
        }
    }
    check_end();
}

/* --- in time -------------------------------------------------------------------------------- */

/* Ports that carry one message at a time each way, `rates` elements a unit of time, and a network
 * between them that takes no time. Up to two messages of a stream are under way. */
static double rates[RANKS], out_free[RANKS], in_free[RANKS], due[RANKS * RANKS * 2][2];

static bool start(struct stream *m, double now, double *until)
{
    double len, done;

    if (m->started == m->n || m->started - m->moved == 2 || !ready(m, m->started))
        return false;
    len = (double)ranks[m->from].tasks[m->sender[m->started]].step.count;
    out_free[m->from] = fmax(now, out_free[m->from]);
    done = fmax(out_free[m->from], in_free[m->to]) + len / rates[m->to];
    in_free[m->to] = done;
    out_free[m->from] += len / rates[m->from];
    until[m->started++ % 2] = fmax(done, out_free[m->from]);
    return true;
}

/* The time that the schedules in `ranks` take. */
static double take_time(size_t piece)
{
    double now = 0;
    int turn = 0;

    begin(piece);
    memset(out_free, 0, sizeof(out_free));
    memset(in_free, 0, sizeof(in_free));
    for (;;) {
        bool started = true;
        int next = -1;

        while (started) {
            started = false;
            for (int i = 0; i < n_streams; i++) {
                int k = (i + turn) % n_streams;

                started |= start(streams[k], now, due[k]);
            }
            turn++;
        }
        for (int i = 0; i < n_streams; i++)
            if (streams[i]->started > streams[i]->moved &&
                (next < 0 || due[i][streams[i]->moved % 2] < due[next][streams[next]->moved % 2]))
                next = i;
        if (next < 0)
            break;
        now = due[next][streams[next]->moved % 2];
        deliver(streams[next]);
    }
    check_end();
    return now;
}

/* Some zero; now and then one has all. */
static void random_weights(uint32_t *weights)
{
    uint32_t left = R2_SCHEDULE_UNIT, all = (uint32_t)check_random() % 8 == 0;

    for (int i = 0; i < p; i++)
        weights[i] = 0;
    while (left > 0) {
        int i = (int)(check_random() % (uint64_t)p);
        uint32_t some =
            all ? left : 1 + (uint32_t)(check_random() % (2 * R2_SCHEDULE_UNIT / (uint64_t)p));

        some = some < left ? some : left;
        weights[i] += some;
        left -= some;
    }
}

static struct r2_schedule_data some_data(void)
{
    static const size_t elems[] = {1, 2, 4, 8};
    size_t elem = elems[check_random() % 4];
    uint64_t most = p > 16 ? 200 : 1500;

    count = check_random() % 10 == 0 ? check_random() % 4 : check_random() % most;
    window = 1 + check_random() % 3;
    return (struct r2_schedule_data){
        .p = p, .count = count, .elem = elem, .piece = elem * (1 + check_random() % 60)};
}

TEST(direct_adds_every_contribution_once_in_rank_order)
{
    uint32_t weights[RANKS];

    for (p = 1; p <= RANKS; p++)
        for (int k = 0; k < (p <= 16 ? 12 : 2); k++) {
            struct r2_schedule_data data = some_data();

            random_weights(weights);
            for (int i = 0; i < p; i++)
                CHECK_EQ(r2_schedule_direct(&ranks[i].s, &data, i, weights), 0);
            carry_out(data.piece);
        }
}

TEST(the_ring_adds_every_contribution_once)
{
    for (p = 1; p <= RANKS; p++)
        for (int k = 0; k < (p <= 16 ? 8 : 1); k++) {
            struct r2_schedule_data data = some_data();

            for (int i = 0; i < p; i++)
                CHECK_EQ(r2_schedule_ring(&ranks[i].s, &data, i), 0);
            carry_out(data.piece);
        }
}

TEST(r2ccl_allreduce_adds_every_contribution_once)
{
    for (p = 3; p <= RANKS; p++)
        for (int k = 0; k < (p <= 16 ? 12 : 2); k++) {
            struct r2_schedule_data data = some_data();
            int slow = (int)(check_random() % (uint64_t)p);
            uint32_t tail = (uint32_t)(check_random() % R2_SCHEDULE_UNIT);
            unsigned int chunks = 1 + (unsigned int)(check_random() % 9);

            for (int i = 0; i < p; i++)
                CHECK_EQ(r2_schedule_r2ccl(&ranks[i].s, &data, i, slow, tail, chunks), 0);
            carry_out(data.piece);
        }
}

/* With pieces of a size that is used, the bytes of each rank are as its weight says. */
TEST(the_weights_decide_how_much_each_rank_sends)
{
    const uint32_t weights[] = {20000, 0, 12345, 33191};
    struct r2_schedule_data data = {.p = 4, .count = 10000001, .elem = 4, .piece = 64 << 10};

    for (int i = 0; i < 4; i++) {
        double share = weights[i] / 65536.0, want = 1 + 2 * share, sent = 0, got = 0;
        struct r2_schedule *s = &ranks[0].s;

        CHECK_EQ(r2_schedule_direct(s, &data, i, weights), 0);
        for (uint64_t k = 0; k < s->n_steps; k++) {
            struct r2_step step;

            r2_schedule_step(s, k, &step);
            sent += (double)step.count * ((step.up >= 0) + step.n_out);
            got += (double)step.count * ((step.down >= 0) + step.n_in);
        }
        CHECK(sent == got);
        CHECK_MSG(sent / 1e7 > want - 0.002 && sent / 1e7 < want + 0.002, "rank %d: %f, not %f", i,
                  sent / 1e7, want);
    }
}

/* p ranks, one of them slow; `share`: what it has left. */
static struct r2_shard_input ports(int ranks_there, double share)
{
    static struct r2_shard_node nodes[RANKS];

    p = ranks_there;
    count = 60000;
    window = 4;
    for (int i = 0; i < p; i++) {
        rates[i] = i == 1 ? share : 1;
        nodes[i] = (struct r2_shard_node){.out = rates[i] * 4e9, .in = rates[i] * 4e9};
    }
    return (struct r2_shard_input){
        .p = p, .nodes = nodes, .bytes = count * 4, .piece = 1600 / (size_t)p};
}

TEST(direct_and_the_ring_take_the_time_that_the_model_says)
{
    static const struct {
        int p;
        double share;
    } cases[] = {{4, 1}, {4, 0.75}, {4, 0.5}, {8, 0.75}, {6, 2.0 / 3}};

    for (int k = 0; k < 5; k++) {
        struct r2_shard_input in = ports(cases[k].p, cases[k].share);
        struct r2_schedule_data data = {.p = p, .count = count, .elem = 4, .piece = in.piece};
        uint32_t weights[RANKS];
        double direct, ring;

        CHECK(r2_shard_weights(&in, weights));
        for (int i = 0; i < p; i++)
            CHECK_EQ(r2_schedule_direct(&ranks[i].s, &data, i, weights), 0);
        direct = take_time(data.piece) / r2_shard_ns(&in, weights);
        for (int i = 0; i < p; i++)
            CHECK_EQ(r2_schedule_ring(&ranks[i].s, &data, i), 0);
        ring = take_time(data.piece) / r2_shard_ring_ns(&in);
        CHECK_MSG(direct > 0.98 && direct < 1.02, "%d ranks, %.2f left: direct takes %.3f", p,
                  cases[k].share, direct);
        CHECK_MSG(ring > 0.99 && ring < 1.01, "%d ranks, %.2f left: the ring takes %.3f", p,
                  cases[k].share, ring);
    }
}

/* Measured by the authors at six nodes, a third of one lost: 4 GiB, beside the healthy ring. */
TEST(r2ccl_allreduce_takes_the_time_that_its_authors_measured)
{
    static const double measured[] = {1.599, 1.458, 1.376, 1.341, 1.329};
    struct r2_shard_input in = ports(6, 2.0 / 3);
    struct r2_schedule_data data = {.p = p, .count = count, .elem = 4, .piece = in.piece};

    for (int k = 0; k < 5; k++) {
        double got;

        for (int i = 0; i < p; i++)
            CHECK_EQ(r2_schedule_r2ccl(&ranks[i].s, &data, i, 1, r2_shard_tail(&in, 1), 1u << k),
                     0);
        got = take_time(data.piece) / (10.0 / 6 * (double)count);
        CHECK_MSG(fabs(got / measured[k] - 1) < 0.02, "%d chunks: %.3f, not %.3f", 1 << k, got,
                  measured[k]);
    }
}

TEST(a_large_schedule_takes_no_memory_and_its_end_is_the_datas_end)
{
    uint32_t weights[R2_SCHEDULE_RANKS];
    struct r2_schedule_data data = {
        .p = R2_SCHEDULE_RANKS, .count = UINT64_C(1) << 40, .elem = 8, .piece = 512 << 10};
    struct r2_schedule *s = &ranks[0].s;
    struct r2_step step;
    uint64_t end = 0;

    for (int i = 0; i < R2_SCHEDULE_RANKS; i++)
        weights[i] = R2_SCHEDULE_UNIT / R2_SCHEDULE_RANKS;
    CHECK_EQ(r2_schedule_direct(s, &data, 7, weights), 0);
    for (uint64_t i = s->n_steps - R2_SCHEDULE_RANKS; i < s->n_steps; i++) {
        r2_schedule_step(s, i, &step);
        end = step.offset + step.count > end ? step.offset + step.count : end;
    }
    CHECK_EQ(end, data.count);
}

TEST(what_makes_no_sense_is_refused)
{
    struct r2_schedule_data data = {.p = 4, .count = 100, .elem = 4, .piece = 64};
    const uint32_t less[] = {1, 2, 3, 4}, more[] = {65536, 1, 0, 0}, fine[] = {65536, 0, 0, 0};
    struct r2_schedule *s = &ranks[0].s;

    CHECK_EQ(r2_schedule_direct(s, &data, 0, fine), 0);
    CHECK_EQ(r2_schedule_direct(s, &data, 0, less), -EINVAL);
    CHECK_EQ(r2_schedule_direct(s, &data, 0, more), -EINVAL);
    CHECK_EQ(r2_schedule_direct(s, &data, 4, fine), -EINVAL);
    CHECK_EQ(r2_schedule_r2ccl(s, &data, 0, 4, 100, 1), -EINVAL);
    CHECK_EQ(r2_schedule_r2ccl(s, &data, 0, 1, 65536, 1), -EINVAL);
    CHECK_EQ(r2_schedule_r2ccl(s, &data, 0, 1, 100, 0), -EINVAL);
    data.piece = 3;
    CHECK_EQ(r2_schedule_ring(s, &data, 0), -EINVAL);
    data = (struct r2_schedule_data){.p = 2, .count = 100, .elem = 4, .piece = 64};
    CHECK_EQ(r2_schedule_r2ccl(s, &data, 0, 1, 100, 1), -EINVAL);
    data.p = R2_SCHEDULE_RANKS + 1;
    CHECK_EQ(r2_schedule_ring(s, &data, 0), -EINVAL);
}
