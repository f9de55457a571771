#include "direct/ahead.h"

#define ENTRIES 512     /* of a stream's queue, for one operation */
#define OF_THE_WINDOW 3 /* a group has at most a third of the rounds under way */

struct group {
    uint64_t begin, end; /* steps */
};

/* A round of `direct` is one piece of each owner. An owner's pieces are equally far apart, but for
 * the last round, and where the ring of slots begins again. */
static uint64_t columns_of(const struct r2_ahead *a)
{
    const struct r2_schedule *s = a->schedule;

    return s->kind == R2_SCHEDULE_DIRECT && s->n_rounds ? s->n_steps / s->n_rounds : 1;
}

/* Steps. Rounds of other schedules depend on each other in other ways: their copies go alone. */
static uint64_t size_of(const struct r2_ahead *a, uint64_t columns)
{
    uint64_t rounds = (a->schedule->n_rounds * (columns + 2) + ENTRIES - 1) / ENTRIES;
    uint64_t most = (uint64_t)r2_exec_rounds(a->exec) / OF_THE_WINDOW;

    if (a->schedule->kind != R2_SCHEDULE_DIRECT)
        return 1;
    rounds = rounds > most ? most : rounds;
    return columns * (rounds ? rounds : 1);
}

static bool is_copied(const struct r2_step *step, bool out)
{
    return step->count && (out ? step->own != R2_STEP_NOTHING : r2_exec_lands(step));
}

static bool read_piece(const struct r2_ahead *a, uint64_t index, bool out,
                       struct r2_direct_rows *piece)
{
    size_t elem = a->schedule->elem;
    struct r2_step step;

    r2_schedule_step(a->schedule, index, &step);
    if (!is_copied(&step, out))
        return false;
    *piece = (struct r2_direct_rows){.slot = r2_exec_slot(a->exec, a->base + index),
                                     .offset = step.offset * elem,
                                     .len = (size_t)step.count * elem,
                                     .n = 1,
                                     .written = step.own == R2_STEP_OUTPUT};
    return true;
}

/* Whether `piece` is their next row; it is one of them then. */
static bool take(struct r2_direct_rows *rows, const struct r2_direct_rows *piece)
{
    char *slot = piece->slot, *last = (char *)rows->slot + (rows->n - 1) * rows->slot_pitch;
    uint64_t offset = rows->offset + (rows->n - 1) * rows->pitch;

    if (piece->len != rows->len || piece->written != rows->written || slot < last + rows->len ||
        piece->offset < offset + rows->len)
        return false;
    if (rows->n == 1) {
        rows->slot_pitch = (size_t)(slot - last);
        rows->pitch = piece->offset - offset;
    }
    if (slot != last + rows->slot_pitch || piece->offset != offset + rows->pitch)
        return false;
    rows->n++;
    return true;
}

static int queue_column(const struct r2_ahead *a, const struct group *g, uint64_t begin,
                        uint64_t columns, bool out)
{
    const struct r2_direct_device *device = a->device;
    struct r2_direct_rows rows = {0}, piece;
    int rc = 0;

    for (uint64_t i = begin; i < g->end && rc == 0; i += columns) {
        if (!read_piece(a, i, out, &piece) || (rows.n && take(&rows, &piece)))
            continue;
        if (rows.n)
            rc = device->queue(a->user, a->call, out, &rows);
        rows = piece;
    }
    return rc || rows.n == 0 ? rc : device->queue(a->user, a->call, out, &rows);
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
    uint64_t columns = columns_of(a), size = size_of(a, columns), n = a->schedule->n_steps;
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
