/* Between a GPU's memory and a window of host memory, for the direct AllReduce (direct/direct.h):
 * copies in order on two streams of our own, and gates on the application's streams.
 *
 * An operation begins on the device when what the application put on its stream before it is over
 * (an event), and the stream goes on when the host has opened the operation's gate (a 32-bit word
 * that the driver's cuStreamWaitValue32 looks at). Nothing runs on the GPU's own processors.
 *
 * Threads: mark, forget and gate from the application's; r2_copies_open from any; the rest from one
 * thread. Errors: -errno; -ENOTSUP: the driver lacks something.
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

/* Behind what is on `stream` now: what an operation waits for. r2_copies_begin or r2_copies_forget
 * frees it. */
int r2_copies_mark(struct r2_copies *c, void *stream, void **event);
void r2_copies_forget(struct r2_copies *c, void *event);
/* `stream` does not go on before operation `number` has been opened. */
int r2_copies_gate(struct r2_copies *c, void *stream, uint64_t number);
/* All operations up to `number` are over. */
void r2_copies_open(struct r2_copies *c, uint64_t number);

/* Around the copies of an operation, on its thread. begin frees the event. */
int r2_copies_begin(struct r2_copies *c, void *event);
void r2_copies_end(struct r2_copies *c);
/* Begins a copy. 1; 0: too many are under way; -EIO. out: from the device. */
int r2_copies_copy(struct r2_copies *c, bool out, void *to, const void *from, size_t len);
/* How many have ended since the last call, or -EIO. */
int r2_copies_copied(struct r2_copies *c, bool out);

/* All gates must be open. NULL is allowed. */
void r2_copies_free(struct r2_copies *c);

#endif
