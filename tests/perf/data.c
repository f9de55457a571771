#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "perf.h"

static size_t data_size(ncclDataType_t type)
{
    static const unsigned char sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[type];
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static bool is_float(ncclDataType_t type)
{
    return type >= ncclFloat16;
}

/* A value that the small float holds exactly (a whole number within its precision). */
static uint32_t small_float(double value, int eb, int mb)
{
    int exp;
    uint32_t sign = value < 0 ? 1u << (eb + mb) : 0;
    if (value == 0)
        return 0;
    double mant = frexp(fabs(value), &exp); /* [0.5, 1) * 2^exp */
    int biased = exp - 1 + (1 << (eb - 1)) - 1;
    return sign | (uint32_t)biased << mb | (uint32_t)((mant * 2 - 1) * (1 << mb) + 0.5);
}

static void put(unsigned char *at, ncclDataType_t type, double real, uint64_t whole)
{
    float f = (float)real;
    uint32_t bits;
    switch (type) {
    case ncclFloat32:
        memcpy(at, &f, 4);
        return;
    case ncclFloat64:
        memcpy(at, &real, 8);
        return;
    case ncclFloat16:
        bits = small_float(real, 5, 10);
        break;
    case ncclBfloat16:
        bits = small_float(real, 8, 7);
        break;
    case ncclFloat8e4m3:
        bits = small_float(real, 4, 3);
        break;
    case ncclFloat8e5m2:
        bits = small_float(real, 5, 2);
        break;
    default:
        memcpy(at, &whole, data_size(type));
        return;
    }
    memcpy(at, &bits, data_size(type));
}

static double get_float(const unsigned char *at, ncclDataType_t type)
{
    float f;
    double d;
    uint32_t bits = 0;
    int eb = 8, mb = 7;
    switch (type) {
    case ncclFloat32:
        memcpy(&f, at, 4);
        return f;
    case ncclFloat64:
        memcpy(&d, at, 8);
        return d;
    case ncclFloat16:
        eb = 5, mb = 10;
        break;
    case ncclFloat8e4m3:
        eb = 4, mb = 3;
        break;
    case ncclFloat8e5m2:
        eb = 5, mb = 2;
        break;
    default:
        break;
    }
    memcpy(&bits, at, data_size(type));
    int bias = (1 << (eb - 1)) - 1, exp = (int)(bits >> mb) & ((1 << eb) - 1);
    double mant = (double)(bits & ((1u << mb) - 1)) / (1 << mb);
    double value = exp ? ldexp(1 + mant, exp - bias) : ldexp(mant, 1 - bias);
    return bits >> (eb + mb) & 1 ? -value : value;
}

/* Whole numbers that the type holds exactly: 2^bits. */
static int exact_bits(ncclDataType_t type)
{
    switch (type) {
    case ncclFloat16:
        return 11;
    case ncclBfloat16:
        return 8;
    case ncclFloat32:
        return 24;
    case ncclFloat64:
        return 53;
    case ncclFloat8e4m3:
        return 4;
    case ncclFloat8e5m2:
        return 3;
    default:
        return 8 * (int)data_size(type);
    }
}

/* Input of one rank at one place: sums, products and averages over all ranks stay exact. */
static uint64_t value_of(const struct perf_data *d, const struct perf_options *o, int rank,
                         uint64_t place)
{
    uint64_t h = mix(mix(o->seed + ((uint64_t)rank << 32)) + place);
    bool reduces = o->op == PERF_ALL_REDUCE || o->op == PERF_REDUCE_SCATTER || o->op == PERF_REDUCE;
    double range = ldexp(1, exact_bits(d->type));
    if (!is_float(d->type) && (!reduces || o->redop != ncclAvg))
        return h; /* integers wrap */
    if (reduces && o->redop == ncclProd)
        return rank < 3 ? 1 + (h & 1) : 1;
    if (reduces && o->redop == ncclAvg && !is_float(d->type))
        return h % (uint64_t)(fmin(range / 2 - 1, 1 << 30) / d->nranks + 1);
    range = fmin(range, ldexp(1, 52));
    if (reduces && (o->redop == ncclSum || o->redop == ncclAvg))
        range = range / d->nranks;
    return h % (uint64_t)(range < 1 ? 2 : range + 1);
}

static double fold_float(ncclRedOp_t op, double a, double b)
{
    return op == ncclProd ? a * b : op == ncclMax ? fmax(a, b) : op == ncclMin ? fmin(a, b) : a + b;
}

static int64_t as_signed(ncclDataType_t type, uint64_t v)
{
    int shift = 64 - 8 * (int)data_size(type);
    return (int64_t)(v << shift) >> shift;
}

static bool less(ncclDataType_t type, uint64_t a, uint64_t b)
{
    int shift = 64 - 8 * (int)data_size(type);
    if (type == ncclInt8 || type == ncclInt32 || type == ncclInt64)
        return as_signed(type, a) < as_signed(type, b);
    return a << shift < b << shift;
}

static uint64_t fold_whole(ncclDataType_t type, ncclRedOp_t op, uint64_t a, uint64_t b)
{
    switch (op) {
    case ncclProd:
        return a * b;
    case ncclMax:
        return less(type, a, b) ? b : a;
    case ncclMin:
        return less(type, b, a) ? b : a;
    default:
        return a + b;
    }
}

void perf_data_init(struct perf_data *d, const struct perf_options *o, int nranks)
{
    *d = (struct perf_data){.type = o->type, .es = data_size(o->type), .nranks = nranks};
    /* Where nothing is checked all ranks may send the same. */
    d->rows = o->check || o->check_every ? nranks : 1;
    d->inputs = malloc((size_t)d->rows * PERF_PERIOD * d->es);
    d->result = malloc(PERF_PERIOD * d->es);
    if (!d->inputs || !d->result)
        perf_die("no memory for test data");
    d->tolerant = is_float(o->type) && o->redop == ncclAvg;
    for (uint64_t i = 0; i < PERF_PERIOD; i++) {
        uint64_t whole = 0;
        double real = 0;
        for (int r = 0; r < d->rows; r++) {
            uint64_t v = value_of(d, o, r, i);
            put(d->inputs + ((uint64_t)r * PERF_PERIOD + i) * d->es, d->type, (double)v, v);
            whole = r ? fold_whole(d->type, o->redop, whole, v) : v;
            real = r ? fold_float(o->redop, real, (double)v) : (double)v;
        }
        if (o->redop == ncclAvg) {
            whole /= (uint64_t)nranks;
            real /= nranks;
        }
        if (is_float(d->type) && d->type != ncclFloat64)
            real = (float)real;
        put(d->result + i * d->es, d->type, real, whole);
    }
}

/* Calls for each stretch that lies in one copy of the table. */
static size_t stretch(size_t first, size_t done, size_t count, uint64_t iteration, size_t *from)
{
    *from = (first + done + iteration * 8191) % PERF_PERIOD;
    size_t n = PERF_PERIOD - *from;
    return n < count - done ? n : count - done;
}

void perf_data_fill(const struct perf_data *d, void *to, const unsigned char *table, size_t first,
                    size_t count, uint64_t iteration)
{
    for (size_t done = 0; done < count;) {
        size_t from, n = stretch(first, done, count, iteration, &from);
        memcpy((char *)to + done * d->es, table + from * d->es, n * d->es);
        done += n;
    }
}

static size_t wrong_in(const struct perf_data *d, const unsigned char *got,
                       const unsigned char *want, size_t n)
{
    size_t wrong = 0;
    if (!d->tolerant && !memcmp(got, want, n * d->es))
        return 0;
    double eps = ldexp(4.0 + d->nranks, 1 - exact_bits(d->type));
    for (size_t i = 0; i < n; i++) {
        const unsigned char *a = got + i * d->es, *b = want + i * d->es;
        if (!memcmp(a, b, d->es))
            continue;
        double x = d->tolerant ? get_float(a, d->type) : 0;
        double y = d->tolerant ? get_float(b, d->type) : 0;
        if (!d->tolerant || !(fabs(x - y) <= eps * fmax(fabs(y), 1)))
            wrong++;
    }
    return wrong;
}

size_t perf_data_wrong(const struct perf_data *d, const void *got, const unsigned char *table,
                       size_t first, size_t count, uint64_t iteration)
{
    size_t wrong = 0;
    for (size_t done = 0; done < count;) {
        size_t from, n = stretch(first, done, count, iteration, &from);
        wrong += wrong_in(d, (const unsigned char *)got + done * d->es, table + from * d->es, n);
        done += n;
    }
    return wrong;
}
