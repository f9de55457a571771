/* The stand-in's Tree AllReduce, ranks as threads of this process and several nodes of it: exact
 * for all types and operations, over the plugin. Rung 3: real sockets on loopback. It cannot prove
 * what real NCCL does. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "../hostnccl/nccl.h"
#include "check.h"

enum { MOST = 9, MAX_COUNT = 60000 };

#define EACH_FUNCTION(X)                                                                           \
    X(CommInitAll)                                                                                 \
    X(CommDestroy)                                                                                 \
    X(GetLastError)                                                                                \
    X(AllReduce)                                                                                   \
    X(GroupStart)                                                                                  \
    X(GroupEnd)

static struct {
#define X(f) __typeof__(&nccl##f) f;
    EACH_FUNCTION(X)
#undef X
} nc;

#define OK(call) CHECK_MSG((call) == ncclSuccess, "%s: %s", #call, nc.GetLastError(NULL))

static char debug_file[64];
static ncclComm_t comms[MOST];
static void *in[MOST], *out[MOST];
static long log_from;

static void *load(const char *name)
{
    const char *path = check_built(name);
    void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    CHECK_MSG(lib, "%s: %s", path, dlerror());
    return lib;
}

static void load_all(void)
{
    void *lib = load("hostnccl/libnccl.so.2");

#define X(f)                                                                                       \
    *(void **)&nc.f = dlsym(lib, "nccl" #f);                                                       \
    CHECK(nc.f);
    EACH_FUNCTION(X)
#undef X
}

/* Makes the communicators, each rank a node unless there are two to a node. */
static void start(int ranks, int per_node)
{
    char text[16];
    FILE *file = fopen(debug_file, "r");

    CHECK(file);
    fseek(file, 0, SEEK_END);
    log_from = ftell(file);
    fclose(file);
    snprintf(text, sizeof(text), "%d", per_node);
    setenv("HOSTNCCL_DEVICES_PER_NODE", text, 1);
    for (int r = 0; r < ranks; r++) {
        in[r] = malloc(MAX_COUNT * 8);
        out[r] = malloc(MAX_COUNT * 8);
        CHECK(in[r] && out[r]);
    }
    OK(nc.CommInitAll(comms, ranks, NULL));
}

static void finish(int ranks)
{
    for (int r = 0; r < ranks; r++) {
        OK(nc.CommDestroy(comms[r]));
        free(in[r]);
        free(out[r]);
    }
}

/* How often the log holds the text since start(). */
static int logged(const char *text)
{
    FILE *file = fopen(debug_file, "r");
    char line[16384];
    int found = 0;

    CHECK(file);
    fseek(file, log_from, SEEK_SET);
    while (fgets(line, sizeof(line), file)) {
        found += strstr(line, text) != NULL;
    }
    fclose(file);
    return found;
}

static int64_t expected(int ranks, ncclRedOp_t op, const int64_t *values)
{
    int64_t all = values[0];

    for (int r = 1; r < ranks; r++) {
        int64_t v = values[r];

        all = op == ncclMax    ? (v > all ? v : all)
              : op == ncclMin  ? (v < all ? v : all)
              : op == ncclProd ? all * v
                               : all + v;
    }
    return op == ncclAvg ? all / ranks : all;
}

/* Values small enough to be exact in every type: sums below 128, products of ones and one two. */
static int64_t value(ncclRedOp_t op, int ranks, int rank, size_t i)
{
    if (op == ncclProd) {
        return (int)(i % (size_t)ranks) == rank ? 2 : 1;
    }
    if (op == ncclAvg) {
        return (int64_t)(i % 5); /* equal on all: the mean is exact whatever is divided first */
    }
    return (int64_t)((i * 7 + (size_t)rank * 3) % 8);
}

static void put(void *data, ncclDataType_t type, size_t i, int64_t v)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        ((int8_t *)data)[i] = (int8_t)v;
        break;
    case ncclInt32:
    case ncclUint32:
        ((int32_t *)data)[i] = (int32_t)v;
        break;
    case ncclInt64:
    case ncclUint64:
        ((int64_t *)data)[i] = v;
        break;
    case ncclFloat32:
        ((float *)data)[i] = (float)v;
        break;
    case ncclFloat64:
        ((double *)data)[i] = (double)v;
        break;
    default:
        CHECK(false);
    }
}

