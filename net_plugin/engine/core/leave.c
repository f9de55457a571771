#include "engine/core/leave.h"

#include <stdbool.h>

#define NEXT_TO_NOTHING (1 / 8.0) /* of what it would get if there were no others */

struct nic {
    double load; /* bytes so far */
    double speed;
};

/* The time that the NICs take if `bytes` come to them, and those with the least to do get the most.
 */
static double level_of(const struct nic nic[], uint32_t nics, double bytes)
{
    double level = 0;
    bool more = true;

    /* NICs that have more than that get nothing; without them the others get more. */
    for (uint32_t of = nics; more;) {
        double load = bytes, speed = 0;

        more = false;
        for (int i = 0; i < R2_LEAVE_NICS; i++) {
            if (of >> i & 1) {
                load += nic[i].load;
                speed += nic[i].speed;
            }
        }
        level = load / speed;
        for (int i = 0; i < R2_LEAVE_NICS; i++) {
            if (of >> i & 1 && nic[i].load > level * nic[i].speed + 1) { /* one byte: rounding */
                of &= ~(1u << i);
                more = true;
            }
        }
    }
    return level;
}

static uint32_t deal(struct nic nic[], uint32_t nics, double bytes)
{
    double level = level_of(nic, nics, bytes), speed = 0;
    uint32_t leaves = 0;

    for (int i = 0; i < R2_LEAVE_NICS; i++)
        speed += nics >> i & 1 ? nic[i].speed : 0;
    for (int i = 0; i < R2_LEAVE_NICS; i++) {
        double gets = level * nic[i].speed - nic[i].load;

        if (!(nics >> i & 1))
            continue;
        if (gets < NEXT_TO_NOTHING * bytes * nic[i].speed / speed)
            leaves |= 1u << i;
        nic[i].load += gets > 0 ? gets : 0;
    }
    return leaves == nics ? 0 : leaves;
}

static double bytes_over(const struct r2_leave_peer peers[], int n, uint32_t nics)
{
    double bytes = 0;

    for (int i = 0; i < n; i++)
        bytes += peers[i].nics == nics ? (double)peers[i].bytes : 0;
    return bytes;
}

/* The peers' sets of NICs with `count` of them. */
static void deal_sets(struct r2_leave_peer peers[], int n, struct nic nic[], int count)
{
    for (int i = 0; i < n; i++) {
        uint32_t nics = peers[i].nics, leaves;
        bool dealt = false;

        for (int before = 0; before < i; before++)
            dealt |= peers[before].nics == nics;
        if (dealt || __builtin_popcount(nics) != count)
            continue;
        leaves = deal(nic, nics, bytes_over(peers, n, nics));
        for (int same = i; same < n; same++)
            peers[same].leaves = peers[same].nics == nics ? leaves : peers[same].leaves;
    }
}

void r2_leave_decide(struct r2_leave_peer peers[], int n, const unsigned speed[R2_LEAVE_NICS])
{
    struct nic nic[R2_LEAVE_NICS];

    for (int i = 0; i < R2_LEAVE_NICS; i++)
        nic[i] = (struct nic){.speed = speed[i]};
    for (int i = 0; i < n; i++)
        peers[i].leaves = 0;
    for (int count = 1; count <= R2_LEAVE_NICS; count++)
        deal_sets(peers, n, nic, count);
}
