/* Verbs transport, private header.
 *
 * An endpoint is a set of reliable connected queue pairs between two NICs, all on one completion
 * queue. `ctrl` carries control frames and small messages: sends and receives, a byte stream as on
 * a socket. `bulk` carries chunks: an RDMA write, then a send that says what was written. `beat`
 * carries heartbeats: an 8 byte RDMA write, which the peer's NIC answers whatever its process does.
 * How they are agreed on: card.h. How they end: fence.c.
 *
 * Locks: ep->lock guards all of an endpoint; upcalls (the peer's lock) are made under it, except
 * `up` and `failed`. Whoever finds it taken leaves a mark and goes; every holder looks again when
 * it lets go (r2_vep_run, r2_vep_unlock). r2_verbs.lock (list of endpoints), a NIC's, the cache's
 * and a device's lock are leaves.
 *
 * Verbs commands (anything but posting and polling) enter the kernel and may wait for the device's
 * firmware for ever: they run on the device's command thread (cmd.c), never on a thread of NCCL's
 * or of the engine's.
 */
#ifndef R2_TRANSPORT_VERBS_VERBS_H
#define R2_TRANSPORT_VERBS_VERBS_H

#include <pthread.h>
#include <stdatomic.h>

#include "io/io.h"
#include "topology/nics.h"
#include "transport/tcp/hello.h"
#include "transport/transport.h"
#include "transport/verbs/card.h"
#include "transport/verbs/lib.h"
#include "transport/verbs/tables.h"

#define R2_CTRL_SLOT 4096
#define R2_CTRL_TX 32
#define R2_CTRL_SIGNAL 16 /* S: of so many one is signalled (data.c) */
#define R2_CTRL_RX 32
#define R2_BULK_TX 64 /* chunks under way per queue pair */
#define R2_BULK_RX 256
#define R2_HEAD_SLOT 64
#define R2_COUNTS_AGAIN 8 /* counts under way of chunks that were counted before (counts.c) */
#define R2_MAX_HCAS 16
#define R2_MAX_HCA_PORTS 4

#define R2_VERBS_MEET_NS (3 * UINT64_C(1000000000))
#define R2_VERBS_DRAIN_NS (1 * UINT64_C(1000000000)) /* flushes after ERR, before destroying */
#define R2_VERBS_FENCE_NS (3 * UINT64_C(1000000000)) /* what deregMr and close wait for it */
#define R2_VERBS_COMMAND_NS                                                                        \
    (2 * UINT64_C(1000000000)) /* what regMr and deregMr wait for a device */

struct r2_cmd {
    struct r2_list node;
    bool queued; /* under the device's lock */
    void (*run)(struct r2_cmd *cmd);
};

#define R2_GIDS_MOST 256 /* entries a queue pair can name: verbs have one byte for it */
struct r2_gid_entry {
    int index;
    enum r2_gid_type type;
    uint8_t raw[16];
};

/* What a port has said of itself. */
struct r2_port_view {
    bool there; /* it has answered; else the rest is nothing */
    struct ibv_port_attr attr;
    uint64_t guid; /* InfiniBand, at the start; 0: unknown */
    bool has_pkey; /* it has said what is at the index that queue pairs use */
    uint16_t pkey;
    int n_gids;
    struct r2_gid_entry *gids; /* those that may be used, in the order of the table */
};

/* A device as it was opened once. One that was removed and is back is opened anew, as another of
 * these in the same slot; nothing of the old one is used for it. hca.c. */
