/* Which algorithm and protocol an operation takes: the stand-in's own costs, NCCL_ALGO and
 * NCCL_PROTO. It has no tuner plugins.
 *
 * Left alone, everything takes Ring (NCCL itself prefers Tree for small operations on many ranks):
 * Tree is for who asks, by NCCL_ALGO=Tree. */
#ifndef HOSTNCCL_TUNING_H
#define HOSTNCCL_TUNING_H

#include "kernels.h"

enum hn_algo { HN_TREE = 0, HN_RING = 1 }; /* NCCL's numbers */

ncclResult_t hn_tuning_choose(struct ncclComm *comm, enum hn_func func, size_t bytes,
                              enum hn_algo *algo, enum hn_proto *proto);
/* Point to point: by size and NCCL_PROTO alone. */
enum hn_proto hn_tuning_p2p(size_t bytes);

#endif
