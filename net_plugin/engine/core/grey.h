/* Grey failures: a path that works, but far worse than it could and than its siblings do. Pure:
 * times and measurements come in as arguments.
 *
 * Speed of a path in a window of time = what its chunks should have taken over what they took,
 * from handing over to acknowledgement. "Should" is the path's own best: its shortest round trip
 * plus the time of the bytes that were acknowledged meanwhile, at the best rate it ever kept up for
 * four windows. So a NIC that is slower by design is not slow. A path with little to do is judged
 * by the few chunks it has, and an idle one not at all. A path that moves at half of its announced
 * speed or more is never slow.
 *
 * What slows every path to the peer alike (its process is stopped, a machine is busy) says nothing
 * about one of them: a path's speed counts as a share of the median of its siblings'. A window is
 * slow if three things hold. The share is below R2_GREY_BELOW. Its chunks come later than twice
 * what the siblings' do. The delivery rate is below half of its best. After three slow ones over
 * 400 ms the path is grey. Its factor is the least share of the last three windows. A window above
 * R2_GREY_ABOVE, or whose rate is half of the best, begins the count anew. One in between counts
 * for neither. A burst that a shaper saved up makes a slow path's windows look better; the rate,
 * still fallen, tells which it was. It is well again after three windows, each above R2_GREY_ABOVE
 * or with three quarters of its best rate. No slow one may be between them, and they need 256 KiB
 * or 700 ms: less may be such savings. A path that has segments sent again while its siblings do
 * not is lossy; its factor is half at most.
 *
 * The best fades: otherwise a limit that came for good would make a path slow for ever. It halves
 * with every R2_GREY_HALF_LIFE of evidence. It does not fall below what the path itself has shown
 * lately. Nor does it fall below the siblings' median, in proportion to the announced speeds. So
 * one that falls behind its siblings stays slow for as long as they show more. One beside siblings
 * that carry no more than it does is not slow. Evidence are windows in which at least half of the
 * chunks were sent with more waiting behind them. An idle path, or one that waits for the
 * application, does not show what it can do, neither for itself nor as a sibling. A sibling without
 * evidence counts as one that could carry more than any. Otherwise, of three paths, two that fell
 * together would show each other that nothing more is to be had, while the third empties the queue.
 * It costs little where the third could do no more either: a slow path's part goes to it, and then
 * it shows what it can. The greatest rate ever kept up is remembered beside the best: when the
 * siblings show more again, it counts again.
 *
 * Units: bytes, nanoseconds, bytes per second, shares per mille. Plain structs, nothing to free.
 * Threads: the caller serialises access to the paths of one peer. No function fails.
 */
#ifndef R2_ENGINE_CORE_GREY_H
#define R2_ENGINE_CORE_GREY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define R2_GREY_FULL 1000u
#define R2_GREY_BELOW 500u
#define R2_GREY_ABOVE 750u
#define R2_GREY_LEAST 20u /* the least factor */
#define R2_GREY_LOSSY 500u
#define R2_GREY_REASON 80
#define R2_GREY_HALF_LIFE UINT64_C(1000000000)

enum r2_grey_why { R2_GREY_WELL, R2_GREY_SLOW, R2_GREY_LOSS };

struct r2_grey {
    uint64_t announced; /* speed of the link, bytes per second; 0 not known */

    uint64_t best_rate;             /* what it is held to: fades, never above `peak` */
    uint64_t peak;                  /* the highest rate it ever kept up */
    uint64_t least_ns, least_bytes; /* the chunk that was acknowledged soonest, and its bytes */
    uint64_t kept[4];               /* measured rates of the latest windows */
    unsigned kept_at;
    uint64_t busy_rates[4]; /* the same of the latest windows that are evidence */
    unsigned busy_at;
    uint64_t shown[2]; /* the best of those in this span of evidence and in the one before */
    uint64_t shown_ns; /* evidence in this span */
    uint64_t fade_ns;  /* evidence that the best has not faded by yet */
    uint64_t level;    /* what the siblings show that it should carry; 0 not known */

