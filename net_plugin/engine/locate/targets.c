/* Whom to ask: the NICs of all peers, put together by address. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/locate/round.h"

#define CANDIDATES 256
#define THIRDS 4    /* NICs of nodes that have nothing to do with the failure */
#define SIBLINGS 2  /* other NICs of the nodes in question */
#define STRANGERS 2 /* never reached: only an answer counts */
#define HELPERS 2   /* other local NICs, per NIC in question */

struct candidate {
    struct r2_wire_addr addr;
    uint8_t process[16], rnic;
    uint16_t reached; /* bit per local NIC */
    char host[64], label[R2_WIRE_NAME];
};

static uint16_t reached_mask(const struct r2_peer *p, int rnic)
{
    uint16_t mask = 0;

    for (int l = 0; l < r2_local.n; l++)
        mask |= (uint16_t)(((p->reached[l] >> rnic) & 1) << l);
    return mask;
}

/* Under the peer's lock. NICs that their own node calls down are left out (their silence is no
 * news), and so are those of this node: what it says to itself goes over no wire. Several processes
 * of a node have the same NICs. */
static int add_peer(struct r2_peer *p, struct candidate *c, int n)
{
    if (p->life != R2_PEER_ALIVE || !p->n_up)
        return n;
    for (int r = 0; r < p->n_rnics; r++) {
        int i;

        if (!p->rnics[r].known || p->rnics[r].word != R2_NIC_USABLE ||
            (p->rnics[r].addr.offers & R2_OFFER_NO_TCP) || r2_nic_own(&p->rnics[r].addr) >= 0)
            continue;
        for (i = 0; i < n && !r2_same_nic(&c[i].addr, &p->rnics[r].addr); i++) {
        }
        if (i == CANDIDATES)
            continue;
        if (i == n) {
            memset(&c[n], 0, sizeof(c[n]));
            c[n].addr = p->rnics[r].addr;
            c[n].rnic = (uint8_t)r;
            memcpy(c[n].process, p->id, 16);
            snprintf(c[n].host, sizeof(c[n].host), "%s", p->host);
            r2_locate_label(c[n].label, p->rnics[r].name, p->host);
            n++;
        }
        c[i].reached |= reached_mask(p, r);
    }
    return n;
}

static struct candidate *candidates(int *count)
{
    struct candidate *c = calloc(CANDIDATES, sizeof(*c));
    int n = 0;

    *count = 0;
    if (!c)
        return NULL;
    R2_FOR_EACH_PEER(p)
    {
        r2_peer_lock(p);
        n = add_peer(p, c, n);
        r2_peer_leave(p);
    }
    *count = n;
    return c;
}

static bool is_target(const struct r2_round *r, int lnic, const struct r2_wire_addr *addr)
{
    R2_FOR_EACH_TARGET (t, r) {
        if (t->lnic == lnic && r2_same_nic(&t->addr, addr))
            return true;
    }
    return false;
}

/* Hosts that the round is about: those of the targets it began with. */
static bool in_question(const struct candidate *c, int n, const struct r2_round *r, int first,
                        const char *host)
{
    for (int i = 0; i < n; i++) {
        for (int k = 0; k < first; k++) {
            if (r2_same_nic(&c[i].addr, &r->targets[k].addr) && strcmp(c[i].host, host) == 0)
                return true;
        }
    }
    return false;
}

static bool host_taken(const struct candidate *c, const bool *taken, int n, const char *host)
{
    for (int i = 0; i < n; i++) {
        if (taken[i] && strcmp(c[i].host, host) == 0)
            return true;
    }
    return false;
}

enum want { WANT_THIRD, WANT_SIBLING, WANT_STRANGER };

/* Up to `most` candidates of a kind, one per host as long as there are hosts. */
static void pick(struct r2_round *r, struct candidate *c, int n, int first, enum want want,
                 int most)
{
    bool taken[CANDIDATES] = {false};
    int start = n ? (int)(r->began % (uint64_t)n) : 0, got = 0;

    for (int turn = 0; turn < 2; turn++) {
        for (int k = 0; k < n && got < most; k++) {
            int i = (start + k) % n;
            bool reached = (c[i].reached >> r->lnic) & 1;
            bool near = in_question(c, n, r, first, c[i].host);
            enum want is = !reached ? WANT_STRANGER : near ? WANT_SIBLING : WANT_THIRD;

            if (is != want || taken[i] || is_target(r, r->lnic, &c[i].addr) ||
                (turn == 0 && host_taken(c, taken, n, c[i].host)))
                continue;
            taken[i] = true;
            if (r2_target_add(r, r->lnic, &c[i].addr, c[i].rnic, c[i].process, c[i].label, reached))
                got++;
        }
    }
}

/* Other local NICs towards the NICs that the round began with. */
static void add_helpers(struct r2_round *r, struct candidate *c, int n, int first)
{
    for (int k = 0; k < first; k++) {
        struct r2_target t = r->targets[k];
        int got = 0;

        for (int turn = 0; turn < 2; turn++) { /* those that reached it before come first */
            for (int d = 1; d < r2_local.n && got < HELPERS; d++) {
                int l = (r->lnic + d) % r2_local.n;
                bool reached = false;

                for (int i = 0; i < n; i++)
                    reached |= r2_same_nic(&c[i].addr, &t.addr) && ((c[i].reached >> l) & 1);
                if (reached != (turn == 0) || !r2_nic_usable(l) || is_target(r, l, &t.addr))
                    continue;
                got += r2_target_add(r, l, &t.addr, t.rnic, t.process, t.label, reached) != NULL;
            }
        }
    }
}

void r2_targets_collect(struct r2_round *r)
{
    int n, first = r->n_targets;
    struct candidate *c = candidates(&n);

    if (!c)
        return;
    if (first > 2) /* of many paths that failed together, helpers look at two */
        first = 2;
    pick(r, c, n, r->n_targets, WANT_THIRD, THIRDS);
    pick(r, c, n, first, WANT_SIBLING, SIBLINGS);
    add_helpers(r, c, n, first);
    pick(r, c, n, first, WANT_STRANGER, STRANGERS);
    free(c);
}
