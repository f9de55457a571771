/* Between a GPU's memory and a window of host memory, for the direct AllReduce (direct/direct.h):
 * copies in order on two streams of our own, and gates on the application's streams.
 *
 * An application may hold the driver's locks until its streams are idle: cuMemFree and the first
 * call of a kernel that is loaded late do. Its stream waits for the operation, so who carries the
 * operation out may not call the driver. Therefore the application's thread queues all copies of an
 * operation ahead. The device makes some of them when a 32-bit word of the host allows it
 * (cuStreamWaitValue32). It says by another word that they are done (cuStreamWriteValue32). The
 * application's stream goes on when a third word, the gate, has the operation's number. Nothing
 * runs on the GPU's own processors.
 *
 * Threads: start, queue and gate from the application's, one call at a time; let and copied from
 * one thread, which never waits in them; open and open_all from any.
 * Errors: -errno; -ENOTSUP: the driver lacks something.
 */
#ifndef R2_DEVICE_COPIES_H
#define R2_DEVICE_COPIES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct r2_copies;

/* On CUDA device `device`, with a pinned window of `len` bytes (a multiple of 64). */
int r2_copies_new(struct r2_copies **out, int device, size_t len);
void *r2_copies_window(struct r2_copies *c);

/* Copies queued from now on wait for what is on `stream` now. */
int r2_copies_start(struct r2_copies *c, void *stream);
/* What is queued next this way waits until `n` more pieces may go. out: from the device. All calls
 * that queue may hold the caller up while the driver's queue is full. */
int r2_copies_hold(struct r2_copies *c, bool out, unsigned n);
/* `n` rows of `len` bytes. Each begins to_pitch and from_pitch bytes behind the one before. */
struct r2_copies_rows {
    size_t len, n;
    void *to;
    size_t to_pitch;
    const void *from;
    size_t from_pitch;
};
int r2_copies_queue(struct r2_copies *c, bool out, const struct r2_copies_rows *rows);
/* Behind the copies: the pieces of the last r2_copies_hold have ended. r2_copies_copied then says
 * so. */
int r2_copies_tell(struct r2_copies *c, bool out);
/* `stream` does not go on before operation `number` has been opened. */
int r2_copies_gate(struct r2_copies *c, void *stream, uint64_t number);

/* One more piece of those queued, or of those that will be, may go. */
void r2_copies_let(struct r2_copies *c, bool out);
/* How many pieces have ended since the last call. */
int r2_copies_copied(struct r2_copies *c, bool out);
/* All operations up to `number` are over. */
void r2_copies_open(struct r2_copies *c, uint64_t number);
/* For good: all copies go, also those to come, so that nobody waits who queues them. What is copied
 * means nothing then. */
void r2_copies_let_all(struct r2_copies *c);
/* The same, and all gates are open, also those to come. */
void r2_copies_open_all(struct r2_copies *c);

/* After r2_copies_open_all, or when all is over. Copies that wait for other work of the application
 * are waited for on a thread of their own. NULL is allowed. */
void r2_copies_free(struct r2_copies *c);

#endif
