/* Linked with NCCL (NEEDED libnccl.so.2). argv[1]:
 *   version      prints ncclGetVersion.
 *   run N        N AllReduces in a group each, checked, with a split in between.
 *   generations N   N times: make the communicators, two AllReduces, destroy.
 *   hold         a few operations, prints "held", waits for stdin to end.
 *   abort        one rank waits in a collective that the other never joins; a watchdog aborts it.
 *   fork         forks with communicators open; the child only looks, the parent goes on.
 *   nonblocking  communicators with blocking=0, polled until they are made; then AllReduces.
 *   traffic S    AllReduces for S seconds, checked; prints how many.
 */
#include "job.h"
#include "../pause.h"

#include <hostnccl/nccl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS 2
#define COUNT 65536

#define NCCL(call)                                                                                 \
    do {                                                                                           \
        ncclResult_t nccl_result = (call);                                                         \
        if (nccl_result != ncclSuccess) {                                                          \
            fprintf(stderr, "%s: %s\n", #call, ncclGetErrorString(nccl_result));                   \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static float *buffers[RANKS];

static void all_reduce(ncclComm_t *comms, int round)
{
    for (int r = 0; r < RANKS; r++)
        for (int i = 0; i < COUNT; i++)
            buffers[r][i] = (float)((i + round) % 1000 * (r + 1));
    NCCL(ncclGroupStart());
    for (int r = 0; r < RANKS; r++)
        NCCL(ncclAllReduce(buffers[r], buffers[r], COUNT, ncclFloat, ncclSum, comms[r], NULL));
    NCCL(ncclGroupEnd());
    for (int r = 0; r < RANKS; r++) {
        for (int i = 0; i < COUNT; i++) {
            if (buffers[r][i] == (float)((i + round) % 1000 * 3))
                continue;
            fprintf(stderr, "round %d rank %d element %d is %f\n", round, r, i, buffers[r][i]);
            exit(1);
        }
    }
}

static void destroy(ncclComm_t *comms)
{
    for (int r = 0; r < RANKS; r++)
        NCCL(ncclCommFinalize(comms[r]));
    for (int r = 0; r < RANKS; r++)
        NCCL(ncclCommDestroy(comms[r]));
}

static void run(ncclComm_t *comms, int rounds)
{
    ncclComm_t parts[RANKS];

    for (int i = 0; i < rounds; i++)
        all_reduce(comms, i);
    NCCL(ncclGroupStart());
    for (int r = 0; r < RANKS; r++)
        NCCL(ncclCommSplit(comms[r], 7, -r, &parts[r], NULL));
    NCCL(ncclGroupEnd());
    all_reduce(parts, 1);
    destroy(parts);
}

/* As PyTorch does with TORCH_NCCL_USE_COMM_NONBLOCKING. */
static void make_nonblocking(ncclComm_t *comms)
{
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;

    config.blocking = 0;
    NCCL(ncclGetUniqueId(&id));
    for (int r = 0; r < RANKS; r++) {
        ncclResult_t result = ncclCommInitRankConfig(&comms[r], RANKS, id, r, &config);

        if (result != ncclSuccess && result != ncclInProgress)
            NCCL(result);
    }
    for (int r = 0; r < RANKS; r++) {
        ncclResult_t result, state = ncclSuccess;

        UNTIL((result = ncclCommGetAsyncError(comms[r], &state)) || state != ncclInProgress);
        NCCL(result);
        NCCL(state);
    }
}

static void *watchdog(void *arg)
{
    pause_us(300000);
    NCCL(ncclCommAbort(arg));
    return NULL;
}

static void abort_one(ncclComm_t *comms)
{
    pthread_t thread;
    ncclResult_t result;

    pthread_create(&thread, NULL, watchdog, comms[0]);
    result = ncclAllReduce(buffers[0], buffers[0], COUNT, ncclFloat, ncclSum, comms[0], NULL);
    pthread_join(thread, NULL);
    if (result == ncclSuccess) {
        fprintf(stderr, "a collective with a missing rank succeeded\n");
        exit(1);
    }
    NCCL(ncclCommAbort(comms[1]));
}

static void fork_one(ncclComm_t *comms)
{
    int version = 0, status;
    pid_t child = fork();

    if (child == 0) {
        _exit(ncclGetVersion(&version) == ncclSuccess && version > 0 ? 0 : 1);
    }
    if (waitpid(child, &status, 0) != child || status != 0) {
        fprintf(stderr, "the child ended with %d\n", status);
        exit(1);
    }
    all_reduce(comms, 5);
}

static int traffic(ncclComm_t *comms, double seconds)
{
    struct timespec begin, now;
    int rounds = 0;

    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        all_reduce(comms, rounds++);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((double)(now.tv_sec - begin.tv_sec) + (double)(now.tv_nsec - begin.tv_nsec) * 1e-9 <
             seconds);
    return rounds;
}

static void work(const char *what, const char *number, ncclComm_t *comms)
{
    char byte;

    if (!strcmp(what, "run")) {
        run(comms, atoi(number));
    } else if (!strcmp(what, "nonblocking")) {
        for (int i = 0; i < 5; i++)
            all_reduce(comms, i);
    } else if (!strcmp(what, "hold")) {
        run(comms, 3);
        printf("held\n");
        fflush(stdout);
        while (read(0, &byte, 1) > 0)
            ;
    } else if (!strcmp(what, "fork")) {
        fork_one(comms);
    } else if (!strcmp(what, "traffic")) {
        printf("%d rounds\n", traffic(comms, atof(number)));
    }
}

int r2_job(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "run", *number = argc > 2 ? argv[2] : "5";
    int devices[RANKS] = {0, 1}, version = 0;
    int times = strcmp(what, "generations") ? 1 : atoi(number);
    ncclComm_t comms[RANKS];

    NCCL(ncclGetVersion(&version));
    if (!strcmp(what, "version")) {
        printf("%d\n", version);
        return 0;
    }
    for (int r = 0; r < RANKS; r++)
        buffers[r] = malloc(COUNT * sizeof(float));
    for (int t = 0; t < times; t++) {
        if (!strcmp(what, "nonblocking"))
            make_nonblocking(comms);
        else
            NCCL(ncclCommInitAll(comms, RANKS, devices));
        if (times > 1)
            all_reduce(comms, t);
        work(what, number, comms);
        if (!strcmp(what, "abort"))
            abort_one(comms);
        else
            destroy(comms);
    }
    for (int r = 0; r < RANKS; r++)
        free(buffers[r]);
    printf("ok\n");
    return 0;
}