static double get(const void *data, ncclDataType_t type, size_t i)
{
    switch (type) {
    case ncclInt8:
    case ncclUint8:
        return ((const int8_t *)data)[i];
    case ncclInt32:
    case ncclUint32:
        return ((const int32_t *)data)[i];
    case ncclInt64:
    case ncclUint64:
        return (double)((const int64_t *)data)[i];
    case ncclFloat32:
        return ((const float *)data)[i];
    default:
        return ((const double *)data)[i];
    }
}

static void all_reduce(int ranks, size_t count, ncclDataType_t type, ncclRedOp_t op, bool in_place)
{
    for (int r = 0; r < ranks; r++) {
        memset(out[r], 0xdb, MAX_COUNT * 8);
        for (size_t i = 0; i < count; i++) {
            put(in_place ? out[r] : in[r], type, i, value(op, ranks, r, i));
        }
    }
    OK(nc.GroupStart());
    for (int r = 0; r < ranks; r++) {
        OK(nc.AllReduce(in_place ? out[r] : in[r], out[r], count, type, op, comms[r], NULL));
    }
    OK(nc.GroupEnd());
    for (size_t i = 0; i < count; i++) {
        int64_t values[MOST];

        for (int r = 0; r < ranks; r++) {
            values[r] = value(op, ranks, r, i);
        }
        for (int r = 0; r < ranks; r++) {
            double wanted = (double)expected(ranks, op, values), found = get(out[r], type, i);
            /* A mean of floats is a sum of scaled inputs. */
            double off = op == ncclAvg ? 1e-5 : 0;

            CHECK_MSG(found >= wanted - off && found <= wanted + off,
                      "rank %d, element %zu of %zu, type %d, op %d: %g", r, i, count, type, op,
                      found);
        }
    }
}

static const ncclDataType_t types[] = {ncclInt8,  ncclUint8,  ncclInt32,   ncclUint32,
                                       ncclInt64, ncclUint64, ncclFloat32, ncclFloat64};

static void sizes_types_ops(int ranks)
{
    static const size_t counts[] = {1, 17, 20000, 40000, MAX_COUNT};

    for (int c = 0; c < 5; c++) {
        int ops = c == 2 ? 5 : 1; /* all on a size that has several parts */

        for (int i = 0; i < ops; i++) {
            ncclRedOp_t op = (ncclRedOp_t)(ops > 1 ? i : (int)check_below(5));
            ncclDataType_t type = types[check_below(8)];

            all_reduce(ranks, counts[c] - (c ? check_below(counts[c] / 2) : 0), type, op,
                       check_below(2));
        }
    }
}

static void test_by_variable(void)
{
    setenv("NCCL_ALGO", "Tree", 1);
    for (int ranks = 2; ranks <= MOST; ranks += ranks < 6 ? 1 : 3) {
        start(ranks, ranks < 6 ? 1 : 2);
        sizes_types_ops(ranks);
        CHECK_EQ(logged("Algo Tree"), ranks);
        CHECK_EQ(logged("Algo Ring"), 0);
        finish(ranks);
    }
    unsetenv("NCCL_ALGO");
}

static void test_by_protocol(void)
{
    static const char *const protos[] = {"LL", "LL128", "Simple"};

    setenv("NCCL_ALGO", "Tree", 1);
    for (int p = 0; p < 3; p++) {
        setenv("NCCL_PROTO", protos[p], 1);
        start(5, 2);
        sizes_types_ops(5);
        finish(5);
    }
    unsetenv("NCCL_PROTO");
    unsetenv("NCCL_ALGO");
}

static const struct check_test tests[] = {
    {"by_variable", test_by_variable},
    {"by_protocol", test_by_protocol},
    {0},
};

int main(int argc, char **argv)
{
    int fd;

    snprintf(debug_file, sizeof(debug_file), "/tmp/r2ccl-tree-XXXXXX");
    fd = mkstemp(debug_file);
    if (fd < 0) {
        perror(debug_file);
        return 1;
    }
    close(fd);
    setenv("NCCL_DEBUG", "INFO", 1);
    setenv("NCCL_DEBUG_FILE", debug_file, 1);
    setenv("NCCL_NET_PLUGIN", "libnccl-net.so", 1);
    setenv("R2CCL_NICS", "127.0.1.1,127.0.2.1", 1);
    setenv("HOSTNCCL_BOOTSTRAP_ADDR", "127.0.0.1", 1);
    setenv("HOSTNCCL_HARSH", "full", 0);
    load_all();
    return check_main(argc, argv, tests);
}
