/* Adds up contributions to an AllReduce on the CPU, element by element. Pure: no clock, socket or
 * thread. Type and operation numbers are NCCL's (nccl/nccl.h).
 *
 * Order. Every element is in[0] op in[1] op ... op in[n_in - 1], in this order. With contributions
 * in rank order the result depends neither on who adds them nor on where the data is cut.
 *
 * Accumulators. float16, bfloat16 and fp8 are added in float32 and rounded once, at the end, to
 * nearest even. The other types are added as they are. Integers wrap around. The thread's own
 * floating-point mode (flush to zero, rounding) has no influence.
 *
 * Against NCCL:
 * - Integers: the same bits.
 * - float32, float64: the same operations in another order. NCCL's order depends on its algorithm.
 * - float16, bfloat16, fp8: NCCL rounds after each addition, up to p - 1 times.
 * - AVG of integers: the sum, which wraps around, divided by n_in and cut off towards zero, as
 * NCCL.
 * - AVG of the others: each contribution times 1/n_in, then added, as NCCL. NCCL rounds 1/n_in to
 *   the type; here it is a float32 (a float64 for float64).
 * - MIN, MAX: a NaN loses against a number, as in NCCL (fminf, fmaxf). If elements are equal (-0
 * and +0), the first in order stays. NCCL leaves that open.
 * - Overflow: float16 and bfloat16 become infinite. fp8 stops at its largest finite number, also
 * for an infinite sum, as CUDA's conversion does.
 * - A NaN result is a quiet NaN. The processor chooses which one.
 * With one contribution the result is a copy of it, bit for bit.
 *
 * Threads: any. Memory: none is kept. Errors: none; the caller asks r2_reduce_covers first.
 */
#ifndef R2_REDUCE_REDUCE_H
#define R2_REDUCE_REDUCE_H

#include <stdbool.h>
#include <stddef.h>

#include "nccl/nccl.h"

/* Whether r2_reduce takes this pair: every known type with SUM, PROD, MAX, MIN and AVG. */
bool r2_reduce_covers(int type, int op);

/* `out` and `in[i]` hold `count` elements, at any address. `out` may be one of the inputs; other
 * overlaps are not allowed. n_in >= 1. AVG divides by n_in, so it needs all contributions in one
 * call; the other operations may go on from a partial result. */
void r2_reduce(void *out, const void *const *in, int n_in, size_t count, int type, int op);

#endif
