/* An AllReduce schedule as data. For each rank it is a list of steps, made on demand, so that a
 * schedule of any size takes no memory. The executor, the verifier and the simulator read the same
 * list. Pure: no clock, socket or thread.
 *
 * A STEP is what one rank does with one piece, a range of elements:
 *
 *   1. Begin when the first `after` steps of this rank's list have ended.
 *   2. Contribution: receive one from each rank of in[], put the own one at place own_at among
 *      them, and add all in this order. Without any of these there is no contribution.
 *   3. up >= 0: send the contribution to `up`.
 *   4. The sum. down >= 0: receive it from `down` into the output. Input and output may be one
 *      buffer. So first (3) has to end. The step `reader` - 1, which sends this piece of the input
 *      as it is, has to end as well. up < 0 and down < 0: the contribution is the sum; it goes into
 *      the output (own == OUTPUT without in[]: it is there already).
 *   5. Send the sum to each rank of out[].
 *
 * A step ends when all that it sends and receives is done. A step with count 0 does nothing and
 * sends nothing, on every rank alike.
 *
 * MESSAGES. Contributions (in, up) and sums (down, out) travel on separate streams: a pair of ranks
 * has up to two streams each way. A step uses each stream at most once. On every stream the order
 * of messages is the order of the steps in the list, on both sides.
 *
 * WINDOW. Steps are numbered by rounds, which never fall along the list. An executor may work on
 * any steps of `n` consecutive rounds, n >= 1: the first round with a step that has not ended, and
 * n - 1 more. It may post and send on each stream only in list order. Under these rules no schedule
 * deadlocks, if contributions and sums have buffers of their own (tests/unit/test_schedule.c).
 * Ports stay busy with four rounds; with one, `direct` takes 1.3 to 1.6 times the bound.
 *
 * Units: offsets and counts in elements, `piece` in bytes, weights in 1/65536.
 *
 * Threads: a schedule is constant once made. Memory: in[] and out[] point into the schedule.
 * Errors: -EINVAL.
 */
#ifndef R2_PLAN_SCHEDULE_H
#define R2_PLAN_SCHEDULE_H

#include <stddef.h>
#include <stdint.h>

#define R2_SCHEDULE_RANKS 1024
#define R2_SCHEDULE_UNIT 65536 /* weights and shares */

enum r2_schedule_kind {
    R2_SCHEDULE_DIRECT, /* contributions to the owner of a piece, the sum from it to everybody */
    R2_SCHEDULE_RING,   /* reduce along the ring, then the sum along the ring */
    R2_SCHEDULE_R2CCL,  /* a ring of all and a ring of all but one, side by side, then the tail */
};

enum r2_step_own {
    R2_STEP_NOTHING, /* this rank adds nothing of its own */
    R2_STEP_INPUT,   /* from the application's input */
    R2_STEP_OUTPUT,  /* what an earlier step wrote into the output */
};

struct r2_step {
    uint64_t offset, count;
    uint64_t after;
    uint64_t round;
    uint64_t reader; /* 1 + the index of a step; 0: none */
    enum r2_step_own own;
    int own_at;
    int n_in;
    const int *in;
    int up;   /* -1: none */
    int down; /* -1: none */
    int n_out;
    const int *out;
};

/* One rank's list. The fields after n_rounds are for schedule.c alone. */
struct r2_schedule {
    enum r2_schedule_kind kind;
    int me, p;
    uint64_t count; /* elements */
    size_t elem;    /* bytes of an element */
    uint64_t n_steps;
    uint64_t n_rounds;

    uint64_t grain;  /* where it can, a piece begins at a multiple of this */
    uint64_t piece;  /* elements at most */
    uint64_t n_body; /* steps before the tail, and their rounds */
    uint64_t n_rounds_body;
    struct r2_schedule_part {
        uint64_t begin, count, round; /* its elements, and those of a round */
        int m, at;                    /* ranks that add, my place among them; -1: not in it */
        int prev, next;               /* in the ring of them */
    } all, most;                      /* `most`: all but `slow` */
    uint64_t n_pieces, chunk;         /* of the tail, and in one of its chunks */
    int slow, helper;
    int n_owners;
    int first; /* place of the owner that I begin with */
    int owners[R2_SCHEDULE_RANKS];
    uint32_t cut[R2_SCHEDULE_RANKS + 1]; /* where an owner's shard begins, in units */
    int peers[R2_SCHEDULE_RANKS];        /* all others, ascending */
    int turns[R2_SCHEDULE_RANKS];        /* all others, from me + 1 on */
};

/* What is common to all ranks: `count` elements of `elem` bytes, no message larger than `piece`
 * bytes (at least one element). me < p <= R2_SCHEDULE_RANKS. */
struct r2_schedule_data {
    int p;
    uint64_t count;
    size_t elem;
    size_t piece;
};

/* Rank j owns weights[j] of the elements; the p weights sum up to R2_SCHEDULE_UNIT. A round is one
 * piece of each owner: the owner with the largest weight has pieces of `piece` bytes, the others
 * smaller ones. Contributions are added in rank order. A rank of weight 0 owns nothing. */
int r2_schedule_direct(struct r2_schedule *s, const struct r2_schedule_data *data, int me,
                       const uint32_t *weights);

/* The ring 0, 1, ... p - 1. Sums have another order of ranks for each of the p shards. */
int r2_schedule_ring(struct r2_schedule *s, const struct r2_schedule_data *data, int me);

/* R2CCL-AllReduce (mode 3) with one slow rank. The last `tail` of the data, in units, goes round a
 * ring without `slow`, beside the ring of all with the rest. Then, in `chunks` equal parts, `slow`
 * sends its contribution of the tail to one helper. That adds it and sends the sum along the chain
 * of the others; `slow` is the last of the chain. p >= 3, chunks >= 1, tail < R2_SCHEDULE_UNIT. */
int r2_schedule_r2ccl(struct r2_schedule *s, const struct r2_schedule_data *data, int me, int slow,
                      uint32_t tail, unsigned int chunks);

/* Step `index` < n_steps. */
void r2_schedule_step(const struct r2_schedule *s, uint64_t index, struct r2_step *step);

#endif
