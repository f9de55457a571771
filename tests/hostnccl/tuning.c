#define _GNU_SOURCE
#include "tuning.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { ALGOS = HN_RING + 1 };

static const char *const algo_names[] = {"Tree", "Ring"};
static const char *const proto_names[] = {"LL", "LL128", "Simple"};

/* A list of names, or ^ and what is left out. Bit i: names[i] is allowed. */
static unsigned allowed(const char *variable, const char *const *names, int count)
{
    const char *text = getenv(variable);
    unsigned all = (1u << count) - 1, mask = 0;
    if (!text || !*text)
        return all;
    bool exclude = *text == '^';
    char list[128];
    char *rest = NULL;
    snprintf(list, sizeof(list), "%s", text + exclude);
    for (char *name = strtok_r(list, ",", &rest); name; name = strtok_r(NULL, ",", &rest))
        for (int i = 0; i < count; i++)
            if (!strcasecmp(name, names[i]))
                mask |= 1u << i;
    mask = exclude ? all & ~mask : mask;
    if (mask)
        return mask;
    HN_WARN("%s=%s ignored: none of its names is known here", variable, text);
    return all;
}

/* How far a protocol is from the one that the size asks for; -1: excluded. Larger ones come before
 * smaller ones. */
static int proto_rank(int proto, size_t bytes, bool p2p)
{
    unsigned mask = allowed("NCCL_PROTO", proto_names, HN_PROTOS);
    int wish = HN_SIMPLE;
    if (bytes <= (p2p ? 16u << 10 : 64u << 10))
        wish = HN_LL;
    else if (!p2p && bytes <= 1u << 20)
        wish = HN_LL128;
    if (p2p) { /* NCCL has no LL128 there */
        mask &= 1u << HN_LL | 1u << HN_SIMPLE;
        mask = mask ? mask : 1u << HN_SIMPLE;
    }
    if (!(mask & 1u << proto))
        return -1;
    return proto >= wish ? proto - wish : HN_PROTOS + wish - proto;
}

enum hn_proto hn_tuning_p2p(size_t bytes)
{
    int best = HN_SIMPLE, least = 100;
    for (int p = 0; p < HN_PROTOS; p++) {
        int rank = proto_rank(p, bytes, true);
        if (rank >= 0 && rank < least) {
            least = rank;
            best = p;
        }
    }
    return (enum hn_proto)best;
}

static void fill_costs(enum hn_func func, size_t bytes, float costs[ALGOS][HN_PROTOS])
{
    unsigned algos = allowed("NCCL_ALGO", algo_names, 2);
    if (func != HN_ALLREDUCE)
        algos = 1u << HN_RING; /* nothing else can do it */
    for (int a = 0; a < ALGOS; a++)
        for (int p = 0; p < HN_PROTOS; p++) {
            int rank = algos & 1u << a ? proto_rank(p, bytes, false) : -1;
            float time = 10 + (float)bytes / 1000;
            costs[a][p] = -1;
            if (rank >= 0)
                costs[a][p] = time * (a == HN_TREE ? 10 : 1) * (float)(1 + rank);
        }
}

ncclResult_t hn_tuning_choose(struct ncclComm *comm, enum hn_func func, size_t bytes,
                              enum hn_algo *out_algo, enum hn_proto *out_proto)
{
    float costs[ALGOS][HN_PROTOS], least = 3600e6f;
    int algo = -1, proto = -1;
    fill_costs(func, bytes, costs);
    for (int a = 0; a < ALGOS; a++)
        for (int p = 0; p < HN_PROTOS; p++)
            if (costs[a][p] >= 0 && costs[a][p] < least) {
                least = costs[a][p];
                algo = a;
                proto = p;
            }
    if (algo < 0)
        return hn_util_fail(ncclInternalError, "no algorithm or protocol is left");
    if (func == HN_ALLREDUCE && comm->said_algo != algo + 1) { /* as it changes, not for each */
        comm->said_algo = algo + 1;
        HN_INFO("rank %d, comm 0x%llx: AllReduce: %zu Bytes -> Algo %s proto %s", comm->rank,
                (unsigned long long)comm->id, bytes, algo_names[algo], proto_names[proto]);
    }
    *out_algo = (enum hn_algo)algo;
    *out_proto = (enum hn_proto)proto;
    return ncclSuccess;
}
