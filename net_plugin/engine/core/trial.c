#include "engine/core/trial.h"

static bool running(const struct r2_trial *t, uint64_t now)
{
    return t->from && now - t->from < R2_TRIAL_NS && t->bytes < R2_TRIAL_BYTES;
}

/* Seldom: if it has had nothing for a while, left to others or not asked for. */
static bool due(const struct r2_trial *t, bool soon, uint64_t last, uint64_t now)
{
    uint64_t since = soon || t->from > last ? t->from : last;

    return now - since > (soon ? R2_TRIAL_SOON : R2_TRIAL_SELDOM);
}

bool r2_trial_may(const struct r2_trial *t, bool soon, uint64_t last, uint64_t now)
{
    return running(t, now) || due(t, soon, last, now);
}

void r2_trial_took(struct r2_trial *t, bool soon, uint64_t last, uint64_t len, uint64_t now)
{
    if (running(t, now)) {
        t->bytes += len;
    } else if (last && due(t, soon, last, now)) { /* the first chunk of all is no trial */
        t->from = now;
        t->bytes = len;
    }
}
