/* The engine's public interface: what nccl_abi/ calls, and nothing else of the engine.
 *
 * Threads: every function may be called from any thread. On one connection NCCL calls
 * isend/irecv/test from one thread and reg/dereg/close possibly from another, concurrently.
 * No function here blocks on the peer (invariant "NCCL's threads never block"); r2_engine_dereg,
 * r2_engine_close and r2_engine_finalize wait only for local threads that are inside a bounded
 * system call.
 *
 * Errors: 0 or -errno. -ECONNRESET, -ETIMEDOUT: the peer or every path to it is gone for good;
 * -EMSGSIZE: a send larger than its receive; -EINVAL: misuse; -ENOMEM and others: local system.
 *
 * Units: sizes and offsets in bytes, times in nanoseconds unless the name says otherwise.
 */
#ifndef R2_ENGINE_ENGINE_H
#define R2_ENGINE_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/core/colltimes.h"
#include "topology/nics.h"
#include "util/log.h"

#define R2_HANDLE_BYTES 128
#define R2_MAX_REQUESTS 32 /* per connection, NCCL_NET_MAX_REQUESTS */

struct r2_ctx;    /* one r2_engine_init, that is, one NCCL communicator */
struct r2_listen; /* one listen communicator */
struct r2_conn;   /* one send or receive communicator */
struct r2_mr;     /* one registered range of memory */
struct r2_req;    /* one isend or irecv in flight */

/* Starts the engine on the first call of the process, and makes a context. The first listen or
 * connect finds NICs and makes threads and the control segment. The context stays valid to the
 * process's end. */
int r2_engine_init(struct r2_ctx **ctx, uint64_t comm_id, r2_log_fn log);

/* In a child that was forked off a process with an engine: nothing works there. Any thread, no
 * lock. */
bool r2_engine_in_child(void);

/* Who calls, for operators: NCCL's version number (22809 is 2.28.9) and that of its net API; 0: not
 * known. Before the first listen or connect. */
void r2_engine_called_by(unsigned nccl_version, unsigned net_api);

/* What a communicator asks for (ncclConfig_t.trafficClass; below 0: nothing). All communicators of
 * two processes share the paths between them. So only the first one that is asked for counts, on
 * paths that are made from then on. Another is refused with a warning. Any thread. */
void r2_engine_ask_traffic_class(int asked);

/* Number of usable NICs; 0 is no error. The set is fixed for the life of the process. */
int r2_engine_devices(int *count);
/* Description of NIC `dev` (topology/local.h); NULL if `dev` is out of range. */
const struct r2_nic *r2_engine_nic(int dev);

/* Fills `handle` (R2_HANDLE_BYTES), which the application carries to the connecting side. */
int r2_engine_listen(struct r2_ctx *ctx, int dev, void *handle, struct r2_listen **out);
/* `*out` stays NULL while the connection is being made: call again with the same handle. Chunks go
 * over NIC `dev` before they go over others. ~dev, which NCCL never says: each goes over the NIC
 * that is done with it soonest. */
int r2_engine_connect(struct r2_ctx *ctx, int dev, void *handle, struct r2_conn **out);
int r2_engine_accept(struct r2_listen *listen, struct r2_conn **out);

/* A registration names a range; a request names the registration that covers its buffer (NULL is
 * allowed for memory that outlives the connection). r2_engine_dereg cancels unfinished requests
 * of the range and returns when no thread, socket or queue pair can touch it any more; -ETIMEDOUT
 * if a NIC did not confirm that. `type` is NCCL's; anything but host is memory that only NICs may
 * touch. */
#define R2_MEMORY_TYPE_HOST 1
int r2_engine_reg(struct r2_conn *conn, void *data, size_t size, int type, struct r2_mr **out);
/* Kinds of memory (NCCL's numbers: 1 host, 2 CUDA, 4 DMA buffer) that NIC `dev` is to be used for:
 * memory of devices only where every NIC can, so that each can stand in for another. */
unsigned r2_engine_memory(int dev);
/* The same for memory of a device that the kernel knows as a DMA buffer; `fd` stays the caller's.
 */
int r2_engine_reg_dmabuf(struct r2_conn *conn, void *data, size_t size, int type, uint64_t offset,
                         int fd, struct r2_mr **out);
int r2_engine_dereg(struct r2_conn *conn, struct r2_mr *mr);

/* `*out` NULL with return 0: no request free, try later. The buffer must stay until done. */
int r2_engine_isend(struct r2_conn *conn, void *data, size_t size, int tag, struct r2_mr *mr,
                    struct r2_req **out);
int r2_engine_irecv(struct r2_conn *conn, void *data, size_t size, int tag, struct r2_mr *mr,
                    struct r2_req **out);
/* The same for a buffer that is read before the receive is done: every 128-byte line of it becomes
 * visible in ascending order, its last 8 bytes last (invariant "the GPU reads early"). Costs a
 * copy. */
int r2_engine_irecv_lines(struct r2_conn *conn, void *data, size_t size, int tag, struct r2_mr *mr,
                          struct r2_req **out);
/* After a receive into memory of a device: `*out` is done when everything that the connection's
 * receives brought so far is visible to the device; NULL: there is nothing to do. It ends with an
 * error if a NIC that wrote cannot be made to show it, not even by the device's driver. */
int r2_engine_iflush(struct r2_conn *conn, void *data, struct r2_mr *mr, struct r2_req **out);
/* A send is done when nothing reads the buffer any more and every byte has been acknowledged. Bytes
 * in a copy of the engine's own (R2CCL_BUFFERED) count as acknowledged. `*done` is always written.
 * When 1, `*size` (may be NULL) is the number of bytes moved and `req` is gone: it must not be used
 * again. A negative return also ends the request. */
int r2_engine_test(struct r2_req *req, int *done, size_t *size);

int r2_engine_close(struct r2_conn *conn);
int r2_engine_close_listen(struct r2_listen *listen);
/* Closes what is left of the context: half-open connects and listens; connections are their users',
 * and while there is one the context is in use and nothing of it is closed. It stays valid to the
 * process's end (some 60 bytes): NCCL 2.28.3 shares it between communicators and finalizes it with
 * each of them. */
int r2_engine_finalize(struct r2_ctx *ctx);

/* Times of collectives, as NCCL's profiler tells them (core/colltimes.h). Any thread.
 *
 * A communicator begins and ends. `mask`: the word by which its NCCL knows what to tell; the
 * operator sets and clears `bits` in it, in the running job. It is not touched once the last
 * communicator that gave it has ended. False: the communicator is not recorded. */
bool r2_engine_coll_comm_begins(int *mask, int bits);
void r2_engine_coll_comm_ends(const int *mask);
uint64_t r2_engine_coll_begin(const struct r2_coll *what);
void r2_engine_coll_handed(uint64_t handle);
bool r2_engine_coll_op_begin(uint64_t handle);
void r2_engine_coll_op_end(uint64_t handle);
void r2_engine_coll_moves(uint64_t handle, bool sent);

#endif
