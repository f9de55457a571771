/* The table of rounds: how one begins and ends. */
#include <stddef.h>
#include <string.h>

#include "engine/locate/round.h"
#include "util/random.h"

struct r2_round r2_rounds[R2_ROUNDS];
struct r2_nodeseg *r2_locate_seg;

static uint64_t next_id;

static uint64_t new_id(void)
{
    if (!next_id && r2_random_bytes(&next_id, sizeof(next_id)))
        next_id = 1;
    next_id += 2; /* never 0 in a process's life */
    return next_id | 1;
}

struct r2_round *r2_round_find(uint64_t id)
{
    R2_FOR_EACH_ROUND(r)
    {
        if (r->id == id)
            return r;
    }
    return NULL;
}

struct r2_round *r2_round_full(int lnic)
{
    R2_FOR_EACH_ROUND(r)
    {
        if (r->kind == R2_ROUND_FULL && r->lnic == lnic && !r->closed)
            return r;
    }
    return NULL;
}

int r2_round_assists(void)
{
    int n = 0;

    R2_FOR_EACH_ROUND(r)
    n += r->kind == R2_ROUND_ASSIST;
    return n;
}

bool r2_rounds_any(void)
{
    R2_FOR_EACH_ROUND(r)
    return true;
    return false;
}

void r2_round_clock(struct r2_round *r, uint64_t now)
{
    r->closed = false;
    r->next_try = now;
    r->close_at = now + R2_WINDOW_NS;
    r->deadline = now + R2_ANSWER_NS;
}

struct r2_round *r2_round_new(enum r2_round_kind kind, int lnic, uint64_t now)
{
    for (int i = 0; i < R2_ROUNDS; i++) {
        struct r2_round *r = &r2_rounds[i];

        if (r->phase != R2_PHASE_FREE)
            continue;
        memset(r, 0, offsetof(struct r2_round, ev));
        r2_evidence_init(&r->ev);
        r->kind = kind;
        r->phase = kind == R2_ROUND_FULL ? R2_PHASE_SETTLE : R2_PHASE_RUN;
        r->id = new_id();
        r->lnic = lnic;
        r->began = now;
        r2_round_clock(r, now);
        return r;
    }
    return NULL;
}

void r2_round_unclaim(struct r2_round *r)
{
    struct r2_wire_addr own;

    if (r->claimed && r2_eng.ops->address(r->lnic, &own) == 0)
        r2_nodeseg_release(r2_locate_seg, &own);
    r->claimed = false;
}

void r2_round_free(struct r2_round *r, uint64_t now)
{
    if (!r->closed)
        r2_targets_close(r, now);
    r2_round_reply(r, now);
    r2_round_unclaim(r);
    for (int i = 0; i < r->n_suspects; i++)
        r2_peer_put(r->suspects[i].peer);
    r->phase = R2_PHASE_FREE;
}
