/* How much memory the engine and its transport hold, for the control segment: structures and
 * buffers that they allocate, without what the C library or the kernel adds. An account, not an
 * allocator: whoever allocates or frees something that counts says so.
 *
 * Any thread, any lock; relaxed, because nothing is ordered by it. */
#ifndef R2_UTIL_MEM_H
#define R2_UTIL_MEM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

extern atomic_long r2_mem_held;

static inline void r2_mem_more(size_t bytes)
{
    atomic_fetch_add_explicit(&r2_mem_held, (long)bytes, memory_order_relaxed);
}

static inline void r2_mem_less(size_t bytes)
{
    atomic_fetch_sub_explicit(&r2_mem_held, (long)bytes, memory_order_relaxed);
}

static inline uint64_t r2_mem_now(void)
{
    long held = atomic_load_explicit(&r2_mem_held, memory_order_relaxed);

    return held > 0 ? (uint64_t)held : 0;
}

#endif
