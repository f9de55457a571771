/* What two R2CCL processes say to each other: control frames and NIC addresses.
 *
 * All integers are little-endian. A frame is a header and a body whose length must fit the type
 * (r2_wire_check); everything is untrusted until checked. Bodies are copied out with memcpy, never
 * read in place.
 *
 * Directions: S = from the connecting process (the sender of bulk data), R = from the accepting
 * one, B = both. Every message is idempotent, and can be repeated on any live path.
 */
#ifndef R2_OOB_WIRE_H
#define R2_OOB_WIRE_H

#include <netinet/in.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire format is little-endian, and so must be the host"
#endif

/* Of all that two plugins say to each other, hellos and handles included: another one is refused
 * (r2_engine_connect). 2: an accepting process may call who connects to it. 3: test chunks are
 * written by queue pairs as well (transport/verbs/card.h). 4: words about NICs are acknowledged
 * (HEARD). 5: R2CCL asks NCCL for larger pieces of sends and receives (engine/message/p2pchunk.c),
 * which must be of one size everywhere. 6: a NIC may have a second address (r2_info_nic). 7: INFO
 * says the rank. 8: nobody tells others a verdict about a NIC. 9: the ends of failed paths tell
 * each other what they have seen without a question (SEEN); news about NICs are INFO. */
#define R2_WIRE_VERSION 9
#define R2_WIRE_MAX_NICS 16
#define R2_WIRE_MAX_BODY 65535
#define R2_WIRE_NAME 32

/* A NIC's address: family 4 or 6, port in host order. It is where the NIC's TCP listener is, which
 * is also where queue pairs are agreed on: what only holds for one attempt (GID, LID, queue pair
 * numbers) is said there, after the proof of the secret (transport/verbs/card.h). */
struct r2_wire_addr {
    uint8_t family;
    uint8_t offers; /* R2_OFFER_*; unknown bits are ignored */
    uint16_t port;
    uint8_t ip[16];
} __attribute__((packed));
_Static_assert(sizeof(struct r2_wire_addr) == 20, "wire");

#define R2_OFFER_INFINIBAND 1u /* verbs over InfiniBand */
#define R2_OFFER_ROCE 2u       /* verbs over Ethernet */
#define R2_OFFER_NO_TCP 4u     /* the listener is on another NIC: TCP would not be this one */

int r2_wire_from_sockaddr(struct r2_wire_addr *out, const struct sockaddr_storage *sa);
int r2_wire_to_sockaddr(const struct r2_wire_addr *a, struct sockaddr_storage *sa, socklen_t *len);
/* "10.1.0.2:4711" or "[::1]:4711". */
void r2_wire_addr_text(const struct r2_wire_addr *a, char *out, size_t cap);

struct r2_frame {
    uint16_t len; /* of the body */
    uint8_t type;
    uint8_t version;
} __attribute__((packed));
_Static_assert(sizeof(struct r2_frame) == 4, "wire");

enum r2_frame_type {
    R2_F_OPEN = 1,  /* S: a connection asks to be accepted */
    R2_F_OPEN_ACK,  /* R: status 0, or an errno */
    R2_F_CTS,       /* R: clear to send a message */
    R2_F_EAGER,     /* S: a small message, whole */
    R2_F_ACK,       /* R: what has arrived */
    R2_F_DOWN,      /* S: path generation is dead, fence it */
    R2_F_FENCED,    /* R: path generation is fenced; follows the acknowledgements */
    R2_F_CLOSE,     /* B: this side of the connection is closed */
    R2_F_CLOSE_ACK, /* B */
    R2_F_HEARTBEAT, /* B: answered by the kernel, not by the process */
    R2_F_INFO,     /* B: who speaks, and all about its NICs; first frame of an endpoint, and news */
    R2_F_SEEN,     /* B: a path has failed: what probes from its NIC have seen (engine/locate) */
    R2_F_TEST,     /* S: the path is to prove itself before it carries job data */
    R2_F_TEST_ACK, /* R: as many bytes of test chunks have arrived */
    R2_F_REVOKE,   /* R: what was cleared to send on the connection is not any more */
    R2_F_REVOKED,  /* S: nothing of it is under way, and none follows */
    R2_F_HEARD,    /* B: an INFO was heard; until then it is repeated */
    R2_F_LAST = R2_F_HEARD,
};

struct r2_msg_open {
    uint64_t conn;
    uint64_t listen;
    uint8_t home_nic;   /* of the connecting process */
    uint8_t must_exist; /* 1: said again after a loss; not to be made anew */
    uint16_t p2p_chunk; /* r2_p2pchunk_word */
    uint32_t eager;     /* largest message it sends before a clear-to-send */
} __attribute__((packed));

struct r2_msg_open_ack {
    uint64_t conn;
    uint32_t status;
    uint32_t flags; /* R2_OPEN_NO_EAGER; others are ignored */
} __attribute__((packed));
#define R2_OPEN_NO_EAGER 1u /* send no small message before its clear-to-send */

/* Followed by `keys` x 32 bit for one-sided transports, indexed by the receiver's NIC. */
struct r2_msg_cts {
    uint64_t conn;
    uint64_t seq;
    uint64_t size;
    uint64_t addr;
    uint32_t keys;
    uint32_t flags; /* R2_CTS_DEVICE */
} __attribute__((packed));
#define R2_CTS_DEVICE 1u /* no thread of the receiver may write there: only its NICs */

