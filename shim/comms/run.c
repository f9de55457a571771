#define _GNU_SOURCE
#include "comms/run.h"

#include <stdlib.h>
#include <string.h>

#include "comms/comms.h"
#include "comms/follow.h"
#include "comms/inside.h"
#include "comms/reduction.h"
#include "comms/vote.h"
#include "device/device.h"
#include "plan/table.h"
#include "schedules/second.h"
#include "settings/settings.h"

#define BUILT_IN_OPS 5 /* ncclSum ... ncclAvg; others were made by the application */
#define ALIGN 512      /* parts begin at multiples of so many bytes */

/* Arguments of ncclAllReduce. */
enum { SEND, RECV, COUNT, TYPE, OP, COMM, STREAM };

struct recorded {
    struct recorded *next;
    struct r2_op op;                   /* its communicator is held */
    void *config;                      /* ours, or NULL */
    const struct r2_plan_entry *entry; /* what replaces it; set at the group's end */
    bool issued;
    uint64_t keys[R2_PLAN_ORDERS]; /* of the communicators that it was put on */
    int nkeys;
};

static __thread struct {
    bool recording;
    struct recorded *first, *last;
    struct recorded *put; /* on plans' communicators, by NCCL's group that is not over yet */
} group __attribute__((tls_model("initial-exec")));

static int call(const struct r2_op *op)
{
    int (*fn)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
              uint64_t) = op->fn;
    const uint64_t *w = op->word;

    return fn(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8]);
}

/* ---- one operation */

static bool planned(const struct r2_comm *comm)
{
    return comm && atomic_load_explicit(&comm->planned, memory_order_relaxed);
}

/* The entry that replaces it, or NULL. */
static const struct r2_plan_entry *entry_of(const struct r2_op *op)
{
    const struct r2_plan_table *table;
    const struct r2_plan_entry *entry;

    if (op->api != R2_API_ncclAllReduce || !planned(op->comm))
        return NULL;
    table = r2_follow_table(op->comm->follow);
    entry = r2_plan_table_find(table, R2_PLAN_ALLREDUCE, R2_PLAN_ANY_TYPE,
                               op->word[COUNT] * r2_nccl_type_size((int)op->word[TYPE]));
    if (!entry || entry->schedule != R2_PLAN_TREE || op->word[OP] >= BUILT_IN_OPS)
        return NULL;
    if (!r2_settings_get()->capture_plan && r2_device_capturing((void *)op->word[STREAM]))
        return NULL;
    return entry;
}

static int run_part(const struct r2_op *op, const struct r2_plan_entry *entry, int part)
{
    const struct r2_plan_table *table = r2_follow_table(op->comm->follow);
    struct r2_seconds *seconds = r2_follow_seconds(op->comm->follow);
    uint64_t key = table->comms[entry->comm[part]].key;
    uint64_t size = r2_nccl_type_size((int)op->word[TYPE]), first, count;
    struct r2_op piece = *op;
    r2_nccl_comm second;

    r2_plan_entry_part(entry, part, op->word[COUNT], ALIGN / size, &first, &count);
    if (count == 0)
        return R2_NCCL_OK;
    second = r2_seconds_get(seconds, key);
    if (!second)
        return R2_NCCL_INTERNAL; /* aborted meanwhile: nobody may choose another way alone */
    if (r2_settings_get()->capture_plan && r2_device_capturing((void *)op->word[STREAM]))
        r2_seconds_pin(seconds, key);
    piece.word[SEND] += first * size;
    piece.word[RECV] += first * size;
    piece.word[COUNT] = count;
    piece.word[COMM] = (uint64_t)(uintptr_t)second;
    return call(&piece);
}

/* Inside a real group when there are several parts. */
static int run_parts(const struct r2_op *op, const struct r2_plan_entry *entry)
{
    int result = R2_NCCL_OK;

    for (int p = 0; p < entry->segments && result == R2_NCCL_OK; p++)
        result = run_part(op, entry, p);
    return result;
}

