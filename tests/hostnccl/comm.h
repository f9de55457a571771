/* A communicator of the stand-in and its parts, as NCCL has them:
 *   service thread    every plugin call about connections and memory (service.c, conn.c).
 *   progress thread   isend, irecv, test; sleeps when no operation is active (progress.c).
 *   "GPU" threads     fill send buffers, consume receive buffers, reduce (gpu.c, protocol.c).
 * Callers' threads make launches out of API calls (group.c, launch.c) and wait for them.
 */
#ifndef HOSTNCCL_COMM_H
#define HOSTNCCL_COMM_H

#include <pthread.h>

#include "bootstrap.h"
#include "net.h"
#include "reduce.h"
#include "util.h"

#define HN_MAX_DEPTH 8
#define HN_MAX_CHANNELS 64
#define HN_MAX_GPU_THREADS 16
#define HN_MAX_USER_OPS 64

enum hn_proto { HN_LL, HN_LL128, HN_SIMPLE, HN_PROTOS };

/* The buffer of one protocol on one connection: `depth` slots, one message each. */
struct hn_lane {
    char *base; /* NULL: the connection does not use this protocol */
    size_t slot_bytes;
    int depth;
    void *mhandle;
    bool scribbled[HN_MAX_DEPTH]; /* the slot holds the pattern and nobody may write it */
};

struct hn_slot {
    void *request; /* progress thread */
    void *event;   /* the profiler's; progress thread */
    size_t bytes;  /* on the wire; send: set before tail moves; receive: what test said */
    /* Receive: what the consumer expected, set before head moves. Atomic, since with LL only the
     * message's own flags order this write after the read for the slot's former message. */
    _Atomic size_t want;
};

/* One direction to one peer on one channel. Counters count messages and never wrap.
 *   send:    GPU fills and moves tail (release); progress sends up to tail (acquire), and moves
 *            head (release) when test says done, after scribbling; the GPU reuses below head+depth.
 *   receive: progress moves tail (release) when test says done; the GPU consumes, for Simple below
 *            tail (acquire), for LL by flags, and moves head (release); progress posts again
 *            (acquire) what is both tested and consumed. */
struct hn_conn {
    struct ncclComm *comm;
    int peer;
    int channel;
    int dev;
    bool send;
    bool p2p;
    atomic_bool ready;
    void *net_comm;
    void *listen;
    char handle[R2_NCCL_HANDLE_BYTES];
    struct hn_lane lanes[HN_PROTOS];
    _Atomic uint64_t tail;
    _Atomic uint64_t head;
    struct hn_slot slots[HN_MAX_DEPTH];
    /* progress thread */
    uint64_t posted, tested, retired;
    struct hn_pxop *current;
    /* GPU thread of the chain that owns the connection */
    uint64_t filled, consumed;
};

struct hn_pxop { /* what the progress thread does for one operation on one connection */
    struct hn_pxop *next;
    struct hn_conn *conn;
    enum hn_proto proto;
    unsigned func;  /* for setNetAttr */
    uint64_t total; /* messages */
    uint64_t posted;
    uint64_t finished;
    size_t exact_left;       /* p2p receive: bytes still to be posted; SIZE_MAX: post whole slots */
    bool begun;              /* the message that isend had no request for */
    const struct hn_op *api; /* until the progress thread has it */
    int mask;                /* what of it the profiler wants to know */
    void *task_event, *event;
};

struct hn_task; /* kernels.h */
struct hn_chain {
    struct hn_task *first, *last; /* run one after the other */
    struct hn_task *now;
    bool finished;
    char *rx, *tx; /* a slot of data each, for LL and LL128 */
};

struct hn_launch { /* all operations of a group on one communicator: one "kernel" */
    struct hn_launch *next;
    struct hn_chain *chains;
    int chain_count;
    int threads_left; /* comm->lock */
    bool done;        /* comm->lock */
    bool detached;    /* freed by the last GPU thread */
};

struct hn_job { /* for the service thread */
    struct hn_job *next;
    struct hn_conn *conn;
    /* -1: call again; else an enum r2_nccl_result */
    int (*step)(struct hn_conn *conn);
    int result; /* all below: comm->lock */
    bool done;
    bool cancelled; /* its result does not count */
};

