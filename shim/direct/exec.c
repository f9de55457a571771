#include "direct/exec.h"

#include <errno.h>
#include <stdlib.h>

#include "plan/sizes.h"

struct flight {
    struct r2_step step; /* its `after` and `round` count those of all operations */
    size_t len;
    uint8_t *slot;     /* own piece, then the contribution, then the sum */
    int in_left;       /* contributions that have not come */
    int out_left;      /* sums that have not been sent */
    bool own_here;     /* nothing of its own, or it is in the slot */
    bool contribution; /* complete, in the slot */
    bool up_sent, sum; /* sent; the sum is in the slot */
    bool landed, ended;
};

/* Which flights use it, in list order: [done, posted) are under way, [posted, queued) wait. */
struct lane {
    uint32_t queued, posted, done;
    uint16_t *flights; /* ring of x->room */
};

struct r2_exec {
    struct r2_exec_config config;
    const struct r2_schedule *schedule;
    int me;
    uint32_t depth;            /* messages posted on a lane */
    int room;                  /* most flights; a power of two */
    struct flight *flights;    /* ring, by step index */
    uint64_t base, base_round; /* where the current operation begins, in steps and rounds of all */
    uint64_t end, end_round;   /* and where it ends */
    uint64_t first, next;      /* flights are [first, next) of all steps; first has not ended */
    uint64_t landed;           /* steps whose sum is in the output */
    uint64_t to_land;          /* the first that is not in `inward`, if it lands */
    uint64_t rounds;           /* that may be under way */
    uint64_t rows;             /* steps that may be under way: slots of own pieces */
    struct lane *lanes;        /* [p * R2_LANE_KINDS] */
    struct lane outward, inward; /* copies */
    uint8_t **free_slots;        /* of contributions */
    int n_free;
    const void **parts; /* [p] */
    uint8_t **held;     /* [room * p]: slots of contributions */
};

static struct flight *flight_of(struct r2_exec *x, uint64_t index)
{
    return &x->flights[index & (uint64_t)(x->room - 1)];
}

static struct lane *lane_of(struct r2_exec *x, enum r2_lane_kind kind, int peer)
{
    return &x->lanes[peer * R2_LANE_KINDS + (int)kind];
}

static uint8_t **held_by(struct r2_exec *x, const struct flight *f)
{
    return &x->held[(size_t)(f - x->flights) * (size_t)x->config.p];
}

/* ---- lanes */

static void enqueue(struct r2_exec *x, struct lane *lane, const struct flight *f)
{
    lane->flights[lane->queued++ & (uint32_t)(x->room - 1)] = (uint16_t)(f - x->flights);
}

static struct flight *at(struct r2_exec *x, const struct lane *lane, uint32_t place)
{
    return &x->flights[lane->flights[place & (uint32_t)(x->room - 1)]];
}

static bool waits(const struct lane *lane)
{
    return lane->posted != lane->queued;
}

/* ---- steps */

static void give_slot(struct r2_exec *x, uint8_t *slot)
{
    x->free_slots[x->n_free++] = slot;
}

static void look_ended(struct r2_exec *x, struct flight *f)
{
    if (f->ended || !f->landed || f->out_left > 0 || (f->step.up >= 0 && !f->up_sent))
        return;
    f->ended = true;
    if (f->len == 0)
        return;
    for (int i = 0; i < f->step.n_in; i++)
        give_slot(x, held_by(x, f)[i]);
}

/* Nothing of it is to come into the output any more. */
static void land(struct r2_exec *x, struct flight *f)
{
    f->landed = true;
    x->landed++;
}

static void add(struct r2_exec *x, struct flight *f)
{
    const struct r2_step *s = &f->step;
    uint8_t **held = held_by(x, f);
    int n = 0;

    for (int i = 0; i <= s->n_in; i++) {
        if (s->own != R2_STEP_NOTHING && i == s->own_at)
            x->parts[n++] = f->slot;
        if (i < s->n_in)
            x->parts[n++] = held[i];
    }
    x->config.ops->add(x->config.user, f->slot, x->parts, n, (size_t)s->count);
}

/* Own piece and all contributions are here. */
static void look_contribution(struct r2_exec *x, struct flight *f)
{
    if (f->contribution || !f->own_here || f->in_left > 0)
        return;
    if (f->step.n_in > 0)
        add(x, f);
    f->contribution = true;
    if (f->step.up < 0 && f->step.down < 0)
        f->sum = true;
}

