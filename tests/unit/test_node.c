/* The communicator of a node's ranks, over an NCCL that is made up (rung 1): one that never ends
 * making it, one that is aborted meanwhile, one that goes on with work on threads of its own. */
#define _GNU_SOURCE
#include <stdatomic.h>

#include "settings/settings.h"

static struct r2_settings quick = {.agree_timeout_ns = UINT64_C(300000000)};
static const struct r2_settings *quick_settings(void)
{
    return &quick;
}
#define r2_settings_get quick_settings
#include "../../shim/comms/node.c"
#undef r2_settings_get

#include "await.h"
#include "check.h"

#define HANDLE ((r2_nccl_comm)0x1234)

static struct {
    atomic_int state;  /* what ncclCommGetAsyncError says */
    atomic_int result; /* of calls */
    atomic_int aborts, destroys, blocking, changes;
} nccl;

static int init(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank,
                struct r2_nccl_config *config)
{
    (void)nranks, (void)id, (void)rank;
    *out = HANDLE;
    atomic_store(&nccl.blocking, config->blocking);
    return atomic_load(&nccl.result);
}

static int state_of(r2_nccl_comm handle, int *is)
{
    CHECK(handle == HANDLE);
    *is = atomic_load(&nccl.state);
    return R2_NCCL_OK;
}

static int ends(r2_nccl_comm handle)
{
    CHECK(handle == HANDLE);
    atomic_fetch_add(&nccl.aborts, 1);
    return R2_NCCL_OK;
}

static int destroy(r2_nccl_comm handle)
{
    CHECK(handle == HANDLE);
    atomic_fetch_add(&nccl.destroys, 1);
    return R2_NCCL_OK;
}

static int reduces(const void *in, void *out, size_t n, int type, int op, r2_nccl_comm handle,
                   r2_nccl_stream stream)
{
    (void)in, (void)out, (void)n, (void)type, (void)op, (void)stream;
    CHECK(handle == HANDLE);
    return atomic_load(&nccl.result);
}

static int gathers(const void *in, void *out, size_t n, int type, r2_nccl_comm handle,
                   r2_nccl_stream stream)
{
    return reduces(in, out, n, type, 0, handle, stream);
}

static void changed(void)
{
    atomic_fetch_add(&nccl.changes, 1);
}

static struct r2_node *begin(int result, int state)
{
    static struct r2_real real;
    struct r2_node_config config = {.real = &real, .nranks = 2, .changed = changed};
    struct r2_node *n;

    real.fn[R2_API_ncclCommInitRankConfig] = init;
    real.fn[R2_API_ncclCommGetAsyncError] = state_of;
    real.fn[R2_API_ncclCommAbort] = ends;
    real.fn[R2_API_ncclCommDestroy] = destroy;
    real.fn[R2_API_ncclReduceScatter] = reduces;
    real.fn[R2_API_ncclAllGather] = gathers;
    memset(&nccl, 0, sizeof(nccl));
    atomic_store(&nccl.blocking, 1);
    atomic_store(&nccl.result, result);
    atomic_store(&nccl.state, state);
    CHECK_EQ(r2_node_new(&n, &config), 0);
    return n;
}

static void test_one_that_is_never_made(void)
{
    struct r2_node *n = begin(R2_NCCL_IN_PROGRESS, R2_NCCL_IN_PROGRESS);

    AWAIT(r2_node_state(n) == R2_NODE_FAILED);
    AWAIT(atomic_load(&nccl.changes) == 1);
    CHECK_EQ(atomic_load(&nccl.blocking), 0);
    CHECK_EQ(atomic_load(&nccl.aborts), 1);
    r2_node_free(n);
    CHECK_EQ(atomic_load(&nccl.destroys), 0);
}

static void test_an_abort_meanwhile(void)
{
    struct r2_node *n;

    quick.agree_timeout_ns = 60 * R2_NS_PER_S;
    n = begin(R2_NCCL_IN_PROGRESS, R2_NCCL_IN_PROGRESS);
    r2_node_abort(n);
    AWAIT(atomic_load(&nccl.changes) == 1);
    CHECK_EQ(r2_node_state(n), R2_NODE_ABORTED);
    CHECK_EQ(atomic_load(&nccl.aborts), 1);
    r2_node_free(n);
}

static void *makes_progress(void *arg)
{
    (void)arg;
    usleep(20000);
    atomic_store(&nccl.state, R2_NCCL_OK);
    return NULL;
}

static void *aborts(void *n)
{
    usleep(20000);
    r2_node_abort(n);
    return NULL;
}

static void test_operations(void)
{
    struct r2_node *n = begin(R2_NCCL_OK, R2_NCCL_OK);
    pthread_t thread;

    AWAIT(r2_node_state(n) == R2_NODE_MADE);
    CHECK_EQ(r2_node_all_gather(n, NULL, NULL, 1, 0, NULL), R2_NCCL_OK);
    atomic_store(&nccl.state, R2_NCCL_IN_PROGRESS);
    atomic_store(&nccl.result, R2_NCCL_IN_PROGRESS);
    CHECK_EQ(pthread_create(&thread, NULL, makes_progress, NULL), 0);
    CHECK_EQ(r2_node_reduce_scatter(n, NULL, NULL, 1, 0, 0, NULL), R2_NCCL_OK);
    pthread_join(thread, NULL);
    /* What never ends is waited for until it is aborted; then the handle is not asked about. */
    atomic_store(&nccl.state, R2_NCCL_IN_PROGRESS);
    CHECK_EQ(pthread_create(&thread, NULL, aborts, n), 0);
    CHECK_EQ(r2_node_all_gather(n, NULL, NULL, 1, 0, NULL), R2_NCCL_SYSTEM);
    pthread_join(thread, NULL);
    CHECK_EQ(atomic_load(&nccl.aborts), 1);
    r2_node_free(n);
}

static const struct check_test tests[] = {{"one_that_is_never_made", test_one_that_is_never_made},
                                          {"an_abort_meanwhile", test_an_abort_meanwhile},
                                          {"operations", test_operations},
                                          {0}};

int main(int argc, char **argv)
{
    return check_main(argc, argv, tests);
}
