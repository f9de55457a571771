#include "engine/core/pathstate.h"

enum r2_path_state r2_path_next(enum r2_path_state state, enum r2_path_event event)
{
    static const struct {
        enum r2_path_state state;
        enum r2_path_event event;
        enum r2_path_state next;
    } table[] = {
#define R2_PATH_NEXT(state, event, next) {R2_PATH_##state, R2_PATH_EV_##event, R2_PATH_##next},
#include "engine/core/pathstate.def"
    };

    for (unsigned i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        if (table[i].state == state && table[i].event == event)
            return table[i].next;
    }
    return state;
}
