/* Binary interface between NCCL and a tuner plugin, v2 to v5: our own declarations, written from
 * the documented facts. Only layout matters here: names are ours.
 *
 * One struct per version is exported as symbol "ncclTunerPlugin_vN"; NCCL takes the newest that it
 * knows.
 *   NCCL 2.18: none   2.19, 2.20: v1, only from a library named by NCCL_TUNER_PLUGIN
 *   2.21: v2   2.22, 2.23: v2, v3   2.24 to 2.27: v2 to v4   2.28, 2.29: v2 to v5   2.30: v2 to v6
 * v1 has no context: it cannot tell communicators apart, so it is of no use here. v6 adds only a
 * call that may be missing (chunk sizes).
 *
 * The library: NCCL_TUNER_PLUGIN ("none": no tuner; a name), else libnccl-tuner.so, else the
 * library of the net plugin. 2.21 to 2.25 open that once more by its name (NCCL_NET_PLUGIN or
 * libnccl-net.so), later ones take the handle.
 *
 * `init` is called once per communicator and rank, after the net plugin's; an error of any call
 * makes NCCL's operation fail. The cost table is one block of float, [algorithms][protocols], in
 * microseconds, though its type is float**; the smallest entry that is not R2_NCCL_TUNER_IGNORE
 * wins. `channels` (v3 and later: 0 on entry) keeps NCCL's choice when it is left alone. */
#ifndef R2_TUNER_NCCL_TUNER_ABI_H
#define R2_TUNER_NCCL_TUNER_ABI_H

#include <stddef.h>

#include "nccl_abi/nccl_net_abi.h"

#define R2_NCCL_TUNER_IGNORE (-1.0f)
#define R2_NCCL_FUNC_ALLREDUCE 4
#define R2_NCCL_ALGO_TREE 0
#define R2_NCCL_ALGO_RING 1
#define R2_NCCL_PROTO_LL 0
#define R2_NCCL_PROTO_LL128 1
#define R2_NCCL_PROTO_SIMPLE 2
#define R2_NCCL_TUNER_ALGOS 7 /* v5; 6 up to NCCL 2.22 */
#define R2_NCCL_TUNER_PROTOS 3

struct r2_nccltuner_nvl_domains { /* v5 */
    int domains;
    int least_ranks;
    int most_ranks;
};

struct r2_nccltuner_constants { /* v5: may be changed at init */
    double base_latencies[R2_NCCL_TUNER_ALGOS][R2_NCCL_TUNER_PROTOS];
    double hw_latencies[3][R2_NCCL_TUNER_ALGOS][R2_NCCL_TUNER_PROTOS];
    double max_bandwidths[5][4][3]; /* five tables: generation of the GPU, number of nodes */
};

typedef int (*r2_nccltuner_init_v2)(size_t ranks, size_t nodes, r2_nccl_logger log,
                                    void **ctx); /* v2-v4 */
typedef int (*r2_nccltuner_init_v5)(void **ctx, uint64_t comm_id, size_t ranks, size_t nodes,
                                    r2_nccl_logger log, struct r2_nccltuner_nvl_domains *domains,
                                    struct r2_nccltuner_constants *constants);
typedef int (*r2_nccltuner_info_v2)(void *ctx, int func, size_t bytes, int collnet, int nvls,
                                    int operations, int *algo, int *proto, int *channels);
typedef int (*r2_nccltuner_info_v3)(void *ctx, int func, size_t bytes, int operations,
                                    float **costs, int algos, int protos, int *channels);
typedef int (*r2_nccltuner_info_v4)(void *ctx, int func, size_t bytes, int operations,
                                    float **costs, int algos, int protos, int registered,
                                    int *channels); /* v4, v5 */
typedef int (*r2_nccltuner_destroy)(void *ctx);

struct r2_nccltuner_v2 {
    const char *name;
    r2_nccltuner_init_v2 init;
    r2_nccltuner_info_v2 info;
    r2_nccltuner_destroy destroy;
};

struct r2_nccltuner_v3 {
    const char *name;
    r2_nccltuner_init_v2 init;
    r2_nccltuner_info_v3 info;
    r2_nccltuner_destroy destroy;
};

struct r2_nccltuner_v4 {
    const char *name;
    r2_nccltuner_init_v2 init;
    r2_nccltuner_info_v4 info;
    r2_nccltuner_destroy destroy;
};

struct r2_nccltuner_v5 {
    const char *name;
    r2_nccltuner_init_v5 init;
    r2_nccltuner_info_v4 info;
    r2_nccltuner_destroy destroy;
};

#define R2_NCCLTUNER_CHECK(version)                                                                \
    _Static_assert(sizeof(struct r2_nccltuner_##version) == 32 &&                                  \
                       offsetof(struct r2_nccltuner_##version, name) == 0 &&                       \
                       offsetof(struct r2_nccltuner_##version, init) == 8 &&                       \
                       offsetof(struct r2_nccltuner_##version, info) == 16 &&                      \
                       offsetof(struct r2_nccltuner_##version, destroy) == 24,                     \
                   "a name and three functions")
R2_NCCLTUNER_CHECK(v2);
R2_NCCLTUNER_CHECK(v3);
R2_NCCLTUNER_CHECK(v4);
R2_NCCLTUNER_CHECK(v5);
_Static_assert(sizeof(struct r2_nccltuner_nvl_domains) == 12, "three integers");
_Static_assert(sizeof(struct r2_nccltuner_constants) == (4 * 7 * 3 + 5 * 4 * 3) * 8 &&
                   offsetof(struct r2_nccltuner_constants, hw_latencies) == 168 &&
                   offsetof(struct r2_nccltuner_constants, max_bandwidths) == 672,
               "latencies of 7 algorithms over 3 links, five bandwidth tables");

#endif