    uint64_t window_from; /* 0: none is open */
    uint64_t expected_ns, actual_ns, rate, bytes;
    uint32_t chunks, moves, free_moves; /* acknowledged whole; of them not kept back */
    uint64_t busy_ns, busy_bytes,
        acked_at; /* of the window: time with a chunk out, and its bytes */

    uint64_t judged_at; /* when `speed` was measured; 0 never */
    uint32_t speed;     /* of the latest window */
    uint32_t share;     /* of the siblings' */
    uint32_t lately[3]; /* that share in the latest windows */
    unsigned lately_at;
    uint64_t measured; /* delivery rate when the window closed */
    uint32_t siblings; /* their speed */
    uint64_t late_ns;  /* how much later its chunks came than they should */
    uint64_t window_bytes;
    bool fresh; /* measured since the last judgement */

    uint64_t loss_from, sent_from, resent_from; /* segments */
    uint64_t loss_at;                           /* when `loss_ppm` was measured */
    uint32_t loss_ppm;

    uint32_t factor; /* what is left of the weight, R2_GREY_FULL: all */
    enum r2_grey_why why;
    unsigned slow_windows, well_windows, lossy_rounds, clean_rounds;
    uint64_t well_bytes, well_from; /* carried well since then */
    uint64_t slow_from;
};

void r2_grey_init(struct r2_grey *g, uint64_t announced);
/* The path is made anew: what it did lately is forgotten, what it can do is not. */
void r2_grey_restart(struct r2_grey *g);

/* Before r2_grey_chunk: the chunk's own bytes. With these a window's rate is at most what was moved
 * in it. A delivery rate is a maximum of samples. On a busy machine acknowledgements that have
 * waited are seen at once, and one sample shows many times the link's speed. Without the limit it
 * would be the rate of four windows and the path's best. The path would then be called slow ever
 * after. `limited`: when it was sent there was nothing more to send. */
void r2_grey_moved(struct r2_grey *g, uint64_t bytes, uint64_t took, bool limited, uint64_t now);
/* A chunk was acknowledged after `took` ns; `moved`: bytes acknowledged on the path meanwhile, the
 * chunk's included. `rate`: delivery rate of the path as measured now (r2_pathrate_rate). */
void r2_grey_chunk(struct r2_grey *g, uint64_t moved, uint64_t took, uint64_t rate, uint64_t now);
/* Nothing was acknowledged for `waited` ns although `inflight` bytes are out. */
void r2_grey_waiting(struct r2_grey *g, uint64_t inflight, uint64_t waited, uint64_t now);
/* Segments sent and sent again since the path came up, as the kernel counts them. */
void r2_grey_segments(struct r2_grey *g, uint64_t sent, uint64_t resent, uint64_t now);

/* Judges the usable paths to one peer (NULL entries are passed over). Call it every 25 to 100 ms.
 * Returns a bit per path whose factor or whose reason has changed. n <= 64. */
uint64_t r2_grey_judge(struct r2_grey *const *paths, int n, uint64_t now);

/* What path `self` carries when it has enough to do, per mille of what its siblings do. Theirs is
 * the lower median of what they show lately, in proportion to the announced speeds. 0: not known.
 * Tells of a path that was never faster, which its own best cannot. At most R2_GREY_FULL. */
uint32_t r2_grey_beside(struct r2_grey *const *paths, int n, int self);

/* Why the factor is what it is: "12 % of its best (12.4 of 104 MB/s), siblings at 97 %". */
const char *r2_grey_reason(const struct r2_grey *g, char *out, size_t cap);

/* ns that a chunk of `bytes` should take on the path at its best; 0 while nothing is known. */
uint64_t r2_grey_expect(const struct r2_grey *g, uint64_t bytes);

#endif
