#include "schedules/replay.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNTED 1
#define MADE 2

int r2_replay_init(struct r2_replay *r, const struct r2_trace_comm *record, int nranks)
{
    *r = (struct r2_replay){
        .record = record, .nranks = nranks, .limit = record ? record->nplans : 0};
    r->spoken = calloc((size_t)nranks, 1);
    return r->spoken ? 0 : -ENOMEM;
}

void r2_replay_free(struct r2_replay *r)
{
    free(r->spoken);
    r->spoken = NULL;
}

/* ---- what ranks tell */

void r2_replay_counted(struct r2_replay *r, int rank, int count)
{
    int mine, ahead;

    if (!r->record || rank < 0 || rank >= r->nranks || r->spoken[rank] & COUNTED)
        return;
    r->spoken[rank] |= COUNTED;
    r->nspoken++;
    mine = r->record->nplans;
    /* Runs differ by the last plan or so, so the nearest number is meant. */
    ahead = (count - mine) & (R2_REPLAY_COUNTS - 1);
    ahead -= ahead >= R2_REPLAY_COUNTS / 2 ? R2_REPLAY_COUNTS : 0;
    if (mine + ahead < r->limit)
        r->limit = mine + ahead > 0 ? mine + ahead : 0;
    r->more |= ahead != 0;
}

void r2_replay_made(struct r2_replay *r, int rank, bool failed)
{
    if (rank < 0 || rank >= r->nranks || r->spoken[rank] & MADE)
        return;
    r->failed |= failed;
    r->spoken[rank] |= MADE;
    r->nmade++;
}

void r2_replay_end(struct r2_replay *r, const char *why)
{
    if (!r->record || r->ending || r->ended)
        return;
    r->ending = true;
    r->tries = 0;
    r->not_before_ns = 0;
    if (r->next < r->record->nplans)
        snprintf(r->why, sizeof(r->why),
                 R2_REPLAY_ENDED " before plan %d of %d (operation %llu): %s", r->next + 1,
                 r->record->nplans, (unsigned long long)r->record->plans[r->next].from, why);
    else
        snprintf(r->why, sizeof(r->why), R2_REPLAY_ENDED ": %s", why);
}

/* ---- steps */

/* A communicator that the plan before listed, too, was kept in the recorded run, and is here. */
static void prepare(struct r2_replay *r)
{
    const struct r2_plan_table *t = r->record->plans[r->next].table;

    r->nwant = t->ncomms;
    for (int c = 0; c < t->ncomms; c++) {
        r->want[c] = (struct r2_replay_id){.key = t->comms[c].key};
        for (int h = 0; h < r->nhave; h++)
            if (r->have[h].key == t->comms[c].key)
                r->want[c] = r->have[h];
    }
    r->prepared = true;
}

/* The plan to come, when it may be proposed. */
static enum r2_replay_step plan_due(struct r2_replay *r, uint64_t now_ns)
{
    bool runs = r->record->plans[r->next].table->nentries > 0;

    if (runs && r->epoch && r->nmade < r->nranks) {
        if (now_ns < r->since_ns + R2_REPLAY_PATIENCE_NS)
            return R2_REPLAY_NOTHING;
        r2_replay_end(r, "not all ranks have made its communicators");
        return R2_REPLAY_END;
    }
    if (!r->prepared)
        prepare(r);
    return R2_REPLAY_PLAN;
}

enum r2_replay_step r2_replay_due(struct r2_replay *r, uint64_t now_ns)
{
    if (r->ended || r->asked || now_ns < r->not_before_ns)
        return R2_REPLAY_NOTHING;
    if (r->ending)
        return R2_REPLAY_END;
    if (!r->record || r->nspoken < r->nranks)
        return R2_REPLAY_NOTHING;
    if (r->next < r->limit)
        return plan_due(r, now_ns);
    if (!r->more)
        return R2_REPLAY_NOTHING; /* the last one stays, as it did */
    r2_replay_end(r, "the trace of another rank ends here");
    return R2_REPLAY_END;
}

struct r2_replay_id *r2_replay_idless(struct r2_replay *r)
{
    for (int c = 0; c < r->nwant; c++)
        if (!r->want[c].has)
            return &r->want[c];
    return NULL;
}

void r2_replay_asked(struct r2_replay *r, enum r2_replay_step step)
{
    r->asked = step;
}

void r2_replay_decided(struct r2_replay *r, uint64_t epoch, bool committed, const char *why,
                       uint64_t now_ns)
{
    enum r2_replay_step step = r->asked;

    if (!step)
        return;
    r->asked = R2_REPLAY_NOTHING;
    if (!committed) {
        r->not_before_ns = now_ns + R2_REPLAY_PAUSE_NS;
        r->refused_ns = r->tries++ ? r->refused_ns : now_ns;
        if (step == R2_REPLAY_PLAN && ((r->failed && r->tries >= R2_REPLAY_TRIES) ||
                                       now_ns >= r->refused_ns + R2_REPLAY_PATIENCE_NS))
            r2_replay_end(r, r->failed ? "a rank could not make its communicators" : why);
        return;
    }
    r->tries = 0;
    if (step == R2_REPLAY_END) {
        r->ended = true;
        return;
    }
    r->next++;
    r->epoch = epoch;
    r->since_ns = now_ns;
    r->nmade = 0;
    r->failed = false;
    for (int i = 0; i < r->nranks; i++)
        r->spoken[i] &= (uint8_t)~MADE;
    memcpy(r->have, r->want, sizeof(r->have));
    r->nhave = r->nwant;
    r->nwant = 0;
    r->prepared = false;
}

int r2_replay_encode(const struct r2_replay *r, enum r2_replay_step step, void **out, size_t *len,
                     uint64_t *at)
{
    struct r2_plan_table t = {.nranks = r->nranks};

    *at = 0;
    if (step == R2_REPLAY_PLAN) {
        t = *r->record->plans[r->next].table;
        *at = r->record->plans[r->next].from;
        for (int c = 0; c < t.ncomms; c++) {
            if (!r->want[c].has)
                return -EINVAL;
            memcpy(t.comms[c].id, r->want[c].id.bytes, sizeof(t.comms[c].id));
        }
    } else {
        snprintf(t.reason, sizeof(t.reason), "%s", r->why);
    }
    return r2_plan_table_pack(&t, out, len);
}
