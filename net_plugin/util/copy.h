/* Line-ordered copy, for placing received bytes where a GPU already polls.
 *
 * With the LL and LL128 protocols the GPU consumes a line as soon as it sees the flag inside it. A
 * line is an 8-byte pair of 4 data and 4 flag bytes (LL), or 128 bytes whose last 8 are the flag
 * (LL128). memcpy promises no order, so it must not be used for such buffers.
 */
#ifndef R2_UTIL_COPY_H
#define R2_UTIL_COPY_H

#include <stddef.h>

#define R2_LINE_BYTES 128

/* What a device stored before a word of its own that was read by a plain load is seen by what
 * follows. x86 keeps loads in order by itself; on aarch64 a device is outside the inner domain,
 * which a fence of C goes no further than. */
static inline void r2_device_seen(void)
{
#if defined(__aarch64__)
    __asm__ volatile("dmb oshld" ::: "memory");
#else
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
#endif
}

/* Copies len bytes; dst is the place of byte `msg_offset` of the message. Lines and words are
 * counted from the start of the message, not from addresses. Every whole 8-byte word is stored
 * exactly once, by a single 8-byte store or as half of a 16-byte one. Stores to one line become
 * visible in ascending order as far as the flag goes. When the last 8 bytes of a line are seen, all
 * bytes of the line that this call stores are there. A word that only partly belongs to the range
 * is stored byte by byte. So callers that place a message piece by piece pass pieces whose ends are
 * multiples of 8 (except the message's end). Any alignment of dst and src works; single 8-byte
 * stores are atomic for observers only when the message starts at a multiple of 8, as NCCL's
 * buffers do. dst and src must not overlap. Thread-safe. */
void r2_copy_lines(void *dst, const void *src, size_t len, size_t msg_offset);

#endif
