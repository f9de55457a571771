/* Probes: attempts to get an answer from one NIC over another, and what came of them. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/locate/round.h"

void r2_locate_probe_released(void *owner)
{
    struct r2_probe *probe = owner;

    /* acq_rel: what the other holder wrote happens before the memory goes. */
    if (atomic_fetch_sub_explicit(&probe->refs, 1, memory_order_acq_rel) == 1)
        free(probe);
}

struct r2_target *r2_target_add(struct r2_round *r, int lnic, const struct r2_wire_addr *addr,
                                int rnic, const uint8_t process[16], const char *label,
                                bool reached)
{
    struct r2_target *t;

    R2_FOR_EACH_TARGET (known, r) {
        if (known->lnic == lnic && r2_same_nic(&known->addr, addr)) {
            known->reached |= reached;
            return known;
        }
    }
    if (r->n_targets == R2_TARGETS)
        return NULL;
    t = &r->targets[r->n_targets++];
    memset(t, 0, sizeof(*t));
    t->lnic = lnic;
    t->rnic = (uint8_t)rnic;
    t->addr = *addr;
    memcpy(t->process, process, 16);
    memcpy(t->label, label, strnlen(label, sizeof(t->label) - 1));
    t->reached = reached;
    return t;
}

static void end_probe(struct r2_probe **slot)
{
    struct r2_probe *probe = *slot;

    *slot = NULL;
    if (probe->ep) {
        r2_eng.ops->shut(probe->ep);
        r2_eng.ops->put(probe->ep);
        probe->ep = NULL;
    }
    r2_locate_probe_released(probe);
}

/* A NIC is known by its first address, and may have to be dialled by its second. */
static struct r2_wire_addr place_of(const struct r2_target *t)
{
    struct r2_wire_addr addr = t->addr;
    bool found = false;

    for (int out = 0; out < 2 && !found; out++) {
        struct r2_peer *p = r2_peer_find(t->process, out);

        if (!p)
            continue;
        r2_peer_lock(p);
        found = t->rnic < p->n_rnics && r2_same_nic(&p->rnics[t->rnic].addr, &t->addr);
        if (found)
            addr = *r2_pair_addr(p, t->lnic, t->rnic);
        r2_peer_leave(p);
        r2_peer_put(p);
    }
    return addr;
}

static void start_try(struct r2_target *t, uint64_t now)
{
    struct r2_ep_params params = {
        .initiator = true, .probe = true, .locate = true, .transport = R2_VIA_TCP};
    struct r2_probe *probe = calloc(1, sizeof(*probe));
    int rc;

    if (!probe)
        return;
    r2_list_init(&probe->node);
    atomic_init(&probe->refs, 2); /* ours and the endpoint's */
    params.local_nic = (uint8_t)t->lnic;
    params.remote_nic = t->rnic;
    params.remote_addr = place_of(t);
    params.owner = probe;
    memcpy(params.local_process, r2_eng.process, 16);
    memcpy(params.remote_process, t->process, 16);
    if (!t->tries)
        t->tried_at = now;
    t->probes[t->tries++] = probe;
    r2_count(&r2_eng.n->locate_probes, 1);
    rc = r2_eng.ops->connect(&params, &probe->ep);
    if (rc) {
        probe->over = true;
        probe->err = -rc;
        probe->refused = rc == -ECONNREFUSED;
    }
}

/* What an attempt that is over says. EALREADY: the process answered; another process's answer, or
 * a handshake that another version refuses, came over the same two NICs. */
static enum r2_seen outcome_of(const struct r2_probe *p)
{
    if (p->err == EALREADY || p->other_process)
        return R2_SEEN_ANSWERED;
    if (p->refused || p->err == ECONNREFUSED)
        return R2_SEEN_REFUSED;
    if (p->err == ENETUNREACH || p->err == EADDRNOTAVAIL || p->err == ENETDOWN)
        return R2_SEEN_NO_ROUTE;
    if (p->connected)
        return R2_SEEN_MUTE;
    return p->err == ETIMEDOUT || p->err == EHOSTUNREACH ? R2_SEEN_SILENT : R2_SEEN_NOTHING;
}

static void finish(struct r2_target *t, enum r2_seen outcome, uint64_t now)
{
    t->outcome = outcome;
    t->at = now;
    t->closed = true;
    for (int i = 0; i < t->tries; i++) {
        if (t->probes[i])
            end_probe(&t->probes[i]);
    }
}

static void take_answers(struct r2_target *t, uint64_t now)
{
    for (int i = 0; i < t->tries && !t->closed; i++) {
        struct r2_probe *p = t->probes[i];
        enum r2_seen seen;

        if (!p || !p->over)
            continue;
        seen = outcome_of(p);
        if (seen == R2_SEEN_ANSWERED) {
            finish(t, seen, now);
            return;
        }
        if (seen > t->outcome)
            t->outcome = seen; /* kept unless a later try is answered */
        end_probe(&t->probes[i]);
        if (seen == R2_SEEN_NO_ROUTE)
            finish(t, seen, now);
    }
}

void r2_targets_tick(struct r2_round *r, uint64_t now)
{
    bool due = now >= r->next_try;

    if (due)
        r->next_try = now + R2_TRY_NS;
    R2_FOR_EACH_TARGET (t, r) {
        if (t->closed)
            continue;
        take_answers(t, now);
        if (!t->closed && (due || !t->tries) && t->tries < R2_TRIES)
            start_try(t, now);
    }
}

/* Some attempt got as far as the host's kernel. */
static bool connected(const struct r2_target *t)
{
    for (int i = 0; i < t->tries; i++) {
        struct r2_ep_health h = {0};

        if (!t->probes[i] || !t->probes[i]->ep)
            continue;
        r2_eng.ops->health(t->probes[i]->ep, &h);
        if (h.answered)
            return true;
    }
    return false;
}

void r2_targets_close(struct r2_round *r, uint64_t now)
{
    R2_FOR_EACH_TARGET (t, r) {
        if (t->closed)
            continue;
        take_answers(t, now);
        if (t->closed)
            continue;
        if (connected(t))
            t->outcome = R2_SEEN_MUTE;
        else if (t->outcome == R2_SEEN_NOTHING && t->tries && now - t->tried_at >= R2_TRY_NS)
            t->outcome = R2_SEEN_SILENT; /* one that came late had no time to answer */
        finish(t, t->outcome, now);
    }
}

bool r2_targets_done(const struct r2_round *r)
{
    R2_FOR_EACH_TARGET (t, r) {
        if (!t->closed)
            return false;
    }
    return true;
}

void r2_locate_label(char out[R2_WIRE_NAME], const char *nic, const char *host)
{
    int n = (int)strnlen(nic, R2_WIRE_NAME / 2 - 1);

    snprintf(out, R2_WIRE_NAME, "%.*s@%.*s", n, nic, R2_WIRE_NAME - n - 2, host);
}

int r2_own_index(struct r2_evidence *ev, int nic)
{
    struct r2_wire_addr addr;
    char label[R2_WIRE_NAME];

    if (nic < 0 || nic >= r2_local.n || r2_eng.ops->address(nic, &addr))
        return -1;
    r2_locate_label(label, r2_nic_name(nic), r2_eng.host);
    return r2_evidence_nic(ev, &addr, label);
}

void r2_targets_evidence(struct r2_round *r)
{
    R2_FOR_EACH_TARGET (t, r) {
        int from = r2_own_index(&r->ev, t->lnic);
        int to = r2_evidence_nic(&r->ev, &t->addr, t->label);

        r2_evidence_add(&r->ev, from, to, t->outcome, t->reached, t->at);
    }
}
