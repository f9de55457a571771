/* Times calls of ncclAllReduce one by one, on the no-op NCCL that this program is linked with; with
 * LD_PRELOAD the shim stands between.
 *
 * Usage: cost CALLS [RANKS [COUNT]], RANKS 1 (default) or 2, COUNT floats per operation (4; they
 * are never touched). With 2, the other rank is a process of its own, which takes part in the first
 * operation and then waits: with the shim the ranks meet. That they have is proved at the end: an
 * error at the other rank must reach this one ("told").
 *
 * Prints a JSON object: nanoseconds by call, clock included, of single operations and of groups of
 * one (start, operation, end); and what does not depend on the machine, of 1000 more of each: how
 * often a mutex was locked, memory was allocated and the kernel was called (-1: not counted, under
 * a sanitizer). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../pause.h"
#include "nccl/nccl.h"

#define COUNTED 1000
#define MEET_US 300000
#define TELL_MS 5000

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define COUNTS 0
#endif
#endif
#ifndef COUNTS
#define COUNTS 1
#endif

int ncclGetUniqueId(struct r2_nccl_id *id);
int ncclCommInitRank(r2_nccl_comm *out, int nranks, struct r2_nccl_id id, int rank);
int ncclCommDestroy(r2_nccl_comm comm);
int ncclCommAbort(r2_nccl_comm comm);
int ncclCommGetAsyncError(r2_nccl_comm comm, int *error);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, r2_nccl_comm comm,
                  r2_nccl_stream stream);
void noop_next_result(int result);

static size_t count = 4;

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

static int once(r2_nccl_comm comm, int group)
{
    static float data[4];
    int bad = 0;

    if (group)
        bad |= ncclGroupStart();
    bad |= ncclAllReduce(data, data, count, 7, 0, comm, NULL);
    if (group)
        bad |= ncclGroupEnd();
    return bad;
}

static int measure(r2_nccl_comm comm, uint32_t *took, long calls, int group)
{
    int bad = 0;

    for (long i = 0; i < calls; i++) {
        uint64_t begin = now(), end;

        bad |= once(comm, group);
        end = now();
        took[i] = end - begin > UINT32_MAX ? UINT32_MAX : (uint32_t)(end - begin);
    }
    qsort(took, (size_t)calls, sizeof(*took), by_size);
    printf("\"%s\": {\"median\": %u, \"p99\": %u}, ", group ? "group" : "single", took[calls / 2],
           took[calls / 100 * 99]);
    return bad;
}

/* ---- what does not depend on the machine */

static __thread long locks, allocations;
static __thread volatile sig_atomic_t kernel; /* calls of it */

#if COUNTS
/* The program's own functions come before the C library's, for every library. */
__attribute__((visibility("default"))) int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    static int (*_Atomic real)(pthread_mutex_t *);

    if (!real)
        real = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    locks++;
    return real(mutex);
}

void *__libc_malloc(size_t size);
__attribute__((visibility("default"))) void *malloc(size_t size)
{
    allocations++;
    return __libc_malloc(size);
}

void *__libc_calloc(size_t n, size_t size);
__attribute__((visibility("default"))) void *calloc(size_t n, size_t size)
{
    allocations++;
    return __libc_calloc(n, size);
}

static void on_call(int signal)
{
    (void)signal;
    kernel++;
}

/* From now on calls of the kernel by this thread are counted and not carried out, but for those
 * with which it ends. (Where the clock needs one, that is the machine's affair.) */
static int trap(void)
{
#define GO(number)                                                                                 \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        GO(SYS_clock_gettime),
        GO(SYS_rt_sigreturn),
        GO(SYS_rt_sigprocmask),
        GO(SYS_exit),
        GO(SYS_mmap),
        GO(SYS_munmap),
        GO(SYS_mprotect),
        GO(SYS_madvise),
        GO(SYS_brk),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    };
    struct sock_fprog program = {.len = sizeof(filter) / sizeof(filter[0]), .filter = filter};

    signal(SIGSYS, on_call);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return -errno;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) ? -errno : 0;
}
#else
static int trap(void)
{
    return -ENOTSUP;
}
#endif

struct counts {
    r2_nccl_comm comm;
    long locks[2], allocations[2], kernel[2]; /* single, group */
    int bad;
};

