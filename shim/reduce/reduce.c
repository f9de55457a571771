#include "reduce/reduce.h"

#include <fenv.h>
#include <string.h>

#include "reduce/levels.h"

bool r2_reduce_covers(int type, int op)
{
    return type >= 0 && type < R2_NCCL_TYPES && op >= 0 && op < R2_NCCL_OPS;
}

/* Asked once: in a virtual machine the processor's answer takes microseconds. */
static const struct r2_reduce_level *best(void)
{
    static _Atomic(const struct r2_reduce_level *) chosen;
    const struct r2_reduce_level *level = chosen;

    for (int i = R2_REDUCE_LEVELS - 1; !level; i--)
        level = r2_reduce_level(i);
    chosen = level;
    return level;
}

#define SHARES(T, WIDE)                                                                            \
    for (size_t i = 0; i < count; i++) {                                                           \
        T v;                                                                                       \
                                                                                                   \
        memcpy(&v, (char *)out + i * sizeof(v), sizeof(v));                                        \
        v = (T)((WIDE)v / (WIDE)n);                                                                \
        memcpy((char *)out + i * sizeof(v), &v, sizeof(v));                                        \
    }                                                                                              \
    break

/* The last step of an average of integers. */
static void divide(void *out, size_t count, int type, int n)
{
    switch (type) {
    case R2_NCCL_INT8:
        SHARES(int8_t, int);
    case R2_NCCL_UINT8:
        SHARES(uint8_t, int);
    case R2_NCCL_INT32:
        SHARES(int32_t, int32_t);
    case R2_NCCL_UINT32:
        SHARES(uint32_t, uint32_t);
    case R2_NCCL_INT64:
        SHARES(int64_t, int64_t);
    case R2_NCCL_UINT64:
        SHARES(uint64_t, uint64_t);
    }
}

void r2_reduce_run(const struct r2_reduce_level *level, void *out, const void *const *in, int n_in,
                   size_t count, int type, int op)
{
    size_t bytes = count * r2_nccl_type_size(type);
    size_t rest = bytes % R2_REDUCE_STEP, even = bytes - rest;
    fenv_t env;

    fegetenv(&env);
    fesetenv(FE_DFL_ENV); /* a thread inherits its creator's flush to zero */
    level->run(out, (const char *const *)in, n_in, even, type, op);
    if (rest) {
        char last[n_in + 1][R2_REDUCE_STEP];
        const char *rows[n_in];

        memset(last, 0, sizeof(last));
        for (int i = 0; i < n_in; i++)
            rows[i] = memcpy(last[i], (const char *)in[i] + even, rest);
        level->run(last[n_in], rows, n_in, R2_REDUCE_STEP, type, op);
        memcpy((char *)out + even, last[n_in], rest);
    }
    if (op == R2_NCCL_AVG)
        divide(out, count, type, n_in);
    fesetenv(&env);
}

void r2_reduce(void *out, const void *const *in, int n_in, size_t count, int type, int op)
{
    if (n_in > 1)
        r2_reduce_run(best(), out, in, n_in, count, type, op);
    else if (out != in[0])
        memcpy(out, in[0], count * r2_nccl_type_size(type));
}
