/* How far ahead the leader puts a plan's index N: far enough that the commit is everywhere before
 * any rank gets there, or ranks wait. Pure; times are arguments.
 *
 * The leader watches its own index for a moment before it proposes (no cost while nothing changes),
 * takes the fastest stretch as the rate, and adds what other ranks were ahead of it when they last
 * answered. A refusal says how far ahead a rank really was; each doubles the lead. Where it sees no
 * operation begin, they are long or there are none: then the next one is far enough, since each
 * more would run as it should not for its whole length.
 */
#ifndef R2_AGREE_HORIZON_H
#define R2_AGREE_HORIZON_H

#include <stdint.h>

#define R2_HORIZON_WATCH_NS UINT64_C(200000000) /* how long the leader watches */
#define R2_HORIZON_SAMPLE_NS UINT64_C(20000000) /* in such stretches */
#define R2_HORIZON_LEAST_NS UINT64_C(100000000) /* a commit is assumed to take this, or */
#define R2_HORIZON_TIMES 8                      /* so many times what the last one took */

struct r2_agree_horizon {
    uint64_t sample_ns, sample_index; /* start of the running stretch; 0: none */
    uint64_t watch_ns, seen;          /* start of the watch; operations that began since */
    double peak;                      /* indices per ns in the fastest one that had several */
    uint64_t ahead;                   /* the farthest that another rank was ahead */
    uint64_t commit_ns;               /* what the last commit took */
    unsigned doublings;
};

/* Begins to watch. Call sample about every R2_HORIZON_SAMPLE_NS from then on. */
void r2_agree_horizon_watch(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns);
void r2_agree_horizon_sample(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns);
/* N, above `index`. */
uint64_t r2_agree_horizon_pick(const struct r2_agree_horizon *h, uint64_t index);
/* A rank answered when the leader was at `index`: its own next index was `next`. */
void r2_agree_horizon_heard(struct r2_agree_horizon *h, uint64_t index, uint64_t next);
void r2_agree_horizon_refused(struct r2_agree_horizon *h);
void r2_agree_horizon_committed(struct r2_agree_horizon *h, uint64_t took_ns);

#endif
