#include "reduce.h"

#include <math.h>
#include <string.h>

size_t hn_reduce_size(ncclDataType_t type)
{
    static const unsigned char sizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return (unsigned)type < ncclNumTypes ? sizes[type] : 0;
}

bool hn_reduce_is_float(ncclDataType_t type)
{
    return type >= ncclFloat16;
}

static float from_bits(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof(f));
    return f;
}

static uint32_t to_bits(float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof(bits));
    return bits;
}

static float load_bf16(uint16_t h)
{
    return from_bits((uint32_t)h << 16);
}

static uint16_t store_bf16(float f)
{
    uint32_t bits = to_bits(f);
    if (f != f)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* A small float: `eb` exponent bits, `mb` mantissa bits. e4m3 has no infinity: 0x7f is NaN, the
 * largest finite value 0x7e; the others follow IEEE 754. */
static float load_small(unsigned h, int eb, int mb)
{
    unsigned mant = h & ((1u << mb) - 1);
    unsigned exp = h >> mb & ((1u << eb) - 1);
    int bias = (1 << (eb - 1)) - 1;
    float sign = h >> (eb + mb) & 1 ? -1.0f : 1.0f;
    bool top = exp == (1u << eb) - 1;
    if (eb == 4 ? top && mant == 7 : top && mant)
        return NAN;
    if (eb != 4 && top)
        return sign * INFINITY;
    if (exp == 0)
        return sign * ldexpf((float)mant, 1 - bias - mb);
    return sign * ldexpf((float)(mant | 1u << mb), (int)exp - bias - mb);
}

static unsigned store_small(float f, int eb, int mb)
{
    unsigned sign = (to_bits(f) >> 31) << (eb + mb);
    int bias = (1 << (eb - 1)) - 1;
    unsigned inf = ((1u << eb) - 1) << mb; /* e4m3: overflow saturates below NaN */
    unsigned most = eb == 4 ? 0x7e : inf;
    float a = fabsf(f);
    int exp;
    if (f != f)
        return sign | (eb == 4 ? 0x7f : inf | 1u << (mb - 1));
    if (a == 0.0f)
        return sign;
    if (isinf(a))
        return sign | most;
    frexpf(a, &exp); /* a in [2^(exp-1), 2^exp) */
    int scale = exp - 1 < 1 - bias ? 1 - bias : exp - 1;
    /* nearbyintf rounds to nearest even; a carry moves into the exponent by itself */
    unsigned units = (unsigned)nearbyintf(ldexpf(a, mb - scale));
    unsigned bits = ((unsigned)(scale + bias - 1) << mb) + units;
    if (exp - 1 > bias + 1 || bits > most)
        bits = most;
    return sign | bits;
}

static float load_f16(uint16_t h)
{
    unsigned exp = h >> 10 & 31;
    if (exp == 0 || exp == 31)
        return load_small(h, 5, 10);
    return from_bits((uint32_t)(h & 0x8000) << 16 | (exp + 112) << 23 | (uint32_t)(h & 1023) << 13);
}

static uint16_t store_f16(float f)
{
    uint32_t bits = to_bits(f), a = bits & 0x7fffffff;
    if (a < 0x38800000 || a >= 0x477fe000) /* subnormal, or may round to infinity */
        return (uint16_t)store_small(f, 5, 10);
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)((bits >> 16 & 0x8000) | ((a - 0x38000000) >> 13));
}

static float load_e4m3(uint8_t h)
{
    return load_small(h, 4, 3);
}

static uint8_t store_e4m3(float f)
{
    return (uint8_t)store_small(f, 4, 3);
}

static float load_e5m2(uint8_t h)
{
    return load_small(h, 5, 2);
}

static uint8_t store_e5m2(float f)
{
    return (uint8_t)store_small(f, 5, 2);
}

/* Elements lie in bytes that need no alignment. Integers wrap: computed as unsigned (U). */
#define GET(T, p, i)                                                                               \
    (__extension__({                                                                               \
        T v_;                                                                                      \
        memcpy(&v_, (const char *)(p) + (i) * sizeof(T), sizeof(T));                               \
        v_;                                                                                        \
    }))
#define PUT(T, p, i, value)                                                                        \
    do {                                                                                           \
        T v_ = (value);                                                                            \
        memcpy((char *)(p) + (i) * sizeof(T), &v_, sizeof(T));                                     \
    } while (0)
#define LOOP(T, LOAD, STORE, SCALE, EXPR)                                                          \
    for (size_t i = 0; i < n; i++) {                                                               \
        __auto_type b = LOAD(GET(T, own, i));                                                      \
        if (op->pre)                                                                               \
            b = SCALE;                                                                             \
        __auto_type a = in ? LOAD(GET(T, in, i)) : b;                                              \
        PUT(T, out, i, STORE(in ? (EXPR) : b));                                                    \
    }
