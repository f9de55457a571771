#define _GNU_SOURCE
#include "io/sharing.h"

#include <stdbool.h>
#include <string.h>
#include <unistd.h>

void r2_sharing_start(struct r2_sharing *s)
{
    memset(s, 0, sizeof(*s));
    if (sched_getaffinity(getpid(), sizeof(s->mine), &s->mine) && /* it may have ended */
        sched_getaffinity(0, sizeof(s->mine), &s->mine))
        CPU_SET(0, &s->mine); /* more cores than a set has room for */
}

void r2_sharing_add(struct r2_sharing *s, const cpu_set_t *set)
{
    bool shares = false;

    for (int i = 0; i < CPU_SETSIZE; i++) {
        bool there = !set || CPU_ISSET(i, set);

        s->others[i] += there && s->others[i] < UINT16_MAX;
        shares |= there && CPU_ISSET(i, &s->mine);
    }
    s->n += shares;
}

void r2_sharing_among(struct r2_sharing *s, int cores, int n)
{
    if (cores > 0 && n > 0)
        s->most = cores < n ? 1 : cores / n;
}

int r2_sharing_word(struct r2_sharing_word *w, int seen, uint64_t now)
{
    if (seen >= w->n || now >= w->until)
        w->n = 0;
    return w->n;
}

int r2_sharing_part(const struct r2_sharing *s)
{
    double part = 1e-6; /* thirds make a whole */

    for (int i = 0; i < CPU_SETSIZE; i++)
        part += CPU_ISSET(i, &s->mine) ? 1.0 / (1 + s->others[i]) : 0;
    if (s->most && part > s->most)
        return s->most;
    return part < 1 ? 1 : (int)part;
}
