/* Small functions over sockets, for the bootstrap and the built-in Socket transport. */
#ifndef HOSTNCCL_SOCKETS_H
#define HOSTNCCL_SOCKETS_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

struct hn_addr { /* travels in handles and messages: fixed size, no padding */
    uint16_t family;
    uint16_t port; /* network order */
    uint32_t scope;
    uint8_t ip[16];
};
_Static_assert(sizeof(struct hn_addr) == 24, "wire size");

struct hn_nic {
    char name[32];
    struct hn_addr addr;
};

/* Interfaces in the order of the system: those that NCCL_SOCKET_IFNAME picks ("eth" is a prefix,
 * "=eth0" exact, "^docker" an exclusion) in NCCL_SOCKET_FAMILY, else all but loopback and docker,
 * else loopback. Returns how many were written, at most `max`. */
int hn_sockets_nics(struct hn_nic *nics, int max);
/* "1.2.3.4", "1.2.3.4:80", "[::1]:80", "::1". 0 or -EINVAL. */
int hn_sockets_parse(const char *text, struct hn_addr *out);
void hn_sockets_format(const struct hn_addr *addr, char *text, size_t size);

/* Non-blocking listening socket; the port chosen is written back. Fd or -errno. */
int hn_sockets_listen(struct hn_addr *addr);
/* Non-blocking connection under way, bound to `from` unless NULL. Fd or -errno. */
int hn_sockets_connect(const struct hn_addr *to, const struct hn_addr *from);
/* After hn_sockets_connect: 1 connected, 0 not yet, -errno. */
int hn_sockets_connected(int fd);
/* Non-blocking, no delay, close on exec. Fd, -EAGAIN or -errno. */
int hn_sockets_accept(int listen_fd);

/* Whole buffer or error, checking `*stop` (may be NULL) every 20 ms. 0, -ECANCELED, -ETIMEDOUT,
 * -ECONNRESET (end of stream included) or another -errno. */
int hn_sockets_write(int fd, const void *data, size_t size, const _Atomic int *stop,
                     uint64_t deadline);
int hn_sockets_read(int fd, void *data, size_t size, const _Atomic int *stop, uint64_t deadline);

#endif
