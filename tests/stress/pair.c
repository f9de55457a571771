/* Two processes, one engine each: messages over several connections, every word checked, faults
 * injected at random if asked for. Rung 3 (loopback NICs) or, through the lab, rung 4.
 *
 *   R2CCL_NICS=127.0.1.1,127.0.2.1 build/stress/pair --size 1M --count 1000 --conns 2
 *   ... --faults 7 --count 20000     random faults from seed 7, on both sides
 *   ... --until-told                 messages until the parent gets SIGUSR1, then an orderly end
 *   ... --leave                  the second process sends, and ends when its sends are done
 *   PAIR_BEGIN=FILE ...              connected, but no message before there is that file (60 s)
 *   ... --device                     memory that no thread of the engine can touch, as a DMA buffer
 *   ... --listen 10.250.0.1:7000 / --dial 10.250.0.1:7000   the two sides started by hand
 *
 * Prints one line of JSON per side that received: bytes, seconds, GB/s, wrong. Exit 0: all right,
 * 1: a wrong byte or an error, 2: usage, 3: no progress for --stall seconds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <getopt.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "engine/engine.h"
#include "io/fault.h"
#include "util/clock.h"
#include "util/random.h"

#include "../pause.h"
#include "slots.h"

#define MAX_CONNS 64

static struct {
    uint64_t size, count;
    int conns, outstanding, stall;
    uint64_t fault_seed;
    bool faults, bidir, check, random_sizes, register_memory, until_told, device, leave;
    const char *listen, *dial;
} opt = {.size = 1 << 20, .count = 1000, .conns = 1, .outstanding = 4, .stall = 30, .check = true};

static struct r2_ctx *ctx;
static int peer_fd, ndev, side;
static atomic_ulong progress, wrong, moved;
static atomic_bool stop;
static atomic_bool ending; /* told to end: senders post nothing until both sides know the counts */

struct flow {
    struct r2_conn *conn;
    int index;
    bool send;
    pthread_t thread;
    int rc;
    _Atomic uint64_t count;     /* messages of this flow */
    _Atomic uint64_t frozen_at; /* posted when `ending` was seen, + 1; 0: not yet */
};

static struct flow flows[2 * MAX_CONNS];
static int nflows;

static void die(const char *what, int rc)
{
    fprintf(stderr, "pair[%d]: %s: %s\n", side, what, strerror(rc < 0 ? -rc : rc));
    exit(1);
}

static void xfer(void *buf, size_t len, bool out)
{
    size_t off = 0;

    while (off < len) {
        ssize_t n = out ? send(peer_fd, (char *)buf + off, len - off, MSG_NOSIGNAL)
                        : recv(peer_fd, (char *)buf + off, len - off, 0);

        if (n <= 0)
            die("the other side is gone", n < 0 ? errno : ECONNRESET);
        off += (size_t)n;
    }
}

static uint64_t word(int conn, uint64_t seq, uint64_t i)
{
    return (seq + 1) * 0x9e3779b97f4a7c15u + (uint64_t)conn * 0xbf58476d1ce4e5b9u + i;
}

static uint64_t size_of(int conn, uint64_t seq)
{
    uint64_t x = word(conn, seq, 77);

    if (!opt.random_sizes)
        return opt.size;
    x ^= x >> 29;
    return x % 5 == 0 && opt.size > 8192 ? x % 8192 : x % (opt.size + 1);
}

static void fill(uint8_t *buf, uint64_t size, int conn, uint64_t seq)
{
    for (uint64_t i = 0; i < size / 8; i++)
        ((uint64_t *)(void *)buf)[i] = word(conn, seq, i);
    for (uint64_t i = size & ~UINT64_C(7); i < size; i++)
        buf[i] = (uint8_t)word(conn, seq, i);
}

static uint64_t verify(const uint8_t *buf, uint64_t size, int conn, uint64_t seq)
{
    uint64_t bad = 0;

    for (uint64_t i = 0; i < size / 8; i++)
        bad += ((const uint64_t *)(const void *)buf)[i] != word(conn, seq, i);
    for (uint64_t i = size & ~UINT64_C(7); i < size; i++)
        bad += buf[i] != (uint8_t)word(conn, seq, i);
    return bad;
}

