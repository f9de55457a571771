#define _GNU_SOURCE
#include "tuning.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "tuner/nccl_tuner_abi.h"

enum { ALGOS = R2_NCCL_TUNER_ALGOS, PROTOS = R2_NCCL_TUNER_PROTOS };

static const char *const algo_names[] = {"Tree", "Ring"};
static const char *const proto_names[] = {"LL", "LL128", "Simple"};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static enum { READY, FAILED, LOADED } status;
static void *library;
static const void *table; /* struct r2_nccltuner_v<version> */
static int version, users;

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

static void fill_costs(enum hn_func func, size_t bytes, float costs[ALGOS][PROTOS])
{
    unsigned algos = allowed("NCCL_ALGO", algo_names, 2);
    if (func != HN_ALLREDUCE)
        algos = 1u << HN_RING; /* nothing else can do it */
    for (int a = 0; a < ALGOS; a++)
        for (int p = 0; p < PROTOS; p++) {
            int rank = a <= HN_RING && algos & 1u << a ? proto_rank(p, bytes, false) : -1;
            float time = 10 + (float)bytes / 1000;
            costs[a][p] = R2_NCCL_TUNER_IGNORE;
            if (rank >= 0)
                costs[a][p] = time * (a == HN_TREE ? 10 : 1) * (float)(1 + rank);
        }
}

static int ask_tuner(struct ncclComm *comm, enum hn_func func, size_t bytes,
                     float costs[ALGOS][PROTOS], int *algo, int *proto)
{
    const struct r2_nccltuner_v2 *v2 = table;
    const struct r2_nccltuner_v3 *v3 = table;
    const struct r2_nccltuner_v4 *v4 = table;
    int channels = 0, rc;
    float **flat = (float **)(void *)costs;
    if (comm->tuner == 2)
        rc = v2->info(comm->tuner_ctx, (int)func, bytes, 0, 0, 1, algo, proto, &channels);
    else if (comm->tuner == 3)
        rc = v3->info(comm->tuner_ctx, (int)func, bytes, 1, flat, ALGOS, PROTOS, &channels);
    else
        rc = v4->info(comm->tuner_ctx, (int)func, bytes, 1, flat, ALGOS, PROTOS, 0, &channels);
    if (rc)
        hn_util_fail((ncclResult_t)rc, "TUNER/Plugin: %s returned %d", v2->name, rc);
    return rc;
}

ncclResult_t hn_tuning_choose(struct ncclComm *comm, enum hn_func func, size_t bytes,
                              enum hn_algo *out_algo, enum hn_proto *out_proto)
{
    float costs[ALGOS][PROTOS], least = 3600e6f;
    int algo = -1, proto = -1;
    fill_costs(func, bytes, costs);
    if (comm->tuner) {
        int rc = ask_tuner(comm, func, bytes, costs, &algo, &proto);
        if (rc)
            return (ncclResult_t)rc;
    }
    if (algo < 0 || proto < 0) /* v2 answers by number, and nobody checks it */
        for (int a = 0; a < ALGOS; a++)
            for (int p = 0; p < PROTOS; p++)
                if (costs[a][p] >= 0 && costs[a][p] < least) {
                    least = costs[a][p];
                    algo = a;
                    proto = p;
                }
    if (algo < 0 || algo > HN_RING || (algo == HN_TREE && func != HN_ALLREDUCE))
        return hn_util_fail(ncclInternalError, "no algorithm/protocol available: %d, %d", algo,
                            proto);
    if (func == HN_ALLREDUCE && comm->said_algo != algo + 1) { /* as it changes, not for each */
        comm->said_algo = algo + 1;
        HN_INFO("rank %d, comm 0x%llx: AllReduce: %zu Bytes -> Algo %s proto %s", comm->rank,
                (unsigned long long)comm->id, bytes, algo_names[algo], proto_names[proto]);
    }
    *out_algo = (enum hn_algo)algo;
    *out_proto = (enum hn_proto)proto;
    return ncclSuccess;
}

