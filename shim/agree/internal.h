/* What the files of shim/agree share. agree.c is the application's side (create, lookup, abort).
 * thread.c is the service thread, service.c what it shares. member.c and ask.c are what it does for
 * one rank, rendezvous.c for the ranks of ids that this process has signed.
 *
 * Locks: service lock (members, signed ids, dirty list) and one lock per member; neither is held
 * while the other is taken, nor over a callback or a system call that blocks. Both are leaves.
 */
#ifndef R2_AGREE_INTERNAL_H
#define R2_AGREE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "agree/agree.h"
#include "agree/horizon.h"
#include "agree/machine.h"
#include "agree/net.h"
#include "agree/wire.h"
#include "util/list.h"

/* How often a host says that nobody listens where a process did, before that one counts as dead. A
 * process that is stopped is not refused; a host or network that is gone does not answer. */
#define R2_AGREE_REFUSALS 2

/* Pending, promised, in force, and one to spare. */
#define R2_AGREE_OBJECTS (R2_AGREE_PENDING + 3)

/* What accept made of an epoch's plan. */
struct r2_agree_object {
    uint64_t epoch;
    void *object;
};

enum r2_agree_phase { R2_PHASE_NONE, R2_PHASE_WATCH, R2_PHASE_PROPOSED };

/* The application's end of it; never goes back. */
enum r2_agree_life {
    R2_LIFE_ON,
    R2_LIFE_ABORTED, /* nothing is looked up or proposed any more */
    R2_LIFE_DYING,   /* being destroyed: the service thread shall bury it */
    R2_LIFE_GONE,    /* buried: no callback runs any more */
};

struct r2_agree {
    /* constant */
    uint8_t token[R2_AGREE_TOKEN], family[R2_AGREE_TOKEN];
    struct r2_agree_addr root;
    uint64_t key; /* in the service's table */
    int rank, nranks;
    uint64_t node, settings, timeout_ns;
    char name[64];
    const struct r2_agree_ops *ops;
    void *user;

    /* The application's thread and the service's meet here without a lock: see agree.c. */
    _Atomic uint64_t next;  /* index of the next collective; the application's thread writes */
    _Atomic uint64_t fence; /* from this index on, lookup takes the lock */

    /* the application's thread */
    bool started;
    struct r2_agree_slot force;
    void *object;
    _Atomic uint64_t children; /* derivations so far */
    atomic_bool known;         /* to the service thread */
    _Atomic uint64_t sent;     /* messages */

    /* member lock */
    pthread_mutex_t lock;
    pthread_cond_t wake;
    enum r2_agree_state state;
    char why[R2_AGREE_WHY];
    struct r2_agree_machine machine;
    struct r2_agree_object objects[R2_AGREE_OBJECTS];
    int nobjects;
    void **garbage; /* to be released by the service thread */
    int ngarbage, garbage_room;
    enum r2_agree_life life;
    uint64_t waiting_since; /* a lookup waits; 0: none does */
    uint8_t *wanted;        /* a plan to be proposed */
    size_t wanted_len;
    enum r2_agree_phase phase; /* of the proposal under way; the service thread alone writes */
    struct r2_agree_report report;
    bool report_new;
    struct r2_agree_offer {
        uint32_t round; /* offered last; 0: none */
        bool open;      /* it was not exchanged yet */
        uint8_t *data;  /* the frame's payload */
        size_t len;
    } offer;
    bool inviting;  /* the leader invites to the first round: no operation waits for it */
    uint32_t error; /* NCCL's, at this rank; 0: none */
    bool error_said;
    int tellers; /* threads in r2_agree_tell */
    bool told;   /* of another rank's: nothing is looked up any more */
    struct r2_agree_stats stats;

    /* service lock */
    struct r2_list node_all;
    struct r2_list node_dirty; /* in no list: not dirty */