struct r2_hca {
    int slot;
    atomic_int refs; /* the slot, the command thread: who may read this struct */
    char name[64];
    struct ibv_device **list; /* keeps `dev` what it is, so that another one is told from it */
    struct ibv_device *dev;
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_device_attr attr;
    struct r2_port_view *ports; /* at the start, [1 .. n_ports]; of devices that came back: none */
    int n_ports;
    int answer;    /* start.c: 0 or -errno, 1 while there is none */
    uint64_t guid; /* the same, with the answer; 0: unknown */
    bool dmabuf, peermem;
    bool shown;          /* dev->dev_path was there when it was opened */
    atomic_bool gone;    /* it failed or was removed: nothing new is made on it */
    atomic_bool removed; /* the kernel has let go of it, and with it of all that was made on it */
    atomic_bool doubted; /* did not answer in time: it is not waited for again (hca.c) */
    struct r2_io_fd async;
    struct r2_task leave;              /* after its events are listened to no more */
    struct r2_cmd open, purge, forget; /* open: of start.c at the start, else of hca.c */
    struct r2_list held; /* its command thread's: what it did not deregister (mr.c), each used */
    struct r2_list
        unflushed;        /* its command thread's: what it did not destroy (flush.c), each used */
    pthread_mutex_t lock; /* cmds, busy_since, users */
    pthread_cond_t more;
    struct r2_list cmds;
    uint64_t busy_since; /* a command runs, 0: none */
    int users; /* of ctx: the slot until it is gone, endpoints, registrations; 0: it is closed */
    pthread_t thread;
};

/* Where a device belongs, while it is there and while it is not. Under r2_verbs.hca_lock. */
struct r2_slot {
    char name[64];
    uint64_t guid;         /* 0: the library does not tell */
    struct r2_hca *now;    /* NULL: none */
    struct r2_hca *dead;   /* the last one; while `now` is NULL */
    struct r2_hca *coming; /* being opened */
};

/* What RDMA there is behind a NIC of the engine. */
struct r2_vnic {
    int slot; /* -1: none */
    uint8_t port;
    atomic_int qps;       /* open now */
    pthread_mutex_t lock; /* the rest */
    bool active;
    uint8_t link; /* IBV_LINK_LAYER_* */
    uint8_t mtu;  /* enum ibv_mtu: the most that is asked for, by setting and active MTU */
    uint16_t lid;
    bool has_pkey; /* known */
    uint16_t pkey; /* at the index that queue pairs use */
    int gid_index;
    uint8_t gid[16];
    int state, phys;
    unsigned rate_gbps;
    struct r2_vflush *_Atomic flush; /* flush.c; one that comes late is seen whole */
};

/* One registration of a range with every device. */
struct r2_mr_keys {
    struct r2_list node; /* cache */
    atomic_int refs;
    void *data;
    size_t size;
    uint64_t serial; /* no other's */
    bool device;
    int dmabuf_fd;
    uint64_t dmabuf_offset;
    struct r2_reg *reg[R2_MAX_HCAS]; /* by slot; by command threads, under a lock of mr.c */
    atomic_uint lkey[R2_MAX_HCAS];   /* valid while `has` is set */
    atomic_uint rkey[R2_MAX_HCAS];
    atomic_bool has[R2_MAX_HCAS];
};

/* What is looked at: not all of it costs nothing, and a small message comes by six times. */
#define R2_WANT_POLL 1u /* completions */
#define R2_WANT_CTRL 2u /* control frames to send */
#define R2_WANT_BULK 4u /* chunks to send */
#define R2_WANT_BEAT 8u
#define R2_WANT_ALL 15u
#define R2_WANT_EVENT 16u /* the completion channel has one: taken, and the queue armed again */

enum r2_vqp_kind { R2_QP_CTRL, R2_QP_BEAT, R2_QP_BULK };

struct r2_vqp {
    struct ibv_qp *qp;
    uint32_t tx_posted, tx_done; /* slots, cumulative */
    uint32_t rx_done;            /* arrivals, cumulative */
    uint32_t rx_slot;            /* R, bulk: of the receive that is used next, cumulative */
    bool drain_tx, drain_rx;     /* the last work requests were flushed */

    /* S, bulk: counts, by which both sides notice that a completion is missing (counts.c)
     */
    uint32_t seen_posted, seen_done; /* the counters above, as they were at the last look */
    uint64_t since, wait; /* of their last change or the last count; the next one so long after */
    uint32_t said;        /* tx_posted in the last one */
    uint32_t said_again;  /* since one completed */