/* Takes the slots and queues up on its lanes. */
static void admit(struct r2_exec *x, struct flight *f)
{
    const struct r2_step *s = &f->step;

    if (s->count == 0) {
        land(x, f);
        f->ended = true;
        return;
    }
    f->slot = r2_exec_slot(x, x->next - 1);
    for (int i = 0; i < s->n_in; i++) {
        held_by(x, f)[i] = x->free_slots[--x->n_free];
        enqueue(x, lane_of(x, R2_LANE_IN, s->in[i]), f);
    }
    if (s->up >= 0)
        enqueue(x, lane_of(x, R2_LANE_UP, s->up), f);
    if (s->down >= 0)
        enqueue(x, lane_of(x, R2_LANE_DOWN, s->down), f);
    for (int i = 0; i < s->n_out; i++)
        enqueue(x, lane_of(x, R2_LANE_OUT, s->out[i]), f);
    if (s->own != R2_STEP_NOTHING)
        enqueue(x, &x->outward, f);
    else
        f->own_here = true;
}

bool r2_exec_beside(const struct r2_exec *x, uint64_t earlier, uint64_t its_round, uint64_t later,
                    uint64_t round)
{
    return later - earlier < x->rows && round - its_round < x->rounds;
}

static void read_step(const struct r2_exec *x, uint64_t index, struct r2_step *step)
{
    r2_schedule_step(x->schedule, index - x->base, step);
    step->round += x->base_round;
    step->after += step->after ? x->base : 0;
}

static bool advance(struct r2_exec *x)
{
    uint64_t before = x->first, next = x->next;

    while (x->first < x->next && flight_of(x, x->first)->ended)
        x->first++;
    while (x->next < x->end && x->next - x->first < x->rows) {
        struct flight *f = flight_of(x, x->next);
        uint64_t oldest;

        read_step(x, x->next, &f->step);
        oldest = x->first < x->next ? flight_of(x, x->first)->step.round : f->step.round;
        if (f->step.round - oldest >= x->rounds || f->step.n_in > x->n_free)
            break;
        *f = (struct flight){.step = f->step,
                             .len = (size_t)f->step.count * x->schedule->elem,
                             .in_left = f->step.n_in,
                             .out_left = f->step.n_out};
        x->next++;
        admit(x, f);
    }
    return before != x->first || next != x->next;
}

/* ---- messages */

static bool may_post(const struct r2_exec *x, const struct flight *f, enum r2_lane_kind kind)
{
    if (f->step.after > x->first)
        return false;
    switch (kind) {
    case R2_LANE_UP:
        return f->contribution;
    case R2_LANE_DOWN:
        return f->step.up < 0 || f->up_sent;
    case R2_LANE_OUT:
        return f->sum;
    default:
        return true;
    }
}

static void *buffer_of(struct r2_exec *x, const struct flight *f, enum r2_lane_kind kind, int peer)
{
    int i = 0;

    if (kind != R2_LANE_IN)
        return f->slot;
    while (f->step.in[i] != peer)
        i++;
    return held_by(x, f)[i];
}

static void ended_on(struct r2_exec *x, struct flight *f, enum r2_lane_kind kind)
{
    switch (kind) {
    case R2_LANE_IN:
        f->in_left--;
        look_contribution(x, f);
        break;
    case R2_LANE_UP:
        f->up_sent = true;
        if (!r2_exec_lands(&f->step))
            land(x, f);
        break;
    case R2_LANE_DOWN:
        f->sum = true;
        break;
    default:
        f->out_left--;
        break;
    }
    look_ended(x, f);
}

static int turn_lane(struct r2_exec *x, enum r2_lane_kind kind, int peer)
{
    struct lane *lane = lane_of(x, kind, peer);
    bool moved = false;

    if (lane->done != lane->posted) {
        int n = x->config.ops->posted(x->config.user, kind, peer);

        if (n < 0)
            return n;
        moved = n > 0;
        for (; n > 0; n--)
            ended_on(x, at(x, lane, lane->done++), kind);
    }
    while (waits(lane) && lane->posted - lane->done < x->depth) {
        struct flight *f = at(x, lane, lane->posted);
        int rc = 0;

        if (may_post(x, f, kind))
            rc = x->config.ops->post(x->config.user, kind, peer, buffer_of(x, f, kind, peer),
                                     f->len);
        if (rc < 0)
            return rc;
        if (rc == 0)
            break;
        lane->posted++;
        moved = true;
    }
    return moved;
}

/* ---- copies */

void *r2_exec_slot(const struct r2_exec *x, uint64_t number)
{
    return (uint8_t *)x->config.slots + number % x->rows * x->config.piece;
}

/* Sums go into the output in list order. */
static void line_up(struct r2_exec *x)
{
    x->to_land = x->to_land > x->first ? x->to_land : x->first;
    for (; x->to_land < x->next; x->to_land++) {
        struct flight *f = flight_of(x, x->to_land);

        if (f->len == 0 || !r2_exec_lands(&f->step))
            continue;
        if (!f->sum)
            return;
        enqueue(x, &x->inward, f);
    }
}

static void copied(struct r2_exec *x, struct flight *f, bool out)
{
    if (out) {
        f->own_here = true;
        look_contribution(x, f);
    } else {
        land(x, f);
    }
    look_ended(x, f);
}