    /* service thread */
    struct r2_agree_roster roster;
    uint64_t deadline_ns; /* look at it again then; UINT64_MAX: only when told */
    uint64_t register_ns, register_wait_ns, joining_ns;
    int root_refused; /* how often its host said that nobody listens */
    bool said_off;
    uint64_t destroyed_ns; /* when it was destroyed; 0: it lives */
    uint64_t report_number;
    uint64_t *report_seen;            /* leader: last number of each rank */
    uint64_t offer_ns, offer_wait_ns; /* say it again then */
    uint64_t invite_ns, invite_wait_ns;
    struct r2_agree_offers *offers; /* leader: what ranks have offered; NULL: nothing */
    struct r2_agree_early *early;   /* leader: [nranks], until it has the roster; NULL: none */
    uint8_t *plan;                  /* of the proposal under way */
    size_t plan_len;
    uint64_t phase_ns, repeat_ns;
    int tries;
    struct r2_agree_horizon horizon;
    uint64_t ask_ns, ask_wait_ns; /* next question about the open promise */
    int ask_width, ask_at;        /* ranks that the last question went to; where the next begins */
    uint64_t leader_heard_ns;
    struct r2_agree_failure failure; /* the first that this rank knows of; error 0: none */
    bool failure_heard;              /* another rank has told of one, or the leader has answered */
    bool failure_sent;               /* at least one other rank has been told */
    int failure_rounds;              /* how often this rank has told all others */
    uint64_t tell_ns;                /* tell all others (again) then; UINT64_MAX: no need */
};

/* Member lock held. An abort of what is being destroyed leaves it so. */
static inline void r2_agree_live(struct r2_agree *a, enum r2_agree_life next)
{
    a->life = next > a->life ? next : a->life;
}

/* --- service.c ---------------------------------------------------------------------------- */

extern atomic_bool r2_agree_inert; /* in a forked child */

/* Opens the listener once; the address and process id of this process. */
int r2_agree_service_listen(struct r2_agree_addr *addr, char *why, size_t whylen);
/* This process answers for the communicators of `token`. */
int r2_agree_service_sign(const uint8_t token[R2_AGREE_TOKEN]);
bool r2_agree_service_signed(const uint8_t token[R2_AGREE_TOKEN]);
/* The thread shall look at it. Any thread, no lock held. */
void r2_agree_service_kick(struct r2_agree *a);
/* Key of a rank in the service's table. */
uint64_t r2_agree_key(const uint8_t token[R2_AGREE_TOKEN], uint32_t rank);
/* Service thread: the member, or NULL. It stays until the thread frees it itself. */
struct r2_agree *r2_agree_service_find(const uint8_t token[R2_AGREE_TOKEN], uint32_t rank);
/* Service thread: takes it out of the tables. */
void r2_agree_service_remove(struct r2_agree *a);
/* Service thread: sends to the process (or, NULL, to whoever listens at addr); to itself through
 * a queue. */
void r2_agree_service_send(const uint8_t *process, const struct r2_agree_addr *addr,
                           const struct r2_agree_frame *f, const void *first, size_t first_len,
                           const void *second);
/* What became of what was sent there last. */
enum r2_agree_way r2_agree_service_way(const uint8_t process[16], const struct r2_agree_addr *addr);
uint64_t r2_agree_service_now(void);

/* --- thread.c ----------------------------------------------------------------------------- */

/* Adds the member and starts the thread. 0, -EEXIST, -ENOMEM, -EAGAIN (no thread). */
int r2_agree_service_add(struct r2_agree *a);

/* --- member.c (service thread) ------------------------------------------------------------ */

void r2_agree_member_turn(struct r2_agree *a, uint64_t now);
void r2_agree_member_frame(struct r2_agree *a, const uint8_t process[16],
                           const struct r2_agree_frame *f, const uint8_t *payload);
/* Nobody listens at this address. */
void r2_agree_member_refused(struct r2_agree *a, const struct r2_agree_addr *addr, uint64_t now);
/* The connection to this process broke. */
void r2_agree_member_lost(struct r2_agree *a, const uint8_t process[16]);

void r2_agree_member_free(struct r2_agree *a);

/* --- say.c (service thread) --------------------------------------------------------------- */

