#include "schedules/lead.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void r2_lead_init(struct r2_lead *l, int nranks, int keep)
{
    *l = (struct r2_lead){.nranks = nranks, .keep = keep};
}

void r2_lead_free(struct r2_lead *l)
{
    for (int i = 0; i < l->ncomms; i++)
        free(l->comms[i].ranks);
    l->ncomms = 0;
}

static struct r2_lead_comm *find(struct r2_lead *l, uint64_t key)
{
    for (int i = 0; i < l->ncomms; i++)
        if (l->comms[i].key == key)
            return &l->comms[i];
    return NULL;
}

static bool runs_on(const struct r2_lead_plan *plan, uint64_t key)
{
    for (int i = 0; i < plan->nparts; i++)
        if (plan->comm[i] == key)
            return true;
    return false;
}

/* ---- which communicators a step lists */

static bool needed(const struct r2_lead *l, enum r2_steer_step step, uint64_t key)
{
    switch (step) {
    case R2_STEER_MAKE:
        return runs_on(&l->current, key) || runs_on(&l->target, key);
    case R2_STEER_SWITCH:
    case R2_STEER_RELIEF:
        return runs_on(&l->target, key);
    case R2_STEER_DROP:
        return runs_on(&l->current, key);
    default:
        return false;
    }
}

/* Marks in `listed` what a step lists; how many. */
static int choose(const struct r2_lead *l, enum r2_steer_step step, bool *listed)
{
    int n = 0;

    for (int i = 0; i < l->ncomms; i++) {
        listed[i] = needed(l, step, l->comms[i].key);
        n += listed[i];
    }
    for (int kept = 0; kept < l->keep && n < R2_PLAN_ORDERS; kept++, n++) {
        int best = -1;

        for (int i = 0; i < l->ncomms; i++)
            if (!listed[i] && !l->comms[i].fresh &&
                (best < 0 || l->comms[i].used > l->comms[best].used))
                best = i;
        if (best < 0)
            break;
        listed[best] = true;
    }
    return n;
}

static void remove_unlisted(struct r2_lead *l, const bool *listed)
{
    int n = 0;

    for (int i = 0; i < l->ncomms; i++) {
        if (listed[i])
            l->comms[n++] = l->comms[i];
        else
            free(l->comms[i].ranks);
    }
    l->ncomms = n;
}

/* ---- the target */

static int add(struct r2_lead *l, uint64_t key, const uint32_t *ranks)
{
    struct r2_lead_comm comm = {.key = key, .fresh = true};
    size_t bytes = (size_t)l->nranks * sizeof(*ranks);

    if (find(l, key))
        return 0;
    if (l->ncomms == R2_PLAN_ORDERS)
        return -ENOSPC;
    comm.ranks = malloc(bytes);
    if (!comm.ranks)
        return -ENOMEM;
    memcpy(comm.ranks, ranks, bytes);
    l->comms[l->ncomms++] = comm;
    return 0;
}

void r2_lead_forget(struct r2_lead *l)
{
    bool listed[R2_PLAN_ORDERS];

    for (int i = 0; i < l->ncomms; i++)
        listed[i] = !l->comms[i].fresh || runs_on(&l->current, l->comms[i].key);
    remove_unlisted(l, listed);
    l->target = (struct r2_lead_plan){0};
}

/* Room for the target beside what runs: the oldest that nothing needs go. */
static void make_room(struct r2_lead *l, const struct r2_plan_table *t)
{
    int missing = 0;

    for (int k = 0; k < t->ncomms; k++)
        missing += !find(l, t->comms[k].key);
    while (l->ncomms + missing > R2_PLAN_ORDERS) {
        bool listed[R2_PLAN_ORDERS];
        int oldest = -1;

        for (int i = 0; i < l->ncomms; i++) {
            bool wanted = runs_on(&l->current, l->comms[i].key);

            listed[i] = true;
            for (int k = 0; k < t->ncomms; k++)
                wanted |= t->comms[k].key == l->comms[i].key;
            if (!wanted && (oldest < 0 || l->comms[i].used < l->comms[oldest].used))
                oldest = i;
        }
        if (oldest < 0)
            return;
        listed[oldest] = false;
        remove_unlisted(l, listed);
    }
}

