/* Plan changes at the same operation index on all ranks of a communicator, or not at all.
 *
 * One r2_agree is one rank of one communicator in this process. The ranks of a communicator find
 * each other through a signed unique id, over sockets of their own. The id has the address of its
 * maker, and a 128-bit token in the unused tail. The lowest rank leads: it proposes that a plan
 * holds from a collective index on; docs/shim.md has the protocol and its safety argument.
 *
 * How the wrappers use it:
 *     ncclGetUniqueId  r2_agree_id_sign after the real call.
 *     init             r2_agree_create (no thread, no socket, no traffic).
 *     split, shrink    r2_agree_derive by every rank that calls it, also those without a child.
 *     collective       r2_agree_lookup (may wait), the real call, r2_agree_advance.
 *     NCCL has failed  r2_agree_tell: the other ranks hear of it.
 *     abort            r2_agree_abort before the real call.
 *     destroy          r2_agree_destroy after the real call.
 *
 * Traffic and the service thread start with the first eligible lookup. A plan is an opaque text of
 * bytes here; shim/plan/table.h has its format.
 *
 * Threads: one thread at a time calls lookup and advance of one r2_agree, as NCCL asks of the users
 * of a communicator. Everything else may be called from any thread, also while lookup waits. Only
 * destroy must come last. Callbacks run on the service thread, one at a time, with no lock of ours
 * held. They may call any function of this header except r2_agree_lookup, r2_agree_advance and
 * r2_agree_destroy. They must not call NCCL or wait for the application. After fork the child's
 * copy is inert: every function returns at once, lookup without a plan.
 *
 * Errors are 0 or -errno. For an NCCL application every error of lookup but -ECANCELED is
 * ncclRemoteError.
 */
#ifndef R2_AGREE_AGREE_H
#define R2_AGREE_AGREE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define R2_AGREE_ID 128           /* bytes of an ncclUniqueId */
#define R2_AGREE_RANKS 8192       /* most ranks of a communicator that has an agreement */
#define R2_AGREE_PLAN (256 << 10) /* most bytes of a plan */
#define R2_AGREE_OFFER 4096       /* most bytes of an offer in an exchange */
#define R2_AGREE_WHY 160          /* most bytes of a reason, NUL included */

struct r2_agree;

/* Writes magic, version, rendezvous address and a fresh token into the tail of an id that NCCL has
 * just made. Opens the process's listening socket on first use (no thread). 0; -EEXIST: the tail
 * is in use (not all zero), left as it was; other errors: no address, descriptors or random bytes,
 * `id` is unchanged and works without plan changes. `why` (R2_AGREE_WHY, may be NULL) gets a line
 * for the log on error. */
int r2_agree_id_sign(uint8_t id[R2_AGREE_ID], char *why);

/* What rank `rank` is, as its peers see it. */
struct r2_agree_member {
    uint64_t node;    /* the key that its creator passed */
    uint64_t process; /* equal for ranks of one process */
};

#define R2_AGREE_WORDS 41 /* of a report, for the caller's use */

/* Bandwidth of a node, and what else a rank tells the leader. */
struct r2_agree_report {
    uint64_t capacity;              /* bytes/s each way with every NIC healthy; 0: not known */
    uint32_t share;                 /* what is left of it, in 1/65536 */
    uint32_t flags;                 /* for the caller's use */
    uint64_t words[R2_AGREE_WORDS]; /* likewise */
};

/* All may be NULL. `user` comes from the config. */
struct r2_agree_ops {
    /* Every rank has registered; `members` has nranks entries, valid during the call. Proposals
     * and reports are possible from now on. */
    void (*ready)(void *user, const struct r2_agree_member *members, int nranks);
    /* Plan changes are off and why, for one warning. A missing rank may still register: then
     * ready follows. Never called after ready. */
    void (*off)(void *user, const char *why);
    /* May this rank promise `plan`? 0 and an object that lookup will return, or -errno: the plan
     * is refused. Runs on every rank, the leader included. No accept: refused. */
    int (*accept)(void *user, uint64_t epoch, const void *plan, size_t len, void **object);
    /* Gives back an object of accept: its plan was aborted, or a later one was looked up, or the
     * r2_agree is being destroyed. */
    void (*release)(void *user, void *object);
    /* Leader only: what became of a proposal. `at` is its index N. */
    void (*decided)(void *user, uint64_t epoch, uint64_t at, bool committed, const char *why);
    /* Leader only: a rank reported; its own reports included. */
    void (*reported)(void *user, int rank, const struct r2_agree_report *report);
    /* All ranks have offered something for `round` (r2_agree_offer): offers[r], len[r], valid
     * during the call. */
    void (*exchanged)(void *user, uint32_t round, const void *const *offers, const size_t *len);
    /* The leader asks for offers of the first round (r2_agree_invite); maybe several times. */
    void (*invited)(void *user);
    /* NCCL has failed at another rank with `error` (r2_agree_tell); at most once, also after an
     * abort. */
    void (*failed)(void *user, int rank, uint32_t error);
};

struct r2_agree_config {
    const uint8_t *id; /* R2_AGREE_ID bytes; not signed or NULL: no plan changes */
    int rank, nranks;
    uint64_t node;       /* equal for ranks on one host, and only for those */
    uint64_t settings;   /* hash of whatever must be equal on all ranks */
    uint64_t timeout_ns; /* longest wait of lookup; 0: agree_timeout_ns of the settings */
    const char *name;    /* for messages; copied */
    const struct r2_agree_ops *ops; /* not copied */
    void *user;
};

