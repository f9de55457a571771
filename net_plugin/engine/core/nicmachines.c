#include "engine/core/nicmachines.h"

#include "engine/core/machine.h"

enum r2_place r2_place_next(enum r2_place state, enum r2_place_event event)
{
    static const struct r2_machine_row rows[] = {
#define R2_NEXT(state, event, next) R2_MACHINE_ROW(R2_PLACE, state, event, next)
#include "engine/core/nicplace.def"
    };

    return R2_MACHINE_NEXT(rows, state, event);
}

enum r2_nicreach r2_nicreach_next(enum r2_nicreach state, enum r2_nicreach_event event)
{
    static const struct r2_machine_row rows[] = {
#define R2_NEXT(state, event, next) R2_MACHINE_ROW(R2_NICREACH, state, event, next)
#include "engine/core/nicreach.def"
    };

    return R2_MACHINE_NEXT(rows, state, event);
}

bool r2_nicreach_met(enum r2_nicreach state)
{
    static const bool met[R2_NICREACHES] = {
#define R2_STATE(name, met, meaning) met,
#include "engine/core/nicreach.def"
    };

    return met[state];
}
