#include "agree/horizon.h"

#define R2_HORIZON_DOUBLINGS 10
#define R2_HORIZON_LEAST 4 /* operations, where so many were seen */

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

static void r2_horizon_begin(struct r2_agree_horizon *h, uint64_t now_ns)
{
    h->watch_ns = now_ns;
    h->seen = 0;
    h->peak = 0;
}

void r2_agree_horizon_watch(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns)
{
    h->sample_ns = now_ns;
    h->sample_index = index;
    h->watches = 0;
    r2_horizon_begin(h, now_ns);
}

bool r2_agree_horizon_sample(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns)
{
    if (now_ns > h->sample_ns && index >= h->sample_index) {
        uint64_t n = index - h->sample_index;
        double rate = (double)n / (double)(now_ns - h->sample_ns);

        h->seen += n;
        h->peak = n > 1 && rate > h->peak ? rate : h->peak; /* one alone is no rate */
    }
    h->sample_ns = now_ns;
    h->sample_index = index;
    if (now_ns < h->watch_ns + R2_HORIZON_WATCH_NS) {
        return false;
    }
    if (h->seen > 0 && h->seen < R2_HORIZON_LEAST && h->watches + 1 < R2_HORIZON_WATCHES) {
        h->watches++;
        r2_horizon_begin(h, now_ns);
        return false;
    }
    return true;
}

uint64_t r2_agree_horizon_pick(struct r2_agree_horizon *h, uint64_t index, uint64_t now_ns)
{
    uint64_t watched = h->sample_ns > h->watch_ns ? h->sample_ns - h->watch_ns : 0;
    uint64_t time;
    double lead = 1, rate;

    r2_horizon_fade(h, now_ns);
    time = h->commit_ns * R2_HORIZON_TIMES;
    time = time > R2_HORIZON_LEAST_NS ? time : R2_HORIZON_LEAST_NS;
    watched = watched > R2_HORIZON_WATCH_NS ? watched : R2_HORIZON_WATCH_NS;
    if (h->seen > 0) {
        rate = (double)(h->seen + 1) / (double)watched;
        rate = h->peak > rate ? h->peak : rate;
        lead = rate * (double)time +
               (double)(h->seen < R2_HORIZON_LEAST - 1 ? h->seen + 1 : R2_HORIZON_LEAST);
    }
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
