/* How long a small message takes from one polling thread to another: there and back, over and over,
 * through the engine or over one TCP connection that the same two threads read and write.
 *
 *   R2CCL_NICS=127.0.1.1 hop --listen 127.0.1.1:7000 [--raw]
 *   R2CCL_NICS=127.0.1.1 hop --dial 127.0.1.1:7000 [--raw] [--size 8] [--iters 20000]
 *
 * The thread that polls is pinned, the listener's to the first processor that it may use, the other
 * one's to the second; the engine's own go where they like. Up to 4 receives are posted ahead, as
 * NCCL has them. The dialling side prints a line of JSON: microseconds of one way, and processors'
 * worth of CPU time that its process spent. Every message carries its number, which is checked.
 * Exit codes: 1 a wrong one or an error, 2 usage, and SIGALRM ends it after 60 s.
 */
#define _GNU_SOURCE
#include <getopt.h>
#include <netinet/tcp.h>
#include <sched.h>

#include "engine/engine.h"
#include "harness.h"

#define AHEAD 4
#define MOST (1 << 20)

static const char *where;
static bool dial, raw;
static uint64_t size = 8, iters = 20000;
static int control;
static uint8_t out[MOST], in[AHEAD][MOST];

static struct r2_ctx *ctx;
static struct r2_conn *conn[2]; /* to the listener, from it */
static struct r2_mr *mr[2];
static struct r2_req *posted[AHEAD];
static uint64_t head, tail, total;

static void pin(int nth)
{
    cpu_set_t set, one;

    if (sched_getaffinity(0, sizeof(set), &set))
        return;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &set) && nth-- == 0)
            CPU_SET(cpu, &one);
    }
    if (CPU_COUNT(&one))
        sched_setaffinity(0, sizeof(one), &one);
}

static void check(const uint8_t *data, uint64_t number)
{
    if (memcmp(data, &number, size < 8 ? size : 8) != 0)
        bench_die("message %llu is another one", (unsigned long long)number);
}

/* ---- raw */

static void raw_send(uint64_t number)
{
    memcpy(out, &number, 8);
    bench_put(control, out, size);
}

static void raw_receive(uint64_t number)
{
    for (size_t off = 0; off < size;) {
        ssize_t n = recv(control, in[0] + off, size - off, MSG_DONTWAIT);

        if (n == 0 || (n < 0 && errno != EAGAIN))
            bench_die("the other side is gone: %s", n ? strerror(errno) : "closed");
        off += n > 0 ? (size_t)n : 0;
    }
    check(in[0], number);
}

/* ---- the engine */

static void must(int rc, const char *what)
{
    if (rc)
        bench_die("%s: %s", what, strerror(-rc));
}

static void open_conn(int way)
{
    bool sends = dial == (way == 0);
    char handle[R2_HANDLE_BYTES];
    struct r2_listen *l = NULL;

    if (sends) {
        bench_get(control, handle, sizeof(handle));
    } else {
        must(r2_engine_listen(ctx, 0, handle, &l), "listen");
        bench_put(control, handle, sizeof(handle));
    }
    while (!conn[way]) {
        must(sends ? r2_engine_connect(ctx, 0, handle, &conn[way])
                   : r2_engine_accept(l, &conn[way]),
             "connection");
        usleep(200);
    }
    if (l)
        r2_engine_close_listen(l);
    must(r2_engine_reg(conn[way], sends ? out : in[0], sends ? sizeof(out) : sizeof(in), 1,
                       &mr[way]),
         "register");
}

static void test(struct r2_req *req)
{
    size_t got;
    int done = 0;

    while (!done)
        must(r2_engine_test(req, &done, &got), "test");
}

static void engine_send(uint64_t number)
{
    struct r2_req *req = NULL;

    memcpy(out, &number, 8);
    while (!req)
        must(r2_engine_isend(conn[!dial], out, size, 0, mr[!dial], &req), "isend");
    test(req);
}

static void post(void)
{
    for (; tail < total && tail - head < AHEAD; tail++) {
        struct r2_req **req = &posted[tail % AHEAD];

        must(r2_engine_irecv(conn[dial], in[tail % AHEAD], size, 0, mr[dial], req), "irecv");
        if (!*req)
            return;
    }
}

static void engine_receive(uint64_t number)
{
    post();
    test(posted[head % AHEAD]);
    check(in[head % AHEAD], number);
    head++;
}

static void engine_close(void)
{
    bench_barrier(control);
    for (int way = 0; way < 2; way++) {
        r2_engine_dereg(conn[way], mr[way]);
        r2_engine_close(conn[way]);
    }
    bench_barrier(control);
    r2_engine_finalize(ctx);
}

/* ---- */

static void there_and_back(uint64_t number)
{
    void (*put)(uint64_t) = raw ? raw_send : engine_send;
    void (*get)(uint64_t) = raw ? raw_receive : engine_receive;

    if (dial)
        put(number);
    get(number);
    if (!dial)
        put(number);
}

static void parse(int argc, char **argv)
{
    static const struct option longs[] = {{"listen", 1, 0, 'l'}, {"dial", 1, 0, 'd'},
                                          {"raw", 0, 0, 'r'},    {"size", 1, 0, 'z'},
                                          {"iters", 1, 0, 'i'},  {0}};
    int o;

    while ((o = getopt_long(argc, argv, "", longs, NULL)) != -1) {
        if (o == 'l' || o == 'd')
            where = optarg;
        if (o == 'd')
            dial = true;
        else if (o == 'r')
            raw = true;
        else if (o == 'z')
            size = bench_number("--size", optarg, 1, MOST);
        else if (o == 'i')
            iters = bench_number("--iters", optarg, 10, 100000000);
        else if (o != 'l')
            exit(2);
    }
    if (optind < argc)
        bench_usage("not an option:", argv[optind]);
    if (!where)
        bench_usage("needed: --listen or --dial; given", "neither");
}

int main(int argc, char **argv)
{
    uint64_t warmup, begun;
    double cpu;
    int one = 1, nics;

    parse(argc, argv);
    alarm(60);
    control = bench_meet(where, dial);
    setsockopt(control, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    bench_agree(control, dial, &size);
    bench_agree(control, dial, &iters);
    if (!raw) {
        must(r2_engine_init(&ctx, 1, NULL), "init");
        r2_engine_devices(&nics);
        if (nics < 1)
            bench_die("no NIC: set R2CCL_NICS");
        open_conn(0);
        open_conn(1);
    }
    warmup = iters / 10;
    total = iters + warmup;
    pin(dial);
    for (uint64_t i = 0; i < warmup; i++)
        there_and_back(i);
    begun = bench_now();
    cpu = bench_cpu();
    for (uint64_t i = 0; i < iters; i++)
        there_and_back(warmup + i);
    begun = bench_now() - begun;
    cpu = bench_cpu() - cpu;
    if (dial)
        printf("{\"us\": %.3f, \"cpus\": %.3f}\n", (double)begun / 2e3 / (double)iters,
               cpu * 1e9 / (double)begun);
    if (!raw)
        engine_close();
    return 0;
}
