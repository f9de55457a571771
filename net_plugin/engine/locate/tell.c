/* What the two ends of failed paths tell each other: each looks from its side, and says what it has
 * seen (SEEN). */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "engine/locate/round.h"

#define SAY_TWICE 2 /* over two paths, because the one that is chosen may be dying as well */

/* Paths that answer come first, those over the NIC in question last. */
static int rank_of(const struct r2_path *path, int avoid)
{
    return (path->lnic == avoid ? 2 : 0) + (path->hb.unanswered ? 1 : 0);
}

static void say(struct r2_peer *p, int avoid, const struct r2_msg_seen *m,
                const struct r2_wire_seen *seen)
{
    int said = 0;

    r2_peer_lock(p);
    for (int rank = 0; rank < 4; rank++) {
        for (int i = 0; i < p->n_paths && said < SAY_TWICE; i++) {
            struct r2_path *path = p->paths[i];

            if (r2_path_is_up(path) && rank_of(path, avoid) == rank &&
                r2_out_frame(path, R2_F_SEEN, m, sizeof(*m), seen, m->seen * sizeof(*seen)) == 0)
                said++;
        }
    }
    r2_peer_unlock(p);
}

static int fill_seen(struct r2_round *r, struct r2_wire_seen *out, uint64_t now)
{
    int n = 0;

    R2_FOR_EACH_TARGET (t, r) {
        uint64_t age = t->at < now ? (now - t->at) / R2_NS_PER_MS : 0;
        struct r2_wire_seen *s = &out[n];

        if (n == R2_WIRE_MAX_SEEN)
            break;
        memset(s, 0, sizeof(*s));
        if (!t->closed || t->outcome == R2_SEEN_NOTHING || r2_eng.ops->address(t->lnic, &s->from))
            continue;
        s->to = t->addr;
        s->outcome = (uint8_t)t->outcome;
        s->reached = t->reached;
        s->age_ms = (uint16_t)(age < UINT16_MAX ? age : UINT16_MAX);
        r2_locate_label(s->from_label, r2_nic_name(t->lnic), r2_eng.host);
        memcpy(s->to_label, t->label, sizeof(s->to_label));
        n++;
    }
    return n;
}

/* A process is a peer for each direction, and hears it once. */
static bool is_told(const struct r2_round *r, int suspect)
{
    for (int i = 0; i < suspect; i++) {
        if (memcmp(r->suspects[i].peer->id, r->suspects[suspect].peer->id, 16) == 0)
            return true;
    }
    return false;
}

void r2_round_tell(struct r2_round *r, uint64_t now)
{
    struct r2_wire_seen seen[R2_WIRE_MAX_SEEN];
    struct r2_msg_seen m = {.seen = (uint32_t)fill_seen(r, seen, now)};

    if (r2_eng.ops->address(r->lnic, &m.nic))
        return;
    for (int i = 0; i < r->n_suspects; i++) {
        if (!is_told(r, i))
            say(r->suspects[i].peer, r->lnic, &m, seen);
    }
}

/* Text from the wire, for people: it ends, and shows nothing strange. */
static const char *clean(char *text)
{
    text[R2_WIRE_NAME - 1] = '\0';
    for (char *c = text; *c; c++) {
        if (!isprint((unsigned char)*c))
            *c = '?';
    }
    return text;
}

/* The process's NIC is at the other end of paths of the round, and it has not been heard yet. */
static bool awaits(struct r2_round *r, const struct r2_peer *p, const struct r2_wire_addr *nic)
{
    bool found = false;

    R2_FOR_EACH_SUSPECT (s, r) {
        if (s->heard || memcmp(s->peer->id, p->id, 16) != 0 || !r2_same_nic(&s->addr, nic))
            continue;
        s->heard = found = true;
    }
    return found;
}

static void add_seen(struct r2_round *r, const struct r2_msg_seen *m, const uint8_t *body,
                     uint64_t now)
{
    for (uint32_t i = 0; i < m->seen; i++) {
        struct r2_wire_seen s;
        uint64_t age;
        int from, to;

        memcpy(&s, body + i * sizeof(s), sizeof(s));
        age = s.age_ms * R2_NS_PER_MS;
        if (s.outcome > R2_SEEN_LAST || r2_nic_own(&s.from) >= 0)
            continue; /* what our own NICs see we know ourselves */
        from = r2_evidence_nic(&r->ev, &s.from, clean(s.from_label));
        to = r2_evidence_nic(&r->ev, &s.to, clean(s.to_label));
        r2_evidence_add(&r->ev, from, to, (enum r2_seen)s.outcome, s.reached != 0,
                        age < now ? now - age : 0);
    }
}

void r2_rounds_told(struct r2_peer *p, const uint8_t *body, uint64_t now)
{
    struct r2_msg_seen m;

    memcpy(&m, body, sizeof(m));
    R2_FOR_EACH_ROUND(r)
    {
        if (awaits(r, p, &m.nic))
            add_seen(r, &m, body + sizeof(m), now);
    }
}
