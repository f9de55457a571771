/* Times of collectives: one row for each communicator, kind and class of sizes. */
#include "control/impl.h"

static bool is_of(const struct r2_seg_timing *row, const struct r2_control_timing *what)
{
    return row->comm == what->comm && row->rank == what->rank && row->op == what->op &&
           row->up_to == what->up_to;
}

/* The row, a new one if there is none; NULL: there is no room. */
static struct r2_seg_timing *row_of(struct r2_control *ctl, const struct r2_control_timing *what)
{
    struct r2_seg_timing *row = ctl->seg->timings;
    struct r2_seg_timing *end = row + R2_SEG_MAX_TIMINGS;

    for (; row < end && row->used; row++)
        if (is_of(row, what))
            return row;
    if (row == end)
        return NULL;
    r2_row_begin(&row->seq);
    r2_row_u32(&row->op, what->op);
    r2_row_u32((uint32_t *)&row->rank, (uint32_t)what->rank);
    r2_row_u32(&row->ranks, (uint32_t)what->ranks);
    r2_row_u64(&row->comm, what->comm);
    r2_row_u64(&row->up_to, what->up_to);
    r2_row_u32(&row->used, 1);
    r2_row_end(&row->seq);
    r2_row_mark(ctl, R2_SEG_KIND_TIMINGS, (uint32_t)(row - ctl->seg->timings));
    return row;
}

static int bucket(uint64_t ns)
{
    int i = 0;

    while (i < R2_SEG_SPANS - 1 && ns > (UINT64_C(1000) * R2_SEG_SPAN_US) << i)
        i++;
    return i;
}

bool r2_control_timing(struct r2_control *ctl, const struct r2_control_timing *what, uint64_t ns)
{
    struct r2_seg_timing *row = row_of(ctl, what);

    if (!row)
        return false;
    r2_count(&row->bus_bytes, what->bus_bytes);
    r2_count(&row->ns, ns);
    r2_count(&row->count[bucket(ns)], 1);
    if (ns > row->longest_ns)
        r2_gauge(&row->longest_ns, ns);
    return true;
}

void r2_control_recording(struct r2_control *ctl, enum r2_seg_recording state)
{
    r2_row_u32(&ctl->seg->process.recording, state);
}
