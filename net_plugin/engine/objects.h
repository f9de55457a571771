/* The engine's objects, private to engine/. peer/peer.h says which lock guards what.
 *
 * A peer is one other process in one direction: towards an `out` peer we connect and send bulk
 * data, from an `in` peer we accept and receive. Two processes that send to each other are two
 * peers on each side, with paths of their own: that is why one side alone allots generations.
 */
#ifndef R2_ENGINE_OBJECTS_H
#define R2_ENGINE_OBJECTS_H

#include <pthread.h>
#include <stdatomic.h>

#include "control/control.h"
#include "engine/core/colltimes.h"
#include "engine/core/damp.h"
#include "engine/core/grey.h"
#include "engine/core/health.h"
#include "engine/core/lanes.h"
#include "engine/core/ledger.h"
#include "engine/core/nicmachines.h"
#include "engine/core/pathrate.h"
#include "engine/core/pathstate.h"
#include "engine/core/trial.h"
#include "engine/core/weights.h"
#include "engine/engine.h"
#include "io/fault.h"
#include "io/io.h"
#include "oob/wire.h"
#include "settings/settings.h"
#include "topology/linkwatch.h"
#include "topology/local.h"
#include "transport/transport.h"
#include "util/clock.h"
#include "util/hash.h"
#include "util/mem.h"

#define R2_PATHS_VIA 64 /* of each transport, to one peer: engine/path/pairs.c */
#define R2_PATHS_MAX (R2_PATHS_VIA * R2_VIA_COUNT)
_Static_assert(R2_PATHS_VIA <= R2_WIRE_MAX_LANES, "CLOSE names each one-sided path that wrote");
#define R2_LANES_MAX 32 /* bulk lanes of an endpoint */
#define R2_WINDOW 64    /* messages of a connection between the oldest unfinished and the newest */
#define R2_EAGER_AHEAD 16 /* eager messages the receiver stashes per connection */
#define R2_ENDED 64       /* connections whose end is remembered */
#define R2_TICK_NS (25 * R2_NS_PER_MS)

struct r2_peer;

/* What paths tell about the NICs that they use. */
enum r2_census {
    R2_CENSUS_NONE,
    R2_CENSUS_IN,  /* it answers, and the peer sends over it */
    R2_CENSUS_OUT, /* it answers, and this side sends over it */
    R2_CENSUS_LOST,
    R2_CENSUSES
};

/* S: what the job waits for on a path, when the path was last asked. */
enum r2_flow_wait {
    R2_FLOW_DATA, /* the sender, or another path */
    R2_FLOW_NICS, /* the path had no room: it and all others are too slow for what waits */
};

#define R2_OUT_NOW 1 /* r2_path.outbox.due */

struct r2_path {
    struct r2_peer *peer;
    uint16_t index;     /* in peer->paths; what the ledger calls `path` */
    uint8_t lnic, rnic; /* local NIC, the peer's NIC */
    uint8_t transport;  /* enum r2_transport_id: part of the path's identity */

    uint32_t gen; /* newest allotted (S) or accepted (R) */
    enum r2_path_state state;
    enum r2_path_intro intro;
    struct r2_ep *ep; /* of generation `gen`; NULL unless CONNECTING or up */
    enum r2_path_past past;
    enum r2_path_role role;
    struct r2_health health;
    struct r2_damp damp;
    uint64_t drain_at;
    enum r2_census counted; /* in r2_eng.nic_state */

    struct {
        int fails; /* in a row */
        int err;   /* of the latest end */
        uint64_t at, next_at;
        uint64_t
            refused_from; /* S: since then a host answers that the process is not there; or 0 */
        uint16_t packet;  /* S: largest packet that is asked for; 0: as large as the NIC takes */
        struct r2_dying *end_memory; /* for the endpoint: memory that is there when it has to end */
    } attempt;

    struct {
        uint32_t gen;    /* everything up to it is dead */
        uint32_t fenced; /* ... and fenced at the receiver */
        uint32_t shut;   /* R: newest whose end is confirmed; an older one's may not be yet */
        uint64_t at;     /* since when a path that was proven is not; 0: it is, or never was */
        uint64_t said_at;
        int blame; /* errno of an end whose NIC is to be found (R2_TODO_BLAME); 0: none */
    } down;

    struct {                      /* test chunks of this generation, in bytes */
        uint32_t out, want, done; /* S: handed out; R: arrived */
        uint8_t quota;            /* S: chunks of each bulk lane */
        uint8_t lost;             /* S: tests in a row that were not answered in time */
        uint8_t took[R2_LANES_MAX];
        uint64_t at;
    } test;