/* 0 and *out, -EINVAL (rank, nranks) or -ENOMEM. Cheap: no thread, no socket. */
int r2_agree_create(struct r2_agree **out, const struct r2_agree_config *config);

/* A child of `parent`: every rank that takes part in the split or shrink calls it, in the same
 * order of such calls as its peers. `salt` is what tells this child from others of the same call
 * (color of a split, hash of a shrink's excluded ranks). config->id is not read. With out == NULL
 * the call is only counted (NCCL_SPLIT_NOCOLOR). */
int r2_agree_derive(struct r2_agree **out, struct r2_agree *parent, uint64_t salt,
                    const struct r2_agree_config *config);

/* The plan of the next collective. */
struct r2_agree_view {
    uint64_t index; /* of that collective, from 0 */
    uint64_t epoch; /* of the plan; 0: none, stock NCCL */
    uint64_t at;    /* index from which the plan holds */
    void *object;   /* from accept; valid until the next lookup or destroy of this r2_agree */
};

/* Which plan holds for the next collective. Does not count it. Waits only if this rank has promised
 * a plan for this index or an earlier one and its fate is not known. It then waits for at most the
 * timeout. `eligible`: this operation could run a plan; the first such call starts registration. 0;
 * -ETIMEDOUT: nobody could tell, the communicator has failed for good and every later lookup
 * returns the same; -EREMOTEIO: another rank has told of its error, for good as well; -ECANCELED:
 * r2_agree_abort. Cost without a change under way: two loads. */
int r2_agree_lookup(struct r2_agree *a, bool eligible, struct r2_agree_view *view);

/* Counts `n` collectives that NCCL has taken: captured, zero-count and single-rank ones too. Those
 * of a group take the plan of its first: one lookup, then advance by all of them. */
void r2_agree_advance(struct r2_agree *a, uint64_t n);

/* Leader only (rank 0), asynchronous: `plan` (copied) is to hold from an index that is chosen far
 * enough ahead. The answer comes by ops->decided. 0; -EAGAIN: not ready, or registration is
 * incomplete; -EBUSY: one is under way, or the last is not yet in force here; -EPERM: not the
 * leader; -E2BIG; -ENOMEM; -EIO: the communicator has failed. */
int r2_agree_propose(struct r2_agree *a, const void *plan, size_t len);
/* Of the next collective; for the thread that calls lookup. */
uint64_t r2_agree_index(const struct r2_agree *a);

/* Tells the leader this node's bandwidth; the last one counts. 0, -EAGAIN before ready. */
int r2_agree_report(struct r2_agree *a, const struct r2_agree_report *report);

/* An exchange: every rank offers `data` (copied, at most R2_AGREE_OFFER bytes) for a round (1, 2,
 * ...). When all have, ops->exchanged gives each rank all offers, the same everywhere. A round is
 * offered once, after the one before was exchanged. 0; -EAGAIN before ready; -EINVAL: not this
 * round's turn; -E2BIG; -ENOMEM. */
int r2_agree_offer(struct r2_agree *a, uint32_t round, const void *data, size_t len);

/* Leader only: all ranks, this one too, shall offer something for the first round: they hear it by
 * ops->invited. 0; -EAGAIN before ready; -EPERM: not the leader. */
int r2_agree_invite(struct r2_agree *a);

/* NCCL has failed at this rank with `error` (an ncclResult_t, not 0). The leader tells the other
 * ranks. This rank does, if it has no connection to the leader or gets no answer within 30 to 45
 * ms. The first error counts. A process may end with its error. So this waits, 200 ms at most,
 * until the leader has answered, or the kernel has the word to everybody that can be reached. 0,
 * also where nobody is left to be told. -ENOTCONN: not so yet; that goes on while the process
 * lives. */
int r2_agree_tell(struct r2_agree *a, uint32_t error);

/* Wakes the waiting lookup; this one and later ones return -ECANCELED. Idempotent, never waits. */
void r2_agree_abort(struct r2_agree *a);

/* Ends it. Returns when no callback of it runs any more and no lookup waits. What was decided can
 * still be asked by its peers for a while. NULL is allowed. */
void r2_agree_destroy(struct r2_agree *a);

enum r2_agree_state {
    R2_AGREE_OFF,     /* no plan changes, see why */
    R2_AGREE_IDLE,    /* no eligible operation yet */
    R2_AGREE_JOINING, /* registering */
    R2_AGREE_READY,
    R2_AGREE_FAILED, /* timed out, aborted */
};

struct r2_agree_stats {
    enum r2_agree_state state;
    uint64_t index;                       /* collectives counted */
    uint64_t epoch, at;                   /* plan in force here */
    uint64_t proposals, commits, aborts;  /* leader */
    uint64_t sent, received;              /* messages of this rank */
    uint64_t waits, wait_ns, wait_max_ns; /* of lookup */
    uint64_t commit_ns;                   /* leader: proposal to commit, the last one */
    uint64_t promised;                    /* epoch of a promise whose fate is not known; 0: none */
    bool waiting;                         /* a lookup waits for it */
    char why[R2_AGREE_WHY];               /* OFF, FAILED; "" otherwise */
};

void r2_agree_get_stats(struct r2_agree *a, struct r2_agree_stats *out);

#endif
