/* The threads that stand for the GPU. Launches of a communicator run one after the other, as on a
 * stream; within a launch the chains run side by side, each on one thread. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "kernels.h"

struct worker {
    struct ncclComm *comm;
    int index;
};

void hn_gpu_free(struct hn_launch *launch)
{
    for (int i = 0; i < launch->chain_count; i++) {
        struct hn_chain *chain = &launch->chains[i];
        while (chain->first) {
            struct hn_task *task = chain->first;
            chain->first = task->next;
            free(task);
        }
        free(chain->rx);
        free(chain->tx);
    }
    free(launch->chains);
    free(launch);
}

static void run_chains(struct ncclComm *comm, struct hn_launch *launch, int index)
{
    struct hn_idle idle = {0};
    for (;;) {
        bool progress = false, all = true;
        for (int i = 0; i < launch->chain_count; i++) {
            struct hn_chain *chain = &launch->chains[i];
            if (i % comm->gpu_threads != index || chain->finished)
                continue;
            int rc = hn_kernel_step(chain, &progress);
            if (rc < 0)
                hn_comm_fail(comm, (ncclResult_t)-rc);
            chain->finished = rc != 0;
            all &= chain->finished;
        }
        if (all || atomic_load(&comm->stop))
            return;
        hn_util_idle(&idle, progress);
    }
}

static void *gpu_main(void *arg)
{
    struct worker *worker = arg;
    struct ncclComm *comm = worker->comm;
    int index = worker->index;
    uint64_t seen = 0;
    free(worker);
    pthread_mutex_lock(&comm->lock);
    for (;;) {
        while (!comm->quit_gpu && (!comm->launches || comm->launch_seq == seen))
            pthread_cond_wait(&comm->cond, &comm->lock);
        if (!comm->launches || comm->launch_seq == seen)
            break;
        struct hn_launch *launch = comm->launches;
        seen = comm->launch_seq;
        pthread_mutex_unlock(&comm->lock);
        run_chains(comm, launch, index);
        pthread_mutex_lock(&comm->lock);
        if (--launch->threads_left)
            continue;
        comm->launches = launch->next;
        if (!comm->launches)
            comm->launches_end = &comm->launches;
        comm->launch_seq++;
        launch->done = true;
        if (launch->detached)
            hn_gpu_free(launch);
        pthread_cond_broadcast(&comm->cond);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

int hn_gpu_start(struct ncclComm *comm)
{
    comm->launches_end = &comm->launches;
    comm->launch_seq = 1;
    for (int i = 0; i < comm->gpu_threads; i++) {
        struct worker *worker = malloc(sizeof(*worker));
        if (!worker)
            return -1;
        *worker = (struct worker){comm, i};
        if (pthread_create(&comm->gpu[i], NULL, gpu_main, worker)) {
            free(worker);
            return -1;
        }
        comm->gpu_started++;
    }
    return 0;
}

void hn_gpu_stop(struct ncclComm *comm)
{
    pthread_mutex_lock(&comm->lock);
    comm->quit_gpu = true;
    pthread_cond_broadcast(&comm->cond);
    pthread_mutex_unlock(&comm->lock);
    for (int i = 0; i < comm->gpu_started; i++)
        pthread_join(comm->gpu[i], NULL);
    comm->gpu_started = 0;
}

void hn_gpu_launch(struct ncclComm *comm, struct hn_launch *launch)
{
    pthread_mutex_lock(&comm->lock);
    launch->threads_left = comm->gpu_threads;
    *comm->launches_end = launch;
    comm->launches_end = &launch->next;
    pthread_cond_broadcast(&comm->cond);
    pthread_mutex_unlock(&comm->lock);
}

void hn_gpu_wait(struct ncclComm *comm, struct hn_launch *launch)
{
    pthread_mutex_lock(&comm->lock);
    while (!launch->done)
        pthread_cond_wait(&comm->cond, &comm->lock);
    pthread_mutex_unlock(&comm->lock);
    hn_gpu_free(launch);
}
