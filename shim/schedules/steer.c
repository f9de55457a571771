#include "schedules/steer.h"

#include <string.h>

void r2_steer_init(struct r2_steer *s, int nranks, uint64_t *made)
{
    *s = (struct r2_steer){.nranks = nranks, .made = made};
}

static void enter(struct r2_steer *s, enum r2_steer_step step, uint64_t now_ns)
{
    s->step = step;
    s->asked = false;
    s->tries = 0;
    s->since_ns = now_ns;
    s->not_before_ns = 0;
    if (step == R2_STEER_IDLE)
        s->target = 0;
}

/* Where no rank said that it failed, the target may be wanted again. */
static void lose(struct r2_steer *s, uint64_t now_ns)
{
    s->lost = s->failed || s->step == R2_STEER_SWITCH ? s->target : 0;
    enter(s, R2_STEER_DROP, now_ns);
}

bool r2_steer_want(struct r2_steer *s, uint64_t key, bool have, uint64_t now_ns)
{
    if (key == 0) {
        s->stop = s->current || s->step != R2_STEER_IDLE;
        return true;
    }
    if (s->step != R2_STEER_IDLE || s->stop)
        return false;
    if (key == s->current)
        return true;
    s->target = key;
    s->failed = false;
    s->nmade = 0;
    s->make_epoch = 0;
    enter(s, have ? R2_STEER_SWITCH : R2_STEER_MAKE, now_ns);
    s->target = key;
    return true;
}

void r2_steer_relieve(struct r2_steer *s)
{
    if (s->step == R2_STEER_MAKE && s->current && !s->asked)
        s->step = R2_STEER_RELIEF;
}

/* The operator's stop comes between two steps. What was being made is dropped with it: the way back
 * lists only what is kept. */
static void heed_stop(struct r2_steer *s, uint64_t now_ns)
{
    bool agreed =
        s->step == R2_STEER_MADE || s->step == R2_STEER_SWITCH || s->step == R2_STEER_DROP;

    if (!s->stop || s->asked || s->step == R2_STEER_BACK)
        return;
    s->stop = false;
    if (s->current || agreed)
        enter(s, R2_STEER_BACK, now_ns);
    else
        enter(s, R2_STEER_IDLE, now_ns);
}

enum r2_steer_step r2_steer_due(struct r2_steer *s, uint64_t now_ns)
{
    heed_stop(s, now_ns);
    if (s->step == R2_STEER_MADE) {
        if (s->failed || now_ns >= s->since_ns + R2_STEER_PATIENCE_NS)
            lose(s, now_ns);
        else if (s->nmade == s->nranks)
            enter(s, R2_STEER_SWITCH, now_ns);
        else
            return R2_STEER_IDLE;
    }
    if (s->asked || now_ns < s->not_before_ns)
        return R2_STEER_IDLE;
    return s->step;
}

void r2_steer_asked(struct r2_steer *s)
{
    s->asked = true;
}

/* It came to nothing. A make is the planner's to want again; a switch that ranks keep refusing is
 * given up; what leads back to less is tried for ever. */
static void refused(struct r2_steer *s, uint64_t now_ns)
{
    s->asked = false;
    s->not_before_ns = now_ns + R2_STEER_PAUSE_NS;
    s->tries++;
    if (s->step == R2_STEER_MAKE || s->step == R2_STEER_RELIEF)
        enter(s, R2_STEER_IDLE, now_ns);
    else if (s->step == R2_STEER_SWITCH && s->tries >= R2_STEER_TRIES)
        lose(s, now_ns);
}

enum r2_steer_step r2_steer_decided(struct r2_steer *s, uint64_t epoch, bool committed,
                                    uint64_t now_ns)
{
    enum r2_steer_step through = s->step;

    if (!s->asked)
        return R2_STEER_IDLE;
    if (!committed) {
        refused(s, now_ns);
        return R2_STEER_IDLE;
    }
    switch (s->step) {
    case R2_STEER_MAKE:
    case R2_STEER_RELIEF:
        s->current = s->step == R2_STEER_RELIEF ? 0 : s->current;
        s->make_epoch = epoch;
        memset(s->made, 0, ((size_t)s->nranks + 63) / 64 * sizeof(*s->made));
        enter(s, R2_STEER_MADE, now_ns);
        break;
    case R2_STEER_SWITCH:
        s->current = s->target;
        enter(s, R2_STEER_IDLE, now_ns);
        break;
    case R2_STEER_BACK:
        s->current = 0;
        s->stop = false;
        enter(s, R2_STEER_IDLE, now_ns);
        break;
    default:
        enter(s, R2_STEER_IDLE, now_ns);
    }
    return through;
}

void r2_steer_made(struct r2_steer *s, int rank, uint64_t epoch, bool failed, uint64_t now_ns)
{
    uint64_t bit;

    (void)now_ns;
    if (s->step != R2_STEER_MADE || epoch != s->make_epoch || rank < 0 || rank >= s->nranks)
        return;
    bit = UINT64_C(1) << (rank % 64);
    s->failed |= failed;
    if (failed || s->made[rank / 64] & bit)
        return;
    s->made[rank / 64] |= bit;
    s->nmade++;
}