/* Posts message `seq`; false: no request free. */
static bool post(struct flow *f, struct slot *s, uint64_t seq)
{
    uint64_t size = size_of(f->index, seq);
    int rc;

    if (f->send && opt.check)
        fill(s->view, size, f->index, seq);
    else if (opt.check)
        memset(s->view, 0xdb, opt.size); /* what is not written must show */
    s->size = size;
    rc = f->send ? r2_engine_isend(f->conn, s->buf, size, 0, s->mr, &s->req)
                 : r2_engine_irecv(f->conn, s->buf, opt.size, 0, s->mr, &s->req);
    if (rc)
        f->rc = rc;
    return s->req != NULL;
}

/* 1 done, 0 not yet, < 0 error. */
static int poll_slot(struct flow *f, struct slot *s, uint64_t seq)
{
    size_t got = 0;
    int done, rc = r2_engine_test(s->req, &done, &got);

    if (rc || !done)
        return rc;
    s->req = NULL;
    atomic_fetch_add(&progress, 1);
    if (f->send) {
        if (opt.check)
            memset(s->view, 0xa5, s->size); /* done means: it may be overwritten */
        return 1;
    }
    rc = flush_slot(f->conn, s);
    if (rc)
        return rc;
    atomic_fetch_add(&moved, got);
    if (got != s->size)
        atomic_fetch_add(&wrong, 1);
    if (opt.check)
        atomic_fetch_add(&wrong, verify(s->view, s->size, f->index, seq));
    return 1;
}

/* Nothing to do: as NCCL's threads, it spins at first; and then leaves the cores to the engines,
 * or a machine with two of them runs little else. `idle_ns` is when that began, 0: just now. */
static void rest(uint64_t *idle_ns)
{
    uint64_t now = r2_now_ns();

    if (!*idle_ns)
        *idle_ns = now;
    if (now - *idle_ns < 20 * R2_NS_PER_US)
        sched_yield();
    else
        pause_us(30);
}

static void *run_flow(void *arg)
{
    struct flow *f = arg;
    struct slot *slots = calloc((size_t)opt.outstanding, sizeof(*slots));
    uint64_t head = 0, tail = 0, idle = 0;

    for (int i = 0; i < opt.outstanding; i++) {
        if (slot_make(f->conn, &slots[i], opt.size, opt.register_memory, opt.device))
            die("registering memory", ENOMEM);
    }
    while ((tail < atomic_load(&f->count) || head < tail) && !f->rc && !atomic_load(&stop)) {
        struct slot *s = &slots[tail % (uint64_t)opt.outstanding];
        bool more = tail < atomic_load(&f->count);
        int rc;

        if (f->send && atomic_load(&ending) && atomic_load(&f->count) == UINT64_MAX) {
            atomic_store(&f->frozen_at, tail + 1);
            more = false;
        }
        if (more && tail - head < (uint64_t)opt.outstanding && post(f, s, tail)) {
            tail++;
            idle = 0;
        }
        if (head == tail) {
            rest(&idle);
            continue;
        }
        rc = poll_slot(f, &slots[head % (uint64_t)opt.outstanding], head);
        if (rc < 0)
            f->rc = rc;
        else if (rc == 0)
            rest(&idle);
        else
            idle = 0;
        head += rc == 1;
    }
    for (int i = 0; i < opt.outstanding; i++) {
        r2_engine_dereg(f->conn, slots[i].mr);
        memset(slots[i].view, 0x77, opt.size);
    }
    r2_engine_close(f->conn);
    for (int i = 0; i < opt.outstanding; i++)
        slot_free(&slots[i], opt.size, opt.device);
    free(slots);
    return NULL;
}

static struct r2_conn *make_conn(int index, bool send)
{
    char handle[R2_HANDLE_BYTES];
    struct r2_listen *l = NULL;
    struct r2_conn *c = NULL;
    int rc;

