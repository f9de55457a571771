/* One communicator: what it is, and its failure. */
#include <stdio.h>

#include "comms/follow_inside.h"
#include "settings/settings.h"
#include "util/log.h"

struct r2_real *r2_comms_real(const struct r2_comm *comm)
{
    return comm->real;
}

uint64_t r2_comms_id(const struct r2_comm *comm)
{
    return comm->id;
}

uint64_t r2_comms_index(const struct r2_comm *comm)
{
    return atomic_load_explicit(&comm->index, memory_order_relaxed);
}

uint64_t r2_comms_next_child(struct r2_comm *comm)
{
    return atomic_fetch_add_explicit(&comm->children, 1, memory_order_relaxed) + 1;
}

void r2_comms_state(struct r2_comm *comm, enum r2_seg_comm_state state, const char *cause)
{
    int before = atomic_load(&comm->state);

    do { /* one that has failed stays so, whatever of a call that was under way comes after it */
        if (before == R2_SEG_COMM_FAILED &&
            (state == R2_SEG_COMM_READY || state == R2_SEG_COMM_SUSPENDED))
            return;
    } while (!atomic_compare_exchange_weak(&comm->state, &before, (int)state));
    if (before != (int)state || cause)
        r2_comm_row_state(comm, state, cause);
}

static const char *name_of(int error)
{
    static const char *const names[] = {
        "ncclSuccess",         "ncclUnhandledCudaError", "ncclSystemError", "ncclInternalError",
        "ncclInvalidArgument", "ncclInvalidUsage",       "ncclRemoteError"};

    return error >= 0 && error < (int)(sizeof(names) / sizeof(names[0])) ? names[error]
                                                                         : "an error";
}

/* Right before the application hears of it, on whichever thread it asks first. */
static void journal_failed(struct r2_comm *comm, const char *cause)
{
    char line[112];

    /* Relaxed: one of them writes, and nothing else hangs on it. */
    if (atomic_exchange_explicit(&comm->journaled, true, memory_order_relaxed))
        return;
    snprintf(line, sizeof(line), "communicator %016llx has failed: %s",
             (unsigned long long)comm->id, cause);
    r2_watch_journal_failed(line);
}

bool r2_follow_tells(const struct r2_follow *f)
{
    return f->family <= r2_settings_get()->tell_errors;
}

/* Of several threads that find it at once one tells the other ranks, which may take 200 ms; the
 * rest do not wait for it. */
void r2_comm_fail(struct r2_comm *comm, int error, const char *cause, const char *line)
{
    if (atomic_exchange(&comm->state, R2_SEG_COMM_FAILED) != R2_SEG_COMM_FAILED) {
        r2_comm_row_state(comm, R2_SEG_COMM_FAILED, cause);
        if (comm->follow && r2_follow_tells(comm->follow))
            r2_agree_tell(comm->follow->agree, (uint32_t)error);
    }
    journal_failed(comm, line ? line : name_of(error));
}

void r2_comms_broken(struct r2_comm *comm, const char *cause)
{
    r2_comm_fail(comm, R2_NCCL_REMOTE, cause, cause);
    /* Relaxed: it is all there is to see. */
    atomic_store_explicit(&comm->told, R2_NCCL_REMOTE, memory_order_relaxed);
}

void r2_comms_told(struct r2_comm *comm, int rank, int error)
{
    char cause[64];

    snprintf(cause, sizeof(cause), "%s at rank %d", name_of(error), rank);
    R2_WARN("communicator %016llx has failed at rank %d (%s): this rank cannot continue, and "
            "ncclCommGetAsyncError returns ncclRemoteError",
            (unsigned long long)comm->id, rank, name_of(error));
    r2_comms_state(comm, R2_SEG_COMM_FAILED, cause);
    journal_failed(comm, cause);
    /* Relaxed: it is all there is to see. */
    atomic_store_explicit(&comm->told, R2_NCCL_REMOTE, memory_order_relaxed);
}

int r2_comms_elsewhere(struct r2_comm *comm)
{
    return atomic_load_explicit(&comm->told, memory_order_relaxed);
}
