/* The service thread: connections and memory, never blocking inside the plugin. */
#define _GNU_SOURCE
#include <errno.h>
#include <time.h>

#include "comm.h"

static struct hn_job *step_all(struct ncclComm *comm, struct hn_job *jobs, bool *moved)
{
    struct hn_job *left = NULL, **end = &left;
    while (jobs) {
        struct hn_job *job = jobs;
        jobs = job->next;
        job->next = NULL;
        int rc = job->step(job->conn);
        if (rc == -1) {
            *end = job;
            end = &job->next;
            continue;
        }
        *moved = true;
        pthread_mutex_lock(&comm->lock);
        job->result = rc;
        job->done = true;
        pthread_cond_broadcast(&comm->cond);
        pthread_mutex_unlock(&comm->lock);
    }
    return left;
}

/* With comm->lock held: what was cancelled leaves the list. Only this thread takes jobs off it. */
static void drop_cancelled(struct ncclComm *comm)
{
    for (struct hn_job **link = &comm->jobs; *link;) {
        struct hn_job *job = *link;
        if (!job->cancelled) {
            link = &job->next;
            continue;
        }
        *link = job->next;
        job->result = ncclInternalError;
        job->done = true;
        pthread_cond_broadcast(&comm->cond);
    }
}

static void *service_main(void *arg)
{
    struct ncclComm *comm = arg;
    struct hn_idle idle = {0};
    pthread_mutex_lock(&comm->lock);
    for (;;) {
        while (!comm->quit_service && !comm->jobs) {
            pthread_cond_wait(&comm->cond, &comm->lock);
            idle.since = 0;
        }
        if (!comm->jobs)
            break;
        drop_cancelled(comm);
        if (!comm->jobs)
            continue;
        struct hn_job *jobs = comm->jobs;
        comm->jobs = NULL;
        pthread_mutex_unlock(&comm->lock);
        bool moved = false;
        jobs = step_all(comm, jobs, &moved);
        hn_util_idle(&idle, moved);
        pthread_mutex_lock(&comm->lock);
        struct hn_job **end = &jobs;
        while (*end)
            end = &(*end)->next;
        *end = comm->jobs;
        comm->jobs = jobs;
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

/* With comm->lock held. The thread has them in hand nearly always: it drops them when it puts them
 * back, after at most one more step. Until then they are its own. */
static void cancel(struct hn_job *jobs, int count)
{
    for (int i = 0; i < count; i++)
        if (!jobs[i].done)
            jobs[i].cancelled = true;
}

/* The result of a job that failed by itself, or ncclSuccess. With comm->lock held. */
static int failure(const struct hn_job *jobs, int count)
{
    for (int i = 0; i < count; i++)
        if (jobs[i].done && !jobs[i].cancelled && jobs[i].result)
            return jobs[i].result;
    return ncclSuccess;
}

static bool all_done(const struct hn_job *jobs, int count)
{
    for (int i = 0; i < count; i++)
        if (!jobs[i].done)
            return false;
    return true;
}

ncclResult_t hn_service_run(struct ncclComm *comm, struct hn_job *jobs, int count,
                            uint64_t deadline)
{
    bool late = false, stopped = false;
    pthread_mutex_lock(&comm->lock);
    for (int i = count - 1; i >= 0; i--) {
        jobs[i].next = comm->jobs;
        comm->jobs = &jobs[i];
    }
    pthread_cond_broadcast(&comm->cond);
    while (!all_done(jobs, count)) {
        struct timespec soon;
        clock_gettime(CLOCK_REALTIME, &soon);
        soon.tv_nsec += 20000000;
        soon.tv_sec += soon.tv_nsec / 1000000000;
        soon.tv_nsec %= 1000000000;
        pthread_cond_timedwait(&comm->cond, &comm->lock, &soon);
        late = deadline && hn_util_now() > deadline;
        stopped = deadline && atomic_load(&comm->stop);
        if (late || stopped || (deadline && failure(jobs, count)))
            cancel(jobs, count);
    }
    ncclResult_t failed = (ncclResult_t)failure(jobs, count);
    pthread_mutex_unlock(&comm->lock);
    if (failed)
        return failed;
    if (late)
        return hn_util_fail(ncclRemoteError, "connections were not made in time "
                                             "(HOSTNCCL_BOOTSTRAP_TIMEOUT)");
    return stopped ? ncclInternalError : ncclSuccess;
}

int hn_service_start(struct ncclComm *comm)
{
    if (pthread_create(&comm->service, NULL, service_main, comm))
        return -1;
    comm->threads_started |= 1;
    return 0;
}

void hn_service_stop(struct ncclComm *comm)
{
    if (!(comm->threads_started & 1))
        return;
    pthread_mutex_lock(&comm->lock);
    comm->quit_service = true;
    pthread_cond_broadcast(&comm->cond);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->service, NULL);
    comm->threads_started &= ~1;
}
