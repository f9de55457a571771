/* What is said to peers: questions and answers. */
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

/* Under the peer's lock. */
static bool say(struct r2_peer *p, int avoid, uint8_t type, const void *a, size_t a_len,
                const void *b, size_t b_len)
{
    int said = 0;

    for (int rank = 0; rank < 4; rank++) {
        for (int i = 0; i < p->n_paths && said < SAY_TWICE; i++) {
            struct r2_path *path = p->paths[i];

            if (r2_path_takes_frames(path) && rank_of(path, avoid) == rank &&
                r2_out_frame(path, type, a, a_len, b, b_len) == 0)
                said++;
        }
    }
    return said > 0;
}

static bool asked(const struct r2_round *r, const uint8_t process[16])
{
    for (int i = 0; i < r->n_asks; i++) {
        if (memcmp(r->asks[i].process, process, 16) == 0)
            return true;
    }
    return false;
}

static void ask(struct r2_round *r, struct r2_peer *p, const struct r2_suspect *s, bool end)
{
    struct r2_msg_probe m = {.round = r->id, .far = s->addr, .carrier = R2_CARRIER_UP};
    bool ok;

    if (r->n_asks == R2_ASKS || asked(r, p->id) || r2_eng.ops->address(r->lnic, &m.near))
        return;
    r2_peer_lock(p);
    ok = say(p, r->lnic, R2_F_PROBE, &m, sizeof(m), NULL, 0);
    r2_peer_unlock(p);
    if (!ok)
        return;
    memcpy(r->asks[r->n_asks].process, p->id, 16);
    r->asks[r->n_asks].heard = false;
    r->asks[r->n_asks++].end = end;
}

/* A node that has nothing to do with any of the failed paths. */
static bool is_third(const struct r2_round *r, struct r2_peer *p)
{
    char host[sizeof(p->host)];

    r2_peer_lock(p);
    memcpy(host, p->host, sizeof(host));
    r2_peer_leave(p);
    if (strcmp(host, r2_eng.host) == 0)
        return false;
    for (int i = 0; i < r->n_suspects; i++) {
        if (strcmp(r->suspects[i].host, host) == 0)
            return false;
    }
    return true;
}

void r2_round_ask(struct r2_round *r)
{
    int thirds = 0;

    for (int i = 0; i < r->n_suspects && r->n_asks < R2_ASKS - 2; i++)
        ask(r, r->suspects[i].peer, &r->suspects[i], true);
    R2_FOR_EACH_PEER_FROM(p, r->id)
    {
        if (thirds < 2 && is_third(r, p)) {
            int before = r->n_asks;

            ask(r, p, &r->suspects[0], false);
            thirds += r->n_asks - before;
        }
    }
}

static int fill_seen(struct r2_round *r, struct r2_wire_seen *out, uint64_t now)
{
    int n = 0;

    for (int i = 0; i < r->n_targets && n < R2_WIRE_MAX_SEEN; i++) {
        const struct r2_target *t = &r->targets[i];
        uint64_t age = t->at < now ? (now - t->at) / R2_NS_PER_MS : 0;
        struct r2_wire_seen *s = &out[n];

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

void r2_round_reply(struct r2_round *r, uint64_t now)
{
    struct r2_wire_seen seen[R2_WIRE_MAX_SEEN];
    struct r2_msg_probe_result m = {0};

    if (!r->n_replies)
        return;
    m.seen = (uint32_t)fill_seen(r, seen, now);
    for (int i = 0; i < r->n_replies; i++) {
        struct r2_reply *a = &r->replies[i];

        m.round = a->round;
        m.carrier = R2_CARRIER_UNKNOWN;
        if (a->far_is_mine && r->lnic >= 0)
            m.carrier = (uint8_t)r2_niclink_carrier(r->lnic, now);
        r2_peer_lock(a->peer);
        say(a->peer, r->lnic, R2_F_PROBE_RESULT, &m, sizeof(m), seen, m.seen * sizeof(seen[0]));
        r2_peer_unlock(a->peer);
        r2_peer_put(a->peer);
    }
    r->n_replies = 0;
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

static void note_carrier(struct r2_round *r, const struct r2_peer *p, uint8_t carrier)
{
    for (int i = 0; i < r->n_suspects; i++) {
        struct r2_suspect *s = &r->suspects[i];
        int nic;

        if (memcmp(s->peer->id, p->id, 16) != 0)
            continue;
        nic = r2_evidence_nic(&r->ev, &s->addr, s->label);
        if (nic >= 0 && carrier <= R2_CARRIER_DOWN)
            r->ev.nics[nic].carrier = carrier;
    }
}

void r2_round_result(struct r2_round *r, struct r2_peer *p, const uint8_t *body, uint64_t now)
{
    struct r2_msg_probe_result m;
    struct r2_ask *a = NULL;

    memcpy(&m, body, sizeof(m));
    for (int i = 0; i < r->n_asks; i++) {
        if (memcmp(r->asks[i].process, p->id, 16) == 0)
            a = &r->asks[i];
    }
    if (!a || a->heard) /* unasked, or the same over another path */
        return;
    a->heard = true;
    if (a->end)
        note_carrier(r, p, m.carrier);
    for (uint32_t i = 0; i < m.seen; i++) {
        struct r2_wire_seen s;
        uint64_t age;
        int from, to;

        memcpy(&s, body + sizeof(m) + i * sizeof(s), sizeof(s));
        age = s.age_ms * R2_NS_PER_MS;
        if (s.outcome > R2_SEEN_LAST || r2_nic_own(&s.from) >= 0)
            continue; /* what our own NICs see we know ourselves */
        from = r2_evidence_nic(&r->ev, &s.from, clean(s.from_label));
        to = r2_evidence_nic(&r->ev, &s.to, clean(s.to_label));
        r2_evidence_add(&r->ev, from, to, (enum r2_seen)s.outcome, s.reached != 0,
                        age < now ? now - age : 0);
    }
}