    struct {           /* frames */
        uint8_t *data; /* not yet taken by the transport */
        size_t len, off, cap;
        uint64_t total;        /* bytes ever taken by the transport, of this endpoint */
        uint64_t said;         /* ... that it has said to be on their way (ctrl_sent) */
        struct r2_list flushq; /* connections whose acknowledgement waits for the kernel */
        /* When the transport is asked to take them: 0: it was; R2_OUT_NOW: when the peer's lock is
         * given up; else then: until that time they wait for others to go along with. */
        uint64_t due;
        uint64_t last_post; /* when a flush of its frames was last asked for that could wait */
        unsigned kick_wanted;
    } outbox;

    struct r2_pathrate rate;
    uint64_t inflight_told, rate_told; /* its parts of r2_eng.inflight and .rates */
    struct r2_share share;             /* weight, and what it took lately */
    struct r2_grey watch;              /* S: is it slow or lossy against its siblings */
    struct {                           /* as its kernel counts them */
        uint64_t seen, resent_seen;    /* of this generation, at the last look */
        uint64_t all, resent;
    } segments;
    struct r2_trial trial;
    struct r2_lanes lanes; /* S: how many of its streams carry */

    struct {
        uint16_t grey;       /* factor of the weight, per mille */
        uint32_t beside;     /* r2_grey_beside, as its NIC's counts have it */
        uint64_t chunk_at;   /* S: when it last took a chunk */
        uint64_t busy_until; /* S: bytes that arrived another way may still be in its sockets */
        enum r2_flow_wait waits_for;
    } flow;

    struct { /* heartbeats */
        enum r2_beat_state state;
        int unanswered;
        uint64_t at, sent_at, proven_at; /* last look; sent; the last answered was */
        /* S: `delivered` + 1 when it was asked early; that count, and since when it stands. */
        uint64_t asked_for, delivered, quiet_from;
        uint64_t given_at, used_at; /* the latest frame; when a look last found any */
        uint64_t rtt_ns, rttvar_ns; /* the network's, as the transport measures it */
    } hb;

    struct {
        uint64_t tx_bytes, rx_bytes, replayed;
    } sum;

    struct {              /* what operators were last shown */
        bool weighed;     /* an event about its weight is in the journal */
        char verdict[80]; /* why it is down, once that is known (engine/locate) */
        int row;
    } shown;
};

static inline bool r2_path_is_up(const struct r2_path *path)
{
    return path->state == R2_PATH_TESTING || path->state == R2_PATH_PROVEN;
}

/* It writes into the peer's memory by itself. */
static inline bool r2_path_one_sided(const struct r2_path *path)
{
    return path->transport != R2_VIA_TCP;
}

/* An endpoint that is to be shut by the peer's task. It stays in the list, and reachable for
 * r2_peer_eps, until nothing of it moves. */
struct r2_dying {
    struct r2_list node;
    struct r2_ep *ep;
    struct r2_path *path; /* NULL: a probe */
    uint32_t gen;         /* of the endpoint itself */
    uint32_t upto;  /* what its end confirms: attempts after it that never came are over too */
    uint64_t since; /* the transport has not confirmed the end since then; 0: not asked yet */
};

struct r2_rnic {
    bool known;
    uint8_t word;               /* enum r2_nic_word */
    uint16_t weight;            /* per mille, as the peer says */
    uint8_t forgiven;           /* the peer's count */
    struct r2_wire_addr addr;   /* by which all know it */
    struct r2_wire_addr second; /* of the other family, for a NIC that needs it; family 0: none */
    char name[R2_WIRE_NAME];
};

enum r2_peer_life {
    R2_PEER_ALIVE,
    R2_PEER_GONE,
    R2_PEER_FORGOTTEN, /* ... and off the list: the next call makes a new one */
};

/* Whether paths live have to be told everything again (r2_peer_resync). */
enum r2_resync {
    R2_RESYNC_NONE,
    R2_RESYNC_WANTED,
    R2_RESYNC_ACKS, /* R: ... acknowledgements first: memory was short for one */
};

/* S: what sockets are for where queue pairs can be had. */
enum r2_tcp_for {
    R2_TCP_BESIDE, /* NICs that have no queue pairs; others stand by */
    R2_TCP_LATE,   /* all, until queue pairs come up: they took too long */
    R2_TCP_ALWAYS, /* all: some memory has no other way */
};