static int run_in_group(const struct r2_op *op, const struct r2_plan_entry *entry)
{
    struct r2_real *real = r2_comms_real(op->comm);
    int (*start)(void) = real->fn[R2_API_ncclGroupStart];
    int (*end)(void) = real->fn[R2_API_ncclGroupEnd];
    int result = start(), ended;

    if (result != R2_NCCL_OK)
        return result;
    result = run_parts(op, entry);
    ended = end();
    return result == R2_NCCL_OK ? ended : result;
}

static int keys_of(const struct r2_op *op, const struct r2_plan_entry *entry,
                   uint64_t keys[R2_PLAN_ORDERS])
{
    const struct r2_plan_table *table = r2_follow_table(op->comm->follow);

    for (int p = 0; p < entry->segments; p++)
        keys[p] = table->comms[entry->comm[p]].key;
    return entry->segments;
}

/* Whatever became of it: what was launched of it needs them until it is over. */
static void mark(const struct r2_op *op, const uint64_t *keys, int nkeys)
{
    for (int k = 0; k < nkeys; k++)
        r2_seconds_mark(r2_follow_seconds(op->comm->follow), keys[k], (void *)op->word[STREAM]);
}

static void count(const struct r2_op *op)
{
    __atomic_fetch_add(&r2_comm_row(op->comm)->planned, 1, __ATOMIC_RELAXED);
}

static int run_alone(const struct r2_op *op, const struct r2_plan_entry *entry)
{
    uint64_t keys[R2_PLAN_ORDERS];
    int nkeys = keys_of(op, entry, keys);
    int result = entry->segments == 1 ? run_parts(op, entry) : run_in_group(op, entry);

    mark(op, keys, nkeys);
    if (result == R2_NCCL_OK)
        count(op);
    return result;
}

/* ---- groups */

/* Which argument is an ncclCollConfig_t; -1: none. */
static int config_word(enum r2_api api)
{
    switch (api) {
    case R2_API_ncclAllGatherConfig:
    case R2_API_ncclAlltoAllConfig:
        return 6;
    case R2_API_ncclAllReduceConfig:
    case R2_API_ncclReduceScatterConfig:
    case R2_API_ncclBroadcastConfig:
    case R2_API_ncclGatherConfig:
    case R2_API_ncclScatterConfig:
        return 7;
    case R2_API_ncclReduceConfig:
        return 8;
    default:
        return -1;
    }
}

/* What every configuration of NCCL's begins with. */
struct config_head {
    size_t size;
    unsigned magic, version;
};

#define MOST_CONFIG 4096 /* bytes; a larger one is none that we know */

/* As NCCL does in the call: all `size` bytes, not what pointers in them lead to. One that NCCL will
 * refuse stays the caller's. */
static bool keep_config(struct recorded *r)
{
    int word = config_word(r->op.api);
    const struct config_head *config =
        word < 0 ? NULL : (const struct config_head *)(uintptr_t)r->op.word[word];

    if (!config || config->magic != R2_NCCL_CONFIG_MAGIC || config->size < sizeof(*config) ||
        config->size > MOST_CONFIG)
        return true;
    r->config = malloc(config->size);
    if (!r->config)
        return false;
    memcpy(r->config, config, config->size);
    r->op.word[word] = (uint64_t)(uintptr_t)r->config;
    return true;
}

/* Whether it has a reduction that the application made. */
static bool own_reduction(const struct r2_op *op)
{
    switch (op->api) {
    case R2_API_ncclAllReduce:
    case R2_API_ncclReduceScatter:
    case R2_API_ncclReduce:
    case R2_API_ncclAllReduceConfig:
    case R2_API_ncclReduceScatterConfig:
    case R2_API_ncclReduceConfig:
        return op->word[OP] >= BUILT_IN_OPS;
    default:
        return false;
    }
}

