/* One process with many peers: what their paths cost while nothing moves.
 *
 *   star --peers 64 --nics 8 --seconds 5 [--active | --bare | --blind]
 *
 * The hub forks light peers, each an engine of its own on loopback NICs. It opens one connection to
 * each and sends it one small message. Then nothing moves; with --active a bulk message waits on
 * every connection for its clear-to-send, so that every path counts as busy. After that it prints a
 * line of JSON over the given seconds: CPU of the hub's I/O threads and of the whole hub;
 * heartbeats; what its sockets put on the wire both ways (66 bytes of headers per segment).
 *
 * --bare: no engine. One thread makes the system calls of active paths' heartbeats on as many plain
 * TCP connections: every 100 ms, for each of them, has the last one been acknowledged, and the next
 * one, of as many bytes. What is left of the cost then is the engine's. --blind: the same without
 * asking, the least that a heartbeat over a socket costs.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>

#include "engine/loop/loop.h"
#include "harness.h"

#define PEERS_MAX 200
#define HEADERS 66
#define SMALL 8
#define BULK (64 * 1024)
#define BEAT 12 /* bytes of a heartbeat's frame */
#define BEAT_NS 100000000u

static int peers = 8, nics = 8, seconds = 5;
static bool active, bare, blind;

static void set_nics(int host)
{
    char list[512] = "";

    for (int i = 0; i < nics; i++)
        snprintf(list + strlen(list), sizeof(list) - strlen(list), "%s127.0.%d.%d", i ? "," : "",
                 i + 1, host);
    setenv("R2CCL_NICS", list, 1);
}

static void engine(struct r2_ctx **ctx, int host)
{
    int rc, n;

    set_nics(host);
    rc = r2_engine_init(ctx, 1, NULL);
    if (rc)
        bench_die("init: %s", strerror(-rc));
    r2_engine_devices(&n);
    if (n != nics)
        bench_die("%d NICs instead of %d", n, nics);
}

static void finish(struct r2_req *req)
{
    int done = 0, rc = 0;

    (void)WITHIN_MS(30000, (rc = r2_engine_test(req, &done, NULL)) || done);
    if (!done)
        bench_die("a message did not get through: %s", strerror(rc ? -rc : ETIMEDOUT));
}

__attribute__((noreturn)) static void leaf(int index, int out)
{
    char handle[R2_HANDLE_BYTES], word[SMALL];
    struct r2_ctx *ctx;
    struct r2_listen *l;
    struct r2_conn *c = NULL;
    struct r2_req *req = NULL;
    int rc;

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    engine(&ctx, 2 + index);
    if (r2_engine_listen(ctx, 0, handle, &l) ||
        write(out, handle, sizeof(handle)) != (ssize_t)sizeof(handle))
        bench_die("listen");
    UNTIL((rc = r2_engine_accept(l, &c)) || c);
    if (rc)
        bench_die("accept: %s", strerror(-rc));
    r2_engine_irecv(c, word, SMALL, 0, NULL, &req);
    finish(req);
    for (;;)
        pause();
}

static void connect_all(struct r2_ctx *ctx, const int *pipes, struct r2_conn **conns)
{
    static char word[SMALL], bulk[BULK];

    for (int i = 0; i < peers; i++) {
        char handle[R2_HANDLE_BYTES];
        struct r2_req *req = NULL;
        int rc = 0;

        if (read(pipes[i], handle, sizeof(handle)) != (ssize_t)sizeof(handle))
            bench_die("peer %d did not start", i);
        if (!WITHIN_MS(20000, (rc = r2_engine_connect(ctx, 0, handle, &conns[i])) || conns[i]) ||
            rc)
            bench_die("peer %d: connect: %s", i, strerror(rc ? -rc : ETIMEDOUT));
        r2_engine_isend(conns[i], word, SMALL, 0, NULL, &req);
        finish(req);
        if (active)
            r2_engine_isend(conns[i], bulk, BULK, 0, NULL, &req);
    }
}

struct wire {
    uint64_t bytes, segments;
};

/* Of all TCP sockets of this process. */
static struct wire on_wire(void)
{
    struct wire sum = {0};
    DIR *dir = opendir("/proc/self/fd");
    struct dirent *e;

    while (dir && (e = readdir(dir))) {
        struct tcp_info ti;
        socklen_t len = sizeof(ti);

        memset(&ti, 0, sizeof(ti));
        if (getsockopt(atoi(e->d_name), IPPROTO_TCP, TCP_INFO, &ti, &len))
            continue;
        sum.bytes += ti.tcpi_bytes_sent + ti.tcpi_bytes_received;
        sum.segments += ti.tcpi_segs_out + ti.tcpi_segs_in;
    }
    if (dir)
        closedir(dir);
    return sum;
}

static void wait_for_paths(void)
{
    uint64_t want = (uint64_t)peers * (uint64_t)nics, up;

    if (!WITHIN_MS(60000, (up = __atomic_load_n(&r2_eng.g->paths_up, __ATOMIC_RELAXED)) >= want))
        bench_die("%llu of %llu paths", (unsigned long long)up, (unsigned long long)want);
}

static void measure(void)
{
    uint64_t beats = r2_eng.n->heartbeats_sent, missed = r2_eng.n->heartbeats_missed, t0, t1;
    struct wire a = on_wire(), b;
    double cpu = bench_cpu(), io = (double)r2_io_cpu_ns() / 1e9;

    t0 = bench_now();
    pause_us((unsigned long)seconds * 1000000);
    t1 = bench_now();
    cpu = bench_cpu() - cpu;
    io = (double)r2_io_cpu_ns() / 1e9 - io;
    b = on_wire();
    printf("{\"paths\": %llu, \"seconds\": %.4f, \"io_cpu_s\": %.6f, \"cpu_s\": %.6f, "
           "\"heartbeats\": %llu, \"missed\": %llu, \"wire_bytes\": %llu, \"failures\": %llu}\n",
           (unsigned long long)r2_eng.g->paths_up, (double)(t1 - t0) / 1e9, io, cpu,
           (unsigned long long)(r2_eng.n->heartbeats_sent - beats),
           (unsigned long long)(r2_eng.n->heartbeats_missed - missed),
           (unsigned long long)(b.bytes - a.bytes + HEADERS * (b.segments - a.segments)),
           (unsigned long long)r2_eng.n->path_failures);
}