    /* S of what goes this way: whether anything completes (stalls.c) */
    uint32_t ended, seen_ended; /* requests, cumulative; as they were at the last look */
    uint64_t waited;            /* since then, or since the answer */
    uint32_t question;          /* asked about it; 0: none */
    bool answered;
};

/* S: as the stages follow. R begins at R2_V_CARD. */
enum r2_v_stage {
    R2_V_DIAL,
    R2_V_CHALLENGE,
    R2_V_WELCOME,
    R2_V_BUILD, /* the command thread makes queue pairs */
    R2_V_CARD,  /* waits for the peer's */
    R2_V_LINK,  /* the command thread connects them */
    R2_V_READY, /* R: waits for the word */
    R2_V_OPEN,
};

enum r2_v_fence {
    R2_FENCE_NONE,
    R2_FENCE_ASKED, /* the command thread moves the queue pairs to ERR */
    R2_FENCE_DRAIN, /* in ERR; flushes are awaited */
    R2_FENCE_KILL,  /* no flushes: the queue pairs are destroyed instead */
    R2_FENCE_LOST,  /* that failed as well: never confirmed */
    R2_FENCE_DONE,
};

struct r2_ep {
    struct r2_ep_head head;
    struct r2_ep_params params;
    void *owner;
    struct r2_list node; /* r2_verbs.eps, from when it has a socket */
    unsigned fails;      /* r2_verbs.fails when it was made */
    atomic_int refs;     /* engine, I/O thread, queued task and commands */
    atomic_bool failed, dead, open;
    atomic_uint want; /* R2_WANT_*: what somebody has asked for since it was last looked at */
    atomic_bool refused, other_process, there;
    atomic_uint marked; /* heartbeat asked for */
    pthread_mutex_t lock;
    const char *cause; /* of its failure, for people: static text, or NULL */

    struct r2_io *io;
    struct r2_task task;
    struct r2_timer timer;
    bool reap; /* the I/O thread may let go */

    /* agreement */
    struct r2_io_fd oob;
    enum r2_v_stage stage;
    struct r2_tcp_hello hello;
    uint8_t buf[128];
    size_t buf_len;
    struct r2_verbs_card mine, theirs;

    /* queue pairs */
    struct r2_hca *hca; /* used; NULL: there was none */
    struct r2_vnic *nic;
    uint8_t port;
    struct ibv_comp_channel *channel;
    struct r2_io_fd events;
    struct ibv_cq *cq;
    struct r2_vqp ctrl, beat, bulk[R2_VERBS_MAX_BULK];
    int n_bulk;
    uint8_t *memory;
    size_t memory_len;
    struct ibv_mr *mr;
    struct r2_cmd build, link, end, destroy;
    int commands; /* queued or running */

    /* fence */
    enum r2_v_fence fence;
    atomic_bool told_removed;       /* r2_fence_removed has seen it */
    uint64_t drain_until, fence_at; /* fence_at: when it was asked for */
    bool on_purpose;                /* memory was taken back: nobody is to blame */

    /* control frames */
    uint32_t ctrl_len[R2_CTRL_TX];
    uint32_t ctrl_signals;       /* bit per slot */
    bool ctrl_first;             /* the next one is the first since a heartbeat */
    bool ctrl_waits, bulk_waits; /* there may be more to send: no slot was free, or a fault */
    uint64_t ctrl_sent;
    uint8_t *rx_buf;
    size_t rx_len;
    bool deaf; /* a piece is missing or not valid: nothing after it is read */

    /* chunks */
    struct r2_bulk *tx;  /* n_bulk times R2_BULK_TX, by slot */
    struct r2_bulk held; /* taken from the engine, held back by an injected fault */
    bool has_held;
    size_t held_left, ctrl_held, ctrl_left; /* bytes that a fault has not let through yet */
    size_t rx_debt;                         /* arrivals that it has not let through */
    unsigned next_bulk;

