/* Messages of several connections at once, there and back, between one polling thread of each of
 * two processes, through any net plugin, as NCCL's thread drives it: how long one takes.
 *
 *   R2CCL_NICS=127.0.1.1 crowd --plugin FILE --listen 127.0.1.1:7000
 *   R2CCL_NICS=127.0.1.1 crowd --plugin FILE --dial 127.0.1.1:7000 [--conns 2] [--window 1]
 *                              [--size 512K] [--iters 2000]
 *
 * FILE is loaded by net API v6, which ours and Google's FastSocket offer. Connection k is of device
 * k modulo their number; each has `window` messages on their way, and whoever receives one sends
 * one. Every message carries its number at both ends, which are checked. The dialling side prints a
 * line of JSON: microseconds of half of there and back (median and 90th percentile), GB/s each way,
 * microseconds of a call of isend, processors' worth of CPU time of its process.
 * Exit codes: 1 a wrong message or an error, 2 usage, and SIGALRM ends it after 60 s.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <getopt.h>
#include <netinet/tcp.h>

#include "harness.h"
#include "nccl_abi/nccl_net_abi.h"

#define CONNS 16
#define HANDLE 128 /* bytes, of all net APIs */
#define WINDOW 8
#define MOST (4 << 20)

static const char *where, *plugin;
static bool dial;
static uint64_t conns = 2, window = 1, size = 512 << 10, iters = 2000;
static int control;
static const struct r2_ncclnet_v6 *net;

/* One way of a connection. */
struct way {
    void *comm, *mr;
    uint8_t *data; /* WINDOW messages */
    void *req[WINDOW];
    uint64_t posted, done;
};

static struct conn {
    void *listening;
    struct way out, in;
    uint64_t may; /* messages that may be sent */
    uint64_t sent_at[WINDOW];
} all[CONNS];

static uint64_t *took, n_took, in_isend;

static void quiet(int level, unsigned long flags, const char *file, int line, const char *fmt, ...)
{
    va_list args;

    (void)flags, (void)file, (void)line;
    if (level > R2_NCCL_LOG_WARN)
        return;
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    fputc('\n', stderr);
    va_end(args);
}

static void must(int rc, const char *what)
{
    if (rc)
        bench_die("%s: ncclResult %d", what, rc);
}

static void load(int *devices)
{
    void *lib = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);

    if (!lib)
        bench_die("%s", dlerror());
    net = dlsym(lib, "ncclNetPlugin_v6");
    if (!net)
        bench_die("%s has no net plugin of API v6", plugin);
    must(net->init(quiet), "init");
    must(net->devices(devices), "devices");
    if (*devices < 1)
        bench_die("no NIC: set R2CCL_NICS, or what %s reads", plugin);
}

static void buffers(struct way *w)
{
    size_t len = (WINDOW * size + 4095) / 4096 * 4096;

    w->data = aligned_alloc(4096, len);
    if (!w->data)
        bench_die("no memory for %zu bytes", len);
    memset(w->data, 0, len);
    must(net->regmr(w->comm, w->data, (int)len, R2_NCCL_PTR_HOST, &w->mr), "register");
}

static void open_all(int devices)
{
    char mine[CONNS][HANDLE], theirs[CONNS][HANDLE];

    memset(mine, 0, sizeof(mine));
    for (uint64_t k = 0; k < conns; k++)
        must(net->listen((int)k % devices, mine[k], &all[k].listening), "listen");
    bench_put(control, mine, sizeof(mine));
    bench_get(control, theirs, sizeof(theirs));
    for (bool missing = true; missing;) {
        missing = false;
        for (uint64_t k = 0; k < conns; k++) {
            struct conn *c = &all[k];

            if (!c->out.comm)
                must(net->connect((int)k % devices, theirs[k], &c->out.comm), "connect");
            if (!c->in.comm)
                must(net->accept(c->listening, &c->in.comm), "accept");
            missing |= !c->out.comm || !c->in.comm;
        }
    }
    for (uint64_t k = 0; k < conns; k++) {
        buffers(&all[k].out);
        buffers(&all[k].in);
        all[k].may = dial ? window : 0;
    }
}

static void stamp(uint8_t *data, uint64_t number)
{
    memcpy(data, &number, 8);
    memcpy(data + size - 8, &number, 8);
}

static void check(const uint8_t *data, uint64_t number)
{
    if (memcmp(data, &number, 8) || memcmp(data + size - 8, &number, 8))
        bench_die("message %llu is another one", (unsigned long long)number);
}

static bool came(struct way *w)
{
    int done = 0, sizes[8] = {0};
    uint64_t at = w->done % WINDOW;

    if (w->done == w->posted)
        return false;
    must(net->test(w->req[at], &done, sizes), "test");
    if (!done)
        return false;
    w->req[at] = NULL;
    w->done++;
    return true;
}

