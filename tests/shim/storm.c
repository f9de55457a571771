/* One rank of a job with many communicators, which operates on all of them in turn until it is told
 * to stop (tests/bench/storm.py).
 *
 *     storm BOARD COMMS SPREAD WORLD
 *
 * BOARD: a file that all ranks map, `struct board`, zeros at first. COMMS: communicators of each
 * process, of one process of every node; with WORLD 1 the first is of all processes. The members of
 * SPREAD in turn differ, and so do the nodes that the lowest ranks are on. Operations are small
 * broadcasts, whose messages are as many as ranks (a ring's AllReduce has as many as ranks
 * squared), but for a round of large AllReduces, which plans are for, that BOARD names. Every
 * element of every result is checked. Exit code 0: nothing was wrong. */
#include <errno.h>
#include <fcntl.h>
#include <hostnccl/nccl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define COMMS 32
#define IDS 2048
#define SMALL_FLOATS 64
#define LARGE_FLOATS ((1 << 18) + 64) /* above 1 MiB */
#define PATIENCE_NS UINT64_C(120000000000)

/* Of storm.py as well. */
struct board {
    _Atomic uint32_t stop;  /* the first round that is not begun; 0: none yet */
    _Atomic uint32_t large; /* the round of large operations */
    _Atomic uint32_t wrong; /* elements */
    _Atomic uint32_t made;  /* processes that have all their communicators */
    _Atomic uint32_t begun; /* rounds that all processes have come to */
    _Atomic uint32_t here;  /* processes that are at the next one */
    _Atomic uint32_t there[IDS];
    ncclUniqueId ids[IDS];
};

#define NCCL(call)                                                                                 \
    do {                                                                                           \
        ncclResult_t nccl_result = (call);                                                         \
        if (nccl_result != ncclSuccess) {                                                          \
            fprintf(stderr, "storm[%d]: %s: %s\n", rank, #call, ncclGetErrorString(nccl_result));  \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static struct board *board;
static int rank, ranks, local, locals, ncomms, spread, world;
static struct {
    ncclComm_t comm;
    int id, rank, ranks;
} comms[COMMS];
static float *send, *recv;

static uint64_t now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void map_board(const char *file)
{
    int fd = open(file, O_RDWR | O_CLOEXEC);

    board =
        fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (board == MAP_FAILED) {
        fprintf(stderr, "storm: %s: %s\n", file, strerror(errno));
        exit(2);
    }
    close(fd);
}

/* Where this process is in its communicators. */
static void place(void)
{
    int nodes = ranks / locals, node = rank / locals;

    for (int c = 0; c < ncomms; c++) {
        int step = c % spread * node % locals;

        comms[c].id = c * locals + (local - step + locals) % locals;
        comms[c].rank = (node + c) % nodes;
        comms[c].ranks = nodes;
    }
    if (world) {
        comms[0].id = 0;
        comms[0].rank = rank;
        comms[0].ranks = ranks;
    }
}

static void make_comms(void)
{
    uint64_t end = now() + PATIENCE_NS;

    for (int c = 0; c < ncomms; c++) {
        if (comms[c].rank == 0) {
            NCCL(ncclGetUniqueId(&board->ids[comms[c].id]));
            atomic_store(&board->there[comms[c].id], 1);
        }
    }
    for (int c = 0; c < ncomms; c++) {
        while (!atomic_load(&board->there[comms[c].id])) {
            if (now() > end) {
                fprintf(stderr, "storm[%d]: communicator %d gets no id\n", rank, c);
                exit(1);
            }
            usleep(1000);
        }
        NCCL(ncclCommInitRank(&comms[c].comm, comms[c].ranks, board->ids[comms[c].id],
                              comms[c].rank));
    }
    atomic_fetch_add(&board->made, 1);
}

/* What the rank of a process gives: whole numbers, whose sum over the ranks no order changes. */
static float value(size_t i, uint32_t round)
{
    return (float)((i + round) % 97);
}

static void check(int c, uint32_t round, size_t count, float times)
{
    uint32_t wrong = 0;

    for (size_t i = 0; i < count; i++)
        wrong += recv[i] != value(i, round) * times;
    if (wrong && atomic_fetch_add(&board->wrong, wrong) == 0)
        fprintf(stderr, "storm[%d]: communicator %d, round %u: %u of %zu elements are wrong\n",
                rank, c, round, wrong, count);
}

static void operate(int c, uint32_t round)
{
    bool large = round == atomic_load(&board->large);
    size_t count = large ? LARGE_FLOATS : SMALL_FLOATS;
    int root = (int)round % comms[c].ranks, me = comms[c].rank, all = comms[c].ranks;

    for (size_t i = 0; i < count; i++)
        send[i] = value(i, round) * (float)(me + 1);
    memset(recv, 0xff, count * sizeof(*recv));
    if (large)
        NCCL(ncclAllReduce(send, recv, count, ncclFloat, ncclSum, comms[c].comm, NULL));
    else
        NCCL(ncclBroadcast(send, recv, count, ncclFloat, root, comms[c].comm, NULL));
    check(c, round, count, large ? (float)all * (float)(all + 1) / 2 : (float)(root + 1));
}

/* All processes begin a round together: what the board says of later ones, all have seen. */
static void meet(uint32_t round)
{
    uint64_t end = now() + PATIENCE_NS;

    if (atomic_fetch_add(&board->here, 1) + 1 == (uint32_t)ranks * round)
        atomic_store(&board->begun, round);
    while (atomic_load(&board->begun) < round) {
        if (now() > end) {
            fprintf(stderr, "storm[%d]: not all come to round %u\n", rank, round);
            exit(1);
        }
        usleep(5000);
    }
}

static bool over(uint32_t round)
{
    uint32_t stop = atomic_load(&board->stop);

    return stop && round >= stop;
}

static int number(const char *text)
{
    return text ? atoi(text) : 0;
}

int main(int argc, char **argv)
{
    rank = number(getenv("RANK"));
    ranks = number(getenv("WORLD_SIZE"));
    local = number(getenv("LOCAL_RANK"));
    locals = number(getenv("LOCAL_WORLD_SIZE"));
    ncomms = argc == 5 ? number(argv[2]) : 0;
    spread = argc == 5 ? number(argv[3]) : 0;
    world = argc == 5 ? number(argv[4]) : 0;
    if (ncomms < 1 || ncomms > COMMS || spread < 1 || locals < 1 || ranks % locals ||
        ncomms * locals > IDS) {
        fprintf(stderr,
                "storm BOARD COMMS SPREAD WORLD, with RANK and WORLD_SIZE, LOCAL_RANK and "
                "LOCAL_WORLD_SIZE set: up to %d communicators, as many ranks on all nodes\n",
                COMMS);
        return 2;
    }
    map_board(argv[1]);
    send = malloc(LARGE_FLOATS * sizeof(*send));
    recv = malloc(LARGE_FLOATS * sizeof(*recv));
    place();
    make_comms();
    for (uint32_t round = 1; meet(round), !over(round); round++)
        for (int c = 0; c < ncomms; c++)
            operate(c, round);
    for (int c = 0; c < ncomms; c++)
        NCCL(ncclCommFinalize(comms[c].comm));
    for (int c = 0; c < ncomms; c++)
        NCCL(ncclCommDestroy(comms[c].comm));
    return atomic_load(&board->wrong) != 0;
}
