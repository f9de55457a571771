/* AllReduce carried out by R2CCL on the host, for one rank of one communicator. The data goes
 * through a bounded window of host memory. It leaves the application's input by pieces, and goes
 * over the plugin's net API to the owner of each piece. The owner adds all contributions in rank
 * order. The sums go back into the output. It is a caller of the net API as NCCL is, so failures of
 * NICs are below it.
 *
 * Bits: results are the same on all ranks and from run to run. By the schedule `direct` every
 * element is added in rank order 0, 1, ... p - 1, whoever owns it: the same under any weights, too.
 *
 * All ranks must give the same operations in the same order, by the same schedule, and have the
 * same memory and p.
 *
 * Threads: one progress thread for each object. Every function may be called from any thread,
 * r2_direct_free last. Nothing waits but r2_direct_wait, r2_direct_finish and r2_direct_free.
 * Errors: -errno; -ECONNRESET: a peer or every path to it is gone; -ECANCELED: r2_direct_abort.
 * -EMSGSIZE: ranks gave different operations; a rank may see of it only that a peer is gone.
 * After an error every operation ends with it, and the connections are closed, so that the peers
 * end, too.
 */
#ifndef R2_DIRECT_DIRECT_H
#define R2_DIRECT_DIRECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/copies.h"
#include "direct/links.h"
#include "plan/sizes.h"

#define R2_DIRECT_RANKS 256

struct r2_direct;

/* An operation. The buffers are the application's until it has ended. */
struct r2_direct_call {
    const void *in;
    void *out; /* may be `in` */
    uint64_t count;
    uint64_t whole; /* elements of the call that this is a slice of; 0: it is no slice */
    int type, op;   /* NCCL's numbers; r2_reduce_covers */
    /* By which schedule (plan/schedule.h). AVG goes by DIRECT in any case, since it needs all
     * contributions at once; so does what the memory is too small for (more than 128 ranks). */
    enum r2_schedule_kind schedule;
    const uint32_t *weights; /* DIRECT: [p], copied; NULL: equal */
    int slow;                /* R2CCL: as r2_schedule_r2ccl has them */
    uint32_t tail;
    unsigned int chunks;
    void *stream; /* the device's, in whose order the operation stands */
};

/* Where the application's buffers are.
 *
 * On some devices the calls that begin copies may wait for the application. With CUDA an
 * application that frees memory holds the driver's lock until its streams are idle. Such a device
 * queues its copies ahead: r2_direct_allreduce, on the application's thread, queues all copies of
 * the operation (direct/ahead.h). They wait until the progress thread, which calls no driver, lets
 * them go. */
struct r2_direct_device {
    /* The window, fit for copies. NULL: there is none. */
    void *(*alloc)(void *user, size_t len);
    void (*free)(void *user, void *memory, size_t len);
    /* Of the application's thread. NULL, all five: nothing is queued ahead. -errno: the operation
     * fails, and all later ones. Here is the operation's place in its stream. */
    int (*start)(void *user, const struct r2_direct_call *call);
    /* Copies: what is queued next this way waits until `n` more pieces may go; the copies (out as
     * in r2_exec_ops); the word that these pieces have ended. */
    int (*hold)(void *user, bool out, unsigned n);
    int (*queue)(void *user, bool out, const struct r2_copies_rows *rows);
    int (*tell)(void *user, bool out);
    /* The stream goes on when operation `number` has landed. */
    int (*gate)(void *user, const struct r2_direct_call *call, uint64_t number);
    /* Of r2_exec_ops, on the progress thread. With `queue`: one more piece may go this way. */
    int (*copy)(void *user, const struct r2_direct_call *call, bool out, bool written, void *slot,
                uint64_t offset, size_t len);
    int (*copied)(void *user, bool out);
};
/* The host: memcpy. */
extern const struct r2_direct_device r2_direct_host;

struct r2_direct_config {
    const struct r2_ncclnet_v12 *net;
    uint64_t id; /* of the communicator */
    int rank, p;
    int per_node;                          /* ranks on each node; 0: one */
    uint64_t nic_rate;                     /* bytes/s, this rank's part; 0: not known */
    struct r2_sizes_window memory;         /* slots alike on all ranks; {0}: r2_sizes_window */
    size_t credit;                         /* posted on a connection; 0: r2_sizes_credit */
    const struct r2_direct_device *device; /* NULL: r2_direct_host */
    void *user;                            /* its first argument */
    /* The state has changed; may be NULL. Called without a lock. */
    void (*changed)(void *user);
    /* The result of an operation is in its output; may be NULL. */
    void (*landed)(void *user, uint64_t number);
    void *caller; /* the first argument of these two */
};

enum r2_direct_state {
    R2_DIRECT_LISTENING, /* until r2_direct_connect */
    R2_DIRECT_CONNECTING,
    R2_DIRECT_READY,
    R2_DIRECT_FAILED,
};

/* Listens and takes the window. 0; -ENODEV: no NICs; -ENOMEM; others. */
int r2_direct_new(struct r2_direct **out, const struct r2_direct_config *config);
/* What the other ranks need of this one; constant. */
const struct r2_links_card *r2_direct_card(const struct r2_direct *d);
/* A rank's card; once for every other rank. -EPROTO: it is none. */
int r2_direct_meet(struct r2_direct *d, int rank, const void *card, size_t len);
/* All cards are there. */
void r2_direct_connect(struct r2_direct *d);
/* error: why it has failed, -errno; may be NULL. */
enum r2_direct_state r2_direct_state(struct r2_direct *d, int *error);

/* Hands an operation over. 0 and its number, or -errno. count 0 ends at once. One call at a time. A
 * device that queues copies may hold the caller up until earlier ones are made. */
int r2_direct_allreduce(struct r2_direct *d, const struct r2_direct_call *call, uint64_t *number);
/* Until the result is in the output, or never will be. */
int r2_direct_wait(struct r2_direct *d, uint64_t number);

/* Until what was given has ended, sends included, or has failed. A peer that is stopped is waited
 * for, as NCCL does: who went on would have an output that is no sum. */
void r2_direct_finish(struct r2_direct *d);

/* Everything ends with -ECANCELED. */
void r2_direct_abort(struct r2_direct *d);
/* As abort, and the thread has ended when it returns. NULL is allowed. */
void r2_direct_free(struct r2_direct *d);

#endif
