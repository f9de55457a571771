#include "agree/horizon.h"

#define R2_HORIZON_DOUBLINGS 10

/* One half-life after the other, each a whole one. */
static void r2_horizon_fade(struct r2_agree_horizon *h, uint64_t now_ns)
{
    uint64_t lives = now_ns > h->fade_ns ? (now_ns - h->fade_ns) / R2_HORIZON_FADE_NS : 0;

    h->fade_ns += lives * R2_HORIZON_FADE_NS;
    lives = lives < 63 ? lives : 63;
    h->commit_ns >>= lives;
    h->ahead >>= lives;
    h->doublings -= lives < h->doublings ? (unsigned)lives : h->doublings;
}

void r2_agree_horizon_watch(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns)
{
    h->watch_ns = now_ns;
    h->watch_index = index;
}

uint64_t r2_agree_horizon_pick(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns)
{
    uint64_t watched = now_ns > h->watch_ns ? now_ns - h->watch_ns : 0, time;
    uint64_t seen = index > h->watch_index ? index - h->watch_index : 0;
    double lead = 1;

    r2_horizon_fade(h, now_ns);
    time = h->commit_ns * R2_HORIZON_TIMES;
    time = time > R2_HORIZON_LEAST_NS ? time : R2_HORIZON_LEAST_NS;
    watched = watched > R2_HORIZON_WATCH_NS ? watched : R2_HORIZON_WATCH_NS;
    if (seen > 0)
        lead += (double)seen / (double)watched * (double)time;
    lead *= (double)(1u << h->doublings);
    lead = lead < 1e12 ? lead : 1e12;
    return index + h->ahead + (uint64_t)lead;
}

void r2_agree_horizon_heard(struct r2_agree_horizon *h, uint64_t index, uint64_t next,
                            uint64_t now_ns)
{
    uint64_t ahead = next > index ? next - index : 0;

    r2_horizon_fade(h, now_ns);
    if (ahead > h->ahead) {
        h->ahead = ahead < (UINT64_C(1) << 40) ? ahead : UINT64_C(1) << 40;
    }
}

void r2_agree_horizon_refused(struct r2_agree_horizon *h, uint64_t now_ns)
{
    r2_horizon_fade(h, now_ns);
    if (h->doublings < R2_HORIZON_DOUBLINGS) {
        h->doublings++;
    }
}

void r2_agree_horizon_committed(struct r2_agree_horizon *h, uint64_t took_ns, uint64_t now_ns)
{
    r2_horizon_fade(h, now_ns);
    h->commit_ns -= h->commit_ns / 4; /* what it once was fades with every change, too */
    h->commit_ns = took_ns > h->commit_ns ? took_ns : h->commit_ns;
    h->ahead -= h->ahead / 4;
    if (h->doublings > 0) {
        h->doublings--;
    }
}
