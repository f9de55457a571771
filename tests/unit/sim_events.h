/* Events of a simulation in virtual time: a heap, the earliest first. The caller's `events` begins
 * as zeros and ends with free(events.heap). */
#ifndef R2_TESTS_SIM_EVENTS_H
#define R2_TESTS_SIM_EVENTS_H

#include <stdlib.h>

#include "check.h"

struct sim_event {
    double at; /* seconds */
    int kind, rank;
    void *packet;
};

struct sim_events {
    struct sim_event *heap;
    size_t n, room;
};

static inline void sim_push(struct sim_events *q, double at, int kind, int rank, void *packet)
{
    size_t i = q->n++;

    if (q->n > q->room) {
        q->room = q->room ? 2 * q->room : 1024;
        q->heap = realloc(q->heap, q->room * sizeof(*q->heap));
        CHECK(q->heap);
    }
    for (; i > 0 && q->heap[(i - 1) / 2].at > at; i = (i - 1) / 2)
        q->heap[i] = q->heap[(i - 1) / 2];
    q->heap[i] = (struct sim_event){at, kind, rank, packet};
}

static inline struct sim_event sim_pop(struct sim_events *q)
{
    struct sim_event first, last;
    size_t i = 0, child;

    CHECK_MSG(q->n > 0, "nothing happens any more");
    first = q->heap[0];
    last = q->heap[--q->n];
    while ((child = 2 * i + 1) < q->n) {
        if (child + 1 < q->n && q->heap[child + 1].at < q->heap[child].at)
            child++;
        if (q->heap[child].at >= last.at)
            break;
        q->heap[i] = q->heap[child];
        i = child;
    }
    q->heap[i] = last;
    return first;
}

#endif
