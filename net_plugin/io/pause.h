/* What an I/O thread does while it has nothing to do: it polls for a while, or sleeps at once.
 *
 * It polls only while that pays: while enough of the idle times of late ended so soon that it would
 * have polled through them, whether it did or not. Four threads and more belong to a machine with
 * cores to spare: each polls for R2CCL_SPIN, if not as many do already as may at once
 * (r2_pause_let). Where threads are fewer, polling takes the cores from the application, and one
 * polls at most 50 us; fewer of its idle times have to pay, as they are shorter.
 *
 * Nobody of several polls while a slow NIC is what is waited for (r2_pause_limit): its queue holds
 * milliseconds of work, and what comes next comes no sooner for it.
 */
#ifndef R2_IO_PAUSE_H
#define R2_IO_PAUSE_H

#include <stdbool.h>
#include <stdint.h>

/* Of one thread, and touched by it only. */
struct r2_pause {
    uint64_t since; /* idle since then; 0: it is not */
    int paid;       /* per mille of the idle times of late that ended while it would have polled */
    bool counted;   /* among those that poll */
    bool slept;     /* this time, from the start */
};

#define R2_PAUSE                                                                                   \
    {                                                                                              \
        .paid = 1000                                                                               \
    }

/* Before the first thread runs. `spin`: ns, 0 = nobody polls. */
void r2_pause_start(int threads, uint64_t spin);
/* So many of them are in use (r2_io_use), from now on. Any thread. */
void r2_pause_use(int threads);
/* At most `n` threads poll at once, of four and more; holds for idle times that begin from now on.
 * At first all may. Any thread. */
void r2_pause_let(int n);
/* Slow NICs have all in flight that they may, and more waits for them; holds for R2_LIMITED_NS from
 * `now` on. `bytes`: that have moved so, either way; more of them in a second than one thread can
 * carry are a crowd. True: which they were not before; whoever slept for others to stand in is to
 * be told (r2_standin_limit). Any thread. */
#define R2_LIMITED_NS UINT64_C(20000000)
bool r2_pause_limit(uint64_t now, uint64_t bytes);
/* Slow NICs are what is waited for, and nobody has more to do than one thread can (r2_pause_crowd).
 * A hint. Any thread. */
bool r2_pause_limited(uint64_t now);
/* Slow or not, the NICs together are too much for one thread; holds for 50 ms. True: they were not
 * before. Any thread. */
bool r2_pause_crowd(uint64_t now);
/* The thread has found nothing to do: whether it looks again at once. `now`: monotonic ns. */
bool r2_pause_polls(struct r2_pause *p, uint64_t now);
/* It has found something. Only `since` is looked at while it was not idle. */
void r2_pause_over(struct r2_pause *p, uint64_t now);

#endif
