/* Rendezvous of a communicator's ranks over TCP, through the unique id, and small messages between
 * them while it is set up. Every wait ends at HOSTNCCL_BOOTSTRAP_TIMEOUT seconds (default 60) or
 * when `*stop` becomes non-zero. One caller at a time per struct hn_boot.
 *
 * Address: HOSTNCCL_BOOTSTRAP_ADDR, else NCCL_COMM_ID (host and port of rank 0), else the first NIC
 * of NCCL_SOCKET_IFNAME, else the first that is not loopback, else loopback.
 */
#ifndef HOSTNCCL_BOOTSTRAP_H
#define HOSTNCCL_BOOTSTRAP_H

#include "sockets.h"
#include "util.h"

struct hn_boot;

/* Makes an id and starts the root thread that brings its ranks together. */
ncclResult_t hn_boot_new_id(ncclUniqueId *id);
/* Joins the ranks of the id. */
ncclResult_t hn_boot_join(const ncclUniqueId *id, int rank, int nranks, const _Atomic int *stop,
                          struct hn_boot **out);
/* For a split: open a listener, exchange its address by other means, then meet. */
ncclResult_t hn_boot_open(uint64_t secret, const _Atomic int *stop, struct hn_boot **out,
                          struct hn_addr *addr);
ncclResult_t hn_boot_meet(struct hn_boot *boot, int rank, int nranks, const struct hn_addr *addrs);
void hn_boot_stop(struct hn_boot *boot, const _Atomic int *stop); /* from now on */
void hn_boot_free(struct hn_boot *boot);

/* `data` has nranks blocks of `bytes`, own block filled. */
ncclResult_t hn_boot_allgather(struct hn_boot *boot, void *data, size_t bytes);
/* Does not wait for the receiver. */
ncclResult_t hn_boot_send(struct hn_boot *boot, int peer, uint64_t tag, const void *data,
                          size_t bytes);
ncclResult_t hn_boot_recv(struct hn_boot *boot, int peer, uint64_t tag, void *data, size_t bytes);
uint64_t hn_boot_deadline(void);

#endif
