/* minimpi: see mpi.h. A star of TCP connections around rank 0. */
#define _GNU_SOURCE
#include "../../pause.h"
#include "mpi.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 1024
#define CONNECT_SECONDS 60
#define HELLO_MAGIC 0x72326d70u

struct hello {
    uint32_t magic;
    uint32_t rank;
    uint32_t size;
};

static int my_rank = -1;
static int world_size;
/* Rank 0: one socket per other rank, by rank. Others: sock[0] leads to rank 0. */
static int sock[MAX_RANKS];

static void die(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));

static void die(const char *fmt, ...)
{
    va_list ap;
    fprintf(stderr, "minimpi: rank %d: ", my_rank);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    exit(1);
}

static double now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

static void put(int to, const void *buf, size_t len)
{
    const char *p = buf;
    while (len > 0) {
        ssize_t n = send(sock[to], p, len, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            die("lost rank %d while sending: %s", to, strerror(errno));
        p += n;
        len -= (size_t)n;
    }
}

static void get(int from, void *buf, size_t len)
{
    char *p = buf;
    while (len > 0) {
        ssize_t n = recv(sock[from], p, len, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n == 0)
            die("rank %d closed its connection (it ended early)", from);
        if (n < 0)
            die("lost rank %d while receiving: %s", from, strerror(errno));
        p += n;
        len -= (size_t)n;
    }
}

static int env_int(const char *name, int low, int high)
{
    const char *text = getenv(name);
    char *end = NULL;
    if (!text || !*text)
        die("the environment lacks %s; start every rank with RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT",
            name);
    long v = strtol(text, &end, 10);
    if (*end || v < low || v > high)
        die("%s=%s: expected a number from %d to %d", name, text, low, high);
    return (int)v;
}

static void tune(int fd)
{
    int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
}

static struct addrinfo *resolve(int passive)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
    struct addrinfo *out = NULL;
    const char *host = getenv("MASTER_ADDR");
    char port[16];
    if (!host || !*host)
        die("the environment lacks MASTER_ADDR");
    snprintf(port, sizeof(port), "%d", env_int("MASTER_PORT", 1, 65535));
    hints.ai_flags = passive ? AI_PASSIVE : 0;
    int rc = getaddrinfo(host, port, &hints, &out);
    if (rc)
        die("MASTER_ADDR=%s: %s", host, gai_strerror(rc));
    return out;
}

/* One accepted connection says who it is; a stranger is turned away. */
static void admit(int fd, int *missing)
{
    struct hello h;
    struct timeval tv = {.tv_sec = 5};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
    ssize_t n = recv(fd, &h, sizeof(h), MSG_WAITALL);
    if (n != (ssize_t)sizeof(h) || h.magic != HELLO_MAGIC || h.size != (uint32_t)world_size ||
        h.rank == 0 || h.rank >= (uint32_t)world_size || sock[h.rank] >= 0) {
        fprintf(stderr, "minimpi: rank 0: turned a connection away: it is no missing rank\n");
        close(fd);
        return;
    }
    tv.tv_sec = 0;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
    tune(fd);
    sock[h.rank] = fd;
    (*missing)--;
}

