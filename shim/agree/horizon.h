/* How far ahead the leader puts a plan's index N: far enough that the commit is everywhere before
 * any rank gets there, or ranks wait. Pure; times are arguments.
 *
 * The leader watches its own index for a moment before it proposes (no cost while nothing changes),
 * takes the fastest stretch as the rate, and adds what other ranks were ahead of it when they last
 * answered. A refusal says how far ahead a rank really was; each doubles the lead. Where it sees no
 * operation begin, they are long or there are none: then the next one is far enough, however long
 * commits take, since each more would run as it should not for its whole length. Where it sees one
 * to three, that says little: an operation of seconds may just have begun. It watches on until a
 * whole watch has seen none, or enough, three times at most.
 *
 * What it has learnt fades, in time as well: one slow commit or one rank that was far ahead says
 * nothing about a change an hour later.
 */
#ifndef R2_AGREE_HORIZON_H
#define R2_AGREE_HORIZON_H

#include <stdbool.h>
#include <stdint.h>

#define R2_HORIZON_WATCH_NS UINT64_C(200000000) /* how long the leader watches */
#define R2_HORIZON_WATCHES 3                    /* at most, one after the other */
#define R2_HORIZON_SAMPLE_NS UINT64_C(20000000) /* in such stretches */
#define R2_HORIZON_LEAST_NS UINT64_C(100000000) /* a commit is assumed to take this, or */
#define R2_HORIZON_TIMES 8                      /* so many times what commits took lately */
#define R2_HORIZON_FADE_NS UINT64_C(5000000000) /* in which what was learnt halves */

struct r2_agree_horizon {
    uint64_t sample_ns, sample_index; /* start of the running stretch; 0: none */
    uint64_t watch_ns, seen;          /* start of the watch; operations that began since */
    unsigned watches;                 /* over, without having said enough */
    double peak;                      /* indices per ns in the fastest one that had several */
    uint64_t ahead;                   /* the farthest that another rank was ahead */
    uint64_t commit_ns;               /* the longest commit lately */
    unsigned doublings;
    uint64_t fade_ns; /* when the last three last faded */
};

/* Begins to watch. Call sample about every R2_HORIZON_SAMPLE_NS from then on, until it has watched
 * enough. */
void r2_agree_horizon_watch(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns);
/* Whether it has watched enough to pick. */
bool r2_agree_horizon_sample(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns);
/* N, above `index`. */
uint64_t r2_agree_horizon_pick(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns);
/* A rank answered when the leader was at `index`: its own next index was `next`. */
void r2_agree_horizon_heard(struct r2_agree_horizon *h, uint64_t index, uint64_t next,
                            uint64_t now_ns);
void r2_agree_horizon_refused(struct r2_agree_horizon *h, uint64_t now_ns);
void r2_agree_horizon_committed(struct r2_agree_horizon *h, uint64_t took_ns, uint64_t now_ns);

#endif