    if (send) {
        xfer(handle, sizeof(handle), false);
    } else {
        rc = r2_engine_listen(ctx, index % ndev, handle, &l);
        if (rc)
            die("listen", rc);
        xfer(handle, sizeof(handle), true);
    }
    if (!WITHIN_MS(20000, (rc = send ? r2_engine_connect(ctx, index % ndev, handle, &c)
                                     : r2_engine_accept(l, &c)) ||
                              c) ||
        rc)
        die(send ? "connect" : "accept", rc ? rc : ETIMEDOUT);
    r2_engine_close_listen(l);
    return c;
}

/* Random faults on this side's NICs; at least one is left alone unless told otherwise, and all of
 * them are cleared in the end. */
static void *chaos(void *arg)
{
    struct r2_prng rnd;

    (void)arg;
    r2_prng_seed(&rnd, opt.fault_seed * 2 + (uint64_t)side);
    while (!atomic_load(&stop)) {
        int nic = (int)r2_prng_below(&rnd, (uint64_t)ndev);
        struct r2_fault f = {
            .tx = r2_prng_below(&rnd, 3) != 0, .rate = 5000000, .loss_ppm = 200000};

        f.rx = !f.tx || r2_prng_below(&rnd, 2);
        f.kind = (enum r2_seg_fault)(1 + r2_prng_below(&rnd, 4));
        f.after_bytes = r2_prng_below(&rnd, 2) ? r2_prng_below(&rnd, 8 << 20) : 0;
        f.for_ns = (20 + r2_prng_below(&rnd, 1000)) * R2_NS_PER_MS;
        r2_fault_set(nic, &f);
        pause_us((unsigned long)(5000 + r2_prng_below(&rnd, 500000)));
        if (r2_prng_below(&rnd, 3) == 0)
            r2_fault_clear((int)r2_prng_below(&rnd, (uint64_t)ndev));
    }
    for (int i = 0; i < ndev; i++)
        r2_fault_clear(i);
    return NULL;
}

static void *watch(void *arg)
{
    uint64_t last = 0, since = r2_now_ns();

    (void)arg;
    for (;;) {
        uint64_t now;

        pause_us(100000);
        now = r2_now_ns();
        if (atomic_load(&progress) != last) {
            last = atomic_load(&progress);
            since = now;
        }
        if (now - since > (uint64_t)opt.stall * R2_NS_PER_S) {
            fprintf(stderr, "pair[%d]: no progress for %d s after %lu messages\n", side, opt.stall,
                    (unsigned long)last);
            if (getenv("PAIR_ABORT"))
                abort();
            exit(3);
        }
    }
}

/* Where this side's senders stand, once they post nothing more. A receiver is never further ahead
 * than `outstanding`, so that is where the flow ends: nobody waits for a message that never comes.
 */
static void freeze(uint64_t *ends)
{
    atomic_store(&ending, true);
    for (int i = 0; i < nflows; i++) {
        if (flows[i].send)
            UNTIL(atomic_load(&flows[i].frozen_at));
        ends[i] =
            flows[i].send ? atomic_load(&flows[i].frozen_at) - 1 + (uint64_t)opt.outstanding : 0;
    }
}

static void set_counts(const uint64_t *ends, bool send)
{
    for (int i = 0; i < nflows; i++) {
        if (flows[i].send == send)
            atomic_store(&flows[i].count, ends[i]);
    }
}

/* Waits for the word to end (side 0: SIGUSR1, side 1: the other side's counts), and agrees on where
 * each flow ends: counts there, counts back, a byte there. */
static void *until_told(void *arg)
{
    size_t size = sizeof(uint64_t) * (size_t)nflows;
    uint64_t ours[2 * MAX_CONNS], theirs[2 * MAX_CONNS];
    char heard = 1;
    int number;

    if (side == 0) {
        sigwait(arg, &number);
        freeze(ours);
        xfer(ours, size, true);
        xfer(theirs, size, false);
        set_counts(theirs, false);
        xfer(&heard, 1, true);
    } else {
        xfer(theirs, size, false);
        set_counts(theirs, false);
        freeze(ours);
        xfer(ours, size, true);
        xfer(&heard, 1, false);
    }
    set_counts(ours, true);
    return NULL;
}

