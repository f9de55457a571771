/* What the agreement writes into unique ids and sends between processes. Pure: bytes in, structs
 * out. Everything that is decoded came from outside: lengths, ranges and versions are checked, and
 * nothing here trusts a count before it has seen the bytes.
 *
 * A frame is a header and a payload; every frame carries the token of its communicator, which only
 * its ranks know. Integers are little-endian. Addresses: IPv4 or IPv6 with a port.
 */
#ifndef R2_AGREE_WIRE_H
#define R2_AGREE_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agree/agree.h"
#include "agree/machine.h"

/* 2: ranks tell each other of NCCL's errors; 3: exchanges; 4: who waits for an offer calls,
 * reports tell calls; 5: and times */
#define R2_AGREE_VERSION 5
#define R2_AGREE_TOKEN 16
#define R2_AGREE_HEADER 48
#define R2_AGREE_FRAME (1 << 20) /* most bytes of a payload */
#define R2_AGREE_TAIL 64         /* bytes of an id that NCCL leaves unused, the last ones */

struct r2_agree_addr {
    uint8_t family; /* 4 or 6 */
    uint16_t port;
    uint8_t ip[16]; /* IPv4: the first 4 */
};

/* --- unique ids --------------------------------------------------------------------------- */

struct r2_agree_tail {
    struct r2_agree_addr addr;
    uint8_t token[R2_AGREE_TOKEN];
};

/* Writes the tail of `id`. -EEXIST: it is in use. */
int r2_agree_tail_encode(uint8_t id[R2_AGREE_ID], const struct r2_agree_tail *tail);
/* 0; -ENOENT: all zero or another's; -EPROTO: ours, but of another version or damaged. */
int r2_agree_tail_decode(const uint8_t id[R2_AGREE_ID], struct r2_agree_tail *tail);

/* Token of a child communicator: the n-th derivation from `parent`. */
void r2_agree_token_derive(uint8_t out[R2_AGREE_TOKEN], const uint8_t parent[R2_AGREE_TOKEN],
                           uint64_t n, uint64_t salt);

/* --- frames ------------------------------------------------------------------------------- */

enum r2_agree_kind {
    R2_FRAME_HELLO = 1, /* who connects, or was connected to; no token */
    R2_FRAME_REGISTER,  /* a rank to the rendezvous */
    R2_FRAME_ROSTER,    /* rendezvous to a rank: everybody */
    R2_FRAME_OFF,       /* rendezvous to a rank: no plan changes */
    R2_FRAME_LEAVE,     /* a rank to the rendezvous */
    R2_FRAME_MACHINE,   /* rank to rank */
    R2_FRAME_REPORT,    /* a rank to the leader */
    R2_FRAME_FAILED,    /* rank to rank: NCCL has failed at one */
    R2_FRAME_OFFER,     /* a rank to the leader: its part of an exchange */
    R2_FRAME_OFFERS,    /* the leader to a rank: those of all ranks */
    R2_FRAME_INVITE,    /* the leader to a rank: to offer something for the first round */
    R2_FRAME_CALL,      /* the leader to a rank: nothing, but its host refuses it if it has ended */
    R2_FRAME_KINDS,
};

struct r2_agree_frame {
    enum r2_agree_kind kind;
    uint32_t from, to; /* ranks */
    uint8_t token[R2_AGREE_TOKEN];
    uint32_t len; /* of the payload */
};

void r2_agree_frame_encode(uint8_t out[R2_AGREE_HEADER], const struct r2_agree_frame *f);
/* 0 or -EPROTO. */
int r2_agree_frame_decode(const uint8_t in[R2_AGREE_HEADER], struct r2_agree_frame *f);

struct r2_agree_hello {
    uint8_t process[16];
    struct r2_agree_addr addr; /* family 0: it does not listen */
};
#define R2_AGREE_HELLO_BYTES 36

struct r2_agree_register {
    uint8_t family[R2_AGREE_TOKEN]; /* token of the id that the communicator descends from */
    uint32_t nranks, version;
    uint64_t settings, node;
};
#define R2_AGREE_REGISTER_BYTES 40

struct r2_agree_seat {
    uint32_t process; /* index into processes */
    uint64_t node;
};

struct r2_agree_roster {
    uint32_t nranks, nprocesses;
    struct r2_agree_hello *processes;
    struct r2_agree_seat *seats; /* [nranks] */
};

/* Functions named encode return the number of bytes and write them if they fit into `room`;
 * decode: 0, -EPROTO or -ENOMEM, over exactly `len` bytes. */
void r2_agree_hello_encode(uint8_t out[R2_AGREE_HELLO_BYTES], const struct r2_agree_hello *h);
int r2_agree_hello_decode(const uint8_t *in, size_t len, struct r2_agree_hello *h);
void r2_agree_register_encode(uint8_t out[R2_AGREE_REGISTER_BYTES],
                              const struct r2_agree_register *r);
int r2_agree_register_decode(const uint8_t *in, size_t len, struct r2_agree_register *r);
size_t r2_agree_roster_encode(uint8_t *out, size_t room, const struct r2_agree_roster *r);
int r2_agree_roster_decode(const uint8_t *in, size_t len, struct r2_agree_roster *r);
void r2_agree_roster_free(struct r2_agree_roster *r);

#define R2_AGREE_MSG_BYTES 48 /* then, in a PROPOSE, the plan */
void r2_agree_msg_encode(uint8_t out[R2_AGREE_MSG_BYTES], const struct r2_agree_msg *m);
int r2_agree_msg_decode(const uint8_t *in, size_t len, struct r2_agree_msg *m, const uint8_t **plan,
                        size_t *plan_len);

#define R2_AGREE_REPORT_BYTES (24 + 8 * R2_AGREE_WORDS)
void r2_agree_report_encode(uint8_t out[R2_AGREE_REPORT_BYTES], uint64_t number,
                            const struct r2_agree_report *r);
int r2_agree_report_decode(const uint8_t *in, size_t len, uint64_t *number,
                           struct r2_agree_report *r);

/* Where NCCL has failed, and what it said. */
struct r2_agree_failure {
    uint32_t rank, error; /* error: an ncclResult_t, not 0 */
};
#define R2_AGREE_FAILURE_BYTES 8
void r2_agree_failure_encode(uint8_t out[R2_AGREE_FAILURE_BYTES], const struct r2_agree_failure *f);
int r2_agree_failure_decode(const uint8_t *in, size_t len, struct r2_agree_failure *f);

#endif