struct hn_redop_user {
    bool used;
    struct hn_redop op;
    ncclDataType_t type;
};

struct ncclComm {
    uint64_t id;
    int rank, nranks, device;
    int channels, gpu_threads;
    struct hn_boot *boot;
    struct hn_netctx *net;
    bool profiled;
    void *prof_ctx, *prof_group;
    ncclConfig_t config;
    char net_name[64];
    unsigned splits;
    atomic_int async;   /* ncclResult_t */
    _Atomic int stop;   /* set by an error, abort or revoke: every wait ends */
    _Atomic int broken; /* set by an error or abort: nothing can be done with its boot any more */
    atomic_bool aborted, revoked, suspended;
    atomic_bool finalized;
    pthread_t init_thread;
    bool init_threaded;

    pthread_mutex_t lock; /* all below but the connections' insides */
    pthread_cond_t cond;
    int in_api;
    bool quit_service, quit_progress, quit_gpu;
    pthread_t service, progress, gpu[HN_MAX_GPU_THREADS];
    int threads_started; /* bits: 1 service, 2 progress; gpu_started GPU threads */
    int gpu_started;
    struct hn_job *jobs;
    struct hn_pxop *px_new;
    int px_active; /* queued and unfinished */
    struct hn_launch *launches, **launches_end;
    uint64_t launch_seq;
    struct hn_conn **ring_send, **ring_recv; /* [channels] */
    struct hn_conn **p2p_send, **p2p_recv;   /* [nranks * channels] */
    struct hn_redop_user user_ops[HN_MAX_USER_OPS];
};

/* First error wins; everything that waits on the communicator ends. */
void hn_comm_fail(struct ncclComm *comm, ncclResult_t result);
/* ncclSuccess, or the error every call on a broken communicator returns. */
ncclResult_t hn_comm_usable(struct ncclComm *comm);
/* The same of operations: also revoked and suspended ones refuse them. */
ncclResult_t hn_comm_check(struct ncclComm *comm);
/* Around every API call on a communicator: abort waits for callers to leave. */
ncclResult_t hn_comm_enter(struct ncclComm *comm);
void hn_comm_leave(struct ncclComm *comm);
ncclResult_t hn_comm_revoke(struct ncclComm *comm); /* inside enter and leave */
/* Waits until no launch and no message is under way, or the communicator broke. */
ncclResult_t hn_comm_drain(struct ncclComm *comm);
ncclResult_t hn_comm_create(struct ncclComm *comm, struct hn_boot *boot, struct hn_netctx *share);
void hn_comm_free(struct ncclComm *comm);

int hn_service_start(struct ncclComm *comm);
void hn_service_stop(struct ncclComm *comm);
/* Runs the jobs, all at once, and waits. First result that is not success. With a deadline (of
 * hn_util_now; 0: none, all are run to their ends) the rest is cancelled in three cases. One has
 * failed, the time is over (ncclRemoteError), or the communicator is stopped. */
ncclResult_t hn_service_run(struct ncclComm *comm, struct hn_job *jobs, int count,
                            uint64_t deadline);

struct hn_conn *hn_conn_new(struct ncclComm *comm, int peer, int channel, bool send, bool p2p);
int hn_conn_close(struct hn_conn *conn);
/* Makes the rings of all channels, or the p2p connections named by the two lists, in both
 * directions at once; a collective call among the peers concerned. */
ncclResult_t hn_conn_setup(struct ncclComm *comm, struct hn_conn **sends, int nsends,
                           struct hn_conn **recvs, int nrecvs);

int hn_progress_start(struct ncclComm *comm);
void hn_progress_stop(struct ncclComm *comm);
void hn_progress_add(struct ncclComm *comm, struct hn_pxop *ops);

int hn_gpu_start(struct ncclComm *comm);
void hn_gpu_stop(struct ncclComm *comm);
void hn_gpu_launch(struct ncclComm *comm, struct hn_launch *launch);
void hn_gpu_wait(struct ncclComm *comm, struct hn_launch *launch);
void hn_gpu_free(struct hn_launch *launch);

/* Scribbling over buffers that the plugin must not touch; see util.h for how much of them. */
void hn_scribble(void *data, size_t bytes);
/* Offset of the first byte that changed since, or -1. */
long hn_scribble_check(const void *data, size_t bytes);

#endif