static int parent_or_peer(int argc, char **argv)
{
    int sv[2];
    pid_t pid;

    (void)argc;
    if (getenv("PAIR_FD")) {
        peer_fd = atoi(getenv("PAIR_FD"));
        side = opt.leave ? 0 : 1;
        return 0;
    }
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv) < 0)
        die("socketpair", errno);
    pid = fork();
    if (pid == 0) {
        char text[16];

        snprintf(text, sizeof(text), "%d", sv[1]);
        setenv("PAIR_FD", text, 1);
        close(sv[0]);
        if (getenv("PAIR_NICS_B"))
            setenv("R2CCL_NICS", getenv("PAIR_NICS_B"), 1);
        execv("/proc/self/exe", argv);
        _exit(127);
    }
    close(sv[1]);
    peer_fd = sv[0];
    side = opt.leave ? 1 : 0;
    return pid;
}

static void by_hand(void)
{
    const char *where = opt.listen ? opt.listen : opt.dial;
    char host[64];
    const char *colon = strrchr(where, ':');
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *ai;
    int fd, one = 1;

    if (!colon || (size_t)(colon - where) >= sizeof(host))
        die("ADDRESS:PORT expected", EINVAL);
    snprintf(host, sizeof(host), "%.*s", (int)(colon - where), where);
    if (getaddrinfo(host, colon + 1, &hints, &ai))
        die(where, EADDRNOTAVAIL);
    fd = socket(ai->ai_family, SOCK_STREAM, 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (opt.listen) {
        if (bind(fd, ai->ai_addr, ai->ai_addrlen) < 0 || listen(fd, 1) < 0)
            die("listen", errno);
        peer_fd = accept(fd, NULL, NULL);
    } else {
        side = 1;
        if (!WITHIN_MS(10000, connect(fd, ai->ai_addr, ai->ai_addrlen) == 0))
            die("dial", errno);
        peer_fd = fd;
    }
    freeaddrinfo(ai);
}

static uint64_t parse_size(const char *text)
{
    char *end;
    uint64_t v = strtoull(text, &end, 10);

    return *end == 'K' ? v << 10 : *end == 'M' ? v << 20 : *end == 'G' ? v << 30 : v;
}

static const struct option longs[] = {{"size", 1, 0, 's'},       {"count", 1, 0, 'n'},
                                      {"conns", 1, 0, 'c'},      {"outstanding", 1, 0, 'o'},
                                      {"faults", 1, 0, 'f'},     {"bidir", 0, 0, 'b'},
                                      {"no-check", 0, 0, 'k'},   {"random-sizes", 0, 0, 'r'},
                                      {"stall", 1, 0, 'S'},      {"listen", 1, 0, 'l'},
                                      {"dial", 1, 0, 'd'},       {"register", 0, 0, 'R'},
                                      {"until-told", 0, 0, 'u'}, {"device", 0, 0, 'D'},
                                      {"leave", 0, 0, 'L'},      {0, 0, 0, 0}};

static void parse(int argc, char **argv)
{
    int o;

    while ((o = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        switch (o) {
        case 's':
            opt.size = parse_size(optarg);
            break;
        case 'n':
            opt.count = strtoull(optarg, NULL, 10);
            break;
        case 'c':
            opt.conns = atoi(optarg);
            break;
        case 'o':
            opt.outstanding = atoi(optarg);
            break;
        case 'f':
            opt.faults = true;
            opt.fault_seed = strtoull(optarg, NULL, 10);
            break;
        case 'b':
            opt.bidir = true;
            break;
        case 'k':
            opt.check = false;
            break;
        case 'r':
            opt.random_sizes = true;
            break;
        case 'S':
            opt.stall = atoi(optarg);
            break;
        case 'l':
            opt.listen = optarg;
            break;
        case 'd':
            opt.dial = optarg;
            break;
        case 'D':
            opt.device = true;
            break;
        case 'L':
            opt.leave = true;
            break;
        case 'R':
            opt.register_memory = true;
            break;
        case 'u':
            opt.until_told = true;
            opt.count = UINT64_MAX;
            break;
        default:
            exit(2);
        }
    }
}

static void check_options(void)
{
    if (opt.conns < 1 || opt.conns > MAX_CONNS || opt.outstanding < 1 || opt.outstanding > 32) {
        fprintf(stderr, "pair: 1 to %d connections, 1 to 32 outstanding\n", MAX_CONNS);
        exit(2);
    }
}

static void await_begin(void)
{
    const char *file = getenv("PAIR_BEGIN");

    if (file && side == 0 && !WITHIN_MS(60000, access(file, F_OK) == 0))
        die(file, ENOENT);
}

static int run(sigset_t *usr1)
{
    pthread_t watcher, monkey, steward;
    uint64_t begin, ns;
    struct rusage use;
    int bad = 0;
    char go = 1;

    for (int i = 0; i < opt.conns; i++) {
        for (int dir = 0; dir <= (opt.bidir ? 1 : 0); dir++) {
            struct flow *f = &flows[nflows++];

            f->send = (dir == 0) == (side == 0);
            f->index = 2 * i + dir;
            atomic_store(&f->count, opt.count);
            f->conn = make_conn(f->index, f->send);
        }
    }
    await_begin();
    xfer(&go, 1, true);
    xfer(&go, 1, false);
    begin = r2_now_ns();
    pthread_create(&watcher, NULL, watch, NULL);
    if (opt.until_told)
        pthread_create(&steward, NULL, until_told, usr1);
    if (opt.faults)
        pthread_create(&monkey, NULL, chaos, NULL);
    for (int i = 0; i < nflows; i++)
        pthread_create(&flows[i].thread, NULL, run_flow, &flows[i]);
    for (int i = 0; i < nflows; i++) {
        pthread_join(flows[i].thread, NULL);
        if (flows[i].rc) {
            fprintf(stderr, "pair[%d]: connection %d %s: %s\n", side, flows[i].index,
                    flows[i].send ? "send" : "recv", strerror(-flows[i].rc));
            bad = 1;
        }
    }
    ns = r2_now_ns() - begin;
    atomic_store(&stop, true);
    if (opt.until_told && !bad)
        pthread_join(steward, NULL);
    if (opt.faults)
        pthread_join(monkey, NULL);
    getrusage(RUSAGE_SELF, &use);
    if (atomic_load(&moved))
        printf("{\"side\": %d, \"bytes\": %lu, \"seconds\": %.6f, \"GBps\": %.4f, \"wrong\": %lu, "
               "\"cpu_s\": %.3f}\n",
               side, (unsigned long)atomic_load(&moved), (double)ns / 1e9,
               (double)atomic_load(&moved) / (double)ns, (unsigned long)atomic_load(&wrong),
               (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) +
                   (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) / 1e6);
    fflush(stdout);
    /* Leave together: a process that exits takes its acknowledgements with it. */
    if (!opt.leave) {
        xfer(&go, 1, true);
        xfer(&go, 1, false);
    }
    return bad || atomic_load(&wrong) ? 1 : 0;
}

int main(int argc, char **argv)
{
    int pid = 0, rc, status = 0;
    sigset_t usr1;

    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &usr1, NULL); /* before any thread: only sigwait takes it */
    parse(argc, argv);
    check_options();
    if (opt.listen || opt.dial)
        by_hand();
    else
        pid = parent_or_peer(argc, argv);
    rc = r2_engine_init(&ctx, 1, NULL);
    if (rc)
        die("init", rc);
    r2_engine_devices(&ndev);
    if (ndev < 1)
        die("no NIC; set R2CCL_NICS", ENODEV);
    rc = run(&usr1);
    r2_engine_finalize(ctx);
    if (pid > 0 && (waitpid(pid, &status, 0) < 0 || !WIFEXITED(status) || WEXITSTATUS(status)))
        rc = rc ? rc : 1;
    return rc;
}
