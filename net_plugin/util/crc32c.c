#include "util/crc32c.h"

#include <string.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#define CRC32C_POLY UINT32_C(0x82F63B78)

/* crc_table[k][b]: effect of byte b followed by k zero bytes. */
static uint32_t crc_table[8][256];

typedef uint32_t (*crc_fn)(uint32_t crc, const void *data, size_t len);

static void crc_table_fill(void)
{
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t c = b;

        for (int bit = 0; bit < 8; bit++) {
            c = (c >> 1) ^ ((c & 1) ? CRC32C_POLY : 0);
        }
        crc_table[0][b] = c;
    }
    for (uint32_t b = 0; b < 256; b++) {
        for (int k = 1; k < 8; k++) {
            uint32_t c = crc_table[k - 1][b];

            crc_table[k][b] = (c >> 8) ^ crc_table[0][c & 255];
        }
    }
}

uint32_t r2_crc32c_table(uint32_t crc, const void *data, size_t len)
{
    const unsigned char *p = data;
    uint32_t c = ~crc;

    for (; len >= 8; len -= 8, p += 8) {
        c ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        c = crc_table[7][c & 255] ^ crc_table[6][(c >> 8) & 255] ^ crc_table[5][(c >> 16) & 255] ^
            crc_table[4][c >> 24] ^ crc_table[3][p[4]] ^ crc_table[2][p[5]] ^ crc_table[1][p[6]] ^
            crc_table[0][p[7]];
    }
    for (; len > 0; len--, p++) {
        c = (c >> 8) ^ crc_table[0][(c ^ *p) & 255];
    }
    return ~c;
}

#if defined(__x86_64__)

/* Three independent sums hide the 3-cycle latency of the instruction. */
#define CRC_LANE 1024

/* zero_shift[k][b]: effect of byte b at place k of a sum followed by CRC_LANE zero bytes. */
static uint32_t zero_shift[4][256];

/* The effect is linear, so that of a byte is the sum of the effects of its bits. */
static void crc_shift_fill(void)
{
    for (int k = 0; k < 4; k++) {
        for (uint32_t b = 1; b < 256; b++) {
            uint32_t low = b & (0 - b);
            uint32_t c = low << (8 * k);

            if (b != low) {
                zero_shift[k][b] = zero_shift[k][low] ^ zero_shift[k][b ^ low];
                continue;
            }
            for (int i = 0; i < CRC_LANE; i++) {
                c = (c >> 8) ^ crc_table[0][c & 255];
            }
            zero_shift[k][b] = c;
        }
    }
}

static uint32_t crc_shift(uint64_t crc)
{
    uint32_t c = (uint32_t)crc;

    return zero_shift[0][c & 255] ^ zero_shift[1][(c >> 8) & 255] ^ zero_shift[2][(c >> 16) & 255] ^
           zero_shift[3][c >> 24];
}

static uint64_t load64(const unsigned char *p)
{
    uint64_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

/* Newer clang no longer counts the CRC instructions to sse4.2; older gcc does not know them alone.
 */
#if defined(__clang__) && __clang_major__ >= 14
#define CRC_TARGET "sse4.2,crc32"
#else
#define CRC_TARGET "sse4.2"
#endif

__attribute__((target(CRC_TARGET))) static uint32_t crc_sse42(uint32_t crc, const void *data,
                                                              size_t len)
{
    const unsigned char *p = data;
    uint64_t a = ~crc;

    for (; len >= 3 * CRC_LANE; len -= 3 * CRC_LANE, p += 3 * CRC_LANE) {
        uint64_t b = 0;
        uint64_t c = 0;

        for (size_t i = 0; i < CRC_LANE; i += 8) {
            a = __builtin_ia32_crc32di(a, load64(p + i));
            b = __builtin_ia32_crc32di(b, load64(p + CRC_LANE + i));
            c = __builtin_ia32_crc32di(c, load64(p + 2 * CRC_LANE + i));
        }
        a = crc_shift(crc_shift(a) ^ (uint32_t)b) ^ (uint32_t)c;
    }
    for (; len >= 8; len -= 8, p += 8) {
        a = __builtin_ia32_crc32di(a, load64(p));
    }
    for (; len > 0; len--, p++) {
        a = __builtin_ia32_crc32qi((uint32_t)a, *p);
    }
    return ~(uint32_t)a;
}

static crc_fn crc_pick(void)
{
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") ? crc_sse42 : r2_crc32c_table;
}

#elif defined(__aarch64__)

#define CRC_HWCAP_CRC32 (1UL << 7)

__attribute__((target("+crc"))) static uint32_t crc_arm(uint32_t crc, const void *data, size_t len)
{
    const unsigned char *p = data;
    uint32_t c = ~crc;

    for (; len >= 8; len -= 8, p += 8) {
        uint64_t v;

        memcpy(&v, p, sizeof(v));
        __asm__("crc32cx %w0, %w0, %x1" : "+r"(c) : "r"(v));
    }
    for (; len > 0; len--, p++) {
        __asm__("crc32cb %w0, %w0, %w1" : "+r"(c) : "r"((uint32_t)*p));
    }
    return ~c;
}

static crc_fn crc_pick(void)
{
    return (getauxval(AT_HWCAP) & CRC_HWCAP_CRC32) ? crc_arm : r2_crc32c_table;
}

static void crc_shift_fill(void) {}

#else

static crc_fn crc_pick(void)
{
    return r2_crc32c_table;
}

static void crc_shift_fill(void) {}

#endif

/* Before main, or before dlopen returns: no thread can be here yet. */
__attribute__((constructor)) static void crc_fill(void)
{
    crc_table_fill();
    crc_shift_fill();
}

uint32_t r2_crc32c(uint32_t crc, const void *data, size_t len)
{
    /* Relaxed suffices: every thread computes the same pointer, and what it points to is code. */
    static crc_fn picked;
    crc_fn fn = __atomic_load_n(&picked, __ATOMIC_RELAXED);

    if (!fn) {
        fn = crc_pick();
        __atomic_store_n(&picked, fn, __ATOMIC_RELAXED);
    }
    return fn(crc, data, len);
}
