/* A stand-in for libibverbs.so.1, loaded through R2CCL_IBVERBS_LIB: reliable connected queue pairs
 * between processes, over TCP connections between the addresses that stand for the ports. Rung 2-3:
 * it keeps the rules of the InfiniBand specification that the transport relies on, and breaks on
 * request everything that the specification leaves open. It cannot prove what real devices do.
 *
 * R2_FAKEVERBS  "fv0=127.0.1.1,fv1=127.0.2.1+127.0.2.2": devices and their ports' addresses, which
 *               become RoCE v2 GIDs; "ib:" before an address makes the port InfiniBand. Unset: a
 *               device for each address in R2CCL_NICS.
 * R2_FAKEVERBS_DEVICES  only so many, the first ones.
 * R2_FAKEVERBS_GID  2 to 7: the address of RoCE ports is at that entry as well, behind entry 1.
 * R2_FAKEVERBS_GID6 2 to 7: at that entry is fd00:: and that address.
 * R2_FAKEVERBS_HANG  "fv0 open,fv1 port2": calls that do not come back from the beginning, in the
 *               words of the command `hang` (script.c); "list N": the N-th list of devices and
 *               those after it; "fv1 down1": that port is down.
 * R2_FAKEVERBS_MTU  active MTU of all ports, 256 ... 4096 (1024).
 * R2_FAKEVERBS_NIC  "process": what moves the packets is no thread but a process (nic.c), which
 *               goes on while ours is stopped. Not under sanitizers.
 * R2_FAKEVERBS_TALLY  a folder: a file with the process's number holds struct fv_tally.
 * R2_FAKEVERBS_CHAOS  see script.c.
 * Commands to a running process (script.c): datagrams to the abstract socket "r2fv-ctl.PID".
 *
 * One lock guards everything; one thread, or process, serves the sockets and the clock.
 */
#ifndef R2_TESTS_FAKEVERBS_H
#define R2_TESTS_FAKEVERBS_H

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FV_EXPORT __attribute__((visibility("default")))
#define FV_DEVICES 256 /* one that was removed and is back is another one */
#define FV_PORTS 2
#define FV_QPS 4096
#define FV_MRS 65536
#define FV_GIDS 8
#define FV_PKEYS 4
#define FV_PORT_BASE 21000
#define FV_SLOTS 4000
#define FV_EVENTS 64

/* Calls by which a device is opened and asked. */
#define FV_AT_OPEN 1u
#define FV_AT_PD 2u
#define FV_AT_DEVICE 4u
#define FV_AT_GID 8u
#define FV_AT_PORT(port) (16u << (port)) /* 0: of all */
#define FV_FAILS (1u << 31)              /* it does not hang: opening it is an error */
#define FV_PORTS_FAIL (1u << 30)         /* ... questions about its ports are */

struct fv_port {
    bool up, ib;
    uint32_t ip; /* network order */
    union ibv_gid gid[FV_GIDS];
    uint16_t lid;
    uint16_t pkey[FV_PKEYS];
    bool blackhole; /* nothing leaves and nothing arrives */
};

struct fv_dev {
    struct ibv_device base; /* first */
    int n_ports;
    struct fv_port port[FV_PORTS + 1];
    struct ibv_context *ctx; /* of the one open() */
    int listener[FV_PORTS + 1];
    bool fatal;
    bool removed;  /* no longer in the list */
    bool unloaded; /* nor is this one; but all works until it is closed, and then it is removed */
    int entry, folder; /* files that base.dev_path and .ibdev_path name; -1 */
    uint64_t guid;     /* network order */
    int hang;          /* commands do not come back until it is cleared; 2: questions, too */
    int hung;          /* calls that wait for that */
    unsigned stuck;    /* FV_AT_*: nor do these */
    uint32_t most;     /* requests of more bytes vanish, with all behind them; 0: none does */
    int lose, lose_n;  /* completions of requests whose id begins with that: the next n; 0: none */
    int no_reg, no_modify_err, no_destroy, no_dereg; /* so many commands fail */
    int no_chain; /* of so many chains only the first request is taken */
    struct ibv_async_event events[FV_EVENTS];
    unsigned ev_head, ev_tail;
    struct ibv_async_event told;          /* of a queue, and not acknowledged yet */
    struct fv_late *behind, **behind_end; /* written into a DMA buffer, not visible there yet */
};