/* Recomputes the fence from the machine; member lock held. */
void r2_agree_member_fence(struct r2_agree *a);
/* Sends the machine's message; with a proposal goes the plan. */
void r2_agree_member_say(struct r2_agree *a, uint32_t rank, const struct r2_agree_msg *msg);
/* Sends to a rank of the roster (nothing before it is there), to the rendezvous. */
void r2_agree_member_send(struct r2_agree *a, uint32_t rank, enum r2_agree_kind kind,
                          const void *first, size_t first_len, const void *second,
                          size_t second_len);
/* The way to a rank of the roster; R2_WAY_NONE before it is there. */
enum r2_agree_way r2_agree_member_way(struct r2_agree *a, uint32_t rank);
void r2_agree_member_to_root(struct r2_agree *a, enum r2_agree_kind kind, const void *payload,
                             size_t len);

/* --- objects.c --------------------------------------------------------------------------- */

/* To be given back; NULL is allowed. Member lock held. */
void r2_agree_member_discard(struct r2_agree *a, void *object);
/* Forgets the object of an epoch, or (before) of all epochs below it, except `keep`; it will be
 * released by the service thread. Member lock held. */
void r2_agree_member_drop(struct r2_agree *a, uint64_t epoch, bool before, uint64_t keep);
/* Gives back what was forgotten. Service thread, no lock held. */
void r2_agree_member_collect(struct r2_agree *a);

/* --- ask.c (service thread) --------------------------------------------------------------- */

/* The rank has promised. */
void r2_agree_ask_begin(struct r2_agree *a, uint64_t now);
/* Asks what is due; sooner while the rank waits. */
void r2_agree_ask_turn(struct r2_agree *a, uint64_t now);

/* --- join.c (service thread) -------------------------------------------------------------- */

void r2_agree_join_register(struct r2_agree *a, uint64_t now);
void r2_agree_join_roster(struct r2_agree *a, const struct r2_agree_frame *f,
                          const uint8_t *payload);
void r2_agree_join_off(struct r2_agree *a, const struct r2_agree_frame *f, const uint8_t *payload);
void r2_agree_join_report(struct r2_agree *a);
/* Leader: a report from a process that has the roster before this one has. */
void r2_agree_join_early(struct r2_agree *a, const uint8_t process[16],
                         const struct r2_agree_frame *f, const uint8_t *payload);
void r2_agree_join_reported(struct r2_agree *a, uint32_t from, const struct r2_agree_frame *f,
                            const uint8_t *payload);
/* A rank speaks from the process that registered it: one started again is no member. */
bool r2_agree_join_knows(const struct r2_agree *a, uint32_t rank, const uint8_t process[16]);

/* --- exchange.c (service thread) ---------------------------------------------------------- */

void r2_agree_exchange_turn(struct r2_agree *a, uint64_t now);
/* INVITE, OFFER, OFFERS: from a rank of the roster. */
void r2_agree_exchange_frame(struct r2_agree *a, const struct r2_agree_frame *f,
                             const uint8_t *payload);
/* Nobody listens at this address. Where a rank does whose offer, or whose answer, is awaited, the
 * exchange will never end. */
void r2_agree_exchange_refused(struct r2_agree *a, const struct r2_agree_addr *addr, uint64_t now);
void r2_agree_exchange_free(struct r2_agree *a);

/* --- tell.c (service thread) -------------------------------------------------------------- */

void r2_agree_tell_turn(struct r2_agree *a, uint64_t now);
void r2_agree_tell_frame(struct r2_agree *a, const struct r2_agree_frame *f, const uint8_t *payload,
                         uint64_t now);
/* The process of `rank` has ended before its time. */
void r2_agree_tell_gone(struct r2_agree *a, uint32_t rank, uint64_t now);

/* --- rendezvous.c (service thread) -------------------------------------------------------- */

/* A REGISTER or LEAVE. False: from somebody who does not know the token. */
bool r2_agree_rendezvous_frame(const struct r2_agree_hello *from, const struct r2_agree_frame *f,
                               const uint8_t *payload, uint64_t now);
void r2_agree_rendezvous_lost(const uint8_t process[16]);
/* Tells who has registered, late, which ranks are missing. Returns when to call again. */
uint64_t r2_agree_rendezvous_turn(uint64_t now);

#endif