/* Newest tuner API of the NCCL that has this net API. */
static int newest(const struct hn_net *net)
{
    static const int of_net[] = {[6] = 0, [7] = 0, [8] = 3, [9] = 4, [10] = 4, [11] = 5, [12] = 5};
    int cap = net->table && net->version <= 12 ? of_net[net->version] : 5;
    return (int)hn_util_env("HOSTNCCL_TUNER_VERSION", cap, 0, cap);
}

static void *open_library(const struct hn_net *net)
{
    const char *name = getenv("NCCL_TUNER_PLUGIN");
    char file[300];
    void *dl;
    if (name && !strcasecmp(name, "none"))
        return NULL;
    dl = dlopen(name && *name ? name : "libnccl-tuner.so", RTLD_NOW | RTLD_LOCAL);
    if (!dl && name && *name && !strchr(name, '/')) {
        snprintf(file, sizeof(file), "libnccl-tuner-%s.so", name);
        dl = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    }
    if (dl || !net->dl)
        return dl;
    /* The net plugin's once more, by its name as NCCL does it. */
    dl = dlopen(net->file, RTLD_NOW | RTLD_LOCAL);
    if (!dl) {
        snprintf(file, sizeof(file), "libnccl-net-%s.so", net->file);
        dl = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    }
    return dl;
}

/* Under the lock. A process that finds no tuner never looks again. */
static void load(struct ncclComm *comm)
{
    status = FAILED;
    int cap = newest(comm->net->net);
    library = cap ? open_library(comm->net->net) : NULL;
    for (int v = cap; library && v >= 2; v--) {
        char symbol[32];
        snprintf(symbol, sizeof(symbol), "ncclTunerPlugin_v%d", v);
        table = dlsym(library, symbol);
        if (!table)
            continue;
        version = v;
        status = LOADED;
        HN_INFO("TUNER/Plugin: Using %s (v%d)", *(const char *const *)table, v);
        return;
    }
    if (library)
        dlclose(library);
    library = NULL;
}

ncclResult_t hn_tuning_open(struct ncclComm *comm)
{
    pthread_mutex_lock(&lock);
    if (status == READY)
        load(comm);
    if (status == LOADED) {
        comm->tuner = version;
        users++;
    }
    pthread_mutex_unlock(&lock);
    if (!comm->tuner)
        return ncclSuccess;
    const struct r2_nccltuner_v2 *v2 = table; /* init of v2, v3 and v4 is the same */
    const struct r2_nccltuner_v5 *v5 = table;
    size_t ranks = (size_t)comm->nranks, nodes = (size_t)comm->nodes;
    int rc;
    comm->tuner_ctx = (void *)0xa5a5a5a5a5a5a5a5ull;
    if (comm->tuner == 5) {
        struct r2_nccltuner_nvl_domains domains = {comm->nodes, 1, comm->nranks};
        struct r2_nccltuner_constants constants;
        memset(&constants, 0, sizeof(constants));
        rc = v5->init(&comm->tuner_ctx, comm->id, ranks, nodes, hn_util_logger, &domains,
                      &constants);
    } else {
        rc = v2->init(ranks, nodes, hn_util_logger, &comm->tuner_ctx);
    }
    if (rc) { /* not destroyed, as in NCCL */
        hn_util_fail((ncclResult_t)rc, "TUNER/Plugin: init of %s returned %d", v2->name, rc);
        comm->tuner_ctx = NULL;
        comm->tuner_failed = true;
    }
    return (ncclResult_t)rc;
}

void hn_tuning_close(struct ncclComm *comm)
{
    if (!comm->tuner)
        return;
    const struct r2_nccltuner_v2 *any = table; /* the last function is the same in all versions */
    int rc = comm->tuner_failed ? 0 : any->destroy(comm->tuner_ctx);
    if (rc)
        HN_WARN("TUNER/Plugin: %s could not be closed: %d", any->name, rc);
    comm->tuner = 0;
    pthread_mutex_lock(&lock);
    if (--users == 0) {
        dlclose(library);
        library = NULL;
        table = NULL;
        status = READY;
    }
    pthread_mutex_unlock(&lock);
}
