/* How a connecting process proves that it knows the secret of the accepting one, before anything it
 * says counts. S = connecting, R = accepting: HELLO S->R, CHALLENGE R->S, PROOF S->R, WELCOME R->S.
 * Tags are SipHash-2-4-128 under the accepting process's secret over a label, the HELLO and the
 * accepting side's nonce: both sides prove that they know it. Little-endian, fixed lengths. */
#ifndef R2_TRANSPORT_TCP_HELLO_H
#define R2_TRANSPORT_TCP_HELLO_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "oob/wire.h"

#define R2_TCP_MAGIC 0x4c435232u

/* R2_HELLO_VERBS: after the WELCOME the stream belongs to the verbs transport.
 * R2_HELLO_CALL: the other way round. An accepting process that no path leads to any more calls the
 * connecting one: "my NIC `nic` is here, its listener at port `gen`". The proof is made with the
 * caller's own secret, which the called process had from its handle. */
enum r2_hello_kind { R2_HELLO_LANE = 1, R2_HELLO_PROBE = 2, R2_HELLO_VERBS = 3, R2_HELLO_CALL = 4 };

struct r2_tcp_hello {
    uint32_t magic;
    uint16_t version;
    uint8_t kind;
    uint8_t lane;
    uint8_t lanes; /* bulk lanes that will follow */
    uint8_t nic;   /* of the connecting process */
    uint8_t remote_nic;
    uint8_t extra; /* the connecting process has another path: who is short may say EMFILE */
    uint32_t gen;
    uint8_t from[16];
    uint8_t to[16];
    uint8_t nonce[16];
} __attribute__((packed));

struct r2_tcp_challenge {
    uint32_t magic;
    uint32_t status; /* 0, or ESRCH: this is another process */
    uint8_t nonce[16];
    uint8_t tag[16];
} __attribute__((packed));

struct r2_tcp_proof {
    uint8_t tag[16];
} __attribute__((packed));

struct r2_tcp_welcome {
    uint32_t magic;
    uint32_t status; /* 0 or an errno: stale generation, unknown endpoint; R2_WELCOME_GONE */
} __attribute__((packed));

/* "You are gone to me": the speaker has given the other process up, and its ends of all connections
 * between them have failed. A tag of label 'G' follows, a r2_tcp_proof, under the secret that both
 * sides of this socket know: that of the accepting process, or the caller's. It ends connections,
 * so it counts only with the tag, which answers this very HELLO. Who does not know it takes it for
 * an errno, and leaves. */
#define R2_WELCOME_GONE ENOTRECOVERABLE

/* `who`: 'R' for the challenge's tag, 'S' for the proof's, 'G' for R2_WELCOME_GONE's. */
void r2_hello_tag(const uint8_t secret[16], char who, const struct r2_tcp_hello *hello,
                  const uint8_t nonce[16], uint8_t tag[16]);
/* The first `len` bytes of what should be a challenge are not of this protocol; 0: not known. */
static inline bool r2_hello_foreign(const void *said, size_t len)
{
    const uint32_t magic = R2_TCP_MAGIC;

    return memcmp(said, &magic, len < sizeof(magic) ? len : sizeof(magic)) != 0;
}

/* A caller's proof. It covers the address that the caller's socket has (not the port), which is
 * believed: so a host that has come to where the called process was cannot pass a call on to it as
 * its own. An address translated on the way fails, as streams to it would. */
void r2_hello_call_tag(const uint8_t secret[16], const struct r2_tcp_hello *hello,
                       const uint8_t nonce[16], const struct r2_wire_addr *from, uint8_t tag[16]);

/* Small messages into an empty socket buffer: they go whole or the socket is broken. 0, -errno. */
int r2_hello_put(int fd, const void *data, size_t len);
/* 1 when `len` bytes are in `buf`, 0 wait, -errno. `have`: those that are there; then 0 again. */
int r2_hello_collect(int fd, uint8_t *buf, size_t *have, size_t len);

/* Who takes the socket of a proven R2_HELLO_VERBS; NULL: it is refused. Set before listening. The
 * descriptor is non-blocking, watched by nobody, counted by the TCP transport until
 * r2_tcp_close_fd. */
extern void (*r2_tcp_verbs_taker)(int fd, int nic, const struct r2_tcp_hello *hello);

/* A connecting socket, bound to the NIC, or -errno. `packet`: see r2_ep_params. */
int r2_tcp_socket(int nic, const struct r2_wire_addr *remote, int packet);
void r2_tcp_close_fd(int fd, bool abort);
/* The injected fault of NIC resets connections, in whichever direction. */
bool r2_tcp_broken(int nic);

#endif
