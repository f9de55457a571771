/* The control segment's layout: one header for both sides.
 *
 * The plugin writes it (control.h), r2ccl-ctl reads it. Between the two "cdef" marks stands only
 * what Python's cffi can parse: fixed-width types, plain enums, no bit-fields, no attributes.
 *
 * Rules of the layout
 * - Every row starts with a sequence number: odd while its text part is being written. The
 *   counters of a row are single words, changed one by one, outside the sequence number.
 * - Sizes in bytes. `_real_ns` is CLOCK_REALTIME, `_mono_ns` CLOCK_MONOTONIC. Text is UTF-8, ends
 *   with NUL, and is cut when too long. An unset number is 0, an unset text is empty.
 * - Numbers in enums never change their meaning; new ones are added at the end. The words that
 *   people see are the enumerators without prefix, lower case, "-" for "_": nic-down.
 * - Additions at the end of a row or table bump `minor`; anything else bumps `version`. A reader
 *   takes offsets, strides and row counts from the header, and believes nothing it reads.
 */
#ifndef R2_CONTROL_SEGMENT_H
#define R2_CONTROL_SEGMENT_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin */
#define R2_SEG_VERSION 3
#define R2_SEG_MINOR 3
#define R2_SEG_MAX_NICS 16
#define R2_SEG_MAX_PEERS 512
#define R2_SEG_MAX_PATHS 2048
#define R2_SEG_MAX_COMMANDS 8
#define R2_SEG_MAX_EVENTS 1024
#define R2_SEG_MAX_COMMS 128
#define R2_SEG_MAX_TIMINGS 128
#define R2_SEG_TABLES 8
#define R2_SEG_NAME 40
#define R2_SEG_TIMES 11
#define R2_SEG_SPANS 24
#define R2_SEG_SPAN_US 8

enum r2_seg_kind {
    R2_SEG_KIND_NONE = 0,
    R2_SEG_KIND_PROCESS,
    R2_SEG_KIND_COUNTERS,
    R2_SEG_KIND_GAUGES,
    R2_SEG_KIND_NICS,
    R2_SEG_KIND_PEERS,
    R2_SEG_KIND_PATHS,
    R2_SEG_KIND_COMMANDS,
    R2_SEG_KIND_EVENTS,
    R2_SEG_KIND_COMMS,
    R2_SEG_KIND_TIMINGS
};

/* Where a table lies. `high`: rows from this one on were never used. */
struct r2_seg_table {
    uint32_t kind;
    uint32_t offset;
    uint32_t stride;
    uint32_t rows;
    uint32_t high;
    uint32_t reserved;
};

/* `magic` is written last, when all else is in place. */
struct r2_seg_header {
    uint64_t magic;
    uint32_t version;
    uint32_t minor;
    uint64_t total_size;
    uint32_t header_size;
    uint32_t table_count;
    struct r2_seg_table tables[R2_SEG_TABLES];
    uint64_t created_real_ns;
    uint64_t alive_real_ns; /* refreshed about once a second by the plugin's housekeeping */
    uint64_t alive_mono_ns;
    uint64_t ended_real_ns;      /* 0: not closed in order */
    uint64_t event_head;         /* number of events ever written */
    struct r2_seg_table more[2]; /* tables that came later, as in `tables` */
};

struct r2_seg_process {
    uint32_t seq;
    int32_t rank; /* -1: not known */
    uint32_t pid; /* in the process's own PID namespace */
    uint32_t uid;
    uint64_t pidns;       /* inode of the PID namespace */
    uint64_t start_ticks; /* field 22 of /proc/PID/stat */
    uint64_t comm;
    uint32_t nccl_version; /* 22809 is 2.28.9; 0: not known */
    uint32_t net_api;      /* 6 ... 12; 0: not known */
    uint32_t verify;
    uint32_t ranks; /* 0: not known */
    uint8_t process_id[16];
    char host[64];
    char job[64];
    char mode[16];
    char plugin_version[32];
    char command[128];
    char warning[128];  /* what the process lacks or could not do, for people */
    uint32_t plan_stop; /* not 0: the operator wants no plans (verb PLAN) */
    uint32_t plan;      /* enum r2_seg_plan */
    uint32_t recording; /* enum r2_seg_recording */
    uint8_t reserved[20];
};

