/* Sums of contributions against a plain reference, bit for bit, at every level that this processor
 * can run: all types, operations, odd counts, unaligned addresses, 1 to 9 contributions. Rung 1. */
#include <fenv.h>
#include <math.h>

#include "check.h"
#include "reduce/levels.h"
#include "reduce/reduce.h"

#define MOST 700 /* elements */

static const struct r2_reduce_level *level;

/* --- the reference: 8-bit and 16-bit types by their definition ------------------------------ */

/* Exponent and mantissa bits; special: e4m3, which has no infinity. */
struct small {
    int e, m;
    bool special;
};

static const struct small F16 = {5, 10, false}, BF16 = {8, 7, false}, E4M3 = {4, 3, true},
                          E5M2 = {5, 2, false};

static double small_value(const struct small *t, unsigned int v)
{
    unsigned int mant = v & ((1u << t->m) - 1), exp = v >> t->m & ((1u << t->e) - 1);
    unsigned int top = (1u << t->e) - 1;
    int bias = (1 << (t->e - 1)) - 1;
    double sign = v >> (t->e + t->m) & 1 ? -1 : 1;

    if (t->special ? exp == top && mant == (1u << t->m) - 1 : exp == top && mant)
        return NAN;
    if (!t->special && exp == top)
        return sign * INFINITY;
    return sign *
           (exp ? ldexp(mant | 1u << t->m, (int)exp - bias - t->m) : ldexp(mant, 1 - bias - t->m));
}

/* The nearest value by search; of two the even one. `f` is a float. */
static unsigned int small_nearest(const struct small *t, float f)
{
    bool eight = t->e + t->m == 7;
    unsigned int sign = signbit(f) ? 1u << (t->e + t->m) : 0;
    unsigned int low = 0, high; /* high: infinity, or the value that would come next */
    double a = fabs((double)f), at, next;

    high = t->special ? (1u << (t->e + t->m)) - 1 : ((1u << t->e) - 1) << t->m;
    if (isnan(f))
        return eight ? 0x7f : 0x7fff;
    while (high - low > 1) {
        unsigned int middle = (low + high) / 2;

        *(small_value(t, middle) <= a ? &low : &high) = middle;
    }
    at = small_value(t, low);
    next = small_value(t, high);
    if (!isfinite(next)) /* beyond the largest finite value a step is as wide as the last one */
        next = at + (at - small_value(t, low - 1));
    if (a - at > next - a || (a - at == next - a && low & 1) || isinf(f))
        low = high;
    if (eight && low == (t->special ? (1u << (t->e + t->m)) - 1 : ((1u << t->e) - 1) << t->m))
        low--;
    return low | sign;
}

static const struct small *small_type(int type)
{
    switch (type) {
    case R2_NCCL_FLOAT16:
        return &F16;
    case R2_NCCL_BFLOAT16:
        return &BF16;
    case R2_NCCL_FLOAT8E4M3:
        return &E4M3;
    case R2_NCCL_FLOAT8E5M2:
        return &E5M2;
    }
    return NULL;
}

/* --- the reference: one element ------------------------------------------------------------- */

#define REFER_WHOLE(T, U, WIDE)                                                                    \
    do {                                                                                           \
        T v, w;                                                                                    \
                                                                                                   \
        memcpy(&v, at[0], sizeof(v));                                                              \
        for (int i = 1; i < n; i++) {                                                              \
            memcpy(&w, at[i], sizeof(w));                                                          \
            if (op == R2_NCCL_PROD)                                                                \
                v = (T)((U)v * (U)w);                                                              \
            else if (op == R2_NCCL_MIN)                                                            \
                v = w < v ? w : v;                                                                 \
            else if (op == R2_NCCL_MAX)                                                            \
                v = w > v ? w : v;                                                                 \
            else                                                                                   \
                v = (T)((U)v + (U)w);                                                              \
        }                                                                                          \
        if (op == R2_NCCL_AVG && n > 1)                                                            \
            v = (T)((WIDE)v / (WIDE)n);                                                            \
        memcpy(out, &v, sizeof(v));                                                                \
    } while (0)

/* volatile: the compiler must not fold or fuse the reference's own operations. */
#define REFER_REAL(T)                                                                              \
    static T refer_##T(const T *v, int n, int op)                                                  \
    {                                                                                              \
        volatile T share = (T)1 / (T)n, a = op == R2_NCCL_AVG ? v[0] * share : v[0];               \
                                                                                                   \
        for (int i = 1; i < n; i++) {                                                              \
            volatile T b = op == R2_NCCL_AVG ? v[i] * share : v[i];                                \
                                                                                                   \
            if (op == R2_NCCL_PROD)                                                                \
                a = a * b;                                                                         \
            else if (op == R2_NCCL_MIN)                                                            \
                a = isnan(a) || b < a ? b : a;                                                     \
            else if (op == R2_NCCL_MAX)                                                            \
                a = isnan(a) || b > a ? b : a;                                                     \
            else                                                                                   \
                a = a + b;                                                                         \
        }                                                                                          \
        return a;                                                                                  \
    }
