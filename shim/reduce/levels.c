/* The loops, once for each kind of processor. On other processors than x86-64 the compiler's
 * vectors of 16 bytes are what there is (NEON on aarch64).
 */
#include "reduce/levels.h"

#include <stdint.h>
#include <string.h>

#include "api/nccl.h"

#define LEVEL base
#define W 16
#define TARGET
#include "reduce/loops.h"

#ifdef __x86_64__
#define LEVEL avx2
#define W 32
#define TARGET __attribute__((target("avx2")))
#include "reduce/loops.h"

#define LEVEL avx512
#define W 64
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#include "reduce/loops.h"
#endif

const struct r2_reduce_level *r2_reduce_level(int level)
{
    static const struct r2_reduce_level base = {"base", loops_base};
#ifdef __x86_64__
    static const struct r2_reduce_level avx2 = {"avx2", loops_avx2};
    static const struct r2_reduce_level avx512 = {"avx512", loops_avx512};

    if (level == 1 && __builtin_cpu_supports("avx2"))
        return &avx2;
    if (level == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &avx512;
#endif
    return level == 0 ? &base : NULL;
}