static int record(const struct r2_op *op)
{
    struct recorded *r = calloc(1, sizeof(*r));

    if (!r)
        return R2_NCCL_SYSTEM;
    r->op = *op;
    if (!keep_config(r) ||
        (own_reduction(op) && !r2_reduction_use(op->comm, op->handle, (int)op->word[OP]))) {
        free(r->config);
        free(r);
        return R2_NCCL_SYSTEM;
    }
    if (op->comm)
        atomic_fetch_add_explicit(&op->comm->holders, 1, memory_order_relaxed);
    if (group.last)
        group.last->next = r;
    else
        group.first = r;
    group.last = r;
    group.recording = true;
    return R2_NCCL_OK;
}

/* The abort of another thread frees what NCCL would be called with. */
static bool gone(const struct r2_op *op)
{
    return op->comm && r2_comms_gone(op->comm);
}

/* What a communicator has in the group, from `r` on; `replaced`: what the plan takes, or the rest.
 */
static int issue(struct recorded *r, bool replaced)
{
    r2_nccl_comm handle = r->op.handle;
    int first = R2_NCCL_OK;

    for (; r; r = r->next) {
        int result = R2_NCCL_INTERNAL;

        if (r->issued || r->op.handle != handle || (r->entry != NULL) != replaced)
            continue;
        r->issued = true;
        if (!gone(&r->op) && r->entry) {
            r->nkeys = keys_of(&r->op, r->entry, r->keys);
            result = run_parts(&r->op, r->entry);
        } else if (!gone(&r->op)) {
            result = call(&r->op);
        }
        first = r2_nccl_worse(first, result);
    }
    return first;
}

static void forget(struct recorded *r)
{
    if (r->op.comm)
        r2_comms_drop(r->op.comm);
    free(r->config);
    free(r);
}

int r2_run_group_end(bool stock)
{
    struct recorded *all = group.first;
    int first = R2_NCCL_OK;

    group.first = group.last = NULL;
    group.recording = false;
    /* Once: whether a stream is being captured may change between two questions. */
    for (struct recorded *r = all; r; r = r->next)
        r->entry = stock ? NULL : entry_of(&r->op);
    for (struct recorded *r = all; r; r = r->next) {
        if (r->issued)
            continue; /* with the first of its communicator */
        for (int replaced = 0; replaced < 2; replaced++) {
            int result = issue(r, replaced);

            first = r2_nccl_worse(first, result);
        }
    }
    while (all) {
        struct recorded *next = all->next;

        if (own_reduction(&all->op)) {
            int result = r2_reduction_release(all->op.comm, all->op.handle, (int)all->op.word[OP]);

            first = r2_nccl_worse(first, result);
        }
        all->next = group.put;
        if (all->nkeys)
            group.put = all;
        else
            forget(all);
        all = next;
    }
    return first;
}

void r2_run_group_over(bool took)
{
    while (group.put) {
        struct recorded *r = group.put;

        group.put = r->next;
        mark(&r->op, r->keys, r->nkeys);
        if (took)
            count(&r->op);
        forget(r);
    }
}

/* ---- */

bool r2_run_asks(struct r2_comm *comm)
{
    return group.recording || (comm && comm->follow);
}

/* The application's own reductions stay with NCCL, plan or not, and would be compared with what
 * they are not like. */
static void start_watch(const struct r2_op *op, bool under)
{
    uint64_t bytes = op->word[COUNT] * r2_nccl_type_size((int)op->word[TYPE]);

    if (op->api == R2_API_ncclAllReduce && op->word[OP] < BUILT_IN_OPS)
        r2_follow_time(op->comm->follow, bytes, under, (void *)op->word[STREAM]);
}

bool r2_run_take(const struct r2_op *op, int *result)
{
    const struct r2_plan_entry *entry;

    if (r2_comms_in_group()) {
        if (!group.recording && !planned(op->comm))
            return false;
        *result = record(op);
        return true;
    }
    if (op->comm && r2_follow_vote(op->comm->follow) &&
        r2_vote_take(r2_follow_vote(op->comm->follow), op, result))
        return true;
    entry = entry_of(op);
    start_watch(op, entry != NULL);
    if (!entry)
        return false;
    *result = run_alone(op, entry);
    return true;
}