    /* heartbeats */
    unsigned beat_asked, beat_done; /* by r2_ep.marked */
    bool beat_busy;
    uint64_t beat_at, rtt_ns;
    uint32_t question, asked, answer; /* our last; the peer's last; what we say to it (stalls.c) */
    uint64_t stalls_at;               /* of the last look */
    bool cq_empty;                    /* the last poll took all there was */
};

struct r2_verbs {
    const struct r2_transport_events *ev;
    uint8_t process[16];
    pthread_mutex_t hca_lock; /* slots; a leaf but for r2_hca.lock */
    struct r2_slot slots[R2_MAX_HCAS];
    int n_slots;
    struct r2_vnic nics[R2_MAX_NICS];
    atomic_uint fails; /* of any device, port or queue: an endpoint that is being made ends, too */
    pthread_mutex_t lock;
    struct r2_list eps;
};
extern struct r2_verbs r2_verbs;

/* Offsets in ep->memory. */
static inline uint8_t *r2_v_ctrl_tx(struct r2_ep *ep, uint32_t slot)
{
    return ep->memory + (size_t)slot * R2_CTRL_SLOT;
}
static inline uint8_t *r2_v_ctrl_rx(struct r2_ep *ep, uint32_t slot)
{
    return ep->memory + (size_t)(R2_CTRL_TX + slot) * R2_CTRL_SLOT;
}
static inline uint8_t *r2_v_head_tx(struct r2_ep *ep, int q, uint32_t slot)
{
    return ep->memory + (size_t)(R2_CTRL_TX + R2_CTRL_RX) * R2_CTRL_SLOT +
           ((size_t)q * (R2_BULK_TX + R2_BULK_RX) + slot) * R2_HEAD_SLOT;
}
static inline uint8_t *r2_v_head_rx(struct r2_ep *ep, int q, uint32_t slot)
{
    return r2_v_head_tx(ep, q, R2_BULK_TX + slot);
}
/* Two words: what we write from, what the peer writes to. */
static inline uint8_t *r2_v_beat(struct r2_ep *ep, int which)
{
    return r2_v_head_tx(ep, ep->n_bulk, 0) + which * R2_HEAD_SLOT;
}
/* S: the bytes of any test chunk, which are the same for all of the endpoint's (0, 0). R: where the
 * n-th one of a queue pair arrives; nothing else is ever written there, so it holds zeros until
 * then. */
static inline uint8_t *r2_v_test(struct r2_ep *ep, int q, uint32_t n)
{
    return r2_v_beat(ep, 2) + ((size_t)q * R2_TEST_EACH + n) * R2_TEST_LEN;
}
static inline size_t r2_v_memory_len(const struct r2_ep *ep)
{
    return (size_t)(R2_CTRL_TX + R2_CTRL_RX) * R2_CTRL_SLOT +
           ((size_t)ep->n_bulk * (R2_BULK_TX + R2_BULK_RX) + 2) * R2_HEAD_SLOT +
           (ep->params.initiator ? 1 : (size_t)ep->n_bulk * R2_TEST_EACH) * R2_TEST_LEN;
}

/* work request ids */
enum r2_wr_kind {
    R2_WR_CTRL_TX = 1,
    R2_WR_CTRL_RX,
    R2_WR_BULK_TX,
    R2_WR_BULK_RX,
    R2_WR_BEAT,
    R2_WR_DRAIN,
    R2_WR_COUNT
};
static inline uint64_t r2_wr_id(enum r2_wr_kind kind, int q, uint32_t slot)
{
    return (uint64_t)kind << 48 | (uint64_t)(unsigned)q << 32 | slot;
}

/* hca.c: devices come and go */
/* With two references: the slot's and the thread's; one user, the slot. NULL: no memory. */
struct r2_hca *r2_hca_new(int slot, const char *name);
/* A reference less. */
void r2_hca_put(struct r2_hca *hca);
/* On its command thread: device and protection domain, and what there is to know of it. 0 or
 * -errno; what was made until then is for r2_hca_close. */
