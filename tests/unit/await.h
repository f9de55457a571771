/* Waiting for something that another process or thread does. */
#ifndef R2_TESTS_AWAIT_H
#define R2_TESTS_AWAIT_H

#include <dirent.h>
#include <unistd.h>

#include "../pause.h"
#include "check.h"
#include "util/clock.h"

static inline void await_nap(void)
{
    pause_us(200);
}

/* Bounded: the test has failed if it is not so within 40 s. */
#define AWAIT(cond) CHECK_MSG(WITHIN_MS(40000, cond), "waited in vain for %s", #cond)

/* Head of a loop: once in 0.2 ms while that holds, `ms` at most. */
#define WHILE_MS(ms, cond)                                                                         \
    for (uint64_t until_ = r2_now_ns() + (uint64_t)(ms)*R2_NS_PER_MS;                              \
         (cond) && r2_now_ns() < until_; await_nap())

/* The state of that process or thread as the kernel says it; 0: there is none. */
static inline char state_of_task(int tid)
{
    char name[64], state = 0;
    FILE *f;

    snprintf(name, sizeof(name), "/proc/%d/stat", tid);
    f = fopen(name, "r");
    if (!f)
        return 0;
    if (fscanf(f, "%*d (%*[^)]) %c", &state) != 1)
        state = 0;
    fclose(f);
    return state;
}

/* That thread waits for something. */
static inline bool thread_waits(int tid)
{
    return state_of_task(tid) == 'S';
}

/* Nothing of that process runs any more. */
static inline bool process_ended(int pid)
{
    char state = state_of_task(pid);

    return !state || state == 'Z' || state == 'X';
}

/* No thread of that process runs any more: SIGSTOP has reached them all. */
__attribute__((unused)) static bool process_stopped(int pid)
{
    bool stopped = true;
    char name[64];
    DIR *tasks;

    snprintf(name, sizeof(name), "/proc/%d/task", pid);
    tasks = opendir(name);
    CHECK(tasks);
    for (struct dirent *e; (e = readdir(tasks));)
        stopped &= e->d_name[0] == '.' || state_of_task(atoi(e->d_name)) == 'T';
    closedir(tasks);
    return stopped;
}

/* It stays so for `ms`. */
#define STAYS_MS(ms, cond)                                                                         \
    WHILE_MS (ms, true)                                                                            \
    CHECK_MSG(cond, "%s does not stay so", #cond)

#endif
