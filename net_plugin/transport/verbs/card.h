/* What two processes tell each other to connect queue pairs (kind R2_HELLO_VERBS). It goes over the
 * NIC's TCP listener, after the handshake of transport/tcp has proved the secret:
 *
 *     S: card      its queue pairs, made and in INIT
 *     R: card      its queue pairs, in RTS with receives posted; or status: an errno
 *     S: ready     its queue pairs are in RTS as well: R may send
 *
 * Little-endian, fixed length, checked by r2_verbs_card_check before anything is believed. The
 * connection stays open and silent afterwards: its end tells that the process let go of the queue
 * pairs, or is gone, which InfiniBand itself says only after seconds of retries.
 */
#ifndef R2_TRANSPORT_VERBS_CARD_H
#define R2_TRANSPORT_VERBS_CARD_H

#include <stdint.h>

#define R2_VERBS_MAGIC 0x56435232u /* "2RCV" */
#define R2_VERBS_VERSION 2
#define R2_VERBS_MAX_BULK 8
#define R2_VERBS_READY 0x59444552u /* "REDY" */
#define R2_VERBS_TAKEN 'T'         /* before the end: it ends because memory was taken back */

struct r2_verbs_card {
    uint32_t magic;
    uint16_t version;
    uint16_t len;    /* of the card */
    uint32_t status; /* 0, or an errno of the accepting side */
    uint8_t link;    /* IBV_LINK_LAYER_* */
    uint8_t mtu;     /* enum ibv_mtu: largest */
    uint8_t n_bulk;
    uint8_t port;
    uint8_t gid[16];
    uint16_t lid;
    uint16_t pad;
    uint32_t psn;  /* first packet of each of its queue pairs */
    uint32_t ctrl; /* numbers of queue pairs */
    uint32_t beat;
    uint32_t bulk[R2_VERBS_MAX_BULK];
    uint64_t beat_addr; /* where heartbeats may be written */
    uint64_t test_addr; /* R: and test chunks: R2_TEST_EACH for each of `bulk`, in that order */
    uint32_t own_key;   /* of both */
    uint32_t pad2;
} __attribute__((packed));
_Static_assert(sizeof(struct r2_verbs_card) == 104, "wire");

/* 0; -EPROTO: no card of this version or out of bounds; -EPROTONOSUPPORT: another link layer; else
 * the peer's refusal as -errno. */
int r2_verbs_card_check(const struct r2_verbs_card *c, uint8_t link);

#endif
