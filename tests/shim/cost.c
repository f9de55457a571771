/* Times calls of ncclAllReduce one by one, on the no-op NCCL that this program is linked with; with
 * LD_PRELOAD the shim stands between. Usage: cost CALLS. Prints a JSON object: nanoseconds by call,
 * clock included, of single operations and of groups of one (start, operation, end). */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "api/nccl.h"

int ncclGetUniqueId(struct r2_nccl_id *id);
int ncclCommInitRank(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank);
int ncclCommDestroy(r2_nccl_comm comm);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, r2_nccl_comm comm,
                  r2_nccl_stream stream);

static uint64_t now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void pin(void)
{
    cpu_set_t allowed, one;

    if (sched_getaffinity(0, sizeof(allowed), &allowed))
        return;
    CPU_ZERO(&one);
    for (int cpu = CPU_SETSIZE - 1; cpu >= 0; cpu--) {
        if (!CPU_ISSET(cpu, &allowed))
            continue;
        CPU_SET(cpu, &one);
        sched_setaffinity(0, sizeof(one), &one);
        return;
    }
}

static int by_size(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return (x > y) - (x < y);
}

static int measure(r2_nccl_comm comm, uint32_t *took, long calls, int group)
{
    float data[4] = {0};
    int bad = 0;

    for (long i = 0; i < calls; i++) {
        uint64_t begin = now(), end;

        if (group)
            bad |= ncclGroupStart();
        bad |= ncclAllReduce(data, data, 4, 7, 0, comm, NULL);
        if (group)
            bad |= ncclGroupEnd();
        end = now();
        took[i] = end - begin > UINT32_MAX ? UINT32_MAX : (uint32_t)(end - begin);
    }
    qsort(took, (size_t)calls, sizeof(*took), by_size);
    printf("\"%s\": {\"median\": %u, \"p99\": %u}%s", group ? "group" : "single", took[calls / 2],
           took[calls / 100 * 99], group ? "}\n" : ", ");
    return bad;
}

int main(int argc, char **argv)
{
    long calls = argc > 1 ? atol(argv[1]) : 1000000;
    uint32_t *took = calls >= 100 ? malloc((size_t)calls * sizeof(*took)) : NULL;
    struct r2_nccl_id id;
    r2_nccl_comm comm;
    int bad;

    if (!took || ncclGetUniqueId(&id) || ncclCommInitRank(&comm, 1, id, 0)) {
        fprintf(stderr, "cost: give at least 100 calls\n");
        return 1;
    }
    pin();
    printf("{\"calls\": %ld, ", calls);
    bad = measure(comm, took, calls, 0);
    bad |= measure(comm, took, calls, 1);
    ncclCommDestroy(comm);
    free(took);
    return bad != 0;
}
