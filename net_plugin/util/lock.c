#define _GNU_SOURCE
#include "util/lock.h"

#include "util/clock.h"

#define RELAX_MOST 16 /* pauses between two tries: others want the lock's line, too */

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

void r2_lock_awake(pthread_mutex_t *m, uint64_t ns)
{
    unsigned pauses = 1;
    uint64_t until;

    if (!pthread_mutex_trylock(m))
        return;
    until = r2_now_ns() + ns;
    do {
        for (unsigned i = 0; i < pauses; i++)
            relax();
        pauses = pauses < RELAX_MOST ? 2 * pauses : RELAX_MOST;
        if (!pthread_mutex_trylock(m))
            return;
    } while (r2_now_ns() < until);
    pthread_mutex_lock(m);
}
