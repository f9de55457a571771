#include "plan/schedule.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

#define GRAIN 64 /* bytes: a cache line */
#define PIECE_MOST (UINT64_C(1) << 30)
#define COUNT_MOST (UINT64_C(1) << 46)

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t up_to(uint64_t a, uint64_t unit)
{
    return (a + unit - 1) / unit;
}

/* Where the part `share` of `whole` ends within a round of `len` elements. */
static uint64_t cut(const struct r2_schedule *s, uint64_t len, uint64_t share, uint64_t whole)
{
    uint64_t at = len * share / whole;

    return share == whole ? len : at - at % s->grain;
}

static int begin(struct r2_schedule *s, const struct r2_schedule_data *data, int me,
                 enum r2_schedule_kind kind)
{
    if (data->p < 1 || data->p > R2_SCHEDULE_RANKS || me < 0 || me >= data->p || data->elem < 1 ||
        data->elem > GRAIN || data->piece < data->elem || data->piece > PIECE_MOST ||
        data->count > COUNT_MOST)
        return -EINVAL;
    memset(s, 0, sizeof(*s));
    s->kind = kind;
    s->me = me;
    s->p = data->p;
    s->count = data->count;
    s->elem = data->elem;
    s->piece = data->piece / data->elem;
    s->grain = GRAIN % data->elem == 0 ? GRAIN / data->elem : 1;
    s->slow = -1;
    s->all.at = s->most.at = -1;
    if (s->piece < 16 * s->grain)
        s->grain = 1;
    for (int i = 1; i < s->p; i++) {
        s->turns[i - 1] = (me + i) % s->p;
        s->peers[i - 1] = i - 1 < me ? i - 1 : i;
    }
    return 0;
}

/* Rounds of equal size, for pieces that are at most `share` of `whole`. Cuts at multiples of the
 * grain make a piece up to one grain longer. */
static uint64_t rounds_of(const struct r2_schedule *s, uint64_t count, uint64_t share,
                          uint64_t whole)
{
    uint64_t piece = s->grain > 1 ? s->piece - 2 * s->grain : s->piece;
    uint64_t round = piece * whole / share;

    return up_to(count, round ? round : 1);
}

static uint64_t round_size(const struct r2_schedule *s, uint64_t count, uint64_t n_rounds)
{
    return n_rounds ? up_to(up_to(count, n_rounds), s->grain) * s->grain : 0;
}

/* --- direct --------------------------------------------------------------------------------- */

int r2_schedule_direct(struct r2_schedule *s, const struct r2_schedule_data *data, int me,
                       const uint32_t *weights)
{
    uint32_t sum = 0, most = 0;
    int rc = begin(s, data, me, R2_SCHEDULE_DIRECT);

    if (rc)
        return rc;
    for (int i = 0; i < s->p; i++) {
        if (weights[i] > R2_SCHEDULE_UNIT - sum)
            return -EINVAL;
        if (weights[i] == 0)
            continue;
        if (i <= me)
            s->first = s->n_owners + 1;
        s->owners[s->n_owners] = i;
        s->cut[s->n_owners++] = sum;
        sum += weights[i];
        most = weights[i] > most ? weights[i] : most;
    }
    if (sum != R2_SCHEDULE_UNIT)
        return -EINVAL;
    s->cut[s->n_owners] = sum;
    s->first %= s->n_owners;
    s->n_rounds = rounds_of(s, s->count, most, R2_SCHEDULE_UNIT);
    s->all.round = round_size(s, s->count, s->n_rounds);
    s->n_rounds = s->n_rounds ? up_to(s->count, s->all.round) : 0;
    s->n_steps = s->n_rounds * (uint64_t)s->n_owners;
    return 0;
}

static void direct_step(const struct r2_schedule *s, uint64_t index, struct r2_step *step)
{
    int k = (s->first + (int)(index % (uint64_t)s->n_owners)) % s->n_owners;
    int owner = s->owners[k];
    uint64_t from, len;

    step->round = index / (uint64_t)s->n_owners;
    from = step->round * s->all.round;
    len = least(s->all.round, s->count - from);
    step->offset = from + cut(s, len, s->cut[k], R2_SCHEDULE_UNIT);
    step->count = from + cut(s, len, s->cut[k + 1], R2_SCHEDULE_UNIT) - step->offset;
    step->own = R2_STEP_INPUT;
    if (owner != s->me) {
        step->up = step->down = owner;
        return;
    }
    step->own_at = s->me;
    step->in = s->peers;
    step->out = s->turns;
    step->n_in = step->n_out = s->p - 1;
}

