/* Whether the ranks of a communicator can carry AllReduce out themselves, and doing it where the
 * plan in force says so.
 *
 * Two exchanges decide (agree/agree.h). First each rank says whether it can, and where it listens.
 * If all can, they connect; then each says whether it is connected to all others. A node may have
 * several ranks, each node as many: they make a communicator of the node (comms/node.h), and a rank
 * is connected to those in the same place of the other nodes. All ranks read the same answers, so
 * they decide alike: able, or NCCL's own choice with one line that says why. With
 * R2CCL_ALLREDUCE=direct they begin when they meet, and operations wait for the outcome: a rank
 * that learns nothing in time ends its communicator with an error, since none may guess. Else they
 * begin when a plan calls for it: until then a rank has no connection, thread or memory.
 *
 * Threads: ready, off, invited, exchanged, accept come from the service thread of shim/agree;
 * follow, takes and run from the one that runs the operations; the rest from any. Lock order: a
 * vote's, then shim/agree's. Results are NCCL's.
 */
#ifndef R2_COMMS_VOTE_H
#define R2_COMMS_VOTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agree/agree.h"
#include "comms/comms.h"

#define R2_VOTE_FROM (UINT64_C(256) << 10) /* bytes; smaller operations are NCCL's */

/* Arguments of ncclAllReduce, as words of 8 bytes. */
enum {
    R2_WORD_SEND,
    R2_WORD_RECV,
    R2_WORD_COUNT,
    R2_WORD_TYPE,
    R2_WORD_OP,
    R2_WORD_COMM,
    R2_WORD_STREAM,
    R2_WORDS
};

struct r2_vote;

/* always: from the first operation on. NULL: no memory. */
struct r2_vote *r2_vote_new(struct r2_comm *comm, int rank, int nranks, int device, bool always);
/* Before anything that follows is called. */
void r2_vote_bind(struct r2_vote *v, struct r2_agree *agree);

/* All ranks have met. rank_node[r]: which of the nodes rank r is on; numbers follow the ranks.
 * False: there will be no vote, it has said why. */
bool r2_vote_ready(struct r2_vote *v, const int *rank_node, int nodes);
/* R2CCL_ALLREDUCE=direct: they never will, or not soon: this rank takes NCCL's own choice for good.
 */
void r2_vote_off(struct r2_vote *v, const char *why);
/* Rank 0 wants the vote to begin, for a plan; maybe several times. */
void r2_vote_invited(struct r2_vote *v);
/* The watching thread, when something has changed. */
void r2_vote_look(struct r2_vote *v);
void r2_vote_exchanged(struct r2_vote *v, uint32_t round, const void *const *offers,
                       const size_t *len);

enum r2_vote_state { R2_VOTE_OPEN, R2_VOTE_YES, R2_VOTE_NO };
enum r2_vote_state r2_vote_state(struct r2_vote *v);

/* A plan (plan/plan.h) that rank 0 proposes: 0 and *object, for free(), or -errno. */
int r2_vote_accept(struct r2_vote *v, const void *plan, size_t len, void **object);
/* It is in force from the next operation on. */
void r2_vote_follow(struct r2_vote *v, const void *object, uint64_t epoch, uint64_t at);

/* NCCL refuses what comes while it is suspended, and after a revoke. */
bool r2_vote_refused(struct r2_vote *v);
/* Of ncclAllReduce, between ncclGroupStart and ncclGroupEnd, of ncclAllReduceConfig. */
enum r2_vote_call { R2_VOTE_PLAIN, R2_VOTE_GROUPED, R2_VOTE_CONFIGURED };
/* At least: an element of a type that we do not know has one byte. */
uint64_t r2_vote_bytes(const uint64_t *word);
/* Whether an AllReduce is R2CCL's. It follows from the plan in force, the vote and the call. Of the
 * call these count: its arguments, whether it is in a group, of ncclAllReduceConfig or captured
 * into a graph. NCCL asks them to be the same on all ranks. So the answer is the same, too. May
 * wait for the vote. The first one that a plan would take but for the call's sake is named in the
 * log. Then: runs it. */
bool r2_vote_takes(struct r2_vote *v, const uint64_t *word, enum r2_vote_call how);
int r2_vote_run(struct r2_vote *v, const uint64_t *word);

/* Nobody waits any more; what runs ends with an error. Any thread. After `abort` streams of the
 * application go on. When another rank has failed (`failed`) they do not, as behind NCCL's kernels:
 * their buffers hold no sums. */
void r2_vote_abort(struct r2_vote *v);
void r2_vote_failed(struct r2_vote *v);
/* The same for what NCCL runs within the node: it may wait for this process's streams, so first the
 * other. */
void r2_vote_abort_node(struct r2_vote *v);
/* What has been given is brought to its end, while all peers live. */
void r2_vote_finish(struct r2_vote *v);
/* Before the agreement's end: offers nothing any more. */
void r2_vote_close(struct r2_vote *v);
void r2_vote_free(struct r2_vote *v);

#endif
