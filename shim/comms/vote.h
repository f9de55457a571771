/* Whether the ranks of a communicator carry AllReduce out themselves (R2CCL_ALLREDUCE=direct), and
 * doing it.
 *
 * Two exchanges decide (agree/agree.h). First each rank says whether it can, and where it listens.
 * If all can, they connect; then each says whether it is connected to all others. A node may have
 * several ranks, each node as many: they make a communicator of the node (comms/node.h), and a rank
 * is connected to those in the same place of the other nodes. All ranks read
 * the same answers, so they decide alike: direct, or NCCL's own choice with one line that says why.
 * A rank that learns nothing in time ends its communicator with an error: none may guess.
 *
 * Threads: ready, off, exchanged come from the service thread of shim/agree, the rest from any.
 * Lock order: a vote's, then shim/agree's. Results are NCCL's.
 */
#ifndef R2_COMMS_VOTE_H
#define R2_COMMS_VOTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "agree/agree.h"
#include "comms/run.h"

struct r2_vote;

/* NULL: no memory. */
struct r2_vote *r2_vote_new(struct r2_comm *comm, int rank, int nranks, int device);
/* Before anything that follows is called. */
void r2_vote_bind(struct r2_vote *v, struct r2_agree *agree);

/* All ranks have met. rank_node[r]: which of the nodes rank r is on; numbers follow the ranks. */
void r2_vote_ready(struct r2_vote *v, const int *rank_node, int nodes);
/* They never will, or not soon: this rank takes NCCL's own choice for good. */
void r2_vote_off(struct r2_vote *v, const char *why);
/* The watching thread, when something has changed. */
void r2_vote_look(struct r2_vote *v);
void r2_vote_exchanged(struct r2_vote *v, uint32_t round, const void *const *offers,
                       const size_t *len);

/* Weights. Rank 0 hears what bandwidth each rank has left and proposes weights as shim/agree's
 * plan, which all ranks follow from the same operation on. Where R2CCL_PLAN has plans of its own,
 * weights stay equal.
 *
 * reported, decided, lead: rank 0; accept, decided: the service thread, as in r2_agree_ops. */
void r2_vote_reported(struct r2_vote *v, int rank, const struct r2_agree_report *report);
void r2_vote_lead(struct r2_vote *v);
void r2_vote_decided(struct r2_vote *v, bool committed);
/* 0 and *object, for free(); -EPROTO. */
int r2_vote_accept(struct r2_vote *v, const void *plan, size_t len, void **object);
/* From the next operation on; the thread that runs them. `object` lives until the next one. */
void r2_vote_follow(struct r2_vote *v, const void *object, uint64_t epoch, uint64_t at);

/* Runs an AllReduce outside of groups: true, and *result is what the call returns. False: NCCL has
 * it. Which of both follows from the arguments and the vote, so that it is the same on all ranks.
 * Waits for the vote. */
bool r2_vote_take(struct r2_vote *v, const struct r2_op *op, int *result);

/* Nobody waits any more; what runs ends with an error. Any thread. */
void r2_vote_abort(struct r2_vote *v);
/* The same for what NCCL runs within the node: it may wait for this process's streams, so first the
 * other. */
void r2_vote_abort_node(struct r2_vote *v);
/* What has been given is brought to its end for the peers' sake, which takes seconds at most. */
void r2_vote_finish(struct r2_vote *v);
/* Before the agreement's end: offers nothing any more. */
void r2_vote_close(struct r2_vote *v);
void r2_vote_free(struct r2_vote *v);

#endif