REFER_REAL(float)
REFER_REAL(double)

static void refer_small(void *out, const char *const *at, int n, const struct small *t, int op)
{
    size_t elem = t->e + t->m == 7 ? 1 : 2;
    float f[16];
    unsigned int v;

    for (int i = 0; i < n; i++) {
        v = 0;
        memcpy(&v, at[i], elem); /* little endian */
        f[i] = (float)small_value(t, v);
    }
    v = small_nearest(t, refer_float(f, n, op));
    memcpy(out, n == 1 ? (const void *)at[0] : &v, elem);
}

static void refer(void *out, const char *const *at, int n, int type, int op)
{
    float f[16];
    double d[16];

    switch (type) {
    case R2_NCCL_INT8:
        REFER_WHOLE(int8_t, unsigned int, int);
        return;
    case R2_NCCL_UINT8:
        REFER_WHOLE(uint8_t, unsigned int, int);
        return;
    case R2_NCCL_INT32:
        REFER_WHOLE(int32_t, uint32_t, int32_t);
        return;
    case R2_NCCL_UINT32:
        REFER_WHOLE(uint32_t, uint32_t, uint32_t);
        return;
    case R2_NCCL_INT64:
        REFER_WHOLE(int64_t, uint64_t, int64_t);
        return;
    case R2_NCCL_UINT64:
        REFER_WHOLE(uint64_t, uint64_t, uint64_t);
        return;
    case R2_NCCL_FLOAT32:
        for (int i = 0; i < n; i++)
            memcpy(&f[i], at[i], sizeof(f[i]));
        f[0] = refer_float(f, n, op);
        memcpy(out, f, sizeof(f[0]));
        return;
    case R2_NCCL_FLOAT64:
        for (int i = 0; i < n; i++)
            memcpy(&d[i], at[i], sizeof(d[i]));
        d[0] = refer_double(d, n, op);
        memcpy(out, d, sizeof(d[0]));
        return;
    }
    refer_small(out, at, n, small_type(type), op);
}

/* The same bits, or both NaN. */
static bool same(const void *a, const void *b, int type)
{
    const struct small *t = small_type(type);
    size_t elem = r2_nccl_type_size(type);
    unsigned int v = 0, w = 0;
    double d, e;
    float f, g;

    if (memcmp(a, b, elem) == 0)
        return true;
    if (type == R2_NCCL_FLOAT32) {
        memcpy(&f, a, sizeof(f));
        memcpy(&g, b, sizeof(g));
        return isnan(f) && isnan(g);
    }
    if (type == R2_NCCL_FLOAT64) {
        memcpy(&d, a, sizeof(d));
        memcpy(&e, b, sizeof(e));
        return isnan(d) && isnan(e);
    }
    if (!t)
        return false;
    memcpy(&v, a, elem);
    memcpy(&w, b, elem);
    return isnan(small_value(t, v)) && isnan(small_value(t, w));
}

/* --- tests ---------------------------------------------------------------------------------- */

static void run(void *out, const void *const *in, int n, size_t count, int type, int op)
{
    if (level && n > 1)
        r2_reduce_run(level, out, in, n, count, type, op);
    else
        r2_reduce(out, in, n, count, type, op);
}

/* Random bits, and of floating point often numbers of one magnitude, whose sums mean something. */
static void fill(char *to, size_t count, int type)
{
    size_t elem = r2_nccl_type_size(type);

    for (size_t i = 0; i < count; i++) {
        uint64_t bits = check_random();
        float f = (float)(int)(bits % 4001) / 1000 - 2;
        double d = f;
        unsigned int v;

        if (bits >> 62) {
            if (type == R2_NCCL_FLOAT32)
                memcpy(&bits, &f, sizeof(f));
            else if (type == R2_NCCL_FLOAT64)
                memcpy(&bits, &d, sizeof(d));
            else if (small_type(type)) {
                v = small_nearest(small_type(type), f);
                memcpy(&bits, &v, sizeof(v));
            }
        }
        memcpy(to + i * elem, &bits, elem);
    }
}

static void check_one(int type, int op, int n, size_t count, bool in_place)
{
    static char room[10][MOST * 8 + 64], before[10][MOST * 8 + 64];
    size_t elem = r2_nccl_type_size(type);
    char *at[10], *out;
    const char *element[9];
    char want[8];

    for (int i = 0; i < 10; i++) {
        at[i] = room[i] + check_random() % 40;
        fill(at[i], count, type);
        at[i][count * elem] = 0x55;
    }
    memcpy(before, room, sizeof(room));
    out = in_place ? at[check_random() % (uint64_t)n] : at[9];
    run(out, (const void *const *)at, n, count, type, op);
    CHECK_EQ(out[count * elem], 0x55);
    for (size_t i = 0; i < count; i++) {
        for (int k = 0; k < n; k++)
            element[k] = before[k] + (at[k] - room[k]) + i * elem;
        refer(want, element, n, type, op);
        CHECK_MSG(same(out + i * elem, want, type),
                  "level %s, type %d, op %d, %d contributions, element %zu of %zu",
                  level ? level->name : "-", type, op, n, i, count);
    }
    for (int k = 0; k < n; k++)
        CHECK(out == at[k] || memcmp(room[k], before[k], sizeof(room[k])) == 0);
}

