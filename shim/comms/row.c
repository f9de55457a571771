/* The rows that other processes read.
 *
 * The control segment is found by its name (control/control.h), as r2ccl-ctl finds it. A descriptor
 * of it is never closed: closing any one in this process would drop the lock that says that the
 * process lives. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comms/inside.h"
#include "control/impl.h"
#include "settings/settings.h"

#define NAMES 4   /* objects of one process: it may have replaced itself (exec) and left one */
#define TRIES 300 /* then nobody makes one any more */

static struct r2_segment *seen[NAMES]; /* mapped, perhaps not set up yet; under the table's lock */
static _Atomic(struct r2_segment *) segment; /* the one in use */
static atomic_int tries;

bool r2_comm_row_hopeless(void)
{
    return !r2_settings_get()->shm || atomic_load_explicit(&tries, memory_order_relaxed) > TRIES;
}

static struct r2_segment *map(const char *name)
{
    struct r2_segment *seg;
    struct stat st;
    int fd = shm_open(name, O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0);

    if (fd < 0)
        return NULL;
    if (fd < 3) { /* never in the place of a closed stdin, stdout or stderr */
        struct flock alive = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
        int high = fcntl(fd, F_DUPFD_CLOEXEC, 3);

        if (high < 0)
            return NULL;
        close(fd);
        fcntl(high, F_SETLK, &alive);
        fd = high;
    }
    if (fstat(fd, &st) || (size_t)st.st_size < sizeof(*seg))
        return NULL;
    seg = mmap(NULL, sizeof(*seg), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return seg == MAP_FAILED ? NULL : seg;
}

/* Set up, of this process, and with our table where we expect it. */
static bool usable(const struct r2_segment *seg)
{
    /* Acquire: with the magic word the header is there as well (r2_control_open). */
    uint64_t magic = __atomic_load_n(&seg->header.magic, __ATOMIC_ACQUIRE);
    const struct r2_seg_table *table = &seg->header.more[0];

    return magic == R2_SEG_MAGIC && seg->header.version == R2_SEG_VERSION &&
           __atomic_load_n(&seg->process.pid, __ATOMIC_ACQUIRE) == (uint32_t)getpid() &&
           table->kind == R2_SEG_KIND_COMMS && table->stride == sizeof(struct r2_seg_comm) &&
           table->rows == R2_SEG_MAX_COMMS && table->offset == offsetof(struct r2_segment, comms);
}

static void find_segment(void)
{
    struct r2_segment *newest = NULL;
    char base[96], name[R2_CONTROL_NAME];

    atomic_fetch_add_explicit(&tries, 1, memory_order_relaxed);
    snprintf(base, sizeof(base), "/" R2_CONTROL_PREFIX "%u.%llu.%d.%llu", (unsigned)geteuid(),
             (unsigned long long)r2_control_pidns(), (int)getpid(),
             (unsigned long long)r2_control_start_ticks());
    for (int i = 0; i < NAMES; i++) {
        snprintf(name, sizeof(name), i ? "%s.%d" : "%s", base, i);
        if (!seen[i])
            seen[i] = map(name);
        if (seen[i] && usable(seen[i]) && !seen[i]->header.ended_real_ns &&
            (!newest || seen[i]->header.created_real_ns > newest->header.created_real_ns))
            newest = seen[i];
    }
    atomic_store(&segment, newest);
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

void r2_comm_row_child(void)
{
    /* In place, as the plugin does with its own mapping: pointers into it stay valid. */
    for (int i = 0; i < NAMES; i++)
        if (seen[i])
            (void)!mmap(seen[i], sizeof(*seen[i]), PROT_READ | PROT_WRITE,
                        MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}
