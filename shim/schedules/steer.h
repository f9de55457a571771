/* What the leader of a communicator proposes next, so that a plan is first made everywhere and only
 * then taken: "make, then switch". Pure: times and events are arguments.
 *
 *   IDLE --want--> MAKE (proposed, agreed) --> MADE? (all ranks say so) --> SWITCH (agreed) -->
 * IDLE |                        | one failed, or none too long said anything
 *                          +--------> IDLE          +--> DROP (agreed) --> IDLE; `lost` if one
 * failed any --want stock--> BACK (agreed) --> IDLE
 *
 * A switch is proposed only after every rank has said that it has made what the agreed make asked
 * for; a rank refuses it nevertheless if it cannot run it. Nothing that fails here stops traffic.
 *
 * Threads: none; the caller serialises.
 */
#ifndef R2_SCHEDULES_STEER_H
#define R2_SCHEDULES_STEER_H

#include <stdbool.h>
#include <stdint.h>

#define R2_STEER_PATIENCE_NS UINT64_C(60000000000) /* for all ranks to have made it */
#define R2_STEER_PAUSE_NS UINT64_C(1000000000)     /* after a refusal */
#define R2_STEER_TRIES 5                           /* of one step */

enum r2_steer_step {
    R2_STEER_IDLE,
    R2_STEER_MAKE,   /* proposing: have these communicators */
    R2_STEER_MADE,   /* waiting for all ranks' word */
    R2_STEER_SWITCH, /* proposing: run on them */
    R2_STEER_DROP,   /* proposing: forget the target, run what runs */
    R2_STEER_BACK,   /* proposing: stock */
    R2_STEER_RELIEF, /* proposing: stock, and have these communicators: as MAKE otherwise */
};

struct r2_steer {
    enum r2_steer_step step;
    bool asked;          /* the step's proposal is under way */
    bool stop;           /* stock is wanted as soon as the step is through */
    uint64_t current;    /* key of what runs, 0: stock */
    uint64_t target;     /* key of what is being brought about, 0: nothing */
    uint64_t lost;       /* key that ranks could not have; the caller reads and clears it */
    uint64_t make_epoch; /* of the agreed make */
    uint64_t since_ns, not_before_ns;
    int tries;
    int nranks, nmade;
    uint64_t *made; /* bitmap, [nranks], the caller's memory */
    bool failed;
};

void r2_steer_init(struct r2_steer *s, int nranks, uint64_t *made);

/* Take `key` (0: stock). have: the communicators are there, on all ranks. False: something is under
 * way; ask again later (stock is remembered). */
bool r2_steer_want(struct r2_steer *s, uint64_t key, bool have, uint64_t now_ns);
/* After a want that is to be made: what runs has become worse than stock, and does not run on until
 * the other is made. */
void r2_steer_relieve(struct r2_steer *s);

/* What is to be proposed now: MAKE, RELIEF, SWITCH, DROP, BACK, or IDLE for nothing. After the
 * proposal is on its way, r2_steer_asked; when it could not be made (-EBUSY), ask again later. */
enum r2_steer_step r2_steer_due(struct r2_steer *s, uint64_t now_ns);
void r2_steer_asked(struct r2_steer *s);

/* What became of it. Returns the step that is through when it was committed, else IDLE. */
enum r2_steer_step r2_steer_decided(struct r2_steer *s, uint64_t epoch, bool committed,
                                    uint64_t now_ns);

/* A rank has made what the make of `epoch` asked for, or could not. */
void r2_steer_made(struct r2_steer *s, int rank, uint64_t epoch, bool failed, uint64_t now_ns);

#endif