/* What R2CCL_PLAN is here, or DIRECT: R2CCL_ALLREDUCE=direct, whatever that is. */
enum r2_seg_plan {
    R2_SEG_PLAN_UNKNOWN = 0,
    R2_SEG_PLAN_OFF,
    R2_SEG_PLAN_SHADOW,
    R2_SEG_PLAN_AUTO,
    R2_SEG_PLAN_DIRECT
};

/* Times of collectives (struct r2_seg_timing). CANNOT: NCCL has not taken the plugin's profiler. */
enum r2_seg_recording { R2_SEG_RECORDING_CANNOT = 0, R2_SEG_RECORDING_OFF, R2_SEG_RECORDING_ON };

/* What the buckets of r2_seg_times hold, in us; the last bucket holds what takes longer. */
enum r2_seg_within {
    R2_SEG_WITHIN_1MS = 1000,
    R2_SEG_WITHIN_3MS = 3000,
    R2_SEG_WITHIN_10MS = 10000,
    R2_SEG_WITHIN_30MS = 30000,
    R2_SEG_WITHIN_100MS = 100000,
    R2_SEG_WITHIN_300MS = 300000,
    R2_SEG_WITHIN_1S = 1000000,
    R2_SEG_WITHIN_3S = 3000000,
    R2_SEG_WITHIN_10S = 10000000,
    R2_SEG_WITHIN_30S = 30000000
};

struct r2_seg_times {
    uint64_t us; /* their sum */
    uint64_t count[R2_SEG_TIMES];
};

/* Only ever grow. */
struct r2_seg_counters {
    uint64_t messages_sent;
    uint64_t messages_received;
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t eager_messages;
    uint64_t chunks_sent;
    uint64_t chunks_received;
    uint64_t acks_sent;
    uint64_t acks_received;
    uint64_t replayed_chunks;
    uint64_t replayed_bytes;
    uint64_t duplicate_chunks;
    uint64_t stale_chunks; /* of a dead generation, dropped */
    uint64_t crc_errors;
    uint64_t heartbeats_sent;
    uint64_t heartbeats_missed;
    uint64_t failovers;
    uint64_t nic_failures;
    uint64_t nic_recoveries;
    uint64_t path_failures;
    uint64_t path_recoveries;
    uint64_t no_path_waits;
    uint64_t connections_opened;
    uint64_t connections_closed;
    uint64_t connections_failed;
    uint64_t handshakes_rejected;
    uint64_t commands;
    uint64_t journal_dropped;
    uint64_t rows_refused;       /* peers and paths that found their table full */
    uint64_t locate_rounds;      /* localisation: which NIC is at fault? */
    uint64_t reserved_locate[3]; /* counted by earlier builds */
    uint64_t locate_probes;      /* ... connections tried */
    uint64_t verdicts;
    uint64_t tail_resent_bytes; /* sent once more over a faster path */
    uint64_t tail_resent_chunks;
    struct r2_seg_times failover; /* from a path's loss until what it carried is sent again */
    struct r2_seg_times resume;   /* ... until something sent after the loss has arrived */
    uint64_t timings_dropped;     /* collectives that were to be recorded and are not */
    uint64_t reserved[2];
};

/* The present value. */
struct r2_seg_gauges {
    uint64_t connections_open;
    uint64_t requests_in_flight;
    uint64_t memory_bytes;
    uint64_t sockets;
    uint64_t threads;
    uint64_t peers;
    uint64_t paths_up;
    uint64_t paths_total;
    uint64_t missing; /* bits of enum r2_seg_missing */
    uint64_t reserved[23];
};