/* What follows from a change. Who makes the change notes it under the peer's lock, in r2_peer.todo;
 * the layers above carry it out before the lock is given up (r2_peer_unlock, r2_peer_leave). */
enum r2_todo {
    R2_TODO_WEIGH = 1, /* weights of its paths are to be counted anew */
    R2_TODO_KICK = 2,  /* there is work for bulk lanes */
    R2_TODO_BLAME = 4, /* paths have failed (r2_path.blame): which NIC is at fault? */
};

/* What layers above do for those below; set once, before the first peer is made. */
struct r2_upper {
    void (*began)(struct r2_peer *p);     /* a new one, nobody else has it yet: task and timers */
    void (*ended)(struct r2_peer *p);     /* the last reference is gone */
    void (*carry_out)(struct r2_peer *p); /* what is noted in `todo`; under the lock */
    void (*nic_changed)(int nic);         /* peers are told another word about this node's NIC */
};

/* R, part of a peer: what is queued are acknowledgements of messages that their sender has done
 * with (R2_EAGER_BUFFERED), and only those. Each would cost a call to send in which the next
 * message waits. */
struct r2_ack_delay {
    struct r2_timer timer;
    bool armed; /* ... and nobody stops it: it holds a reference to the peer until it has fired */
    bool hurry; /* acknowledgements that may not wait are queued, too */
    unsigned late; /* messages since the last acknowledgement was sent */
};

/* Part of a peer: what it has heard about our NICs (path/nicnews.c). Times in ns. */
struct r2_nicnews {
    uint32_t heard;     /* the newest number that the peer has heard */
    uint64_t due, wait; /* when what is open is said again; how long it waited for that */
    unsigned turn;      /* of the path that the next repetition takes */
};

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

/* Part of a peer: whether its process still exists, when no path leads to it any more
 * (loop/liveness.c). Times in ns. */
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

/* Part of a peer: which NICs its bytes that any NIC may take leave to other peers (sched/leave.c).
 */
struct r2_leaves {
    atomic_ullong bytes;   /* S: such bytes, ever */
    atomic_uint nics;      /* S: bits: NICs that reach it */
    atomic_uint leaves;    /* bits: those of them that it leaves */
    uint64_t seen, lately; /* of the bytes; r2_eng.lock */
};

struct r2_peer {
    pthread_mutex_t lock;
    atomic_int refs;
    struct r2_list node;     /* r2_eng.peers; holds a reference */
    atomic_ulong recheck_at; /* when what was left is looked at again (recheck.c); 0: nothing was */
    atomic_ulong help_at;    /* as a connection's, where all threads are awake */
    uint64_t now;            /* r2_peer_now, until the lock is given up; 0: not read yet */
    unsigned todo;           /* enum r2_todo */
    uint8_t id[16], secret[16];
    bool out;
    char host[64];
    uint32_t pid, rank;     /* rank: in the job, plus 1; 0: not known */
    bool p2pchunk_told;     /* r2_p2pchunk_heard */
    enum r2_peer_life life; /* FORGOTTEN is written under r2_eng.lock, too */
    int error;              /* -errno for its connections once GONE */

    int n_rnics;
    struct r2_rnic rnics[R2_MAX_NICS];
    uint32_t info;                 /* number of the newest INFO that was heard */
    uint16_t reached[R2_MAX_NICS]; /* by local NIC: bits of the peer's NICs ever reached from it */
    int n_paths, n_up;
    struct r2_path *paths[R2_PATHS_MAX];
    struct r2_share_set shares; /* of the paths that take chunks */
    struct r2_leaves leave;
    uint64_t shares_aged;
    uint64_t
        rtt_most; /* the longest round trip of a path that carries frames that are waited for */
    struct r2_list dying;
    enum r2_tcp_for tcp_for;
    struct r2_liveness liveness; /* whether the silent process still exists */
    struct r2_nicnews nicnews;   /* about NICs, until they are heard */
    uint64_t
        ended[R2_ENDED]; /* R: connections that are over, the latest of them; no id comes twice */
    unsigned n_ended;    /* ever */