int r2_hca_open(struct r2_hca *hca);
uint64_t r2_hca_guid(struct ibv_device *dev);
bool r2_hca_listed(struct ibv_device **list, const struct ibv_device *dev);
/* Events are listened to from now on. */
void r2_hcas_watch(void);
/* The device of a slot, or of a NIC, to be given back with r2_hca_unuse; NULL: it is not there. */
struct r2_hca *r2_hca_at(int slot);
struct r2_hca *r2_vnic_use(const struct r2_vnic *nic);
/* All that are there and, with `dead`, those that are gone and not closed yet. Returns how many. */
int r2_hcas_use(struct r2_hca *out[2 * R2_MAX_HCAS], bool dead);
void r2_hca_use(struct r2_hca *hca); /* by somebody who uses it */
void r2_hca_unuse(struct r2_hca *hca);
/* It failed or was removed: its endpoints end, its memory is let go of, and it is looked for. */
void r2_hca_gone(struct r2_hca *hca, const char *why);
/* A path failed: perhaps because its device vanished without an event. */
void r2_hcas_doubt(void);
/* Whether all devices are still there, looked at twice a second at most. Called with heartbeats of
 * queue pairs. */
void r2_hcas_glance(void);
/* On its command thread, after a command failed: true once the kernel has let go of the device,
 * which is waited for once, in bounded time. */
bool r2_hca_removed(struct r2_hca *hca);

/* start.c */
/* The library is opened and its devices are found, once; from the start on, or before if somebody
 * asks for them. 0, or -ENODEV: there are none. Waits for devices that do not answer, 10 s at most
 * for all together, the first time. */
int r2_verbs_prepare(void);
/* Only the library and its devices; as above. */
int r2_verbs_library(void);
/* The device was wanted and did not answer in time. */
bool r2_verbs_left_out(const char *device);
/* The port behind a NIC: its device's slot, or -1. Before the transport is started. */
int r2_vnic_best(const struct r2_nic *nic, uint8_t *port);
/* ports.c */
int r2_verbs_ports(const struct r2_nic *nics, int n, struct r2_nic *out, uint64_t *seed, int max);
/* What is known of the NIC's port, for people; false: it has none. */
bool r2_verbs_rdma(int nic, struct r2_rdma_info *out);
void r2_hca_events(struct r2_io_fd *async, uint32_t events);
/* device.c */
/* On the command thread: asks the port; to be freed. With `ip`, GIDs of that address will do. */
void r2_port_read(const struct r2_hca *hca, int port, const uint8_t *ip, struct r2_port_view *view);
void r2_port_free(struct r2_port_view *view);
/* One of its entries is that address. */
bool r2_port_has(const struct r2_port_view *view, const uint8_t ip[16]);

/* wanted.c: what users ask for, mostly by NCCL's names. Any thread. gid_index: -1 by rule; qps: of
 * bulk, per path; is_number: as NCCL reads it, between the two; number: of a setting's text, or
 * `otherwise`, with a warning where it is no such number. */
int r2_wanted_gid_index(void);
const struct r2_gid_wants *r2_wanted_gid(void);
int r2_wanted_qps(void);
int r2_wanted_timeout(void);
int r2_wanted_retry_cnt(void);
bool r2_wanted_is_number(const char *text, int low, int high, int *out);
int r2_wanted_number(const char *name, const char *text, int otherwise, int low, int high);
/* A NIC's address as a GID has it. */
void r2_nic_ip(const struct r2_nic *n, uint8_t ip[16]);
/* The NIC's port is like that now; true if GID, its entry, LID or partition key changed. */
bool r2_vnic_take(struct r2_vnic *nic, struct r2_hca *hca, const uint8_t ip[16],
                  const struct r2_port_view *view);
