/* Questions to the kernel about interfaces, put by a thread of their own: see nicask.c. */
#ifndef R2_ENGINE_NIC_NICASK_H
#define R2_ENGINE_NIC_NICASK_H

#include <stdbool.h>
#include <stdint.h>

#include "io/io.h"
#include "topology/nettables.h"
#include "topology/nics.h"

/* Slots of questions: of each NIC one, about its link, and one for the tables. */
#define R2_NICASK_TABLES R2_MAX_NICS
#define R2_NICASK_SLOTS (R2_MAX_NICS + 1)

struct r2_nicask {
    int ifindex;     /* of a NIC's question */
    uint64_t moment; /* r2_linkwatch_moment when it was put */
    uint64_t number; /* of the answer: they come one after another, a greater one is newer */
    int rc;          /* R2_LINK_UP, _DOWN, _REMOVED or -errno; of the tables: 0 or -errno */
    struct r2_net_tables tables; /* R2_NICASK_TABLES, rc 0: whoever takes the answer frees them */
};

/* Once, before the first question: `answered` is kicked when an answer is there. */
void r2_nicask_start(struct r2_task *answered);
/* Puts a question; false when that of the slot is out (or its answer has not been taken): one at a
 * time. Does not wait, unless no thread can be started. One thread at a time: I/O thread 0, and
 * before it knows of the NICs the one that starts the engine. */
bool r2_nicask_put(int slot, int ifindex, uint64_t moment);
/* Answers that are there by now can be taken: what they say had been so before this call. For those
 * that come later the task is kicked again. By whoever puts questions, as is the next. */
void r2_nicask_ready(void);
/* Takes the slot's answer, if there is one that can be. */
bool r2_nicask_take(int slot, struct r2_nicask *out);

#endif
