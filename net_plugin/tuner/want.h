/* What the shim asks of the tuner plugin for the communicators that it makes: one algorithm, for
 * AllReduce of a size and more. Plain C, so that the shim needs nothing else of the plugin: it
 * finds r2ccl_tuner_expect with dlsym in libnccl-net-r2ccl.so, and has no plans where that is
 * missing.
 *
 * NCCL tells a tuner neither the unique id nor the name of a communicator, only numbers of ranks
 * and nodes (a hash of the id too, from 2.28 on). So a want is bound to a thread:
 *
 *     r2ccl_tuner_expect(&want);
 *     ncclCommInitRankConfig(...);        blocking, in or outside a group
 *     taken = r2ccl_tuner_expect(NULL);   1 for each communicator that got the want
 *
 * It holds for every tuner init on the calling thread and on threads that were started, directly or
 * not, by that thread between the two calls: NCCL 2.18 to 2.27 always run the init on a thread of
 * its own, later ones when a group makes several communicators or does not block. Children are
 * known by the timer slack that Linux hands down (prctl PR_SET_TIMERSLACK); the caller's is moved
 * by a few microseconds at most and put back by the second call. Where the kernel knows no timer
 * slack, or hands none down (real-time threads), only inits on the calling thread take the want.
 *
 * `taken` must be checked, on every rank, before an operation depends on the want: it is 0 when
 * NCCL never asked (2.20 and older have no tuner by default, NCCL_TUNER_PLUGIN or libnccl-tuner.so
 * brings another one). If the ranks differ, they would choose different algorithms: nobody may use
 * it.
 *
 * Taken, the want holds for the life of the communicator. It is an answer, not an order: an
 * algorithm that NCCL has ruled out for an operation (NCCL_ALGO, a type) is not forced.
 *
 * NCCL looks for a tuner when a process makes its first communicator, and never again if there is
 * none; it finds this one only after a call of r2ccl_tuner_expect. So a shim that may have wants
 * calls it with NULL once, before the application's first communicator.
 *
 * Any thread; a want need not be taken back by a thread that has none. A thread that set one takes
 * it back before it ends. */
#ifndef R2_TUNER_WANT_H
#define R2_TUNER_WANT_H

#include <stdint.h>

enum r2ccl_tuner_algo {
    R2CCL_TUNER_NONE = 0, /* NCCL decides */
    R2CCL_TUNER_TREE = 1,
    R2CCL_TUNER_RING = 2,
};

struct r2ccl_tuner_want {
    uint32_t size; /* sizeof(struct r2ccl_tuner_want); later versions append */
    uint32_t algo; /* enum r2ccl_tuner_algo */
    uint64_t min_bytes;
};

/* Sets the calling thread's want (copied), instead of one set before: 0, -EINVAL for a size or an
 * algorithm that this plugin does not know, -EBUSY when too many threads have one.
 * NULL takes it back: how many communicators took it, 0 without one. */
int r2ccl_tuner_expect(const struct r2ccl_tuner_want *want);

#endif
