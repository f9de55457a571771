/* Inside engine/locate: rounds, their targets and probes. All on I/O thread 0, no lock held. */
#ifndef R2_ENGINE_LOCATE_ROUND_H
#define R2_ENGINE_LOCATE_ROUND_H

#include "control/nodeseg.h"
#include "engine/locate/locate.h"

#define R2_ROUNDS 24
#define R2_TARGETS 16
#define R2_TRIES 3
#define R2_SUSPECTS 8

#define R2_SETTLE_NS (15 * R2_NS_PER_MS)  /* paths that fail together come into one round */
#define R2_TRY_NS (90 * R2_NS_PER_MS)     /* between tries: one lost packet proves nothing */
#define R2_WINDOW_NS (320 * R2_NS_PER_MS) /* after it a probe without answer was silent */
#define R2_ANSWER_NS (2 * R2_WINDOW_NS)   /* for what the other ends see, who may begin later */
#define R2_SLACK_NS (100 * R2_NS_PER_MS)  /* evidence this much older than the failure counts */
#define R2_REPEAT_NS (1 * R2_NS_PER_S)    /* a verdict on the same pair stands for so long */

/* One attempt: an endpoint that ends when somebody answers. References: the target's, the
 * endpoint's, the inbox's. */
struct r2_probe {
    struct r2_list node; /* the inbox */
    atomic_int refs;
    struct r2_ep *ep;
    bool over;
    int err;
    bool connected, other_process, refused;
};

struct r2_target {
    int lnic;
    uint8_t rnic; /* the process's number of its NIC */
    struct r2_wire_addr addr;
    uint8_t process[16];
    char label[R2_WIRE_NAME];
    bool reached;
    enum r2_seen outcome; /* NOTHING: not known yet */
    uint64_t at;
    uint64_t tried_at; /* the first attempt */
    bool closed;
    int tries;
    struct r2_probe *probes[R2_TRIES];
};

struct r2_suspect {
    struct r2_peer *peer; /* holds a reference */
    uint8_t rnic, via;    /* via: enum r2_transport_id of the path that failed */
    struct r2_wire_addr addr;
    char name[R2_WIRE_NAME], label[R2_WIRE_NAME], host[64];
    uint32_t pid;
    uint64_t failed_at;
    bool heard; /* what its process has seen is among the evidence */
};

enum r2_round_phase {
    R2_PHASE_FREE,
    R2_PHASE_SETTLE,
    R2_PHASE_RUN,
};

/* Paths of one local NIC have failed: ends in a verdict. */
struct r2_round {
    enum r2_round_phase phase;
    int lnic;
    uint64_t began, next_try, close_at, deadline;
    uint64_t looked_at; /* when the carrier was last asked for */
    bool closed;
    struct r2_suspect suspects[R2_SUSPECTS];
    struct r2_target targets[R2_TARGETS];
    int n_suspects, n_targets;
    struct r2_evidence ev;
};

#define R2_FOR_EACH_TARGET(t, r)                                                                   \
    for (__typeof__(&(r)->targets[0]) t = (r)->targets; t < (r)->targets + (r)->n_targets; t++)
#define R2_FOR_EACH_SUSPECT(s, r)                                                                  \
    for (__typeof__(&(r)->suspects[0]) s = (r)->suspects; s < (r)->suspects + (r)->n_suspects; s++)

/* ---- probe.c */
/* Adds a target unless the pair is there already; NULL when there is no room. */
struct r2_target *r2_target_add(struct r2_round *r, int lnic, const struct r2_wire_addr *addr,
                                int rnic, const uint8_t process[16], const char *label,
                                bool reached);
/* Starts tries that are due, takes answers in. */
void r2_targets_tick(struct r2_round *r, uint64_t now);
/* What has not answered by now was silent; ends all attempts. */
void r2_targets_close(struct r2_round *r, uint64_t now);
/* All targets have an outcome. */
bool r2_targets_done(const struct r2_round *r);
/* Adds the targets' outcomes to the round's evidence. */
void r2_targets_evidence(struct r2_round *r);
/* "nic1@n2", cut to fit. */
void r2_locate_label(char out[R2_WIRE_NAME], const char *nic, const char *host);
int r2_own_index(struct r2_evidence *ev, int nic);

/* ---- targets.c: whom to ask, from what all peers are known to have */
/* From the round's NIC: third nodes, other NICs of the nodes in question; from other local NICs:
 * the NICs that are among the targets already. */
void r2_targets_collect(struct r2_round *r);

/* ---- tell.c */
/* What the targets' NICs did goes to the processes at the other ends (SEEN). */
void r2_round_tell(struct r2_round *r, uint64_t now);
/* A SEEN of the process, about the rounds that wait for it. */
void r2_rounds_told(struct r2_peer *p, const uint8_t *body, uint64_t now);

/* ---- rounds.c */
extern struct r2_round r2_rounds[R2_ROUNDS];
/* Those under way; the body may end one. */
#define R2_FOR_EACH_ROUND(r)                                                                       \
    for (struct r2_round *r = r2_rounds; r < r2_rounds + R2_ROUNDS; r++)                           \
        if (r->phase != R2_PHASE_FREE)
/* NULL: nothing is shared. */
extern struct r2_nodeseg *r2_locate_seg;
/* The round for the local NIC that still gathers evidence. */
struct r2_round *r2_round_open(int lnic);
void r2_round_free(struct r2_round *r, uint64_t now);
/* Whether any is under way. */
bool r2_rounds_tick(uint64_t now);
/* Notes from the inbox. */
void r2_rounds_failed(struct r2_peer *p, int lnic, int rnic, int via, uint64_t at);
void r2_rounds_nic(int nic, uint64_t now);

/* ---- conclude.c */
void r2_round_conclude(struct r2_round *r, uint64_t now);
/* A verdict on the pair was given less than R2_REPEAT_NS ago. */
bool r2_verdict_recent(int lnic, const struct r2_wire_addr *addr, uint64_t now);
/* The other end's node itself says that its NIC is out of order. */
void r2_verdict_word(struct r2_peer *p, int lnic, int rnic, uint64_t now);
/* A local NIC has changed: if the kernel said so, that is a verdict too. */
void r2_verdict_nic(int nic, uint64_t now);

#endif
