/* The control segment, the plugin's side: what the engine tells operators and what they ask of it.
 *
 * One object of POSIX shared memory per process (layout: segment.h), its name
 *     /r2ccl.<uid>.<inode of the PID namespace>.<pid>.<start ticks>[.<n>]
 * with n = 1, 2, ... for a process that opens again. Mode 0600, or 0640 with a group.
 *
 * Never in the way: the process works on memory of its own, and the object is a copy for others
 * (publish.c): at most 100 ms old, events at once. What others write there, or cut off, is put
 * right within a second. Without usable shared memory everything below works, unseen. Row -1 (a
 * full table) is accepted everywhere and leads nowhere. So the engine checks nothing.
 *
 * Life: a POSIX lock on the first byte of the object says "alive". The kernel drops it when the
 * process dies, whatever its children hold. The trap of these locks: closing ANY descriptor of the
 * object in this process drops the lock, so nothing in this process opens its own object again.
 * r2_control_close, and exit() without it, mark the object as ended and leave it for
 * `r2ccl-ctl journal --pid`. Objects of the same user that nobody holds any more are swept by
 * r2_control_open (older than an hour, or not among the 16 newest: shared memory is scarce in
 * containers) and by `r2ccl-ctl gc`.
 *
 * Threads: everything but open, close and child may be called from any thread at any time; two
 * writers of the same row wait for each other a few dozen instructions. Counters are relaxed
 * atomics (r2_count, r2_gauge). Readers never hold anything up. r2_control_poll: one thread.
 *
 * Times are taken inside (CLOCK_REALTIME, CLOCK_MONOTONIC). Text arguments may be NULL (empty),
 * are copied and cut to fit.
 */
#ifndef R2_CONTROL_CONTROL_H
#define R2_CONTROL_CONTROL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "control/segment.h"

struct r2_control;

struct r2_control_info {
    uint8_t process_id[16];
    const char *host;      /* NULL: gethostname */
    const char *job;       /* NULL or "": the launcher's job id, if there is one */
    int rank;              /* -1: what the launcher's variables say, if they do */
    int ranks;             /* 0: the same */
    uint64_t comm;         /* of the first communicator; 0: not known */
    uint32_t nccl_version; /* 0: not known */
    uint32_t net_api;      /* 0: not known */
    const char *mode;      /* "auto", "migrate", ... */
    int verify;
    const char *plugin_version; /* NULL: of this build */
    const char *shm_group;      /* group that may read, by name or number; NULL or "": none */
    enum r2_seg_plan plan;      /* R2CCL_PLAN and R2CCL_ALLREDUCE */
    int hidden;                 /* not 0: private memory, as R2CCL_SHM=0 asks */
};

/* Returns 0 with an object that others can see; -errno with one on private memory (say so in a
 * warning and go on); *out is never NULL. Sweeps old objects of this user. */
int r2_control_open(struct r2_control **out, const struct r2_control_info *info);
/* Marks as ended and lets go. Rows and counters of `ctl` must not be touched afterwards. */
void r2_control_close(struct r2_control *ctl);
/* In the child after fork (atfork handler): what is behind `ctl` becomes private memory at the same
 * addresses, the descriptor is closed; the parent's object stays untouched and locked. */
void r2_control_child(struct r2_control *ctl);
/* "/r2ccl.0.4026531836.17.123456", or "" without shared memory; lives as long as `ctl`. */
const char *r2_control_name(const struct r2_control *ctl);
/* `pid`: 0 where it is in another PID namespace. */
typedef void (*r2_control_holder_fn)(void *arg, int pid);
/* Other processes of this user with a control segment in the same shared memory, as a rule on the
 * same machine; `each`, unless NULL, hears of them. Returns how many. None where `ctl` is private.
 * Reads a directory: tens of microseconds. */
int r2_control_neighbours(const struct r2_control *ctl, r2_control_holder_fn each, void *arg);
/* The segment itself, for tests and for reading back. */
struct r2_segment *r2_control_segment(struct r2_control *ctl);
/* That of this process, for the shim, which is another library: NULL if there is none that others
 * can see. Valid for the life of the process. */
__attribute__((visibility("default"))) struct r2_segment *r2ccl_control_segment(void);

/* Later knowledge about the process. */
void r2_control_set_warning(struct r2_control *ctl, const char *text);
void r2_control_set_missing(struct r2_control *ctl, uint64_t bits); /* enum r2_seg_missing, adds */

