/* The rows that other processes read: in the control segment, which the plugin has in this process
 * and publishes (control/publish.c). */
#include <string.h>

#include "comms/inside.h"
#include "control/impl.h"
#include "real/real.h"
#include "settings/settings.h"

#define TRIES 300 /* then nobody makes one any more */

static _Atomic(struct r2_segment *) segment; /* the one in use */
static atomic_int tries;

/* The plugin's, or that of a program which has both in one. */
#pragma weak r2ccl_control_segment

bool r2_comm_row_hopeless(void)
{
    return !r2_settings_get()->shm || atomic_load_explicit(&tries, memory_order_relaxed) > TRIES;
}

static void find_segment(void)
{
    struct r2_segment *(*ask)(void) = r2ccl_control_segment;
    struct r2_segment *found = ask ? ask() : NULL;

    atomic_fetch_add_explicit(&tries, 1, memory_order_relaxed);
    if (!found) {
        *(void **)&ask = r2_real_plugin_symbol("r2ccl_control_segment");
        found = ask ? ask() : NULL;
    }
    atomic_store(&segment, found);
}

static int free_row(struct r2_segment *seg)
{
    uint32_t *high = &seg->header.more[0].high;

    for (int i = 0; i < R2_SEG_MAX_COMMS; i++) {
        if (__atomic_load_n(&seg->comms[i].used, __ATOMIC_RELAXED))
            continue;
        if (__atomic_load_n(high, __ATOMIC_RELAXED) < (uint32_t)i + 1)
            __atomic_store_n(high, (uint32_t)i + 1, __ATOMIC_RELEASE);
        return i;
    }
    return -1;
}

/* All but the sequence number, from the unseen row; operations meanwhile on another thread may miss
 * their place in the statistics by one. */
static void copy_row(struct r2_seg_comm *to, struct r2_seg_comm *from)
{
    size_t texts = offsetof(struct r2_seg_comm, operations);
    size_t rank = offsetof(struct r2_seg_comm, rank), id = offsetof(struct r2_seg_comm, id);

    r2_row_begin(&to->seq);
    r2_row_u32(&to->state, from->state);
    for (size_t at = rank; at < id; at += 4)
        r2_row_u32((uint32_t *)((char *)to + at), *(uint32_t *)((char *)from + at));
    r2_row_bytes((char *)to + id, (char *)from + id, texts - id);
    r2_row_u64(&to->operations, __atomic_load_n(&from->operations, __ATOMIC_RELAXED));
    r2_row_u64(&to->p2p, __atomic_load_n(&from->p2p, __ATOMIC_RELAXED));
    r2_row_u64(&to->epoch, __atomic_load_n(&from->epoch, __ATOMIC_RELAXED));
    r2_row_u64(&to->op_mono_ns, __atomic_load_n(&from->op_mono_ns, __ATOMIC_RELAXED));
    r2_row_u64(&to->op_bytes, __atomic_load_n(&from->op_bytes, __ATOMIC_RELAXED));
    r2_row_u32(&to->op, __atomic_load_n(&from->op, __ATOMIC_RELAXED));
    r2_row_u32(&to->calling, __atomic_load_n(&from->calling, __ATOMIC_RELAXED));
    r2_row_u64(&to->planned, __atomic_load_n(&from->planned, __ATOMIC_RELAXED));
    r2_row_u64(&to->plan_wait_ns, from->plan_wait_ns);
    r2_row_u64(&to->plan_messages, from->plan_messages);
    r2_row_u32(&to->plan_proposals, from->plan_proposals);
    r2_row_u32(&to->plan_agreed, from->plan_agreed);
    r2_row_u32(&to->plan_events, from->plan_events);
    r2_row_u32(&to->plan_rounds, from->plan_rounds);
    r2_row_u64(&to->bus_bytes, __atomic_load_n(&from->bus_bytes, __ATOMIC_RELAXED));
    r2_row_u32(&to->used, 1);
    r2_row_end(&to->seq);
}

void r2_comm_row_attach(struct r2_comm *comm, uint64_t now_ns)
{
    struct r2_segment *seg = atomic_load(&segment);
    int number;

    (void)now_ns;
    if (atomic_load(&comm->row_number) >= 0 || r2_comm_row_hopeless())
        return;
    if (!seg) {
        find_segment();
        seg = atomic_load(&segment);
    }
    number = seg ? free_row(seg) : -1;
    if (seg && number < 0)
        __atomic_fetch_add(&seg->counters.rows_refused, 1, __ATOMIC_RELAXED);
    if (number < 0)
        return;
    /* A writer that waited meanwhile finds another row when it is through, and writes again. */
    r2_row_begin(&comm->unseen.seq);
    copy_row(&seg->comms[number], &comm->unseen);
    atomic_store_explicit(&comm->row, &seg->comms[number], memory_order_release);
    r2_row_end(&comm->unseen.seq);
    atomic_store(&comm->row_number, number);
}

