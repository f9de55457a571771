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

#include "nccl/ids.h"
#include "nccl/nccl.h"

#define API __attribute__((visibility("default")))

struct r2_nccl_comm {
    int rank, nranks;
    atomic_int aborted, revoked, error, inside;
};

/* Calls of a function that came from outside, not from the no-op NCCL itself; -1: no such name. */
API long noop_calls(const char *name);
/* What the next call of any function returns, once. */
API void noop_next_result(int result);
/* Makes every collective, finalize, revoke and suspend wait until this is undone or its
 * communicator is aborted. */
API void noop_hang(int on);

/* Inside. */
int noop_note(enum r2_api id);
int noop_enqueue(enum r2_api id); /* of an operation: an error is its group's, too */
int noop_collective(enum r2_api id, r2_nccl_comm comm);
extern __thread int noop_within __attribute__((tls_model("initial-exec")));

#endif
