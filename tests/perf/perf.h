/* r2ccl_perf: measures and checks NCCL's collectives through NCCL's public interface only, on the
 * real library with GPUs as on the stand-in with host memory.
 *
 * Exit codes: 0 all values right, 1 wrong values, 2 usage or an NCCL error, 3 an iteration did not
 * finish within --timeout. One thread runs the benchmark; a second one only watches the time.
 */
#ifndef R2CCL_PERF_H
#define R2CCL_PERF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "../hostnccl/nccl.h"

enum perf_op {
    PERF_ALL_REDUCE,
    PERF_REDUCE_SCATTER,
    PERF_ALL_GATHER,
    PERF_BROADCAST,
    PERF_REDUCE,
    PERF_ALLTOALL,
    PERF_SENDRECV,
    PERF_OPS
};

struct perf_options {
    size_t min_bytes, max_bytes, step_bytes;
    double factor; /* 0: step_bytes is added */
    int iters, warmup;
    bool check, check_every, blocking;
    ncclDataType_t type;
    ncclRedOp_t redop;
    int root;
    enum perf_op op;
    const char *json, *timeline, *nccl;
    const char *until; /* a file that ends the loop; NULL: none */
    double duration;   /* seconds; 0: the table of sizes */
    int window;        /* iterations per line of the timeline */
    double timeout;    /* seconds per iteration; 0: none */
    uint64_t seed;
};

/* options.c. Exits with 0 (--help) or 2. */
void perf_options_parse(struct perf_options *o, int argc, char **argv);
extern const char *const perf_op_names[PERF_OPS];
extern const char *const perf_type_names[ncclNumTypes];
extern const char *const perf_redop_names[ncclNumOps];

struct perf_ranks {
    int rank, nranks, local_rank;
    char host[256];
    int port;       /* where rank 0 hands out the unique id */
    char token[64]; /* the launcher's name for this start of the job, or for the job; "": none */
    bool one_start; /* no other start has it (R2CCL_RENDEZVOUS_TOKEN) */
};

/* ranks.c */
void perf_ranks_read(struct perf_ranks *r);
/* Rank 0's bytes come to all; exits with 2 when for R2CCL_RENDEZVOUS_TIMEOUT seconds (60) none of
 * the ranks that are missing has come. */
void perf_ranks_share(const struct perf_ranks *r, void *data, size_t bytes);

struct perf_nccl { /* the functions in use, looked up at run time */
    bool standin;
    ncclResult_t (*Synchronize)(ncclComm_t); /* the stand-in's, else NULL */
    ncclResult_t (*GetVersion)(int *);
    ncclResult_t (*GetUniqueId)(ncclUniqueId *);
    ncclResult_t (*CommInitRank)(ncclComm_t *, int, ncclUniqueId, int);
    ncclResult_t (*CommDestroy)(ncclComm_t);
    ncclResult_t (*CommAbort)(ncclComm_t);
    ncclResult_t (*CommGetAsyncError)(ncclComm_t, ncclResult_t *);
    const char *(*GetErrorString)(ncclResult_t);
    const char *(*GetLastError)(ncclComm_t);
    ncclResult_t (*GroupStart)(void);
    ncclResult_t (*GroupEnd)(void);
    ncclResult_t (*AllReduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t,
                              ncclStream_t);
    ncclResult_t (*ReduceScatter)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t,
                                  ncclComm_t, ncclStream_t);
    ncclResult_t (*AllGather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t,
                              ncclStream_t);
    ncclResult_t (*Broadcast)(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t,
                              ncclStream_t);
    ncclResult_t (*Reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, int,
                           ncclComm_t, ncclStream_t);
    ncclResult_t (*Send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, ncclStream_t);
    ncclResult_t (*Recv)(void *, size_t, ncclDataType_t, int, ncclComm_t, ncclStream_t);
};