struct fv_mr {
    struct ibv_mr base;
    int access;
    uint8_t *view; /* of a DMA buffer: where this library can reach it; else NULL */
    struct fv_mr *kept;
};

struct fv_cqe {
    struct ibv_wc wc;
    bool recv;    /* of the receive queue: with the queue pair's number, what it is ordered by */
    uint64_t due; /* not before; 0: now */
};

struct fv_cq {
    struct ibv_cq base;
    struct fv_cqe *ring;
    unsigned head, tail, size; /* cumulative */
    bool armed;
};

struct fv_wqe {
    uint64_t wr_id;
    enum ibv_wr_opcode op;
    bool signaled, acked;
    uint32_t imm, lkey, rkey, len;
    const uint8_t *data; /* where this library can reach it */
    uint64_t addr;       /* what the caller calls it */
    uint64_t raddr;
    uint64_t first_sent;
    uint64_t leaves; /* of a slow queue pair: whole, then */
};

struct fv_rqe {
    uint64_t wr_id;
    uint8_t *data;
    uint32_t len, lkey;
};

/* A write that was acknowledged but is not in memory yet. */
struct fv_late {
    struct fv_late *next;
    uint64_t due;
    uint64_t addr; /* where to */
    uint8_t *bytes;
    uint32_t len, rkey;
    bool held; /* until the script lets go */
};

struct fv_conn;

struct fv_qp {
    struct ibv_qp base;
    struct fv_dev *dev;
    struct ibv_qp_cap cap;
    uint8_t port, timeout, retry;
    struct ibv_qp_attr attr; /* what it was given, all states together; for fv_attr() */
    uint16_t pkey;           /* what was at the index when it was made */
    uint32_t dest;
    uint32_t dest_ip;
    /* cumulative: acknowledged and completed, handed to the socket, posted */
    uint32_t done, sent, posted;
    uint32_t r_done, r_posted;
    uint32_t psn; /* next expected by the responder */
    struct fv_wqe *sq;
    struct fv_rqe *rq;
    struct fv_conn *out; /* our requests */
    struct fv_late *late, **late_end;
    uint64_t flush_at; /* in ERR: flushes are delivered from then on */
    bool dry;          /* in ERR, and its receives were flushed */
    bool flushed;
    bool connecting_failed;
    bool mute;     /* its requests vanish */
    uint32_t slow; /* bytes/s that its requests leave with, and it never gives up; 0: no limit */
    bool frozen;   /* and it never gives up */
    struct fv_qp *kept;
    uint64_t next_connect;
};

struct fv_pkt {
    uint32_t magic;
    uint8_t op;     /* enum ibv_wr_opcode, or 0xff: acknowledgement */
    uint8_t status; /* of an acknowledgement: enum ibv_wc_status */
    uint16_t pkey;  /* of the partition; others' packets vanish */
    uint8_t mtu;    /* of the path; so do those of another size */
    uint32_t dest, src, psn, len;
    uint32_t rkey, imm;
    uint64_t raddr;
} __attribute__((packed));
#define FV_MAGIC 0x42564652u
#define FV_ACK 0xff

