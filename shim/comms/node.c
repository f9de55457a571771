#define _GNU_SOURCE
#include "comms/node.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/device.h"
#include "real/nest.h"
#include "settings/settings.h"
#include "util/clock.h"
#include "util/lock.h"
#include "util/log.h"
#include "util/thread.h"

#define LOOK_NS R2_NS_PER_MS /* at what NCCL does on threads of its own */

struct r2_node {
    struct r2_node_config config;
    int (*reduce_scatter)(const void *, void *, size_t, int, int, r2_nccl_comm, r2_nccl_stream);
    int (*all_gather)(const void *, void *, size_t, int, r2_nccl_comm, r2_nccl_stream);
    pthread_mutex_t lock; /* guards the rest */
    enum r2_node_state state;
    r2_nccl_comm handle; /* while MADE */
    int holders;         /* its owner and its thread, at first */
};

bool r2_node_id(struct r2_real *real, uint8_t id[R2_AGREE_ID])
{
    int (*get)(struct r2_nccl_id *) = real->fn[R2_API_ncclGetUniqueId];
    struct r2_nccl_id made;
    int result;

    _Static_assert(sizeof(made.bytes) == R2_AGREE_ID, "an id is an id");
    if (!get)
        return false;
    r2_call_nest();
    result = get(&made);
    r2_call_unnest();
    memcpy(id, made.bytes, R2_AGREE_ID);
    return result == R2_NCCL_OK;
}

static void end(struct r2_node *n, enum r2_api how, r2_nccl_comm handle)
{
    int (*fn)(r2_nccl_comm) = n->config.real->fn[how];

    if (!fn || !handle || r2_device_enter(n->config.device))
        return; /* it has gone with its device */
    r2_call_nest();
    fn(handle);
    r2_call_unnest();
    r2_device_leave();
}

void r2_node_hold(struct r2_node *n)
{
    pthread_mutex_lock(&n->lock);
    n->holders++;
    pthread_mutex_unlock(&n->lock);
}

void r2_node_drop(struct r2_node *n)
{
    int left;

    pthread_mutex_lock(&n->lock);
    left = --n->holders;
    pthread_mutex_unlock(&n->lock);
    if (left)
        return;
    pthread_mutex_destroy(&n->lock);
    free(n);
}

enum r2_node_state r2_node_state(struct r2_node *n)
{
    enum r2_node_state state;

    pthread_mutex_lock(&n->lock);
    state = n->state;
    pthread_mutex_unlock(&n->lock);
    return state;
}

/* ---- making it */

/* What NCCL does on threads of its own for the communicator, which does not block, so that what
 * never ends can be aborted. */
static int look(struct r2_node *n, r2_nccl_comm handle)
{
    int (*state)(r2_nccl_comm, int *) = n->config.real->fn[R2_API_ncclCommGetAsyncError];
    int rc = R2_NCCL_SYSTEM, is = R2_NCCL_IN_PROGRESS;

    pthread_mutex_lock(&n->lock); /* who aborts takes the handle first */
    if (n->state == R2_NODE_MAKING || n->handle == handle) {
        r2_call_nest();
        rc = state(handle, &is);
        r2_call_unnest();
    }
    pthread_mutex_unlock(&n->lock);
    return rc ? rc : is;
}

/* Waits for what was begun; NCCL's result. */
static int settled(struct r2_node *n, r2_nccl_comm handle, int result, uint64_t until_ns)
{
    const struct timespec nap = {.tv_nsec = (long)LOOK_NS};

    while (result == R2_NCCL_IN_PROGRESS) {
        result = look(n, handle);
        if (result != R2_NCCL_IN_PROGRESS)
            break;
        if (r2_now_ns() > until_ns)
            return R2_NCCL_SYSTEM;
        clock_nanosleep(CLOCK_MONOTONIC, 0, &nap, NULL);
    }
    return result;
}

