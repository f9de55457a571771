/* The agreement of one rank: which plan holds from which collective index on. Pure: messages, the
 * rank's own progress and the decision to give up come in as arguments; messages to send come out.
 *
 * Epochs number the proposals, 1, 2, 3, ...; the leader (rank 0) has at most one undecided. Facts,
 * from which safety follows (docs/shim.md):
 *  F1 The leader commits epoch e only with the promise of every rank, and decides every epoch once.
 *  F2 A rank promises e with index N only if it has not begun collective N. It then does not begin
 *     N before it knows what became of e.
 *  F3 A rank that has said "never" to e does not promise it afterwards, so e is never committed.
 *  F4 A proposal of e names the fate of all epochs below e, so a rank has one open promise at most.
 * What is decided spreads with every message: (decided, committed) says that all epochs up to
 * `decided` are decided and that the last of them that was committed is `committed`.
 *
 * Threads: none, the caller serialises. Memory: the caller's. Messages may be lost, repeated and
 * reordered. Nothing here trusts a message's numbers: what cannot be is ignored, or fails the
 * machine where it shows that ranks already differ.
 */
#ifndef R2_AGREE_MACHINE_H
#define R2_AGREE_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

#define R2_AGREE_LEADER 0
#define R2_AGREE_PENDING 4 /* committed plans whose index a rank has not reached */

enum r2_agree_type {
    R2_AGREE_PROPOSE = 1, /* leader to all: epoch, at */
    R2_AGREE_PROMISE,     /* to the leader */
    R2_AGREE_REFUSE,      /* to the leader or to who asked: never */
    R2_AGREE_DECISION,    /* nothing but (decided, committed) */
    R2_AGREE_ASK,         /* what became of epoch? */
    R2_AGREE_TYPES,
};

struct r2_agree_msg {
    enum r2_agree_type type;
    uint64_t epoch; /* that the message is about */
    uint64_t at;    /* PROPOSE: the index N */
    uint64_t next;  /* PROMISE, REFUSE: the sender's next index, a hint for the next choice of N */
    uint64_t decided, committed;
};

struct r2_agree_slot {
    uint64_t epoch, at;
};

struct r2_agree_machine {
    int rank, nranks;
    uint64_t decided, committed;  /* what this rank knows */
    uint64_t committed_at;        /* index of `committed` */
    uint64_t floor;               /* no epoch up to this will be promised any more */
    struct r2_agree_slot promise; /* epoch 0: none open */
    struct r2_agree_slot pending[R2_AGREE_PENDING];
    int npending;
    struct r2_agree_slot force; /* the plan in force; epoch 0: stock */
    bool failed;                /* for good */
    bool closed;                /* promises nothing more */
    /* leader */
    struct r2_agree_slot proposal; /* epoch 0: none under way */
    uint64_t *promises;            /* bit per rank, the caller's memory; NULL elsewhere */
    int npromises;
};

enum r2_agree_to { R2_AGREE_NOBODY, R2_AGREE_SENDER, R2_AGREE_EVERYBODY };

/* What a step led to. */
struct r2_agree_out {
    enum r2_agree_to to; /* whom to send msg; everybody: all other ranks */
    struct r2_agree_msg msg;
    uint64_t promised;   /* an epoch that this step promised, 0: none */
    uint64_t committed;  /* an own promise that this step saw committed, 0: none */
    uint64_t aborted;    /* ... aborted */
    uint64_t concluded;  /* leader: the proposal that ended */
    bool concluded_well; /* ... by commit */
};

/* `promises`: (nranks + 63) / 64 words for rank 0, NULL for others. */
void r2_agree_machine_init(struct r2_agree_machine *m, int rank, int nranks, uint64_t *promises);

/* Leader: proposes that the next epoch holds from `at` on, and promises it itself. 0; -EBUSY: one
 * is under way or a committed one is not in force; -EINVAL: not the leader, or `at` is not above
 * `next` and the last commit; -EIO: failed or closed. */
int r2_agree_machine_propose(struct r2_agree_machine *m, uint64_t at, uint64_t next,
                             struct r2_agree_out *out);
/* Leader: decides that the proposal under way is aborted. */
void r2_agree_machine_abandon(struct r2_agree_machine *m, struct r2_agree_out *out);
/* Leader: the proposal under way once more, for ranks that have not answered. False: there is
 * none. */
bool r2_agree_machine_repeat(const struct r2_agree_machine *m, struct r2_agree_msg *msg);
bool r2_agree_machine_has_promise(const struct r2_agree_machine *m, int rank);

/* A message from rank `from`. `next` is this rank's next index, read after the caller has made
 * sure that no collective at or above msg->at begins without asking r2_agree_machine_at. `willing`:
 * the plan of a PROPOSE was accepted here. */
void r2_agree_machine_receive(struct r2_agree_machine *m, int from, const struct r2_agree_msg *msg,
                              uint64_t next, bool willing, struct r2_agree_out *out);
/* Whether receive would promise this message, were it willing: only then is the plan looked at. */
bool r2_agree_machine_would_promise(const struct r2_agree_machine *m, int from,
                                    const struct r2_agree_msg *msg, uint64_t next);

enum r2_agree_at { R2_AGREE_GO, R2_AGREE_WAIT, R2_AGREE_FAIL };

/* Collective `index` is about to begin: GO under m->force, WAIT for the open promise, or FAIL. */
enum r2_agree_at r2_agree_machine_at(struct r2_agree_machine *m, uint64_t index);
/* The lowest index at which r2_agree_machine_at must be asked. */
uint64_t r2_agree_machine_fence(const struct r2_agree_machine *m);
/* The question about the open promise. False: there is none. */
bool r2_agree_machine_ask(const struct r2_agree_machine *m, struct r2_agree_msg *msg);
/* The wait was too long: this rank never begins another collective. */
void r2_agree_machine_fail(struct r2_agree_machine *m);
/* Promises nothing more (abort, destroy); a leader aborts its proposal. */
void r2_agree_machine_close(struct r2_agree_machine *m, struct r2_agree_out *out);

#endif
