/* The state machines of a path: its newest generation (pathstate.def), that generation's heartbeats
 * (beat.def), and what the earlier ones came to (pathpast.def); and what a path may carry. Pure.
 *
 * Plain values, nothing to free. The caller serialises access. No function fails.
 */
#ifndef R2_ENGINE_CORE_PATHSTATE_H
#define R2_ENGINE_CORE_PATHSTATE_H

#include <stdbool.h>

#include "engine/core/health.h"

enum r2_path_state {
#define R2_STATE(name, ...) R2_PATH_##name,
#include "engine/core/pathstate.def"
    R2_PATH_STATES
};

enum r2_path_event {
#define R2_EVENT(name, ...) R2_PATH_EV_##name,
#include "engine/core/pathstate.def"
    R2_PATH_EVENTS
};

/* What follows an event; without a row in the table, the state itself. */
enum r2_path_state r2_path_next(enum r2_path_state state, enum r2_path_event event);

enum r2_path_past {
#define R2_STATE(name, ...) R2_PAST_##name,
#include "engine/core/pathpast.def"
    R2_PAST_STATES
};

enum r2_past_event {
#define R2_EVENT(name, ...) R2_PAST_EV_##name,
#include "engine/core/pathpast.def"
    R2_PAST_EVENTS
};

enum r2_path_past r2_past_next(enum r2_path_past past, enum r2_past_event event);
/* It has been proven at least once. */
bool r2_past_carried(enum r2_path_past past);

enum r2_beat_state {
#define R2_STATE(name, ...) R2_BEAT_##name,
#include "engine/core/beat.def"
    R2_BEAT_STATES
};

enum r2_beat_event {
#define R2_EVENT(name, ...) R2_BEAT_EV_##name,
#include "engine/core/beat.def"
    R2_BEAT_EVENTS
};

enum r2_beat_state r2_beat_next(enum r2_beat_state state, enum r2_beat_event event);

/* What the connecting side has the path for. */
enum r2_path_role {
    R2_ROLE_OTHER, /* it stands in for a better pair; R: always this */
    R2_ROLE_FIRST, /* the best pair for its local NIC */
    R2_ROLE_SPARE, /* a better pair serves */
};

/* What is known of the peer over the newest generation: it grows. */
enum r2_path_intro {
    R2_INTRO_NONE,
    R2_INTRO_HEARD, /* INFO has come */
    R2_INTRO_TOLD,  /* ... and the journal says that the path is up */
};

/* The most that a path may carry. Each includes those before it. */
enum r2_path_may {
    R2_MAY_NOTHING,     /* it is down */
    R2_MAY_FRAMES,      /* no chunks */
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
    if (f->state != R2_PATH_PROVEN)
        return f->state == R2_PATH_TESTING ? R2_MAY_FRAMES : R2_MAY_NOTHING;
    return !r2_health_carries(f->health) ? R2_MAY_FRAMES
           : f->spare                    ? R2_MAY_LAST_RESORT
           : f->barred                   ? R2_MAY_STAND_BY
           : f->limited                  ? R2_MAY_LIMITED
           : f->slow                     ? R2_MAY_UNLIMITED
                                         : R2_MAY_BEST;
}

#endif
