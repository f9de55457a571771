/* Health of a NIC or of a path: a state machine, and the ramp of what has come back. Pure: events
 * and times come in as arguments. The table is health.def.
 *
 * Ownership: a plain struct, nothing to free. Threads: the caller serialises access.
 */
#ifndef R2_ENGINE_CORE_HEALTH_H
#define R2_ENGINE_CORE_HEALTH_H

#include <stdbool.h>
#include <stdint.h>

enum r2_health_state {
#define R2_STATE(name, ...) R2_HEALTH_##name,
#include "engine/core/health.def"
    R2_HEALTH_STATES
};

enum r2_health_event {
#define R2_EVENT(name, ...) R2_HEALTH_EV_##name,
#include "engine/core/health.def"
    R2_HEALTH_EVENTS
};

struct r2_health {
    enum r2_health_state state;
    uint64_t since_ns; /* of the state; RAMPING: when the ramp began */
};

/* Takes the event; true when the table has a row for it (RAMPING: also when the ramp begins
 * again), so there is something to say and to do. */
bool r2_health_step(struct r2_health *h, enum r2_health_event event, uint64_t now_ns);
/* Its state allows it to carry job data. */
bool r2_health_carries(enum r2_health_state state);
const char *r2_health_word(enum r2_health_state state);

/* Weight per mille after `since` ns of a ramp that takes `ramp_ns`: from a twentieth to full, in a
 * straight line. No ramp (0): full at once. */
uint32_t r2_health_ramp(uint64_t since_ns, uint64_t ramp_ns);

/* How long to wait between the starts of two attempts, the `fails`-th in a row having failed:
 * doubling from 10 ms up to `cap_ns`. */
uint64_t r2_health_backoff(unsigned fails, uint64_t cap_ns);
/* Up to a fifth less of it, by a random number: those that failed together are not tried together
 * for ever, and none later than it says. */
uint64_t r2_health_jitter(uint64_t wait, uint64_t random);

#endif
