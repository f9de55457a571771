/* Whether a peer's process still exists, when no path leads to it any more: what refusals say, and
 * the questions of the accepting side, which makes no attempts of its own.
 *
 * Units: nanoseconds. Everything here is under the peer's lock. */
#ifndef R2_ENGINE_LOOP_LIVENESS_H
#define R2_ENGINE_LOOP_LIVENESS_H

/* One for each local NIC, then R2_MAX_NICS more, by local NIC, that get more time. */
#define R2_QUESTIONS (2 * R2_MAX_NICS)
/* Between two refusals: the former is forgotten. */
#define R2_REFUSAL_STALE_NS (5 * R2_NS_PER_S)

/* R */
struct r2_question {
    struct r2_ep *ep;            /* the one that is out; NULL: none */
    struct r2_dying *end_memory; /* as r2_path.end_memory */
    uint64_t at;                 /* when it was asked */
    uint64_t patience;           /* for the peer's kernel */
    unsigned asked;              /* ever */
};

/* Part of a peer. */
struct r2_liveness {
    struct r2_question by[R2_QUESTIONS]; /* R */
    uint64_t next_at;                    /* R: no question before */
    unsigned turn;                       /* R: local NIC of the next one */
    unsigned nic_asked[R2_MAX_NICS];     /* R: by the peer's NIC: how often since one was patient */
    uint64_t refused_from, refused_at;   /* the first and the latest refusal that count; 0: none */
    /* By the peer's NIC: its first and its latest one among them; 0: none. */
    uint64_t nic_refused_from[R2_MAX_NICS], nic_refused_at[R2_MAX_NICS];
    uint64_t taken_at[R2_MAX_NICS]; /* by the peer's NIC: when its kernel was last seen to have
                                       taken a connection that nobody had answered; 0: not */
    uint64_t lost_at;               /* when the last path to it was lost; 0: none was up */
};

struct r2_peer;
struct r2_path;
struct r2_ep_health;

/* With no path up: ends the peer (r2_peer_gone) if what was refused proves that its process is. */
void r2_peer_judge_refusals(struct r2_peer *p, uint64_t now);
/* R: gives questions up that had their time; with no path left asks the next one. */
void r2_peer_ask(struct r2_peer *p, uint64_t now);
/* R: a question is over, unless it was given up before. */
void r2_peer_asked(struct r2_peer *p, struct r2_ep *ep, int err, const struct r2_ep_health *h);
/* Its process has answered, to an attempt or question that began at `asked`, that it has given this
 * one up: ends the peer, if that is about the connections there are. */
void r2_peer_given_up(struct r2_peer *p, uint64_t asked);
/* Whether this NIC is worth an attempt or a question. FAILED: probing goes on. The last one is
 * never damped. */
bool r2_peer_may_try(const struct r2_peer *p, int lnic);
/* R: questions are out. */
bool r2_peer_is_asking(const struct r2_peer *p);
/* The last reference is gone. */
void r2_liveness_free(struct r2_liveness *a);

#endif
