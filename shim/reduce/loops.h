/* The loops of one level. levels.c includes this file once for each level, with these defined:
 *   LEVEL           the suffix of its names.
 *   W               bytes of a vector.
 *   TARGET          the attributes of its functions. NO_ASAN is one: gcc's instrumented frames are
 *                   aligned to 32 bytes, but vectors of AVX-512 need 64.
 *   HALVES, JOINED  conversions of float16, or none: a part of a vector, and two parts together.
 * It undefines these at its end.
 *
 * A loop takes R2_REDUCE_STEP bytes (W bytes for small types) of every contribution, one after the
 * other, with the accumulators in registers. Types of 8 and 16 bits are taken out of vectors of
 * 32-bit words: first the lowest part of every word, then the next ones.
 *
 * Products and sums never fuse (-ffp-contract=off), so all levels round alike. No float32 in a
 * conversion is subnormal: processors take a hundred cycles for those.
 */
#ifndef R2_REDUCE_LOOPS_H
#define R2_REDUCE_LOOPS_H

#define NAMED__(name, level) name##_##level
#define NAMED_(name, level) NAMED__(name, level)
#define N(name) NAMED_(name, LEVEL)
#define INLINE TARGET static inline __attribute__((always_inline))

#define PICK(mask, x, y) (((x) & (mask)) | ((y) & ~(mask)))

#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))
#define LESS(a, b) PICK((b) < (a), b, a)
#define MORE(a, b) PICK((b) > (a), b, a)
/* Floating point, with integers I of the same size. A number stays against a NaN. */
#define FLESS(I, a, b) PICK(((b) < (a)) | ((a) != (a)), (I)(b), (I)(a))
#define FMORE(I, a, b) PICK(((b) > (a)) | ((a) != (a)), (I)(b), (I)(a))

/* All contributions in vectors of S, each with `parts` accumulators of type A, `n` vectors at once.
 * WIDEN(s, part) makes an accumulator, NARROW(acc) a vector of S of them. */
#define LOOP(S, A, n, parts, WIDEN, NARROW, OP)                                                    \
    for (size_t at = 0; at < bytes; at += (size_t)(n)*W) {                                         \
        A acc[n][parts];                                                                           \
                                                                                                   \
        for (int i = 0; i < (n); i++)                                                              \
            for (int part = 0; part < (parts); part++)                                             \
                acc[i][part] = WIDEN(*((const S *)(const void *)(in[0] + at) + i), part);          \
        for (int k = 1; k < n_in; k++)                                                             \
            for (int i = 0; i < (n); i++)                                                          \
                for (int part = 0; part < (parts); part++) {                                       \
                    A a = acc[i][part];                                                            \
                    A b = WIDEN(*((const S *)(const void *)(in[k] + at) + i), part);               \
                                                                                                   \
                    acc[i][part] = (A)OP(a, b);                                                    \
                }                                                                                  \
        for (int i = 0; i < (n); i++)                                                              \
            *((S *)(void *)(out + at) + i) = NARROW(acc[i]);                                       \
    }

#define SAME(s, part) (s)
#define ONLY(acc) ((acc)[0])

/* Integers. U is the unsigned type, since what overflows wraps around. */
#define WHOLE(name, T, U)                                                                          \
    INLINE void N(name)(char *out, const char *const *in, int n_in, size_t bytes, int op)          \
    {                                                                                              \
        if (op == R2_NCCL_PROD)                                                                    \
            LOOP(U, U, 64 / W, 1, SAME, ONLY, MUL)                                                 \
        else if (op == R2_NCCL_MIN)                                                                \
            LOOP(T, T, 64 / W, 1, SAME, ONLY, LESS)                                                \
        else if (op == R2_NCCL_MAX)                                                                \
            LOOP(T, T, 64 / W, 1, SAME, ONLY, MORE)                                                \
        else                                                                                       \
            LOOP(U, U, 64 / W, 1, SAME, ONLY, ADD)                                                 \
    }

