/* When a heartbeat is due, and when its answer is late. Pure.
 *
 * A path's deadline follows its round trips as TCP's retransmission timer does: the smoothed round
 * trip plus four mean deviations (RFC 6298). So a long or jittery way is not taken for a dead one.
 * The deadline is never shorter than what the settings say. It is at most R2_HB_STRETCH times that,
 * so every failure is found in bounded time.
 *
 * Heartbeats of a process are limited in number: with very many paths they come less often, first
 * on the idle ones, and detection takes longer there in proportion.
 *
 * Units: nanoseconds unless the name says otherwise. No function fails.
 */
#ifndef R2_ENGINE_CORE_HEARTBEAT_H
#define R2_ENGINE_CORE_HEARTBEAT_H

#include <stdbool.h>
#include <stdint.h>

#define R2_HB_STRETCH 10

/* Rounds of `interval` that a heartbeat may stay unanswered: `misses` as set, or more where the
 * path's round trips (srtt, var: as measured, 0 unknown) take longer than those. */
int r2_hb_misses(uint64_t interval, int misses, uint64_t srtt, uint64_t var);

/* Heartbeats come at intervals. So a path that has just answered and then fails would be asked up
 * to an interval later. Its failure would be known that much later. Bytes of messages that are not
 * acknowledged say sooner that it is time to ask; they never say that a path is dead, for it may be
 * the peer's process that does not acknowledge. */
struct r2_hb_watch {
    uint64_t interval;
    int misses, unanswered; /* looks in a row that found no answer */
    uint64_t beat_age;      /* since the heartbeat was sent that is to be answered, or was last */
    uint64_t look_age;      /* since the last look */
    uint64_t quiet; /* since bytes of messages are out and none was acknowledged; 0: not so */
    bool asked;     /* for that reason, already */
    bool hasty;     /* what gets lost is sent again after 200 ms and a round trip, as by TCP */
    bool stalled;   /* bulk bytes alone are overdue: an interval for each look */
    uint64_t srtt, var;
};
enum r2_hb_look {
    R2_HB_NOT_YET,
    R2_HB_DUE,
    R2_HB_EARLY, /* ask now, half an interval after the last time at the soonest; that the heartbeat
                    before is unanswered does not count yet */
    R2_HB_ALONG, /* the same, for another reason: heartbeats of other paths leave now anyway */
};
/* Whether to look at the path now. After its last look it is dead. That one is due at the first of:
 * - an interval has passed since the look before it;
 * - the heartbeat has waited for `misses` intervals;
 * - the heartbeat has waited for half an interval less than that. Nothing at all was heard since it
 *   was sent (hasty: since half an interval after that), nor for `misses` intervals less a quarter
 *   (hasty: less one). */
enum r2_hb_look r2_hb_look(const struct r2_hb_watch *w);

/* ... and for a path that nothing is under way on, beside one that is due: R2_HB_ALONG in the
 * second half of its interval, so that soon they all are due together, and never later than alone.
 */
enum r2_hb_look r2_hb_along(const struct r2_hb_watch *w);

/* ns until r2_hb_look has something to say if nothing comes meanwhile. It counts only what the
 * observer's regular tick would be too late for: a look at a path that is overdue, or an early
 * question (no sooner than a sixteenth of an interval). UINT64_MAX: the tick will do; so regular
 * heartbeats of many paths go out together. */
#define R2_HB_EARLY_STEPS 16
uint64_t r2_hb_next(const struct r2_hb_watch *w);

struct r2_hb_load {
    unsigned active, idle;       /* paths of the process that are up */
    uint64_t active_ns, idle_ns; /* intervals as set */
    unsigned most;               /* heartbeats per second of the process, at most */
};
/* The intervals that keep to the limit: as set, or longer. Idle ones are stretched first, up to
 * four times as long as set; then both alike. */
void r2_hb_intervals(const struct r2_hb_load *load, uint64_t *active_ns, uint64_t *idle_ns);

#endif
