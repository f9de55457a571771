/* TCP transport, private header.
 *
 * An endpoint has lane 0 for control frames and small messages, and bulk lanes 1 .. n. A lane is
 * one socket, owned by one I/O thread; other threads may drive lane 0 as well (flush, help).
 *
 * Locks, in this order: lane rx_lock, lane tx_lock, then upcalls (the peer's lock). ep->lock only
 * guards the array of lanes and is a leaf. A lane's descriptor is valid while one of its two locks
 * is held and `closed` is false; closing takes both.
 */
#ifndef R2_TRANSPORT_TCP_TCP_H
#define R2_TRANSPORT_TCP_TCP_H

#include <pthread.h>
#include <stdatomic.h>

#include "io/io.h"
#include "transport/tcp/hello.h"
#include "transport/transport.h"
#include "util/mem.h"

#define R2_TCP_NICS 16
#define R2_TCP_MAX_LANES 33
#define R2_TCP_MAX_CHUNK (16 * 1024 * 1024)
#define R2_TCP_CTRL_RX (128 * 1024)
#define R2_TCP_CTRL_TX (64 * 1024)
#define R2_TCP_HANDSHAKE_NS (3 * UINT64_C(1000000000)) /* R: for the next word of a stranger */
#define R2_TCP_CONNECT_NS (10 * UINT64_C(1000000000))  /* S: for all of it */
#define R2_TCP_MAX_PENDING 1024                        /* sockets that have not proved the secret */

enum r2_lane_phase {
    R2_LANE_CONNECTING, /* S: TCP handshake */
    R2_LANE_WAIT_HELLO, /* R */
    R2_LANE_WAIT_CHALLENGE,
    R2_LANE_WAIT_PROOF,
    R2_LANE_WAIT_WELCOME,
    R2_LANE_WAIT_GONE, /* S: the tag behind R2_WELCOME_GONE */
    R2_LANE_OPEN,
};

enum r2_rx_state { R2_RX_HEAD, R2_RX_BODY, R2_RX_DRAIN };

struct r2_lane {
    struct r2_io_fd io;
    struct r2_task task;   /* pumps tx, and rx when asked to */
    struct r2_timer timer; /* handshake deadline, then retry of a faulted NIC */
    struct r2_ep *ep;      /* NULL while an accepted socket has not proved itself */
    int nic;
    uint8_t index;
    enum r2_lane_phase phase;
    atomic_bool open; /* the phase, for whoever holds only tx_lock */
    bool closed;
    /* A control lane: a thread is in a call on its socket (r2_lane_enter). */
    atomic_bool in_call;
    bool reaped; /* the I/O thread has let go of it; only that thread looks */
    atomic_bool
        rx_again;       /* an event, or what is left over from before: there may be bytes to read */
    atomic_bool rx_end; /* the other side has closed: read to the end, no other event tells of it */
    struct r2_tcp_hello hello;
    struct r2_tcp_challenge challenge;
    uint8_t hs_buf[128];
    size_t hs_len;

    pthread_mutex_t tx_lock;
    /* bulk */
    /* Nobody has kicked it since it asked for work; set before next_chunk is asked, so that a kick
     * is never lost: who takes it kicks. */
    atomic_bool tx_idle;
    /* It is in the middle of a chunk, and the kernel or its NIC takes no more; cleared when the
     * chunk has left. Set before the engine is told (`blocked`), which looks under the peer's lock
     * at what waits: who adds to that later sees it here and asks another lane. Control: frames are
     * on their way to the kernel, from before the call that may find its room taken. */
    atomic_bool tx_full;
    atomic_ulong tx_since; /* ns: when it was last kicked, or took a chunk; a hint */
    bool tx_active;
    bool tx_released; /* the chunk's memory is no longer read (sent, or copied to tx_priv) */
    struct r2_bulk tx_chunk;
    struct r2_data_head tx_head;
    size_t tx_off; /* of head and payload together */
    const uint8_t *tx_data;
    uint8_t *tx_priv;
    size_t tx_priv_len;
    /* control */
    uint8_t *ctrl_buf;
    size_t ctrl_len, ctrl_off;
    atomic_ulong ctrl_total;  /* bytes the kernel has taken */
    uint64_t ctrl_said;       /* ... as the engine was told (ctrl_sent) */
    atomic_uint flush_wanted; /* 1: somebody asked (r2_lane_flush, r2_lane_flush_later) */
    /* What the last look at a bulk lane's health saw; under tx_lock. */
    uint64_t acked_seen, moved_seen, segments_seen, resent_seen;
    bool out_seen;
    uint64_t moved; /* bytes the kernel took, of a bulk lane; under tx_lock */
    /* Where the kernel does not tell (health.c): bytes received (control) or acknowledged (bulk) at
     * the last look, and when they last grew. Under tx_lock. */
    uint64_t sum_seen, sum_at;

    pthread_mutex_t rx_lock;
    enum r2_rx_state rx_state;
    struct r2_bulk rx_chunk;
    uint8_t rx_head[sizeof(struct r2_data_head)];
    size_t rx_head_len;
    size_t rx_off;     /* of the payload */
    uint8_t *rx_stage; /* see staged() */
    size_t rx_stage_len;
    uint8_t *rx_buf; /* control frames */
    size_t rx_len;
    atomic_ulong rx_got; /* bytes of them that have come */
};

/* Before and after a call on a control lane's socket, which NCCL's thread and an I/O thread use at
 * once. The kernel lets one of them in. Whoever finds it taken sleeps and is woken, which takes
 * longer than any of these calls. So it waits here first, for 20 us at most: a hint, with no order
 * to anything. What r2_lane_enter returns is for r2_lane_leave. */
bool r2_lane_enter(struct r2_lane *lane);
void r2_lane_leave(struct r2_lane *lane, bool entered);