/* Floating point in vectors of A, stored in vectors of S. */
#define REAL(name, S, A, F, n, parts, WIDEN, NARROW, FMIN, FMAX)                                   \
    INLINE void N(name)(char *out, const char *const *in, int n_in, size_t bytes, int op)          \
    {                                                                                              \
        F share = (F)1 / (F)n_in;                                                                  \
                                                                                                   \
        if (op == R2_NCCL_PROD)                                                                    \
            LOOP(S, A, n, parts, WIDEN, NARROW, MUL)                                               \
        else if (op == R2_NCCL_MIN)                                                                \
            LOOP(S, A, n, parts, WIDEN, NARROW, FMIN)                                              \
        else if (op == R2_NCCL_MAX)                                                                \
            LOOP(S, A, n, parts, WIDEN, NARROW, FMAX)                                              \
        else if (op == R2_NCCL_AVG)                                                                \
            LOOP(S, A, n, parts, share *WIDEN, NARROW, ADD)                                        \
        else                                                                                       \
            LOOP(S, A, n, parts, WIDEN, NARROW, ADD)                                               \
    }

#define FLESS32(a, b) FLESS(N(i32), a, b)
#define FMORE32(a, b) FMORE(N(i32), a, b)
#define FLESS64(a, b) FLESS(N(i64), a, b)
#define FMORE64(a, b) FMORE(N(i64), a, b)

#define FROM_F16(s, part) N(widen)((s) >> 16 * (part)&0xffff, 5, 10)
#define FROM_E4M3(s, part) N(widen)((s) >> 8 * (part)&0xff, 4, 3)
#define FROM_E5M2(s, part) N(widen)((s) >> 8 * (part)&0xff, 5, 2)
#define FROM_BF16(s, part) ((N(f32))((s) << ((part) ? 0 : 16) & 0xffff0000))
#define TO_F16(acc) (N(narrow)((acc)[0], 5, 10) | N(narrow)((acc)[1], 5, 10) << 16)
#define TO_BF16(acc) (N(narrow_bf16)((acc)[0]) | N(narrow_bf16)((acc)[1]) << 16)
#define TO_FP8(acc, e, m)                                                                          \
    (N(narrow)((acc)[0], e, m) | N(narrow)((acc)[1], e, m) << 8 |                                  \
     N(narrow)((acc)[2], e, m) << 16 | N(narrow)((acc)[3], e, m) << 24)
#define TO_E4M3(acc) TO_FP8(acc, 4, 3)
#define TO_E5M2(acc) TO_FP8(acc, 5, 2)

#endif

#define VECTOR __attribute__((vector_size(W), aligned(1), may_alias))
typedef int8_t N(i8) VECTOR;
typedef uint8_t N(u8) VECTOR;
typedef int32_t N(i32) VECTOR;
typedef uint32_t N(u32) VECTOR;
typedef int64_t N(i64) VECTOR;
typedef uint64_t N(u64) VECTOR;
typedef float N(f32) VECTOR;
typedef double N(f64) VECTOR;
#undef VECTOR

/* Bits of an 8-bit or 16-bit type with `e` bits of exponent and `m` of mantissa. With e = 4 there
 * is no infinity and only 0x7f is NaN. */
INLINE N(f32) N(widen)(N(u32) bits, int e, int m)
{
    int bias = (1 << (e - 1)) - 1;
    int top = 1 << (e + m);
    int special = e == 4 ? top - 1 : ((1 << e) - 1) << m;
    int magic = (127 - bias + 1 + 23 - m) << 23; /* its last bit is worth a subnormal's unit */
    N(i32) a = (N(i32))bits & (top - 1), sign = ((N(i32))bits & top) << (31 - e - m);
    N(i32) unit = (N(i32))bits * 0 + magic;
    N(i32) tiny = (N(i32))((N(f32))(unit + a) - (N(f32))unit);
    N(i32) number = (a << (23 - m)) + ((127 - bias) << 23);
    N(i32) other = a << (23 - m) | 0x7f800000;

    number = PICK(a < (1 << m), tiny, number);
    return (N(f32))(PICK(a >= special, other, number) | sign);
}

