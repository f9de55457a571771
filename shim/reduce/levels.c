/* The loops, once for each kind of processor. On other processors than x86-64 the compiler's
 * vectors of 16 bytes are what there is (NEON on aarch64).
 */
#include "reduce/levels.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "nccl/nccl.h"

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

#define NO_ASAN __attribute__((no_sanitize("address")))

#define LEVEL base
#define W 16
#define TARGET NO_ASAN
#include "reduce/loops.h"

#ifdef __x86_64__
/* These processors convert float16 themselves. */
#undef FROM_F16
#undef TO_F16
#define FROM_F16(s, part) N(from_f16)(s, part)
#define TO_F16(acc) N(to_f16)((acc)[0], (acc)[1])

#define LEVEL avx2
#define W 32
#define TARGET NO_ASAN __attribute__((target("avx2,f16c")))
#define HALVES(s, part) _mm256_cvtph_ps(_mm256_extracti128_si256((__m256i)(s), part))
#define JOINED(a, b)                                                                               \
    _mm256_set_m128i(_mm256_cvtps_ph((__m256)(b), 0), _mm256_cvtps_ph((__m256)(a), 0))
#include "reduce/loops.h"

#define LEVEL avx512
#define W 64
#define TARGET NO_ASAN __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define HALVES(s, part) _mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)(s), part))
#define JOINED(a, b)                                                                               \
    _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph((__m512)(a), 0)),                    \
                       _mm512_cvtps_ph((__m512)(b), 0), 1)
#include "reduce/loops.h"
#endif

#ifdef __x86_64__
static bool has_f16c(void)
{
    unsigned int a, b, c, d;

    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

const struct r2_reduce_level *r2_reduce_level(int level)
{
    static const struct r2_reduce_level base = {"base", loops_base};
#ifdef __x86_64__
    static const struct r2_reduce_level avx2 = {"avx2", loops_avx2};
    static const struct r2_reduce_level avx512 = {"avx512", loops_avx512};

    if (level == 1 && __builtin_cpu_supports("avx2") && has_f16c())
        return &avx2;
    if (level == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return &avx512;
#endif
    return level == 0 ? &base : NULL;
}
