/* A signal handler that complains and exits while its thread writes a line of the log: the process
 * ends (util/log.c). Rung 1, in real processes. */
#include "await.h"
#include "check.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "util/clock.h"
#include "util/log.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED true
#elif defined(__has_feature)
#define SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define SANITIZED false
#endif

#define PROCESSES 25 /* about every third is interrupted where it counts */
#define LIMIT_MS 10000

static void nowhere(int level, unsigned long flags, const char *file, int line, const char *fmt,
                    ...)
{
    (void)level;
    (void)flags;
    (void)file;
    (void)line;
    (void)fmt;
}

static void on_alarm(int number)
{
    R2_WARN("signal %d", number);
    exit(0);
}

static void child(void)
{
    struct itimerval soon = {.it_value.tv_usec = 1 + check_random() % 2000};

    r2_log_set(nowhere);
    if (r2_log_defer())
        _exit(2);
    signal(SIGALRM, on_alarm);
    setitimer(ITIMER_REAL, &soon, NULL);
    for (;;)
        R2_WARN("goes on and on");
}

TEST(exits)
{
    if (SANITIZED)
        CHECK_SKIP("a sanitizer's own exit cannot be called by a signal handler");
    for (int i = 0; i < PROCESSES; i++) {
        int status = 0, ended = 0;
        pid_t pid = fork();

        CHECK_GE(pid, 0);
        if (pid == 0)
            child();
        WHILE_MS (LIMIT_MS, !ended)
            ended = waitpid(pid, &status, WNOHANG);
        if (!ended) {
            kill(pid, SIGKILL);
            waitpid(pid, NULL, 0);
        }
        CHECK_EQ(ended, pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        (void)check_random();
    }
}