/* Signals that this process cannot see, as bits. */
enum r2_seg_missing { R2_SEG_MISSING_NETLINK = 1, R2_SEG_MISSING_TCP_INFO = 4 };

enum r2_seg_nic_state {
    R2_SEG_NIC_UNKNOWN = 0,
    R2_SEG_NIC_HEALTHY,
    R2_SEG_NIC_SUSPECT,
    R2_SEG_NIC_FAILED,
    R2_SEG_NIC_PROBING,
    R2_SEG_NIC_RAMPING,
    R2_SEG_NIC_DRAINED,
    R2_SEG_NIC_DAMPED
};

enum r2_seg_link { R2_SEG_LINK_UNKNOWN = 0, R2_SEG_LINK_UP, R2_SEG_LINK_DOWN };

struct r2_seg_nic_counters {
    uint64_t tx_bytes;
    uint64_t rx_bytes;
    uint64_t tx_chunks;
    uint64_t rx_chunks;
    uint64_t failures;
    uint64_t recoveries;
    uint64_t errors; /* times that a path of it went down, whichever end was at fault */
    uint64_t replayed_bytes;
    uint64_t tx_rate; /* measured, bytes per second */
    uint64_t rx_rate;
    uint64_t inflight_bytes;
    uint64_t tx_segments; /* sent by the kernel over sockets, those sent again included */
    uint64_t retransmits; /* of them, sent again */
    uint64_t loss_ppm;    /* retransmits per million segments, of the last second or more */
    uint64_t reserved[2];
};

/* InfiniBand's numbers. */
enum r2_seg_port_state {
    R2_SEG_PORT_NOP = 0,
    R2_SEG_PORT_DOWN,
    R2_SEG_PORT_INIT,
    R2_SEG_PORT_ARMED,
    R2_SEG_PORT_ACTIVE
};

enum r2_seg_rdma_link { R2_SEG_RDMA_NONE = 0, R2_SEG_RDMA_INFINIBAND, R2_SEG_RDMA_ETHERNET };

struct r2_seg_nic {
    uint32_t seq;
    uint32_t used;
    uint32_t state;  /* enum r2_seg_nic_state */
    uint32_t link;   /* enum r2_seg_link */
    uint32_t weight; /* percent of the fastest NIC; 0: warm spare */
    uint32_t speed_mbps;
    int32_t numa;           /* -1: not known */
    uint32_t penalty;       /* flap damping */
    uint64_t since_real_ns; /* of the state */
    uint64_t since_mono_ns;
    uint64_t reuse_mono_ns; /* damped until */
    char name[R2_SEG_NAME];
    char addr[64];
    char ifname[16];
    char pci_path[96];
    char cause[80]; /* of the state */
    char fault[80]; /* what is injected now */
    struct r2_seg_nic_counters n;
    uint32_t draining; /* DRAINED: paths that are not closed yet; 0: nothing is on the NIC */
    uint32_t pad;
    /* The RDMA device behind it, in ibstat's words; "" if there is none or it is not used. */
    char rdma_device[24];
    uint32_t rdma_port;
    uint32_t rdma_state; /* enum r2_seg_port_state */
    uint32_t rdma_phys;  /* the physical state, by InfiniBand's numbers */
    uint32_t rdma_link;  /* enum r2_seg_rdma_link */
    uint32_t rdma_gbps;
    uint32_t queue_pairs;
    uint8_t gid[16];
    uint32_t rdma_lid; /* InfiniBand; 0: none */
    uint8_t reserved[4];
};

enum r2_seg_peer_state {
    R2_SEG_PEER_UNKNOWN = 0,
    R2_SEG_PEER_CONNECTING,
    R2_SEG_PEER_UP,
    R2_SEG_PEER_SUSPECT,
    R2_SEG_PEER_GONE,
    R2_SEG_PEER_CLOSED
};

