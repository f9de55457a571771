/* Who am I, and how does the unique id come from rank 0 to the others.
 *
 * A port may be another job's, or become it. So rank 0 is told whose rank asks (the launcher's
 * token or name for the job, the number of ranks, the rank). It gives the id to its own only. Who
 * is turned away tries again, since its own rank 0 may take the port next. */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../pause.h"
#include "perf.h"

enum { WAIT_SECONDS = 60, HELLO_SECONDS = 5, TRY_AGAIN_US = 50000 };
static const char hello_magic[8] = "r2perf2", answer_magic[8] = "r2answ2";

struct hello { /* of a rank, to whoever listens */
    char magic[8];
    char token[sizeof(((struct perf_ranks *)0)->token)];
    int32_t rank, nranks;
};

enum verdict { WELCOME, OTHER_JOB, TAKEN }; /* TAKEN: that rank has been there */
struct answer {                             /* of rank 0; the id follows a WELCOME */
    char magic[8];
    int32_t verdict, nranks;
};
_Static_assert(sizeof(struct hello) == 80 && sizeof(struct answer) == 16, "no padding");

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

/* Else what the launcher calls the job, cut to size: every rank has the same from it. */
static void read_token(struct perf_ranks *r, const char *job)
{
    const char *token = getenv("R2CCL_RENDEZVOUS_TOKEN");
    if (token && strlen(token) >= sizeof(r->token))
        perf_die("R2CCL_RENDEZVOUS_TOKEN=%s: at most %zu characters are taken", token,
                 sizeof(r->token) - 1);
    r->one_start = token && *token;
    if (!r->one_start)
        token = job ? job : "";
    snprintf(r->token, sizeof(r->token), "%s", token);
}

void perf_ranks_read(struct perf_ranks *r)
{
    static const char *const names[][4] = {
        {"R2CCL_RANK", "R2CCL_NRANKS", "R2CCL_LOCAL_RANK", NULL},
        {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"},
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
         "PMIX_NAMESPACE"},
        {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "PMI_JOBID"},
    };
    const char *job = NULL;
    *r = (struct perf_ranks){.nranks = 1};
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (!getenv(names[i][0]) || !getenv(names[i][1]))
            continue;
        r->rank = number(names[i][0], 0);
        r->nranks = number(names[i][1], 1);
        r->local_rank = number(names[i][2], number("LOCAL_RANK", r->rank));
        if (r->nranks < 1 || r->rank >= r->nranks)
            perf_die("%s=%d is not below %s=%d", names[i][0], r->rank, names[i][1], r->nranks);
        job = names[i][3] ? getenv(names[i][3]) : NULL;
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
    read_token(r, job);
}

