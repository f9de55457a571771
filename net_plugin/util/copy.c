#include "util/copy.h"

#include <stdint.h>

/* A GPU, or another thread, reads the destination while it is written: its stores are volatile so
 * that the compiler neither splits, joins, repeats nor moves them. Unaligned on purpose: a
 * message may start anywhere. ThreadSanitizer is switched off for the stores because the reader
 * has no lock to take; the order that it relies on is the barrier's. */
#if defined(__SANITIZE_THREAD__)
#define COPY_RACY __attribute__((no_sanitize_thread))
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define COPY_RACY __attribute__((no_sanitize("thread")))
#endif
#endif
#ifndef COPY_RACY
#define COPY_RACY
#endif

typedef uint64_t word_any __attribute__((aligned(1), may_alias));
typedef uint64_t pair_any __attribute__((vector_size(16), aligned(1), may_alias));

#define WORD 8
#define PAIR 16

/* Everything stored before is visible before anything stored after. Pairs with the reader's load
 * of the flag followed by its loads of the data (a GPU's ld.volatile of the whole line). x86 keeps
 * stores in order by itself, so only the compiler has to be held back. */
static inline void flag_barrier(void)
{
#if defined(__x86_64__)
    __asm__ volatile("" ::: "memory");
#elif defined(__aarch64__)
    __asm__ volatile("dmb oshst" ::: "memory"); /* a device is outside the inner domain */
#else
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

COPY_RACY static inline void put_byte(unsigned char *dst, const unsigned char *src)
{
    *(volatile unsigned char *)dst = *src;
}

COPY_RACY static inline void put_word(unsigned char *dst, const unsigned char *src)
{
    *(volatile word_any *)(void *)dst = *(const word_any *)(const void *)src;
}

COPY_RACY static inline void put_pair(unsigned char *dst, const unsigned char *src)
{
    *(volatile pair_any *)(void *)dst = *(const pair_any *)(const void *)src;
}

COPY_RACY static void copy_bytes(unsigned char *dst, const unsigned char *src, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        put_byte(dst + i, src + i);
    }
}

COPY_RACY static void copy_line(unsigned char *dst, const unsigned char *src)
{
    for (size_t i = 0; i < R2_LINE_BYTES - PAIR; i += PAIR) {
        put_pair(dst + i, src + i);
    }
    put_word(dst + R2_LINE_BYTES - PAIR, src + R2_LINE_BYTES - PAIR);
    flag_barrier();
    put_word(dst + R2_LINE_BYTES - WORD, src + R2_LINE_BYTES - WORD);
}

/* Part of one line, from byte `at` of it to at + len <= 128. */
COPY_RACY static void copy_part(unsigned char *dst, const unsigned char *src, size_t len, size_t at)
{
    size_t i = 0;

    if (at % WORD) {
        i = WORD - at % WORD;
        i = i < len ? i : len;
        if (at + i > R2_LINE_BYTES - WORD) {
            flag_barrier();
        }
        copy_bytes(dst, src, i);
    }
    for (; len - i >= WORD; i += WORD) {
        if (at + i == R2_LINE_BYTES - WORD) {
            flag_barrier();
        }
        put_word(dst + i, src + i);
    }
    if (i < len) {
        if (at + i >= R2_LINE_BYTES - WORD) {
            flag_barrier();
        }
        copy_bytes(dst + i, src + i, len - i);
    }
}

void r2_copy_lines(void *dst, const void *src, size_t len, size_t msg_offset)
{
    unsigned char *d = dst;
    const unsigned char *s = src;
    size_t at = msg_offset % R2_LINE_BYTES;

    if (at && len) {
        size_t part = R2_LINE_BYTES - at;

        part = part < len ? part : len;
        copy_part(d, s, part, at);
        d += part;
        s += part;
        len -= part;
    }
    for (; len >= R2_LINE_BYTES; len -= R2_LINE_BYTES) {
        copy_line(d, s);
        d += R2_LINE_BYTES;
        s += R2_LINE_BYTES;
    }
    if (len) {
        copy_part(d, s, len, 0);
    }
}