    struct r2_hash conns;
    struct r2_list conn_list;
    struct r2_list ready; /* S: connections with bytes to send */
    struct r2_list ackq;  /* R: connections with acknowledgements to send */
    struct r2_ack_delay ack_delay;
    int active;                 /* requests in flight */
    atomic_ulong limited_until; /* slow NICs are what it is waited for (slownics.c); a hint */
    atomic_ulong held_until; /* of its paths, the earliest, or earlier; a hint without the lock */
    int opening;             /* connections not yet acknowledged */
    enum r2_resync resync;
    uint64_t no_path_since; /* since when no proven path is up; 0: one is, or none was missed */
    uint64_t doubt_since;   /* ... before paths were proven that have delivered nothing yet; or 0 */
    uint64_t idle_since;
    uint64_t tail_tokens, tail_at; /* S: bytes that may be sent twice */
    uint64_t resume_from; /* S: when the path failed whose bytes are being replayed; 0: none */
    bool resume_idle;
    uint64_t last_tick;
    int hb_active, hb_idle; /* paths counted for the limit of heartbeats */
    uint64_t hb_interval, hb_calm_interval, hb_doubt_until;
    uint64_t suspect_since, refresh_at; /* since when every path is silent; 0: some answers */
    struct {                            /* what operators were last shown */
        uint64_t connections, heard, noway;
    } shown;

    struct r2_io *io;
    struct r2_task task;
    struct r2_timer timer;
    int row;
};