enum r2_seg_direction {
    R2_SEG_DIR_NONE = 0,
    R2_SEG_DIR_TX = 1, /* we send; a fault on what leaves */
    R2_SEG_DIR_RX = 2,
    R2_SEG_DIR_BOTH = 3
};

/* What it is that waits: for any path, or, while others are up, for one that may carry a message
 * to or from memory of a device. */
enum r2_seg_waits_for { R2_SEG_WAITS_FOR_PATH = 0, R2_SEG_WAITS_FOR_DEVICE_PATH };

struct r2_seg_peer {
    uint32_t seq;
    uint32_t used;
    uint32_t state;     /* enum r2_seg_peer_state */
    uint32_t direction; /* enum r2_seg_direction: who sends to whom, of the connections open */
    uint32_t pid;
    uint32_t serial; /* grows with every use of the row */
    uint64_t since_real_ns;
    uint64_t since_mono_ns;
    uint8_t process_id[16];
    char host[64];
    char cause[80];
    uint64_t connections;
    uint64_t heard_mono_ns;
    uint64_t waits_mono_ns; /* since when something here waits for a path to it; 0: nothing does */
    uint64_t gives_up_mono_ns; /* when that ends with an error, as things stand; 0: never */
    uint32_t waits_for;        /* enum r2_seg_waits_for */
    uint32_t rank;             /* in the job, plus 1; 0: not known */
    uint8_t reserved[16];
};

enum r2_seg_path_state {
    R2_SEG_PATH_NEVER_REACHED = 0,
    R2_SEG_PATH_CONNECTING,
    R2_SEG_PATH_UP,
    R2_SEG_PATH_SUSPECT,
    R2_SEG_PATH_FENCING,
    R2_SEG_PATH_DOWN,
    R2_SEG_PATH_PROBING,
    R2_SEG_PATH_RAMPING,
    R2_SEG_PATH_DRAINED,
    R2_SEG_PATH_DAMPED,
    R2_SEG_PATH_CLOSED /* it was up, and nothing is wrong with it: the peer has left, say */
};

struct r2_seg_path_counters {
    uint64_t tx_bytes;
    uint64_t rx_bytes;
    uint64_t inflight_bytes; /* of a path that has ended: not sent again yet, as nobody has
                              * confirmed that it carries nothing more */
    uint64_t rate;           /* measured, bytes per second */
    uint64_t rtt_us;
    uint64_t failures;
    uint64_t replayed_bytes;
    uint64_t heard_mono_ns; /* when the other end was last heard on it; 0: never */
};

struct r2_seg_path {
    uint32_t seq;
    uint32_t used;
    uint32_t state; /* enum r2_seg_path_state */
    uint32_t peer;  /* row of the peer table */
    uint32_t nic;   /* row of the NIC table: the local end */
    uint32_t serial;
    uint64_t generation;
    uint64_t since_real_ns;
    uint64_t since_mono_ns;
    char remote_nic[R2_SEG_NAME];
    char cause[64];
    struct r2_seg_path_counters n;
    uint32_t weight;
    uint32_t streams;
    uint32_t via;           /* enum r2_seg_via */
    uint32_t penalty;       /* flap damping */
    uint64_t reuse_mono_ns; /* damped until */
    uint32_t spare; /* where we send: not 0: a better pair of NICs serves. It carries nothing while
                     * that is so, nor is it tried again if it is not up and others are */
    uint32_t loss_ppm;    /* retransmits per million segments, since it was made */
    uint64_t retransmits; /* segments sent again */
};

enum r2_seg_via { R2_SEG_VIA_TCP = 0, R2_SEG_VIA_VERBS };

