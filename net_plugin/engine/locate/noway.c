/* Peers that no NIC of this process reaches, and never did: without a word the job would stand
 * until R2CCL_NO_PATH_TIMEOUT. Said once for each peer, to the user for the first one. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "engine/locate/locate.h"
#include "settings/launch.h"

#define TRIED_NS (3 * R2_NS_PER_S)
#define TRIED_LEAST 3 /* attempts of each pair */

/* Adds to a text that ends where there is no room. */
#define ADD(out, cap, ...) snprintf((out) + strlen(out), (cap)-strlen(out), __VA_ARGS__)

static bool has_pair(const struct r2_peer *p)
{
    int order[R2_MAX_NICS];

    for (int l = 0; l < r2_local.n; l++) {
        if (r2_pairs_candidates(p, l, R2_VIA_TCP, order) ||
            r2_pairs_candidates(p, l, R2_VIA_VERBS, order))
            return true;
    }
    return false;
}

/* Every best pair has failed, and at none has the peer's kernel taken a connection. */
static bool tried_in_vain(const struct r2_peer *p, uint64_t now)
{
    if (!p->no_path_since || now < p->no_path_since + TRIED_NS)
        return false;
    R2_FOR_EACH_PATH (path, p) {
        if (path->role == R2_ROLE_FIRST &&
            (path->attempt.fails < TRIED_LEAST || r2_path_reaches_kernel(path)))
            return false;
    }
    return p->n_paths > 0;
}

static bool never_up(const struct r2_peer *p)
{
    return !R2_ANY_PATH(path, p, r2_past_carried(path->past) || r2_path_is_up(path));
}

static void add_sides(const struct r2_peer *p, char *out, size_t cap)
{
    char text[64];

    for (int l = 0; l < r2_local.n; l++) {
        struct r2_nic nic;

        r2_local_now(l, &nic);
        ADD(out, cap, "%s%s %s", l ? ", " : "", nic.name,
            r2_nic_place_text(&nic, text, sizeof(text)));
    }
    ADD(out, cap, "; there");
    for (int r = 0; r < p->n_rnics; r++) {
        if (!p->rnics[r].known)
            continue;
        r2_wire_addr_text(&p->rnics[r].addr, text, sizeof(text));
        ADD(out, cap, " %s", text);
    }
}

static void add_pairs(const struct r2_peer *p, char *out, size_t cap)
{
    bool first = true;
    char text[64];

    R2_FOR_EACH_PATH (path, p) {
        if (path->role != R2_ROLE_FIRST)
            continue;
        r2_wire_addr_text(&p->rnics[path->rnic].addr, text, sizeof(text));
        ADD(out, cap, "%s%s to %s (its NIC %d): %s", first ? "" : "; ", r2_nic_name(path->lnic),
            text, path->rnic,
            path->attempt.err == ECONNREFUSED ? "nobody listens there, as its host says"
            : path->attempt.err == EHOSTUNREACH || path->attempt.err == ETIMEDOUT
                ? "no answer"
                : strerror(path->attempt.err));
        first = false;
    }
}

/* `then`: what follows from it. */
static void say(struct r2_peer *p, const char *brief, const char *text, const char *then)
{
    static atomic_bool told;
    char range[160];
    struct r2_control_event ev = {
        .event = R2_EV_WARNING, .peer_host = p->host, .peer_pid = p->pid, .cause = brief};

    r2_control_peer_state(r2_eng.ctl, p->row, R2_SEG_PEER_CONNECTING, brief);
    r2_control_journal(r2_eng.ctl, &ev);
    r2_port_range_text(range, sizeof(range));
    if (!atomic_exchange(&told, true))
        R2_TELL("%s. %s. Check the NICs (R2CCL_NICS), addresses, subnets and firewalls of both "
                "nodes%s%s%s",
                text, then, range[0] ? ". " : "", range,
                range[0] ? ". Firewalls must let in all of it" : "");
    else
        R2_WARN_LIMIT("%s", text);
}

void r2_noway_refused(struct r2_peer *p, uint64_t now)
{
    char text[400] = "a peer process is not where it should be: ";

    if (p->shown.noway)
        return;
    add_pairs(p, text, sizeof(text));
    say(p, "refused at every NIC", text, "Either it has ended, or a firewall refuses");
    p->shown.noway = now;
}

void r2_noway_look(struct r2_peer *p, uint64_t now)
{
    static const char unlike[] = "no address family in common", vain[] = "no NIC here reaches it",
                      waits[] = "The job waits for a path, at most for R2CCL_NO_PATH_TIMEOUT";
    char text[400];

    if (!p->out || (!p->opening && !p->shown.noway))
        return;
    if (!never_up(p)) {
        p->shown.noway = 0;
    } else if (p->shown.noway) {
        return;
    } else if (!has_pair(p)) {
        snprintf(text, sizeof(text),
                 "this process and a peer have no address family in common: here ");
        add_sides(p, text, sizeof(text));
        say(p, unlike, text, waits);
        p->shown.noway = now;
    } else if (tried_in_vain(p, now)) {
        snprintf(text, sizeof(text), "no NIC here reaches a peer process: ");
        add_pairs(p, text, sizeof(text));
        say(p, vain, text, waits);
        p->shown.noway = now;
    }
}
