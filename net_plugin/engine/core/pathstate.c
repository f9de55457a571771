#include "engine/core/pathstate.h"

#include "engine/core/machine.h"

enum r2_path_state r2_path_next(enum r2_path_state state, enum r2_path_event event)
{
    static const struct r2_machine_row rows[] = {
#define R2_NEXT(state, event, next) R2_MACHINE_ROW(R2_PATH, state, event, next)
#include "engine/core/pathstate.def"
    };

    return R2_MACHINE_NEXT(rows, state, event);
}

enum r2_path_past r2_past_next(enum r2_path_past past, enum r2_past_event event)
{
    static const struct r2_machine_row rows[] = {
#define R2_NEXT(state, event, next) R2_MACHINE_ROW(R2_PAST, state, event, next)
#include "engine/core/pathpast.def"
    };

    return R2_MACHINE_NEXT(rows, past, event);
}

bool r2_past_carried(enum r2_path_past past)
{
    static const bool carried[R2_PAST_STATES] = {
#define R2_STATE(name, carried, meaning) carried,
#include "engine/core/pathpast.def"
    };

    return carried[past];
}

enum r2_beat_state r2_beat_next(enum r2_beat_state state, enum r2_beat_event event)
{
    static const struct r2_machine_row rows[] = {
#define R2_NEXT(state, event, next) R2_MACHINE_ROW(R2_BEAT, state, event, next)
#include "engine/core/beat.def"
    };

    return R2_MACHINE_NEXT(rows, state, event);
}