static void gather_ranks(void)
{
    struct addrinfo *ai = resolve(1);
    int one = 1, missing = world_size - 1;
    int lfd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct timeval tv = {.tv_sec = 1};
    if (lfd < 0)
        die("socket: %s", strerror(errno));
    setsockopt(lfd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    setsockopt(lfd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
    if (bind(lfd, ai->ai_addr, ai->ai_addrlen) || listen(lfd, MAX_RANKS))
        die("cannot listen on %s:%s: %s", getenv("MASTER_ADDR"), getenv("MASTER_PORT"),
            strerror(errno));
    freeaddrinfo(ai);
    for (double end = now() + CONNECT_SECONDS; missing > 0;) {
        int fd = accept4(lfd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0)
            admit(fd, &missing);
        else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
            die("accept: %s", strerror(errno));
        if (missing > 0 && now() > end)
            die("%d of %d ranks did not connect within %d s", missing, world_size, CONNECT_SECONDS);
    }
    close(lfd);
}

static void join_root(void)
{
    struct addrinfo *ai = resolve(0);
    struct hello h = {HELLO_MAGIC, (uint32_t)my_rank, (uint32_t)world_size};
    int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        die("socket: %s", strerror(errno));
    if (!WITHIN_MS(CONNECT_SECONDS * 1000, connect(fd, ai->ai_addr, ai->ai_addrlen) == 0))
        die("cannot reach rank 0 at %s:%s within %d s: %s", getenv("MASTER_ADDR"),
            getenv("MASTER_PORT"), CONNECT_SECONDS, strerror(errno));
    tune(fd);
    sock[0] = fd;
    freeaddrinfo(ai);
    put(0, &h, sizeof(h));
}

int MPI_Init(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    world_size = env_int("WORLD_SIZE", 1, MAX_RANKS);
    my_rank = env_int("RANK", 0, world_size - 1);
    for (int i = 0; i < MAX_RANKS; i++)
        sock[i] = -1;
    if (my_rank == 0)
        gather_ranks();
    else
        join_root();
    return MPI_SUCCESS;
}

static void check_comm(MPI_Comm comm)
{
    if (my_rank < 0 || comm != MPI_COMM_WORLD)
        die("a call on communicator %d: only MPI_COMM_WORLD between MPI_Init and MPI_Finalize",
            comm);
}

static size_t type_size(MPI_Datatype type)
{
    switch (type) {
    case MPI_BYTE:
    case MPI_CHAR:
        return 1;
    case MPI_INT:
        return sizeof(int);
    case MPI_LONG:
        return sizeof(long);
    case MPI_LONG_LONG:
        return sizeof(long long);
    case MPI_INT64_T:
        return sizeof(int64_t);
    case MPI_DOUBLE:
        return sizeof(double);
    default:
        die("data type %d is unknown", type);
    }
}

int MPI_Finalize(void)
{
    MPI_Barrier(MPI_COMM_WORLD);
    for (int i = 0; i < world_size; i++)
        if (sock[i] >= 0)
            close(sock[i]);
    my_rank = -1;
    return MPI_SUCCESS;
}

int MPI_Abort(MPI_Comm comm, int code)
{
    (void)comm;
    fprintf(stderr, "minimpi: rank %d: MPI_Abort(%d)\n", my_rank, code);
    _exit(code ? code : 1);
}

int MPI_Comm_size(MPI_Comm comm, int *size)
{
    check_comm(comm);
    *size = world_size;
    return MPI_SUCCESS;
}

int MPI_Comm_rank(MPI_Comm comm, int *rank)
{
    check_comm(comm);
    *rank = my_rank;
    return MPI_SUCCESS;
}

/* out[r * len] is rank r's block, on rank 0 only. */
static void to_root(const void *mine, size_t len, char *out)
{
    if (my_rank != 0) {
        put(0, mine, len);
        return;
    }
    memmove(out, mine, len);
    for (int r = 1; r < world_size; r++)
        get(r, out + (size_t)r * len, len);
}

static void from_root(void *buf, size_t len)
{
    if (my_rank != 0) {
        get(0, buf, len);
        return;
    }
    for (int r = 1; r < world_size; r++)
        put(r, buf, len);
}

int MPI_Barrier(MPI_Comm comm)
{
    char mark = 0, marks[MAX_RANKS];
    check_comm(comm);
    to_root(&mark, 1, marks);
    from_root(&mark, 1);
    return MPI_SUCCESS;
}

int MPI_Bcast(void *buf, int count, MPI_Datatype type, int root, MPI_Comm comm)
{
    size_t len = (size_t)count * type_size(type);
    check_comm(comm);
    if (root != 0 && my_rank == root)
        put(0, buf, len);
    if (root != 0 && my_rank == 0)
        get(root, buf, len);
    from_root(buf, len);
    return MPI_SUCCESS;
}

int MPI_Gather(const void *send, int scount, MPI_Datatype stype, void *recv, int rcount,
               MPI_Datatype rtype, int root, MPI_Comm comm)
{
    (void)rcount;
    (void)rtype;
    check_comm(comm);
    if (root != 0 || send == MPI_IN_PLACE)
        die("MPI_Gather: only to rank 0 and from a buffer of its own");
    to_root(send, (size_t)scount * type_size(stype), recv);
    return MPI_SUCCESS;
}

int MPI_Allgather(const void *send, int scount, MPI_Datatype stype, void *recv, int rcount,
                  MPI_Datatype rtype, MPI_Comm comm)
{
    size_t len = (size_t)rcount * type_size(rtype);
    char *out = recv;
    check_comm(comm);
    if (send == MPI_IN_PLACE)
        send = out + (size_t)my_rank * len;
    else if ((size_t)scount * type_size(stype) != len)
        die("MPI_Allgather: send and receive sizes differ");
    to_root(send, len, out);
    from_root(out, len * (size_t)world_size);
    return MPI_SUCCESS;
}

#define COMBINE(T)                                                                                 \
    for (int i = 0; i < count; i++) {                                                              \
        T x = ((T *)acc)[i], y = ((const T *)in)[i];                                               \
        ((T *)acc)[i] = op == MPI_SUM ? x + y : (op == MPI_MIN) == (y < x) ? y : x;                \
    }

static void combine(void *acc, const void *in, int count, MPI_Datatype type, MPI_Op op)
{
    if (op != MPI_SUM && op != MPI_MIN && op != MPI_MAX)
        die("MPI_Allreduce: operation %d is unknown", op);
    switch (type) {
    case MPI_INT:
        COMBINE(int) break;
    case MPI_LONG:
        COMBINE(long) break;
    case MPI_LONG_LONG:
        COMBINE(long long) break;
    case MPI_INT64_T:
        COMBINE(int64_t) break;
    case MPI_DOUBLE:
        COMBINE(double) break;
    default:
        die("MPI_Allreduce: data type %d cannot be reduced", type);
    }
}

int MPI_Allreduce(const void *send, void *recv, int count, MPI_Datatype type, MPI_Op op,
                  MPI_Comm comm)
{
    size_t len = (size_t)count * type_size(type);
    char *all = NULL;
    check_comm(comm);
    if (send != MPI_IN_PLACE)
        memcpy(recv, send, len);
    if (my_rank == 0 && !(all = malloc(len * (size_t)world_size)))
        die("out of memory");
    to_root(recv, len, all);
    /* Reduced in rank order, so that sums of doubles are the same in every run. */
    for (int r = 1; my_rank == 0 && r < world_size; r++)
        combine(recv, all + (size_t)r * len, count, type, op);
    free(all);
    from_root(recv, len);
    return MPI_SUCCESS;
}

int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm *out)
{
    int low[2] = {color, 0}, high[2] = {color, 0};
    check_comm(comm);
    low[1] = high[1] = key - my_rank;
    MPI_Allreduce(MPI_IN_PLACE, low, 2, MPI_INT, MPI_MIN, comm);
    MPI_Allreduce(MPI_IN_PLACE, high, 2, MPI_INT, MPI_MAX, comm);
    if (low[0] != high[0] || low[1] != high[1])
        die("MPI_Comm_split: all ranks must stay in one group and in order "
            "(unset NCCL_TESTS_SPLIT)");
    *out = MPI_COMM_WORLD;
    return MPI_SUCCESS;
}

int MPI_Comm_free(MPI_Comm *comm)
{
    *comm = MPI_COMM_NULL;
    return MPI_SUCCESS;
}
