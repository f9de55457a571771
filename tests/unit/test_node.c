/* The communicator of a node's ranks, over an NCCL that is made up (rung 1): it may wait for ever
 * for the other ranks. */
#define _GNU_SOURCE
#include <stdatomic.h>

#include "settings/settings.h"

static struct r2_settings quick;
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
    atomic_bool waits; /* NCCL, for the other ranks */
    atomic_int inits, aborts, destroys, calls, changes;
} nccl;

static int init(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank)
{
    (void)nranks, (void)id, (void)rank;
    atomic_fetch_add(&nccl.inits, 1);
    while (atomic_load(&nccl.waits))
        await_nap();
    *out = HANDLE;
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
    atomic_fetch_add(&nccl.calls, 1);
    return R2_NCCL_OK;
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

static struct r2_node *begin(uint64_t limit_ns, bool waits)
{
    static struct r2_real real;
    struct r2_node_config config = {.real = &real, .nranks = 2, .changed = changed};
    struct r2_node *n;

    real.fn[R2_API_ncclCommInitRank] = init;
    real.fn[R2_API_ncclCommAbort] = ends;
    real.fn[R2_API_ncclCommDestroy] = destroy;
    real.fn[R2_API_ncclReduceScatter] = reduces;
    real.fn[R2_API_ncclAllGather] = gathers;
    memset(&nccl, 0, sizeof(nccl));
    atomic_store(&nccl.waits, waits);
    quick.agree_timeout_ns = limit_ns;
    CHECK_EQ(r2_node_new(&n, &config), 0);
    AWAIT(atomic_load(&nccl.inits) == 1);
    return n;
}

/* NCCL returns, late: what it has made is ended. */
static void comes_late(void)
{
    atomic_store(&nccl.waits, false);
    AWAIT(atomic_load(&nccl.changes) == 1);
    CHECK_EQ(atomic_load(&nccl.aborts), 1);
    CHECK_EQ(atomic_load(&nccl.destroys), 0);
}

TEST(one_that_is_never_made)
{
    struct r2_node *n = begin(200 * R2_NS_PER_MS, true);

    AWAIT(r2_node_state(n) == R2_NODE_FAILED);
    r2_node_free(n); /* waits for nobody */
    comes_late();
}

TEST(an_abort_meanwhile)
{
    struct r2_node *n = begin(60 * R2_NS_PER_S, true);

    CHECK_EQ(r2_node_state(n), R2_NODE_MAKING);
    r2_node_abort(n);
    CHECK_EQ(r2_node_state(n), R2_NODE_ABORTED);
    r2_node_free(n);
    comes_late();
}

TEST(operations)
{
    struct r2_node *n = begin(60 * R2_NS_PER_S, false);

    AWAIT(r2_node_state(n) == R2_NODE_MADE);
    CHECK_EQ(r2_node_reduce_scatter(n, NULL, NULL, 1, 0, 0, NULL), R2_NCCL_OK);
    CHECK_EQ(r2_node_all_gather(n, NULL, NULL, 1, 0, NULL), R2_NCCL_OK);
    CHECK_EQ(atomic_load(&nccl.calls), 2);
    r2_node_free(n);
    CHECK_EQ(atomic_load(&nccl.destroys), 1);
}