/* On the command thread: the device is there, and the slot's NICs have it. */
void r2_vnics_up(struct r2_hca *hca);
/* The slot's NICs are without their device. */
void r2_vnics_down(int slot, const char *why);
/* The NIC has another address: its GID is looked for again; endpoints with the old one end. */
int r2_vnic_rebind(int nic);
/* Ends the endpoints of a device. */
void r2_veps_fail(struct r2_hca *hca, int err);

/* cmd.c: runs commands of one device in order, then closes it (hca.c). */
void r2_hca_close(struct r2_hca *hca);
int r2_cmd_start(struct r2_hca *hca);
void r2_cmd_post(struct r2_hca *hca, struct r2_cmd *cmd);
/* A command has not come back for so long that nothing new is begun: each attempt would leave one
 * more behind it. */
bool r2_cmd_stuck(struct r2_hca *hca);
/* A command that is made for one time. The caller's use of the device (r2_hca_use) is the command's
 * from now on: `run` gives it back, and frees what `cmd` is in. */
void r2_cmd_give(struct r2_hca *hca, struct r2_cmd *cmd, void (*run)(struct r2_cmd *cmd));

/* flush.c: reads by which a NIC shows what it has written into memory of devices */
void r2_vflush_start(struct r2_vnic *nic);
/* On the device's command thread: the port's address, LID or partition key is another one. */
void r2_vflush_again(struct r2_vnic *nic);
/* The NIC's device is gone. */
void r2_vflush_stop(struct r2_vnic *nic);
/* On the command thread: the device was removed, and with it what it did not destroy. */
void r2_vflush_forget(struct r2_hca *hca);
int r2_verbs_flush_memory(int nic, const struct r2_mr_keys *keys, const void *at, uint64_t *ticket);
int r2_verbs_flushed(int nic, uint64_t ticket);

/* mr.c */
unsigned r2_verbs_memory(int nic);
int r2_verbs_reg(const struct r2_memory *memory, struct r2_mr_keys **out);
int r2_verbs_dereg(struct r2_mr_keys *keys, bool revoke);
int r2_verbs_remote_keys(const struct r2_mr_keys *keys, uint32_t out[R2_WIRE_MAX_NICS]);
bool r2_verbs_registered(const struct r2_ep *ep, const struct r2_mr_keys *keys);
/* On the command thread: registers every range with a device that has come back, and lets go of
 * those of one that is gone; once more when it was removed, for what it had not confirmed. */
void r2_verbs_adopt(struct r2_hca *hca);
void r2_verbs_purge(struct r2_hca *hca);

/* ep.c */
struct r2_ep *r2_vep_new(const struct r2_ep_params *params);
void r2_vep_get(struct r2_ep *ep);
void r2_vep_put(struct r2_ep *ep);
/* Reports the failure once; holds no lock. */
void r2_vep_fail(struct r2_ep *ep, int err);
/* Moves everything on that can be moved, unless another thread does. */
void r2_vep_run(struct r2_ep *ep, unsigned want);
/* Lets go of the lock; what others wanted meanwhile is left to the I/O thread. Any lock. */
void r2_vep_unlock(struct r2_ep *ep);
void r2_vep_kick(struct r2_ep *ep, unsigned want);      /* the same by its I/O thread */
void r2_vep_post(struct r2_ep *ep, struct r2_cmd *cmd); /* under the lock; takes a reference */
void r2_vep_posted(struct r2_ep *ep);                   /* the command has run; no lock */
/* Completion events are watched for; -ESHUTDOWN: its fence has begun. Takes the lock. */
int r2_vep_watch(struct r2_ep *ep);
/* Under the lock, after the fence: lets go of everything. */
void r2_vep_retire(struct r2_ep *ep);

