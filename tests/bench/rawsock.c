/* Raw TCP between two processes: what the plugin is compared with. The same message and buffer
 * sizes, streams per NIC, threads and socket options as the plugin has, and nothing else.
 *
 *   rawsock --listen 10.250.0.2:7000 --nic 10.1.0.2%nic0 --nic 10.2.0.2%nic1
 *   rawsock --dial 10.250.0.2:7000 --nic 10.1.0.1%nic0 --nic 10.2.0.1%nic1 --bytes 256M
 *
 * The receiver listens, the sender dials and says what to do: --streams N per NIC (1); --threads N
 * (1, of each side); --size N per message (1M); --outstanding N buffers in turn per stream (4);
 * --bytes N per iteration, or --seconds N instead; --iters N (3); --warmup N bytes before (16M).
 * NIC i of one side talks to NIC i of the other; %DEVICE binds to the device as well. All streams
 * of an iteration take their messages from one pool, so that unequal NICs end together.
 *
 * The sender prints a line of JSON per iteration: bytes, seconds, GB/s, and the CPU seconds of
 * both sides. The clock runs at the receiver, from telling the sender to go until the last byte.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/epoll.h>

#include "harness.h"

#define MAX_NICS 16
#define MAX_STREAMS 64 /* per NIC */
#define MAX_THREADS 64
#define NOTSENT (256 * 1024) /* as the plugin's bulk sockets */
#define LOOK_MS 5            /* how soon a thread without traffic sees that all is done */

struct nic {
    char device[32];
    struct sockaddr_storage addr;
    socklen_t len;
};

static struct nic nics[MAX_NICS];
static int nic_count, control;
static const char *where;
static bool dial;

/* What the sender says. */
static struct order {
    uint64_t size, bytes, warmup;
    uint64_t outstanding, streams, threads, iters;
    double seconds; /* instead of bytes; 0: bytes */
    uint64_t nics;
} order = {.size = 1 << 20,
           .bytes = 256 << 20,
           .warmup = 16 << 20,
           .outstanding = 4,
           .streams = 1,
           .threads = 1,
           .iters = 3};

struct stream {
    int fd;
    uint8_t *buffers;
    uint64_t done; /* bytes so far: place in the buffers */
    uint64_t left; /* sender: bytes of the current message that have not been written */
};

static struct stream streams[MAX_NICS * MAX_STREAMS];
static int stream_count;

static struct {
    atomic_uint_fast64_t pool;   /* sender: bytes that no stream has taken yet */
    atomic_uint_fast64_t moved;  /* bytes written or read in this iteration */
    atomic_uint_fast64_t target; /* receiver: all bytes of this iteration, once known */
    atomic_uint_fast64_t last;   /* receiver: when a byte last came */
    uint64_t until;              /* sender: takes no message after this; 0: no limit */
} now;

static void parse_nic(const char *text)
{
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM}, *ai;
    const char *device = strchr(text, '%');
    char host[64];
    struct nic *n = &nics[nic_count];

    if (nic_count == MAX_NICS)
        bench_usage("too many NICs at", text);
    snprintf(host, sizeof(host), "%.*s", (int)(device ? device - text : (long)strlen(text)), text);
    if (getaddrinfo(host, NULL, &hints, &ai))
        bench_usage("--nic", text);
    memcpy(&n->addr, ai->ai_addr, ai->ai_addrlen);
    n->len = ai->ai_addrlen;
    freeaddrinfo(ai);
    if (device)
        snprintf(n->device, sizeof(n->device), "%s", device + 1);
    nic_count++;
}

static int nic_socket(const struct nic *n)
{
    int fd = socket(n->addr.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;

    if (fd < 0)
        bench_die("socket: %s", strerror(errno));
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (n->device[0] &&
        setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, n->device, (socklen_t)strlen(n->device)) < 0)
        bench_die("cannot bind to device %s: %s", n->device, strerror(errno));
    if (bind(fd, (const struct sockaddr *)&n->addr, n->len) < 0)
        bench_die("cannot bind to the address of NIC %ld: %s", (long)(n - nics), strerror(errno));
    return fd;
}

static void add_stream(int fd)
{
    struct stream *s = &streams[stream_count++];
    int one = 1, notsent = NOTSENT;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    if (dial)
        setsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &notsent, sizeof(notsent));
    s->fd = fd;
    s->buffers = aligned_alloc(4096, (order.size * order.outstanding + 4095) & ~UINT64_C(4095));
    if (!s->buffers)
        bench_die("no memory for %llu buffers of %llu bytes", (unsigned long long)order.outstanding,
                  (unsigned long long)order.size);
    memset(s->buffers, stream_count, order.size * order.outstanding);
}

