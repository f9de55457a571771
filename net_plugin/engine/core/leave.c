#include "engine/core/leave.h"

#include <stdbool.h>

#define NEXT_TO_NOTHING (1 / 8.0) /* of what it would get if there were no other bytes */

static double speed_of(const struct r2_leave *l, uint32_t nics)
{
    double speed = 0;

    for (int i = 0; i < R2_LEAVE_NICS; i++)
        speed += nics >> i & 1 ? l->speed[i] : 0;
    return speed;
}

void r2_leave_add(struct r2_leave *l, uint32_t nics, uint64_t bytes)
{
    double speed = speed_of(l, nics);

    if (nics == l->all)
        l->bytes += (double)bytes;
    for (int i = 0; i < R2_LEAVE_NICS && nics != l->all; i++)
        l->load[i] += nics >> i & 1 ? (double)bytes * l->speed[i] / speed : 0;
}

/* The time that the NICs take if l->bytes come where the least is to be done. */
static double level_of(const struct r2_leave *l)
{
    double level = 0;
    bool more = true;

    /* NICs that have more than that get nothing; without them the others get more. */
    for (uint32_t of = l->all; more;) {
        double load = l->bytes;

        more = false;
        for (int i = 0; i < R2_LEAVE_NICS; i++)
            load += of >> i & 1 ? l->load[i] : 0;
        level = load / speed_of(l, of);
        for (int i = 0; i < R2_LEAVE_NICS; i++) {
            if (of >> i & 1 && l->load[i] > level * l->speed[i] + 1) { /* one byte: rounding */
                of &= ~(1u << i);
                more = true;
            }
        }
    }
    return level;
}

uint32_t r2_leave_nics(const struct r2_leave *l)
{
    double level = level_of(l), little = NEXT_TO_NOTHING * l->bytes / speed_of(l, l->all);
    uint32_t leaves = 0;

    for (int i = 0; i < R2_LEAVE_NICS; i++) {
        if (l->all >> i & 1 && level - l->load[i] / l->speed[i] < little)
            leaves |= 1u << i;
    }
    return leaves;
}
