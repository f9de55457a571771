/* Flap damping, after the figure of merit of BGP route damping (RFC 2439): every failure adds a
 * penalty, which halves every half-life; above one threshold the NIC is suppressed, until the
 * penalty has fallen below another. Recoveries forget nothing. The ceiling of the penalty, and the
 * longest time of all, bound the suppression. Pure: times come in as arguments and never go back.
 *
 * Ownership: plain structs, nothing to free. Threads: the caller serialises access.
 */
#ifndef R2_ENGINE_CORE_DAMP_H
#define R2_ENGINE_CORE_DAMP_H

#include <stdbool.h>
#include <stdint.h>

#define R2_DAMP_PER_FAILURE 1000u

struct r2_damp_rules {
    uint32_t suppress; /* above it: suppressed; 0: never */
    uint32_t reuse;    /* below it: in use again */
    uint64_t half_life_ns;
    uint64_t max_suppress_ns; /* longest suppression after the last failure */
};

struct r2_damp {
    double penalty; /* at `at_ns` */
    uint64_t at_ns;
    bool suppressed;
};

/* A failure; true when the subject is suppressed from now on and was not before. */
bool r2_damp_failure(struct r2_damp *d, const struct r2_damp_rules *rules, uint64_t now_ns);
/* True when the suppression ends at this call. */
bool r2_damp_tick(struct r2_damp *d, const struct r2_damp_rules *rules, uint64_t now_ns);
/* Forgets everything, since the operator says so. */
void r2_damp_clear(struct r2_damp *d);
/* The suppression ends, because nothing else is left; the penalty stays. */
void r2_damp_release(struct r2_damp *d);

uint32_t r2_damp_penalty(const struct r2_damp *d, const struct r2_damp_rules *rules,
                         uint64_t now_ns);
/* When it will be in use again if nothing more happens; 0: it is not suppressed. */
uint64_t r2_damp_reuse_at(const struct r2_damp *d, const struct r2_damp_rules *rules,
                          uint64_t now_ns);

#endif
