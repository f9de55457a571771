/* Processes that hold something, a control segment for one, until they are killed or the thread
 * that started them ends. */
#ifndef R2_TESTS_HOLDER_H
#define R2_TESTS_HOLDER_H

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "control/control.h"

/* A child that takes it, which must succeed, and holds it; it has it when this returns. */
static pid_t holder_start(bool (*take)(void *arg), void *arg)
{
    pid_t pid, parent = getpid();
    int ready[2];
    char said = 0;

    CHECK_EQ(pipe(ready), 0);
    pid = fork();
    CHECK_GE(pid, 0);
    if (pid == 0) {
        said = !prctl(PR_SET_PDEATHSIG, SIGKILL) && getppid() == parent && take(arg);
        if (write(ready[1], &said, 1) == 1)
            pause();
        _exit(1);
    }
    CHECK_EQ(read(ready[0], &said, 1), 1);
    CHECK_EQ(said, 1);
    close(ready[0]);
    close(ready[1]);
    return pid;
}

/* It is gone, with what it held, when this returns. */
static void holder_end(pid_t pid)
{
    CHECK_EQ(kill(pid, SIGKILL), 0);
    CHECK_EQ(waitpid(pid, NULL, 0), pid);
}

/* For holder_start: a control segment that others can see. */
__attribute__((unused)) static bool holder_segment(void *unused)
{
    struct r2_control_info info = {.host = "host-a", .rank = -1};
    struct r2_control *ctl = NULL;

    (void)unused;
    return r2_control_open(&ctl, &info) == 0 && *r2_control_name(ctl);
}

#endif