/* The receiver's part: tells its addresses and ports, and accepts. */
static void accept_streams(void)
{
    for (int i = 0; i < nic_count; i++) {
        int listener = nic_socket(&nics[i]);
        struct nic at = nics[i];
        struct timeval limit = {.tv_sec = BENCH_MEET_S};

        at.len = sizeof(at.addr);
        setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        if (listen(listener, MAX_STREAMS) < 0 ||
            getsockname(listener, (struct sockaddr *)&at.addr, &at.len) < 0)
            bench_die("listen: %s", strerror(errno));
        bench_put(control, &at, sizeof(at));
        for (uint64_t s = 0; s < order.streams; s++) {
            int fd = accept(listener, NULL, NULL);

            if (fd < 0)
                bench_die("no stream came to NIC %d: %s", i, strerror(errno));
            add_stream(fd);
        }
        close(listener);
    }
}

static void connect_streams(void)
{
    for (int i = 0; i < nic_count; i++) {
        struct nic at;

        bench_get(control, &at, sizeof(at));
        for (uint64_t s = 0; s < order.streams; s++) {
            int fd = nic_socket(&nics[i]);

            if (connect(fd, (const struct sockaddr *)&at.addr, at.len) < 0)
                bench_die("NIC %d cannot connect: %s", i, strerror(errno));
            add_stream(fd);
        }
    }
}

/* The next message for a stream, at most `size` bytes of the pool; false: there is none. */
static bool take(struct stream *s)
{
    uint64_t there = atomic_load(&now.pool), part;

    if (now.until && bench_now() >= now.until)
        return false;
    do {
        part = there < order.size ? there : order.size;
        if (!part)
            return false;
    } while (!atomic_compare_exchange_weak(&now.pool, &there, there - part));
    s->left = part;
    return true;
}