/* ---- plain sockets */

__attribute__((noreturn)) static void bare_leaf(int out)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event ev = {.events = EPOLLIN};
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), ready = epoll_create1(0);
    socklen_t len = sizeof(at);
    char bytes[64];

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (bind(listener, (struct sockaddr *)&at, len) || listen(listener, nics) ||
        getsockname(listener, (struct sockaddr *)&at, &len) ||
        write(out, &at, sizeof(at)) != (ssize_t)sizeof(at))
        bench_die("listen: %s", strerror(errno));
    for (int i = 0; i < nics; i++) {
        ev.data.fd = accept(listener, NULL, NULL);
        if (ev.data.fd < 0 || epoll_ctl(ready, EPOLL_CTL_ADD, ev.data.fd, &ev))
            bench_die("accept: %s", strerror(errno));
    }
    while (epoll_wait(ready, &ev, 1, -1) >= 0 || errno == EINTR) {
        if (read(ev.data.fd, bytes, sizeof(bytes)) == 0)
            break;
    }
    _exit(0);
}

/* The calls of r2_tcp_health and of the send that follows. */
static void bare_beat(int fd)
{
    static const char frame[BEAT];
    struct tcp_info ti;
    socklen_t len = sizeof(ti);

    if ((!blind && getsockopt(fd, IPPROTO_TCP, TCP_INFO, &ti, &len)) ||
        send(fd, frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)sizeof(frame))
        bench_die("heartbeat: %s", strerror(errno));
}

static int bare_connect(const struct sockaddr_in *to)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;

    if (fd < 0 || connect(fd, (const struct sockaddr *)to, sizeof(*to)) ||
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
        bench_die("connect: %s", strerror(errno));
    return fd;
}

/* Each peer has its time within the 100 ms, as the engine's timers do. */
static void bare_run(const int *pipes)
{
    static int fds[PEERS_MAX][R2_MAX_NICS];
    uint64_t t0, end, beats = 0, step = BEAT_NS / (unsigned)peers;
    double cpu;

    for (int p = 0; p < peers; p++) {
        struct sockaddr_in to;

        if (read(pipes[p], &to, sizeof(to)) != (ssize_t)sizeof(to))
            bench_die("peer %d did not start", p);
        for (int i = 0; i < nics; i++)
            fds[p][i] = bare_connect(&to);
    }
    cpu = bench_cpu();
    t0 = bench_now();
    end = t0 + (uint64_t)seconds * 1000000000u;
    for (uint64_t turn = 0, at = t0; at < end; turn++, at += step) {
        struct timespec when = {.tv_sec = (time_t)(at / 1000000000u),
                                .tv_nsec = (long)(at % 1000000000u)};

        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, NULL);
        for (int i = 0; i < nics; i++, beats++)
            bare_beat(fds[turn % (unsigned)peers][i]);
    }
    cpu = bench_cpu() - cpu;
    printf("{\"paths\": %d, \"seconds\": %.4f, \"io_cpu_s\": %.6f, \"cpu_s\": %.6f, "
           "\"heartbeats\": %llu, \"missed\": 0, \"wire_bytes\": 0, \"failures\": 0}\n",
           peers * nics, (double)(bench_now() - t0) / 1e9, cpu, cpu, (unsigned long long)beats);
}

static void parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";

        if (strcmp(argv[i], "--active") == 0) {
            active = true;
            continue;
        }
        if (strcmp(argv[i], "--bare") == 0 || strcmp(argv[i], "--blind") == 0) {
            bare = true;
            blind = strcmp(argv[i], "--blind") == 0;
            continue;
        }
        if (strcmp(argv[i], "--peers") == 0)
            peers = (int)bench_number(argv[i], value, 1, PEERS_MAX);
        else if (strcmp(argv[i], "--nics") == 0)
            nics = (int)bench_number(argv[i], value, 1, R2_MAX_NICS);
        else if (strcmp(argv[i], "--seconds") == 0)
            seconds = (int)bench_number(argv[i], value, 1, 600);
        else
            bench_usage(argv[i], value);
        i++;
    }
}

int main(int argc, char **argv)
{
    static struct r2_conn *conns[PEERS_MAX];
    int pipes[PEERS_MAX];
    struct r2_ctx *ctx;

    parse(argc, argv);
    setenv("R2CCL_SHM", "0", 1);
    setenv("R2CCL_IO_THREADS", "1", 1);
    for (int i = 0; i < peers; i++) {
        int ends[2];
        pid_t pid;

        if (pipe2(ends, O_CLOEXEC) < 0 || (pid = fork()) < 0)
            bench_die("fork: %s", strerror(errno));
        if (pid == 0 && bare)
            bare_leaf(ends[1]);
        if (pid == 0)
            leaf(i, ends[1]);
        close(ends[1]);
        pipes[i] = ends[0];
    }
    if (bare) {
        bare_run(pipes);
        fflush(stdout);
        _exit(0);
    }
    engine(&ctx, 1);
    connect_all(ctx, pipes, conns);
    wait_for_paths();
    pause_us(2000000);
    measure();
    fflush(stdout);
    _exit(0); /* the peers go with us */
}
