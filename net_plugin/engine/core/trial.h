/* Trials: when a path that is left to faster siblings gets something all the same. Pure.
 *
 * A path whose measured rate has fallen leaves messages to its siblings at once, long before
 * anybody can say why it fell. From then on it would carry next to nothing, so nobody would find
 * out. A slow NIC would never be named. A good one, slow for a moment because a thread was kept
 * waiting, would stay out of use. A chunk now and then is no answer: what a shaper or a switch has
 * saved up meanwhile lets it through at once, however slow the NIC is. So a trial is a row of
 * chunks, one after the other, until it has outlasted such savings: R2_TRIAL_NS or R2_TRIAL_BYTES.
 *
 * How often: a path in doubt (fallen, and not judged) soon again, so that the judge (grey.h) has
 * its windows within a second. One that is known to be slow as often, so that its recovery is seen.
 * Any other that was left nothing: seldom.
 *
 * Units: nanoseconds, bytes. Plain struct, nothing to free. The caller serialises access. No
 * function fails.
 */
#ifndef R2_ENGINE_CORE_TRIAL_H
#define R2_ENGINE_CORE_TRIAL_H

#include <stdbool.h>
#include <stdint.h>

#define R2_TRIAL_NS UINT64_C(25000000)
#define R2_TRIAL_BYTES                                                                             \
    (640 * 1024) /* at 25 MB/s and more; both outlast pathrate.c's least sample */
#define R2_TRIAL_SOON UINT64_C(100000000)
#define R2_TRIAL_SELDOM UINT64_C(500000000)

struct r2_trial {
    uint64_t from;  /* when the latest began; 0: there was none */
    uint64_t bytes; /* handed out in it */
};

/* The path may take a chunk although others would be done with it sooner. `soon`: it is in doubt or
 * known to be slow; `last`: when it last took a chunk, 0: never. */
bool r2_trial_may(const struct r2_trial *t, bool soon, uint64_t last, uint64_t now);
/* It takes one, for whatever reason. Arguments as they were for r2_trial_may. */
void r2_trial_took(struct r2_trial *t, bool soon, uint64_t last, uint64_t len, uint64_t now);

#endif
