/* Addresses: comparing, classifying, printing. Pure. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

#include "topology/nettables.h"
#include "topology/nics.h"

static const struct in6_addr *r2_in6(const struct sockaddr *addr)
{
    return &((const struct sockaddr_in6 *)addr)->sin6_addr;
}

static uint32_t r2_in4(const struct sockaddr *addr)
{
    return ntohl(((const struct sockaddr_in *)addr)->sin_addr.s_addr);
}

socklen_t r2_sockaddr_len(const struct sockaddr *addr)
{
    return addr->sa_family == AF_INET    ? sizeof(struct sockaddr_in)
           : addr->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                         : 0;
}

bool r2_sockaddr_in_prefix(const struct sockaddr *a, const struct sockaddr *b, int prefixlen)
{
    const unsigned char *x;
    const unsigned char *y;
    int most = a->sa_family == AF_INET ? 32 : 128;

    if (a->sa_family != b->sa_family || r2_sockaddr_len(a) == 0) {
        return false;
    }
    if (a->sa_family == AF_INET) {
        x = (const unsigned char *)&((const struct sockaddr_in *)a)->sin_addr;
        y = (const unsigned char *)&((const struct sockaddr_in *)b)->sin_addr;
    } else {
        x = r2_in6(a)->s6_addr;
        y = r2_in6(b)->s6_addr;
    }
    prefixlen = prefixlen < 0 ? 0 : prefixlen > most ? most : prefixlen;
    if (memcmp(x, y, (size_t)prefixlen / 8)) {
        return false;
    }
    return prefixlen % 8 == 0 ||
           ((x[prefixlen / 8] ^ y[prefixlen / 8]) & (0xff00 >> (prefixlen % 8)) & 0xff) == 0;
}

bool r2_sockaddr_equal(const struct sockaddr *a, const struct sockaddr *b)
{
    if (!r2_sockaddr_in_prefix(a, b, 128)) {
        return false;
    }
    return !r2_sockaddr_is_linklocal(a) || a->sa_family == AF_INET ||
           ((const struct sockaddr_in6 *)a)->sin6_scope_id ==
               ((const struct sockaddr_in6 *)b)->sin6_scope_id;
}

bool r2_sockaddr_is_loopback(const struct sockaddr *addr)
{
    return addr->sa_family == AF_INET    ? r2_in4(addr) >> 24 == 127
           : addr->sa_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(r2_in6(addr))
                                         : false;
}

bool r2_sockaddr_is_linklocal(const struct sockaddr *addr)
{
    return addr->sa_family == AF_INET    ? r2_in4(addr) >> 16 == 0xa9fe
           : addr->sa_family == AF_INET6 ? IN6_IS_ADDR_LINKLOCAL(r2_in6(addr))
                                         : false;
}

const char *r2_addr_text(const struct sockaddr *addr, char *out, size_t outlen)
{
    char text[INET6_ADDRSTRLEN] = "?";
    uint32_t scope = 0;

    if (addr->sa_family == AF_INET) {
        inet_ntop(AF_INET, &((const struct sockaddr_in *)addr)->sin_addr, text, sizeof(text));
    } else if (addr->sa_family == AF_INET6) {
        inet_ntop(AF_INET6, r2_in6(addr), text, sizeof(text));
        scope = ((const struct sockaddr_in6 *)addr)->sin6_scope_id;
    }
    if (scope) {
        snprintf(out, outlen, "%s%%%u", text, scope);
    } else {
        snprintf(out, outlen, "%s", text);
    }
    return out;
}
