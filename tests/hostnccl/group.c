#define _GNU_SOURCE
#include "profiler.h"

#include <stdlib.h>

#define API __attribute__((visibility("default")))

struct part { /* one communicator's share of a group */
    struct ncclComm *comm;
    struct hn_op *ops;
    struct hn_launch *launch;
    struct hn_pxop *px;
    ncclResult_t result;
    pthread_t thread;
    bool threaded;
};

static _Thread_local int depth;
static _Thread_local struct hn_op *ops, **ops_end;
static _Thread_local struct hn_init *inits, **inits_end;

bool hn_group_open(void)
{
    return depth > 0;
}

static void *init_main(void *arg)
{
    hn_init_run(arg);
    return NULL;
}

/* Members of one group meet each other, so they must run at the same time. */
static ncclResult_t run_inits(struct hn_init *list)
{
    ncclResult_t result = ncclSuccess;
    int count = 0;
    for (struct hn_init *i = list; i; i = i->next)
        count++;
    /* NCCL up to 2.27 (net API v10) makes each on a thread of its own, later ones a single one on
     * the caller's. */
    bool inline_one = count == 1 && hn_util_env("HOSTNCCL_NET_VERSION", 12, 6, 12) >= 11;
    if (inline_one)
        hn_init_run(list);
    pthread_t *threads = calloc((size_t)count, sizeof(*threads));
    int started = 0;
    struct hn_init *i = list;
    for (; !inline_one && threads && i; i = i->next, started++)
        if (pthread_create(&threads[started], NULL, init_main, i))
            break;
    for (int t = 0; t < started; t++)
        pthread_join(threads[t], NULL);
    for (; !inline_one && i; i = i->next) {
        i->result = hn_util_fail(ncclSystemError, "no thread for the communicator");
        hn_init_over(i);
    }
    free(threads);
    while (list) {
        struct hn_init *next = list->next;
        if (result == ncclSuccess || result == ncclInProgress)
            result = list->result != ncclSuccess ? list->result : result;
        free(list);
        list = next;
    }
    return result;
}

static void build_part(struct part *part)
{
    struct ncclComm *comm = part->comm;
    part->result = hn_comm_check(comm);
    if (part->result == ncclSuccess)
        part->result = hn_launch_build(comm, part->ops, &part->launch, &part->px);
    if (part->result != ncclSuccess && atomic_load(&comm->revoked)) /* and did not fail */
        part->result = hn_comm_check(comm);
    if (part->result != ncclSuccess && part->result != ncclInvalidUsage)
        hn_comm_fail(comm, part->result);
}

static void *part_main(void *arg)
{
    build_part(arg);
    return NULL;
}

static void run_part(struct part *part, bool async)
{
    if (part->result != ncclSuccess)
        return;
    struct hn_launch *launch = part->launch;
    launch->detached = async;
    hn_prof_ops_begin(part->comm, part->ops);
    for (struct hn_pxop *px = part->px; px; px = px->next) {
        px->mask = px->api->mask;
        px->task_event = px->api->event;
    }
    if (part->px)
        hn_progress_add(part->comm, part->px);
    hn_prof_ops_end(part->ops);
    hn_gpu_launch(part->comm, launch);
}

/* The group's operations by communicator, in order; how many communicators. */
static int split_parts(struct hn_op *list, struct part *parts)
{
    int count = 0;
    while (list) {
        struct hn_op *op = list;
        list = op->next;
        op->next = NULL;
        int p = 0;
        while (p < count && parts[p].comm != op->comm)
            p++;
        if (p == count)
            parts[count++] = (struct part){.comm = op->comm};
        struct hn_op **end = &parts[p].ops;
        while (*end)
            end = &(*end)->next;
        *end = op;
    }
    return count;
}

static ncclResult_t run_parts(struct part *parts, int count)
{
    ncclResult_t result = ncclSuccess;
    bool async = hn_util_env("HOSTNCCL_ASYNC", 0, 0, 1);
    for (int p = 1; p < count; p++)
        parts[p].threaded = !pthread_create(&parts[p].thread, NULL, part_main, &parts[p]);
    build_part(&parts[0]);
    for (int p = 1; p < count; p++) {
        if (parts[p].threaded)
            pthread_join(parts[p].thread, NULL);
        else
            parts[p].result = ncclSystemError;
    }
    for (int p = 0; p < count; p++)
        run_part(&parts[p], async);
    for (int p = 0; p < count; p++) {
        struct part *part = &parts[p];
        if (part->result == ncclSuccess && !async) {
            hn_gpu_wait(part->comm, part->launch);
            part->result = hn_comm_check(part->comm);
        }
        if (result == ncclSuccess)
            result = part->result;
    }
    return result;
}

static ncclResult_t run_ops(struct hn_op *list)
{
    int room = 0;
    for (struct hn_op *op = list; op; op = op->next)
        room++;
    struct part *parts = calloc((size_t)room, sizeof(*parts));
    ncclResult_t result = ncclSystemError;
    int count = 0;
    if (parts) {
        count = split_parts(list, parts);
        list = NULL;
        result = run_parts(parts, count);
    }
    for (int p = 0; p < count; p++) {
        while (parts[p].ops) {
            struct hn_op *next = parts[p].ops->next;
            hn_comm_leave(parts[p].comm);
            free(parts[p].ops);
            parts[p].ops = next;
        }
    }
    free(parts);
    return result;
}

static ncclResult_t flush(void)
{
    struct hn_init *made = inits;
    struct hn_op *queued = ops;
    inits = NULL;
    ops = NULL;
    ncclResult_t result = made ? run_inits(made) : ncclSuccess;
    ncclResult_t second = queued ? run_ops(queued) : ncclSuccess;
    return result == ncclSuccess ? second : result;
}

ncclResult_t hn_group_op(const struct hn_op *op)
{
    ncclResult_t result = hn_comm_enter(op->comm); /* left when the group has run */
    if (result != ncclSuccess)
        return result;
    struct hn_op *copy = malloc(sizeof(*copy));
    if (!copy) {
        hn_comm_leave(op->comm);
        return hn_util_fail(ncclSystemError, "out of memory");
    }
    *copy = *op;
    copy->next = NULL;
    copy->mask = op->comm->profiled ? hn_prof_mask() : 0;
    copy->event = NULL;
    if (!ops)
        ops_end = &ops;
    *ops_end = copy;
    ops_end = &copy->next;
    return depth ? ncclSuccess : flush();
}

ncclResult_t hn_group_init(const struct hn_init *init)
{
    struct hn_init *copy = malloc(sizeof(*copy));
    if (!copy) {
        struct hn_init failed = *init;
        failed.result = hn_util_fail(ncclSystemError, "out of memory");
        hn_init_over(&failed);
        return failed.result;
    }
    *copy = *init;
    copy->next = NULL;
    if (!inits)
        inits_end = &inits;
    *inits_end = copy;
    inits_end = &copy->next;
    return depth ? ncclSuccess : flush();
}

API ncclResult_t ncclGroupStart(void)
{
    depth++;
    return ncclSuccess;
}

API ncclResult_t ncclGroupEnd(void)
{
    if (!depth)
        return hn_util_fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    return --depth ? ncclSuccess : flush();
}
