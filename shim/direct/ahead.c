#include "direct/ahead.h"

#define ENTRIES 512     /* of a stream's queue, for one operation */
#define OF_THE_WINDOW 3 /* a group has at most a third of the rounds under way */

struct group {
    uint64_t begin, end; /* steps */
};

/* Steps of a group, in rows of one for each column. A round of `direct` is one piece of each owner:
 * an owner's pieces are a column. They are equally far apart, but for the last round, and where the
 * ring of slots begins again. Steps of other schedules wait for each other within a round, so each
 * is a group of its own. */
static uint64_t size_of(const struct r2_ahead *a, uint64_t *columns)
{
    const struct r2_schedule *s = a->schedule;
    uint64_t most = (uint64_t)r2_exec_rounds(a->exec) / OF_THE_WINDOW, rows;

    *columns = 1;
    if (s->kind != R2_SCHEDULE_DIRECT || s->n_rounds == 0)
        return 1;
    *columns = s->n_steps / s->n_rounds;
    rows = (s->n_rounds * (*columns + 2) + ENTRIES - 1) / ENTRIES;
    rows = rows > most ? most : rows;
    return *columns * (rows ? rows : 1);
}

static bool is_copied(const struct r2_step *step, bool out)
{
    return step->count && (out ? step->own != R2_STEP_NOTHING : r2_exec_lands(step));
}

static bool read_piece(const struct r2_ahead *a, uint64_t index, bool out,
                       struct r2_copies_rows *piece)
{
    const struct r2_direct_call *call = a->call;
    void *slot = r2_exec_slot(a->exec, a->base + index);
    struct r2_step step;
    size_t offset;

    r2_schedule_step(a->schedule, index, &step);
    offset = step.offset * a->schedule->elem;
    *piece = (struct r2_copies_rows){.len = (size_t)step.count * a->schedule->elem, .n = 1};
    if (out) {
        piece->to = slot;
        piece->from = (const char *)(step.own == R2_STEP_OUTPUT ? call->out : call->in) + offset;
    } else {
        piece->to = (char *)call->out + offset;
        piece->from = slot;
    }
    return is_copied(&step, out);
}

/* From the last of `n` rows that begin at `first` to `next`; 0: that is no row behind it. */
static size_t distance(const void *first, size_t pitch, size_t n, const void *next, size_t len)
{
    uintptr_t end = (uintptr_t)first + (n - 1) * pitch + len;

    return (uintptr_t)next >= end ? (uintptr_t)next - end + len : 0;
}

/* Whether `piece` is their next row; it is one of them then. */
static bool take(struct r2_copies_rows *r, const struct r2_copies_rows *piece)
{
    size_t to = distance(r->to, r->to_pitch, r->n, piece->to, r->len);
    size_t from = distance(r->from, r->from_pitch, r->n, piece->from, r->len);

    if (piece->len != r->len || !to || !from ||
        (r->n > 1 && (to != r->to_pitch || from != r->from_pitch)))
        return false;
    r->to_pitch = to;
    r->from_pitch = from;
    r->n++;
    return true;
}

static int queue_column(const struct r2_ahead *a, const struct group *g, uint64_t begin,
                        uint64_t columns, bool out)
{
    struct r2_copies_rows rows = {0}, piece;
    int rc = 0;

    for (uint64_t i = begin; i < g->end && rc == 0; i += columns) {
        if (!read_piece(a, i, out, &piece) || (rows.n && take(&rows, &piece)))
            continue;
        if (rows.n)
            rc = a->device->queue(a->user, out, &rows);
        rows = piece;
    }
    return rc || rows.n == 0 ? rc : a->device->queue(a->user, out, &rows);
}

static int queue_group(const struct r2_ahead *a, const struct group *g, uint64_t columns, bool out)
{
    struct r2_step step;
    unsigned n = 0;
    int rc;

    for (uint64_t i = g->begin; i < g->end; i++) {
        r2_schedule_step(a->schedule, i, &step);
        n += is_copied(&step, out);
    }
    if (n == 0)
        return 0;
    rc = a->device->hold(a->user, out, n);
    for (uint64_t c = 0; c < columns && rc == 0; c++)
        rc = queue_column(a, g, g->begin + c, columns, out);
    return rc ? rc : a->device->tell(a->user, out);
}

/* Whether pieces of `later` may come out before the sums of `earlier` have gone in. */
static bool is_beside(const struct r2_ahead *a, const struct group *earlier,
                      const struct group *later)
{
    struct r2_step first, next, last;

    r2_schedule_step(a->schedule, earlier->begin, &first);
    r2_schedule_step(a->schedule, later->begin, &next);
    r2_schedule_step(a->schedule, later->end - 1, &last);
    return earlier->end > next.after &&
           r2_exec_beside(a->exec, earlier->begin, first.round, later->end - 1, last.round);
}

static struct group group_at(const struct r2_ahead *a, uint64_t begin, uint64_t size)
{
    uint64_t n = a->schedule->n_steps;

    return (struct group){begin, n - begin < size ? n : begin + size};
}

/* Sums go in before the first piece that waits for their slots, or for their steps, comes out: in
 * this order the copies get on even if the device makes them one by one. */
int r2_ahead_queue(const struct r2_ahead *a)
{
    uint64_t columns, size = size_of(a, &columns), n = a->schedule->n_steps;
    struct group in = group_at(a, 0, size);
    int rc = 0;

    for (uint64_t i = 0; i < n && rc == 0; i += size) {
        struct group out = group_at(a, i, size);

        for (; in.begin < i && !is_beside(a, &in, &out) && rc == 0;
             in = group_at(a, in.begin + size, size))
            rc = queue_group(a, &in, columns, false);
        if (rc == 0)
            rc = queue_group(a, &out, columns, true);
    }
    for (; in.begin < n && rc == 0; in = group_at(a, in.begin + size, size))
        rc = queue_group(a, &in, columns, false);
    return rc;
}
