/* How far ahead the leader puts a plan's index N: far enough that the commit is mostly everywhere
 * before any rank gets there. Too near costs little: ranks wait for the commit, or one refuses and
 * the leader proposes again at once. Too far costs an operation's length for each, and those may
 * be seconds. Pure; times are arguments.
 *
 * The leader watches its own index for a moment before it proposes (no cost while nothing changes).
 * It takes that rate, and adds what other ranks were ahead of it when they last answered. A refusal
 * says how far ahead a rank really was; each doubles the lead. Where it sees no operation begin,
 * they are long or there are none: then the next one is far enough, however long commits take.
 *
 * What it has learnt fades, in time as well: one slow commit or one rank that was far ahead says
 * nothing about a change an hour later.
 */
#ifndef R2_AGREE_HORIZON_H
#define R2_AGREE_HORIZON_H

#include <stdbool.h>
#include <stdint.h>

#define R2_HORIZON_WATCH_NS UINT64_C(100000000) /* how long the leader watches */
#define R2_HORIZON_LEAST_NS UINT64_C(25000000)  /* a commit is assumed to take this, or */
#define R2_HORIZON_TIMES 8                      /* so many times what commits took lately */
#define R2_HORIZON_FADE_NS UINT64_C(5000000000) /* in which what was learnt halves */

struct r2_agree_horizon {
    uint64_t watch_ns, watch_index; /* start of the watch */
    uint64_t ahead;                 /* the farthest that another rank was ahead */
    uint64_t commit_ns;             /* the longest commit lately */
    unsigned doublings;
    uint64_t fade_ns; /* when the last three last faded */
};

/* Begins to watch. It has seen enough R2_HORIZON_WATCH_NS later. */
void r2_agree_horizon_watch(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns);
/* N, above `index`. */
uint64_t r2_agree_horizon_pick(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns);
/* A rank answered when the leader was at `index`: its own next index was `next`. */
void r2_agree_horizon_heard(struct r2_agree_horizon *h, uint64_t index, uint64_t next,
                            uint64_t now_ns);
void r2_agree_horizon_refused(struct r2_agree_horizon *h, uint64_t now_ns);
void r2_agree_horizon_committed(struct r2_agree_horizon *h, uint64_t took_ns, uint64_t now_ns);

#endif
