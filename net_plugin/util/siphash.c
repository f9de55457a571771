#include "util/siphash.h"

struct sip_state {
    uint64_t v0;
    uint64_t v1;
    uint64_t v2;
    uint64_t v3;
};

static uint64_t rotl(uint64_t x, int n)
{
    return (x << n) | (x >> (64 - n));
}

static uint64_t load_le64(const uint8_t *p)
{
    uint64_t v = 0;

    for (int i = 7; i >= 0; i--) {
        v = (v << 8) | p[i];
    }
    return v;
}

static void store_le64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++) {
        p[i] = (uint8_t)(v >> (8 * i));
    }
}

static void sip_rounds(struct sip_state *s, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        s->v0 += s->v1;
        s->v2 += s->v3;
        s->v1 = rotl(s->v1, 13) ^ s->v0;
        s->v3 = rotl(s->v3, 16) ^ s->v2;
        s->v0 = rotl(s->v0, 32);
        s->v2 += s->v1;
        s->v0 += s->v3;
        s->v1 = rotl(s->v1, 17) ^ s->v2;
        s->v3 = rotl(s->v3, 21) ^ s->v0;
        s->v2 = rotl(s->v2, 32);
    }
}

static void sip_word(struct sip_state *s, uint64_t m)
{
    s->v3 ^= m;
    sip_rounds(s, 2);
    s->v0 ^= m;
}

void r2_siphash128(const uint8_t key[16], const void *data, size_t len, uint8_t out[16])
{
    const uint8_t *p = data;
    uint64_t k0 = load_le64(key);
    uint64_t k1 = load_le64(key + 8);
    struct sip_state s = {
        .v0 = k0 ^ UINT64_C(0x736f6d6570736575),
        .v1 = k1 ^ UINT64_C(0x646f72616e646f6d) ^ 0xee, /* 0xee: the 128-bit variant */
        .v2 = k0 ^ UINT64_C(0x6c7967656e657261),
        .v3 = k1 ^ UINT64_C(0x7465646279746573),
    };
    uint64_t last = (uint64_t)(len & 255) << 56;
    size_t whole = len & ~(size_t)7;

    for (size_t i = 0; i < whole; i += 8) {
        sip_word(&s, load_le64(p + i));
    }
    for (size_t i = whole; i < len; i++) {
        last |= (uint64_t)p[i] << (8 * (i - whole));
    }
    sip_word(&s, last);

    s.v2 ^= 0xee;
    sip_rounds(&s, 4);
    store_le64(out, s.v0 ^ s.v1 ^ s.v2 ^ s.v3);
    s.v1 ^= 0xdd;
    sip_rounds(&s, 4);
    store_le64(out + 8, s.v0 ^ s.v1 ^ s.v2 ^ s.v3);
}

bool r2_tag_equal(const uint8_t a[16], const uint8_t b[16])
{
    volatile uint8_t diff = 0;

    for (int i = 0; i < 16; i++) {
        diff = (uint8_t)(diff | (a[i] ^ b[i]));
    }
    return diff == 0;
}