struct fv_conn {
    struct fv_conn *next;
    int fd;
    struct fv_dev *dev;
    uint8_t port;
    struct fv_qp *qp; /* out: the requester; in: NULL */
    bool connected, dead, want_out, rnr;
    bool kept; /* by the script: a write waits in the network */
    /* tx: of requests */
    struct fv_pkt head;
    size_t tx_off;
    bool tx_active;
    /* tx: of acknowledgements */
    struct fv_pkt ack;
    size_t ack_off;
    bool ack_active, ack_wanted;
    uint32_t ack_psn;
    uint64_t ack_data; /* of a read */
    bool behind;
    uint8_t ack_status;
    uint32_t ack_qpn, ack_src;
    /* rx */
    struct fv_pkt in;
    size_t in_off; /* of the head */
    size_t body_off;
    uint8_t part[8], n_part; /* behind body_off: the beginning of a word */
    uint8_t *body;           /* where the payload goes; NULL: nowhere */
    uint8_t *hold;           /* payload that is placed later */
    bool word;               /* an aligned word, which is placed as a whole */
    uint64_t word_data;
    bool in_body;
};

struct fv_chaos {
    uint64_t seed, rng;
    unsigned late_write; /* per mille of writes that land after their acknowledgement */
    unsigned late_cqe;   /* per mille of completions that are delayed */
    unsigned lost_cqe;   /* per million of completions that vanish */
    unsigned error;      /* per million of work requests that fail */
    unsigned damage;     /* per million of writes that arrive with a changed byte */
    unsigned late_us;    /* up to */
    unsigned dry;        /* 1: receives that come to a drained queue pair are never flushed */
    unsigned gpu;        /* 1: writes into DMA buffers are visible after a read only */
    unsigned overtake;   /* 1: late completions hold back those of their own work queue only */
    unsigned cmd_us;     /* a command takes up to so long before it has any effect */
};

/* What a test in the same process has asked for, through fv_script(): one write is caught. */
struct fv_script {
    uint32_t min;        /* of the write to catch; 0: none */
    bool in_network;     /* before it reaches the responder, else acknowledged but not in memory */
    bool caught, landed; /* landed: its first byte, or all of it where it was acknowledged */
    bool no_destroy;     /* destroying does not come back until it is let go */
    uint32_t src, dest;  /* queue pairs */
    uint32_t spoil;      /* bytes of a request that is to arrive with a changed one; 0: none */
    uint32_t spoil_at;
    enum ibv_wr_opcode spoil_op;
};

/* What a process did by queue pairs: those that were connected, and bytes of writes that were
 * acknowledged, heartbeats left out. */
struct fv_tally {
    uint64_t queue_pairs, written;
};

struct fake {
    pthread_mutex_t lock;
    pthread_cond_t unhang;
    pthread_t thread;
    bool started;
    bool apart; /* a process instead of the thread (nic.c) */
    int epoll, wake, ctl, slot_fd;
    unsigned slot;
    struct fv_dev dev[FV_DEVICES];
    int n_dev;
    int n_closed;
    int no_list; /* 1: the list of devices does not come back; N: that one, counted from here */
    const void *only; /* what fv_dev.no_dereg is about, by its address; NULL: any */
    enum ibv_mtu mtu; /* active, of all ports */
    struct fv_qp *qps[FV_QPS];
    struct fv_mr *mrs[FV_MRS];
    unsigned next_qp, next_mr;
    struct fv_qp *kept_qps; /* of devices that were removed: never freed, as in rdma-core */
    struct fv_mr *kept_mrs;
    struct fv_conn *conns;
    struct fv_chaos chaos;
    int inject; /* enum ibv_wc_status for the next work request of ... */
    struct fv_dev *inject_dev;
    uint64_t injected_ns;     /* when that failed */
    unsigned long violations; /* rules of the specification that the caller broke */
    int overtaken; /* completions that were handed out before an older one of the same CQ */
    struct fv_script script;
    struct fv_tally *tally; /* never NULL once started */
};
extern struct fake fv;

uint64_t fv_now(void);
void fv_wake(void);
/* All below: under fv.lock. */
int fv_start(void);
/* A Unix socket with that abstract name, or -1. */
int fv_bound(const char *name, int type);
struct fv_qp *fv_qp_find(uint32_t qpn);
/* NULL unless the key covers the range with that access. */
struct fv_mr *fv_mr_find(uint32_t key, uint64_t addr, uint64_t len, int access);
/* Where this library can reach an address of the range. */
void fv_peer(void *addr, size_t len, void *view);
uint8_t *fv_reach(const struct fv_mr *mr, uint64_t addr);
/* Chaos `gpu`: bytes for DMA buffers are not seen there before a read by the same device. Takes
 * `bytes`. */