/* lib.c: NCCL, and memory of the GPU or the host. Errors end the program with 2. */
void perf_lib_load(struct perf_nccl *n, const char *path);
void perf_gpu_open(const struct perf_nccl *n, int local_rank);
bool perf_gpu_used(void);
void *perf_gpu_alloc(size_t bytes);
void perf_gpu_free(void *data);
void perf_gpu_write(void *to, const void *from, size_t bytes);
void perf_gpu_read(void *to, const void *from, size_t bytes);
ncclStream_t perf_gpu_stream(void);
/* 1 all done, 0 not yet. */
int perf_gpu_query(void);

/* data.c: every rank's input is a table of a prime number of elements, repeated, shifted by the
 * iteration. So stale, missing and misplaced data differ from what is expected. */
enum { PERF_PERIOD = 131071 };
struct perf_data {
    ncclDataType_t type;
    size_t es;
    bool tolerant; /* averages of floating types are not exact */
    int nranks;
    int rows;              /* as many as ranks, one where nothing is checked */
    unsigned char *inputs; /* [rows][PERIOD] elements */
    unsigned char *result; /* [PERIOD]: all inputs reduced */
};
void perf_data_init(struct perf_data *d, const struct perf_options *o, int nranks);
void perf_data_fill(const struct perf_data *d, void *to, const unsigned char *table, size_t first,
                    size_t count, uint64_t iteration);
size_t perf_data_wrong(const struct perf_data *d, const void *got, const unsigned char *table,
                       size_t first, size_t count, uint64_t iteration);

struct perf { /* everything together */
    struct perf_options o;
    struct perf_ranks ranks;
    struct perf_nccl nccl;
    struct perf_data data;
    ncclComm_t comm;
    void *send, *recv, *host, *small; /* small: a few doubles to agree on */
    size_t room;
};

struct perf_result {
    double seconds; /* per iteration, mean over ranks */
    double slowest; /* the slowest rank's, with --duration; 0: not known */
    double cpu;     /* CPU seconds per iteration, sum over ranks */
    double algbw, busbw;
    int64_t wrong; /* all ranks; -1 not checked */
    bool valid;
};

/* ops.c: one operation on `bytes` (the size column); buffers of send_count and recv_count. */
struct perf_shape {
    size_t count;      /* the argument given to NCCL */
    size_t bytes;      /* size column, rounded down to whole elements */
    size_t send_count; /* elements in the send buffer */
    size_t recv_count;
    double bus; /* bus bandwidth over algorithm bandwidth */
    bool in_place;
};
void perf_ops_shape(const struct perf *p, size_t bytes, struct perf_shape *s);
ncclResult_t perf_ops_start(struct perf *p, const struct perf_shape *s, const void *send,
                            void *recv);
void perf_ops_fill(struct perf *p, const struct perf_shape *s, void *send, void *recv,
                   bool in_place, uint64_t iteration);
size_t perf_ops_wrong(struct perf *p, const struct perf_shape *s, const void *recv,
                      uint64_t iteration);
/* Where the buffers lie for an in-place call. */
void perf_ops_in_place(const struct perf *p, const struct perf_shape *s, void **send, void **recv);

/* run.c */
void perf_run_table(struct perf *p);
void perf_run_loop(struct perf *p);
double perf_run_now(void);

/* watch.c: the time limit. */
void perf_watch_start(struct perf *p);
void perf_watch_begin(const char *what, size_t bytes, uint64_t iteration);
void perf_watch_end(void);
/* Prints what failed, aborts the communicator in bounded time, exits with 2. */
void perf_watch_failed(struct perf *p, ncclResult_t result, const char *what)
    __attribute__((noreturn));

/* report.c */
void perf_report_head(const struct perf *p);
void perf_report_line(const struct perf *p, const struct perf_shape *s,
                      const struct perf_result *out, const struct perf_result *in);
void perf_report_window(const struct perf *p, const struct perf_shape *s, uint64_t iteration,
                        const struct perf_result *r);
/* Averages, JSON; returns the exit code. */
int perf_report_end(const struct perf *p);

void perf_die(const char *fmt, ...) __attribute__((noreturn, format(printf, 1, 2)));

#endif
