#include "engine/core/heartbeat.h"

#include "util/num.h"

#define NS_PER_S 1e9
#define IDLE_FIRST 4
#define AGAIN_NS UINT64_C(200000000) /* Linux: a round trip, and four deviations but no less */

int r2_hb_misses(uint64_t interval, int misses, uint64_t srtt, uint64_t var)
{
    int most = misses * R2_HB_STRETCH;
    uint64_t limit, want;

    if (!interval)
        return misses;
    limit = interval * (uint64_t)most;
    if (srtt > limit || var > limit / 4)
        return most;
    want = (srtt + 4 * var + interval - 1) / interval;
    return want < (uint64_t)misses ? misses : want > (uint64_t)most ? most : (int)want;
}

static uint64_t until(uint64_t age, uint64_t due)
{
    return age < due ? due - age : 0;
}

/* A path that is quiet for so long is asked early. */
static uint64_t soon(const struct r2_hb_watch *w)
{
    return w->hasty ? w->interval * 3 / 16 : w->interval / 4;
}

/* How long the answer takes to a heartbeat that got lost once, and alone. */
static uint64_t answered_again(const struct r2_hb_watch *w)
{
    return w->hasty ? 2 * w->srtt + r2_max(AGAIN_NS, 4 * w->var) : 0;
}

/* ns until an interval is over since the last look, or the last look of all is due. */
static uint64_t until_due(const struct r2_hb_watch *w)
{
    int misses = r2_hb_misses(w->interval, w->misses, w->srtt, w->var);
    uint64_t all = w->interval * (uint64_t)misses, next = until(w->look_age, w->interval);
    uint64_t last, least = until(w->look_age, w->interval / 4);

    if (w->unanswered != misses - 1 || w->stalled)
        return next;
    /* Looks before it may have been late, but never does it come right behind one. */
    next = r2_min(next, r2_max(until(w->beat_age, all), least));
    if (!w->quiet || w->beat_age > w->quiet + (w->hasty ? w->interval / 2 : 0) ||
        misses != w->misses)
        return next;
    last = r2_max(until(w->quiet, all - (w->hasty ? w->interval : w->interval / 4)),
                  until(w->beat_age, r2_max(all - w->interval / 2, answered_again(w))));
    return r2_min(r2_max(last, least), next);
}

/* ns until it may be asked early; UINT64_MAX: not for this reason. */
static uint64_t until_early(const struct r2_hb_watch *w)
{
    if (!w->quiet || w->asked || w->unanswered)
        return UINT64_MAX;
    if (w->var > w->interval || w->srtt > w->interval) /* a long way: regular ones must do */
        return UINT64_MAX;
    return r2_max(until(w->quiet, r2_max(soon(w), w->srtt + 4 * w->var)),
                  until(w->beat_age, w->interval / 2));
}

enum r2_hb_look r2_hb_look(const struct r2_hb_watch *w)
{
    return !until_due(w) ? R2_HB_DUE : !until_early(w) ? R2_HB_EARLY : R2_HB_NOT_YET;
}

enum r2_hb_look r2_hb_along(const struct r2_hb_watch *w)
{
    return w->unanswered || w->look_age < w->interval / 2 ? R2_HB_NOT_YET : R2_HB_ALONG;
}

uint64_t r2_hb_next(const struct r2_hb_watch *w)
{
    uint64_t early = until_early(w);

    if (w->unanswered)
        return until_due(w);
    return early == UINT64_MAX ? early : r2_max(early, w->interval / R2_HB_EARLY_STEPS);
}

void r2_hb_intervals(const struct r2_hb_load *l, uint64_t *active_ns, uint64_t *idle_ns)
{
    double active = (double)l->active * NS_PER_S / (double)(l->active_ns ? l->active_ns : 1);
    double idle = (double)l->idle * NS_PER_S / (double)(l->idle_ns ? l->idle_ns : 1);
    double most = l->most ? (double)l->most : 1, stretch = 1;

    *active_ns = l->active_ns;
    *idle_ns = l->idle_ns;
    if (active + idle <= most)
        return;
    if (l->idle) { /* what the active ones leave */
        stretch = active < most ? idle / (most - active) : IDLE_FIRST;
        stretch = stretch < 1 ? 1 : stretch > IDLE_FIRST ? IDLE_FIRST : stretch;
        *idle_ns = (uint64_t)((double)l->idle_ns * stretch);
        idle /= stretch;
    }
    if (active + idle > most * 1.000001) {
        stretch = (active + idle) / most;
        *active_ns = (uint64_t)((double)l->active_ns * stretch);
        *idle_ns = (uint64_t)((double)*idle_ns * stretch);
    }
}
