/* Waiting for something that another process or thread does. */
#ifndef R2_TESTS_AWAIT_H
#define R2_TESTS_AWAIT_H

#include <unistd.h>

#include "check.h"
#include "util/clock.h"

static inline void await_us(unsigned us)
{
    usleep(us);
}

static inline void await_nap(void)
{
    await_us(200);
}

/* Bounded: the test has failed if it is not so within 40 s. */
#define AWAIT(cond)                                                                                \
    do {                                                                                           \
        uint64_t begun = r2_now_ns();                                                              \
        while (!(cond)) {                                                                          \
            CHECK_MSG(r2_now_ns() - begun < 40 * R2_NS_PER_S, "waited in vain for %s", #cond);     \
            await_nap();                                                                           \
        }                                                                                          \
    } while (0)

/* Head of a loop: once in 0.2 ms while that holds, `ms` at most. */
#define WHILE_MS(ms, cond)                                                                         \
    for (uint64_t until_ = r2_now_ns() + (uint64_t)(ms)*R2_NS_PER_MS;                              \
         (cond) && r2_now_ns() < until_; await_nap())

/* That thread of this process waits for something. */
static inline bool thread_waits(int tid)
{
    char name[64], state;
    FILE *f;
    int n;

    snprintf(name, sizeof(name), "/proc/self/task/%d/stat", tid);
    f = fopen(name, "r");
    if (!f)
        return false;
    n = fscanf(f, "%*d (%*[^)]) %c", &state);
    fclose(f);
    return n == 1 && state == 'S';
}

/* It stays so for `ms`. */
#define STAYS_MS(ms, cond)                                                                         \
    WHILE_MS (ms, true)                                                                            \
    CHECK_MSG(cond, "%s does not stay so", #cond)

#endif