static int turn_copies(struct r2_exec *x, bool out)
{
    struct lane *lane = out ? &x->outward : &x->inward;
    bool moved = false;

    while (waits(lane)) {
        struct flight *f = at(x, lane, lane->posted);
        bool written = f->step.own == R2_STEP_OUTPUT;
        int rc = 0;

        if (!out || f->step.after <= x->first)
            rc = x->config.ops->copy(x->config.user, out, written, f->slot,
                                     f->step.offset * x->schedule->elem, f->len);
        if (rc < 0)
            return rc;
        if (rc == 0)
            break;
        lane->posted++;
        moved = true;
    }
    if (lane->done != lane->posted) {
        int n = x->config.ops->copied(x->config.user, out);

        if (n < 0)
            return n;
        moved |= n > 0;
        for (; n > 0; n--)
            copied(x, at(x, lane, lane->done++), out);
    }
    return moved;
}

int r2_exec_turn(struct r2_exec *x)
{
    int moved = advance(x), rc;

    rc = turn_copies(x, true);
    for (int peer = 0; peer < x->config.p && rc >= 0; peer++) {
        /* Sums first: they end steps, here and there. */
        for (int kind = R2_LANE_KINDS - 1; kind >= 0 && rc >= 0; kind--) {
            moved |= rc;
            if (peer != x->me)
                rc = turn_lane(x, (enum r2_lane_kind)kind, peer);
        }
    }
    if (rc >= 0) {
        moved |= rc;
        line_up(x);
        rc = turn_copies(x, false);
    }
    return rc < 0 ? rc : (moved | rc) != 0;
}

int r2_exec_rounds(const struct r2_exec *x)
{
    return (int)x->rounds;
}

bool r2_exec_landed(const struct r2_exec *x)
{
    return x->landed == x->end;
}

bool r2_exec_ended(const struct r2_exec *x)
{
    return x->first == x->end;
}

/* ---- life */

void r2_exec_begin(struct r2_exec *x, const struct r2_schedule *schedule, size_t credit)
{
    size_t piece = schedule->piece * schedule->elem;

    x->schedule = schedule;
    x->me = schedule->me;
    x->depth = (uint32_t)((credit + piece / 2) / piece);
    x->depth += x->depth == 0;
    x->base = x->end;
    x->base_round = x->end_round;
    x->end += schedule->n_steps;
    x->end_round += schedule->n_rounds;
}

static int make_lanes(struct r2_exec *x)
{
    int n = x->config.p * R2_LANE_KINDS;

    x->lanes = calloc((size_t)n, sizeof(*x->lanes));
    for (int i = 0; x->lanes && i < n + 2; i++) {
        struct lane *lane = i < n ? &x->lanes[i] : i == n ? &x->outward : &x->inward;

        lane->flights = calloc((size_t)x->room, sizeof(*lane->flights));
        if (!lane->flights)
            return -ENOMEM;
    }
    return x->lanes ? 0 : -ENOMEM;
}

int r2_exec_new(struct r2_exec **out, const struct r2_exec_config *config)
{
    size_t p = (size_t)config->p;
    struct r2_exec *x;
    int rc = -ENOMEM;

    *out = NULL;
    if (config->n_slots < r2_sizes_round(config->p) || config->piece == 0)
        return -EINVAL;
    x = calloc(1, sizeof(*x));
    if (!x)
        return -ENOMEM;
    x->config = *config;
    x->rounds = (uint64_t)(config->n_slots / r2_sizes_round(config->p));
    x->rows = x->rounds * (uint64_t)config->p;
    for (x->room = 1; x->room < (int)x->rows; x->room *= 2)
        ;
    x->flights = calloc((size_t)x->room, sizeof(*x->flights));
    x->free_slots = calloc((size_t)config->n_slots, sizeof(*x->free_slots));
    x->parts = calloc(p, sizeof(*x->parts));
    x->held = calloc((size_t)x->room * p, sizeof(*x->held));
    if (x->flights && x->free_slots && x->parts && x->held)
        rc = make_lanes(x);
    if (rc) {
        r2_exec_free(x);
        return rc;
    }
    for (int i = config->n_slots; i > (int)x->rows; i--)
        give_slot(x, (uint8_t *)config->slots + (size_t)(i - 1) * config->piece);
    *out = x;
    return 0;
}

void r2_exec_free(struct r2_exec *x)
{
    if (!x)
        return;
    for (int i = 0; x->lanes && i < x->config.p * R2_LANE_KINDS; i++)
        free(x->lanes[i].flights);
    free(x->lanes);
    free(x->outward.flights);
    free(x->inward.flights);
    free(x->flights);
    free(x->free_slots);
    free(x->parts);
    free(x->held);
    free(x);
}
