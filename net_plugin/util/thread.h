/* Threads of ours in somebody else's process. */
#ifndef R2_UTIL_THREAD_H
#define R2_UTIL_THREAD_H

#include <pthread.h>
#include <sched.h>

/* Starts a detached thread that takes no signal: those are the application's. It names itself,
 * since from here it may be over already. 0, or an errno value as of pthread_create. Any thread. */
int r2_thread_start(void *(*run)(void *), void *arg);
/* The same on these processors (NULL: those of the caller, and where the kernel refuses them);
 * *thread is its name until it ends. */
int r2_thread_start_on(pthread_t *thread, const cpu_set_t *cpus, void *(*run)(void *), void *arg);

#endif