/* meet.c */
int r2_meet_dial(struct r2_ep *ep);
/* The TCP transport hands over a socket whose peer has proved the secret. */
void r2_meet_accepted(int fd, int nic, const struct r2_tcp_hello *hello);
void r2_meet_event(struct r2_ep *ep);
/* Tells the peer by the end of the socket; with on_purpose, that memory was taken back. */
void r2_meet_close(struct r2_ep *ep);
/* As r2_transport_ops.reached. */
bool r2_meet_reached(struct r2_ep *ep);
void r2_meet_build(struct r2_cmd *cmd);
void r2_meet_link(struct r2_cmd *cmd);

/* qp.c: on the command thread */
int r2_qps_make(struct r2_ep *ep);    /* to INIT, receives posted */
int r2_qps_connect(struct r2_ep *ep); /* to RTS, with ep->theirs */
int r2_qps_error(struct r2_ep *ep);
/* Any queue pair of ours: what users have set (partition; service level, traffic class), so that
 * all of a NIC's are of one kind to the network. To INIT; 0 or -EIO. */
int r2_qp_init(struct ibv_qp *qp, uint8_t port, unsigned access);
/* Where in its port's table the partition key of every queue pair is: NCCL_IB_PKEY. */
uint16_t r2_qp_pkey_index(void);
/* `gid` NULL: by the LID alone. */
void r2_qp_route(struct ibv_ah_attr *ah, uint8_t port, uint8_t link, uint16_t lid,
                 const uint8_t *gid, int gid_index);
int r2_qps_destroy(struct r2_ep *ep);  /* only the queue pairs */
void r2_qps_release(struct r2_ep *ep); /* all the rest */

/* fence.c, under ep->lock */
void r2_fence_begin(struct r2_ep *ep);
/* S: it ended before it was open, so no work request of the engine's was ever posted on it, and
 * none will be: whatever its queue pairs still do touches the endpoint's own memory alone. */
bool r2_fence_idle(const struct r2_ep *ep);
/* Looks for flushes, and for the time. */
void r2_fence_poll(struct r2_ep *ep);
void r2_fence_end(struct r2_cmd *cmd);
void r2_fence_destroy(struct r2_cmd *cmd);
/* No lock: the kernel has let go of the device (`removed` is set). What is not confirmed yet is
 * now. */
void r2_fence_removed(struct r2_hca *hca);

/* data.c, on the command thread: S has its test chunks' bytes. With ep->mine and ep->theirs. */
void r2_data_test_fill(struct r2_ep *ep);
/* data.c, under ep->lock: 0 or -errno */
int r2_data_poll(struct r2_ep *ep);
/* Of an endpoint that fails or has failed: true if it was frames, which were heard. */
bool r2_data_last_words(struct r2_ep *ep, const struct ibv_wc *wc);
int r2_data_ctrl(struct r2_ep *ep);
int r2_data_bulk(struct r2_ep *ep);
int r2_data_beat(struct r2_ep *ep);
int r2_data_post(struct ibv_qp *qp, struct ibv_send_wr *wr); /* 0 or -errno */
int r2_data_post_ctrl_rx(struct r2_ep *ep, uint32_t slot);
int r2_data_post_bulk_rx(struct r2_ep *ep, int q, uint32_t slot);
/* The engine gets back what was handed out. */
void r2_data_give_back(struct r2_ep *ep);

/* counts.c. send: S, with a heartbeat; sent: a count is with the receiver's NIC; missing: so many
 * completions never came, which ends the endpoint. 0 or -errno. */
int r2_counts_send(struct r2_ep *ep, uint64_t now);
int r2_counts_sent(struct r2_ep *ep, const struct ibv_wc *wc);
int r2_counts_missing(struct r2_ep *ep, uint32_t count);

/* stalls.c. look: with a heartbeat, which comes behind all that was polled: 0, or -ETIMEDOUT: a
 * queue pair neither completes nor fails, which ends the endpoint; word: what the heartbeat says;
 * empty: a poll left nothing. */
int r2_stalls_look(struct r2_ep *ep, uint64_t now);
void r2_stalls_word(struct r2_ep *ep);
void r2_stalls_empty(struct r2_ep *ep);

#endif