/* --- rings ---------------------------------------------------------------------------------- */

static void make_ring(const struct r2_schedule *s, struct r2_schedule_part *part, int without)
{
    int p = s->p;

    part->m = without < 0 ? p : p - 1;
    if (s->me == without)
        return;
    part->at = s->me - (without >= 0 && without < s->me);
    part->next = (s->me + 1) % p;
    part->prev = (s->me + p - 1) % p;
    if (part->next == without)
        part->next = (part->next + 1) % p;
    if (part->prev == without)
        part->prev = (part->prev + p - 1) % p;
}

static uint64_t ring_steps(const struct r2_schedule_part *part)
{
    return part->at < 0 || !part->count ? 0 : 2 * (uint64_t)part->m - 1;
}

/* First m steps that reduce: block `at`, at - 1, ... The last of them makes the sum of block at
 * + 1. Then m - 1 that receive sums: block `at`, at - 1, ... `t`: which step of the round; `base`:
 * the list's index of step 0. */
static void ring_step(const struct r2_schedule *s, const struct r2_schedule_part *part, uint64_t t,
                      uint64_t base, struct r2_step *step)
{
    uint64_t m = (uint64_t)part->m, turn = t % m;
    uint64_t block = ((uint64_t)part->at + m - turn) % m;
    uint64_t from = step->round * part->round, len;
    bool last = turn == m - 1;

    from = least(from, part->count);
    len = least(part->round, part->count - from);
    step->offset = part->begin + from + cut(s, len, block, m);
    step->count = part->begin + from + cut(s, len, block + 1, m) - step->offset;
    if (t >= m) { /* whose next rank has made the sum, does not go on */
        step->reader = turn == 0 ? base + 1 : 0; /* sent straight from the input */
        step->down = part->prev;
        step->out = &part->next;
        step->n_out = turn + 2 < m;
        return;
    }
    step->own = R2_STEP_INPUT;
    step->in = &part->prev;
    step->n_in = step->own_at = turn > 0;
    step->up = last ? -1 : part->next;
    step->out = &part->next;
    step->n_out = last && m > 1;
}

int r2_schedule_ring(struct r2_schedule *s, const struct r2_schedule_data *data, int me)
{
    int rc = begin(s, data, me, R2_SCHEDULE_RING);

    if (rc)
        return rc;
    make_ring(s, &s->all, -1);
    s->all.count = s->count;
    s->n_rounds = rounds_of(s, s->count, 1, (uint64_t)s->p);
    s->all.round = round_size(s, s->count, s->n_rounds);
    s->n_rounds = s->n_rounds ? up_to(s->count, s->all.round) : 0;
    s->n_rounds_body = s->n_rounds;
    s->n_body = s->n_steps = s->n_rounds * ring_steps(&s->all);
    return 0;
}

/* --- R2CCL-AllReduce ------------------------------------------------------------------------ */