/* Counters. The pointers live until close, are never NULL, and may be kept. */
struct r2_seg_counters *r2_control_counters(struct r2_control *ctl);
struct r2_seg_gauges *r2_control_gauges(struct r2_control *ctl);
struct r2_seg_nic_counters *r2_control_nic_counters(struct r2_control *ctl, int nic);
struct r2_seg_path_counters *r2_control_path_counters(struct r2_control *ctl, int path);

static inline void r2_count(uint64_t *counter, uint64_t n)
{
    __atomic_fetch_add(counter, n, __ATOMIC_RELAXED);
}
void r2_count_time(struct r2_seg_times *times, uint64_t ns);
static inline void r2_gauge(uint64_t *gauge, uint64_t value)
{
    __atomic_store_n(gauge, value, __ATOMIC_RELAXED);
}
static inline void r2_gauge_add(uint64_t *gauge, int64_t n)
{
    __atomic_fetch_add(gauge, (uint64_t)n, __ATOMIC_RELAXED);
}

/* NICs: rows in the order in which they are added, so row = the engine's NIC index. */
struct r2_control_nic {
    const char *name;
    const char *addr;
    const char *ifname;
    const char *pci_path;
    uint32_t speed_mbps;
    int numa; /* -1: not known */
    uint32_t weight;
    enum r2_seg_nic_state state;
    enum r2_seg_link link;
};
int r2_control_nic_add(struct r2_control *ctl, const struct r2_control_nic *nic); /* row or -1 */
/* Sets state, cause and since. Counts failures and recoveries, in the row and for the process. A
 * failure: a change from a state of use to FAILED or PROBING. A recovery: a change to HEALTHY from
 * anything but UNKNOWN and SUSPECT. */
void r2_control_nic_state(struct r2_control *ctl, int nic, enum r2_seg_nic_state state,
                          const char *cause);
void r2_control_nic_draining(struct r2_control *ctl, int nic, uint32_t paths);
void r2_control_nic_link(struct r2_control *ctl, int nic, enum r2_seg_link link);
void r2_control_nic_addr(struct r2_control *ctl, int nic, const char *addr, uint32_t speed_mbps);
void r2_control_nic_weight(struct r2_control *ctl, int nic, uint32_t weight);
void r2_control_nic_fault(struct r2_control *ctl, int nic, const char *text); /* NULL: none */
void r2_control_nic_damping(struct r2_control *ctl, int nic, uint32_t penalty,
                            uint64_t reuse_mono_ns);
/* Row of the NIC with this name, interface name or address, or -1. */
int r2_control_nic_find(struct r2_control *ctl, const char *name);

/* Peers: one row per peer process; the gauge `peers` is kept. */
struct r2_control_peer {
    uint8_t process_id[16];
    const char *host;
    uint32_t pid;
    enum r2_seg_peer_state state;
};
int r2_control_peer_add(struct r2_control *ctl, const struct r2_control_peer *peer); /* or -1 */
void r2_control_peer_state(struct r2_control *ctl, int peer, enum r2_seg_peer_state state,
                           const char *cause);
/* Host, process id, and rank plus 1 (0: not known), once the peer has said them. */
void r2_control_peer_describe(struct r2_control *ctl, int peer, const char *host, uint32_t pid,
                              uint32_t rank);
/* Connections open now, and who sends in them (bits of enum r2_seg_direction). */
void r2_control_peer_connections(struct r2_control *ctl, int peer, uint32_t open,
                                 enum r2_seg_direction direction);
/* Since when something here waits for a path to it, and when that ends with an error; 0: nothing
 * waits, or never. Single words, cheap. */
void r2_control_peer_waits(struct r2_control *ctl, int peer, enum r2_seg_waits_for what,
                           uint64_t since_mono_ns, uint64_t gives_up_mono_ns);
/* When it was last heard; a single word, cheap. */
void r2_control_peer_heard(struct r2_control *ctl, int peer, uint64_t mono_ns);
/* Frees the row and the rows of its paths. */
void r2_control_peer_remove(struct r2_control *ctl, int peer);

