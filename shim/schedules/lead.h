/* What the leader of a communicator ships: the communicators that a plan needs, those that are kept
 * for the next time, and the entries that run on them. Pure: no clock, no NCCL; the caller brings
 * the unique ids.
 *
 * Every plan lists all communicators that the ranks shall have, so they make and destroy the same
 * ones. At most `keep` that nothing runs on are listed, the newest ones.
 *
 * Threads: none; the caller serialises. Errors: 0 or -errno.
 */
#ifndef R2_SCHEDULES_LEAD_H
#define R2_SCHEDULES_LEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "api/nccl.h"
#include "plan/table.h"
#include "schedules/steer.h"

struct r2_lead_comm {
    uint64_t key;
    bool has_id, fresh; /* fresh: not known to be made everywhere */
    struct r2_nccl_id id;
    uint32_t *ranks;
    uint64_t used; /* the larger, the later it ran */
};

struct r2_lead_plan {
    uint64_t key; /* 0: stock */
    int nparts;
    uint64_t comm[R2_PLAN_ORDERS];
    uint32_t boundary[R2_PLAN_ORDERS];
    uint64_t from_bytes;
    char reason[R2_PLAN_REASON];
};

struct r2_lead {
    int nranks, keep;
    uint64_t uses;
    int ncomms;
    struct r2_lead_comm comms[R2_PLAN_ORDERS];
    struct r2_lead_plan current, target;
    char back[R2_PLAN_REASON]; /* why the way back to stock is taken; "": not known */
};

void r2_lead_init(struct r2_lead *l, int nranks, int keep);
void r2_lead_free(struct r2_lead *l);

/* `plan` is to be taken, by the name `key`. -ENOSPC: more communicators than there may be. */
int r2_lead_target(struct r2_lead *l, const struct r2_plan *plan, uint64_t key);
/* Whether all of the target's communicators are made, everywhere. */
bool r2_lead_has(const struct r2_lead *l);
/* One that needs an id still, or NULL. */
struct r2_lead_comm *r2_lead_idless(struct r2_lead *l);

/* The plan to propose for a step, encoded: *out is malloc'd. */
int r2_lead_encode(const struct r2_lead *l, enum r2_steer_step step, void **out, size_t *len);
/* It was committed. */
void r2_lead_through(struct r2_lead *l, enum r2_steer_step step);
/* Why stock is wanted next: every rank shows it. The newest reason counts. */
void r2_lead_back(struct r2_lead *l, const char *why);
/* The target is not pursued any more, and nothing of it was agreed. */
void r2_lead_forget(struct r2_lead *l);

#endif
