#include "engine/core/lanes.h"

void r2_lanes_init(struct r2_lanes *l, unsigned most)
{
    *l = (struct r2_lanes){.most = most ? most : 1, .now = most ? most : 1, .wait = R2_LANES_WAIT};
}

static bool fewer(struct r2_lanes *l)
{
    l->calm = 0;
    if (l->more && l->wait < R2_LANES_WAIT_MOST)
        l->wait *= 2;
    l->more = false;
    if (l->now == 1)
        return false;
    l->now /= 2;
    return true;
}

static bool one_more(struct r2_lanes *l)
{
    l->calm = 0;
    l->more = true;
    l->now++;
    return true;
}

bool r2_lanes_sample(struct r2_lanes *l, uint64_t sent, uint64_t resent, uint64_t now)
{
    uint64_t segments = sent - l->sent_from, again = resent - l->resent_from, took = now - l->from;
    bool first = !l->from || sent < l->sent_from || resent < l->resent_from;

    if (!first && (took < R2_LANES_WINDOW || segments < R2_LANES_SEGMENTS))
        return false;
    l->from = now;
    l->sent_from = sent;
    l->resent_from = resent;
    if (first)
        return false;
    if (again >= R2_LANES_LEAST && again * 1000000 >= segments * R2_LANES_PPM)
        return fewer(l);
    /* A sample that was long in coming had little traffic in it. */
    l->calm += took < 2 * R2_LANES_WINDOW ? took : 2 * R2_LANES_WINDOW;
    return l->now < l->most && l->calm >= l->wait ? one_more(l) : false;
}
