/* What the two bench programs share. A run has two sides, one process each: the receiver listens
 * for the sender on a control connection, over which they meet before every iteration.
 *
 * Units: bytes, nanoseconds of CLOCK_MONOTONIC, CPU seconds (user and system). Any error ends the
 * process with a line on stderr: exit code 1, or 2 for wrong usage.
 */
#ifndef R2_BENCH_HARNESS_H
#define R2_BENCH_HARNESS_H

#include <errno.h>
#include <netdb.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "../pause.h"

#define BENCH_MEET_S 20

/* What the receiver says at the end of an iteration. */
struct bench_result {
    uint64_t bytes;
    uint64_t ns; /* from the moment that the sender was told to go until the last byte was there */
    uint64_t wrong;
    double cpu_s;
};

__attribute__((format(printf, 1, 2), noreturn)) static inline void bench_die(const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    fprintf(stderr, "%s: ", program_invocation_short_name);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
    exit(1);
}

__attribute__((noreturn)) static inline void bench_usage(const char *what, const char *value)
{
    fprintf(stderr, "%s: %s '%s': see the head of tests/bench/%s.c\n",
            program_invocation_short_name, what, value, program_invocation_short_name);
    exit(2);
}

static inline uint64_t bench_now(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* CPU seconds of this process so far, all threads. */
static inline double bench_cpu(void)
{
    struct rusage use;

    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
           (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6;
}

/* A number with K, M or G (powers of 1024) behind it, least <= it <= most. */
static inline uint64_t bench_number(const char *option, const char *text, uint64_t least,
                                    uint64_t most)
{
    char *end;
    uint64_t v;
    int shift = 0;

    errno = 0;
    v = strtoull(text, &end, 10);
    if (*end == 'K' || *end == 'M' || *end == 'G')
        shift = *end++ == 'K' ? 10 : end[-1] == 'M' ? 20 : 30;
    if (errno || end == text || *end || *text == '-' || v > UINT64_MAX >> shift ||
        v << shift < least || v << shift > most)
        bench_usage(option, text);
    return v << shift;
}

static inline void bench_put(int fd, const void *data, size_t len)
{
    for (size_t off = 0; off < len;) {
        ssize_t n = send(fd, (const char *)data + off, len - off, MSG_NOSIGNAL);

        if (n <= 0)
            bench_die("the other side is gone: %s", strerror(errno));
        off += (size_t)n;
    }
}

static inline void bench_get(int fd, void *data, size_t len)
{
    for (size_t off = 0; off < len;) {
        ssize_t n = recv(fd, (char *)data + off, len - off, 0);

        if (n <= 0)
            bench_die("the other side is gone: %s", n < 0 ? strerror(errno) : "closed");
        off += (size_t)n;
    }
}

/* What the dialling side has been told. */
static inline void bench_agree(int fd, bool dial, uint64_t *number)
{
    if (dial)
        bench_put(fd, number, sizeof(*number));
    else
        bench_get(fd, number, sizeof(*number));
}

/* Returns when both sides have called it. */
static inline void bench_barrier(int fd)
{
    char c = 0;

    bench_put(fd, &c, 1);
    bench_get(fd, &c, 1);
}

static inline int bench_listen(int fd, const struct addrinfo *ai)
{
    struct timeval limit = {.tv_sec = BENCH_MEET_S};
    int one = 1, got;

    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    if (bind(fd, ai->ai_addr, ai->ai_addrlen) < 0 || listen(fd, 1) < 0)
        bench_die("cannot listen: %s", strerror(errno));
    got = accept(fd, NULL, NULL);
    if (got < 0)
        bench_die("nobody dialled within %d s", BENCH_MEET_S);
    close(fd);
    return got;
}

/* The control connection: listen or dial ADDRESS:PORT, at most BENCH_MEET_S long. */
static inline int bench_meet(const char *where, bool dial)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *ai;
    const char *colon = strrchr(where, ':');
    char host[64];
    int fd;

    if (!colon || (size_t)(colon - where) >= sizeof(host))
        bench_usage("ADDRESS:PORT expected, not", where);
    snprintf(host, sizeof(host), "%.*s", (int)(colon - where), where);
    if (getaddrinfo(host, colon + 1, &hints, &ai))
        bench_usage("no such address", where);
    fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        bench_die("socket: %s", strerror(errno));
    if (!dial)
        fd = bench_listen(fd, ai);
    else if (!WITHIN_MS(BENCH_MEET_S * 1000, connect(fd, ai->ai_addr, ai->ai_addrlen) == 0))
        bench_die("cannot dial %s: %s", where, strerror(errno));
    freeaddrinfo(ai);
    return fd;
}

/* One line of JSON for one iteration; `cpu_s` is the sender's. */
static inline void bench_print(int iteration, const struct bench_result *r, double cpu_s)
{
    printf("{\"iteration\": %d, \"bytes\": %llu, \"seconds\": %.6f, \"gbs\": %.6f, "
           "\"cpu_send_s\": %.6f, \"cpu_recv_s\": %.6f, \"wrong\": %llu}\n",
           iteration, (unsigned long long)r->bytes, (double)r->ns / 1e9,
           r->ns ? (double)r->bytes / (double)r->ns : 0, cpu_s, r->cpu_s,
           (unsigned long long)r->wrong);
    fflush(stdout);
}

#endif
