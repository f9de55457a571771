/* The pieces that NCCL cuts sends and receives into between nodes (NCCL_P2P_NET_CHUNKSIZE; alltoall
 * is made of them). NCCL takes 128 KiB for granted and has eight of a connection under way, which
 * is too little for several fast NICs (docs/decisions.md 40).
 */
#ifndef R2_ENGINE_NIC_P2PCHUNK_H
#define R2_ENGINE_NIC_P2PCHUNK_H

#include <stddef.h>
#include <stdint.h>

struct r2_peer;

/* Puts `bytes` (0: nothing; else rounded down to 4 KiB, and to what NCCL's buffers hold) into the
 * environment where the user has put nothing: at NCCL's first call of the plugin, before it has
 * read the variable. `nccl`: its version, 0 if unknown. Once, before the engine's I/O threads;
 * other threads that look into the environment meanwhile: docs/decisions.md 40. */
void r2_p2pchunk_start(uint64_t bytes, unsigned nccl);
/* What is to be said of the memory that the pieces take, where a control group (a container) allows
 * `limit` bytes to `ranks` processes; "" if that is enough. Pure. */
void r2_p2pchunk_memory(uint64_t limit, int ranks, uint64_t bytes, char *out, size_t cap);
/* The least memory.max of the control groups that `cgroup` (the text of /proc/self/cgroup) names,
 * under the folder `root`; 0: no limit, or not known. */
uint64_t r2_p2pchunk_limit(const char *root, const char *cgroup);
/* What NCCL takes here, in KiB, rounded up; more than the word holds: its largest. */
uint16_t r2_p2pchunk_word(void);
/* The peer's. Another one than ours is told to the user, once for each peer: NCCL does not look,
 * and what it sends and receives is then wrong. Under the peer's lock. */
void r2_p2pchunk_heard(struct r2_peer *p, uint16_t word);

#endif
