#include "engine/core/verdict.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

void r2_evidence_init(struct r2_evidence *ev)
{
    ev->n_nics = ev->n_seen = 0;
}

bool r2_same_nic(const struct r2_wire_addr *a, const struct r2_wire_addr *b)
{
    /* What is met at another NIC's listener has that one's address, and is none that packets test.
     */
    return !((a->offers | b->offers) & R2_OFFER_NO_TCP) && a->family == b->family && a->family &&
           memcmp(a->ip, b->ip, a->family == 4 ? 4 : 16) == 0;
}

int r2_evidence_nic(struct r2_evidence *ev, const struct r2_wire_addr *addr, const char *label)
{
    struct r2_evidence_nic *nic;
    int i;

    for (i = 0; i < ev->n_nics && !r2_same_nic(&ev->nics[i].addr, addr); i++) {
    }
    if (i == R2_EVIDENCE_NICS || !addr->family)
        return -1;
    nic = &ev->nics[i];
    if (i == ev->n_nics) {
        memset(nic, 0, sizeof(*nic));
        nic->addr = *addr;
        nic->addr.port = 0;
        ev->n_nics++;
    }
    if (!nic->label[0] && label)
        snprintf(nic->label, sizeof(nic->label), "%s", label);
    return i;
}

void r2_evidence_add(struct r2_evidence *ev, int from, int to, enum r2_seen outcome, bool reached,
                     uint64_t at)
{
    if (from < 0 || to < 0 || from >= ev->n_nics || to >= ev->n_nics || from == to ||
        (unsigned)outcome > R2_SEEN_LAST || ev->n_seen == R2_EVIDENCE_SEEN)
        return;
    ev->seen[ev->n_seen++] = (struct r2_evidence_seen){.from = (uint8_t)from,
                                                       .to = (uint8_t)to,
                                                       .outcome = (uint8_t)outcome,
                                                       .reached = reached,
                                                       .at = at};
}

static bool joins(const struct r2_evidence_seen *s, int a, int b)
{
    return (s->from == a && s->to == b) || (s->from == b && s->to == a);
}

/* ANSWERED: somebody got through, whoever did not; SILENT: somebody should have and nobody did;
 * else NOTHING. So nobody's word takes an answer back: a NIC that answered is never blamed. */
static enum r2_seen pair_seen(const struct r2_evidence *ev, int a, int b, uint64_t since)
{
    enum r2_seen found = R2_SEEN_NOTHING;

    for (int i = 0; i < ev->n_seen && found != R2_SEEN_ANSWERED; i++) {
        const struct r2_evidence_seen *s = &ev->seen[i];

        if (!joins(s, a, b) || s->at < since)
            continue;
        if (s->outcome == R2_SEEN_ANSWERED || (s->outcome == R2_SEEN_SILENT && s->reached))
            found = (enum r2_seen)s->outcome;
    }
    return found;
}

/* The NIC's partners with which the pair is now `what`, `but` left out; `only_working`: partners
 * that work otherwise. Silence between it and a partner that is out of order itself says nothing
 * about it. *one: one of them. */
static int partners(const struct r2_evidence *ev, int nic, int but, enum r2_seen what,
                    bool only_working, uint64_t since, int *one)
{
    int n = 0;

    for (int y = 0; y < ev->n_nics; y++) {
        if (y == nic || y == but || pair_seen(ev, nic, y, since) != what ||
            (what == R2_SEEN_SILENT && ev->nics[y].word) ||
            (only_working && !r2_evidence_works(ev, y, since)))
            continue;
        if (one && !n)
            *one = y;
        n++;
    }
    return n;
}

bool r2_evidence_works(const struct r2_evidence *ev, int nic, uint64_t since)
{
    return partners(ev, nic, -1, R2_SEEN_ANSWERED, false, since, NULL) > 0;
}

__attribute__((format(printf, 3, 4))) static void say(struct r2_finding *out,
                                                      enum r2_finding_kind kind, const char *fmt,
                                                      ...)
{
    int n = snprintf(out->why, sizeof(out->why), "%s: ", r2_verdict_name(kind));
    va_list ap;

    out->kind = kind;
    va_start(ap, fmt);
    vsnprintf(out->why + n, sizeof(out->why) - (size_t)n, fmt, ap);
    va_end(ap);
}

static const char *label(const struct r2_evidence *ev, int nic)
{
    return ev->nics[nic].label[0] ? ev->nics[nic].label : "?";
}

