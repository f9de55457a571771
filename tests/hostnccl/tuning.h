/* Which algorithm and protocol an operation takes: the stand-in's own costs, NCCL_ALGO and
 * NCCL_PROTO, and then a tuner plugin, found, loaded and called as NCCL does it.
 *
 * Left alone, everything takes Ring (NCCL itself prefers Tree for small operations on many ranks):
 * Tree is for who asks, by NCCL_ALGO=Tree or through the tuner's cost table. */
#ifndef HOSTNCCL_TUNING_H
#define HOSTNCCL_TUNING_H

#include "kernels.h"

enum hn_algo { HN_TREE = 0, HN_RING = 1 }; /* NCCL's numbers */

/* Loads the tuner on first need and initialises it for the communicator: NCCL_TUNER_PLUGIN ("none",
 * a name), libnccl-tuner.so, the net plugin's library; the newest of ncclTunerPlugin_v5 ... v2 (the
 * net API's version says which NCCL this is, HOSTNCCL_TUNER_VERSION caps). */
ncclResult_t hn_tuning_open(struct ncclComm *comm);
void hn_tuning_close(struct ncclComm *comm);

ncclResult_t hn_tuning_choose(struct ncclComm *comm, enum hn_func func, size_t bytes,
                              enum hn_algo *algo, enum hn_proto *proto);
/* Point to point: by size and NCCL_PROTO alone. */
enum hn_proto hn_tuning_p2p(size_t bytes);

#endif