#define KERNEL(NAME, T, LOAD, STORE, SCALE, SUM, PROD)                                             \
    static void NAME(void *out, const void *in, const void *own, size_t n,                         \
                     const struct hn_redop *op)                                                    \
    {                                                                                              \
        switch (op->op) {                                                                          \
        case ncclProd:                                                                             \
            LOOP(T, LOAD, STORE, SCALE, PROD) break;                                               \
        case ncclMax:                                                                              \
            LOOP(T, LOAD, STORE, SCALE, a > b ? a : b) break;                                      \
        case ncclMin:                                                                              \
            LOOP(T, LOAD, STORE, SCALE, a < b ? a : b) break;                                      \
        default:                                                                                   \
            LOOP(T, LOAD, STORE, SCALE, SUM) break;                                                \
        }                                                                                          \
    }
#define SAME(x) (x)
#define WHOLE(NAME, T)                                                                             \
    KERNEL(NAME, T, SAME, SAME, (T)((uint64_t)b * (uint64_t)op->whole),                            \
           (T)((uint64_t)a + (uint64_t)b), (T)((uint64_t)a * (uint64_t)b))
#define REAL(NAME, T, LOAD, STORE)                                                                 \
    KERNEL(NAME, T, LOAD, STORE, LOAD(STORE(b *(__typeof__(b))op->real)), a + b, a * b)

WHOLE(apply_i8, int8_t)
WHOLE(apply_u8, uint8_t)
WHOLE(apply_i32, int32_t)
WHOLE(apply_u32, uint32_t)
WHOLE(apply_i64, int64_t)
WHOLE(apply_u64, uint64_t)
REAL(apply_f32, float, SAME, SAME)
REAL(apply_f64, double, SAME, SAME)
REAL(apply_f16, uint16_t, load_f16, store_f16)
REAL(apply_bf16, uint16_t, load_bf16, store_bf16)
REAL(apply_e4m3, uint8_t, load_e4m3, store_e4m3)
REAL(apply_e5m2, uint8_t, load_e5m2, store_e5m2)

void hn_reduce_apply(void *out, const void *in, const void *own, size_t count, ncclDataType_t type,
                     const struct hn_redop *op)
{
    static void (*const kernels[ncclNumTypes])(void *, const void *, const void *, size_t,
                                               const struct hn_redop *) = {
        apply_i8,  apply_u8,  apply_i32, apply_u32,  apply_i64,  apply_u64,
        apply_f16, apply_f32, apply_f64, apply_bf16, apply_e4m3, apply_e5m2};
    if (!in && !op->pre) {
        if (out != own && count)
            memcpy(out, own, count * hn_reduce_size(type));
        return;
    }
    kernels[type](out, in, own, count, op);
}

#define DIVIDE(T)                                                                                  \
    for (size_t i = 0; i < count; i++)                                                             \
    PUT(T, data, i, (T)(GET(T, data, i) / (T)op->post_div))

void hn_reduce_finish(void *data, size_t count, ncclDataType_t type, const struct hn_redop *op)
{
    if (op->post_div <= 1)
        return;
    switch (type) {
    case ncclInt8:
        DIVIDE(int8_t);
        break;
    case ncclUint8:
        DIVIDE(uint8_t);
        break;
    case ncclInt32:
        DIVIDE(int32_t);
        break;
    case ncclUint32:
        DIVIDE(uint32_t);
        break;
    case ncclInt64:
        DIVIDE(int64_t);
        break;
    case ncclUint64:
        DIVIDE(uint64_t);
        break;
    default:
        break; /* averages of floating types are scaled before */
    }
}

double hn_reduce_load(const void *at, ncclDataType_t type)
{
    switch (type) {
    case ncclInt8:
        return GET(int8_t, at, 0);
    case ncclUint8:
        return GET(uint8_t, at, 0);
    case ncclInt32:
        return GET(int32_t, at, 0);
    case ncclUint32:
        return GET(uint32_t, at, 0);
    case ncclInt64:
        return (double)GET(int64_t, at, 0);
    case ncclUint64:
        return (double)GET(uint64_t, at, 0);
    case ncclFloat16:
        return load_f16(GET(uint16_t, at, 0));
    case ncclFloat32:
        return GET(float, at, 0);
    case ncclFloat64:
        return GET(double, at, 0);
    case ncclBfloat16:
        return load_bf16(GET(uint16_t, at, 0));
    case ncclFloat8e4m3:
        return load_e4m3(GET(uint8_t, at, 0));
    case ncclFloat8e5m2:
        return load_e5m2(GET(uint8_t, at, 0));
    default:
        return 0;
    }
}