/* Moves what goes without waiting. False: nothing is left to do for this stream. */
static bool push(struct stream *s)
{
    while (s->left || take(s)) {
        uint64_t at = s->done % (order.size * order.outstanding),
                 len = order.size - at % order.size;
        ssize_t n = send(s->fd, s->buffers + at, len < s->left ? len : s->left,
                         MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return true;
        if (n <= 0)
            bench_die("send: %s", strerror(errno));
        s->left -= (uint64_t)n;
        s->done += (uint64_t)n;
        atomic_fetch_add(&now.moved, (uint64_t)n);
    }
    return false;
}

static bool pull(struct stream *s)
{
    uint64_t got = 0;

    for (;;) {
        uint64_t at = s->done % (order.size * order.outstanding);
        ssize_t n = recv(s->fd, s->buffers + at, order.size - at % order.size, MSG_DONTWAIT);

        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (n <= 0)
            bench_die("recv: %s", n ? strerror(errno) : "closed");
        s->done += (uint64_t)n;
        got += (uint64_t)n;
    }
    if (got) {
        atomic_store(&now.last, bench_now());
        atomic_fetch_add(&now.moved, got);
    }
    return true;
}

/* One thread: every stream whose number is its own, modulo the threads. */
static void *work(void *arg)
{
    int mine = (int)(intptr_t)arg, epoll = epoll_create1(EPOLL_CLOEXEC), open = 0;
    struct epoll_event ev[MAX_NICS * MAX_STREAMS];

    for (int i = mine; i < stream_count; i += (int)order.threads) {
        struct epoll_event want = {.events = dial ? EPOLLOUT : EPOLLIN, .data.ptr = &streams[i]};

        if (epoll_ctl(epoll, EPOLL_CTL_ADD, streams[i].fd, &want) < 0)
            bench_die("epoll: %s", strerror(errno));
        open++;
    }
    while (open && (dial || atomic_load(&now.moved) < atomic_load(&now.target))) {
        int n = epoll_wait(epoll, ev, MAX_NICS * MAX_STREAMS, LOOK_MS);

        for (int i = 0; i < n; i++) {
            struct stream *s = ev[i].data.ptr;

            if (dial ? push(s) : pull(s))
                continue;
            epoll_ctl(epoll, EPOLL_CTL_DEL, s->fd, NULL);
            open--;
        }
    }
    close(epoll);
    return NULL;
}

static void start(pthread_t *threads)
{
    for (uint64_t i = 0; i < order.threads; i++) {
        if (pthread_create(&threads[i], NULL, work, (void *)(intptr_t)i))
            bench_die("cannot start a thread");
    }
}

static void join(pthread_t *threads)
{
    for (uint64_t i = 0; i < order.threads; i++)
        pthread_join(threads[i], NULL);
}

/* iteration 0 is the warm-up. */
static void send_iteration(uint64_t iteration)
{
    pthread_t threads[MAX_THREADS];
    struct bench_result r;
    uint64_t sum;
    double cpu;
    char go;

    bench_get(control, &go, 1);
    cpu = bench_cpu();
    now.until = 0;
    if (iteration && order.seconds > 0)
        now.until = bench_now() + (uint64_t)(order.seconds * 1e9);
    atomic_store(&now.moved, 0);
    atomic_store(&now.pool, !iteration ? order.warmup : now.until ? UINT64_MAX : order.bytes);
    start(threads);
    join(threads);
    sum = atomic_load(&now.moved);
    bench_put(control, &sum, sizeof(sum));
    bench_get(control, &r, sizeof(r));
    if (r.bytes != sum)
        bench_die("%llu bytes were sent, %llu came", (unsigned long long)sum,
                  (unsigned long long)r.bytes);
    if (iteration)
        bench_print((int)iteration, &r, bench_cpu() - cpu);
}

static void receive_iteration(void)
{
    pthread_t threads[MAX_THREADS];
    struct bench_result r = {0};
    double cpu = bench_cpu();
    uint64_t begin, sum;
    char go = 1;

    atomic_store(&now.moved, 0);
    atomic_store(&now.target, UINT64_MAX);
    begin = bench_now();
    atomic_store(&now.last, begin);
    bench_put(control, &go, 1);
    start(threads);
    bench_get(control, &sum, sizeof(sum));
    atomic_store(&now.target, sum);
    join(threads);
    r.bytes = atomic_load(&now.moved);
    r.ns = atomic_load(&now.last) - begin;
    r.cpu_s = bench_cpu() - cpu;
    bench_put(control, &r, sizeof(r));
}

static void parse_one(int o)
{
    switch (o) {
    case 'l':
    case 'd':
        where = optarg;
        dial = o == 'd';
        break;
    case 'n':
        parse_nic(optarg);
        break;
    case 's':
        order.streams = bench_number("--streams", optarg, 1, MAX_STREAMS);
        break;
    case 't':
        order.threads = bench_number("--threads", optarg, 1, MAX_THREADS);
        break;
    case 'z':
        order.size = bench_number("--size", optarg, 1, 1 << 28);
        break;
    case 'o':
        order.outstanding = bench_number("--outstanding", optarg, 1, 32);
        break;
    case 'b':
        order.bytes = bench_number("--bytes", optarg, 1, UINT64_C(1) << 50);
        break;
    case 'w':
        order.warmup = bench_number("--warmup", optarg, 0, UINT64_C(1) << 40);
        break;
    case 'i':
        order.iters = bench_number("--iters", optarg, 1, 1000000);
        break;
    case 'S':
        order.seconds = (double)bench_number("--seconds", optarg, 1, 86400);
        break;
    default:
        exit(2);
    }
}

int main(int argc, char **argv)
{
    static const struct option longs[] = {
        {"listen", 1, 0, 'l'},  {"dial", 1, 0, 'd'},        {"nic", 1, 0, 'n'},
        {"streams", 1, 0, 's'}, {"threads", 1, 0, 't'},     {"size", 1, 0, 'z'},
        {"bytes", 1, 0, 'b'},   {"outstanding", 1, 0, 'o'}, {"warmup", 1, 0, 'w'},
        {"iters", 1, 0, 'i'},   {"seconds", 1, 0, 'S'},     {0}};
    int o;

    while ((o = getopt_long(argc, argv, "", longs, NULL)) != -1)
        parse_one(o);
    if (optind < argc)
        bench_usage("not an option:", argv[optind]);
    if (!where || !nic_count)
        bench_usage("needed: --nic, and --listen or --dial; given", where ? where : "neither");
    control = bench_meet(where, dial);
    if (dial) {
        order.nics = (uint64_t)nic_count;
        bench_put(control, &order, sizeof(order));
        connect_streams();
    } else {
        bench_get(control, &order, sizeof(order));
        if (order.nics != (uint64_t)nic_count)
            bench_die("%d NICs here, %llu at the sender: give the same number of --nic", nic_count,
                      (unsigned long long)order.nics);
        accept_streams();
    }
    for (uint64_t i = 0; i <= order.iters; i++) {
        if (dial)
            send_iteration(i);
        else
            receive_iteration();
    }
    bench_barrier(control);
    return 0;
}
