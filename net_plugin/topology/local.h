/* The NICs of this process: the table that the engine fills when it starts, and all rooms above
 * read.
 *
 * `n` and each NIC are fixed before threads start and valid to the process's end. Only where a NIC
 * is (ifindex, family, addr, socklen, prefixlen) may change later: I/O thread 0 writes it with
 * r2_local_move, others read it with r2_local_now.
 */
#ifndef R2_TOPOLOGY_LOCAL_H
#define R2_TOPOLOGY_LOCAL_H

#include "topology/nics.h"

struct r2_local {
    int n;
    struct r2_nic nics[R2_MAX_NICS];
};
extern struct r2_local r2_local;

/* NULL if `dev` is out of range. Any thread. */
const struct r2_nic *r2_local_nic(int dev);
/* A copy with the address and interface of this moment. `dev` must be in range. Any thread. */
void r2_local_now(int dev, struct r2_nic *out);
/* Bytes/s of all NICs with a weight at the start, as they say it. One that does not say counts as
 * 100 Gbit/s: most of these are a virtual machine's. 0: there is none, or net->init was not called
 * yet. Any thread. */
__attribute__((visibility("default"))) uint64_t r2ccl_local_speed(void);
/* Takes interface and address from `now`. I/O thread 0. */
void r2_local_move(int dev, const struct r2_nic *now);

#endif
