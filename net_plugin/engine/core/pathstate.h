/* The state machine of a path's newest generation (pathstate.def), and what a path may carry. Pure.
 *
 * Plain values, nothing to free. The caller serialises access. No function fails.
 */
#ifndef R2_ENGINE_CORE_PATHSTATE_H
#define R2_ENGINE_CORE_PATHSTATE_H

#include <stdbool.h>

#include "engine/core/health.h"

enum r2_path_state {
#define R2_PATH_STATE(name, meaning) R2_PATH_##name,
#include "engine/core/pathstate.def"
    R2_PATH_STATES
};

enum r2_path_event {
#define R2_PATH_EVENT(name, meaning) R2_PATH_EV_##name,
#include "engine/core/pathstate.def"
    R2_PATH_EVENTS
};

/* What follows an event; without a row in the table, the state itself. */
enum r2_path_state r2_path_next(enum r2_path_state state, enum r2_path_event event);

/* How the newest generation but one has ended, or the newest if it is dead. */
enum r2_path_end {
    R2_END_NONE,    /* it has not, or it says nothing about the path */
    R2_END_CLOSED,  /* in order: nobody lost anything */
    R2_END_LOST,    /* it carried, and failed */
    R2_END_ATTEMPT, /* S: it failed before it carried anything, and nothing has since */
};

/* The most that a path may carry. Each includes those before it. */
enum r2_path_may {
    R2_MAY_NOTHING,     /* it is down */
    R2_MAY_INFO,        /* its first frame */
    R2_MAY_FRAMES,      /* all frames */
    R2_MAY_LAST_RESORT, /* chunks that no other path can carry */
    R2_MAY_STAND_BY,    /* ... it is no spare, but its weight is 0 */
    R2_MAY_LIMITED,     /* chunks up to its share */
    R2_MAY_UNLIMITED,   /* chunks without a limit */
    R2_MAY_BEST,        /* ... and it is not slow or lossy */
};

struct r2_path_facts {
    enum r2_path_state state;
    enum r2_health_state health;
    bool spare;   /* a better pair of NICs serves */
    bool barred;  /* its weight is 0, another path's is not */
    bool limited; /* another path has a higher weight */
    bool slow;    /* slow or lossy against its siblings */
};

static inline enum r2_path_may r2_path_may_carry(const struct r2_path_facts *f)
{
    switch (f->state) {
    case R2_PATH_STARTING:
        return R2_MAY_INFO;
    case R2_PATH_TESTING:
        return R2_MAY_FRAMES;
    case R2_PATH_PROVEN:
        break;
    default:
        return R2_MAY_NOTHING;
    }
    return !r2_health_carries(f->health) ? R2_MAY_FRAMES
           : f->spare                    ? R2_MAY_LAST_RESORT
           : f->barred                   ? R2_MAY_STAND_BY
           : f->limited                  ? R2_MAY_LIMITED
           : f->slow                     ? R2_MAY_UNLIMITED
                                         : R2_MAY_BEST;
}

#endif