void fv_behind(struct fv_dev *dev, uint64_t addr, uint8_t *bytes, uint32_t len, uint32_t rkey);
void fv_show(struct fv_dev *dev);
/* `recv`: of the queue pair's receive queue, else of its send queue. */
void fv_complete(struct fv_qp *qp, bool recv, const struct ibv_wc *wc);
void fv_cq_tick(uint64_t now);
void fv_qp_error(struct fv_qp *qp);                           /* to ERR */
void fv_qp_fail(struct fv_qp *qp, enum ibv_wc_status status); /* the oldest request fails */
void fv_qp_acked(struct fv_qp *qp, uint32_t psn);
void fv_qp_tick(struct fv_qp *qp, uint64_t now);
void fv_place_late(struct fv_qp *qp, uint64_t now, bool all);
/* An executed write is not in memory yet. Takes `bytes`. */
void fv_land_late(struct fv_qp *qp, const struct fv_pkt *p, uint8_t *bytes);
void fv_land_word(const struct fv_pkt *p, uint64_t word);
void fv_conn_send(struct fv_conn *c);
void fv_conn_ready(struct fv_conn *c); /* a receive was posted */
void fv_conn_drop(struct fv_conn *c);
struct fv_conn *fv_conn_new(int fd, struct fv_dev *dev, uint8_t port);
struct fv_conn *fv_conn_open(struct fv_qp *qp);
void fv_conn_serve(struct fv_conn *c); /* takes what has come, sends what can be sent */
void fv_conn_reap(void);               /* frees those that are dead */
int fv_listen(struct fv_dev *dev, int port);
/* For a test in the same process (dlsym), without the lock: an attribute of all queue pairs that
 * are connected. -1: there are none; -2: they differ; -3: packets of theirs have none; -4: which?
 */
FV_EXPORT int fv_attr(const char *name);
int fv_attr_seen(const char *name); /* the same under the lock */
void fv_async(struct fv_dev *dev, enum ibv_event_type type, int port, struct ibv_qp *qp);
/* The queue is about to be destroyed: waits until the event that was told of it is acknowledged;
 * others of it are never told. */
void fv_events_over(struct fv_dev *dev, const void *object);
void fv_command(char *text);
/* Hot-unplug. `quiet`: as soft-RoCE does it, without an event and with commands that succeed. */
void fv_remove(struct fv_dev *dev, bool quiet);
/* As soft-RoCE is removed: it works on until it is closed. */
void fv_unload(struct fv_dev *d);
/* The same hardware is there again, under that name, as a device of its own. */
void fv_restore(const struct fv_dev *old, const char *name);
void fv_qps_vanish(struct fv_dev *dev);
void fv_mrs_vanish(struct fv_dev *dev);
void fv_chaos_parse(const char *text);
bool fv_chance(unsigned per, unsigned of);
uint64_t fv_random(uint64_t below);
/* Waits while the device's commands hang. */
void fv_may_hang(struct fv_dev *dev);
/* Waits while the call, one or more of FV_AT_*, does. */
void fv_may_stick(struct fv_dev *dev, unsigned at);
/* Which one a word of the command `hang` names; 0: none. */
unsigned fv_call(const char *word);
/* The script wants this write. */
bool fv_catches(const struct fv_pkt *p);
/* What arrived gets a byte changed, if script or chaos want it. */
void fv_spoil(const struct fv_pkt *p, uint8_t *body);
/* Writes of the queue pair that the script keeps out of memory. */
bool fv_holds(const struct fv_qp *qp);
struct fv_dev *fv_dev_of(struct ibv_context *ctx);

#endif
