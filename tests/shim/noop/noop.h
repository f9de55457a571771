/* An NCCL that does nothing, for tests and for the cost of the shim. Its functions come from the
 * shim's table, so all of them are there. Like the real one it calls its own public functions
 * through the dynamic linker: ncclCommInitAll calls ncclGetUniqueId, ncclBcast calls ncclBroadcast,
 * every collective opens and closes a group.
 *
 * What follows tells tests about it; take it with dlsym. */
#ifndef NOOP_H
#define NOOP_H

#include <stdatomic.h>
#include <stdint.h>

#include "api/ids.h"
#include "api/nccl.h"

#define API __attribute__((visibility("default")))

#define NOOP_SHORT 2 /* of `suspended`: the next ncclCommSuspend fails, for want of memory */

struct r2_nccl_comm {
    int rank, nranks;
    int id; /* the first bytes of what it was made from; 0: of another communicator */
    struct r2_nccl_config config; /* of ncclCommInitRankConfig, as much as we know of it */
    atomic_int aborted, revoked, suspended, error, inside;
    atomic_int answered;          /* its peers answer, also while those of others do not */
    atomic_int hold_asks, asking; /* while the first is set, questions about it wait; how many do */
    atomic_int *stops; /* set when NCCL tells its kernels to stop: an abort, revoke or shrink */
    atomic_int *waits; /* its kernels are behind others on a stream: their end waits for this */
};

/* Calls of a function that came from outside, not from the no-op NCCL itself; -1: no such name. */
API long noop_calls(const char *name);
/* What the next call of any function returns, once. */
API void noop_next_result(int result);
/* Makes every collective, finalize, revoke and suspend wait until this is undone or its
 * communicator is aborted. */
API void noop_hang(int on);

/* Makes the next `n` communicators fail to be made from an id. */
API void noop_fail_inits(int n);
/* Holds every making from an id until this is undone. */
API void noop_hold_inits(int on);
/* From now on the operations of the calling thread are noted, at most NOOP_TRACE. noop_traced: how
 * many, and the communicator and number of elements of each. */
#define NOOP_TRACE 64
#define NOOP_DESTROYED SIZE_MAX       /* elements of what ncclRedOpDestroy is noted as */
#define NOOP_SUSPENDED (SIZE_MAX - 1) /* ... ncclCommSuspend */
#define NOOP_RESUMED (SIZE_MAX - 2)
API void noop_trace(void);
API int noop_traced(r2_nccl_comm *comms, size_t *counts);

/* Ends of communicators that waited in vain for what `waits` points to, for 10 s. */
API int noop_stuck(void);
/* Communicators that were made and have not been ended. */
API long noop_live(void);

/* Inside. */
void noop_traces(r2_nccl_comm comm, size_t count);
int noop_note(enum r2_api id);
int noop_enqueue(enum r2_api id); /* of an operation: an error is its group's, too */
int noop_collective(enum r2_api id, r2_nccl_comm comm);
extern __thread int noop_within __attribute__((tls_model("initial-exec")));

#endif