int r2_lead_target(struct r2_lead *l, const struct r2_plan *plan, uint64_t key)
{
    struct r2_plan_table *t;
    int rc;

    r2_lead_forget(l);
    rc = r2_plan_table_from_plan(&t, plan, false);
    if (rc)
        return rc;
    make_room(l, t);
    for (int k = 0; k < t->ncomms && rc == 0; k++)
        rc = add(l, t->comms[k].key, t->comms[k].ranks);
    l->target =
        (struct r2_lead_plan){.key = key, .nparts = t->ncomms, .from_bytes = plan->from_bytes};
    for (int k = 0; k < t->ncomms; k++) {
        l->target.comm[k] = t->comms[k].key;
        l->target.boundary[k] = plan->orders[k].boundary;
    }
    memcpy(l->target.reason, plan->reason, sizeof(l->target.reason));
    r2_plan_table_free(t);
    if (rc)
        r2_lead_forget(l);
    return rc;
}

bool r2_lead_has(const struct r2_lead *l)
{
    for (int i = 0; i < l->ncomms; i++)
        if (l->comms[i].fresh && runs_on(&l->target, l->comms[i].key))
            return false;
    return true;
}

struct r2_lead_comm *r2_lead_idless(struct r2_lead *l)
{
    for (int i = 0; i < l->ncomms; i++)
        if (!l->comms[i].has_id)
            return &l->comms[i];
    return NULL;
}

/* ---- what is shipped */

static void put_entry(struct r2_plan_table *t, const struct r2_lead_plan *plan)
{
    struct r2_plan_entry *e = &t->entries[t->nentries++];

    *e = (struct r2_plan_entry){.coll = R2_PLAN_ALLREDUCE,
                                .schedule = R2_PLAN_TREE,
                                .segments = (uint8_t)plan->nparts,
                                .from_bytes = plan->from_bytes,
                                .below_bytes = UINT64_MAX};
    for (int p = 0; p < plan->nparts; p++) {
        e->boundary[p] = plan->boundary[p];
        for (int c = 0; c < t->ncomms; c++)
            if (t->comms[c].key == plan->comm[p])
                e->comm[p] = (uint32_t)c;
    }
}

int r2_lead_encode(const struct r2_lead *l, enum r2_steer_step step, void **out, size_t *len)
{
    const struct r2_lead_plan *runs = &l->current, *says = &l->current;
    struct r2_plan_table t = {.nranks = l->nranks};
    bool listed[R2_PLAN_ORDERS];

    choose(l, step, listed);
    for (int i = 0; i < l->ncomms; i++) {
        struct r2_plan_comm *comm = &t.comms[t.ncomms];

        if (!listed[i])
            continue;
        if (!l->comms[i].has_id)
            return -EINVAL;
        comm->key = l->comms[i].key;
        comm->ranks = l->comms[i].ranks;
        memcpy(comm->id, l->comms[i].id.bytes, sizeof(comm->id));
        t.ncomms++;
    }
    if (step == R2_STEER_SWITCH)
        runs = &l->target;
    if (step == R2_STEER_SWITCH || step == R2_STEER_MAKE || step == R2_STEER_RELIEF)
        says = &l->target;
    if (step != R2_STEER_BACK && step != R2_STEER_RELIEF && runs->nparts > 0)
        put_entry(&t, runs);
    if (says->nparts == 0 || step == R2_STEER_BACK)
        snprintf(t.reason, sizeof(t.reason), "%s",
                 step == R2_STEER_BACK && *l->back ? l->back : "back to NCCL's own choice");
    else
        memcpy(t.reason, says->reason, sizeof(t.reason));
    return r2_plan_table_pack(&t, out, len);
}

void r2_lead_back(struct r2_lead *l, const char *why)
{
    snprintf(l->back, sizeof(l->back), "%s", why);
}

void r2_lead_through(struct r2_lead *l, enum r2_steer_step step)
{
    bool listed[R2_PLAN_ORDERS];

    choose(l, step, listed);
    for (int i = 0; step == R2_STEER_SWITCH && i < l->ncomms; i++) {
        if (!runs_on(&l->target, l->comms[i].key))
            continue;
        l->comms[i].fresh = false;
        l->comms[i].used = ++l->uses;
    }
    remove_unlisted(l, listed);
    if (step == R2_STEER_SWITCH)
        l->current = l->target;
    else if (step == R2_STEER_BACK || step == R2_STEER_RELIEF)
        l->current = (struct r2_lead_plan){0};
    if (step == R2_STEER_BACK)
        l->back[0] = '\0';
    if (step != R2_STEER_MAKE && step != R2_STEER_RELIEF)
        l->target = (struct r2_lead_plan){0};
}