/* Rounds to nearest even. fp8 (m < 10) stops at its largest finite number. */
INLINE N(u32) N(narrow)(N(f32) f, int e, int m)
{
    int bias = (1 << (e - 1)) - 1;
    int nan = (1 << (e + m)) - 1;
    int most = e == 4 ? nan - 1 : (((1 << e) - 1) << m) - (m < 10);
    int least = (127 - bias + 1) << 23; /* the smallest normal number */
    int magic = (127 - bias + 1 + 23 - m) << 23;
    N(i32) a = (N(i32))f & 0x7fffffff, sign = ((N(i32))f >> 31) & (1 << (e + m));
    N(i32) unit = a * 0 + magic;
    N(i32) tiny = (N(i32))((N(f32))PICK(a < least, a, unit) + (N(f32))unit) - unit;
    N(i32) odd = a >> (23 - m) & 1;
    N(i32) number = (a - (least - (1 << 23)) + ((1 << (22 - m)) - 1) + odd) >> (23 - m);

    number = PICK(a < least, tiny, number);
    number = PICK(number > most, most, number);
    number = PICK(a > 0x7f800000, nan, number);
    return (N(u32))(number | sign);
}

INLINE N(u32) N(narrow_bf16)(N(f32) f)
{
    N(u32) bits = (N(u32))f;
    N(u32) number = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    N(u32) nan = 0x7fff | (bits >> 16 & 0x8000);

    return PICK((N(u32))(((N(i32))bits & 0x7fffffff) > 0x7f800000), nan, number);
}

#ifdef HALVES
INLINE N(f32) N(from_f16)(N(u32) s, int part)
{
    return (N(f32))(part ? HALVES(s, 1) : HALVES(s, 0));
}

INLINE N(u32) N(to_f16)(N(f32) a, N(f32) b)
{
    return (N(u32))JOINED(a, b);
}
#endif

WHOLE(whole_i8, N(i8), N(u8))
WHOLE(whole_u8, N(u8), N(u8))
WHOLE(whole_i32, N(i32), N(u32))
WHOLE(whole_u32, N(u32), N(u32))
WHOLE(whole_i64, N(i64), N(u64))
WHOLE(whole_u64, N(u64), N(u64))
REAL(real_f32, N(f32), N(f32), float, 64 / W, 1, SAME, ONLY, FLESS32, FMORE32)
REAL(real_f64, N(f64), N(f64), double, 64 / W, 1, SAME, ONLY, FLESS64, FMORE64)
REAL(real_f16, N(u32), N(f32), float, 1, 2, FROM_F16, TO_F16, FLESS32, FMORE32)
REAL(real_bf16, N(u32), N(f32), float, 1, 2, FROM_BF16, TO_BF16, FLESS32, FMORE32)
REAL(real_e4m3, N(u32), N(f32), float, 1, 4, FROM_E4M3, TO_E4M3, FLESS32, FMORE32)
REAL(real_e5m2, N(u32), N(f32), float, 1, 4, FROM_E5M2, TO_E5M2, FLESS32, FMORE32)

TARGET static void N(loops)(char *out, const char *const *in, int n_in, size_t bytes, int type,
                            int op)
{
    switch (type) {
    case R2_NCCL_INT8:
        return N(whole_i8)(out, in, n_in, bytes, op);
    case R2_NCCL_UINT8:
        return N(whole_u8)(out, in, n_in, bytes, op);
    case R2_NCCL_INT32:
        return N(whole_i32)(out, in, n_in, bytes, op);
    case R2_NCCL_UINT32:
        return N(whole_u32)(out, in, n_in, bytes, op);
    case R2_NCCL_INT64:
        return N(whole_i64)(out, in, n_in, bytes, op);
    case R2_NCCL_UINT64:
        return N(whole_u64)(out, in, n_in, bytes, op);
    case R2_NCCL_FLOAT16:
        return N(real_f16)(out, in, n_in, bytes, op);
    case R2_NCCL_FLOAT32:
        return N(real_f32)(out, in, n_in, bytes, op);
    case R2_NCCL_FLOAT64:
        return N(real_f64)(out, in, n_in, bytes, op);
    case R2_NCCL_BFLOAT16:
        return N(real_bf16)(out, in, n_in, bytes, op);
    case R2_NCCL_FLOAT8E4M3:
        return N(real_e4m3)(out, in, n_in, bytes, op);
    case R2_NCCL_FLOAT8E5M2:
        return N(real_e5m2)(out, in, n_in, bytes, op);
    }
}

#undef HALVES
#undef JOINED
#undef LEVEL
#undef W
#undef TARGET