enum r2_seg_verb {
    R2_SEG_VERB_NONE = 0,
    R2_SEG_VERB_PING,
    R2_SEG_VERB_FAIL_NIC,
    R2_SEG_VERB_RECOVER_NIC,
    R2_SEG_VERB_DRAIN_NIC,
    R2_SEG_VERB_UNDRAIN_NIC,
    R2_SEG_VERB_SET_WEIGHT,
    R2_SEG_VERB_PLAN,  /* no NIC */
    R2_SEG_VERB_RECORD /* no NIC */
};

/* A new kind needs: a line here, and R2_SEG_FAULT_LAST below. In io/fault.c r2_fault_kinds, names,
 * r2_fault_kind, r2_fault_allow, r2_fault_unmoved and r2_fault_text. KINDS, KINDS_HELP and
 * parse_kind in r2ccl_ctl/faults.py. With a value also r2_seg_command, r2_control_cmd, r2_fault,
 * check_fault and check in control/commands.c, fail_nic in engine/nic/niccmd.c, Command in
 * r2ccl_ctl/control.py, and who calls parse_kind. Its words in docs/failures.md. */
enum r2_seg_fault {
    R2_SEG_FAULT_NONE = 0,
    R2_SEG_FAULT_BLACKHOLE, /* bytes vanish, nothing answers or is reported */
    R2_SEG_FAULT_ERROR,     /* connections are reset, new ones fail */
    R2_SEG_FAULT_SLOW,      /* at most `rate` */
    R2_SEG_FAULT_LOSS       /* of pieces, `loss_ppm` cost a retransmission */
};

enum r2_seg_command_state {
    R2_SEG_CMD_FREE = 0,
    R2_SEG_CMD_POSTED,
    R2_SEG_CMD_RUNNING,
    R2_SEG_CMD_DONE,
    R2_SEG_CMD_FAILED
};

/* The client fills a free slot (clients exclude each other by a file lock on the slot's bytes),
 * then sets POSTED. The plugin answers with result, code and DONE or FAILED. The client reads the
 * answer and sets FREE; the plugin frees answers that nobody fetched for 30 s. */
struct r2_seg_command {
    uint32_t state;
    uint32_t verb;
    uint64_t request_id; /* of the client, random, not 0 */
    uint32_t client_pid;
    uint32_t fault;       /* enum r2_seg_fault, for FAIL_NIC */
    uint32_t direction;   /* enum r2_seg_direction, for FAIL_NIC */
    uint32_t loss_ppm;    /* of chunks, for LOSS */
    uint64_t rate;        /* bytes per second, for SLOW */
    uint64_t after_bytes; /* the fault starts after that many bytes on the NIC */
    uint64_t for_ms;      /* 0: until RECOVER_NIC */
    uint32_t weight;      /* for SET_WEIGHT */
    int32_t code;         /* 0 or -errno */
    uint64_t answered_mono_ns;
    uint64_t answered_id; /* request_id that the answer belongs to */
    char nic[R2_SEG_NAME];
    char result[256];
    uint32_t force;     /* for DRAIN_NIC: 1 drains the last usable NIC, too; else 0 */
    uint32_t plan;      /* for PLAN: 0: back to NCCL's own choice, 1: plans may be taken */
    uint64_t after_ops; /* for FAIL_NIC: it starts at that operation from now on; 0: no matter */
    uint32_t record;    /* for RECORD: 1: times of collectives are recorded, 0: no longer */
    uint8_t reserved[116];
};