/* Paths: local NIC to one NIC of one peer. */
/* What is behind the NIC for RDMA. Only writes when something is different. */
struct r2_control_rdma {
    const char *device;
    uint32_t port, state, phys, link, gbps, queue_pairs, lid; /* as in struct r2_seg_nic */
    uint8_t gid[16];
};
void r2_control_nic_rdma(struct r2_control *ctl, int nic, const struct r2_control_rdma *rdma);
int r2_control_path_add(struct r2_control *ctl, int peer, int nic, const char *remote_nic);
void r2_control_path_via(struct r2_control *ctl, int path, enum r2_seg_via via);
/* Sets state, generation, cause and since. Counts failures, in the row and for the process: a
 * change to DOWN, also as an error of its NIC. Counts recoveries: to UP after a failure, but not
 * from SUSPECT. Keeps the gauges paths_up (UP and RAMPING) and paths_total. */
void r2_control_path_state(struct r2_control *ctl, int path, enum r2_seg_path_state state,
                           uint64_t generation, const char *cause);
void r2_control_path_weight(struct r2_control *ctl, int path, uint32_t weight, uint32_t streams);
/* A better pair of NICs serves, or none does any more. */
void r2_control_path_spare(struct r2_control *ctl, int path, bool spare);
/* Segments that its kernel has sent again, and their share of all, per million. */
void r2_control_path_resent(struct r2_control *ctl, int path, uint64_t resent, uint32_t ppm);
/* Flap damping: the penalty, and when it is tried again (CLOCK_MONOTONIC; 0: not damped). */
void r2_control_path_damping(struct r2_control *ctl, int path, uint32_t penalty,
                             uint64_t reuse_mono_ns);
/* Why it is as it is; state and counters stay. */
void r2_control_path_cause(struct r2_control *ctl, int path, const char *cause);
void r2_control_path_remote(struct r2_control *ctl, int path, const char *remote_nic);
void r2_control_path_remove(struct r2_control *ctl, int path);

/* Times of collectives (timings.c). One thread. */
struct r2_control_timing {
    uint64_t comm;
    int rank, ranks;
    enum r2_seg_collective op;
    uint64_t up_to; /* bytes: the class of its size */
    uint64_t bus_bytes;
};
/* False: its table is full. */
bool r2_control_timing(struct r2_control *ctl, const struct r2_control_timing *what, uint64_t ns);
void r2_control_recording(struct r2_control *ctl, enum r2_seg_recording state);

/* Journal: the newest R2_SEG_MAX_EVENTS events. Any thread; an event is dropped (and counted)
 * rather than waited for when its slot is still being written by a writer a whole ring behind. */
struct r2_control_event {
    enum r2_seg_event event;
    const char *nic;
    const char *remote_nic;
    const char *peer_host;
    uint32_t peer_pid;
    uint64_t generation;
    uint64_t bytes;
    uint64_t duration_us;
    const char *cause;
};
void r2_control_journal(struct r2_control *ctl, const struct r2_control_event *event);
/* The same of an event that may come all the time, while the journal is for failures as well: how
 * many of its kind were left out before goes into the cause. False: left out. `anyway`: not. */
struct r2_ratelimit;
bool r2_control_journal_seldom(struct r2_control *ctl, const struct r2_control_event *event,
                               struct r2_ratelimit *kind, bool anyway, uint64_t now);

/* Commands from operators: a checked private copy. */
struct r2_control_cmd {
    uint64_t request_id;
    enum r2_seg_verb verb;
    int nic;                         /* row, valid where the verb has a NIC */
    enum r2_seg_fault fault;         /* FAIL_NIC: not NONE */
    enum r2_seg_direction direction; /* FAIL_NIC: not NONE */
    uint32_t loss_ppm;               /* LOSS: 1 ... 1000000 */
    uint64_t rate;                   /* SLOW: bytes per second, not 0 */
    uint64_t after_bytes;
    uint64_t after_ops;
    uint64_t for_ms;
    uint32_t weight; /* SET_WEIGHT: 0 ... 1000000 */
    int force;       /* DRAIN_NIC: the last one, too */
    int plan;        /* PLAN: plans may be taken */
    int record;      /* RECORD: times of collectives are recorded */
    uint32_t client_pid;
};
/* Returns 0 or -errno; may write an answer for people into `result` (empty at the start). */
typedef int (*r2_control_handler)(void *arg, const struct r2_control_cmd *cmd, char *result,
                                  size_t size);
/* Takes what operators posted: PING, unknown verbs, unknown NICs and bad values are answered here,
 * the rest by `handler`. Also keeps the segment's sign of life fresh. Call it every 10 to 20 ms.
 * Returns the number of commands taken; costs a few loads when there is none. */
int r2_control_poll(struct r2_control *ctl, r2_control_handler handler, void *arg);

#endif