void r2_comm_row_detach(struct r2_comm *comm)
{
    struct r2_seg_comm *row = r2_comm_row(comm);

    if (atomic_exchange(&comm->row_number, -1) < 0)
        return;
    /* A holder that still counts writes to its own memory from now on; one that is just counting
     * touches words that the next owner of the row sets first. */
    atomic_store_explicit(&comm->row, &comm->unseen, memory_order_release);
    r2_row_begin(&row->seq);
    r2_row_u32(&row->used, 0);
    r2_row_u64(&row->op_mono_ns, 0);
    r2_row_u32(&row->calling, 0);
    r2_row_end(&row->seq);
}

void r2_comm_row_state(struct r2_comm *comm, enum r2_seg_comm_state state, const char *cause)
{
    struct r2_seg_comm *row;

    do { /* the table's side may move it meanwhile: the service thread comes here too */
        row = r2_comm_row(comm);
        r2_row_begin(&row->seq);
        r2_row_u32(&row->state, (uint32_t)state);
        r2_row_u64(&row->since_real_ns, r2_control_clock(CLOCK_REALTIME));
        r2_row_u64(&row->since_mono_ns, r2_control_clock(CLOCK_MONOTONIC));
        r2_row_cause(row->cause, sizeof(row->cause), cause);
        r2_row_end(&row->seq);
    } while (row != r2_comm_row(comm));
}

void r2_comm_row_ranks(struct r2_comm *comm, int rank, int nranks, int device)
{
    struct r2_seg_comm *row = r2_comm_row(comm);

    r2_row_begin(&row->seq);
    r2_row_u32((uint32_t *)&row->rank, (uint32_t)rank);
    r2_row_u32(&row->ranks, nranks > 0 ? (uint32_t)nranks : 0);
    r2_row_u32((uint32_t *)&row->device, (uint32_t)device);
    r2_row_end(&row->seq);
}

void r2_comm_row_name(struct r2_comm *comm, const char *name)
{
    struct r2_seg_comm *row = r2_comm_row(comm);

    r2_row_begin(&row->seq);
    r2_row_text(row->name, sizeof(row->name), name);
    r2_row_end(&row->seq);
}

void r2_comm_row_nodes(struct r2_comm *comm, int nodes, int local)
{
    struct r2_seg_comm *row;

    do {
        row = r2_comm_row(comm);
        r2_row_begin(&row->seq);
        r2_row_u32(&row->nodes, (uint32_t)nodes);
        r2_row_u32(&row->local_ranks, (uint32_t)local);
        r2_row_end(&row->seq);
    } while (row != r2_comm_row(comm));
}

void r2_comm_row_plan(struct r2_comm *comm, const char *plan, const char *cause)
{
    struct r2_seg_comm *row;

    do {
        row = r2_comm_row(comm);
        r2_row_begin(&row->seq);
        if (plan)
            r2_row_text(row->plan, sizeof(row->plan), plan);
        if (cause)
            r2_row_cause(row->cause, sizeof(row->cause), cause);
        r2_row_end(&row->seq);
    } while (row != r2_comm_row(comm));
}

void r2_comm_row_epoch(struct r2_comm *comm, uint64_t epoch)
{
    struct r2_seg_comm *row;

    do {
        row = r2_comm_row(comm);
        __atomic_store_n(&row->epoch, epoch, __ATOMIC_RELAXED);
    } while (row != r2_comm_row(comm));
}

void r2_comm_row_plans(struct r2_comm *comm, const struct r2_comm_plans *plans)
{
    struct r2_seg_comm *row;

    do {
        row = r2_comm_row(comm);
        r2_row_begin(&row->seq);
        r2_row_u64(&row->plan_wait_ns, plans->wait_ns);
        r2_row_u64(&row->plan_messages, plans->messages);
        r2_row_u32(&row->plan_proposals, plans->proposals);
        r2_row_u32(&row->plan_agreed, plans->agreed);
        r2_row_u32(&row->plan_events, plans->events);
        r2_row_u32(&row->plan_rounds, plans->rounds);
        r2_row_end(&row->seq);
    } while (row != r2_comm_row(comm));
}

struct r2_segment *r2_comm_segment(void)
{
    return atomic_load(&segment);
}