int r2_schedule_r2ccl(struct r2_schedule *s, const struct r2_schedule_data *data, int me, int slow,
                      uint32_t tail, unsigned int chunks)
{
    uint64_t parts[2];
    int rc = begin(s, data, me, R2_SCHEDULE_R2CCL);

    if (rc)
        return rc;
    if (s->p < 3 || slow < 0 || slow >= s->p || chunks < 1 || tail >= R2_SCHEDULE_UNIT)
        return -EINVAL;
    s->slow = slow;
    s->helper = (slow + 1) % s->p;
    make_ring(s, &s->all, -1);
    make_ring(s, &s->most, slow);
    s->most.count = s->count * tail / R2_SCHEDULE_UNIT;
    s->all.count = s->most.begin = s->count - s->most.count;
    s->most.begin -= s->most.begin % s->grain;
    s->all.count = s->most.begin;
    s->most.count = s->count - s->most.begin;
    parts[0] = rounds_of(s, s->all.count, 1, (uint64_t)s->all.m);
    parts[1] = rounds_of(s, s->most.count, 1, (uint64_t)s->most.m);
    s->n_rounds_body = parts[0] > parts[1] ? parts[0] : parts[1];
    s->all.round = round_size(s, s->all.count, s->n_rounds_body);
    s->most.round = round_size(s, s->most.count, s->n_rounds_body);
    s->n_body = s->n_rounds_body * (ring_steps(&s->all) + ring_steps(&s->most));
    s->n_pieces = up_to(s->most.count, s->piece);
    s->chunk = up_to(s->n_pieces, chunks);
    s->n_rounds = s->n_rounds_body + s->n_pieces + s->chunk;
    s->n_steps = s->n_body + s->n_pieces * (me == slow || me == s->helper ? 2 : 1);
    return 0;
}

/* Where in the list the slow rank and the helper bring piece `i` of the tail together. Round `r` of
 * the tail adds up piece r, then sends the sum of piece r - chunk. */
static uint64_t tail_added(const struct r2_schedule *s, uint64_t i)
{
    return s->n_body + i + (i > s->chunk ? i - s->chunk : 0);
}

static void tail_piece(const struct r2_schedule *s, uint64_t i, bool sum, struct r2_step *step)
{
    step->round = s->n_rounds_body + i + (sum ? s->chunk : 0);
    step->offset = s->most.begin + i * s->piece;
    step->count = least(s->piece, s->count - step->offset);
}

/* The slow rank's contribution meets the sum of the others. */
static void tail_add(const struct r2_schedule *s, uint64_t i, struct r2_step *step)
{
    tail_piece(s, i, false, step);
    step->after = s->n_body;
    if (s->me == s->slow) {
        step->own = R2_STEP_INPUT;
        step->up = s->helper;
    } else {
        step->own = R2_STEP_OUTPUT;
        step->in = &s->slow;
        step->n_in = 1;
    }
}

/* The sum goes along the ring of all, from the helper to the slow rank, which comes last. */
static void tail_sum(const struct r2_schedule *s, uint64_t i, struct r2_step *step)
{
    uint64_t end = least((i / s->chunk + 1) * s->chunk, s->n_pieces);

    tail_piece(s, i, true, step);
    step->after = s->n_body;
    step->out = &s->all.next;
    step->n_out = s->me != s->slow;
    if (s->me == s->helper) {
        step->own = R2_STEP_OUTPUT;
        step->after = tail_added(s, end - 1) + 1;
    } else {
        step->down = s->all.prev;
    }
    if (s->me == s->slow)
        step->after = tail_added(s, i) + 1;
}

static void tail_step(const struct r2_schedule *s, uint64_t i, struct r2_step *step)
{
    uint64_t both = s->n_pieces - s->chunk; /* rounds with two steps */

    if (s->me != s->slow && s->me != s->helper)
        tail_sum(s, i, step);
    else if (i < s->chunk)
        tail_add(s, i, step);
    else if (i >= s->chunk + 2 * both)
        tail_sum(s, i - s->n_pieces, step);
    else if ((i - s->chunk) % 2 == 0)
        tail_add(s, s->chunk + (i - s->chunk) / 2, step);
    else
        tail_sum(s, (i - s->chunk) / 2, step);
}

/* --- all ------------------------------------------------------------------------------------ */

void r2_schedule_step(const struct r2_schedule *s, uint64_t index, struct r2_step *step)
{
    uint64_t all = ring_steps(&s->all), both = all + ring_steps(&s->most), t;

    memset(step, 0, sizeof(*step));
    step->up = step->down = -1;
    if (s->kind == R2_SCHEDULE_DIRECT) {
        direct_step(s, index, step);
        return;
    }
    if (index >= s->n_body) {
        tail_step(s, index - s->n_body, step);
        return;
    }
    t = index % both;
    step->round = index / both;
    if (t < all)
        ring_step(s, &s->all, t, index - t, step);
    else
        ring_step(s, &s->most, t - all, index - t + all, step);
}