static void *counted(void *arg)
{
    struct counts *c = arg;
    long trapped = COUNTS ? -1 : 0;

    for (int group = 0; group < 2; group++)
        c->bad |= once(c->comm, group); /* the thread's first */
    if (COUNTS)
        trapped = trap();
    for (int group = 0; group < 2; group++) {
        long before[] = {locks, allocations, kernel};

        for (int i = 0; i < COUNTED; i++)
            c->bad |= once(c->comm, group);
        c->locks[group] = COUNTS ? locks - before[0] : -1;
        c->allocations[group] = COUNTS ? allocations - before[1] : -1;
        c->kernel[group] = COUNTS && trapped == 0 ? kernel - before[2] : -1;
    }
    return NULL;
}

static int counts(r2_nccl_comm comm)
{
    struct counts c = {.comm = comm};
    pthread_t thread;

    if (pthread_create(&thread, NULL, counted, &c))
        return 1;
    pthread_join(thread, NULL);
    for (int group = 0; group < 2; group++)
        printf("\"%s_counts\": {\"locks\": %ld, \"allocations\": %ld, \"kernel\": %ld}, ",
               group ? "group" : "single", c.locks[group], c.allocations[group], c.kernel[group]);
    return c.bad;
}

/* ---- two ranks */

/* The other rank: in the first operation, and with an error when it is told to end. */
static int other_rank(int id_from, int end_from)
{
    struct r2_nccl_id id;
    r2_nccl_comm comm;
    char byte;

    if (read(id_from, &id, sizeof(id)) != sizeof(id) || ncclCommInitRank(&comm, 2, id, 1) ||
        once(comm, 0) || read(end_from, &byte, 1) != 1)
        return 1;
    noop_next_result(R2_NCCL_REMOTE);
    once(comm, 0);
    ncclCommAbort(comm);
    return read(end_from, &byte, 1) == 0 ? 0 : 1; /* it may be asked until the other one ends */
}

/* Whether the other rank's error comes to be known here. */
static int told(r2_nccl_comm comm, int end_to)
{
    int error = 0;

    if (write(end_to, "e", 1) != 1)
        return 0;
    (void)WITHIN_MS(TELL_MS, (ncclCommGetAsyncError(comm, &error), error));
    return error == R2_NCCL_REMOTE;
}

static int both(int ranks, uint32_t *took, long calls, int id_to, int end_to)
{
    struct r2_nccl_id id;
    r2_nccl_comm comm;
    int bad;

    if (ncclGetUniqueId(&id) ||
        (ranks == 2 && write(id_to, &id, sizeof(id)) != (ssize_t)sizeof(id)) ||
        ncclCommInitRank(&comm, ranks, id, 0))
        return 1;
    bad = once(comm, 0);
    if (ranks == 2)
        pause_us(MEET_US);
    pin();
    printf("{\"calls\": %ld, \"ranks\": %d, ", calls, ranks);
    bad |= measure(comm, took, calls, 0);
    bad |= measure(comm, took, calls, 1);
    bad |= counts(comm);
    printf("\"told\": %d}\n", ranks == 2 ? told(comm, end_to) : 0);
    ncclCommAbort(comm);
    return bad;
}

int main(int argc, char **argv)
{
    long calls = argc > 1 ? atol(argv[1]) : 1000000;
    int ranks = argc > 2 ? atoi(argv[2]) : 1, id[2], end[2], bad, status = 0;
    uint32_t *took = calls >= 100 ? malloc((size_t)calls * sizeof(*took)) : NULL;
    pid_t pid = 0;

    count = argc > 3 ? (size_t)atol(argv[3]) : count;
    if (!took || ranks < 1 || ranks > 2 || count < 1 || pipe(id) || pipe(end)) {
        fprintf(stderr, "cost: give at least 100 calls, and 1 or 2 ranks\n");
        return 1;
    }
    if (ranks == 2) {
        pid = fork(); /* before anything of NCCL's: each is a process of its own */
        if (pid == 0) {
            close(end[1]);
            _exit(other_rank(id[0], end[0]));
        }
    }
    bad = both(ranks, took, calls, id[1], end[1]);
    close(end[1]);
    if (ranks == 2)
        bad |= pid < 0 || waitpid(pid, &status, 0) != pid || status;
    free(took);
    return bad != 0;
}