/* All of the peer's paths, in the order of their index. */
#define R2_FOR_EACH_PATH(path, p)                                                                  \
    for (struct r2_path *const *path##_at = (p)->paths, *path;                                     \
         path##_at < (p)->paths + (p)->n_paths && (path = *path##_at, true); path##_at++)

/* Whether some path of the peer is so. */
#define R2_ANY_PATH(path, p, is_so)                                                                \
    ({                                                                                             \
        bool path##_found = false;                                                                 \
        R2_FOR_EACH_PATH (path, p) {                                                               \
            path##_found = (is_so);                                                                \
            if (path##_found)                                                                      \
                break;                                                                             \
        }                                                                                          \
        path##_found;                                                                              \
    })

/* The time of what happens while the peer's lock is held. Read once, after the lock is taken: it is
 * never before a time that an earlier holder has noted. */
uint64_t r2_peer_read_clock(struct r2_peer *p);
static inline uint64_t r2_peer_now(struct r2_peer *p)
{
    return p->now ? p->now : r2_peer_read_clock(p);
}

static inline void r2_peer_want_resync(struct r2_peer *p)
{
    p->resync = p->resync ? p->resync : R2_RESYNC_WANTED;
}

/* Longest time between two attempts over a failed path, and between probes of a failed NIC. */
#define R2_PROBE_NS (1 * R2_NS_PER_S)

enum r2_req_state { R2_REQ_FREE, R2_REQ_ACTIVE, R2_REQ_DONE, R2_REQ_FAILED };

struct r2_req {
    struct r2_conn *conn;
    atomic_int state; /* release when the engine finishes, acquire in r2_engine_test */
    int error;
    bool attached;   /* in the connection's window; ledger in use */
    bool lines;      /* R: the buffer is read before the receive is done */
    bool arrived;    /* R: all bytes in place, the acknowledgement may not have left */
    bool kept;       /* R: its clear-to-send was not said: r2_recv_say_kept */
    uint8_t *copy;   /* S: the engine's own, of a small message: engine/message/buffered.c */
    bool done_early; /* S: the application was told that it is done, before it was acknowledged */
    uint64_t seq;
    uint8_t *data;
    uint64_t size;       /* of the buffer; R: then of the message */
    uint64_t tail_bytes; /* S: sent twice */
    struct r2_mr *mr;
    uint64_t posted_at;
    struct r2_flush *flush; /* it is a flush, and owns this */
    union {
        struct r2_send_ledger send;
        struct r2_recv_ledger recv;
    } led;
};

struct r2_cts_slot {
    bool valid, device;
    uint64_t seq, size, addr;
    uint32_t keys[R2_WIRE_MAX_NICS];
};

struct r2_stash {
    bool buffered; /* R2_EAGER_BUFFERED */
    uint64_t seq;
    uint32_t size;
    uint8_t *data; /* NULL: it is free */
};

/* Chunks of a connection over the newest generation of a one-sided path that carried any. */
struct r2_conn_lane {
    uint32_t gen, chunks;
};

enum r2_conn_state {
    R2_CONN_OPENING,
    R2_CONN_OPEN,
    R2_CONN_FAILED,
    R2_CONN_CLOSING, /* its close waits for lanes and for the peer's answer: it stays until then */
    R2_CONN_CLOSED,
};

/* The peer has to learn the end, again after every loss, until it has acknowledged it. */
enum r2_conn_word { R2_WORD_NONE, R2_WORD_OWED, R2_WORD_HEARD };

/* S: closed by the application before its copies were acknowledged (buffered.c). */
enum r2_linger {
    R2_LINGER_NO,
    R2_LINGER_AWAITED, /* a process that exits waits for its end */
    R2_LINGER_LEFT,    /* ... no more */
};

/* S: which paths take the bytes that wait. */
enum r2_conn_ways {
    R2_WAYS_RULED, /* those of weight above 0, and in R2CCL_MODE=migrate of one NIC */
    R2_WAYS_ANY,   /* all that can carry them, as none of those can */
};

/* S: what the receiver was told when it took its memory back (revoke.c). R: ASKED is unused. */
enum r2_revocation {
    R2_REVOKE_NONE,
    R2_REVOKE_ASKED, /* nothing is sent any more; the answer waits for chunks under way */
    R2_REVOKE_SAID,
};

#define R2_SEQ_NONE UINT64_MAX /* r2_conn.final_seq: the other side has not closed */

#define R2_ANY_NIC 255 /* r2_conn.first: none comes first */

struct r2_conn {
    struct r2_peer *peer;    /* holds a reference; its `out`: we send */
    struct r2_list node;     /* peer->conn_list */
    struct r2_list ctx_node; /* r2_eng.lock: ctx->conns or ctx->half_made */
    struct r2_list queue;    /* listen->backlog, until accepted */
    atomic_int refs;
    uint64_t id, listen_id;
    atomic_ulong help_at; /* when NCCL's thread next looks at the sockets itself */
    uint8_t home, remote_home;
    uint8_t first; /* the NIC that chunks go over first: home, or R2_ANY_NIC */
    enum r2_conn_state state;
    int error;
    enum r2_conn_word word;
    enum r2_linger linger;
    uint64_t final_seq; /* the other side has closed: it takes part in no message from here on */
    /* One-sided paths, by r2_path.index: S: handed out, R: arrived (engine/message/revoke.c) */
    struct r2_conn_lane lanes[R2_PATHS_MAX];
    uint32_t under_way; /* S: chunks that a NIC may still read */
    enum r2_revocation revocation;
    struct r2_conn_lane said[R2_PATHS_MAX]; /* R: what the sender has handed out, by path */

    struct r2_req reqs[R2_MAX_REQUESTS];
    struct r2_req *window[R2_WINDOW]; /* by sequence number, checked against req->seq */
    uint64_t next_seq;                /* of the next isend or irecv */
    struct r2_list mrs;

    /* S */
    struct r2_list ready;   /* peer->ready */
    uint64_t waiting;       /* bytes that bulk lanes may take */
    uint64_t stuck_since;   /* r2_peer_check_stuck */
    enum r2_conn_ways ways; /* of those bytes: usable_paths.c */
    uint64_t posted;        /* receives posted by the peer: all seq below it */
    uint64_t oldest;        /* first message not acknowledged whole */
    uint64_t eager;         /* largest message sent before its clear-to-send */
    struct r2_cts_slot cts[R2_WINDOW];

    /* R */
    struct r2_list acks;  /* peer->ackq */
    uint64_t cum;         /* all messages below have arrived whole */
    uint64_t ahead;       /* bit i: message cum + i has arrived whole */
    uint64_t flushed;     /* cum as far as the kernel has the acknowledgement */
    struct r2_list flush; /* path->flushq */
    uint64_t flush_cum, flush_pos;
    uint32_t wrote[R2_MAX_NICS]; /* by NIC: how often it wrote into memory of a device ... */
    uint32_t shown[R2_MAX_NICS]; /* ... and how much of that a flush has shown
                                    (engine/message/flush.c) */
    struct r2_ack_range *ranges; /* chunks to acknowledge */
    uint32_t n_ranges, cap_ranges;
    uint16_t ack_path;
    uint32_t peer_eager; /* the sender sends messages up to this size before their clear-to-send */
    uint64_t cts_sent;   /* clear-to-send was said for all messages below */
    unsigned small;      /* messages that came before their clear-to-send, in a row */
    struct r2_stash stash[R2_EAGER_AHEAD];
};

static inline bool r2_conn_is_left(const struct r2_conn *c)
{
    return c->final_seq != R2_SEQ_NONE;
}

/* The peer's connections; those with bytes to send. The body ends none of them, but for _SAFE:
 * there it may end the one at hand. */
#define R2_FOR_EACH_CONN(c, p) R2_LIST_EACH (c, struct r2_conn, node, &(p)->conn_list)
#define R2_FOR_EACH_CONN_SAFE(c, p) R2_LIST_EACH_SAFE (c, struct r2_conn, node, &(p)->conn_list)
#define R2_FOR_EACH_READY(c, p) R2_LIST_EACH (c, struct r2_conn, ready, &(p)->ready)

static inline struct r2_req *r2_conn_req(const struct r2_conn *c, uint64_t seq)
{
    struct r2_req *r = c->window[seq % R2_WINDOW];

    return r && r->seq == seq ? r : NULL;
}

static inline struct r2_req *r2_req_from(const struct r2_conn *c, uint64_t seq)
{
    for (; seq < c->next_seq; seq++) {
        struct r2_req *r = r2_conn_req(c, seq);

        if (r)
            return r;
    }
    return NULL;
}

/* The connection's messages that are not over, in their order. The body may end the one at hand. */
#define R2_FOR_EACH_REQ(r, c)                                                                      \
    for (struct r2_req *r = r2_req_from(c, (c)->oldest); r; r = r2_req_from(c, r->seq + 1))

struct r2_mr {
    struct r2_list node; /* conn->mrs */
    uint8_t *data;
    size_t size;
    bool device; /* no thread may touch it */
    struct r2_mr_keys *keys;
};

struct r2_ctx {
    struct r2_list node;      /* all that were made */
    struct r2_list conns;     /* the application's */
    struct r2_list half_made; /* S: r2_engine_connect has not returned them, nor looks at them */
    struct r2_list listens;
};

struct r2_listen {
    struct r2_list node; /* r2_eng.listens */
    struct r2_list ctx_node;
    struct r2_ctx *ctx;
    uint64_t id;
    int dev;
    struct r2_list backlog; /* connections waiting for accept; r2_eng.lock */
};

/* r2_eng.nic_lock guards what is not atomic, and changes of `place`; I/O thread 0 alone changes it,
 * but for verdicts. */
struct r2_nic_state {
    atomic_uchar place; /* enum r2_place */
    atomic_uchar reach; /* enum r2_nicreach */
    atomic_int telling; /* threads that tell what has changed: no news before they are done */
    struct r2_health health;
    struct r2_damp damp;
    uint64_t alone_at; /* since when none of its paths answers, while others do; 0: not so */
    uint64_t shown_at; /* when the penalty was last shown */
    uint64_t drain_from;
    atomic_int census[R2_CENSUSES];
    atomic_uchar forgiven; /* how often this one's did, for the peers */
    atomic_uchar word;     /* enum r2_nic_word */
    atomic_uint weight;    /* per mille: the topology's, then the operator's */
    int row;
};

struct r2_engine {
    pthread_mutex_t lock;     /* peers, listens, contexts, backlogs */
    pthread_mutex_t nic_lock; /* nic_state; a leaf */
    bool inited, started;
    atomic_bool inert; /* a forked child: does nothing */
    pid_t pid;         /* whose threads these are: a child of _Fork does not know that it is one */
    const struct r2_settings *set;
    const struct r2_transport_ops *ops;
    const struct r2_upper *upper;
    uint8_t process[16], secret[16];
    char host[64];
    struct r2_nic_state nic_state[R2_MAX_NICS];
    atomic_uint news; /* grows after each change of what peers are told about NICs: who reads it
                       * first never gives old word the newest number */
    uint8_t near[R2_MAX_NICS][R2_MAX_NICS]; /* [home][NIC]: its place in r2_nics_order */
    atomic_ullong inflight[R2_MAX_NICS];    /* bytes, over the NIC to all peers */
    atomic_ullong rates[R2_MAX_NICS];       /* bytes per second, of its paths together */
    struct r2_list peers, listens;
    atomic_ulong recheck_at; /* the earliest of the peers', or earlier; 0: none (recheck.c) */
    atomic_uint
        top_gen;        /* highest generation of a path: each counts by itself, new ones above it */
    bool device_memory; /* NICs may read and write memory that threads may not */
    struct r2_control *ctl;
    struct r2_seg_counters *n;
    struct r2_seg_gauges *g;
    struct r2_linkwatch *watch;
    struct r2_io_fd watch_fd;
    struct r2_colltimes colls;
};
extern struct r2_engine r2_eng;
/* What r2_eng.ops becomes; a test sets another before the first r2_engine_init. */
extern const struct r2_transport_ops *r2_engine_transport;

#endif
