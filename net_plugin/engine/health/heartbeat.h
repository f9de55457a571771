/* When a heartbeat is due, and when its answer is late. Pure.
 *
 * A path's deadline follows its round trips as TCP's retransmission timer does: the smoothed round
 * trip plus four mean deviations (RFC 6298), so that a long or jittery way is not taken for a dead
 * one; it is never shorter than what the settings say, and at most R2_HB_STRETCH times that, so
 * that every failure is found in bounded time.
 *
 * Heartbeats of a process are limited in number: with very many paths they come less often, first
 * on the idle ones, and detection takes longer there in proportion.
 *
 * Units: nanoseconds unless the name says otherwise. No function fails.
 */
#ifndef R2_ENGINE_HEALTH_HEARTBEAT_H
#define R2_ENGINE_HEALTH_HEARTBEAT_H

#include <stdint.h>

#define R2_HB_STRETCH 10

/* Rounds of `interval` that a heartbeat may stay unanswered: `misses` as set, or more where the
 * path's round trips (srtt, var: as measured, 0 unknown) take longer than those. */
int r2_hb_misses(uint64_t interval, int misses, uint64_t srtt, uint64_t var);

struct r2_hb_load {
    unsigned active, idle;       /* paths of the process that are up */
    uint64_t active_ns, idle_ns; /* intervals as set */
    unsigned most;               /* heartbeats per second of the process, at most */
};
/* The intervals that keep to the limit: as set, or longer. Idle ones are stretched first, up to
 * four times as long as set; then both alike. */
void r2_hb_intervals(const struct r2_hb_load *load, uint64_t *active_ns, uint64_t *idle_ns);

#endif
