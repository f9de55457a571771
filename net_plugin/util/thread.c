#define _GNU_SOURCE
#include "util/thread.h"

#include <errno.h>
#include <signal.h>

static int create(pthread_t *thread, const cpu_set_t *cpus, void *(*run)(void *), void *arg)
{
    pthread_attr_t attr;
    int rc;

    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (cpus)
        pthread_attr_setaffinity_np(&attr, sizeof(*cpus), cpus);
    rc = pthread_create(thread, &attr, run, arg);
    pthread_attr_destroy(&attr);
    return rc;
}

int r2_thread_start_on(pthread_t *thread, const cpu_set_t *cpus, void *(*run)(void *), void *arg)
{
    sigset_t all, old;
    int rc;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* inherited */
    rc = create(thread, cpus, run, arg);
    /* The kernel refused the processors, not the thread: a sandbox, or a changed cpuset. */
    if (cpus && (rc == EINVAL || rc == EPERM))
        rc = create(thread, NULL, run, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return rc;
}

int r2_thread_start(void *(*run)(void *), void *arg)
{
    pthread_t thread;

    return r2_thread_start_on(&thread, NULL, run, arg);
}