TEST(all_types_and_operations_match_a_plain_reference)
{
    for (int i = 0; i < R2_REDUCE_LEVELS; i++) {
        level = r2_reduce_level(i);
        if (!level)
            continue;
        for (int type = 0; type < R2_NCCL_TYPES; type++)
            for (int op = 0; op < R2_NCCL_OPS; op++)
                for (int n = 1; n <= 9; n++)
                    for (int k = 0; k < 4; k++)
                        check_one(type, op, n, check_random() % (k ? 40 : MOST), k & 1);
    }
    level = NULL;
    check_one(R2_NCCL_FLOAT32, R2_NCCL_SUM, 3, 0, false);
}

/* All pairs for 8 bits. For 16 bits each value times one: the two conversions and the rounding of
 * numbers that need none. Also each beside a neighbour and a random one. */
static void check_pairs(int type, int op)
{
    bool eight = r2_nccl_type_size(type) == 1;
    static uint16_t a[65536], b[65536], got[65536];
    const void *in[] = {a, b};
    char want[8];

    for (unsigned int i = 0; i < 65536; i++) {
        if (eight) {
            ((uint8_t *)a)[i] = (uint8_t)i;
            ((uint8_t *)b)[i] = (uint8_t)(i >> 8);
        } else {
            a[i] = (uint16_t)i;
            b[i] = (uint16_t)(check_random() & 1 ? i + check_random() % 5 - 2 : check_random());
        }
    }
    run(got, in, 2, 65536, type, op);
    for (size_t i = 0; i < 65536; i++) {
        size_t off = i * r2_nccl_type_size(type);
        const char *at[] = {(char *)a + off, (char *)b + off};

        refer(want, at, 2, type, op);
        CHECK_MSG(same((char *)got + off, want, type), "level %s, type %d, op %d, pair %zu",
                  level->name, type, op, i);
    }
}

TEST(small_types_are_right_for_every_value)
{
    static const int types[] = {R2_NCCL_FLOAT16, R2_NCCL_BFLOAT16, R2_NCCL_FLOAT8E4M3,
                                R2_NCCL_FLOAT8E5M2};

    for (int i = 0; i < R2_REDUCE_LEVELS; i++) {
        level = r2_reduce_level(i);
        for (int k = 0; level && k < 4; k++)
            for (int op = 0; op < R2_NCCL_OPS; op++)
                check_pairs(types[k], op);
    }
}

/* Values between two neighbours cannot be given as contributions of the type: sums of three are. */
TEST(a_sum_is_rounded_once_and_to_the_nearest)
{
    const uint16_t one = 0x3f80, tiny = 0x3b80; /* bfloat16: 1 and 2^-8, half of 1's last bit */
    uint16_t rows[3] = {one, tiny, tiny}, out;
    const void *in[] = {&rows[0], &rows[1], &rows[2]};

    r2_reduce(&out, in, 3, 1, R2_NCCL_BFLOAT16, R2_NCCL_SUM);
    CHECK_EQ(out, 0x3f81); /* with a rounding after each addition it would be 1 */
}

TEST(the_threads_floating_point_mode_has_no_influence)
{
    float tiny[2] = {0x1p-140f, 0x1p-140f}, odd[2] = {1.0f, 0x1p-24f}, out;
    const void *in[] = {&tiny[0], &tiny[1]}, *half[] = {&odd[0], &odd[1]};

    CHECK_EQ(fesetround(FE_UPWARD), 0);
    r2_reduce(&out, half, 2, 1, R2_NCCL_FLOAT32, R2_NCCL_SUM);
    CHECK_EQ(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
    CHECK(out == 1.0f);
#ifdef __x86_64__
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040); /* flush to zero, both ways */
    r2_reduce(&out, in, 2, 1, R2_NCCL_FLOAT32, R2_NCCL_SUM);
    CHECK(__builtin_ia32_stmxcsr() & 0x8040);
    __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() & ~0x8040u);
#else
    r2_reduce(&out, in, 2, 1, R2_NCCL_FLOAT32, R2_NCCL_SUM);
#endif
    CHECK(out == 0x1p-139f);
}

TEST(only_known_types_and_operations_are_covered)
{
    int covered = 0;

    for (int type = -1; type < 20; type++)
        for (int op = -1; op < 20; op++)
            covered += r2_reduce_covers(type, op);
    CHECK_EQ(covered, 12 * 5);
    CHECK(r2_reduce_covers(R2_NCCL_FLOAT8E5M2, R2_NCCL_AVG));
}
