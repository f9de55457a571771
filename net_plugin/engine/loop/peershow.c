/* What operators see of a peer: connections, when it was heard, what waits for it in vain. */
#include <string.h>

#include "engine/loop/loop.h"

#define TOLD 64 /* peers whose loss was told; more than that may be told twice */

static uint64_t heard_at(const struct r2_peer *p)
{
    uint64_t heard = p->shown.heard;

    R2_FOR_EACH_PATH (path, p) {
        if (r2_path_is_up(path) && path->intro && path->hb.proven_at > heard)
            heard = path->hb.proven_at;
    }
    return heard;
}

/* Since when requests or connections wait although no path answers (maintain.c ends that); 0. */
static uint64_t waits_since(const struct r2_peer *p)
{
    if (p->life != R2_PEER_ALIVE || (!p->active && !p->opening))
        return 0;
    if (!r2_peer_served(p))
        return p->no_path_since;
    return p->suspect_since;
}

/* Since when messages wait that none of the paths that are up may carry (r2_peer_check_stuck). */
static uint64_t stuck_since(const struct r2_peer *p)
{
    uint64_t first = 0;

    if (p->life != R2_PEER_ALIVE)
        return 0;
    R2_FOR_EACH_READY (c, p) {
        uint64_t since = c->stuck_since;

        if (since && (!first || since < first))
            first = since;
    }
    return first;
}

void r2_peer_show(struct r2_peer *p, uint64_t now)
{
    enum r2_seg_direction direction = p->out ? R2_SEG_DIR_TX : R2_SEG_DIR_RX;
    uint64_t connections = p->life == R2_PEER_ALIVE ? r2_hash_count(&p->conns) : 0;
    uint64_t heard = heard_at(p), waits = waits_since(p);
    enum r2_seg_waits_for what = R2_SEG_WAITS_FOR_PATH;

    if (!waits && (waits = stuck_since(p)))
        what = R2_SEG_WAITS_FOR_DEVICE_PATH;
    waits = waits > now ? now : waits;
    if (connections != p->shown.connections)
        r2_control_peer_connections(r2_eng.ctl, p->row, (uint32_t)connections,
                                    connections ? direction : R2_SEG_DIR_NONE);
    r2_control_peer_heard(r2_eng.ctl, p->row, heard);
    r2_control_peer_waits(r2_eng.ctl, p->row, what, waits,
                          waits ? waits + r2_eng.set->no_path_timeout_ns : 0);
    p->shown.connections = connections;
    p->shown.heard = heard;
}

/* Connections that the application has closed wait for themselves (buffered.c). */
static bool somebody_waits(const struct r2_peer *p)
{
    if (p->opening)
        return true;
    R2_FOR_EACH_CONN (c, p) {
        if (!c->linger && c->oldest < c->next_seq)
            return true;
    }
    return false;
}

void r2_peer_tell_gone(const struct r2_peer *p, const char *cause)
{
    static atomic_ulong told[TOLD];
    char who[R2_PEER_WHO];
    uint64_t id;

    if (!somebody_waits(p))
        return;
    memcpy(&id, p->id, sizeof(id));
    /* Relaxed: a word about a word. The same process is a peer twice, for sending and receiving. */
    if (atomic_exchange_explicit(&told[id % TOLD], id, memory_order_relaxed) == id)
        return;
    R2_TELL("peer %s is given up; requests that wait for it fail: %s", r2_peer_who(p, who), cause);
}