/* Followed by the message itself. */
struct r2_msg_eager {
    uint64_t conn;
    uint64_t seq;
    uint32_t size;
    uint32_t crc;
    uint32_t flags; /* R2_BULK_CRC, R2_EAGER_BUFFERED */
} __attribute__((packed));
/* Its sender has a copy of its own, and waits for the acknowledgement only to free it. */
#define R2_EAGER_BUFFERED 0x10000u

struct r2_ack_range {
    uint64_t seq;
    uint64_t offset;
    uint64_t len;
} __attribute__((packed));

/* All messages below `cumulative` have arrived whole; then `ranges` x r2_ack_range. */
struct r2_msg_ack {
    uint64_t conn;
    uint64_t cumulative;
    uint32_t ranges;
    uint32_t pad;
} __attribute__((packed));

struct r2_msg_path {      /* DOWN, FENCED */
    uint8_t sender_nic;   /* of the connecting process */
    uint8_t receiver_nic; /* of the accepting process */
    uint8_t transport;    /* enum r2_transport_id */
    uint8_t pad;
    uint32_t gen;
    uint32_t reason; /* errno, for the journal */
} __attribute__((packed));

/* How many chunks of a connection the sender has handed to a generation of a one-sided path. */
struct r2_msg_lane {
    uint8_t sender_nic, receiver_nic;
    uint8_t transport; /* enum r2_transport_id */
    uint8_t pad;
    uint32_t gen;
    uint32_t chunks;
} __attribute__((packed));

/* `cumulative`: from the receiver, as in ACK; from the sender, messages begun. Followed by `lanes`
 * x r2_msg_lane, which say the same as in REVOKED where R2_CLOSE_IDLE is set. */
struct r2_msg_close {
    uint64_t conn;
    uint64_t cumulative;
    uint32_t from_sender; /* 0, or 1 with R2_CLOSE_IDLE or without */
    uint32_t lanes;
} __attribute__((packed));
#define R2_CLOSE_IDLE 2u /* in from_sender: no chunk is under way */

/* REVOKE: lanes 0. REVOKED: followed by `lanes` x r2_msg_lane; once the receiver has seen as many
 * chunks of each generation as they say, nothing of the connection can be written any more. */
struct r2_msg_revoke {
    uint64_t conn;
    uint32_t lanes;
    uint32_t pad;
} __attribute__((packed));
#define R2_WIRE_MAX_LANES 64

struct r2_msg_close_ack {
    uint64_t conn;
    uint32_t from_sender; /* which side's CLOSE is acknowledged */
    uint32_t pad;
} __attribute__((packed));

/* What a process says about a NIC of its own. */
enum r2_nic_word {
    R2_NIC_DOWN = 0, /* no link: no attempt is worth while */
    R2_NIC_USABLE,
    R2_NIC_DRAINED, /* on purpose: finish what is in flight, then let go */
    R2_NIC_DAMPED,  /* failed too often: not for a while */
    R2_NIC_FAILED,  /* broken, and to be probed */
    R2_NIC_WORDS
};

#define R2_NIC_LESS 0x3ffu

struct r2_msg_heard {
    uint32_t number; /* the newest INFO that was heard */
} __attribute__((packed));

struct r2_msg_test { /* TEST: bytes wanted; TEST_ACK: arrived */
    uint32_t gen;
    uint32_t bytes;
} __attribute__((packed));

struct r2_info_nic {
    char name[R2_WIRE_NAME];
    struct r2_wire_addr addr; /* family 0: it has none now */
    struct r2_wire_addr
        second;       /* of the other address family, for those who need it; or family 0 */
    uint8_t word;     /* enum r2_nic_word */
    uint8_t forgiven; /* how often penalties for its past failures were forgotten, modulo 256 */
    uint16_t less;    /* bits 0 to 9: per mille that its weight is below full */
} __attribute__((packed));

/* Followed by `nics` x r2_info_nic. */
struct r2_msg_info {
    uint32_t pid;
    uint32_t nics;
    uint32_t rank;   /* in the job, plus 1; 0: not known */
    uint32_t number; /* grows with every change of what is said of NICs */
    char host[64];
} __attribute__((packed));

#define R2_WIRE_MAX_SEEN 32

struct r2_wire_seen {
    struct r2_wire_addr from, to;
    uint8_t outcome; /* enum r2_seen */
    uint8_t reached; /* not 0: the pair is known to have worked */
    uint16_t age_ms; /* of the observation, when the frame was made */
    char from_label[R2_WIRE_NAME], to_label[R2_WIRE_NAME];
} __attribute__((packed));
_Static_assert(sizeof(struct r2_wire_seen) == 108, "wire");

/* Paths of the speaker's NIC have failed, to NICs of whom this is said to. Followed by `seen` x
 * r2_wire_seen. */
struct r2_msg_seen {
    struct r2_wire_addr nic; /* its port does not matter */
    uint32_t seen;
} __attribute__((packed));

/* First bytes of a bulk chunk on a two-sided transport. */
struct r2_data_head {
    uint32_t magic;
    uint16_t version;
    uint16_t flags;
    uint64_t conn;
    uint64_t seq;
    uint64_t offset;
    uint64_t total;
    uint32_t len;
    uint32_t gen;
    uint32_t crc;
    uint32_t head_crc; /* of the 52 bytes before it */
} __attribute__((packed));
_Static_assert(sizeof(struct r2_data_head) == 56, "wire");
#define R2_DATA_MAGIC 0x44325232u /* "2R2D" */

/* 0 when a body of `len` bytes is right for `type`, else -EPROTO. */
int r2_wire_check(uint8_t type, const uint8_t *body, size_t len);

#endif