struct r2_ep {
    struct r2_ep_head head;
    struct r2_ep_params params;
    void *owner;
    struct r2_list node; /* in the table of accepted endpoints */
    atomic_int refs;     /* engine, each lane, table */
    atomic_bool failed;
    atomic_int
        ending; /* a lane found the connection ended with this: lane 0 reads its rest first */
    atomic_bool dead;
    bool asking; /* under lock: the engine is asked who its owner is */
    int late;    /* under lock: it failed with this meanwhile */
    pthread_mutex_t lock;
    struct r2_lane *lanes[R2_TCP_MAX_LANES];
    int n_lanes;    /* planned bulk lanes */
    atomic_int use; /* of them: the others get no more chunks */
    atomic_int open_lanes;
    atomic_ulong marked; /* control bytes handed over at the last mark */
    atomic_bool refused, other_process, there, given_up; /* as in r2_ep_health */
    atomic_bool connected; /* lane 0: the host's kernel took the connection */
};

struct r2_tcp {
    const struct r2_transport_events *ev;
    uint8_t process[16];
    pthread_mutex_t listen_lock; /* a leaf: descriptors of listeners, addrs */
    /* By NIC; then, by NIC again, at its second address (r2_nic.second). */
    struct r2_io_fd listeners[2 * R2_TCP_NICS];
    struct r2_timer again[2 * R2_TCP_NICS];     /* accepts what is left in a listener's queue */
    struct r2_wire_addr addrs[2 * R2_TCP_NICS]; /* family 0: nobody listens */
    atomic_bool listening[R2_TCP_NICS];         /* at the first */
    atomic_int pending;
    atomic_int sockets;
    pthread_mutex_t lock; /* accepted */
    struct r2_list accepted;
};
extern struct r2_tcp r2_tcp;

/* listen.c */
int r2_tcp_listen_all(void);
int r2_tcp_rebind(int nic);

/* lane.c */
struct r2_lane *r2_lane_new(int fd, int nic, struct r2_io *io, enum r2_lane_phase phase);
/* Starts watching; from now on callbacks may run. */
int r2_lane_start(struct r2_lane *lane);
/* Takes both locks, gives back claims and chunks, closes, and lets the lane free itself. */
void r2_lane_shut(struct r2_lane *lane, bool abort);
void r2_lane_event(struct r2_lane *lane);
void r2_lane_free(struct r2_lane *lane);
/* Lets the lane's task run; the queued task holds a reference to the endpoint, if there is one. */
void r2_lane_kick(struct r2_lane *lane);

/* handshake.c: moves on; 1 open, 2 proven and for another transport, 0 wait for more, -errno
 * broken. Under rx_lock. */
int r2_lane_handshake(struct r2_lane *lane);

/* ep.c */
struct r2_ep *r2_ep_new(const struct r2_ep_params *params);
void r2_ep_get(struct r2_ep *ep);
struct r2_lane *r2_ep_lane(struct r2_ep *ep, int index); /* or NULL */
void r2_ep_put(struct r2_ep *ep);
/* Reports the failure once; holds no lock. */
void r2_ep_fail(struct r2_ep *ep, int err);
/* The same for what a lane's socket said. Where the other process may just have left, what lane 0
 * has in its kernel's buffer is read first, by its own thread; may be called with rx_lock held. */
void r2_ep_lane_failed(struct r2_ep *ep, int err);
/* The errno that it failed with before it had an owner, once; 0: it did not. */
int r2_ep_late(struct r2_ep *ep);
/* R: attaches a lane that proved itself. 0 or an errno for WELCOME. */
int r2_ep_attach(struct r2_lane *lane, const struct r2_tcp_hello *hello);
/* A lane of the endpoint is open: lane 0 brings it up, and (S) connects the others. */
void r2_ep_lane_open(struct r2_lane *lane);

/* health.c: operations of the transport */
void r2_tcp_mark(struct r2_ep *ep);
void r2_tcp_health(struct r2_ep *ep, struct r2_ep_health *out);
bool r2_tcp_reached(struct r2_ep *ep);

/* bulk.c: see transport.h; uses: lane `index` is to take chunks. */
int r2_bulk_plan(int nic);
void r2_bulk_use(struct r2_ep *ep, unsigned lanes);
bool r2_bulk_uses(const struct r2_ep *ep, int index);
void r2_bulk_kick(struct r2_ep *ep, unsigned chunks, unsigned lanes);
/* Threads are many for the lanes in use: `lanes` of a kick counts. */
bool r2_bulk_keeps_to_few(const struct r2_ep *ep);
bool r2_bulk_push(struct r2_ep *ep);
unsigned r2_bulk_planned(struct r2_ep *ep);
unsigned r2_bulk_lanes(struct r2_ep *ep);

/* tx.c, rx.c: 0 or -errno; callers hold tx_lock / rx_lock. */
int r2_lane_tx_bulk(struct r2_lane *lane, int chunks); /* at most so many, then kicks itself */
/* Chunks per turn: what else the thread has to do waits that long. */
#define R2_TCP_TX_TURN 1
int r2_lane_rx_bulk(struct r2_lane *lane);
int r2_lane_rx_ctrl(struct r2_lane *lane);
/* What the kernel has received up to now. */
int r2_lane_rx_rest(struct r2_lane *lane);
/* Drives lane 0 and repeats while somebody asked meanwhile. Holds no lock but possibly rx_lock. */
void r2_lane_flush(struct r2_lane *lane);
/* Leaves that to the lane's thread. */
void r2_lane_flush_later(struct r2_lane *lane);
/* Somebody left something to the lane's thread, or to the holder of its lock, or the socket did not
 * take all. */
bool r2_lane_has_flush(struct r2_lane *lane);

#endif
