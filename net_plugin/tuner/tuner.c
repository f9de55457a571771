/* The tuner's tables and what it answers. */
#include "tuner/tuner.h"

#include <stdlib.h>

#include "tuner/nccl_tuner_abi.h"
#include "tuner/want.h"

struct tuning { /* one communicator's; NCCL's context. NULL without a want */
    int algo;   /* NCCL's number */
    size_t min_bytes;
    bool users_choice; /* NCCL_ALGO or NCCL_PROTO is set */
};

static bool is_set(const char *variable)
{
    const char *value = getenv(variable);

    return value && *value;
}

static void *tuning_new(void)
{
    struct r2ccl_tuner_want want;
    struct tuning *tuning = malloc(sizeof(*tuning));

    /* Without memory the want stays untaken, and its maker finds that out. */
    if (!tuning || !r2_tuner_take_want(&want) || want.algo == R2CCL_TUNER_NONE) {
        free(tuning);
        return NULL;
    }
    tuning->algo = want.algo == R2CCL_TUNER_TREE ? R2_NCCL_ALGO_TREE : R2_NCCL_ALGO_RING;
    tuning->min_bytes = want.min_bytes;
    tuning->users_choice = is_set("NCCL_ALGO") || is_set("NCCL_PROTO");
    return tuning;
}

static int init_v2(size_t ranks, size_t nodes, r2_nccl_logger log, void **ctx)
{
    (void)ranks;
    (void)nodes;
    (void)log;
    *ctx = tuning_new();
    return R2_NCCL_SUCCESS;
}

static int init_v5(void **ctx, uint64_t comm_id, size_t ranks, size_t nodes, r2_nccl_logger log,
                   struct r2_nccltuner_nvl_domains *domains,
                   struct r2_nccltuner_constants *constants)
{
    (void)comm_id;
    (void)domains;
    (void)constants;
    return init_v2(ranks, nodes, log, ctx);
}

static bool concerns(const struct tuning *tuning, int func, size_t bytes)
{
    return tuning && func == R2_NCCL_FUNC_ALLREDUCE && bytes >= tuning->min_bytes;
}

/* Rules every other algorithm out. The protocol remains NCCL's choice. Costs come from what all
 * ranks agreed upon when the communicator was made, so they all see the same table. */
static void force(const struct tuning *tuning, float *costs, int algos, int protos)
{
    bool possible = false;

    for (int p = 0; tuning->algo < algos && p < protos; p++) {
        possible |= costs[tuning->algo * protos + p] >= 0;
    }
    for (int a = 0; possible && a < algos; a++) {
        for (int p = 0; a != tuning->algo && p < protos; p++) {
            costs[a * protos + p] = R2_NCCL_TUNER_IGNORE;
        }
    }
}

/* NCCL takes both numbers as they are, whatever the user's variables say. */
static int info_v2(void *ctx, int func, size_t bytes, int collnet, int nvls, int operations,
                   int *algo, int *proto, int *channels)
{
    const struct tuning *tuning = ctx;

    (void)collnet;
    (void)nvls;
    (void)operations;
    (void)channels;
    if (concerns(tuning, func, bytes) && !tuning->users_choice) {
        *algo = tuning->algo;
        *proto = R2_NCCL_PROTO_SIMPLE;
    }
    return R2_NCCL_SUCCESS;
}

static int info_v3(void *ctx, int func, size_t bytes, int operations, float **costs, int algos,
                   int protos, int *channels)
{
    (void)operations;
    (void)channels;
    if (concerns(ctx, func, bytes) && costs) {
        force(ctx, (float *)(void *)costs, algos, protos);
    }
    return R2_NCCL_SUCCESS;
}

static int info_v4(void *ctx, int func, size_t bytes, int operations, float **costs, int algos,
                   int protos, int registered, int *channels)
{
    (void)registered;
    return info_v3(ctx, func, bytes, operations, costs, algos, protos, channels);
}

static int destroy(void *ctx)
{
    free(ctx);
    return R2_NCCL_SUCCESS;
}

static const char name[] = "R2CCL";

static const struct r2_nccltuner_v5 table_v5 = {name, init_v5, info_v4, destroy};
static const struct r2_nccltuner_v4 table_v4 = {name, init_v2, info_v4, destroy};
static const struct r2_nccltuner_v3 table_v3 = {name, init_v2, info_v3, destroy};
static const struct r2_nccltuner_v2 table_v2 = {name, init_v2, info_v2, destroy};

/* NCCL looks once per process, and whatever it finds changes what it does: it says so in its log
 * and gives up NCCL_CTA_POLICY's choice of algorithms. So dlsym finds the tables only in processes
 * whose shim has announced itself: an indirect function's resolver runs at every dlsym, and its
 * answer is the symbol's address. Nothing else refers to these symbols. */
typedef void (*address)(void);
#define TABLE(version)                                                                             \
    static __attribute__((used)) address find_##version(void)                                      \
    {                                                                                              \
        return r2_tuner_announced() ? (address)(uintptr_t)&table_##version : NULL;                 \
    }                                                                                              \
    R2_TUNER_EXPORT void ncclTunerPlugin_##version(void) __attribute__((ifunc("find_" #version)))
TABLE(v5);
TABLE(v4);
TABLE(v3);
TABLE(v2);