/* One end works. The other one is at fault if it is silent to somebody else as well; else it could
 * as well be the link. */
static void one_works(const struct r2_evidence *ev, int bad, int good, enum r2_finding_kind kind,
                      uint64_t since, struct r2_finding *out)
{
    int one = 0, silent = partners(ev, bad, good, R2_SEEN_SILENT, false, since, &one);

    if (silent)
        say(out, kind, "silent to %s and %d other%s, %s works", label(ev, good), silent,
            silent > 1 ? "s" : "", label(ev, good));
    else
        say(out, R2_FOUND_UNDECIDED, "%s works; nobody else could ask %s", label(ev, good),
            label(ev, bad));
}

/* Neither is known to work. A NIC that is silent to one that works is at fault. If both are silent
 * to everybody and nobody is known to work, one broken rail is likelier than two broken NICs. */
static void none_works(const struct r2_evidence *ev, int l, int r, uint64_t since, bool both_there,
                       struct r2_finding *out)
{
    int y = 0, z = 0;
    bool l_bad = partners(ev, l, r, R2_SEEN_SILENT, true, since, &y) > 0;
    bool r_bad = partners(ev, r, l, R2_SEEN_SILENT, true, since, &z) > 0;
    int l_silent = partners(ev, l, r, R2_SEEN_SILENT, false, since, NULL);
    int r_silent = partners(ev, r, l, R2_SEEN_SILENT, false, since, NULL);

    if (l_bad && r_bad)
        say(out, R2_FOUND_BOTH, "silent to %s and %s, which work", label(ev, y), label(ev, z));
    else if (l_bad && both_there)
        say(out, R2_FOUND_LOCAL, "silent to %s, which works", label(ev, y));
    else if (r_bad && both_there)
        say(out, R2_FOUND_REMOTE, "silent to %s, which works", label(ev, z));
    else if (l_silent && r_silent && both_there)
        say(out, R2_FOUND_BETWEEN, "neither end reaches any of its %d and %d others", l_silent,
            r_silent);
    else if (!both_there)
        say(out, R2_FOUND_UNDECIDED, "the other end did not say what it sees");
    else
        say(out, R2_FOUND_UNDECIDED, "no third NIC could ask either end");
}

void r2_verdict_of(const struct r2_evidence *ev, int local, int remote, uint64_t since,
                   bool both_there, struct r2_finding *out)
{
    bool l_works, r_works;
    int y = 0, z = 0;

    if (local < 0 || remote < 0 || local >= ev->n_nics || remote >= ev->n_nics || local == remote) {
        say(out, R2_FOUND_UNDECIDED, "no evidence");
        return;
    }
    if (ev->nics[remote].word) {
        say(out, R2_FOUND_REMOTE, "its node says so");
        return;
    }
    if (pair_seen(ev, local, remote, since) == R2_SEEN_ANSWERED) {
        say(out, R2_FOUND_TRANSIENT, "%s answered a probe over %s", label(ev, remote),
            label(ev, local));
        return;
    }
    l_works = partners(ev, local, -1, R2_SEEN_ANSWERED, false, since, &y) > 0;
    r_works = partners(ev, remote, -1, R2_SEEN_ANSWERED, false, since, &z) > 0;
    if (pair_seen(ev, local, remote, since) != R2_SEEN_SILENT)
        say(out, R2_FOUND_UNDECIDED, "the pair itself could not be asked");
    else if (l_works && r_works)
        say(out, R2_FOUND_BETWEEN, "%s reaches %s, %s reaches %s", label(ev, local), label(ev, y),
            label(ev, remote), label(ev, z));
    else if (r_works)
        one_works(ev, local, remote, R2_FOUND_LOCAL, since, out);
    else if (l_works)
        one_works(ev, remote, local, R2_FOUND_REMOTE, since, out);
    else
        none_works(ev, local, remote, since, both_there, out);
}

const char *r2_verdict_name(enum r2_finding_kind kind)
{
    static const char *const names[] = {
        [R2_FOUND_UNDECIDED] = "undecided",       [R2_FOUND_TRANSIENT] = "transient",
        [R2_FOUND_LOCAL] = "local NIC",           [R2_FOUND_REMOTE] = "remote NIC",
        [R2_FOUND_BOTH] = "local and remote NIC", [R2_FOUND_BETWEEN] = "link or switch",
    };

    return (unsigned)kind <= R2_FOUND_LAST ? names[kind] : "unknown";
}
