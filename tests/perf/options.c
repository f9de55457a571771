#define _GNU_SOURCE
#include <getopt.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "perf.h"

const char *const perf_op_names[PERF_OPS] = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "alltoall", "sendrecv"};
const char *const perf_type_names[ncclNumTypes] = {"int8",   "uint8",    "int32",  "uint32",
                                                   "int64",  "uint64",   "half",   "float",
                                                   "double", "bfloat16", "f8e4m3", "f8e5m2"};
const char *const perf_redop_names[ncclNumOps] = {"sum", "prod", "max", "min", "avg"};

static const char usage[] =
    "r2ccl_perf - measure and check NCCL's collectives, with nccl-tests' options and columns\n"
    "\n"
    "  r2ccl-ctl launch -n 4 -- r2ccl_perf --op all_reduce -b 8 -e 64M -f 4\n"
    "\n"
    "  --op OP            all_reduce, reduce_scatter, all_gather, broadcast, reduce, alltoall,\n"
    "                     sendrecv (default all_reduce)\n"
    "  -b, --minbytes N   smallest size, K, M, G accepted (32M)\n"
    "  -e, --maxbytes N   largest size (as -b)\n"
    "  -i, --stepbytes N  step between sizes (1M)\n"
    "  -f, --stepfactor X factor between sizes, instead of a step\n"
    "  -n, --iters N      timed iterations (20)\n"
    "  -w, --warmup_iters N  untimed iterations before (1)\n"
    "  -c, --check 0|1    check every value after the timed iterations (1)\n"
    "      --check-every  check every value after each iteration\n"
    "  -d, --datatype T   int8 uint8 int32 uint32 int64 uint64 half float double bfloat16 f8e4m3\n"
    "                     f8e5m2 (float)\n"
    "  -o, --redop OP     sum prod max min avg (sum)\n"
    "  -r, --root N       root of broadcast and reduce (0)\n"
    "  -z, --blocking N   wait for every iteration (0)\n"
    "      --duration S   repeat the sizes (-f: all of -b to -e in turn, else -b) for S seconds; "
    "a\n"
    "                     line per window of iterations\n"
    "      --until FILE   with --duration: end early, in order, once the file exists\n"
    "      --window N     iterations per window (1)\n"
    "      --timeline FILE  the windows as JSON lines (rank 0)\n"
    "      --json FILE    the results as JSON (rank 0)\n"
    "      --timeout S    exit with 3 when an iteration takes longer (0: no limit)\n"
    "      --seed N       of the data (1)\n"
    "      --nccl PATH    library to load (R2CCL_PERF_NCCL, libnccl.so.2)\n"
    "\n"
    "Ranks: R2CCL_RANK, R2CCL_NRANKS, R2CCL_RENDEZVOUS=host:port; or RANK, WORLD_SIZE, "
    "LOCAL_RANK,\n"
    "MASTER_ADDR, MASTER_PORT (the id is exchanged on the next port); or Open MPI's or PMI's with\n"
    "MASTER_ADDR and MASTER_PORT. None of them: one rank. R2CCL_RENDEZVOUS_TOKEN: the same for "
    "the\n"
    "ranks of one start; others are turned away, as are those whose TORCHELASTIC_RUN_ID, "
    "PMIX_NAMESPACE\n"
    "or PMI_JOBID is another where torchrun, Open MPI or PMI numbers the ranks. "
    "R2CCL_RENDEZVOUS_TIMEOUT: seconds that a rank "
    "waits\n"
    "for the others (60).\n"
    "Exit codes: 0 right, 1 wrong values, 2 usage or NCCL error, 3 timeout.\n";

void perf_die(const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    fputs("r2ccl_perf: ", stderr);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    exit(2);
}

static size_t read_size(const char *name, const char *text)
{
    char *end;
    double value = strtod(text, &end);
    double unit = 1;
    if (*end && strchr("kKmMgG", *end)) {
        unit = *end == 'k' || *end == 'K'   ? 1 << 10
               : *end == 'm' || *end == 'M' ? 1 << 20
                                            : 1 << 30;
        end++;
    }
    if (end == text || *end || value < 0 || value * unit > 1e15)
        perf_die("%s=%s: a size such as 8, 64K or 1G is needed", name, text);
    return (size_t)(value * unit);
}

static double read_number(const char *name, const char *text, double least, double most)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end || !(value >= least && value <= most))
        perf_die("%s=%s: a number from %g to %g is needed", name, text, least, most);
    return value;
}

static int read_name(const char *name, const char *text, const char *const *names, int count)
{
    for (int i = 0; i < count; i++)
        if (!strcmp(names[i], text))
            return i;
    fprintf(stderr, "r2ccl_perf: %s=%s is unknown; one of:", name, text);
    for (int i = 0; i < count; i++)
        fprintf(stderr, " %s", names[i]);
    fputc('\n', stderr);
    exit(2);
}

