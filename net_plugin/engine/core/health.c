#include "engine/core/health.h"

#include "engine/core/machine.h"

#define BACKOFF_FIRST_NS UINT64_C(10000000)
#define RAMP_START 50u
#define FULL 1000u

static const struct r2_machine_row table[] = {
#define R2_NEXT(state, event, next) R2_MACHINE_ROW(R2_HEALTH, state, event, next)
#include "engine/core/health.def"
};

static const struct {
    const char *word;
    bool carries;
} states[R2_HEALTH_STATES] = {
#define R2_STATE(name, word, carries, meaning) {word, carries},
#include "engine/core/health.def"
};

bool r2_health_step(struct r2_health *h, enum r2_health_event event, uint64_t now_ns)
{
    const struct r2_machine_row *row = r2_machine_find(R2_MACHINE_ROWS(table), h->state, event);

    if (!row)
        return false;
    h->state = (enum r2_health_state)row->next;
    h->since_ns = now_ns;
    return true;
}

bool r2_health_carries(enum r2_health_state state)
{
    return (unsigned)state < R2_HEALTH_STATES && states[state].carries;
}

const char *r2_health_word(enum r2_health_state state)
{
    return (unsigned)state < R2_HEALTH_STATES ? states[state].word : "?";
}

uint32_t r2_health_ramp(uint64_t since_ns, uint64_t ramp_ns)
{
    if (since_ns >= ramp_ns)
        return FULL;
    return RAMP_START + (uint32_t)((FULL - RAMP_START) * (since_ns / 1000) / (ramp_ns / 1000 + 1));
}

uint64_t r2_health_backoff(unsigned fails, uint64_t cap_ns)
{
    uint64_t wait = BACKOFF_FIRST_NS << (fails < 16 ? fails : 16);

    return wait < cap_ns ? wait : cap_ns;
}

uint64_t r2_health_jitter(uint64_t wait, uint64_t random)
{
    return wait - random % (wait / 5 + 1);
}
