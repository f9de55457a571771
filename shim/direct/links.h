/* The connections of one rank to all others, over the plugin's net API as NCCL uses it: two streams
 * each way with every peer, one for contributions and one for sums.
 *
 * Messages go over the NIC that is done with them soonest (~dev of the plugin's connect): a fixed
 * one of each would load NICs unevenly, above all when one is lost.
 *
 * A rank listens once per NIC. What connects says in its first message which rank and stream it is:
 * so a rank's handles are the same for all its peers. One that says something else, or ends, is
 * dropped; so is the one that has been silent longest when there are too many.
 *
 * Threads: one at a time. Nothing waits. Errors: -errno; a peer that is gone is -ECONNRESET.
 */
#ifndef R2_DIRECT_LINKS_H
#define R2_DIRECT_LINKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "direct/exec.h"

#define R2_LINKS_NICS 16    /* most NICs that a rank listens on */
#define R2_LINKS_HANDLE 128 /* bytes of a handle of the net API */

struct r2_links;
struct r2_ncclnet_v12;

/* One rank's handles, for all others. */
struct r2_links_card {
    uint32_t nics;
    uint32_t pad;
    uint8_t handle[R2_LINKS_NICS][R2_LINKS_HANDLE];
};

/* Bytes of a card that carry something. */
static inline size_t r2_links_card_bytes(const struct r2_links_card *card)
{
    return offsetof(struct r2_links_card, handle) + (size_t)card->nics * R2_LINKS_HANDLE;
}

/* Listens. `id` is the communicator's, for whoever reads. 0 and *out; -ENODEV: no NICs. */
int r2_links_new(struct r2_links **out, const struct r2_ncclnet_v12 *net, uint64_t id, int rank,
                 int p);
const struct r2_links_card *r2_links_own(const struct r2_links *links);
/* The card of each rank is copied. -EPROTO: one is none. */
int r2_links_connect(struct r2_links *links, int rank, const void *card, size_t len);
/* Goes on connecting. 1: all are there; 0: not yet. */
int r2_links_turn(struct r2_links *links);
/* A connection ended before it said whose it is. It may have been that of a peer that has given up.
 */
bool r2_links_ended(const struct r2_links *links);
/* What messages lie in, once all are there. */
int r2_links_register(struct r2_links *links, void *data, size_t len);

/* A message ends with a word that says which operation it is of, behind its `len` bytes: ranks that
 * give different operations find out. Who sends has signed it; the same word is not written twice,
 * as somebody may be reading it. */
void r2_links_sign(void *data, size_t len, uint64_t word);
/* As r2_exec_ops; -EMSGSIZE: what came is not as long as what was posted, or of another operation
 * than `word` says. */
int r2_links_post(struct r2_links *links, enum r2_lane_kind kind, int peer, void *data, size_t len,
                  uint64_t word);
int r2_links_posted(struct r2_links *links, enum r2_lane_kind kind, int peer);
/* Why it has ended with `error`. A peer that is gone may have left because of a message that did
 * not fit. Only the rank at the other end of that message knows. */
int r2_links_reason(struct r2_links *links, int error);

/* Ends everything, also what is under way. NULL is allowed. */
void r2_links_free(struct r2_links *links);

#endif
