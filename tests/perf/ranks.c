/* Who am I, and how does the unique id come from rank 0 to the others. */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "perf.h"

enum { WAIT_SECONDS = 60 };
static const char magic[8] = "r2perf1";

static int number(const char *name, int def)
{
    const char *text = getenv(name);
    if (!text || !*text)
        return def;
    char *end;
    long value = strtol(text, &end, 10);
    if (*end || value < 0 || value > 1 << 24)
        perf_die("%s=%s: a whole number is needed", name, text);
    return (int)value;
}

static void read_place(struct perf_ranks *r, const char *text)
{
    const char *colon = strrchr(text, ':');
    if (!colon || colon == text || (size_t)(colon - text) >= sizeof(r->host) ||
        atoi(colon + 1) < 1 || atoi(colon + 1) > 65535)
        perf_die("R2CCL_RENDEZVOUS=%s: host:port of rank 0 is needed", text);
    bool brackets = text[0] == '[' && colon[-1] == ']';
    snprintf(r->host, sizeof(r->host), "%.*s", (int)(colon - text) - 2 * brackets, text + brackets);
    r->port = atoi(colon + 1);
}

void perf_ranks_read(struct perf_ranks *r)
{
    static const char *const names[][3] = {
        {"R2CCL_RANK", "R2CCL_NRANKS", "R2CCL_LOCAL_RANK"},
        {"RANK", "WORLD_SIZE", "LOCAL_RANK"},
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
    };
    *r = (struct perf_ranks){.nranks = 1};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!getenv(names[i][0]) || !getenv(names[i][1]))
            continue;
        r->rank = number(names[i][0], 0);
        r->nranks = number(names[i][1], 1);
        r->local_rank = number(names[i][2], number("LOCAL_RANK", r->rank));
        if (r->nranks < 1 || r->rank >= r->nranks)
            perf_die("%s=%d is not below %s=%d", names[i][0], r->rank, names[i][1], r->nranks);
        break;
    }
    const char *place = getenv("R2CCL_RENDEZVOUS"), *host = getenv("MASTER_ADDR");
    if (place && *place) {
        read_place(r, place);
    } else if (host && *host && getenv("MASTER_PORT")) {
        snprintf(r->host, sizeof(r->host), "%s", host);
        r->port = number("MASTER_PORT", 0) + 1; /* torchrun itself listens on the port */
    } else if (r->nranks > 1) {
        perf_die("%d ranks, but no R2CCL_RENDEZVOUS=host:port (or MASTER_ADDR and MASTER_PORT)",
                 r->nranks);
    }
}

static struct addrinfo *resolve(const struct perf_ranks *r, bool listens)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = listens ? AI_PASSIVE : 0};
    struct addrinfo *found = NULL;
    char port[16];
    snprintf(port, sizeof(port), "%d", r->port);
    int rc = getaddrinfo(r->host, port, &hints, &found);
    if (rc)
        perf_die("rendezvous host %s: %s", r->host, gai_strerror(rc));
    return found;
}

static void limit(int fd)
{
    struct timeval tv = {WAIT_SECONDS, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)); /* accept as well */
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
}

static void hand_out(const struct perf_ranks *r, const void *data, size_t bytes)
{
    struct addrinfo *a = resolve(r, true);
    int one = 1;
    int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, 0);
    if (fd < 0)
        perf_die("socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (bind(fd, a->ai_addr, a->ai_addrlen) || listen(fd, 1024))
        perf_die("rank 0 cannot listen on %s:%d: %s", r->host, r->port, strerror(errno));
    freeaddrinfo(a);
    limit(fd);
    for (int served = 1; served < r->nranks;) {
        char hello[8];
        int peer = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
        if (peer < 0)
            perf_die("only %d of %d ranks came to %s:%d within %d s", served, r->nranks, r->host,
                     r->port, WAIT_SECONDS);
        limit(peer);
        if (recv(peer, hello, sizeof(hello), MSG_WAITALL) == (ssize_t)sizeof(hello) &&
            !memcmp(hello, magic, sizeof(hello)) &&
            send(peer, data, bytes, MSG_NOSIGNAL) == (ssize_t)bytes)
            served++;
        close(peer);
    }
    close(fd);
}

static bool ask(const struct perf_ranks *r, void *data, size_t bytes)
{
    struct addrinfo *all = resolve(r, false);
    bool got = false;
    for (struct addrinfo *a = all; a && !got; a = a->ai_next) {
        int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, 0);
        if (fd < 0)
            continue;
        limit(fd);
        got = !connect(fd, a->ai_addr, a->ai_addrlen) &&
              send(fd, magic, sizeof(magic), MSG_NOSIGNAL) == (ssize_t)sizeof(magic) &&
              recv(fd, data, bytes, MSG_WAITALL) == (ssize_t)bytes;
        close(fd);
    }
    freeaddrinfo(all);
    return got;
}

void perf_ranks_share(const struct perf_ranks *r, void *data, size_t bytes)
{
    if (r->nranks == 1)
        return;
    if (r->rank == 0) {
        hand_out(r, data, bytes);
        return;
    }
    double until = perf_run_now() + WAIT_SECONDS;
    while (!ask(r, data, bytes)) {
        if (perf_run_now() > until)
            perf_die("rank %d got no id from rank 0 at %s:%d within %d s", r->rank, r->host,
                     r->port, WAIT_SECONDS);
        usleep(50000);
    }
}
