#include "oob/wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

int r2_wire_from_sockaddr(struct r2_wire_addr *out, const struct sockaddr_storage *sa)
{
    memset(out, 0, sizeof(*out));
    if (sa->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)sa;

        out->family = 4;
        out->port = ntohs(in->sin_port);
        memcpy(out->ip, &in->sin_addr, 4);
        return 0;
    }
    if (sa->ss_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)sa;

        out->family = 6;
        out->port = ntohs(in6->sin6_port);
        memcpy(out->ip, &in6->sin6_addr, 16);
        return 0;
    }
    return -EAFNOSUPPORT;
}

int r2_wire_to_sockaddr(const struct r2_wire_addr *a, struct sockaddr_storage *sa, socklen_t *len)
{
    memset(sa, 0, sizeof(*sa));
    if (a->family == 4) {
        struct sockaddr_in *in = (struct sockaddr_in *)sa;

        in->sin_family = AF_INET;
        in->sin_port = htons(a->port);
        memcpy(&in->sin_addr, a->ip, 4);
        *len = sizeof(*in);
        return 0;
    }
    if (a->family == 6) {
        struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)sa;

        in6->sin6_family = AF_INET6;
        in6->sin6_port = htons(a->port);
        memcpy(&in6->sin6_addr, a->ip, 16);
        *len = sizeof(*in6);
        return 0;
    }
    return -EAFNOSUPPORT;
}

void r2_wire_addr_text(const struct r2_wire_addr *a, char *out, size_t cap)
{
    char ip[INET6_ADDRSTRLEN] = "?";

    if (a->family == 4)
        inet_ntop(AF_INET, a->ip, ip, sizeof(ip));
    else if (a->family == 6)
        inet_ntop(AF_INET6, a->ip, ip, sizeof(ip));
    snprintf(out, cap, a->family == 6 ? "[%s]:%u" : "%s:%u", ip, a->port);
}

/* Length of the fixed part of each type's body; a heartbeat has none. */
static const uint16_t fixed_len[R2_F_LAST + 1] = {
    [R2_F_OPEN] = sizeof(struct r2_msg_open),
    [R2_F_OPEN_ACK] = sizeof(struct r2_msg_open_ack),
    [R2_F_CTS] = sizeof(struct r2_msg_cts),
    [R2_F_EAGER] = sizeof(struct r2_msg_eager),
    [R2_F_ACK] = sizeof(struct r2_msg_ack),
    [R2_F_DOWN] = sizeof(struct r2_msg_path),
    [R2_F_FENCED] = sizeof(struct r2_msg_path),
    [R2_F_CLOSE] = sizeof(struct r2_msg_close),
    [R2_F_CLOSE_ACK] = sizeof(struct r2_msg_close_ack),
    [R2_F_INFO] = sizeof(struct r2_msg_info),
    [R2_F_SEEN] = sizeof(struct r2_msg_seen),
    [R2_F_TEST] = sizeof(struct r2_msg_test),
    [R2_F_TEST_ACK] = sizeof(struct r2_msg_test),
    [R2_F_REVOKE] = sizeof(struct r2_msg_revoke),
    [R2_F_REVOKED] = sizeof(struct r2_msg_revoke),
    [R2_F_HEARD] = sizeof(struct r2_msg_heard),
};

static uint32_t load32(const uint8_t *p)
{
    uint32_t v;

    memcpy(&v, p, sizeof(v));
    return v;
}

int r2_wire_check(uint8_t type, const uint8_t *body, size_t len)
{
    uint64_t want;

    if (type == 0 || type > R2_F_LAST || len < fixed_len[type] || len > R2_WIRE_MAX_BODY)
        return -EPROTO;
    want = fixed_len[type];
    if (type == R2_F_CTS) {
        uint32_t keys = load32(body + offsetof(struct r2_msg_cts, keys));

        if (keys > R2_WIRE_MAX_NICS)
            return -EPROTO;
        want += (uint64_t)keys * sizeof(uint32_t);
    } else if (type == R2_F_EAGER) {
        want += load32(body + offsetof(struct r2_msg_eager, size));
    } else if (type == R2_F_ACK) {
        want += (uint64_t)load32(body + offsetof(struct r2_msg_ack, ranges)) *
                sizeof(struct r2_ack_range);
    } else if (type == R2_F_INFO) {
        uint32_t nics = load32(body + offsetof(struct r2_msg_info, nics));

        if (nics > R2_WIRE_MAX_NICS)
            return -EPROTO;
        want += (uint64_t)nics * sizeof(struct r2_info_nic);
    } else if (type == R2_F_SEEN) {
        uint32_t seen = load32(body + offsetof(struct r2_msg_seen, seen));

        if (seen > R2_WIRE_MAX_SEEN)
            return -EPROTO;
        want += (uint64_t)seen * sizeof(struct r2_wire_seen);
    }
    if (type == R2_F_CLOSE || type == R2_F_REVOKED) {
        uint32_t lanes =
            load32(body + (type == R2_F_CLOSE ? offsetof(struct r2_msg_close, lanes)
                                              : offsetof(struct r2_msg_revoke, lanes)));

        if (lanes > R2_WIRE_MAX_LANES)
            return -EPROTO;
        want += (uint64_t)lanes * sizeof(struct r2_msg_lane);
    }
    return want == len ? 0 : -EPROTO;
}
