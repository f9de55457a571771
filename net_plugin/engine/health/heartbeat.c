#include "engine/health/heartbeat.h"

#define NS_PER_S 1e9
#define IDLE_FIRST 4

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

enum r2_hb_look r2_hb_look(const struct r2_hb_watch *w)
{
    uint64_t all = w->interval * (uint64_t)w->misses, soon = w->interval / 4;

    if (w->look_age >= w->interval)
        return R2_HB_DUE;
    if (w->asked && w->unanswered == w->misses - 1 && w->quiet >= all &&
        w->beat_age >= all - w->interval / 2)
        return R2_HB_DUE;
    if (w->asked || w->unanswered || w->quiet < soon || w->beat_age < w->interval / 2 ||
        w->var > w->quiet / 4 || w->srtt > w->quiet - 4 * w->var)
        return R2_HB_NOT_YET;
    return R2_HB_EARLY;
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
