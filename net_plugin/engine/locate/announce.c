#include "engine/locate/announce.h"

#include <string.h>

#define PEER_NS UINT64_C(5000000)   /* of the waiting time, for each peer: a few tell per tick */
#define MOST_NS UINT64_C(500000000) /* of the waiting time */
#define HEARD_NS UINT64_C(1000000000)

static bool same(const struct r2_wire_addr *a, const struct r2_wire_addr *b)
{
    return a->family == b->family && memcmp(a->ip, b->ip, sizeof(a->ip)) == 0;
}

void r2_tells_add(struct r2_tells *t, const struct r2_msg_verdict *m, int peers, uint64_t random,
                  uint64_t now)
{
    uint64_t wait = (uint64_t)peers * PEER_NS;
    struct r2_tell *free = NULL;

    for (int i = 0; i < R2_TELLS; i++) {
        if (t->pending[i].due && same(&t->pending[i].m.nic, &m->nic))
            return;
        if (!t->pending[i].due)
            free = &t->pending[i];
        if (peers > R2_TELL_FEW && t->heard[i].at && now - t->heard[i].at < HEARD_NS &&
            same(&t->heard[i].nic, &m->nic))
            return;
    }
    if (!free)
        return;
    free->m = *m;
    free->due = now + (peers > R2_TELL_FEW ? random % (wait < MOST_NS ? wait : MOST_NS) : 0);
}

void r2_tells_heard(struct r2_tells *t, const struct r2_wire_addr *nic, int peers, uint64_t now)
{
    unsigned at = t->next_heard++ % R2_TELLS;

    t->heard[at].nic = *nic;
    t->heard[at].at = now;
    for (int i = 0; i < R2_TELLS && peers > R2_TELL_FEW; i++) {
        if (t->pending[i].due && same(&t->pending[i].m.nic, nic))
            t->pending[i].due = 0;
    }
}

bool r2_tells_due(struct r2_tells *t, struct r2_msg_verdict *out, uint64_t now)
{
    for (int i = 0; i < R2_TELLS; i++) {
        if (!t->pending[i].due || t->pending[i].due > now)
            continue;
        *out = t->pending[i].m;
        t->pending[i].due = 0;
        return true;
    }
    return false;
}
