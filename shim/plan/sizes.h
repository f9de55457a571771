/* How large the pieces of a direct AllReduce are, and how much of them is posted. Pure.
 *
 * p - 1 peers send to a NIC at once. What they may send is what is posted: more than the queue
 * before the NIC holds is lost and sent again, less than the round trip needs leaves the NIC idle.
 * R2_SIZES_CREDIT is 4 ms of 8 Gbit/s: what shallow queues of two NICs hold, and several round
 * trips. It is enough for 50 Gbit/s; a rank with more takes more in proportion. A rank that has
 * lost NICs posts less: on each lane a piece for every NIC that it has left and one more, on all
 * lanes 1 MiB for each NIC left. Fewer than half count as half.
 *
 * All ranks must come to the same slot and piece. They may differ in the number of slots and in
 * what they post. `rate`: bytes/s of all its node's NICs when they are healthy, divided by the
 * ranks of the node; 0: not known. A connection has 32 messages at most, whatever is posted.
 */
#ifndef R2_PLAN_SIZES_H
#define R2_PLAN_SIZES_H

#include <stddef.h>
#include <stdint.h>

/* Slots that a round of `direct` needs. */
static inline int r2_sizes_round(int p)
{
    return 2 * p - 1;
}

#define R2_SIZES_CREDIT ((size_t)4 << 20) /* bytes posted on all lanes that receive */

/* The memory of a rank. In a larger one, ranks run further ahead of those that have lost NICs:
 * their messages then wait in front of those that all wait for. So `per_node` ranks of a
 * communicator on one node share it, down to four rounds each. */
struct r2_sizes_window {
    size_t slot; /* bytes of the largest piece; depends on p only */
    int n_slots;
};
struct r2_sizes_window r2_sizes_window(int p, uint64_t rate, int per_node);

/* Behind each slot there is room for the word of an operation (r2_links_sign). Bytes with it. */
#define R2_SIZES_BEHIND 64
static inline size_t r2_sizes_bytes(const struct r2_sizes_window *w)
{
    return (size_t)w->n_slots * (w->slot + R2_SIZES_BEHIND);
}

/* Of an operation of so many bytes. A shard is many pieces, since ports fill and run empty by
 * pieces; but each costs time of a core. */
size_t r2_sizes_piece(size_t slot, int p, uint64_t bytes, const uint32_t *weights);

/* Bytes that a rank posts to receive on one lane, if they are more than one piece. weights: [p], by
 * which all ranks' NICs are equally busy (plan/shard.h): they say what is left of its `nics`, down
 * to half or so, where a rank owns nothing. */
size_t r2_sizes_credit(int p, int rank, const uint32_t *weights, unsigned nics, uint64_t rate);

#endif