enum {
    OPT_OP = 256,
    OPT_EVERY,
    OPT_DURATION,
    OPT_UNTIL,
    OPT_WINDOW,
    OPT_TIMELINE,
    OPT_JSON,
    OPT_TIMEOUT,
    OPT_SEED,
    OPT_NCCL
};

static const struct option longs[] = {{"minbytes", 1, NULL, 'b'},
                                      {"maxbytes", 1, NULL, 'e'},
                                      {"stepbytes", 1, NULL, 'i'},
                                      {"stepfactor", 1, NULL, 'f'},
                                      {"iters", 1, NULL, 'n'},
                                      {"warmup_iters", 1, NULL, 'w'},
                                      {"check", 1, NULL, 'c'},
                                      {"datatype", 1, NULL, 'd'},
                                      {"redop", 1, NULL, 'o'},
                                      {"root", 1, NULL, 'r'},
                                      {"blocking", 1, NULL, 'z'},
                                      {"op", 1, NULL, OPT_OP},
                                      {"check-every", 0, NULL, OPT_EVERY},
                                      {"duration", 1, NULL, OPT_DURATION},
                                      {"until", 1, NULL, OPT_UNTIL},
                                      {"window", 1, NULL, OPT_WINDOW},
                                      {"timeline", 1, NULL, OPT_TIMELINE},
                                      {"json", 1, NULL, OPT_JSON},
                                      {"timeout", 1, NULL, OPT_TIMEOUT},
                                      {"seed", 1, NULL, OPT_SEED},
                                      {"nccl", 1, NULL, OPT_NCCL},
                                      {"help", 0, NULL, 'h'},
                                      {0}};

static void read_long(struct perf_options *o, int opt, const char *arg)
{
    switch (opt) {
    case OPT_OP:
        o->op = (enum perf_op)read_name("--op", arg, perf_op_names, PERF_OPS);
        break;
    case OPT_EVERY:
        o->check = o->check_every = true;
        break;
    case OPT_DURATION:
        o->duration = read_number("--duration", arg, 0.01, 1e7);
        break;
    case OPT_UNTIL:
        o->until = arg;
        break;
    case OPT_WINDOW:
        o->window = (int)read_number("--window", arg, 1, 1e6);
        break;
    case OPT_TIMELINE:
        o->timeline = arg;
        break;
    case OPT_JSON:
        o->json = arg;
        break;
    case OPT_TIMEOUT:
        o->timeout = read_number("--timeout", arg, 0, 1e7);
        break;
    case OPT_SEED:
        o->seed = (uint64_t)read_number("--seed", arg, 0, 1e15);
        break;
    case OPT_NCCL:
        o->nccl = arg;
        break;
    default:
        fputs("try r2ccl_perf --help\n", stderr);
        exit(2);
    }
}

static void read_short(struct perf_options *o, int opt, const char *arg)
{
    switch (opt) {
    case 'b':
        o->min_bytes = read_size("-b", arg);
        break;
    case 'e':
        o->max_bytes = read_size("-e", arg);
        break;
    case 'i':
        o->step_bytes = read_size("-i", arg);
        break;
    case 'f':
        o->factor = read_number("-f", arg, 1.0001, 1e6);
        break;
    case 'n':
        o->iters = (int)read_number("-n", arg, 0, 1e9);
        break;
    case 'w':
        o->warmup = (int)read_number("-w", arg, 0, 1e9);
        break;
    case 'c':
        o->check = read_number("-c", arg, 0, 1e9) > 0;
        break;
    case 'd':
        o->type = (ncclDataType_t)read_name("-d", arg, perf_type_names, ncclNumTypes);
        break;
    case 'o':
        o->redop = (ncclRedOp_t)read_name("-o", arg, perf_redop_names, ncclNumOps);
        break;
    case 'r':
        o->root = (int)read_number("-r", arg, 0, 1e6);
        break;
    case 'z':
        o->blocking = read_number("-z", arg, 0, 1) > 0;
        break;
    case 'h':
        fputs(usage, stdout);
        exit(0);
    default:
        read_long(o, opt, arg);
    }
}

void perf_options_parse(struct perf_options *o, int argc, char **argv)
{
    *o = (struct perf_options){.min_bytes = 32 << 20,
                               .step_bytes = 1 << 20,
                               .iters = 20,
                               .warmup = 1,
                               .check = true,
                               .type = ncclFloat,
                               .window = 1,
                               .seed = 1,
                               .nccl = getenv("R2CCL_PERF_NCCL")};
    int opt;
    while ((opt = getopt_long(argc, argv, "b:e:i:f:n:w:c:d:o:r:z:h", longs, NULL)) != -1)
        read_short(o, opt, optarg);
    if (optind < argc)
        perf_die("%s is no option; try --help", argv[optind]);
    if (!o->max_bytes)
        o->max_bytes = o->min_bytes;
    if (o->max_bytes < o->min_bytes)
        perf_die("-e %zu is less than -b %zu", o->max_bytes, o->min_bytes);
    if (!o->factor && !o->step_bytes && o->max_bytes > o->min_bytes)
        perf_die("-i 0 never reaches -e: give a step, or a factor with -f");
}
