/* Which NIC is at fault when a path fails: evidence in, verdict out.
 *
 * Pure: no clock, socket, thread or lock; times are arguments. Not thread-safe; an evidence is the
 * caller's, holds no memory, and may be copied.
 *
 * NICs are known by their address, so that what several processes of several nodes have seen goes
 * together. An observation is one NIC asking another: an answer proves both NICs, both directions
 * and what lies between; silence says that one of them is broken, if the pair is known to have
 * worked before. A refusal, a missing route, or a kernel that answers while its process does not
 * say nothing: a host may answer for an address of another of its NICs.
 *
 * "NIC" in a verdict means the NIC, its cable and the port at the cable's other end: nothing that
 * can be seen from outside tells them apart.
 */
#ifndef R2_ENGINE_CORE_VERDICT_H
#define R2_ENGINE_CORE_VERDICT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "oob/wire.h"

#define R2_EVIDENCE_NICS 64
#define R2_EVIDENCE_SEEN 256
#define R2_FINDING_WHY 80

/* On the wire and in the node segment: numbers never change. */
enum r2_seen {
    R2_SEEN_NOTHING = 0, /* not asked, or an error of one's own */
    R2_SEEN_ANSWERED,    /* by the process that was asked */
    R2_SEEN_SILENT,
    R2_SEEN_REFUSED,
    R2_SEEN_NO_ROUTE,
    R2_SEEN_MUTE, /* the host's kernel answered, its process did not */
    R2_SEEN_LAST = R2_SEEN_MUTE,
};

enum r2_finding_kind {
    R2_FOUND_UNDECIDED = 0,
    R2_FOUND_TRANSIENT, /* the pair works again */
    R2_FOUND_LOCAL,     /* the local NIC */
    R2_FOUND_REMOTE,    /* the NIC at the other end */
    R2_FOUND_BOTH,      /* each of them */
    R2_FOUND_BETWEEN,   /* link or switch between two working NICs, or a whole rail */
    R2_FOUND_LAST = R2_FOUND_BETWEEN,
};

struct r2_evidence_nic {
    struct r2_wire_addr addr; /* port 0 */
    bool word;                /* another node's: that node says that it is out of order */
    char label[R2_WIRE_NAME]; /* "nic1@n2" */
};

struct r2_evidence_seen {
    uint8_t from, to; /* NICs of the evidence */
    uint8_t outcome;  /* enum r2_seen */
    bool reached;     /* the pair is known to have worked */
    uint64_t at;
};

struct r2_evidence {
    int n_nics, n_seen;
    struct r2_evidence_nic nics[R2_EVIDENCE_NICS];
    struct r2_evidence_seen seen[R2_EVIDENCE_SEEN];
};

struct r2_finding {
    enum r2_finding_kind kind;
    char why[R2_FINDING_WHY]; /* one line, for the journal */
};

void r2_evidence_init(struct r2_evidence *ev);
/* Index of the NIC with this address (the port is ignored), added with the label if it is new; -1
 * when the evidence is full. A label replaces an empty one. */
int r2_evidence_nic(struct r2_evidence *ev, const struct r2_wire_addr *addr, const char *label);
/* Notes an observation. Strange indices and outcomes, a NIC that asks itself, and what does not
 * fit are dropped. */
void r2_evidence_add(struct r2_evidence *ev, int from, int to, enum r2_seen outcome, bool reached,
                     uint64_t at);
/* Some observation since `since` was answered over this NIC. */
bool r2_evidence_works(const struct r2_evidence *ev, int nic, uint64_t since);
/* The verdict on the path between two NICs from what was seen since `since`. `both_there`: the
 * processes of both ends have been heard since then, over whichever path. */
void r2_verdict_of(const struct r2_evidence *ev, int local, int remote, uint64_t since,
                   bool both_there, struct r2_finding *out);
/* "local NIC", "remote NIC", ... */
const char *r2_verdict_name(enum r2_finding_kind kind);
/* Same NIC: family and address, whatever the port. */
bool r2_same_nic(const struct r2_wire_addr *a, const struct r2_wire_addr *b);

#endif
