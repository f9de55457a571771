/* The state machines of a NIC beside its health: its place (nicplace.def), and whether it has
 * reached anybody (nicreach.def). Pure.
 *
 * Plain values, nothing to free. The caller serialises access. No function fails.
 */
#ifndef R2_ENGINE_CORE_NICMACHINES_H
#define R2_ENGINE_CORE_NICMACHINES_H

#include <stdbool.h>

enum r2_place {
#define R2_STATE(name, ...) R2_PLACE_##name,
#include "engine/core/nicplace.def"
    R2_PLACES
};

enum r2_place_event {
#define R2_EVENT(name, ...) R2_PLACE_EV_##name,
#include "engine/core/nicplace.def"
    R2_PLACE_EVENTS
};

/* What follows an event; without a row in the table, the state itself. */
enum r2_place r2_place_next(enum r2_place state, enum r2_place_event event);

enum r2_nicreach {
#define R2_STATE(name, ...) R2_NICREACH_##name,
#include "engine/core/nicreach.def"
    R2_NICREACHES
};

enum r2_nicreach_event {
#define R2_EVENT(name, ...) R2_NICREACH_EV_##name,
#include "engine/core/nicreach.def"
    R2_NICREACH_EVENTS
};

enum r2_nicreach r2_nicreach_next(enum r2_nicreach state, enum r2_nicreach_event event);
bool r2_nicreach_met(enum r2_nicreach state);

#endif