static void send_some(struct conn *c)
{
    struct way *w = &c->out;
    uint64_t at = w->posted % WINDOW, from;

    if (w->posted == iters || w->posted == c->may || w->posted == w->done + WINDOW)
        return;
    stamp(w->data + at * size, w->posted);
    from = bench_now();
    must(net->isend(w->comm, w->data + at * size, (int)size, 0, w->mr, &w->req[at]), "isend");
    if (!w->req[at])
        return;
    in_isend += bench_now() - from;
    c->sent_at[at] = from;
    w->posted++;
}

static void post_some(struct way *w)
{
    uint64_t at = w->posted % WINDOW, ahead = window < 4 ? 4 : window;
    void *data = w->data + at * size;
    int len = (int)size, tag = 0;

    if (w->posted == iters || w->posted == w->done + ahead)
        return;
    must(net->irecv(w->comm, 1, &data, &len, &tag, &w->mr, &w->req[at]), "irecv");
    w->posted += w->req[at] != NULL;
}

/* True: nothing of it is left. */
static bool turn(struct conn *c)
{
    post_some(&c->in);
    send_some(c);
    came(&c->out);
    if (came(&c->in)) {
        uint64_t number = c->in.done - 1;

        check(c->in.data + number % WINDOW * size, number);
        if (dial)
            took[n_took++] = bench_now() - c->sent_at[number % WINDOW];
        c->may++;
    }
    return c->in.done == iters && c->out.done == iters;
}

static void parse(int argc, char **argv)
{
    static const struct option longs[] = {
        {"plugin", 1, 0, 'p'}, {"listen", 1, 0, 'l'}, {"dial", 1, 0, 'd'},  {"conns", 1, 0, 'k'},
        {"window", 1, 0, 'w'}, {"size", 1, 0, 'z'},   {"iters", 1, 0, 'i'}, {0}};
    int o;

    while ((o = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (o == 'l' || o == 'd')
            where = optarg;
        if (o == 'd')
            dial = true;
        else if (o == 'p')
            plugin = optarg;
        else if (o == 'k')
            conns = bench_number("--conns", optarg, 1, CONNS);
        else if (o == 'w')
            window = bench_number("--window", optarg, 1, WINDOW);
        else if (o == 'z')
            size = bench_number("--size", optarg, 8, MOST);
        else if (o == 'i')
            iters = bench_number("--iters", optarg, 10, 10000000);
        else if (o != 'l')
            exit(2);
    }
    if (optind < argc)
        bench_usage("not an option:", argv[optind]);
    if (!where || !plugin)
        bench_usage("needed: --plugin, and --listen or --dial; missing", plugin ? "one" : "plugin");
}

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

static void report(uint64_t ns, double cpu)
{
    qsort(took, n_took, sizeof(*took), by_size);
    printf("{\"us\": %.3f, \"us_p90\": %.3f, \"gbs\": %.3f, \"isend_us\": %.3f, \"cpus\": %.3f}\n",
           (double)took[n_took / 2] / 2e3, (double)took[n_took * 9 / 10] / 2e3,
           (double)(size * conns * iters) / (double)ns,
           (double)in_isend / 1e3 / (double)(conns * iters), cpu * 1e9 / (double)ns);
}

static void close_all(void)
{
    bench_barrier(control);
    for (uint64_t k = 0; k < conns; k++) {
        struct conn *c = &all[k];

        must(net->deregmr(c->out.comm, c->out.mr), "deregister");
        must(net->deregmr(c->in.comm, c->in.mr), "deregister");
        must(net->close_send(c->out.comm), "close");
        must(net->close_recv(c->in.comm), "close");
        must(net->close_listen(c->listening), "close");
        free(c->out.data);
        free(c->in.data);
    }
    bench_barrier(control);
}

int main(int argc, char **argv)
{
    uint64_t begun;
    double cpu;
    int one = 1, devices;

    parse(argc, argv);
    alarm(60);
    control = bench_meet(where, dial);
    setsockopt(control, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    bench_agree(control, dial, &conns);
    bench_agree(control, dial, &window);
    bench_agree(control, dial, &size);
    bench_agree(control, dial, &iters);
    load(&devices);
    open_all(devices);
    took = malloc(sizeof(*took) * conns * iters);
    if (!took)
        bench_die("no memory for %llu times", (unsigned long long)(conns * iters));
    bench_barrier(control);
    begun = bench_now();
    cpu = bench_cpu();
    for (bool over = false; !over;) {
        over = true;
        for (uint64_t k = 0; k < conns; k++)
            over &= turn(&all[k]);
    }
    if (dial)
        report(bench_now() - begun, bench_cpu() - cpu);
    close_all();
    free(took);
    return 0;
}