static int call_init(struct r2_node *n, r2_nccl_comm *handle)
{
    int (*init)(r2_nccl_comm *, int, struct r2_nccl_id, int, struct r2_nccl_config *) =
        n->config.real->fn[R2_API_ncclCommInitRankConfig];
    struct r2_nccl_config config = {.size = offsetof(struct r2_nccl_config, cga_cluster_size) + 4,
                                    .magic = R2_NCCL_CONFIG_MAGIC,
                                    .version = 21400};
    struct r2_nccl_id id;
    int result;

    memcpy(id.bytes, n->config.id, sizeof(id.bytes));
    r2_call_nest();
    result = init(handle, n->config.nranks, id, n->config.rank, &config);
    r2_call_unnest();
    return settled(n, *handle, result, r2_now_ns() + r2_settings_get()->agree_timeout_ns);
}

static void *make_main(void *arg)
{
    struct r2_node *n = arg;
    r2_nccl_comm handle = NULL;
    int result = R2_NCCL_SYSTEM;
    bool kept;

    pthread_setname_np(pthread_self(), "r2ccl-make");
    if (r2_device_enter(n->config.device) == 0) {
        result = call_init(n, &handle);
        r2_device_leave();
    }
    if (result != R2_NCCL_OK)
        R2_WARN("the communicator of this node's ranks could not be made: NCCL says %d", result);
    pthread_mutex_lock(&n->lock);
    kept = n->state == R2_NODE_MAKING && result == R2_NCCL_OK;
    if (kept)
        n->handle = handle;
    if (n->state == R2_NODE_MAKING)
        n->state = kept ? R2_NODE_MADE : R2_NODE_FAILED;
    pthread_mutex_unlock(&n->lock);
    if (!kept)
        end(n, R2_API_ncclCommAbort, handle);
    n->config.changed();
    r2_node_drop(n);
    return NULL;
}

int r2_node_new(struct r2_node **out, const struct r2_node_config *config)
{
    struct r2_node *n = calloc(1, sizeof(*n));

    *out = NULL;
    if (!n)
        return -ENOMEM;
    n->config = *config;
    n->reduce_scatter = config->real->fn[R2_API_ncclReduceScatter];
    n->all_gather = config->real->fn[R2_API_ncclAllGather];
    r2_lock_init(&n->lock);
    n->holders = 2;
    if (!n->reduce_scatter || !n->all_gather || !config->real->fn[R2_API_ncclCommInitRankConfig] ||
        !config->real->fn[R2_API_ncclCommGetAsyncError] || r2_thread_start(make_main, n)) {
        int rc = n->reduce_scatter && n->all_gather ? -EAGAIN : -ENOSYS;

        pthread_mutex_destroy(&n->lock);
        free(n);
        return rc;
    }
    *out = n;
    return 0;
}

/* ---- using it */

/* NULL, which NCCL refuses, after an abort. */
static r2_nccl_comm handle_of(struct r2_node *n)
{
    r2_nccl_comm handle;

    pthread_mutex_lock(&n->lock);
    handle = n->handle;
    pthread_mutex_unlock(&n->lock);
    return handle;
}

int r2_node_reduce_scatter(struct r2_node *n, const void *in, void *out, size_t count, int type,
                           int op, r2_nccl_stream stream)
{
    r2_nccl_comm handle = handle_of(n);
    int result;

    r2_call_nest();
    result = n->reduce_scatter(in, out, count, type, op, handle, stream);
    r2_call_unnest();
    return settled(n, handle, result, UINT64_MAX);
}

int r2_node_all_gather(struct r2_node *n, const void *in, void *out, size_t count, int type,
                       r2_nccl_stream stream)
{
    r2_nccl_comm handle = handle_of(n);
    int result;

    r2_call_nest();
    result = n->all_gather(in, out, count, type, handle, stream);
    r2_call_unnest();
    return settled(n, handle, result, UINT64_MAX);
}

/* ---- the end */

static r2_nccl_comm take(struct r2_node *n)
{
    r2_nccl_comm handle;

    pthread_mutex_lock(&n->lock);
    handle = n->handle;
    n->handle = NULL;
    if (n->state != R2_NODE_FAILED)
        n->state = R2_NODE_ABORTED;
    pthread_mutex_unlock(&n->lock);
    return handle;
}

void r2_node_abort(struct r2_node *n)
{
    end(n, R2_API_ncclCommAbort, take(n));
}

void r2_node_free(struct r2_node *n)
{
    if (!n)
        return;
    end(n, R2_API_ncclCommDestroy, take(n));
    r2_node_drop(n);
}