enum r2_seg_event {
    R2_EV_NONE = 0,
    R2_EV_STARTED,
    R2_EV_ENDED,
    R2_EV_CONFIG,
    R2_EV_NIC_DOWN,
    R2_EV_NIC_UP,
    R2_EV_NIC_SUSPECT,
    R2_EV_NIC_PROBING,
    R2_EV_NIC_RAMPING,
    R2_EV_NIC_DRAINED,
    R2_EV_NIC_DAMPED,
    R2_EV_PATH_UP,
    R2_EV_PATH_DOWN,
    R2_EV_PATH_SUSPECT,
    R2_EV_PATH_PROBING,
    R2_EV_FENCE,
    R2_EV_FENCED,
    R2_EV_REPLAY,
    R2_EV_RESUME,
    R2_EV_FAULT_INJECTED,
    R2_EV_FAULT_CLEARED,
    R2_EV_PEER_SUSPECT,
    R2_EV_PEER_GONE,
    R2_EV_CONNECTION_OPENED,
    R2_EV_CONNECTION_CLOSED,
    R2_EV_CONNECTION_FAILED,
    R2_EV_NO_PATH,
    R2_EV_CRC_ERROR,
    R2_EV_WEIGHT,
    R2_EV_VERDICT,
    R2_EV_OPERATOR,
    R2_EV_WARNING,
    R2_EV_ERROR,
    R2_EV_PLAN,
    R2_EV_PATH_HEALTHY,
    R2_EV_PATH_DRAINED,
    R2_EV_PATH_DAMPED,
    R2_EV_PATH_RAMPING,
    R2_EV_PATH_CLOSED,
    R2_EV_NIC_HEALTHY
};

/* While event `number` (0, 1, ...) is written into slot number % rows, `stamp` is 2 x number + 1.
 * From then on it is 2 x number + 2. 0: never used. */
struct r2_seg_journal_entry {
    uint64_t stamp;
    uint64_t real_ns;
    uint64_t mono_ns;
    uint32_t event; /* enum r2_seg_event */
    uint32_t peer_pid;
    uint64_t generation;
    uint64_t bytes;
    uint64_t duration_us;
    char nic[R2_SEG_NAME];
    char remote_nic[R2_SEG_NAME];
    char peer_host[R2_SEG_NAME];
    char cause[80];
};

enum r2_seg_comm_state {
    R2_SEG_COMM_UNKNOWN = 0,
    R2_SEG_COMM_INIT, /* being made, of a non-blocking one */
    R2_SEG_COMM_READY,
    R2_SEG_COMM_FINALIZED,
    R2_SEG_COMM_REVOKED,
    R2_SEG_COMM_SUSPENDED,
    R2_SEG_COMM_FAILED
};

enum r2_seg_collective {
    R2_SEG_COLL_NONE = 0,
    R2_SEG_COLL_ALL_REDUCE,
    R2_SEG_COLL_REDUCE_SCATTER,
    R2_SEG_COLL_ALL_GATHER,
    R2_SEG_COLL_BROADCAST,
    R2_SEG_COLL_REDUCE,
    R2_SEG_COLL_ALL_TO_ALL,
    R2_SEG_COLL_GATHER,
    R2_SEG_COLL_SCATTER,
    R2_SEG_COLL_SEND,
    R2_SEG_COLL_RECV
};

/* One communicator of the process. Written by the shim (shim/comms), not by the plugin; without
 * the shim the table stays empty. `op` is the newest operation that was handed to NCCL; on GPUs it
 * may have ended long ago, so a hang shows in `operations`: the rank that everybody waits for has
 * handed over fewer than its peers. */