/* Seconds without anything new after which a rank gives up. */
static int patience(void)
{
    int seconds = number("R2CCL_RENDEZVOUS_TIMEOUT", WAIT_SECONDS);
    return seconds > 0 ? seconds : 1;
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

/* Accept, connect, receive and send end after that. At least a moment: zero is no limit. */
static void limit(int fd, double seconds)
{
    double least = seconds > 0.01 ? seconds : 0.01;
    struct timeval tv = {(time_t)least, (suseconds_t)((least - (double)(time_t)least) * 1e6)};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
}

static int bind_at(int fd, const struct addrinfo *a)
{
    return bind(fd, a->ai_addr, a->ai_addrlen) || listen(fd, 1024) ? errno : 0;
}

/* A port in use may be another job's rendezvous, which is soon over. */
static int listen_at(const struct perf_ranks *r)
{
    struct addrinfo *a = resolve(r, true);
    int one = 1, rc, fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, 0);
    if (fd < 0)
        perf_die("socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    rc = bind_at(fd, a);
    if (rc == EADDRINUSE) {
        fprintf(stderr, "r2ccl_perf: rank 0: %s:%d is in use; trying for %d s\n", r->host, r->port,
                patience());
        (void)WITHIN_MS(patience() * 1000, (rc = bind_at(fd, a)) != EADDRINUSE);
    }
    if (rc)
        perf_die("rank 0 cannot listen on %s:%d: %s; give R2CCL_RENDEZVOUS (or MASTER_PORT) a "
                 "port that is free",
                 r->host, r->port, strerror(rc));
    freeaddrinfo(a);
    return fd;
}

/* Without a token of one start, one of two that say they are the same rank is another job's: who
 * comes first is taken. With it, it is the same one, which has not got its answer. */
static enum verdict judge(const struct perf_ranks *r, const struct hello *hello, const bool *there)
{
    if (strncmp(hello->token, r->token, sizeof(hello->token)) != 0 || hello->nranks != r->nranks ||
        hello->rank < 1 || hello->rank >= r->nranks)
        return OTHER_JOB;
    return there[hello->rank] && !r->one_start ? TAKEN : WELCOME;
}

/* One connection; the rank that has got the data now, 0 if none. */
static int serve(const struct perf_ranks *r, int fd, const bool *there, const void *data,
                 size_t bytes)
{
    static bool said;
    struct hello hello;
    struct answer answer = {.nranks = r->nranks};
    limit(fd, HELLO_SECONDS);
    if (recv(fd, &hello, sizeof(hello), MSG_WAITALL) != (ssize_t)sizeof(hello) ||
        memcmp(hello.magic, hello_magic, sizeof(hello_magic)) != 0)
        return 0;
    memcpy(answer.magic, answer_magic, sizeof(answer_magic));
    answer.verdict = judge(r, &hello, there);
    if (send(fd, &answer, sizeof(answer), MSG_NOSIGNAL) != (ssize_t)sizeof(answer))
        return 0;
    if (answer.verdict != WELCOME) {
        if (!said)
            fprintf(stderr,
                    "r2ccl_perf: rank 0: turned away rank %d of another job (%d ranks) at %s:%d\n",
                    hello.rank, hello.nranks, r->host, r->port);
        said = true;
        return 0;
    }
    return send(fd, data, bytes, MSG_NOSIGNAL) == (ssize_t)bytes ? hello.rank : 0;
}

static void hand_out(const struct perf_ranks *r, const void *data, size_t bytes)
{
    bool *there = calloc((size_t)r->nranks, sizeof(*there));
    if (!there)
        perf_die("no memory for %d ranks", r->nranks);
    int fd = listen_at(r);
    double until = perf_run_now() + patience();
    for (int served = 1; served < r->nranks;) {
        limit(fd, until - perf_run_now());
        int peer = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
        int rank = peer < 0 ? 0 : serve(r, peer, there, data, bytes);
        if (peer >= 0)
            close(peer);
        if (rank && !there[rank]) {
            there[rank] = true;
            served++;
            until = perf_run_now() + patience(); /* others of the job are on their way */
        }
        if (perf_run_now() > until)
            perf_die("only %d of %d ranks came to %s:%d within %d s of each other", served,
                     r->nranks, r->host, r->port, patience());
    }
    close(fd);
    free(there);
}

/* While nobody listens, a connection may end at itself: the kernel may give it that port. */
static bool is_itself(int fd)
{
    struct sockaddr_storage own = {0}, peer = {0};
    socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
    struct linger reset = {1, 0}; /* the port is free at once */
    if (getsockname(fd, (struct sockaddr *)&own, &own_size) ||
        getpeername(fd, (struct sockaddr *)&peer, &peer_size) || own_size != peer_size ||
        memcmp(&own, &peer, own_size) != 0)
        return false;
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    return true;
}

/* One question over a socket: true with the data, else what was in the way in `why`. */
static bool ask_one(const struct perf_ranks *r, int fd, const struct addrinfo *a, void *data,
                    size_t bytes, char why[160])
{
    struct hello hello = {.rank = r->rank, .nranks = r->nranks};
    struct answer answer;
    memcpy(hello.magic, hello_magic, sizeof(hello_magic));
    memcpy(hello.token, r->token, sizeof(hello.token));
    if (connect(fd, a->ai_addr, a->ai_addrlen)) {
        snprintf(why, 160, "%s", strerror(errno));
        return false;
    }
    if (is_itself(fd)) {
        snprintf(why, 160, "nobody listens");
        return false;
    }
    snprintf(why, 160, "what listens there does not answer as a rank 0");
    if (send(fd, &hello, sizeof(hello), MSG_NOSIGNAL) != (ssize_t)sizeof(hello) ||
        recv(fd, &answer, sizeof(answer), MSG_WAITALL) != (ssize_t)sizeof(answer) ||
        memcmp(answer.magic, answer_magic, sizeof(answer_magic)) != 0)
        return false;
    if (answer.verdict != WELCOME)
        snprintf(why, 160, "the rank 0 that answers is another job's (%d ranks%s)", answer.nranks,
                 answer.verdict == TAKEN ? ", one of this number is there" : "");
    return answer.verdict == WELCOME && recv(fd, data, bytes, MSG_WAITALL) == (ssize_t)bytes;
}

static bool ask(const struct perf_ranks *r, double until, void *data, size_t bytes, char why[160])
{
    struct addrinfo *all = resolve(r, false);
    bool got = false;
    for (struct addrinfo *a = all; a && !got; a = a->ai_next) {
        int fd = socket(a->ai_family, a->ai_socktype | SOCK_CLOEXEC, 0);
        if (fd < 0)
            continue;
        double left = until - perf_run_now(); /* the last one too is heard out */
        limit(fd, left > HELLO_SECONDS ? left : HELLO_SECONDS);
        got = ask_one(r, fd, a, data, bytes, why);
        close(fd);
    }
    freeaddrinfo(all);
    return got;
}

void perf_ranks_share(const struct perf_ranks *r, void *data, size_t bytes)
{
    char why[160] = "", last[160] = "";
    if (r->nranks == 1)
        return;
    if (r->rank == 0) {
        hand_out(r, data, bytes);
        return;
    }
    double until = perf_run_now() + patience();
    while (!ask(r, until, data, bytes, why)) {
        if (perf_run_now() > until)
            perf_die("rank %d got no id from rank 0 at %s:%d within %d s: %s; give "
                     "R2CCL_RENDEZVOUS (or MASTER_PORT) a port of the job's own",
                     r->rank, r->host, r->port, patience(), why);
        if (strstr(why, "another job's") && strcmp(why, last) != 0)
            fprintf(stderr, "r2ccl_perf: rank %d: %s:%d: %s; trying for %d s\n", r->rank, r->host,
                    r->port, why, patience());
        snprintf(last, sizeof(last), "%s", why);
        pause_us(TRY_AGAIN_US);
    }
}
