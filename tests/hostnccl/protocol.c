/* Lines of LL (4 bytes of data, 4 of flag) and LL128 (120 bytes of data, 8 of flag). And the
 * pattern that buffers hold while the plugin must not touch them. */
#include <string.h>

#include "kernels.h"

#if defined(__SANITIZE_THREAD__)
#define NO_TSAN __attribute__((no_sanitize("thread"), noinline))
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NO_TSAN __attribute__((no_sanitize("thread"), noinline))
#endif
#endif
#ifndef NO_TSAN
#define NO_TSAN
#endif

enum { LL128_DATA = 120, LL128_LINE = 128 };

/* Its upper halves have the top bit set, which no flag has. */
#define PATTERN 0xa5c3a5c3a5c3a5c3ull
#define SPARSE_STRIDE 4096

size_t hn_proto_capacity(enum hn_proto proto, size_t slot_bytes)
{
    if (proto == HN_LL)
        return slot_bytes / 2;
    return proto == HN_LL128 ? slot_bytes / LL128_LINE * LL128_DATA : slot_bytes;
}

size_t hn_proto_wire_bytes(enum hn_proto proto, size_t data_bytes)
{
    if (proto == HN_LL)
        return (data_bytes + 3) / 4 * 8;
    if (proto == HN_LL128)
        return (data_bytes + LL128_DATA - 1) / LL128_DATA * LL128_LINE;
    return data_bytes;
}

static uint32_t flag32(uint64_t number)
{
    return (uint32_t)((number + 1) & 0x3fffffff);
}

static uint64_t flag64(uint64_t number)
{
    return (number + 1) & 0x3fffffffffffffffull;
}

static void encode_ll(char *wire, const char *data, size_t bytes, uint64_t number)
{
    for (size_t at = 0; at < bytes; at += 4, wire += 8) {
        uint32_t word = 0, flag = flag32(number);
        memcpy(&word, data + at, bytes - at < 4 ? bytes - at : 4);
        memcpy(wire, &word, 4);
        memcpy(wire + 4, &flag, 4);
    }
}

static void encode_ll128(char *wire, const char *data, size_t bytes, uint64_t number)
{
    for (size_t at = 0; at < bytes; at += LL128_DATA, wire += LL128_LINE) {
        uint64_t flag = flag64(number);
        size_t n = bytes - at < LL128_DATA ? bytes - at : LL128_DATA;
        memcpy(wire, data + at, n);
        memset(wire + n, 0, LL128_DATA - n);
        memcpy(wire + LL128_DATA, &flag, 8);
    }
}

void hn_proto_encode(enum hn_proto proto, char *wire, const char *data, size_t bytes,
                     uint64_t number)
{
    if (proto == HN_LL)
        encode_ll(wire, data, bytes, number);
    else
        encode_ll128(wire, data, bytes, number);
}

/* Data and flag are one 8-byte load, as on the GPU. */
NO_TSAN static size_t decode_ll(const char *wire, char *data, size_t bytes, size_t done,
                                uint64_t number)
{
    const volatile uint64_t *words = (const volatile uint64_t *)wire;
    uint32_t flag = flag32(number);
    while (done < bytes) {
        uint64_t word = words[done / 4];
        if ((uint32_t)(word >> 32) != flag)
            break;
        size_t n = bytes - done < 4 ? bytes - done : 4;
        for (size_t i = 0; i < n && n < 4; i++)
            data[done + i] = (char)(word >> 8 * i);
        if (n == 4)
            __builtin_memcpy(data + done, &word, 4);
        done += n;
    }
    return done;
}

NO_TSAN static size_t decode_ll128(const char *wire, char *data, size_t bytes, size_t done,
                                   uint64_t number)
{
    while (done < bytes) {
        const char *line = wire + done / LL128_DATA * LL128_LINE;
        const volatile uint64_t *words = (const volatile uint64_t *)line;
        if (words[LL128_DATA / 8] != flag64(number))
            break;
        /* The flag is stored last: it pairs with whoever placed the line in ascending order. */
        atomic_thread_fence(memory_order_acquire);
        for (int w = 0; w < LL128_DATA / 8; w++) {
            uint64_t word = words[w];
            size_t n = bytes - done < 8 ? bytes - done : 8;
            for (size_t i = 0; i < n && n < 8; i++)
                data[done + i] = (char)(word >> 8 * i);
            if (n == 8)
                __builtin_memcpy(data + done, &word, 8);
            done += n;
        }
    }
    return done;
}

size_t hn_proto_decode(enum hn_proto proto, const char *wire, char *data, size_t bytes, size_t done,
                       uint64_t number)
{
    if (proto == HN_LL)
        return decode_ll(wire, data, bytes, done, number);
    return decode_ll128(wire, data, bytes, done, number);
}

/* Next scribbled range at or after *at; false at the end. */
static bool range(size_t bytes, size_t *at, size_t *len)
{
    if (*at >= bytes)
        return false;
    if (hn_util_harsh() == HN_HARSH_FULL) {
        *len = bytes - *at;
        return true;
    }
    *at = (*at + SPARSE_STRIDE - 1) / SPARSE_STRIDE * SPARSE_STRIDE;
    *len = *at < bytes && bytes - *at < 128 ? bytes - *at : 128;
    return *at < bytes;
}

void hn_scribble(void *data, size_t bytes)
{
    size_t at = 0, len;
    if (hn_util_harsh() == HN_HARSH_OFF)
        return;
    for (; range(bytes, &at, &len); at += len) {
        char *p = (char *)data + at;
        uint64_t pattern = PATTERN;
        for (size_t i = 0; i < len; i += 8)
            memcpy(p + i, &pattern, len - i < 8 ? len - i : 8);
    }
}

long hn_scribble_check(const void *data, size_t bytes)
{
    size_t at = 0, len;
    if (hn_util_harsh() == HN_HARSH_OFF)
        return -1;
    for (; range(bytes, &at, &len); at += len) {
        const char *p = (const char *)data + at;
        uint64_t pattern = PATTERN;
        for (size_t i = 0; i < len; i += 8)
            if (memcmp(p + i, &pattern, len - i < 8 ? len - i : 8))
                return (long)(at + i);
    }
    return -1;
}