struct r2_seg_comm {
    uint32_t seq;
    uint32_t used;
    uint32_t state; /* enum r2_seg_comm_state */
    int32_t rank;
    uint32_t ranks;
    uint32_t nodes;         /* 0: not known */
    int32_t device;         /* -1: not known */
    uint32_t local_ranks;   /* ranks on this node; 0: not known */
    uint64_t id;            /* the same on all ranks */
    uint64_t parent;        /* id of the communicator that it was split or shrunk from; 0: none */
    uint64_t since_real_ns; /* of the state */
    uint64_t since_mono_ns;
    char name[40];
    char plan[40];       /* what collectives run on; empty: NCCL's own choice */
    char cause[88];      /* of the state, or why the plan is what it is */
    uint64_t operations; /* collectives handed over: the index of the next one */
    uint64_t p2p;
    uint64_t epoch; /* of the plan */
    uint64_t op_mono_ns;
    uint64_t op_bytes;                    /* count x size of the type */
    uint32_t op;                          /* enum r2_seg_collective */
    uint32_t calling;                     /* not 0: a thread is inside NCCL with it */
    uint64_t planned;                     /* collectives that R2CCL carried out */
    uint64_t plan_wait_ns;                /* longest wait of a collective for a change of plan */
    uint64_t plan_messages;               /* of this rank to others, about plans and errors */
    uint32_t plan_proposals, plan_agreed; /* at the lowest rank: how many, and what came of them */
    uint32_t plan_events; /* ... times that a node had more or less bandwidth left */
    uint32_t plan_rounds; /* ... that the planner looked at what nodes have left */
    uint64_t bus_bytes;   /* of its collectives, as nccl-tests counts bus bandwidth */
};

/* Times of one kind of collective of one communicator, up to so many bytes (and more than a quarter
 * of that). Bucket i of `count` holds those that took up to R2_SEG_SPAN_US << i microseconds, the
 * last one all longer ones. Only ever grow. */
struct r2_seg_timing {
    uint32_t seq;
    uint32_t used;
    uint32_t op; /* enum r2_seg_collective */
    int32_t rank;
    uint64_t comm; /* its id */
    uint64_t up_to;
    uint64_t bus_bytes; /* as nccl-tests counts bus bandwidth */
    uint64_t ns;        /* the sum of the times */
    uint64_t longest_ns;
    uint64_t count[R2_SEG_SPANS];
    uint32_t ranks;
    uint8_t reserved[12];
};

struct r2_segment {
    struct r2_seg_header header;
    struct r2_seg_process process;
    struct r2_seg_counters counters;
    struct r2_seg_gauges gauges;
    struct r2_seg_nic nics[R2_SEG_MAX_NICS];
    struct r2_seg_peer peers[R2_SEG_MAX_PEERS];
    struct r2_seg_path paths[R2_SEG_MAX_PATHS];
    struct r2_seg_command commands[R2_SEG_MAX_COMMANDS];
    struct r2_seg_journal_entry events[R2_SEG_MAX_EVENTS];
    struct r2_seg_comm comms[R2_SEG_MAX_COMMS];
    struct r2_seg_timing timings[R2_SEG_MAX_TIMINGS];
};
/* cdef end */

#define R2_SEG_FAULT_LAST R2_SEG_FAULT_LOSS

#define R2_SEG_MAGIC UINT64_C(0x4745534c43433252) /* the bytes "R2CCLSEG" */

_Static_assert(sizeof(struct r2_seg_table) == 24, "table");
_Static_assert(sizeof(struct r2_seg_header) == 312, "header");
_Static_assert(sizeof(struct r2_seg_process) == 536, "process");
_Static_assert(sizeof(struct r2_seg_counters) == 512, "counters");
_Static_assert(sizeof(struct r2_seg_gauges) == 256, "gauges");
_Static_assert(sizeof(struct r2_seg_nic) == 640, "nic");
_Static_assert(sizeof(struct r2_seg_peer) == 256, "peer");
_Static_assert(sizeof(struct r2_seg_path) == 256, "path");
_Static_assert(sizeof(struct r2_seg_command) == 512, "command");
_Static_assert(sizeof(struct r2_seg_journal_entry) == 256, "journal entry");
_Static_assert(sizeof(struct r2_seg_comm) == 328, "communicator");
_Static_assert(sizeof(struct r2_seg_timing) == 264, "timing");
_Static_assert(offsetof(struct r2_seg_nic, n) % 8 == 0, "counters aligned");
_Static_assert(offsetof(struct r2_seg_path, n) % 8 == 0, "counters aligned");
_Static_assert(sizeof(struct r2_segment) < 1024 * 1024, "containers give little shared memory");

#endif
