/* A thread's open group: what it made and called since the outermost ncclGroupStart. */
#include <stdlib.h>
#include <string.h>

#include "comms/follow.h"
#include "comms/inside.h"
#include "util/log.h"

struct birth {
    struct birth *next;
    r2_nccl_comm *out;
    struct r2_comm_birth is;
};

struct counted {
    struct counted *next;
    struct r2_comm *comm;      /* held */
    uint64_t collectives, p2p; /* that NCCL took */
    uint64_t bus_bytes;
};

static __thread struct {
    int depth;
    struct birth *births;
    struct counted *counts;
    bool refused; /* NCCL has refused an operation, so it will launch none of the group */
} group __attribute__((tls_model("initial-exec")));

void r2_comms_group_start(void)
{
    group.depth++;
}

int r2_comms_group_end(void)
{
    return group.depth > 0 ? --group.depth : 0;
}

bool r2_comms_in_group(void)
{
    return group.depth > 0;
}

void r2_comms_group_birth(r2_nccl_comm *out, const struct r2_comm_birth *is)
{
    struct birth *birth = malloc(sizeof(*birth)), **end = &group.births;

    if (!birth)
        return; /* it runs, unfollowed */
    *birth = (struct birth){NULL, out, *is};
    if (is->from)
        atomic_fetch_add_explicit(&is->from->holders, 1, memory_order_relaxed);
    while (*end) /* in order: all ranks must derive children alike */
        end = &(*end)->next;
    *end = birth;
}

static struct counted *find(struct r2_comm *comm)
{
    struct counted *at = group.counts;

    while (at && at->comm != comm)
        at = at->next;
    return at;
}

bool r2_comms_group_reserve(struct r2_comm *comm)
{
    struct counted *at;

    if (find(comm))
        return true;
    at = malloc(sizeof(*at));
    if (!at)
        return false;
    atomic_fetch_add_explicit(&comm->holders, 1, memory_order_relaxed);
    *at = (struct counted){.next = group.counts, .comm = comm};
    group.counts = at;
    return true;
}

void r2_comms_group_count(struct r2_comm *comm, bool collective, uint64_t bus_bytes)
{
    struct counted *at = find(comm);

    if (!at)
        return;
    *(collective ? &at->collectives : &at->p2p) += 1;
    at->bus_bytes += bus_bytes;
}

void r2_comms_group_refuse(void)
{
    group.refused = true;
}

void r2_comms_group_hand(void)
{
    for (struct counted *at = group.counts; at; at = at->next) {
        if (at->comm->follow && !group.refused)
            r2_follow_group(at->comm->follow, at->collectives);
        r2_comms_handed(at->comm, (int64_t)at->collectives, (int64_t)at->p2p,
                        (int64_t)at->bus_bytes);
    }
}

/* An application may mend its arguments and do the whole group once more, on this rank alone. */
static void take_back(void)
{
    for (struct counted *at = group.counts; at; at = at->next) {
        if (at->comm->follow)
            r2_follow_forget(at->comm->follow);
        r2_comms_handed(at->comm, -(int64_t)at->collectives, -(int64_t)at->p2p,
                        -(int64_t)at->bus_bytes);
    }
}

/* Whether NCCL took operations on one communicator alone. */
static bool alone(void)
{
    int comms = 0;

    for (struct counted *at = group.counts; at; at = at->next)
        comms += at->collectives || at->p2p;
    return comms == 1;
}

/* Whether NCCL launched the group. */
static bool took(int ended)
{
    return ended == R2_NCCL_OK || ended == R2_NCCL_IN_PROGRESS ||
           !(group.refused || ended == R2_NCCL_ARGUMENT || ended == R2_NCCL_USAGE);
}

void r2_comms_group_over(int ended, bool simulated)
{
    bool made = !simulated && (ended == R2_NCCL_OK || ended == R2_NCCL_IN_PROGRESS);
    bool failed = !simulated && (ended == R2_NCCL_REMOTE || ended == R2_NCCL_SYSTEM);
    bool launched = !simulated && took(ended);

    /* Of several NCCL does not say whose error it is: the well ones are not to end by it, and the
     * failed one says so itself when it is asked (ncclCommGetAsyncError). Whose call was refused
     * has said so there. */
    failed = failed && !group.refused && alone();
    if (!simulated && !launched)
        take_back();
    group.refused = false;
    while (group.births) {
        struct birth *birth = group.births;

        group.births = birth->next;
        birth->is.pending |= ended == R2_NCCL_IN_PROGRESS;
        birth->is.nonblocking |= birth->is.pending;
        if (made)
            r2_comms_add(birth->out ? *birth->out : NULL, &birth->is);
        if (birth->is.from)
            r2_comms_drop(birth->is.from);
        free(birth);
    }
    while (group.counts) {
        struct counted *at = group.counts;

        group.counts = at->next;
        if (launched && at->comm->follow)
            r2_follow_after(at->comm->follow, at->collectives);
        if (failed && (at->collectives || at->p2p))
            r2_comms_async(at->comm, at->comm->handle, ended);
        r2_comms_drop(at->comm);
        free(at);
    }
}
