/* Frames and addresses (rung 1): what r2_wire_check lets through has exactly the length that its
 * own fields say. */
#include <arpa/inet.h>

#include "check.h"
#include "oob/wire.h"

static const struct {
    uint8_t type;
    size_t len;
} fixed[] = {
    {R2_F_OPEN, 24},      {R2_F_OPEN_ACK, 16}, {R2_F_CTS, 40},    {R2_F_EAGER, 28},
    {R2_F_ACK, 24},       {R2_F_DOWN, 12},     {R2_F_FENCED, 12}, {R2_F_CLOSE, 24},
    {R2_F_CLOSE_ACK, 16}, {R2_F_HEARTBEAT, 0}, {R2_F_INFO, 80},   {R2_F_SEEN, 24},
    {R2_F_HEARD, 4},
};

/* A body at the very end of its memory: ASan sees a read behind it. */
static int check_exact(uint8_t type, const void *from, size_t len)
{
    uint8_t *body = malloc(len ? len : 1);
    int rc;

    CHECK(body);
    if (len)
        memcpy(body, from, len);
    rc = r2_wire_check(type, body, len);
    free(body);
    return rc;
}

TEST(lengths)
{
    static uint8_t zero[128];

    for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++) {
        for (size_t len = 0; len <= 100; len++)
            CHECK_EQ(check_exact(fixed[i].type, zero, len), len == fixed[i].len ? 0 : -EPROTO);
    }
    CHECK_EQ(check_exact(0, zero, 0), -EPROTO);
    for (int type = R2_F_LAST + 1; type < 256; type++)
        CHECK_EQ(check_exact((uint8_t)type, zero, 24), -EPROTO);
}

static void with_count(uint8_t type, size_t at, uint32_t count, size_t each, uint32_t max)
{
    static uint8_t body[R2_WIRE_MAX_BODY + 1];
    size_t base = 0, len;

    for (size_t i = 0; i < sizeof(fixed) / sizeof(fixed[0]); i++) {
        if (fixed[i].type == type)
            base = fixed[i].len;
    }
    memset(body, 0, sizeof(body));
    memcpy(body + at, &count, sizeof(count));
    len = base + (size_t)count * each;
    if (len > R2_WIRE_MAX_BODY || count > max) {
        CHECK_EQ(check_exact(type, body, R2_WIRE_MAX_BODY), -EPROTO);
        if (len <= R2_WIRE_MAX_BODY)
            CHECK_EQ(check_exact(type, body, len), -EPROTO);
        CHECK_EQ(check_exact(type, body, base), -EPROTO);
        return;
    }
    CHECK_EQ(check_exact(type, body, len), 0);
    CHECK_EQ(check_exact(type, body, len + 1), -EPROTO);
    if (count)
        CHECK_EQ(check_exact(type, body, len - 1), -EPROTO);
}

TEST(counts)
{
    static const uint32_t counts[] = {0,     1,          2,          15,         16,
                                      17,    100,        2729,       2730,       65503,
                                      65504, 0x0aaaaaab, 0x10000000, 0x80000000, 0xffffffff};

    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        with_count(R2_F_CTS, offsetof(struct r2_msg_cts, keys), counts[i], 4, R2_WIRE_MAX_NICS);
        with_count(R2_F_EAGER, offsetof(struct r2_msg_eager, size), counts[i], 1, UINT32_MAX);
        with_count(R2_F_ACK, offsetof(struct r2_msg_ack, ranges), counts[i],
                   sizeof(struct r2_ack_range), UINT32_MAX);
        with_count(R2_F_INFO, offsetof(struct r2_msg_info, nics), counts[i],
                   sizeof(struct r2_info_nic), R2_WIRE_MAX_NICS);
        with_count(R2_F_SEEN, offsetof(struct r2_msg_seen, seen), counts[i],
                   sizeof(struct r2_wire_seen), R2_WIRE_MAX_SEEN);
    }
}

static void roundtrip(int family, const char *ip, uint16_t port, const char *text)
{
    struct sockaddr_storage sa = {.ss_family = (sa_family_t)family}, back;
    struct r2_wire_addr w;
    char out[64];
    socklen_t len;

    if (family == AF_INET) {
        CHECK_EQ(inet_pton(family, ip, &((struct sockaddr_in *)&sa)->sin_addr), 1);
        ((struct sockaddr_in *)&sa)->sin_port = htons(port);
    } else {
        CHECK_EQ(inet_pton(family, ip, &((struct sockaddr_in6 *)&sa)->sin6_addr), 1);
        ((struct sockaddr_in6 *)&sa)->sin6_port = htons(port);
    }
    CHECK_EQ(r2_wire_from_sockaddr(&w, &sa), 0);
    CHECK_EQ(w.port, port);
    CHECK_EQ(r2_wire_to_sockaddr(&w, &back, &len), 0);
    CHECK_MEM(&back, &sa, len);
    r2_wire_addr_text(&w, out, sizeof(out));
    CHECK_STR(out, text);
}

TEST(addresses)
{
    struct sockaddr_storage sa = {.ss_family = AF_UNIX};
    struct r2_wire_addr w = {.family = 5};
    char out[8];
    socklen_t len;

    roundtrip(AF_INET, "10.1.0.2", 4711, "10.1.0.2:4711");
    roundtrip(AF_INET6, "fd00::1", 65535, "[fd00::1]:65535");
    CHECK_EQ(r2_wire_from_sockaddr(&w, &sa), -EAFNOSUPPORT);
    w.family = 5; /* from the wire: anything */
    CHECK_EQ(r2_wire_to_sockaddr(&w, &sa, &len), -EAFNOSUPPORT);
    r2_wire_addr_text(&w, out, sizeof(out)); /* short buffer, strange family */
    CHECK_LT(strlen(out), sizeof(out));
}
